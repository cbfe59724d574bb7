"""Reads a picture: shape, colours and the networks' effects. Knows the palette and four outlines, nothing else.

It shares no code with the drawing: outlines are polygons rasterised by Pillow, and colours are told by the nearest
reference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw
from scipy import ndimage

from demo.shapes.subject import COLOURS, PALETTE, Subject, stripe_tone

LEAST_OVERLAP = 0.7
"""Intersection over union with the named outline that a shape must have."""
_GRID = 48
_RING = 2
_LITTER = 0.1
"""Largest area of other spots and colours, against the shape's."""
_SMALLEST, _FLATTEST = 0.3, 1.4
"""Least extent of a shape, in sides, and largest proportion of its extents."""
_FINE = 8
"""Outlines are rasterised this many times finer, then averaged: half-covered pixels count as half."""

_POLYGONS: dict[str, list[tuple[float, float]]] = {
    "circle": [(0.5 + 0.5 * math.cos(a * math.pi / 48), 0.5 + 0.5 * math.sin(a * math.pi / 48)) for a in range(96)],
    "square": [(0, 0), (1, 0), (1, 1), (0, 1)],
    "triangle": [(0.5, 0), (1, 1), (0, 1)],
    "cross": [
        *((1 / 3, 0), (2 / 3, 0), (2 / 3, 1 / 3), (1, 1 / 3), (1, 2 / 3), (2 / 3, 2 / 3)),
        *((2 / 3, 1), (1 / 3, 1), (1 / 3, 2 / 3), (0, 2 / 3), (0, 1 / 3), (1 / 3, 1 / 3)),
    ],
}


@dataclass(frozen=True)
class Reading:
    """What the judge sees."""

    shape: str | None
    colour: str | None
    background: str | None
    overlap: float
    """Intersection over union with the best outline, both scaled to the shape's bounding box."""
    hollow: float
    """Share of the shape's inside that has the background's colour: 0 filled, near 1 outlined."""
    stripes: float
    """How far the background's striped rows are on the way to the stripe tone: 0 plain, 1 striped."""

    def follows(self, subject: Subject) -> bool:
        """Whether the picture shows the subject."""
        seen = (self.shape, self.colour, self.background)
        return seen == (subject.shape, subject.colour, subject.background) and self.overlap >= LEAST_OVERLAP


def _raster(polygon: list[tuple[float, float]]) -> np.ndarray:
    size = _GRID * _FINE
    image = Image.new("L", (size, size), 0)
    ImageDraw.Draw(image).polygon([(x * size, y * size) for x, y in polygon], fill=255)
    return np.asarray(image.resize((_GRID, _GRID), Image.Resampling.BOX)) > 127


_OUTLINES = {name: _raster(polygon) for name, polygon in _POLYGONS.items()}
_INSIDES = {name: ndimage.distance_transform_edt(np.pad(mask, 1))[1:-1, 1:-1] for name, mask in _OUTLINES.items()}
_CORES = {name: depth >= 0.75 * depth.max() for name, depth in _INSIDES.items()}
"""The innermost part of each outline, which an outlined shape leaves free."""
_REFERENCES = np.array([*PALETTE.values(), *(stripe_tone(name) for name in COLOURS)], dtype=float)
"""The palette, then the tones of stripes on each of its colours."""


def _labels(picture: np.ndarray) -> np.ndarray:
    """Index of the nearest reference for every pixel."""
    return ((picture[..., None, :] - _REFERENCES) ** 2).sum(-1).argmin(-1)


def _stripes(picture: np.ndarray, ground: np.ndarray, background: str) -> float:
    plain, tone = np.array(PALETTE[background], float), np.array(stripe_tone(background), float)
    axis = (tone - plain) / ((tone - plain) ** 2).sum()
    progress = ((picture - plain) @ axis).clip(-0.5, 1.5)
    height = len(picture)
    odd = (np.arange(height) * 8 // height % 2 == 1)[:, None] & ground
    even = ~(np.arange(height) * 8 // height % 2 == 1)[:, None] & ground
    if not odd.any() or not even.any():
        return 0.0
    return float(progress[odd].mean() - progress[even].mean())


def read(picture: np.ndarray) -> Reading:
    """Read a picture.

    Args:
        picture: uint8 or float (height, width, 3), 0 to 255.
    """
    picture = np.asarray(picture, dtype=float)
    labels = _labels(picture)
    edge = np.ones(labels.shape, bool)
    edge[_RING:-_RING, _RING:-_RING] = False
    counts = np.bincount(labels[edge] % len(COLOURS), minlength=len(COLOURS))
    ground = int(counts.argmax())
    if counts[ground] < 0.8 * counts.sum():
        return Reading(None, None, None, 0.0, 0.0, 0.0)
    other = labels % len(COLOURS) != ground
    counts = np.bincount(labels[other], minlength=len(_REFERENCES))[: len(COLOURS)]
    background = COLOURS[ground]
    stripes = _stripes(picture, ndimage.binary_erosion(~other, iterations=2, border_value=1), background)
    if counts.max(initial=0) < 0.01 * labels.size:
        return Reading(None, None, background, 0.0, 0.0, stripes)
    colour = int(counts.argmax())
    unclear = Reading(None, COLOURS[colour], background, 0.0, 0.0, stripes)
    # A pixel on the border of two colours is near neither: it belongs to the shape if it is nearer to the shape's.
    near = [((picture - np.array(PALETTE[COLOURS[index]])) ** 2).sum(-1) for index in (ground, colour)]
    near[0] = np.minimum(near[0], ((picture - np.array(stripe_tone(background))) ** 2).sum(-1))
    mask = near[1] < near[0]
    blobs, number = ndimage.label(mask, structure=np.ones((3, 3)))
    if number == 0:
        return unclear
    sizes = ndimage.sum_labels(mask, blobs, range(1, number + 1))
    foreign = ndimage.binary_opening(other & (labels != colour), structure=np.ones((3, 3)))
    if sizes.sum() - sizes.max() + foreign.sum() > _LITTER * sizes.max():
        return unclear
    mask = blobs == 1 + int(sizes.argmax())
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    height, width = rows[-1] - rows[0] + 1, columns[-1] - columns[0] + 1
    if min(height, width) < _SMALLEST * len(picture) or max(height, width) > _FLATTEST * min(height, width):
        return unclear
    box = mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    size = (_GRID, _GRID)
    scaled = np.asarray(Image.fromarray(box.astype(np.uint8) * 255).resize(size, Image.Resampling.BOX)) > 127
    whole = ndimage.binary_fill_holes(ndimage.binary_closing(np.pad(scaled, 4), iterations=3))[4:-4, 4:-4] | scaled
    overlaps = {name: (whole & outline).sum() / (whole | outline).sum() for name, outline in _OUTLINES.items()}
    shape = max(overlaps, key=overlaps.__getitem__)
    hollow = float((~scaled)[_CORES[shape]].mean())
    return Reading(shape, COLOURS[colour], background, float(overlaps[shape]), hollow, stripes)
