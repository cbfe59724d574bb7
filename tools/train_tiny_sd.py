"""Trains the embedded model from nothing but generated pictures: `python run.py train model`.

About an hour on two idle cores, several on a machine that is busy with anything else. An interrupted run goes on where
it stopped when it is started again with the same folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from demo.model import CLIP
from tools.tiny_sd import stages
from tools.tiny_sd.curve import draw_curves
from tools.tiny_sd.layout import checkpoint
from tools.tiny_sd.networks import make_networks


def main() -> int:
    """Train all stages and write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("tiny-sd-work"), help="folder of the unfinished training")
    parser.add_argument("--output", type=Path, help="default: shapes-sd1.safetensors in that folder")
    parser.add_argument("--clip", type=Path, default=CLIP, help="tokenizer and text encoder configuration")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first weights")
    options = parser.parse_args()
    output = options.output or options.work / "shapes-sd1.safetensors"
    for folder in (options.work, output.parent):
        folder.mkdir(parents=True, exist_ok=True)
    begun = options.work / "begun.json"
    plan = {"seed": options.seed, "stages": [dataclasses.asdict(stage) for stage in stages.STAGES]}
    if begun.exists() and json.loads(begun.read_text()) != plan:
        parser.error(f"{options.work} holds a training with another seed or other steps: choose another --work")
    begun.write_text(json.dumps(plan))
    start = time.monotonic()
    networks = make_networks(options.clip, options.seed)
    stages.train_autoencoder(networks, options.work)
    readers = stages.train_words(networks, options.work)
    stages.train_denoiser(networks, readers, options.work)
    stages.train_decoder(networks, options.work)
    save_file(checkpoint(networks), output, metadata={"format": "pt"})
    draw_curves(options.work, output.with_name("loss.png"))
    print(f"wrote {output} after {(time.monotonic() - start) / 60:.0f} minutes")
    return 0


if __name__ == "__main__":
    torch.set_flush_denormal(True)
    raise SystemExit(main())
