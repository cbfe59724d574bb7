"""Other extensions that run layers by themselves, or change what goes through them, over 8-bit weights.

Each runs in a WebUI that holds no further one. Its checkout is sought in ``--extensions DIR``.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from live.alike import FORMATS, Take, assert_acts_alike, assert_no_errors, shots
from live.conftest import reset


@dataclass(frozen=True)
class Reader:
    """An extension.

    Attributes:
        folder: name of its checkout.
        script: title of its script.
        arguments: of its script.
        words: added to prompts.
        fields: more fields of the request.
        prepare: changes a copy of the checkout before it is installed.
        again: whether it needs the page to be loaded a second time.
    """

    folder: str
    script: str
    arguments: list
    words: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[Path], None] | None = None
    again: bool = False

    def takes(self, **fields: Any) -> tuple[Take, Take]:
        """Makers of pictures without it and with it."""
        fields = {"words": self.words, **self.fields, **fields}
        return shots(**fields), shots(**fields, alwayson_scripts={self.script: {"args": self.arguments}})


def _narrow_layers(folder: Path) -> None:
    """FreeU knows the layers of SD by their widths; those of the small model are others."""
    file = folder / "lib_free_u" / "unet.py"
    code = file.read_text("utf8")
    assert "[1280, 640, 320]" in code
    file.write_text(code.replace("[1280, 640, 320]", "[64, 128]"), "utf8")


def _tiled(method: str) -> Reader:
    arguments = [True, method, False, True, 1024, 1024, 16, 16, 8, 2]  # tiles of 16 x 16 latents, 8 of them shared
    size = {"width": 192, "height": 128}
    return Reader("multidiffusion-upscaler-for-automatic1111", "Tiled Diffusion", arguments, fields=size)


STAGE = {"backbone_factor": 1.4, "skip_factor": 0.5}
READERS = {
    "negpip": Reader(
        "sd-webui-negpip",
        "NegPiP",
        [True],
        words=", (stripes:-1.5)",
        again=True,  # it reads a file that the WebUI writes when its page is there
    ),
    "multidiffusion": _tiled("MultiDiffusion"),
    "mixture-of-diffusers": _tiled("Mixture of Diffusers"),
    "dynamic-thresholding": Reader(
        "sd-dynamic-thresholding",
        "Dynamic Thresholding (CFG Scale Fix)",
        [True, 3.0, 99.0, "Constant", 0, "Half Cosine Up", 4, 4, True, "MEAN", "AD", 1.0],
        fields={"cfg_scale": 12},
    ),
    "freeu": Reader(
        "sd-webui-freeu",
        "FreeU",
        [{"version": "Version 2", "stage_infos": [STAGE, STAGE]}],
        fields={"width": 128, "height": 128},  # it divides by the spread over the pixels of the smallest layer
        prepare=_narrow_layers,
    ),
}


@pytest.fixture(scope="module")
def checkout(other_extension, tmp_path_factory):
    """``checkout(reader)`` gives the folder of an extension, prepared."""
    made: dict[str, Path] = {}

    def find(reader: Reader) -> Path:
        folder = other_extension(reader.folder)
        if reader.prepare is None:
            return folder
        if reader.folder not in made:
            ignore = shutil.ignore_patterns("__pycache__", ".git")
            copy = shutil.copytree(folder, tmp_path_factory.mktemp("extension") / folder.name, ignore=ignore)
            reader.prepare(copy)
            made[reader.folder] = copy
        return made[reader.folder]

    return find


@pytest.mark.parametrize("storage", FORMATS)
@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_acts_alike(rack, checkout, reader: Reader, storage):
    running = rack.shared(checkout(reader))
    client = running.client
    if reader.again and reader.script not in _scripts(client):
        client.reload_ui()
    reset(client)
    position = len(running.log())
    assert_acts_alike(client, storage, *reader.takes())
    assert_no_errors(running.log()[position:])


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_acts_alike_in_half_precision(start_if_able, checkout, reader: Reader):
    """Without autocast nobody else brings weights and inputs to one dtype."""
    without, with_it = reader.takes(count=1, steps=3)  # it is slow on a CPU

    def work(running):
        if reader.again:
            running.client.reload_ui()
        with_it(running.client)
        return running

    running = start_if_able(work, ("--precision", "half"), extensions=[checkout(reader)])
    position = len(running.log())
    assert_acts_alike(running.client, FORMATS[0], without, with_it)
    assert_no_errors(running.log()[position:])


def _scripts(client) -> list[str]:
    return client.request("/sdapi/v1/scripts")["txt2img"]
