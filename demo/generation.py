"""Makes pictures: prompts and seeds in, latents and pixels out."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from diffusers import DiffusionPipeline


class GenerationError(ValueError):
    """What came out is no picture; the message says why."""


@dataclass(frozen=True)
class Work:
    """What is generated; the same for every way of storing the weights."""

    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    side: int
    steps: int = 20
    guidance: float = 4.0
    batch: int = 25


@dataclass(frozen=True)
class Pictures:
    """What came out."""

    latents: torch.Tensor
    """float32 on the CPU, (pictures, 4, side / 8, side / 8)."""
    pixels: np.ndarray
    """uint8, (pictures, side, side, 3)."""
    seconds_per_step: float
    """Of a whole batch with guidance; the quickest batch, since other work on the machine only adds to it."""


def starting_noise(seeds: tuple[int, ...], side: int) -> torch.Tensor:
    """The same noise for a seed whatever the device, as the WebUI's setting "CPU" for the random number generator."""
    shape = (1, 4, side // 8, side // 8)
    return torch.cat([torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds])


@torch.no_grad()
def denoise(pipeline: DiffusionPipeline, work: Work, chosen: slice) -> torch.Tensor:
    """Latents of some of the pictures in one batch, by Euler's method with classifier-free guidance."""
    prompts = list(work.prompts[chosen])
    noise = starting_noise(work.seeds[chosen], work.side).to(pipeline.unet.device, pipeline.text_encoder.dtype)
    return pipeline(
        prompts,
        negative_prompt=[""] * len(prompts),
        latents=noise,
        height=work.side,
        width=work.side,
        num_inference_steps=work.steps,
        guidance_scale=work.guidance,
        output_type="latent",
    ).images


def generate(pipeline: DiffusionPipeline, work: Work) -> Pictures:
    """All pictures, in batches."""
    latents, pixels, seconds = [], [], []
    for start in range(0, len(work.prompts), work.batch):
        chosen = slice(start, start + work.batch)
        begin = time.perf_counter()
        found = denoise(pipeline, work, chosen)
        if not torch.isfinite(found).all():
            raise GenerationError("the pictures hold NaN or infinity: the checkpoint or a LoRA is damaged")
        latents.append(found.float().cpu())
        seconds.append(time.perf_counter() - begin)
        pixels.append(decode(pipeline, found))
    return Pictures(torch.cat(latents), np.concatenate(pixels), min(seconds) / work.steps)


@torch.no_grad()
def decode(pipeline: DiffusionPipeline, latents: torch.Tensor) -> np.ndarray:
    """Pixels of latents, uint8, one picture at a time so that little memory is needed."""
    vae = pipeline.vae
    scaled = latents.to(vae.dtype) / vae.config.scaling_factor
    decoded = torch.cat([vae.decode(part).sample.float().cpu() for part in scaled.split(4)])
    return ((decoded / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
