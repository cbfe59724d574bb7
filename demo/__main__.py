"""Runs the main job on a checkpoint and shows what 8-bit weights cost and save: `python run.py demo`.

Without arguments it takes the small trained model that comes with the project, which needs no graphics card.
"""

from __future__ import annotations

import argparse
import sys
import time
import webbrowser
from dataclasses import replace
from pathlib import Path

import torch

from demo import report
from demo.experiment import Plan, run
from demo.generation import Work
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
    work = Work(prompts, tuple(range(len(prompts))), side, steps=options.steps, guidance=7.0, batch=1)
    return Plan(options.checkpoint, work, {file.stem: file for file in options.lora}, work, device, dtype)


def main() -> int:
    """Read the command line, run, show; the status is 1 if the embedded model's figures are not as promised."""
    parser = argparse.ArgumentParser(
        prog="run.py demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="an SD1 or SDXL checkpoint of your own")
    parser.add_argument(
        "--lora", type=Path, action="append", default=[], metavar="FILE", help="for it; can be repeated"
    )
    parser.add_argument("--prompt", action="append", help="for it; can be repeated")
    parser.add_argument("--side", type=int, help="for it: pixels of a side (default: 512, SDXL 1024)")
    parser.add_argument("--steps", type=int, default=20, help="for it: sampling steps (default: 20)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path("demo-report"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--open", action="store_true", help="open the report in a browser")
    options = parser.parse_args()
    if options.checkpoint is None and (options.lora or options.prompt or options.side):
        parser.error("--lora, --prompt and --side belong to a checkpoint of your own: name it with --checkpoint")
    if options.side is not None and (options.side < 64 or options.side % 64):
        parser.error("--side must be a multiple of 64")
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    try:
        device = torch.device(options.device)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        parser.error(f"--device {options.device}: {str(error).splitlines()[0]}")
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    start = time.perf_counter()
    try:
        own = options.checkpoint is not None
        plan = own_plan(options, device, dtype) if own else embedded_plan(device, dtype)
        result = run(plan, lambda text: print(f"{time.perf_counter() - start:5.0f} s  {text}", flush=True))
        place = report.write(result, options.output)
    except (CheckpointError, NetworkError) as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"The report could not be written: {error}", file=sys.stderr)
        return 2
    print(f"\n{report.console_table(result)}\n\n{report.legend_of(result)}\n")
    print(f"{time.perf_counter() - start:.0f} s; report: {place.resolve()}")
    broken = broken_promises(result) if plan.subjects is not None else []
    for line in broken:
        print(line, file=sys.stderr)
    if options.open:
        webbrowser.open(place.resolve().as_uri())
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
