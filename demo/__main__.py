"""Runs the main job on a checkpoint and shows what 8-bit weights cost and save: `python run.py demo`.

Without arguments it takes the small trained model that comes with the project, which needs no graphics card.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
import textwrap
import time
import webbrowser
from dataclasses import replace
from pathlib import Path

import torch

from demo import report
from demo.experiment import Plan, Result, run
from demo.generation import GenerationError, Work
from demo.loading import CheckpointError, family_of
from demo.model import CHECKPOINT, LORAS
from demo.networks import NetworkError
from demo.promises import broken_promises
from demo.shapes.prompts import held_out_prompts

EMBEDDED_LORAS = ("outline", "stripes")
PICTURES, LORA_PICTURES = 100, 24
PHOTOGRAPHS = (
    "a photograph of an old lighthouse at sunset, highly detailed",
    "portrait of a red fox in a snowy forest",
)
SIDES = {"sd1": 512, "sdxl": 1024}


def embedded_plan(device: torch.device, dtype: torch.dtype) -> Plan:
    """The plan for the embedded model: prompts that it was never trained on, and the judge."""
    prompts, subjects = zip(*held_out_prompts(PICTURES))
    work = Work(prompts, tuple(range(PICTURES)), side=64)
    lora_work = replace(work, prompts=prompts[:LORA_PICTURES], seeds=work.seeds[:LORA_PICTURES], batch=LORA_PICTURES)
    loras = {name: LORAS / f"shapes-{name}.safetensors" for name in EMBEDDED_LORAS}
    return Plan(CHECKPOINT, work, loras, lora_work, device, dtype, subjects)


def own_plan(options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Plan:
    """The plan for a user's checkpoint. Raises CheckpointError."""
    family = family_of(options.checkpoint)
    prompts = tuple(options.prompt or PHOTOGRAPHS)
    side = options.side or SIDES.get(family, 64)
    work = Work(prompts, tuple(range(len(prompts))), side, steps=options.steps or Work.steps, guidance=7.0, batch=1)
    return Plan(options.checkpoint, work, {file.stem: file for file in options.lora or ()}, work, device, dtype)


def argument_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="run.py demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="an SD1 or SDXL checkpoint of your own")
    parser.add_argument("--lora", type=Path, action="append", metavar="FILE", help="for it; can be repeated")
    parser.add_argument("--prompt", action="append", help="for it; can be repeated")
    parser.add_argument("--side", type=int, help="for it: pixels of a side (default: 512, SDXL 1024)")
    parser.add_argument("--steps", type=int, help=f"for it: sampling steps (default: {Work.steps})")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    parser.add_argument("--output", type=Path, default=Path("demo-report"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--open", action="store_true", help="open the report in a browser")
    return parser


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Leave with a usage error where arguments do not fit together."""
    own = {name: getattr(options, name) for name in ("lora", "prompt", "side", "steps")}
    if options.checkpoint is None and any(value is not None for value in own.values()):
        parser.error(
            "--lora, --prompt, --side and --steps belong to a checkpoint of your own: name it with --checkpoint"
        )
    if options.side is not None and not (64 <= options.side <= 2048 and options.side % 64 == 0):
        parser.error("--side must be a multiple of 64, 2048 at most")
    if options.steps is not None and not 1 <= options.steps <= 1000:
        parser.error("--steps must be between 1 and 1000")
    names = [file.stem for file in options.lora or ()]
    if len({*names}) < len(names):
        parser.error("--lora: two files have the same name; rename one")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this torch finds no CUDA device")


def show(result: Result, options: argparse.Namespace, seconds: float) -> int:
    """Print, write and perhaps open; the status is 1 if the embedded model's figures are not as promised."""
    print(f"\n{report.console_table(result)}\n\n{textwrap.fill(report.legend_of(result), 110)}\n", flush=True)
    place = report.write(result, options.output).resolve()
    print(f"{seconds:.0f} s; report: {place}")
    broken = broken_promises(result) if result.plan.subjects is not None else []
    for line in broken:
        print(line, file=sys.stderr)
    if options.open:
        webbrowser.open(place.as_uri())
    return 1 if broken else 0


def main() -> int:
    """Read the command line, run, show."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # file names may hold what the console cannot show
    parser = argument_parser()
    options = parser.parse_args()
    check(parser, options)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    start = time.perf_counter()
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=options.output):
            pass  # better to fail now than after all the work
        plan = embedded_plan(device, dtype) if options.checkpoint is None else own_plan(options, device, dtype)
        result = run(plan, lambda text: print(f"{time.perf_counter() - start:5.0f} s  {text}", flush=True))
        return show(result, options, time.perf_counter() - start)
    except (CheckpointError, NetworkError, GenerationError) as error:
        print(error, file=sys.stderr)
    except OSError as error:
        print(f"The report could not be written into {options.output}: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
