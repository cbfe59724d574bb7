"""Trains a LoRA over a frozen base in 8 bits, as kohya's sd-scripts do with `--fp8_base`: `python run.py train lora`.

The embedded model begins to draw outlines instead of filled shapes, in a minute or two on two idle cores; more steps
and a larger batch teach it better. What is to be learned from the program is in `prepare`: freeze the model, convert
it, attach the network; then give the optimizer the network's parameters. Nothing else in a training has to know that
the base is in 8 bits. Gradients pass through the base to the network; for the backward pass each layer keeps its 8-bit
weight and decodes it again.

Kohya's `--fp8_base` casts the UNet to float8_e4m3fn without scales and leaves the rest to autocast, whose casts are
kept until the backward pass. Here each output channel has its scale, autocast is optional, and no decoded weight is
kept. `--compare` shows what the 8 bits cost: it trains over the float32 base too, with the same first weights,
pictures and noise.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn

import lib_fp8
from demo.loading import CheckpointError
from demo.measures import peak_bytes, stored_bytes
from demo.model import CHECKPOINT
from tools.tiny_sd import lora
from tools.tiny_sd.additions import OUTLINE
from tools.tiny_sd.networks import Networks, load_networks
from tools.tiny_sd.styles import style_loss
from tools.tiny_sd.training import Stage, train

FLOAT32 = "float32"
AUTOCAST = {"none": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
WINDOW = 20
"""Steps over which a loss is smoothed."""
LIMIT = 0.02
"""Largest relative difference of the smoothed losses with which `--check` is content."""
POOL = 400


@dataclass(frozen=True)
class Settings:
    """How a LoRA is trained."""

    base: str = lib_fp8.Policy.format
    """Storage format of the weights that are trained over, or float32."""
    steps: int = 200
    rank: int = 6
    batch: int = 4
    rate: float = 3e-3
    text_encoder: bool = False
    autocast: torch.dtype | None = None
    checkpointing: bool = False
    measured: bool = False
    """Whether the peak of a step is measured first, which takes longer than many steps."""


@dataclass(frozen=True)
class Training:
    """A trained LoRA and its account."""

    network: nn.ModuleDict
    losses: tuple[float, ...]
    """One a step."""
    base_bytes: int
    """Of the UNet and the text encoder, as they are stored."""
    peak_bytes: int
    """Of those, the LoRA, and all tensors that a step makes, at its worst moment; 0 if not measured."""
    seconds_per_step: float
    """Median."""


def prepare(networks: Networks, settings: Settings) -> nn.ModuleDict:
    """Make a model ready, in place: frozen, converted, and with a fresh LoRA, which is returned."""
    for part in (networks.vae, networks.unet, networks.text_encoder):
        part.requires_grad_(False)
    for part in (networks.unet, *([networks.text_encoder] if settings.text_encoder else [])):
        if settings.base != FLOAT32:
            report = lib_fp8.convert_model(part, lib_fp8.Policy(format=settings.base))
            print("\n".join([f"{type(part).__name__}: {report.summary()}", *report.notes]), flush=True)
        if settings.checkpointing:
            part.train()  # transformers recomputes nothing in a model that is not in training
            enable = "enable_gradient_checkpointing" if part is networks.unet else "activation_checkpointing_enable"
            getattr(part, enable)()
    return lora.attach(networks, settings.rank, settings.text_encoder)


def train_lora(networks: Networks, settings: Settings) -> Training:
    """Train a LoRA over a model, which is changed as `prepare` says; its weights are not.

    Raises:
        ArithmeticError: a loss is NaN or infinite.
    """
    network = prepare(networks, settings)
    style = style_loss(networks, OUTLINE, settings.batch, max(settings.batch, POOL))
    losses: list[float] = []
    starts: list[float] = []

    def loss_of(step: int) -> torch.Tensor:
        with torch.autocast("cpu", settings.autocast, enabled=settings.autocast is not None):
            return style(step)

    def noted_loss_of(step: int) -> torch.Tensor:
        starts.append(time.perf_counter())
        loss = loss_of(step)
        losses.append(loss.item())
        return loss

    base = nn.ModuleList([networks.unet, networks.text_encoder])
    base_bytes = stored_bytes(base)
    peak = peak_bytes(nn.ModuleList([base, network]), lambda: loss_of(0).backward()) if settings.measured else 0
    scaler = torch.amp.GradScaler("cpu", enabled=settings.autocast is torch.float16)
    stage = Stage(settings.base, settings.steps, settings.rate, flat=0.3, average=0.98)
    with tempfile.TemporaryDirectory() as folder:
        train(stage, network, noted_loss_of, Path(folder), scaler)
    starts.append(time.perf_counter())
    if not torch.tensor(losses).isfinite().all():
        raise ArithmeticError("the loss became NaN or infinite")
    seconds = statistics.median(end - start for start, end in itertools.pairwise(starts))
    return Training(network, tuple(losses), base_bytes, peak, seconds)


def smoothed(losses: Sequence[float]) -> torch.Tensor:
    """Means of each `WINDOW` successive losses, float64; of all losses if there are fewer."""
    return torch.tensor(losses, dtype=torch.float64).unfold(0, min(WINDOW, len(losses)), 1).mean(1)


def largest_difference(wanted: Sequence[float], got: Sequence[float]) -> float:
    """The largest relative difference of two smoothed losses, of equally many steps."""
    reference = smoothed(wanted)
    return ((smoothed(got) - reference).abs() / reference).max().item()


def table(trainings: dict[str, Training]) -> str:
    """A line for each base; times are relative to the first."""
    first = next(iter(trainings.values()))
    lines = [f"{'base':24s}{'weights MB':>11s}{'peak MB':>9s}{'time':>7s}{'first loss':>12s}{'last loss':>11s}"]
    for name, found in trainings.items():
        curve, ratio = smoothed(found.losses), found.seconds_per_step / first.seconds_per_step
        sizes = f"{found.base_bytes / 2**20:11.1f}{found.peak_bytes / 2**20:9.1f}"
        lines.append(f"{name:24s}{sizes}{ratio:7.2f}{curve[0]:12.4f}{curve[-1]:11.4f}")
    return "\n".join(lines)


def argument_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="run.py train lora", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    bases = (*lib_fp8.format_names(), FLOAT32)
    parser.add_argument("--base", choices=bases, default=Settings.base, help="how the base is held (%(default)s)")
    for name in ("steps", "rank", "batch"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Settings, name), help="%(default)s")
    parser.add_argument("--text-encoder", action="store_true", help="convert and adapt the text encoder too")
    parser.add_argument("--autocast", choices=AUTOCAST, default="none", help="compute in half precision (%(default)s)")
    parser.add_argument(
        "--checkpointing", action="store_true", help="compute activations again instead of keeping them"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="shapes-lora.safetensors; with --compare: written only if named"
    )
    parser.add_argument("--compare", action="store_true", help=f"train over the {FLOAT32} base too and compare")
    parser.add_argument(
        "--check",
        action="store_true",
        help=f"with --compare: fail if the smoothed losses differ by more than {100 * LIMIT:g} %%",
    )
    return parser


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Leave with a usage error where the arguments cannot be followed."""
    if min(options.steps, options.rank, options.batch) < 1:
        parser.error("--steps, --rank and --batch must be at least 1")
    if options.check and not options.compare:
        parser.error("--check belongs to --compare")
    if options.compare and options.base == FLOAT32:
        parser.error(f"--compare compares with {FLOAT32}: choose another --base")
    if options.base != FLOAT32 and (problem := lib_fp8.get_format(options.base).problem("cpu")) is not None:
        parser.error(f"--base: {problem}")
    if (file := options.output) is None:
        return
    if file.suffix != ".safetensors" or file.is_dir():
        parser.error(f"--output {file}: a file whose name ends in .safetensors is needed")
    if not file.parent.is_dir():
        parser.error(f"--output {file}: there is no folder {file.parent}")
    try:
        with tempfile.TemporaryFile(dir=file.parent):
            pass  # better to fail now than after all the work
    except OSError as error:
        parser.error(f"--output {file}: {file.parent} cannot be written into ({error})")


