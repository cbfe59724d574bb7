"""Speaking to a running WebUI: pictures, options, and the probe extension of these tests."""

from __future__ import annotations

import base64
import io
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

PROMPT = "a red circle on a blue background"
FIELDS = {"steps": 4, "width": 64, "height": 64, "seed": 1, "sampler_name": "Euler", "cfg_scale": 4}
"""Fields of every request, unless it says otherwise."""
HIRES = {
    "enable_hr": True,
    "hr_scale": 2,
    "hr_upscaler": "Latent",
    "hr_second_pass_steps": 4,
    "denoising_strength": 0.7,
}
"""Fields of a request for a second pass at twice the size."""


class ApiError(RuntimeError):
    """The WebUI answered a request with an error; the message holds its answer."""


@dataclass(frozen=True)
class Picture:
    """A generated picture (height, width, 3) uint8, and the generation parameters below it."""

    pixels: np.ndarray
    infotext: str

    def __eq__(self, other: object) -> bool:
        """Same pixels."""
        return isinstance(other, Picture) and np.array_equal(self.pixels, other.pixels)

    __hash__ = None  # type: ignore[assignment]

    def psnr(self, other: Picture) -> float:
        """Likeness in dB; infinite for equal pictures."""
        error = np.mean((self.pixels.astype(float) - other.pixels.astype(float)) ** 2)
        return float("inf") if error == 0 else float(10 * np.log10(255**2 / error))


def _encoded(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def _start_image() -> str:
    image = Image.new("RGB", (64, 64), (40, 80, 200))
    ImageDraw.Draw(image).ellipse((8, 8, 40, 40), fill=(220, 60, 30))
    return _encoded(image)


def _mask() -> str:
    image = Image.new("L", (64, 64))
    ImageDraw.Draw(image).rectangle((24, 24, 63, 63), fill=255)
    return _encoded(image)


def _decoded(answer: dict[str, Any]) -> list[Picture]:
    infotexts = json.loads(answer["info"])["infotexts"]
    images = [Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB") for data in answer["images"]]
    texts = [*infotexts, *[""] * len(images)]
    return [Picture(np.asarray(image), text) for image, text in zip(images, texts)]


class Client:
    """The API of one WebUI.

    Args:
        url: without a slash at the end.
        log: gives what the console says so far.
    """

    def __init__(self, url: str, log: Callable[[], str]):
        self.url = url
        self.log = log

    def request(self, path: str, body: Any = None) -> Any:
        """GET, or POST if there is a body; the decoded answer."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise ApiError(f"{error.code} {path}: {error.read().decode()[:2000]}") from None

    def probe(self, name: str, **arguments: Any) -> Any:
        """Call a function of the probe extension."""
        return self.request("/fp8-live-probe", {"name": name, "arguments": arguments})

    def options(self) -> dict[str, Any]:
        """All options as they are now."""
        return self.request("/sdapi/v1/options")

    def fp8_options(self) -> dict[str, Any]:
        """The options of the extension, without its panel."""
        return {k: v for k, v in self.options().items() if k.startswith("fp8_") and k != "fp8_status"}

    def set(self, **options: Any) -> None:
        """Change options as the Apply button does."""
        self.request("/sdapi/v1/options", options)

    def status(self) -> dict[str, Any]:
        """What the extension says of the model in use."""
        return self.request("/sdapi/v1/fp8-weight")

    def txt2img(self, prompt: str = PROMPT, **fields: Any) -> Picture:
        """One picture, 64 x 64, seed 1."""
        return self._pictures("txt2img", {"prompt": prompt, **fields})[0]

    def grid(self, **fields: Any) -> list[Picture]:
        """All pictures of one request."""
        return self._pictures("txt2img", {"prompt": PROMPT, **fields})

    def img2img(self, prompt: str = PROMPT, *, masked: bool = False, **fields: Any) -> Picture:
        """One picture from a drawn one; with a mask over its lower right if wanted."""
        mask = {"mask": _mask(), "inpainting_fill": 1, "mask_blur": 0, "inpaint_full_res": False} if masked else {}
        body = {"prompt": prompt, "init_images": [_start_image()], "denoising_strength": 0.75, **mask, **fields}
        return self._pictures("img2img", body)[0]

    def begin(self, number: int, **fields: Any) -> None:
        """Begin one picture in a thread of the WebUI that the closing of its server does not wait for."""
        self.probe("begin_picture", number=number, fields={**FIELDS, **fields})

    def begun(self, number: int) -> Picture:
        """Wait for a picture that was begun."""
        while (answer := self.probe("begun_picture", number=number)) is None:
            time.sleep(0.1)
        if "error" in answer:
            raise ApiError(answer["error"])
        return _decoded(answer)[0]

    def _pictures(self, kind: str, fields: dict[str, Any]) -> list[Picture]:
        return _decoded(self.request(f"/sdapi/v1/{kind}", {**FIELDS, **fields}))

    def reload_ui(self, button: str = "request_restart") -> None:
        """Press "Reload UI" and wait until the new page is there.

        Args:
            button: the function of the probe that stands for it.
        """
        position = len(self.log())
        self.probe(button)
        end = time.monotonic() + 120
        while time.monotonic() < end:
            if "Startup time" in self.log()[position:]:
                return
            time.sleep(0.3)
        raise TimeoutError(f"the page did not come back:\n{self.log()[-2000:]}")
