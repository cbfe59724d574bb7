"""The judge reads what was drawn, also where the picture is worse than a drawing; they share no code."""

from __future__ import annotations

import ast

import numpy as np
import pytest
import torch
from helpers import ROOT
from scipy import ndimage

from demo.shapes import judge
from demo.shapes.drawing import Style, draw
from demo.shapes.subject import HELD_OUT, PALETTE, SHAPES, SUBJECTS, TRAINED, Subject, stripe_tone

PICTURES = list(SUBJECTS) * 2
ERRORS_ALLOWED = 0.01


def as_bytes(pictures: torch.Tensor) -> np.ndarray:
    return (pictures * 255).permute(0, 2, 3, 1).numpy()


def drawings(style: Style = Style(), side: int = 64, seed: int = 11) -> np.ndarray:  # noqa: B008
    generator = torch.Generator().manual_seed(seed)
    return as_bytes(draw(PICTURES, generator, [style] * len(PICTURES), side))


def noisy(picture, random):
    return picture + random.normal(0, 12, picture.shape)


def blurred(picture, random):
    return ndimage.gaussian_filter(picture, (1, 1, 0)) + random.normal(0, 6, picture.shape)


def tinted(picture, random):
    return picture * random.uniform(0.85, 1.0, 3) + random.uniform(0, 18, 3)


def bent(picture, random):
    """Every row and column is shifted by a wave of one and a half pixels."""
    rows, columns = np.mgrid[: len(picture), : picture.shape[1]]
    phase = random.uniform(0, 2 * np.pi, 2)
    places = [rows + 1.5 * np.sin(columns / 7 + phase[0]), columns + 1.5 * np.sin(rows / 7 + phase[1])]
    return np.stack([ndimage.map_coordinates(picture[..., k], places, order=1, mode="nearest") for k in range(3)], -1)


def untouched(picture, random):
    return picture


@pytest.mark.parametrize("distortion", [untouched, noisy, blurred, tinted, bent])
@pytest.mark.parametrize("style", [Style(), Style(True), Style(False, True), Style(True, True)], ids=str)
def test_error_below_one_percent(distortion, style):
    random = np.random.default_rng(0)
    wrong = [
        subject
        for subject, picture in zip(PICTURES, drawings(style))
        if not judge.read(distortion(picture, random).clip(0, 255)).follows(subject)
    ]
    assert len(wrong) / len(PICTURES) < ERRORS_ALLOWED, wrong[:5]


@pytest.mark.parametrize("side", [64, 128])
def test_styles_are_read(side):
    readings = {
        style: [judge.read(p) for p in drawings(style, side)] for style in (Style(), Style(True), Style(False, True))
    }
    hollow = {style: [reading.hollow for reading in found] for style, found in readings.items()}
    stripes = {style: [reading.stripes for reading in found] for style, found in readings.items()}
    assert max(hollow[Style()]) < 0.05
    assert min(hollow[Style(True)]) > 0.9
    assert max(map(abs, stripes[Style()])) < 0.02
    assert min(stripes[Style(False, True)]) > 0.95


def test_nothing_is_read_into_a_picture_without_a_shape():
    for colour in PALETTE.values():
        plain = np.full((64, 64, 3), colour, np.uint8)
        reading = judge.read(plain)
        assert reading.shape is None
        assert not any(reading.follows(subject) for subject in SUBJECTS)


def test_noise_and_halves_are_no_picture():
    random = np.random.default_rng(1)
    assert judge.read(random.integers(0, 256, (64, 64, 3))).shape is None
    halves = np.zeros((64, 64, 3), np.uint8)
    halves[:32] = PALETTE["red"]
    halves[32:] = PALETTE["blue"]
    assert judge.read(halves).background is None


def test_two_shapes_are_one_too_many():
    picture = np.full((64, 64, 3), PALETTE["white"], np.uint8)
    picture[8:24, 8:24] = picture[38:54, 38:54] = PALETTE["red"]
    assert judge.read(picture).shape is None


def circle_with(*spots, colour="red", stretch=1.0):
    """A circle on blue, with rectangles (rows, columns, colour) over it."""
    picture = np.full((64, 64, 3), PALETTE["blue"], np.uint8)
    rows, columns = np.mgrid[:64, :64]
    picture[(rows - 32) ** 2 * stretch + (columns - 32) ** 2 < 18**2] = (
        colour if isinstance(colour, tuple) else PALETTE[colour]
    )
    for place, name in spots:
        picture[place] = PALETTE[name]
    return picture


@pytest.mark.parametrize(
    "picture",
    [
        circle_with((np.s_[3:13, 3:18], "green")),
        circle_with((np.s_[28:36, 5:60], "black")),
        circle_with((np.s_[3:11, 3:12], "red"), (np.s_[53:61, 52:61], "red")),
        circle_with(stretch=3.5),
        circle_with(colour=stripe_tone("red")),
    ],
    ids=["another shape", "a bar over it", "spots", "flat", "a tone between"],
)
def test_almost_a_red_circle(picture):
    assert judge.read(circle_with()).follows(Subject("circle", "red", "blue"))
    assert not judge.read(picture).follows(Subject("circle", "red", "blue"))


def test_nothing_makes_it_fail():
    random = np.random.default_rng(2)
    for ground in PALETTE.values():
        for _ in range(60):
            picture = np.full((64, 64, 3), ground, np.uint8)
            picture[20:36, 20:36] = random.integers(0, 256, (16, 16, 3))
            assert judge.read(picture).overlap <= 1


def test_wrong_colour_shape_or_ground_does_not_follow():
    picture = drawings()[PICTURES.index(Subject("circle", "blue", "yellow"))]
    reading = judge.read(picture)
    assert reading.follows(Subject("circle", "blue", "yellow"))
    for other in (("square", "blue", "yellow"), ("circle", "cyan", "yellow"), ("circle", "blue", "white")):
        assert not reading.follows(Subject(*other))


def test_judge_knows_nothing_of_the_drawing():
    tree = ast.parse((ROOT / "demo" / "shapes" / "judge.py").read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert "demo.shapes.drawing" not in imported


def test_held_out_subjects_are_pairs_that_were_never_trained():
    trained = {(subject.shape, subject.colour) for subject in TRAINED}
    held_out = {(subject.shape, subject.colour) for subject in HELD_OUT}
    assert not trained & held_out
    assert len(held_out) == 2 * len(SHAPES)
    assert {shape for shape, _ in trained} == set(SHAPES)
    assert {colour for _, colour in trained} == set(PALETTE)
