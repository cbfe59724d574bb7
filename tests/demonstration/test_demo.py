"""The whole demo on the embedded model: figures as promised, a page that needs nothing else, clear errors."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import ROOT
from PIL import Image

from demo.__main__ import main
from demo.experiment import LoraEffect, Plan, Result, Row
from demo.generation import Work
from demo.model import CHECKPOINT, LORAS
from demo.promises import broken_promises
from demo.variants import VARIANTS


@pytest.fixture
def demo(monkeypatch, tmp_path, capsys):
    """``demo(*arguments)`` runs the program in an empty folder and gives status, output and errors."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["demo", *map(str, arguments)])
        try:
            status = main()
        except SystemExit as stop:
            status = stop.code
        return status, *capsys.readouterr()

    return run


def process(*arguments, folder):
    """The program in a process of its own, with all cores: the other tests compute with one."""
    command = [sys.executable, "-m", "demo", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_embedded_model_keeps_every_promise(tmp_path):
    finished = process(folder=tmp_path)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    for variant in VARIANTS:
        assert re.search(rf"^{re.escape(variant.name)} +[\d.]+ MiB", finished.stdout, re.M), finished.stdout
    page = (tmp_path / "demo-report" / "report.html").read_text(encoding="utf-8")
    assert not re.search(r'(?:src|href)="(?!data:)', page)
    assert page.count("<img") == 4 * (2 * len(VARIANTS) - 1) * 8
    assert "{{" not in page
    assert Image.open(tmp_path / "demo-report" / "grid.png").width > 600


def test_own_checkpoint(demo, tmp_path):
    status, said, errors = demo(
        *("--checkpoint", CHECKPOINT, "--lora", LORAS / "shapes-outline.safetensors"),
        *("--prompt", "a red circle", "--steps", "2", "--output", "here"),
    )
    assert status == 0, said + errors
    assert "prompt following" not in said
    assert "LoRA shapes-outline" in said
    assert (tmp_path / "here" / "report.html").exists()


def test_a_process_of_its_own(tmp_path):
    finished = process("--checkpoint", "absent.safetensors", folder=tmp_path)
    assert finished.returncode == 2
    assert finished.stderr == "absent.safetensors: there is no such file\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--checkpoint", "absent.safetensors"), "there is no such file"),
        (("--checkpoint", "model.ckpt"), "only .safetensors"),
        (("--lora", "x.safetensors"), "--checkpoint"),
        (("--checkpoint", CHECKPOINT, "--side", "100"), "multiple of 64"),
        (("--checkpoint", CHECKPOINT, "--steps", "0"), "between 1 and 1000"),
        (("--checkpoint", CHECKPOINT, "--lora", "absent.safetensors", "--steps", "1"), "absent.safetensors"),
        (("--checkpoint", CHECKPOINT, "--prompt", "x", "--steps", "1", "--output", "file"), "could not be written"),
        (("--steps", "3"), "--checkpoint"),
        (("--device", "toaster"), "toaster"),
        (
            ("--checkpoint", CHECKPOINT, "--lora", LORAS / "shapes-dora.safetensors"),
            "it holds dora_scale",
        ),
        (("--checkpoint", CHECKPOINT, *("--lora", LORAS / "shapes-outline.safetensors") * 2), "same name"),
    ],
    ids=lambda value: str(value)[-30:],
)
def test_errors_say_what_to_do(demo, tmp_path, arguments, said):
    (tmp_path / "file").write_text("in the way")
    status, _, errors = demo(*arguments)
    assert status == 2
    assert said in errors


def result(**changes) -> Result:
    """Figures that keep every promise, but for the changes to int8's."""
    effects = {"a": LoraEffect(0.999, 1.0, 1.0)}
    work = Work(("x",), (0,), 64)
    plan = Plan(Path("x"), work, {}, work, torch.device("cpu"), torch.float32, ())
    good = Row("", 1, 2, 3, 0.1, (40.0,), (1.0,), 0.97, effects)
    rows = [replace(good, name=variant.name) for variant in VARIANTS]
    rows[-1] = replace(rows[-1], psnr=(30.0,))
    rows = [replace(row, **changes) if row.name == "int8" else row for row in rows]
    return Result(plan, tuple(rows), {})


@pytest.mark.parametrize(
    "changes",
    [
        {"following": 0.95},
        {"effects": {"a": LoraEffect(0.97, 1.0, 1.0)}},
        {"effects": {"a": LoraEffect(0.999, 1.0, 0.9)}},
        {"effects": {"a": LoraEffect(math.nan, 1.0, 1.0)}},
        {"effects": {"a": LoraEffect(0.999, 1.0, None)}},
        {"psnr": (37.9,)},
        {"psnr": (math.nan,)},
    ],
)
def test_a_broken_promise_is_named(changes):
    assert broken_promises(result()) == []
    (line,) = broken_promises(result(**changes))
    assert "int8" in line
