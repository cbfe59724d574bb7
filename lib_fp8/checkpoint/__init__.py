"""Checkpoint files as they lie on disk: what they say about themselves, and the bytes of single tensors."""
