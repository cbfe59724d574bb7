"""What networks are trained on: pictures of one style, which the model does not draw by itself."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from demo.shapes.drawing import Style, draw
from demo.shapes.subject import TRAINED
from tools.tiny_sd.networks import LATENT_SCALE, Networks, encode
from tools.tiny_sd.stages import captions_of, denoising_loss, vocabulary_of

BATCH = 24
POOL = 2000


def style_loss(networks: Networks, style: Style, batch: int = BATCH, pool: int = POOL) -> Callable[[int], torch.Tensor]:
    """The denoising loss of captioned pictures of a style, as a function of the step: a float32 scalar.

    Pictures, captions, noise and noise levels come from the step's number alone, so the losses of two trainings can be
    compared step by step.

    Args:
        networks: the model; the pictures are encoded now, its UNet and text encoder run at each step.
        style: what all pictures have in common.
        batch: pictures a step, at most `pool`.
        pool: pictures that are drawn.
    """
    generator = torch.Generator().manual_seed(7)
    subjects = random.Random(7).choices(TRAINED, k=pool)
    with torch.no_grad():
        pictures = draw(subjects, generator, [style] * pool) * 2 - 1
        latents = torch.cat([networks.vae.encode(part).latent_dist.mean for part in pictures.split(100)]) * LATENT_SCALE
    vocabulary = vocabulary_of(networks)

    def loss_of(step: int) -> torch.Tensor:
        chosen = random.Random(step).sample(range(pool), batch)
        captions = captions_of([subjects[index] for index in chosen], step, vocabulary)
        states = encode(networks, [caption.text for caption in captions])
        return denoising_loss(networks, latents[chosen], states, step)

    return loss_of
