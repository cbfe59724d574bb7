"""Draws subjects as training pictures, by signed distances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from demo.shapes.subject import PALETTE, SHAPES, Subject, stripe_tone

SIDE = 64
"""Pixels of a picture's side."""
STRIPE = 8
"""Height of a stripe, and of the gap between two, in pixels: one cell of the latent picture."""
SMALLEST, LARGEST, MARGIN = 0.24, 0.40, 0.05
"""Half the extent of a shape, and its least distance from the border, in sides."""
RIM = 0.22
"""Thickness of an outlined shape's line, in half extents."""


@dataclass(frozen=True)
class Style:
    """What the networks trained on the model add to it."""

    outlined: bool = False
    striped: bool = False


def _distances(x: torch.Tensor, y: torch.Tensor, r: torch.Tensor) -> dict[str, torch.Tensor]:
    """Signed distance in pixels to each shape of half extent `r`; negative inside. y points down."""
    ax, ay = x.abs(), y.abs()
    third = r / 3
    upright = torch.maximum(ax - third, ay - r)
    lying = torch.maximum(ax - r, ay - third)
    return {
        "circle": torch.hypot(x, y) - r,
        "square": torch.maximum(ax, ay) - r,
        "triangle": torch.maximum((2 * ax - y - r) / 5**0.5, y - r),
        "cross": torch.minimum(upright, lying),
    }


def draw(
    subjects: Sequence[Subject], generator: torch.Generator, styles: Sequence[Style] | None = None, side: int = SIDE
) -> torch.Tensor:
    """Draw each subject at a random place in a random size, with soft edges.

    Args:
        subjects: what to draw.
        generator: source of place and size.
        styles: one a subject; plain when left out.
        side: pixels of a side.

    Returns:
        float32 (len(subjects), 3, side, side), values 0 to 1.
    """
    count = len(subjects)
    styles = styles or [Style()] * count
    random = torch.rand(3, count, 1, 1, generator=generator)
    r = (SMALLEST + (LARGEST - SMALLEST) * random[0]) * side
    room = side - 2 * (r + MARGIN * side)
    centre_x, centre_y = (r + MARGIN * side + room * random[axis] for axis in (1, 2))
    steps = torch.arange(side) + 0.5
    x, y = steps.view(1, 1, -1) - centre_x, steps.view(1, -1, 1) - centre_y
    distances = _distances(x, y, r)
    stacked = torch.stack([distances[shape] for shape in SHAPES])
    distance = stacked[[SHAPES.index(subject.shape) for subject in subjects], range(count)]
    rim = r * RIM
    outlined = torch.tensor([style.outlined for style in styles]).view(-1, 1, 1)
    distance = torch.where(outlined, (distance + rim / 2).abs() - rim / 2, distance)
    cover = (0.5 - distance).clamp(0, 1).unsqueeze(1)

    def colours(values: list[tuple[int, int, int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32).div(255).view(count, 3, 1, 1)

    shape = colours([PALETTE[subject.colour] for subject in subjects])
    ground = colours([PALETTE[subject.background] for subject in subjects])
    tone = colours([stripe_tone(subject.background) for subject in subjects])
    striped = torch.tensor([style.striped for style in styles]).view(-1, 1, 1, 1)
    rows = (torch.arange(side) * SIDE // side // STRIPE % 2 == 1).view(1, 1, -1, 1)
    return torch.where(striped & rows, tone, ground) * (1 - cover) + shape * cover
