"""Foreign code that touches 8-bit weights: every trap of the trap list, re-enacted against the plain library."""