def main() -> int:
    """Read the command line, train, write, compare."""
    parser = argument_parser()
    options = parser.parse_args()
    if options.output is None and not options.compare:
        options.output = Path("shapes-lora.safetensors")
    check(parser, options)
    given = {**vars(options), "autocast": AUTOCAST[options.autocast], "measured": options.compare}
    settings = Settings(**{name: value for name, value in given.items() if name in Settings.__dataclass_fields__})
    trainings = {}
    try:
        for base in (FLOAT32, options.base) if options.compare else (options.base,):
            trainings[base] = train_lora(load_networks(CHECKPOINT), replace(settings, base=base))
    except (ArithmeticError, CheckpointError) as error:
        print(f"{error}; nothing was written", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Stopped; nothing was written.", file=sys.stderr)
        return 130
    if options.output is not None:
        try:
            lora.save(trainings[options.base].network, options.output)
        except (OSError, SafetensorError) as error:
            print(f"{options.output} could not be written: {error}", file=sys.stderr)
            return 2
        print(f"wrote {options.output}, {options.output.stat().st_size // 1024} KiB")
    if not options.compare:
        return 0
    print(table(trainings))
    difference = largest_difference(trainings[FLOAT32].losses, trainings[options.base].losses)
    print(
        f"largest difference of the losses, smoothed over {WINDOW} steps: {difference:.2%}, wanted {LIMIT:.0%} at most"
    )
    return 1 if options.check and difference > LIMIT else 0


if __name__ == "__main__":
    torch.set_flush_denormal(True)
    raise SystemExit(main())
