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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from live.client import ApiError, Client

ROOT = Path(__file__).resolve().parents[2]
EXTENSION = "sd-webui-fp8-weight"
EMBEDDED = ROOT / "demo" / "model" / "shapes-sd1.safetensors"
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
FLAGS = (
    *("--skip-prepare-environment", "--skip-python-version-check", "--skip-torch-cuda-test", "--skip-version-check"),
    *("--no-download-sd-model", "--do-not-download-clip", "--use-cpu", "all", "--api"),
    "--disable-console-progressbars",
)
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "GRADIO_ANALYTICS_ENABLED": "False",
    "COMMANDLINE_ARGS": "",
    "OMP_NUM_THREADS": "1",  # the models are tiny: threads would only wait for each other
    "PYTHONUNBUFFERED": "1",
    "PYTHONWARNINGS": "ignore",
    "SD_WEBUI_RESTARTING": "1",  # opens no browser
}
START_LIMIT = 240
"""Seconds until a start counts as failed."""


class ExtensionError(RuntimeError):
    """The WebUI came up, but the extension did not; the message is what the console said."""


class StartError(RuntimeError):
    """The WebUI did not come up; the message ends with what its console said."""


@dataclass(frozen=True)
class Installation:
    """A WebUI to be tested.

    Attributes:
        folder: its code; left as it was.
        python: an interpreter that can run it.
        bytecode: where Python keeps its bytecode.
    """

    folder: Path
    python: Path
    bytecode: Path

    @property
    def version(self) -> tuple[int, ...]:
        """The newest release in its change log."""
        heading = (self.folder / "CHANGELOG.md").read_text(encoding="utf8").split(maxsplit=2)[1]
        return tuple(int(part) for part in heading.partition("-")[0].split("."))  # 1.8.0 calls itself 1.8.0-RC


@dataclass(frozen=True)
class Models:
    """Checkpoints and networks that a WebUI can be given: the embedded ones, and those of another folder, if any."""

    folder: Path | None

    def checkpoints(self) -> list[Path]:
        """The .safetensors files; a configuration may lie beside each."""
        own = [file for file in self._others("*.safetensors") if file.name != EMBEDDED.name]
        return [EMBEDDED, *own]

    def networks(self) -> list[Path]:
        """Files for the Lora folder."""
        return [*EMBEDDED.parent.glob("loras/*.safetensors"), *self._others("lora/*.safetensors")]

    def find(self, name: str) -> Path | None:
        """The file of a checkpoint, or of a network named ``lora/NAME``."""
        kind, _, last = name.rpartition("/")
        return next((f for f in (self.networks() if kind else self.checkpoints()) if f.stem == last), None)

    def _others(self, pattern: str) -> list[Path]:
        return [] if self.folder is None else list(self.folder.glob(pattern))


def prepare_data(data: Path, models: Models, settings: Mapping[str, Any], extensions: Iterable[Path] = ()) -> Path:
    """Fill a data folder: the extension, the probe, others, links to checkpoints and LoRAs, the configuration."""
    for folder in ("models/Stable-diffusion", "models/Lora", "models/VAE", "extensions"):
        (data / folder).mkdir(parents=True)
    for checkpoint in models.checkpoints():
        for file in checkpoint.parent.glob(f"{checkpoint.stem}.*"):
            (data / "models/Stable-diffusion" / file.name).symlink_to(file)
    for file in models.networks():
        (data / "models/Lora" / file.name).symlink_to(file)
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
        self._before = set(installation.folder.iterdir())
        port = _free_port()
        self.client = Client(f"http://127.0.0.1:{port}", self.log)
        command = [installation.python, installation.folder / "launch.py", "--data-dir", data, "--port", port]
        command += ["--gradio-allowed-path", installation.folder]  # so that its page gets its scripts,
        for name in ("script.js", "javascript", "style.css", "extensions-builtin"):  # which 1.6 seeks in cwd
            (data / name).symlink_to(installation.folder / name)
        kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")}
        paths = {
            "PYTHONPYCACHEPREFIX": installation.bytecode,
            "HF_HOME": data / "hf",
            "MPLCONFIGDIR": data / "mpl",
        }
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [str(part) for part in (*command, *FLAGS, *flags)],
                cwd=data,
                env={**kept, **ENVIRONMENT, **{k: str(v) for k, v in paths.items()}},
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
        for trace in set(self.installation.folder.iterdir()) - self._before:
            trace.rmdir()  # raises if the WebUI left more than an empty folder
