"""Many clients at once, settings changed and the page reloaded meanwhile: every picture is the one made alone."""

from __future__ import annotations

import itertools
import random
import shutil
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import safetensors.torch
import torch

from live.client import Client, Picture
from live.webui import EMBEDDED, EXTENSION, WebUI

CLIENTS, JOBS = 10, 20
RELOADS = 6
FIRST, SECOND = EMBEDDED.name, "second.safetensors"
WAYS = ("Merge from checkpoint file", "Merge from copy in RAM", "Add at run time")
FORMATS = ("float8_e4m3fn", "int8", "float8_e5m2", "float8_e4m3fn unscaled")
LORAS = ("", "<lora:shapes-outline:1>", "<lora:shapes-stripes:0.7><lora:shapes-loha:1>", "<lora:shapes-outline:0.5>")
SUBJECTS = ("a red circle on a blue background", "a green square on a white background", "two yellow triangles")
READ = (
    *("/", "/config", "/internal/quicksettings-hint"),
    *("/sdapi/v1/options", "/sdapi/v1/fp8-weight", "/sdapi/v1/progress", "/sdapi/v1/sd-models", "/sdapi/v1/loras"),
)
"""What a page asks for, and what programs ask for."""
CHANGED = [
    *({"fp8_format": "int8"}, {"fp8_lora": WAYS[2]}, {"fp8_storage": "Enable"}, {"fp8_clip_l": True}),
    *({"fp8_format": "float8_e4m3fn"}, {"fp8_lora": WAYS[0]}, {"fp8_keep_layers": ""}, {"fp8_storage": "Disable"}),
]
"""Settings that are saved meanwhile; no other one can be: the WebUI lets it act on the job that is running."""


def jobs_of(client: int, fp8: bool) -> list[dict[str, Any]]:
    """The requests of one client: all with settings of its own, and each with other networks."""
    settings: dict[str, Any] = {"sd_model_checkpoint": (FIRST, SECOND)[client % 2]}
    if fp8:
        settings |= {
            "fp8_storage": "Disable" if client == CLIENTS - 1 else "Enable",
            "fp8_format": FORMATS[client % len(FORMATS)],
            "fp8_lora": WAYS[client % len(WAYS)],
            "fp8_clip_l": client % 3 == 0,
            "fp8_keep_layers": "time_embed" if client % 4 == 1 else "time_embed label_emb emb_layers",
        }
    return [
        {"prompt": SUBJECTS[number % 3] + lora, "seed": 10 * client + number, "steps": 3, "override_settings": settings}
        for number, lora in enumerate(LORAS)
    ]


def add_second_checkpoint(webui: WebUI) -> None:
    """The embedded model with noise on the weights of its UNet."""
    folder, generator = webui.data / "models/Stable-diffusion", torch.Generator().manual_seed(2)
    values = safetensors.torch.load_file(EMBEDDED)
    for name, value in values.items():
        if name.startswith("model.diffusion_model") and value.ndim > 1:
            noise = torch.randn(value.shape, generator=generator) * value.float().std()
            values[name] = (value.float() + 0.1 * noise).to(value.dtype)
    safetensors.torch.save_file(values, folder / SECOND)
    shutil.copy(EMBEDDED.with_suffix(".yaml"), (folder / SECOND).with_suffix(".yaml"))
    webui.client.request("/sdapi/v1/refresh-checkpoints", {})


