"""What the WebUI runs at every start: quick, and clear."""

from __future__ import annotations

import importlib.util
import os
import runpy
import subprocess
import sys

from helpers import ROOT

INSTALL = ROOT / "install.py"


def test_it_imports_nothing_large(tmp_path):
    """torch alone takes seconds."""
    (tmp_path / "gradio.py").touch()  # so that nothing is missing
    path = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-v", INSTALL], capture_output=True, text=True, check=True, env=path)
    assert ran.stdout == ""
    imported = {line.split("'")[1].partition(".")[0] for line in ran.stderr.splitlines() if line.startswith("import '")}
    assert "importlib" in imported, "imports are listed"
    assert not imported & {"torch", "numpy", "safetensors", "gradio", "modules", "lib_fp8"}


def test_what_is_missing_is_named(monkeypatch):
    findings = runpy.run_path(str(INSTALL))["findings"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gradio" else object())
    assert findings() == ["gradio not found; the WebUI itself installs what is missing"]


def test_an_old_python_is_told(monkeypatch):
    module = runpy.run_path(str(INSTALL))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(sys, "version_info", (3, 9, 1))
    (line,) = module["findings"]()
    assert "Python 3.10 or later is needed" in line
