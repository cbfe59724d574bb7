"""The project's commands, from nothing but Python: `python run.py test`, `lint` and `bench`.

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

ROOT = Path(__file__).resolve().parent
STACKS = sorted(path.stem.removeprefix("stack-") for path in (ROOT / "requirements").glob("stack-*.txt"))


def say(text: str) -> None:
    """Tell the user what happens now."""
    print(f"== {text}", flush=True)


def call(*command: str | Path) -> int:
    """Run a command in the project's folder and return its exit status."""
    print("$", *(str(part).replace(str(ROOT) + os.sep, "") for part in command), flush=True)
    return subprocess.call([str(part) for part in command], cwd=ROOT)


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
    return run_steps(environment("current", "stack-current", "test"), CHECKS)


def test(options: argparse.Namespace) -> int:
    """All tests that need neither a WebUI nor a GPU; with the current torch, lint, format and types before them."""
    python = environment(options.stack, f"stack-{options.stack}", "test")
    checks = CHECKS if options.stack == "current" else []
    return run_steps(python, [*checks, ("tests", ["-m", "pytest", *options.pytest])])


def bench(options: argparse.Namespace) -> int:
    """Size, quality and time against other ways to hold weights in 8 bits."""
    python = environment("bench", "stack-current", "bench")
    return call(python, "-m", "tools.bench", *options.arguments)


def main() -> int:
    """Read the command line and run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("lint", help="lint, format and types").set_defaults(run=lint)
    tests = commands.add_parser("test", help="lint and tests (about five minutes after the first set-up)")
    tests.add_argument("--stack", choices=STACKS, default="current", help="which torch (default: current)")
    tests.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    tests.set_defaults(run=test)
    benches = commands.add_parser("bench", help="size, quality and time; needs 12 GB of memory, some minutes")
    benches.add_argument("arguments", nargs="*", help="arguments for the bench, after --; -- --help lists them")
    benches.set_defaults(run=bench)
    options = parser.parse_args()
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