class Traffic:
    """Clients, a reader of the page, somebody who changes settings, and Reload UI.

    Attributes:
        wrong: a line for each picture that is not the one made alone.
        done: how many were made.
    """

    def __init__(self, client: Client, jobs: list[list[dict[str, Any]]]):
        self.wrong: list[str] = []
        self.done = 0
        self._client, self._jobs = client, jobs
        self._alone = [[client.txt2img(**job) for job in some] for some in jobs]
        self._waiting = threading.Condition()
        self._under_way, self._is_closed = 0, False
        self._over = threading.Event()

    def run(self, changed: list[dict[str, Any]]) -> None:
        """Let them all do their work, until the clients have their pictures. What one of them raises is raised."""
        with ThreadPoolExecutor(CLIENTS + 3) as pool:
            clients = [pool.submit(self._make_pictures, number) for number in range(len(self._jobs))]
            others = [pool.submit(self._read), pool.submit(self._change, changed), pool.submit(self._reload)]
            try:
                for each in clients:
                    each.result()
            finally:
                self._over.set()
            for each in others:
                each.result()

    def _request(self, make: Any, *args: Any, **kwargs: Any) -> Any:
        """Not while the server is closed; what comes just before its page is ready breaks the WebUI's start."""
        with self._waiting:
            self._waiting.wait_for(lambda: not self._is_closed)
            self._under_way += 1
        try:
            return make(*args, **kwargs)
        finally:
            with self._waiting:
                self._under_way -= 1
                self._waiting.notify_all()

    def _compare(self, made: Picture, client: int, number: int, when: str) -> None:
        self.done += 1
        alone = self._alone[client][number]
        if made != alone:
            job = self._jobs[client][number]
            self.wrong.append(f"{when}: {made.psnr(alone):.1f} dB\n  {job}\n  {made.infotext}\n  {alone.infotext}")

    def _make_pictures(self, client: int) -> None:
        order = random.Random(client)
        for turn in range(JOBS):
            number = order.randrange(len(self._jobs[client]))
            made = self._request(self._client.txt2img, **self._jobs[client][number])
            self._compare(made, client, number, f"turn {turn}")

    def _get(self, path: str) -> None:
        with urllib.request.urlopen(self._client.url + path, timeout=300) as answer:
            assert answer.status == 200
            assert answer.read()

    def _read(self) -> None:
        for path in itertools.cycle(READ):
            if self._over.wait(0.05):
                return
            self._request(self._get, path)

    def _change(self, changed: list[dict[str, Any]]) -> None:
        for settings in itertools.cycle(changed):
            if self._over.wait(0.5):
                return
            self._request(self._client.set, **settings)

    def _reload(self) -> None:
        """In turns: while requests are under way, for which the server waits when it closes, and in the midst of a
        picture that it does not wait for, as it is with those of the page."""
        share = CLIENTS * JOBS // (RELOADS + 1)
        for number in range(RELOADS):
            while self.done < share * (number + 1):
                if self._over.wait(0.1):
                    return
            with self._waiting:
                self._is_closed = True
                if number % 2:
                    self._waiting.wait_for(lambda: not self._under_way)
            if number % 2:
                self._reload_beside_a_picture(number)
            else:
                self._client.reload_ui("request_restart_beside_jobs")
            with self._waiting:
                self._is_closed = False
                self._waiting.notify_all()

    def _reload_beside_a_picture(self, number: int) -> None:
        client = number % len(self._jobs)
        job = {**self._jobs[client][number % len(LORAS)], "steps": 60}
        alone = self._client.txt2img(**job)
        self._client.begin(number, **job)
        while self._client.request("/sdapi/v1/progress")["state"]["sampling_step"] < 2:
            time.sleep(0.05)
        self._client.reload_ui("request_restart_beside_jobs")
        made = self._client.begun(number)
        if made != alone:
            self.wrong.append(f"beside Reload UI: {made.psnr(alone):.1f} dB\n  {job}\n  {made.infotext}")


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "without the extension"])
def test_every_picture_is_the_one_made_alone(start, fp8):
    """Without the extension too, so that it is known what the WebUI itself is good for."""
    webui = start(sd_checkpoints_limit=2, disabled_extensions=[] if fp8 else [EXTENSION])
    add_second_checkpoint(webui)
    busy = Traffic(webui.client, [jobs_of(client, fp8) for client in range(CLIENTS)])
    busy.run(CHANGED if fp8 else [{"live_previews_enable": False}])
    assert busy.done == CLIENTS * JOBS
    assert not busy.wrong, "\n".join(busy.wrong)
    assert "Traceback" not in webui.log()
    assert webui.log().count("Startup time") == RELOADS + 1
