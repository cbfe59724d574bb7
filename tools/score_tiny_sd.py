"""The share of held-out prompts that a checkpoint follows, read by the judge: `python run.py train score`."""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image

from demo.generation import Work, generate
from demo.loading import CheckpointError, load_pipeline
from demo.model import CHECKPOINT
from demo.networks import NetworkError, deltas_of, layers_of
from demo.shapes import judge
from demo.shapes.prompts import held_out_prompts

WANTED = 0.95


def main() -> int:
    """Generate with several seeds, and print the share of pictures that show what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--lora", type=Path, help="a network in kohya's format to add")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--guidance", type=float, default=4.0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sheet", type=Path, help="write the first 60 pictures here")
    options = parser.parse_args()
    if min(options.prompts, options.seeds, options.steps) < 1:
        parser.error("--prompts, --seeds and --steps must be at least 1")
    try:
        pipeline = load_pipeline(options.checkpoint)
        if options.lora:
            for layer, delta in deltas_of(options.lora, layers_of(pipeline)).items():
                layer.weight.data += delta
    except (CheckpointError, NetworkError) as error:
        parser.error(str(error))
    prompts, subjects = zip(*held_out_prompts(options.prompts))
    scores = []
    for run in range(options.seeds):
        seeds = tuple(1000 * run + index for index in range(len(prompts)))
        work = Work(prompts, seeds, side=64, steps=options.steps, guidance=options.guidance, batch=50)
        pixels = generate(pipeline, work).pixels
        readings = [judge.read(picture) for picture in pixels]
        follows = [reading.follows(subject) for reading, subject in zip(readings, subjects)]
        scores.append(statistics.mean(follows))
        failed = Counter(subject.shape for subject, good in zip(subjects, follows) if not good)
        overlap = statistics.mean(reading.overlap for reading in readings)
        hollow, stripes = (statistics.mean(getattr(r, name) for r in readings) for name in ("hollow", "stripes"))
        print(
            f"seeds from {1000 * run}: {scores[-1]:.1%}, overlap {overlap:.3f}, hollow {hollow:.2f},"
            f" stripes {stripes:.2f}, failed: {dict(failed)}",
            flush=True,
        )
        if options.sheet and run == 0:
            rows = [np.concatenate(list(pixels[start : start + 12]), 1) for start in range(0, min(60, len(pixels)), 12)]
            Image.fromarray(np.concatenate([row for row in rows if row.shape == rows[0].shape])).save(options.sheet)
    mean = statistics.mean(scores)
    print(f"mean {mean:.1%}, wanted {WANTED:.0%}")
    return 0 if mean >= WANTED else 1


if __name__ == "__main__":
    raise SystemExit(main())
