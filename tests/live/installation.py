"""The WebUI to be tested, as it lies there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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

    def environment(self, data: Path) -> dict[str, str]:
        """Variables for a process of the WebUI that is to write into a data folder only."""
        kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")}
        paths = {"PYTHONPYCACHEPREFIX": self.bytecode, "HF_HOME": data / "hf", "MPLCONFIGDIR": data / "mpl"}
        return {**kept, **ENVIRONMENT, **{name: str(path) for name, path in paths.items()}}

    @contextlib.contextmanager
    def left_as_it_was(self) -> Iterator[None]:
        """Removes the empty folders that the WebUI makes in its code; raises if it leaves more."""
        before = set(self.folder.iterdir())
        try:
            yield
        finally:
            for trace in set(self.folder.iterdir()) - before:
                trace.rmdir()
