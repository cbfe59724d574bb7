"""Checkpoints and networks for a WebUI: the embedded ones, and random ones of every other kind, made once and kept."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

from live import recipe
from live.installation import FLAGS, Installation

ROOT = Path(__file__).resolve().parents[2]
EMBEDDED = ROOT / "demo" / "model" / "shapes-sd1.safetensors"
LIMIT = 600
"""Seconds until making them counts as failed."""


class Models:
    """The files that a WebUI is given; those that are made lie in a cache, anew when the recipe changes.

    Args:
        installation: its classes and configurations give the layouts.
        cache: a folder that stays.
    """

    def __init__(self, installation: Installation, cache: Path) -> None:
        self._installation = installation
        ours = _digest([Path(recipe.__file__), EMBEDDED.parent / "clip" / "vocab.json"])
        theirs = _digest(installation.folder / kind.configuration for kind in recipe.KINDS.values())
        for old in cache.iterdir():
            if not old.name.startswith(ours):
                shutil.rmtree(old)
        self._folder = cache / f"{ours}-{theirs}"
        self.clip = self._folder / "clip"
        for folder, sizes in recipe.CLIPS.items():
            _write_clip(self._folder / folder, sizes)
        self._make(name for name in recipe.KINDS if name != recipe.FULL_SIZE)

    def checkpoints(self) -> list[Path]:
        """The .safetensors files; a configuration lies beside each."""
        return [EMBEDDED, *self._folder.glob("*.safetensors")]

    def networks(self) -> list[Path]:
        """Files for the Lora folder."""
        return [*EMBEDDED.parent.glob("loras/*.safetensors"), *self._folder.glob("lora/*.safetensors")]

    def find(self, name: str) -> Path:
        """The file of a checkpoint, or of a network named ``lora/NAME``."""
        kind, _, last = name.rpartition("/")
        return next(file for file in (self.networks() if kind else self.checkpoints()) if file.stem == last)

    def full_size(self) -> Path:
        """A checkpoint of SD1.5 in its real size, made when it is first asked for."""
        self._make([recipe.FULL_SIZE])
        return self.find(recipe.FULL_SIZE)

    def _make(self, names: Iterable[str]) -> None:
        missing = [name for name in names if not (self._folder / f"{name}.yaml").is_file()]
        if not missing:
            return
        with tempfile.TemporaryDirectory(dir=self._folder) as made, tempfile.TemporaryDirectory() as data:
            command = [self._installation.python, recipe.__file__, self._installation.folder, made, ",".join(missing)]
            command += [*FLAGS, "--data-dir", data]
            with self._installation.left_as_it_was():
                done = subprocess.run(
                    [str(part) for part in command],
                    cwd=self._folder,
                    env=self._installation.environment(Path(data)),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    timeout=LIMIT,
                )
            if done.returncode:
                raise RuntimeError(f"no checkpoints: {done.stdout.decode(errors='replace')[-3000:]}")
            (self._folder / "lora").mkdir(exist_ok=True)
            for pattern in ("lora/*", "*.safetensors", "*.yaml"):  # configurations last: they say that all is there
                for file in Path(made).glob(pattern):
                    file.rename(self._folder / file.relative_to(made))


def _digest(files: Iterable[Path]) -> str:
    content = hashlib.sha256()
    for file in files:
        content.update(file.read_bytes())
    return content.hexdigest()[:12]


def _write_clip(folder: Path, sizes: dict[str, int]) -> None:
    """The embedded tokenizer, and the configuration of a text encoder of other sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in (EMBEDDED.parent / "clip").iterdir():
        content = file.read_text(encoding="utf8")
        if file.name == "config.json":
            own = {**sizes, "projection_dim": sizes["hidden_size"]}
            found = json.loads(content)
            content = json.dumps({**found, **own, "text_config": {**found["text_config"], **own}})
        (folder / file.name).write_text(content, encoding="utf8")
