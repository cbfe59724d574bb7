"""Size, quality and time of 8-bit weights on the UNet of Stable Diffusion 1.5 in its real size: `python run.py bench`.

The model has the real layout (diffusers, 860 M parameters) and seeded weights, each output channel of each Linear and
Conv2d multiplied by a log-normal factor, since the channels of trained layers are not alike. The work is one forward
of a batch of two, as classifier-free guidance needs it, in float32 on the CPU. Printed for each way of storing the
weights: bytes of all parameters and buffers over those of float16 (what stays in full precision counts as float16),
signal-to-noise ratio of the output against the unconverted model, and time of a forward over that of the unconverted
model (median of alternating pairs).
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
from diffusers import UNet2DConditionModel

import lib_fp8
from demo.measures import parts_of, signal_to_noise
from demo.variants import as_the_webui
from lib_fp8.branch import LowRank

LIMITS = {"float8_e4m3fn": 21.5, "int8": 37.0}
"""Lowest signal-to-noise ratio, in dB, with which `--check` is content; the size limit is below."""
LARGEST_SHARE_OF_FLOAT16 = 0.52
KEPT = (*lib_fp8.DEFAULT_KEEP, r"time_emb_proj", r"^time_embedding")
"""The layers that the default keeps in full precision, also by the names that diffusers gives them."""


def make_unet() -> torch.nn.Module:
    """The bench model; the same weights at every call."""
    torch.manual_seed(0)
    unet = UNet2DConditionModel(sample_size=64, cross_attention_dim=768, attention_head_dim=8).eval()
    generator = torch.Generator().manual_seed(3)
    for module in unet.modules():
        if isinstance(module, (torch.nn.Linear, torch.nn.Conv2d)):
            spread = torch.exp(0.35 * torch.randn(module.weight.shape[0], generator=generator))
            module.weight.mul_((spread / spread.mean()).view(-1, *[1] * (module.weight.dim() - 1)))
    return unet


def quanto(kind: str) -> Callable[[torch.nn.Module], None]:
    """optimum-quanto, one scale per output channel."""

    def convert(unet: torch.nn.Module) -> None:
        from optimum import quanto as library

        library.quantize(unet, weights=getattr(library, kind))
        library.freeze(unet)

    return convert


def ours(storage_format: str) -> Callable[[torch.nn.Module], None]:
    """This library."""

    def convert(unet: torch.nn.Module) -> None:
        lib_fp8.convert_model(unet, lib_fp8.Policy(format=storage_format, keep=KEPT))

    return convert


RANK = 32


def with_run_time_lora(convert: Callable[[torch.nn.Module], None]) -> Callable[[torch.nn.Module], None]:
    """The same with a LoRA added at run time in every attention block; it adds zeros, at the full cost."""

    def convert_and_add(unet: torch.nn.Module) -> None:
        convert(unet)
        for name, layer in unet.named_modules():
            weight = getattr(layer, "weight", None)
            if "attentions" in name and isinstance(weight, lib_fp8.QuantWeight):
                up, down = torch.zeros(len(weight), RANK), torch.randn(RANK, weight.numel() // len(weight))
                weight.set_branches((LowRank(up, down, 1.0),))

    return convert_and_add


CONTESTANTS: dict[str, Callable[[torch.nn.Module], None]] = {
    "as the WebUI does it": as_the_webui,
    "quanto qfloat8": quanto("qfloat8"),
    "quanto qint8": quanto("qint8"),
    **{name: ours(name) for name in lib_fp8.format_names()},
    "with a run-time LoRA": with_run_time_lora(ours(lib_fp8.format_names()[0])),
}


def bytes_with_float16(model: torch.nn.Module) -> int:
    """Bytes of all parameters and buffers, with two for each value that is in full precision here."""
    tensors = (part for tensor in (*model.parameters(), *model.buffers()) for part in parts_of(tensor))
    return sum({part.data_ptr(): part.numel() * min(part.element_size(), 2) for part in tensors}.values())


def main() -> int:
    """Measure the contestants named, print a line each, and check the limits if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contestants", nargs="*", metavar="NAME", help=f"default: all of {', '.join(CONTESTANTS)}")
    parser.add_argument("--latent", type=int, default=32, help="side of the latent picture (64 is 512 pixels)")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of forwards to time; 0 times nothing")
    parser.add_argument("--check", action="store_true", help="fail if our formats miss their limits")
    options = parser.parse_args()
    if unknown := set(options.contestants) - set(CONTESTANTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from: {', '.join(CONTESTANTS)}")
    torch.set_grad_enabled(False)
    reference = make_unet()
    float16_bytes = 2 * sum(parameter.numel() for parameter in reference.parameters())
    torch.manual_seed(1)
    inputs = (torch.randn(2, 4, options.latent, options.latent), torch.tensor([500, 500]), torch.randn(2, 77, 768))
    wanted = reference(*inputs).sample

    def seconds(model: torch.nn.Module) -> float:
        start = time.perf_counter()
        model(*inputs)
        return time.perf_counter() - start

    missed = []
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, latent {options.latent}")
    print(f"{'':24s}{'bytes/float16':>14s}{'SNR dB':>8s}{'convert s':>11s}{'time ratio':>12s}")
    for name in options.contestants or CONTESTANTS:
        unet = copy.deepcopy(reference)
        start = time.perf_counter()
        CONTESTANTS[name](unet)
        conversion = time.perf_counter() - start
        share, quality = bytes_with_float16(unet) / float16_bytes, signal_to_noise(wanted, unet(*inputs).sample)
        pairs = [(seconds(unet), seconds(reference)) for _ in range(options.rounds)]
        ratio = f"{statistics.median(ours / theirs for ours, theirs in pairs):.2f}" if pairs else "-"
        print(f"{name:24s}{share:14.3f}{quality:8.1f}{conversion:11.1f}{ratio:>12s}", flush=True)
        if name in LIMITS and (quality < LIMITS[name] or share > LARGEST_SHARE_OF_FLOAT16):
            missed.append(f"{name}: at least {LIMITS[name]} dB and at most {LARGEST_SHARE_OF_FLOAT16} wanted")
    for line in missed:
        print(line)
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
