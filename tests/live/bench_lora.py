"""What switching LoRAs costs on a model of full size, beside the WebUI's own merging into float16 weights.

    pytest tests/live/bench_lora.py -s --webui DIR --webui-python PYTHON

On a random checkpoint of SD1.5 in its real size. Needs 12 GB of memory and some minutes. Both sides run in the same
process and in turns, with the WebUI's code of the version that is there; the figures are medians and ratios.
"""

from __future__ import annotations

import statistics

RANK, ROUNDS = 32, 3
LARGEST_RATIO = 1.5
"""Of a switch that merges, against the WebUI's own into float16 weights."""
WAYS = ("Merge from checkpoint file", "Add at run time")
WORDS = {
    "first": "none -> A, for the first time",
    "another": "A -> B",
    "two": "B -> A and B",
    "none": "A and B -> none",
    "a": "none -> A",
    "nothing changed": "A -> A: what each step costs",
}


def test_switching(start, full_size):
    running = start(checkpoint=full_size.stem, fp8_storage="Enable")
    client = running.client
    names = ["bench-a", "bench-b"]
    for seed, name in enumerate(names):
        layers = client.probe(
            "write_lora", path=str(running.data / f"models/Lora/{name}.safetensors"), rank=RANK, seed=seed
        )
    client.request("/sdapi/v1/refresh-loras", {})
    found = {}
    for way in WAYS:
        for entry in client.probe("time_networks", names=names, way=way, rounds=ROUNDS):
            found.setdefault((entry["way"], entry["step"]), []).extend(entry["seconds"])
    medians = {key: times[0] if key[1] == "first" else statistics.median(times) for key, times in found.items()}
    print(f"\n{layers} layers, rank {RANK}, medians of {ROUNDS}; seconds, and ratio to the WebUI's own on float16")
    print(f"{'':38s}{'float16':>10s}" + "".join(f"{way:>34s}" for way in WAYS))
    for step, words in WORDS.items():
        theirs = medians["float16", step]
        cells = "".join(f"{medians[way, step]:25.4f} ({medians[way, step] / theirs:5.2f})" for way in WAYS)
        print(f"{words:38s}{theirs:10.4f}{cells}")
    for step in ("first", "another", "two", "a"):
        assert medians[WAYS[0], step] <= LARGEST_RATIO * medians["float16", step], step
    assert medians[WAYS[0], "nothing changed"] <= medians["float16", "nothing changed"] + 0.025
