"""Draws how the losses fell."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

TITLES = {
    "vae-crops": "autoencoder, crops",
    "vae-whole": "autoencoder, whole pictures",
    "text": "words",
    "unet": "denoiser",
    "decoder": "decoder",
}


def draw_curves(folder: Path, output: Path) -> None:
    """One panel a stage, from the histories in the folder of the training; means of 25 steps, logarithmic."""
    figure, axes = pyplot.subplots(1, len(TITLES), figsize=(15, 3), layout="constrained")
    for axis, (name, title) in zip(axes, TITLES.items()):
        steps, losses = zip(*json.loads((folder / f"{name}.loss.json").read_text()))
        axis.semilogy(steps, losses)
        axis.set(title=title, xlabel="step")
        axis.grid(visible=True, which="both", alpha=0.3)
    axes[0].set_ylabel("loss")
    figure.savefig(output, dpi=80)
    pyplot.close(figure)
