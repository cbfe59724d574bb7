"""Where the embedded model's files lie."""

from pathlib import Path

FOLDER = Path(__file__).resolve().parent
CHECKPOINT = FOLDER / "shapes-sd1.safetensors"
CLIP = FOLDER / "clip"
"""Tokenizer, and configuration of the text encoder."""
LORAS = FOLDER / "loras"
