"""What a picture shows, and which combinations the embedded model never saw while it was trained."""

from __future__ import annotations

from dataclasses import dataclass

SHAPES = ("circle", "square", "triangle", "cross")
PALETTE = {
    "red": (222, 32, 36),
    "green": (32, 166, 62),
    "blue": (32, 66, 222),
    "yellow": (248, 216, 40),
    "purple": (146, 48, 192),
    "cyan": (48, 208, 224),
    "white": (246, 246, 246),
    "black": (14, 14, 14),
}
"""The eight colours, as sRGB bytes."""
COLOURS = tuple(PALETTE)


@dataclass(frozen=True)
class Subject:
    """One shape of one colour on a background of another."""

    shape: str
    colour: str
    background: str


def stripe_tone(colour: str) -> tuple[int, int, int]:
    """The colour of the stripes on a background of `colour`: half way to a middle grey, so that all eight show them."""
    red, green, blue = ((part + 128) // 2 for part in PALETTE[colour])
    return red, green, blue


def is_held_out(shape: str, colour: str) -> bool:
    """Whether this shape is never shown in this colour in training: two colours a shape, one shape a colour."""
    return COLOURS.index(colour) // 2 == SHAPES.index(shape)


SUBJECTS = tuple(Subject(s, c, b) for s in SHAPES for c in COLOURS for b in COLOURS if b != c)
TRAINED = tuple(subject for subject in SUBJECTS if not is_held_out(subject.shape, subject.colour))
HELD_OUT = tuple(subject for subject in SUBJECTS if is_held_out(subject.shape, subject.colour))
