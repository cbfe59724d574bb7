"""The project's commands, from nothing but Python: `python run.py demo`, `test`, `lint`, `bench` and `train`.

Each makes a virtual environment of its own beside this file and installs pinned packages into it, once.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
CURRENT = ("stack-current", "test", "demo")
"""What the environment of the tests and of the demo is made of."""
CI_STACKS = ("current", "webui-1.8")
STACKS = sorted(path.stem.removeprefix("stack-") for path in (ROOT / "requirements").glob("stack-*.txt"))


def say(text: str) -> None:
    """Tell the user what happens now."""
    print(f"== {text}", flush=True)


def call(*command: str | Path) -> int:
    """Run a command in the project's folder and return its exit status."""
    print("$", *(str(part).replace(str(ROOT) + os.sep, "") for part in command), flush=True)
    return subprocess.call([str(part) for part in command], cwd=ROOT)


def program(python: Path, module: str, arguments: list[str]) -> int:
    """Run one of the project's programs in the user's folder, where the files lie that he names."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.call([str(python), "-m", module, *arguments], env={**os.environ, "PYTHONPATH": path})


def environment(name: str, *requirements: str) -> Path:
    """Return the Python of a virtual environment with these requirement files installed; quick when it is there.

    An environment whose installation broke off, or whose requirements have changed, is brought up to date.
    """
    folder = ROOT / f".venv-{name}"
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    files = [ROOT / "requirements" / f"{requirement}.txt" for requirement in requirements]
    wanted = hashlib.sha256(b"".join([sys.version.encode(), *(file.read_bytes() for file in files)])).hexdigest()
    stamp = folder / "requirements.sha256"
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        return python
    say(f"Setting up {folder.name}: torch is large, this takes some minutes the first time")
    stamp.unlink(missing_ok=True)
    venv.create(folder, with_pip=True, clear=not python.exists())
    install: list[str | Path] = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if call(*install, *(f"--requirement={file}" for file in files)) != 0:
        raise SystemExit(f"The packages could not be installed. Check the network, then run this again: {sys.argv}")
    stamp.write_text(wanted)
    return python


def run_steps(python: Path, steps: list[tuple[str, list[str]]]) -> int:
    """Run all steps, whatever the earlier ones gave, and say which failed."""
    failed = []
    for name, arguments in steps:
        say(name)
        if call(python, *arguments) != 0:
            failed.append(name)
    say(f"failed: {', '.join(failed)}" if failed else "all passed")
    return 1 if failed else 0


CHECKS = [
    ("lint", ["-m", "ruff", "check", "."]),
    ("format", ["-m", "ruff", "format", "--check", "."]),
    ("types", ["-m", "mypy"]),
]


def lint(options: argparse.Namespace) -> int:
    """Lint, format and types."""
    return run_steps(environment("current", *CURRENT), CHECKS)


def test(options: argparse.Namespace) -> int:
    """Lint, format and types, then all tests that need neither a WebUI nor a GPU, with each torch that can be had."""
    failed = 0
    for stack in [options.stack] if options.stack else CI_STACKS:
        current = stack == "current"
        # The demo's libraries need a newer torch than the WebUI brings: its tests run with the current one.
        python = environment(stack, *(CURRENT if current else (f"stack-{stack}", "test")))
        say(f"With {stack_of(stack)}")
        failed |= run_steps(python, [*(CHECKS if current else []), ("tests", ["-m", "pytest", *options.pytest])])
    return failed


def stack_of(stack: str) -> str:
    """The torch that a stack pins, as its requirement names it."""
    lines = (ROOT / "requirements" / f"stack-{stack}.txt").read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith("torch"))


def demo(options: argparse.Namespace) -> int:
    """The main job on the embedded model, or on a checkpoint of the user's; or the settings panel."""
    if options.serve:
        return program(environment("serve", "serve"), "demo.serve", options.arguments)
    say("The demo takes about three minutes on two cores, after its first set-up")
    return program(environment("current", *CURRENT), "demo", options.arguments)


def bench(options: argparse.Namespace) -> int:
    """Size, quality and time against other ways to hold weights in 8 bits."""
    python = environment("bench", "stack-current", "demo", "bench")
    return program(python, "tools.bench", options.arguments)


TRAININGS = {
    "model": "tools.train_tiny_sd",
    "networks": "tools.train_networks",
    "lora": "tools.train_lora",
    "score": "tools.score_tiny_sd",
}


def train(options: argparse.Namespace) -> int:
    """Train the embedded model or the networks on it, or let the judge score it."""
    python = environment("train", "stack-current", "demo", "train")
    return program(python, TRAININGS[options.what], options.arguments)


def main() -> int:
    """Read the command line and run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    own_help: dict[str, Any] = {"add_help": False}
    commands.add_parser("lint", help="lint, format and types").set_defaults(run=lint)
    demos = commands.add_parser("demo", help="8-bit weights at work: a picture grid, a report and a table", **own_help)
    demos.add_argument("--serve", action="store_true", help="instead: the settings panel in a page of its own")
    demos.set_defaults(run=demo)
    tests = commands.add_parser("test", help="lint and tests (eight minutes after the first set-up)")
    tests.add_argument("--stack", choices=STACKS, help=f"with this torch only (default: {', '.join(CI_STACKS)})")
    tests.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    tests.set_defaults(run=test)
    benches = commands.add_parser(
        "bench", help="size, quality and time; needs 12 GB of memory, some minutes", **own_help
    )
    benches.set_defaults(run=bench)
    trainings = commands.add_parser(
        "train",
        help="a LoRA over a model in 8 bits, as an example (lora); or the embedded model anew, in an hour",
        **own_help,
    )
    trainings.add_argument("what", choices=TRAININGS)
    trainings.set_defaults(run=train)
    # What follows demo, bench and train belongs to the program behind them, which has a --help of its own.
    options, rest = parser.parse_known_args()
    if rest and options.command in ("lint", "test"):
        parser.error(f"unknown: {' '.join(rest)}")
    options.arguments = [argument for argument in rest if argument != "--"]
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
