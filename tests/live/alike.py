"""Whether something does on 8-bit weights what it does in full precision, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from live.client import Client, Picture
from live.test_pictures import FULL, PROMPTS, Album

FORMATS = ("float8_e4m3fn", "int8")
COUNT = 2
STEPS = 4
SLACK = 3.0
"""dB by which pictures may be less like those of full precision than pictures without the feature are."""
ENOUGH = 30.0
"""dB of likeness that are enough, however like the pictures without the feature are: what rounding changes, a feature
may make larger, above all one that chooses, as token merging does."""

Take = Callable[[Client], list[Picture]]


def shots(make: Callable[..., Picture] = Client.txt2img, words: str = "", count: int = COUNT, **fields: Any) -> Take:
    """Gives a function that makes a few pictures, one a prompt and each with a seed of its own.

    Args:
        make: a method of the client that makes one.
        words: added to each prompt.
        count: how many.
        fields: of the request.
    """

    def take(client: Client) -> list[Picture]:
        prompts = [prompt + words for prompt, _ in PROMPTS[:count]]
        return [make(client, p, **{"seed": seed, "steps": STEPS, **fields}) for seed, p in enumerate(prompts)]

    return take


def likeness(some: list[Picture], others: list[Picture]) -> float:
    """Mean PSNR in dB, at most 100 a pair; of pictures of different sizes that of noise."""
    return float(np.mean([_likeness(a, b) for a, b in zip(some, others)]))


def _likeness(a: Picture, b: Picture) -> float:
    return min(a.psnr(b), 100) if a.pixels.shape == b.pixels.shape else 0


def of_the_base(parameters: dict[str, str]) -> dict[str, str]:
    """Without those of hypernetworks, which the WebUI hangs into the layers that they act on."""
    return {name: value for name, value in parameters.items() if ".hyper_" not in name}


def assert_acts_alike(client: Client, storage: str, without: Take, with_it: Take, *, acts: bool = True) -> None:
    """Pictures with a feature are as like those of full precision as pictures without it, or like enough.

    Args:
        client: of a WebUI; its model is in the storage afterwards.
        storage: a format.
        without: makes pictures without the feature.
        with_it: makes them with it.
        acts: whether it is to change pictures, and by more than the 8 bits do.
    """
    Album(client).hold(FULL)
    full, full_without = with_it(client), without(client)
    dtypes = of_the_base(client.probe("dtypes"))
    Album(client).hold(storage)
    stored_without, bits = without(client), of_the_base(client.probe("parameters"))
    stored = with_it(client)
    alike, alike_without = likeness(stored, full), likeness(stored_without, full_without)
    assert stored != full
    assert alike >= min(alike_without - SLACK, ENOUGH), f"{alike:.1f} dB, without it {alike_without:.1f} dB"
    if acts:
        assert all(a != b for a, b in zip(full, full_without)), "it does nothing, even in full precision"
        assert alike > likeness(full_without, full), "its effect is lost in the rounding"
    assert with_it(client) == stored
    assert without(client) == stored_without
    assert of_the_base(client.probe("parameters")) == bits
    assert of_the_base(client.probe("dtypes")) == dtypes


def assert_no_errors(said: str) -> None:
    """The console told of no exception."""
    assert "Traceback" not in said, said[-3000:]
    assert "*** Error" not in said, said[-3000:]
