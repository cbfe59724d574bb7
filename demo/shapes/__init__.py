"""The world that the embedded model knows: one coloured shape on a coloured background; its words, and its judge."""
