"""The three networks, small, in the block layout of Stable Diffusion 1."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from demo.loading import CONFIGURATIONS, load_pipeline

LATENT_SCALE = 0.18215
"""Stable Diffusion 1's factor between the autoencoder's latents and those that are denoised."""


@dataclass(frozen=True)
class Networks:
    """What a checkpoint holds, and the tokenizer beside it."""

    vae: AutoencoderKL
    text_encoder: CLIPTextModel
    unet: UNet2DConditionModel
    tokenizer: CLIPTokenizer


def make_networks(clip_folder: Path, seed: int) -> Networks:
    """Fresh networks. The UNet widens and narrows where Stable Diffusion 1's does, so it has exactly the same keys."""
    folder = CONFIGURATIONS / "shapes-sd1"
    torch.manual_seed(seed)
    return Networks(
        vae=AutoencoderKL.from_config(AutoencoderKL.load_config(folder / "vae")),
        text_encoder=CLIPTextModel(CLIPTextConfig.from_pretrained(clip_folder)),
        unet=UNet2DConditionModel.from_config(UNet2DConditionModel.load_config(folder / "unet")),
        tokenizer=CLIPTokenizer.from_pretrained(clip_folder),
    )


def load_networks(checkpoint: Path) -> Networks:
    """The networks of a trained checkpoint."""
    loaded = load_pipeline(checkpoint)
    return Networks(loaded.vae, loaded.text_encoder, loaded.unet, loaded.tokenizer)


def noise_schedule() -> DDPMScheduler:
    """Stable Diffusion 1's: 1000 steps, beta from 0.00085 to 0.012, linear in its root; the noise is predicted."""
    return DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False)


def encode(networks: Networks, prompts: list[str]) -> torch.Tensor:
    """Text encoder states (len(prompts), 77, width), after the last norm."""
    tokens = networks.tokenizer(prompts, padding="max_length", truncation=True, max_length=77, return_tensors="pt")
    return networks.text_encoder(tokens.input_ids).last_hidden_state
