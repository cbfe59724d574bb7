"""Captions say what they claim to say."""

from __future__ import annotations

import random

import pytest

from demo.shapes.prompts import FILLERS, PARTIAL, WHOLE, fill, held_out_prompts, training_caption
from demo.shapes.subject import HELD_OUT, TRAINED


@pytest.mark.parametrize("template", [*WHOLE, *PARTIAL])
def test_a_caption_knows_what_it_says(template):
    subject = TRAINED[40]
    caption = fill(template, subject)
    words = set(caption.text.replace(",", "").split())
    for name in ("shape", "colour", "background"):
        said = getattr(caption, name)
        assert (said in words) if said else (getattr(subject, name) not in words)


def test_captions_are_drawn_from_the_seed_alone():
    def captions(seed):
        source = random.Random(seed)
        return [training_caption(subject, source, ["lamp", "river"]) for subject in TRAINED]

    assert captions(1) == captions(1) != captions(2)
    texts = [caption.text for caption in captions(1)]
    assert "" in texts
    assert any(filler in text for text in texts for filler in FILLERS)
    assert any("lamp" in text or "river" in text for text in texts)


def test_held_out_prompts():
    prompts = held_out_prompts(200)
    assert len(set(prompts)) == 200
    assert {subject for _, subject in prompts} == set(HELD_OUT)
    assert prompts[:30] == held_out_prompts(30)
    with pytest.raises(ValueError, match="held-out prompts"):
        held_out_prompts(10_000)
