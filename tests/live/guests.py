"""A WebUI with AnimateDiff and ControlNet, a checkpoint of real size, and files for both in their real layouts.

What is compared is what the UNet made of the last step: the picture decoder of a random checkpoint shows little.
"""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw

from live import layouts
from live.recipe import FULL_SIZE
from live.webui import WebUI

EXTENSIONS = ("sd-webui-animatediff", "sd-webui-controlnet")
OFF = {"fp8_storage": "Disable"}
FULL_GUESTS = {"fp8_storage": "Enable", "fp8_motion_modules": False, "fp8_control_models": False}
ALL = {"fp8_storage": "Enable", "fp8_motion_modules": True, "fp8_control_models": True}
FORMATS = ("float8_e4m3fn", "int8")
FRAMES = 2
SLACK = 4.0
"""dB by which 8-bit guests may add to the error of the 8-bit UNet; equal errors that add up are 3 dB."""


def db(one: np.ndarray, other: np.ndarray) -> float:
    """Signal to noise of the first against the second."""
    noise = np.mean((one - other) ** 2)
    return float("inf") if noise == 0 else float(10 * np.log10(np.mean(other**2) / noise))


MOTION = {"first": lambda: layouts.motion_module(1), "second": lambda: layouts.motion_module(2, middle=True)}
"""AnimateDiff V3 and V2."""
CONTROLS = {
    "controlnet": lambda checkpoint: layouts.controlnet(11, checkpoint),
    "control-lora": lambda checkpoint: layouts.control_lora(12, checkpoint),
    "sparsectrl": lambda checkpoint: layouts.sparse_control(13, checkpoint),
    "t2iadapter": lambda _: layouts.t2i_adapter(14),
    "ip-adapter": lambda _: layouts.ip_adapter(15),
    "lllite": lambda _: layouts.lllite(16),
}


_FOLDERS = {
    "motion": f"extensions/{EXTENSIONS[0]}/model",
    "control": "models/ControlNet",
    "lora": "models/Lora",
}


def write_files(folder: Path, checkpoint: Path) -> Path:
    """Write one file of each kind; some are copies of parts of a checkpoint."""
    layouts.write(folder / "motion", ((name, make()) for name, make in MOTION.items()))
    layouts.write(folder / "control", ((name, make(checkpoint)) for name, make in CONTROLS.items()))
    layouts.write(folder / "lora", iter([("motion", layouts.motion_lora(3))]))
    return folder


def _base64_torch(value: Any) -> str:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def control_picture() -> str:
    """A drawing of 64 x 64."""
    image, buffer = Image.new("RGB", (64, 64), (10, 120, 60)), io.BytesIO()
    ImageDraw.Draw(image).polygon([(4, 60), (30, 6), (60, 50)], fill=(240, 200, 40))
    image.save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def control(model: str, **fields: Any) -> dict[str, Any]:
    """What ControlNet is asked for with one model; ``reference_only`` is a preprocessor without one."""
    unit: dict[str, Any] = {"enabled": True, "module": "none", "model": model, "image": control_picture()}
    if model == "ip-adapter":
        embedding = torch.randn(1, 1024, generator=torch.Generator().manual_seed(4))
        unit |= {"module": "ip-adapter_clip_h", "ipadapter_input": [_base64_torch({"image_embeds": embedding})]}
    if model == "reference_only":
        unit |= {"module": model, "model": "None"}
    return {"ControlNet": {"args": [{**unit, **fields}]}}


def motion(model: str, **fields: Any) -> dict[str, Any]:
    """What AnimateDiff is asked for with one motion module."""
    args = {"enable": True, "model": f"{model}.safetensors", "video_length": FRAMES, "batch_size": FRAMES}
    return {"AnimateDiff": {"args": [{**args, "format": ["PNG"], **fields}]}}


class Stage:
    """Makes pictures with guests, and sees what is in memory.

    Args:
        running: gets the files for both extensions, and LoRAs: ``motion`` for motion modules, ``on-unet``.
        files: what ``write_files`` has written.
        folder: for what the probe writes.
    """

    def __init__(self, running: WebUI, files: Path, folder: Path) -> None:
        self.client = running.client
        self._file = folder / "latent.npy"
        self._full: dict[str, np.ndarray] = {}
        for source, target in _FOLDERS.items():
            (running.data / target).mkdir(exist_ok=True)
            for file in (files / source).iterdir():
                (running.data / target / file.name).symlink_to(file)
        self.client.set(sd_model_checkpoint=f"{FULL_SIZE}.safetensors")
        unet_lora = running.data / "models/Lora/on-unet.safetensors"
        self.client.probe("write_lora", path=str(unet_lora), rank=4, seed=5)
        self.client.request("/sdapi/v1/refresh-loras", {})
        self.client.request("/controlnet/model_list?update=true")

    def hold(self, wanted: dict[str, Any], **more: Any) -> None:
        """Bring the settings to these; what is not named has its default, but for the format that a CPU is quick at."""
        defaults = {} if wanted == OFF else {"fp8_format": "int8", "fp8_lora": "Merge from checkpoint file"}
        self.client.set(**{**defaults, **wanted, **more})

    def latent(self, *scripts: dict[str, Any], prompt: str = "a house", **fields: Any) -> np.ndarray:
        """The last latent of a job with these scripts."""
        alwayson = {name: args for script in scripts for name, args in script.items()}
        self.client.txt2img(prompt, **{"steps": 1, "alwayson_scripts": alwayson, **fields})
        self.client.probe("save_latent", path=str(self._file))
        return np.load(self._file)

    def full(self, name: str, *scripts: dict[str, Any], **fields: Any) -> np.ndarray:
        """The same in full precision, made once, and known by a name."""
        if name not in self._full:
            self.hold(OFF)
            self._full[name] = self.latent(*scripts, **fields)
        return self._full[name]

    def acts_as_in_full_precision(self, job: dict[str, Any], guest: str, storage: str, still: np.ndarray) -> np.ndarray:
        """Hold a guest and the UNet in a format; asserts that what the guest does stays, and gives the latent.

        Args:
            job: what the other extension is asked for.
            guest: the guest's name in memory.
            storage: a format.
            still: the latent in full precision without the guest.
        """
        wanted = self.full(f"{guest} {job}", job)
        self.hold(FULL_GUESTS, fp8_format=storage)
        unet_only = self.latent(job)
        assert in_8_bits(self.guest(guest), storage) == []
        self.hold(ALL, fp8_format=storage)
        both = self.latent(job)
        print(f"{storage} {guest}: UNet {db(unet_only, wanted):.1f} dB, both {db(both, wanted):.1f}")
        assert db(both, wanted) >= db(unet_only, wanted) - SLACK
        assert db(still, wanted) < db(both, wanted) - 6, "the guest does nothing"
        return both

    def still(self, **fields: Any) -> np.ndarray:
        """Without guests, as many pictures as frames."""
        return self.latent(batch_size=FRAMES, **fields)

    def guest(self, name: str) -> dict[str, Any]:
        """One module in memory."""
        return self.client.probe("guests")[name]

    def said(self, text: str) -> int:
        """How often the console has said something so far."""
        return self.client.log().count(text)


def in_8_bits(guest: dict[str, Any], storage: str) -> list[str]:
    """Names of the tensors of a guest that are in a format."""
    return [name for name, told in guest["tensors"].items() if told.startswith(f"{storage}:")]
