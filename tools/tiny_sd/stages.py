"""What is trained, in order: autoencoder, meaning of the words, denoiser, decoder."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F

from demo.shapes.drawing import Style, draw
from demo.shapes.prompts import Caption, training_caption
from demo.shapes.subject import COLOURS, SHAPES, TRAINED, Subject
from tools.tiny_sd.networks import LATENT_SCALE, Networks, encode, noise_schedule
from tools.tiny_sd.training import Stage, train

CROPS = Stage("vae-crops", steps=1000, rate=1.5e-3, flat=0.6, average=0.98, weight_decay=1e-4)
WHOLE = Stage("vae-whole", steps=450, rate=8e-4, average=0.98, weight_decay=1e-4)
WORDS = Stage("text", steps=300, rate=2e-3)
DENOISER = Stage("unet", steps=3600, rate=1.2e-3, flat=0.3)
DECODER = Stage("decoder", steps=900, rate=1e-3, flat=0.2)
STAGES = (CROPS, WHOLE, WORDS, DENOISER, DECODER)

POOL = 12000
"""Latent pictures that the denoiser is trained on."""
BATCH = 48
READING_WEIGHT = 0.02
"""Weight of the loss that keeps shape and colours readable in the text encoder's states."""
LOOSE_SHARE = 0.3
"""Share of denoiser samples whose noise level is drawn from the upper two fifths, where shape and place are decided."""
GAMMA = 5.0
"""Bound of the loss weight min(SNR, gamma) / SNR of arXiv:2303.09556, equation (6) for noise prediction."""


def batch_of(count: int, seed: int, plain: bool = False) -> tuple[list[Subject], torch.Tensor]:
    """Trained subjects and their drawings, -1 to 1. Unless `plain`, some in the networks' styles, for the VAE."""
    source, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    subjects = source.choices(TRAINED, k=count)
    styles = [Style(not plain and source.random() < 0.3, not plain and source.random() < 0.3) for _ in subjects]
    return subjects, draw(subjects, generator, styles) * 2 - 1


@contextmanager
def only(trained: Sequence[torch.nn.Module], *others: torch.nn.Module) -> Iterator[None]:
    """Within it, gradients are computed for the first modules alone."""
    for module in others:
        module.requires_grad_(False)
    for module in trained:
        module.requires_grad_(True)
    yield
    for module in (*others, *trained):
        module.requires_grad_(True)


def train_autoencoder(networks: Networks, folder: Path) -> None:
    """Crops first, since many different small pictures teach more than few large ones; then whole pictures."""
    vae = networks.vae
    with torch.no_grad():  # the noise of an untrained posterior would hide the signal
        vae.quant_conv.weight[4:].zero_()
        vae.quant_conv.bias[4:].fill_(-5.0)

    def loss_of(pictures: torch.Tensor, step: int) -> torch.Tensor:
        posterior = vae.encode(pictures).latent_dist
        noise = torch.randn(posterior.mean.shape, generator=torch.Generator().manual_seed(step))
        restored = vae.decode(posterior.mean + posterior.std * noise).sample
        divergence = 0.5 * (posterior.mean**2 + posterior.var - 1 - posterior.logvar).mean()
        return F.l1_loss(restored, pictures) + F.mse_loss(restored, pictures) + 3e-4 * divergence

    def crops(step: int) -> torch.Tensor:
        _, pictures = batch_of(24, step)
        corners = random.Random(step)
        parts = []
        for picture in pictures:
            top, left = corners.randrange(33), corners.randrange(33)
            parts.append(picture[:, top : top + 32, left : left + 32])
        return loss_of(torch.stack(parts), step)

    train(CROPS, vae, crops, folder)
    train(WHOLE, vae, lambda step: loss_of(batch_of(8, 10**6 + step)[1], step), folder)
    normalise_latents(networks)


@torch.no_grad()
def normalise_latents(networks: Networks) -> None:
    """Fold a shift and a factor for each channel into the 1x1 convolutions around the latents.

    Afterwards the latents times `LATENT_SCALE` have mean 0 and deviation 1, and decoding gives what it gave before.
    """
    vae = networks.vae
    latents = vae.encode(batch_of(600, 2 * 10**6, plain=True)[1]).latent_dist.mean
    mean, factor = latents.mean((0, 2, 3)), latents.std((0, 2, 3)) * LATENT_SCALE
    vae.quant_conv.weight[:4] /= factor.view(4, 1, 1, 1)
    vae.quant_conv.bias[:4] = (vae.quant_conv.bias[:4] - mean) / factor
    vae.quant_conv.bias[4:] -= 2 * factor.log()
    vae.post_quant_conv.bias += vae.post_quant_conv.weight[:, :, 0, 0] @ mean
    vae.post_quant_conv.weight *= factor.view(1, 4, 1, 1)


