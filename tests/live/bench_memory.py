"""What loading, changing and moving a model of full size takes, beside the WebUI's own ways.

    pytest tests/live/bench_memory.py -s --webui DIR --webui-python PYTHON

On a random checkpoint of SD1.5 in its real size. Needs Linux, 12 GB of memory and some minutes. All figures of a table
come from one run of the same WebUI; times are medians and only good for comparing.
"""

from __future__ import annotations

import statistics

import pytest

from live.webui import EXTENSION

COPY = "full-size-copy"
ROUNDS = 3
MIB = 1 << 20
HALF = ("--precision", "half")
WAYS = {
    "float16": {},
    "the WebUI's own FP8": {"fp8_storage": "Enable", "disabled_extensions": [EXTENSION]},
    "float8_e4m3fn": {"fp8_storage": "Enable"},
}
SETTINGS = {
    "float16 -> float8_e4m3fn": ("fp8_storage", "Enable"),
    "float8_e4m3fn -> int8": ("fp8_format", "int8"),
    "int8 -> float8_e4m3fn": ("fp8_format", "float8_e4m3fn"),
    "float8_e4m3fn -> float16": ("fp8_storage", "Disable"),
}
LARGEST_SHARE = 0.52
"""Of the bytes of float16 that are moved; 3 % of the UNet of SD1.5 are layers that stay in float16."""
HEADINGS = ("model after, MB", "peak, MB", "own memory, MB", "mapped, MB", "seconds")


@pytest.fixture
def with_copy(full_size):
    """The checkpoint under a second name too, both with one configuration, as checkpoints usually have."""

    def add(running):
        (running.data / f"models/Stable-diffusion/{COPY}.safetensors").symlink_to(full_size)
        running.client.request("/sdapi/v1/refresh-checkpoints", {})
        running.client.probe("share_configuration", path=str(full_size.with_suffix(".yaml")))
        running.client.probe("skip_the_empty_prompt")
        return running.client

    return add


def _row(client, steps):
    """Run steps in turns; for the last, what it takes: peaks of one run, the median time of the others."""
    counted, times = None, []
    for turn in range(ROUNDS + 1):
        for step in steps:
            found = client.probe("measured", **step, count_tensors=turn == 0)
        if turn == 0:
            counted = found
        else:
            times.append(found["seconds"])
    return {**counted, "seconds": statistics.median(times)}


def _print(name, row):
    numbers = [row[key] / MIB for key in ("final", "tensors", "anonymous", "mapped")]
    print(f"{name:44s}" + "".join(f"{number:18.0f}" for number in numbers) + f"{row['seconds']:18.1f}")


def _choose(name):
    return {"option": "sd_model_checkpoint", "value": f"{name}.safetensors"}


def test_loading(start, with_copy, full_size, installation):
    size = full_size.stat().st_size
    rows = {}
    for way, settings in WAYS.items():
        if way == "the WebUI's own FP8" and installation.version < (1, 8):
            continue
        client = with_copy(start(HALF, full_size.stem, **settings))
        rows["first load", way] = _row(client, [{"option": None, "value": None}])
        rows["change of checkpoint", way] = _row(client, [_choose(COPY), _choose(full_size.stem)])
    print(f"\nfile {size / MIB:.0f} MB\n{'':44s}" + "".join(f"{heading:>18s}" for heading in HEADINGS))
    for (what, way), row in rows.items():
        _print(f"{what}, {way}", row)
        if way == "float8_e4m3fn":
            assert row["tensors"] <= row["final"] + 0.1 * rows[what, "float16"]["final"]
            assert row["mapped"] <= 1.02 * size


def test_settings(start, full_size):
    client = start(HALF, full_size.stem, fp8_storage="Disable").client
    print(f"\n{'':44s}" + "".join(f"{heading:>18s}" for heading in HEADINGS))
    steps = [{"option": option, "value": value} for option, value in SETTINGS.values()]
    for number, name in enumerate(SETTINGS):
        _print(name, _row(client, steps[number + 1 :] + steps[: number + 1]))


@pytest.mark.parametrize("flag", ["--medvram", "--lowvram"])
def test_moving(start, full_size, flag):
    client = start((*HALF, flag), full_size.stem).client
    full = client.probe("moved_bytes", steps=3)
    client.set(fp8_storage="Enable")
    packed = client.probe("moved_bytes", steps=3)
    print(f"\n{flag}: MB moved at each of 3 steps, float16 {[n // MIB for n in full]}")
    print(f"{flag}: float8_e4m3fn {[n // MIB for n in packed]}, {sum(packed) / sum(full):.3f} of it")
    assert sum(packed) <= LARGEST_SHARE * sum(full)
