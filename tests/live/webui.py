"""Starting and stopping a real WebUI on a throw-away data folder that holds a copy of the extension."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from live.client import ApiError, Client
from live.installation import FLAGS, Installation
from live.models import EMBEDDED, ROOT, Models

EXTENSION = "sd-webui-fp8-weight"
PRODUCT = ("scripts", "lib_fp8", "javascript", "install.py", "metadata.ini", "style.css")
SETTINGS = {
    "fp8_storage": "Disable",
    "live_previews_enable": False,
    "samples_save": False,
    "grid_save": False,
    "sd_checkpoints_limit": 1,
}
PLAIN_PRECISION = ("--precision", "full", "--no-half")
"""What every supported WebUI can run on a CPU."""
START_LIMIT = 240
"""Seconds until a start counts as failed."""


class ExtensionError(RuntimeError):
    """The WebUI came up, but the extension did not; the message is what the console said."""


class StartError(RuntimeError):
    """The WebUI did not come up; the message ends with what its console said."""


def prepare_data(data: Path, models: Models, settings: Mapping[str, Any], extensions: Iterable[Path] = ()) -> Path:
    """Fill a data folder: the extension, the probe, others, links to checkpoints and LoRAs, the configuration."""
    for folder in ("models/Stable-diffusion", "models/Lora", "models/VAE", "extensions"):
        (data / folder).mkdir(parents=True)
    for checkpoint in models.checkpoints():
        for file in checkpoint.parent.glob(f"{checkpoint.stem}.*"):
            (data / "models/Stable-diffusion" / file.name).symlink_to(file)
    for file in models.networks():
        (data / "models/Lora" / file.name).symlink_to(file)
    (data / "clip").symlink_to(models.clip)
    # The configuration names its tokenizer as seen from a WebUI that the extension is installed in.
    clip = data / "extensions" / EXTENSION / "demo" / "model" / "clip"
    clip.parent.mkdir(parents=True)
    clip.symlink_to(EMBEDDED.parent / "clip")
    extension = data / "extensions" / EXTENSION
    ignore = shutil.ignore_patterns("__pycache__")
    for name in PRODUCT:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, extension / name, ignore=ignore)
        elif source.exists():
            shutil.copy(source, extension)
    shutil.copytree(Path(__file__).parent / "probe", data / "extensions" / "fp8-live-probe", ignore=ignore)
    for other in extensions:
        shutil.copytree(other, data / "extensions" / other.name, ignore=shutil.ignore_patterns("__pycache__", ".git"))
    (data / "config.json").write_text(json.dumps({**SETTINGS, **settings}), encoding="utf8")
    return data


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class WebUI:
    """One running WebUI; ``client`` speaks to it, ``log()`` is what its console says."""

    def __init__(self, installation: Installation, data: Path, flags: Iterable[str]):
        self.installation = installation
        self.data = data
        self._traces = contextlib.ExitStack()
        self._traces.enter_context(installation.left_as_it_was())
        port = _free_port()
        self.client = Client(f"http://127.0.0.1:{port}", self.log)
        command = [installation.python, installation.folder / "launch.py", "--data-dir", data, "--port", port]
        command += ["--gradio-allowed-path", installation.folder]  # so that its page gets its scripts,
        for name in ("script.js", "javascript", "style.css", "extensions-builtin"):  # which 1.6 seeks in cwd
            (data / name).symlink_to(installation.folder / name)
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [str(part) for part in (*command, *FLAGS, *flags)],
                cwd=data,
                env=installation.environment(data),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_until_up()
        except BaseException:
            self.stop()
            raise

    @property
    def _log_path(self) -> Path:
        return self.data / "console.log"

    def log(self) -> str:
        """What the console says so far."""
        return self._log_path.read_text(encoding="utf8", errors="replace")

    def _wait_until_up(self) -> None:
        end = time.monotonic() + START_LIMIT
        problem = f"no answer in {START_LIMIT} s"
        while time.monotonic() < end:
            if self._process.poll() is not None:
                problem = "the WebUI ended"
                break
            if "Startup time" in self.log():  # not earlier: a request that comes too soon breaks the WebUI's start
                if "Error loading script: fp8_weight.py" in self.log():
                    raise ExtensionError(self.log()[:5000])
                with contextlib.suppress(ApiError):  # some flags do not let it load a model; the tests will see
                    self.client.probe("checkpoint")
                return
            time.sleep(0.3)
        raise StartError(f"{problem}; its console ends with\n{self.log()[-3000:]}")

    def stop(self) -> None:
        """End it with all its children, and remove the empty folders that it left in its code."""
        for number, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, 10)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience)
        self._traces.close()
