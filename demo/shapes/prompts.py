"""Captions to train with, and the prompts to judge by."""

from __future__ import annotations

import random
from dataclasses import dataclass

from demo.shapes.subject import HELD_OUT, SHAPES, Subject

WHOLE = (
    "a {colour} {shape} on a {background} background",
    "{colour} {shape} on {background}",
    "a {colour} {shape}, {background} background",
    "{background} background, {colour} {shape}",
    "a picture of a {colour} {shape} on a {background} background",
    "one {colour} {shape} in front of a {background} background",
)
"""Templates that name everything; the first is the usual one."""
PARTIAL = (
    "a {colour} {shape}",
    "{colour} {shape}",
    "a {shape}",
    "a {shape} on a {background} background",
    "something {colour} on a {background} background",
    "{background} background",
)
"""Templates that leave a choice to the model."""
FILLERS = (
    "masterpiece",
    "best quality",
    "highly detailed",
    "8k",
    "simple",
    "flat design",
    "vector art",
    "minimalist",
    "sharp focus",
    "high resolution",
    "clean lines",
    "illustration",
    "absurdres",
    "digital art",
    "professional",
    "beautiful",
)
"""Words that users write, and that mean nothing here."""
EMPTY_SHARE, PARTIAL_SHARE, FILLER_SHARE, NOISE_SHARE = 0.1, 0.15, 0.4, 0.1


@dataclass(frozen=True)
class Caption:
    """A prompt, and what it says; None where it says nothing."""

    text: str
    shape: str | None = None
    colour: str | None = None
    background: str | None = None


def fill(template: str, subject: Subject) -> Caption:
    """A template's caption for a subject."""
    said = {name: value for name, value in vars(subject).items() if f"{{{name}}}" in template}
    return Caption(template.format(**vars(subject)), **said)


def _decorated(text: str, words: list[str], source: random.Random) -> str:
    before = source.randrange(len(words) + 1)
    return ", ".join([*words[:before], text, *words[before:]])


def training_caption(subject: Subject, source: random.Random, vocabulary: list[str]) -> Caption:
    """A random caption for a picture of `subject`: often whole, at times partial, decorated or empty.

    Args:
        subject: what the picture shows.
        source: source of all choices.
        vocabulary: words of any meaning, of which a few are mixed in so that unknown words do no harm.
    """
    if source.random() < EMPTY_SHARE:
        return Caption("")
    templates = PARTIAL if source.random() < PARTIAL_SHARE else (WHOLE[0], *WHOLE)
    caption = fill(source.choice(templates), subject)
    words: list[str] = []
    if source.random() < FILLER_SHARE:
        words += source.sample(FILLERS, source.randint(1, 3))
    if source.random() < NOISE_SHARE:
        words += source.sample(vocabulary, source.randint(1, 2))
    if not words:
        return caption
    return Caption(_decorated(caption.text, words, source), caption.shape, caption.colour, caption.background)


def held_out_prompts(count: int) -> list[tuple[str, Subject]]:
    """Prompts for subjects that were never trained, in a fixed order that mixes them; at most one a pair of subject
    and template, the usual template first."""
    pairs = [(fill(template, subject).text, subject) for template in WHOLE for subject in _mixed(HELD_OUT)]
    if count > len(pairs):
        raise ValueError(f"there are {len(pairs)} held-out prompts, {count} were asked for")
    return pairs[:count]


def _mixed(subjects: tuple[Subject, ...]) -> list[Subject]:
    """In random order, but the shapes take turns."""
    source = random.Random(0)
    by_shape = [[subject for subject in subjects if subject.shape == shape] for shape in SHAPES]
    for group in by_shape:
        source.shuffle(group)
    return [subject for turn in zip(*by_shape) for subject in turn]
