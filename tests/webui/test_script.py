"""scripts/fp8_weight.py, executed by path as the WebUI does."""

from __future__ import annotations

import subprocess
import sys

from webui.host import SCRIPT, STANDINS

CALLBACKS = {"model_loaded": 1, "before_ui": 1, "infotext_pasted": 1, "app_started": 1, "script_unloaded": 1}


def counts(host):
    return {name: len(callbacks) for name, callbacks in host.script_callbacks.callbacks.items() if callbacks}


def test_registers_its_callbacks_once_however_often_it_is_executed(host):
    for _ in range(3):
        host.scripts.load_scripts([SCRIPT])
        assert host.errors.shown == []
        assert counts(host) == CALLBACKS
        host.script_callbacks.run("script_unloaded")


def test_package_state_survives_a_second_execution(host):
    host.scripts.load_scripts([SCRIPT])
    package = sys.modules["lib_fp8.webui"]
    host.script_callbacks.run("script_unloaded")
    host.scripts.load_scripts([SCRIPT])
    assert sys.modules["lib_fp8.webui"] is package


def test_is_one_script_that_acts_in_every_job_and_has_no_controls(host):
    host.start()
    (found,) = (data for data in host.scripts.scripts_data if data.path == str(SCRIPT))
    script = found.script_class()
    assert script.title() == "FP8 weight"
    assert script.show(False) is script.show(True) is host.scripts.AlwaysVisible
    assert not hasattr(script, "ui")


def test_errors_of_the_script_reach_the_console_not_the_job(host):
    """Nothing of ours raises in the methods of a script, which the WebUI would only print."""
    host.checkpoint()
    host.start(fp8_storage="Enable")
    host.job(fp8_format="int8")
    host.job(fp8_storage="Disable")
    assert host.errors.shown == []


ALONE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from modules import errors, scripts, script_callbacks, shared
assert not any(Path(entry, "lib_fp8").exists() for entry in sys.path), sys.path
before = list(sys.path)
for _ in range(2):
    scripts.load_scripts([sys.argv[2]])
    assert errors.shown == [], errors.shown
    assert sys.path == before
    assert "fp8_format" in shared.opts.data_labels
    # What is imported late must be found although the folder has left sys.path.
    script_callbacks.run("before_ui")
    script_callbacks.run("ui_settings")
    assert shared.opts.data_labels["fp8_status"].default
    script_callbacks.run("script_unloaded")
    assert "fp8_format" in shared.opts.data_labels, "it comes back"
shared.opts.disabled_extensions = [Path(sys.argv[2]).parent.parent.name]
script_callbacks.run("script_unloaded")
assert "fp8_format" not in shared.opts.data_labels
"""


def test_with_its_folder_on_the_path_only_while_it_runs(tmp_path):
    done = subprocess.run(
        [sys.executable, "-P" if sys.version_info >= (3, 11) else "-B", "-c", ALONE, str(STANDINS), str(SCRIPT)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PATH": "", "SYSTEMROOT": ""},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