class Readers(torch.nn.Module):
    """Linear readers of what a caption says, over the text encoder's states; not part of the model."""

    NAMES = {"shape": SHAPES, "colour": COLOURS, "background": COLOURS}

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = torch.nn.ModuleDict({name: torch.nn.Linear(width, len(v)) for name, v in self.NAMES.items()})

    def loss(self, states: torch.Tensor, captions: list[Caption]) -> torch.Tensor:
        """Cross entropy of what the captions say; `states` is (captions, 77, width)."""
        pooled = states[:, -8:].mean(1)  # the padding behind the text, which has seen all of it
        total = states.new_zeros(())
        for name, values in self.NAMES.items():
            said = [getattr(caption, name) for caption in captions]
            wanted = torch.tensor([values.index(word) if word else -100 for word in said])
            total = total + F.cross_entropy(self.heads[name](pooled), wanted, ignore_index=-100)
        return total


def vocabulary_of(networks: Networks) -> list[str]:
    """Plain English-looking words of the tokenizer, sorted."""
    endings = (token.removesuffix("</w>") for token in networks.tokenizer.get_vocab() if token.endswith("</w>"))
    return sorted(word for word in endings if len(word) > 2 and word.isascii() and word.isalpha())


def captions_of(subjects: Sequence[Subject], seed: int, vocabulary: list[str]) -> list[Caption]:
    """A random training caption for each subject."""
    source = random.Random(seed)
    return [training_caption(subject, source, vocabulary) for subject in subjects]


def train_words(networks: Networks, folder: Path) -> Readers:
    """The text encoder learns to tell shapes and colours before pictures are asked of it."""
    readers, vocabulary = Readers(networks.text_encoder.config.hidden_size), vocabulary_of(networks)

    def loss_of(step: int) -> torch.Tensor:
        captions = captions_of(random.Random(step).choices(TRAINED, k=BATCH), step, vocabulary)
        return readers.loss(encode(networks, [caption.text for caption in captions]), captions)

    train(WORDS, torch.nn.ModuleList([networks.text_encoder, readers]), loss_of, folder)
    return readers


@torch.no_grad()
def latent_pool(networks: Networks, count: int = POOL) -> tuple[list[Subject], torch.Tensor]:
    """Plain drawings as scaled latents (count, 4, 8, 8)."""
    subjects: list[Subject] = []
    latents = []
    for part in range(count // 200):
        some, pictures = batch_of(200, 3 * 10**6 + part, plain=True)
        subjects += some
        latents.append(networks.vae.encode(pictures).latent_dist.mean * LATENT_SCALE)
    return subjects, torch.cat(latents)


def denoising_loss(networks: Networks, latents: torch.Tensor, states: torch.Tensor, seed: int) -> torch.Tensor:
    """Squared error of the predicted noise, weighted by `GAMMA`; noise and levels come from the seed."""
    generator = torch.Generator().manual_seed(seed)
    schedule = noise_schedule()
    count = len(latents)
    levels = torch.randint(0, 1000, (count,), generator=generator)
    loose = torch.rand(count, generator=generator) < LOOSE_SHARE
    levels = torch.where(loose, torch.randint(600, 1000, (count,), generator=generator), levels)
    noise = torch.randn(latents.shape, generator=generator)
    predicted = networks.unet(schedule.add_noise(latents, noise, levels), levels, states).sample
    kept = schedule.alphas_cumprod[levels]
    ratio = kept / (1 - kept)
    error = F.mse_loss(predicted, noise, reduction="none").mean((1, 2, 3))
    return (error * ratio.clamp(max=GAMMA) / ratio).mean()


def train_denoiser(networks: Networks, readers: Readers, folder: Path) -> None:
    """UNet and text encoder together, on latents of drawings."""
    pool, latents = latent_pool(networks)
    vocabulary = vocabulary_of(networks)

    def loss_of(step: int) -> torch.Tensor:
        chosen = random.Random(step).sample(range(len(pool)), BATCH)
        captions = captions_of([pool[index] for index in chosen], 10**6 + step, vocabulary)
        states = encode(networks, [caption.text for caption in captions])
        return denoising_loss(networks, latents[chosen], states, step) + READING_WEIGHT * readers.loss(states, captions)

    train(DENOISER, torch.nn.ModuleList([networks.unet, networks.text_encoder, readers]), loss_of, folder)


def train_decoder(networks: Networks, folder: Path) -> None:
    """The decoder alone, on slightly noisy latents as a sampler leaves them; edges count extra."""
    vae = networks.vae

    def loss_of(step: int) -> torch.Tensor:
        _, pictures = batch_of(8, 5 * 10**6 + step)
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            latents = vae.encode(pictures).latent_dist.mean
        strength = 0.06 * torch.rand(len(latents), 1, 1, 1, generator=generator) / LATENT_SCALE
        restored = vae.decode(latents + strength * torch.randn(latents.shape, generator=generator)).sample
        edges = sum(F.l1_loss(restored.diff(dim=axis), pictures.diff(dim=axis)) for axis in (2, 3))
        return F.l1_loss(restored, pictures) + F.mse_loss(restored, pictures) + 0.5 * edges

    with only([vae.decoder, vae.post_quant_conv], vae.encoder, vae.quant_conv):
        train(DECODER, vae, loss_of, folder)
