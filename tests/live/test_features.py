"""What the WebUI can do besides plain pictures does on 8-bit weights what it does in full precision."""

from __future__ import annotations

import base64
import csv
import functools
import io
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from live.alike import FORMATS, Take, assert_acts_alike, assert_no_errors, likeness, of_the_base, shots
from live.client import HIRES, PROMPT, Client, Picture
from live.conftest import START
from live.test_pictures import FULL, Album, cosine
from live.webui import PLAIN_PRECISION

both_formats = pytest.mark.parametrize("storage", FORMATS)


def assert_alike(client: Client, storage: str, take: Take) -> None:
    """Pictures are as like those of full precision as plain pictures are."""
    assert_acts_alike(client, storage, shots(), take, acts=False)


# Other ways to pictures


def from_a_drawing(client: Client, prompt: str, **fields: Any) -> Picture:
    """One picture from a drawn one; the WebUI encodes that with whatever random numbers come next."""
    client.probe("seed", number=1)
    return client.img2img(prompt, **fields)


masked = functools.partial(from_a_drawing, masked=True)
WAYS = {
    "img2img": shots(from_a_drawing),
    "masked": shots(masked),
    "hires": shots(**HIRES),
    "batch": lambda client: client.grid(batch_size=3),
    "batches": lambda client: client.grid(n_iter=3),
}


@pytest.mark.parametrize("take", WAYS.values(), ids=WAYS)
@both_formats
def test_other_ways_to_pictures(webui: Client, storage, take):
    assert_alike(webui, storage, take)


def test_a_batch_is_its_pictures(webui: Client):
    webui.set(fp8_storage="Enable")
    batch = webui.grid(batch_size=3)[-3:]
    single = [webui.txt2img(seed=seed) for seed in (1, 2, 3)]
    assert likeness(batch, single) > 50  # in batches torch sums in another order


@both_formats
def test_inpainting_model(webui: Client, storage):
    webui.set(sd_model_checkpoint="sd1-inpaint.safetensors")
    assert_acts_alike(webui, storage, shots(), shots(masked), acts=False)
    assert webui.probe("checkpoint") == "sd1-inpaint.safetensors"


# Features that change how the UNet is run


def options(**values: Any) -> dict[str, Any]:
    """Fields of a request that change options for it alone."""
    return {"override_settings": values}


HYPERTILE = options(hypertile_enable_unet=True, hypertile_max_tile_unet=64, hypertile_swap_size_unet=1)
FEATURES = {
    "tiling": ({}, {"tiling": True}),
    "token merging": ({}, options(token_merging_ratio=0.6)),
    "token merging in hires": (HIRES, options(token_merging_ratio_hr=0.6)),
    "hypertile": ({"width": 256, "height": 128}, HYPERTILE),
    "clip skip": ({}, options(CLIP_stop_at_last_layers=2)),
}


@pytest.mark.parametrize("name", FEATURES)
@both_formats
def test_feature_acts_alike(webui: Client, installation, console, storage, name):
    if name == "hypertile" and not (installation.folder / "extensions-builtin/hypertile").is_dir():
        pytest.skip("this WebUI has no hypertile")
    fields, feature = FEATURES[name]
    found = webui.options()  # the WebUI takes an override back only if the option was ever set
    webui.set(**{key: found[key] for key in feature.get("override_settings", ())})
    with console() as said:
        assert_acts_alike(webui, storage, shots(**fields), shots(**fields, **feature))
    assert_no_errors(said())


@pytest.fixture
def attention(webui: Client):
    """``attention(name)`` chooses how attention is computed; skips what this machine cannot."""
    components = {c["props"].get("elem_id"): c["props"] for c in webui.request("/config")["components"]}
    titles = components["setting_cross_attention_optimization"]["choices"]
    titles = [title if isinstance(title, str) else title[0] for title in titles]

    def choose(name: str) -> None:
        title = next((title for title in titles if title.split(" - ")[0] == name), None)
        if title is None:
            pytest.skip(f"this WebUI does not offer {name} on this machine")
        webui.set(cross_attention_optimization=title)

    yield choose
    choose("Automatic")


ATTENTION = ("Doggettx", "V1", "InvokeAI", "sub-quadratic", "sdp", "sdp-no-mem", "xformers", "None")


@pytest.mark.parametrize("name", ATTENTION)
def test_ways_of_attention(webui: Client, attention, console, name):
    def take(client: Client, chosen: str):
        attention(chosen)
        return shots()(client)

    with console() as said:
        ways = (functools.partial(take, chosen=chosen) for chosen in ("Automatic", name))
        assert_acts_alike(webui, FORMATS[0], *ways, acts=False)
    applied = "Disabling attention optimization" if name == "None" else f"Applying attention optimization: {name}..."
    assert applied in said()
    assert_no_errors(said())


# Live previews, generation parameters, merging


def in_background(work: Callable[[], Any]) -> Future:
    """Start something that takes a while."""
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(work)
    finally:
        pool.shutdown(wait=False)


@pytest.fixture
def previews(webui: Client, installation):
    """``previews(method)`` switches them on; skips a method whose model would be downloaded."""
    files = {"Approx NN": "models/VAE-approx/model.pt", "TAESD": "models/VAE-taesd/taesd_decoder.pth"}

    def choose(method: str) -> None:
        if method in files and not (installation.folder / files[method]).is_file():
            pytest.skip(f"needs {files[method]} in the WebUI")
        webui.set(live_previews_enable=True, show_progress_every_n_steps=1, show_progress_type=method)

    yield choose
    webui.set(live_previews_enable=False)


@pytest.mark.parametrize("method", ["Full", "Approx NN", "Approx cheap", "TAESD"])
def test_live_previews(webui: Client, previews, console, method):
    webui.set(fp8_storage="Enable")
    plain, bits = webui.txt2img(steps=40), webui.probe("parameters")
    previews(method)
    seen = []
    with console() as said:
        picture = in_background(lambda: webui.txt2img(steps=40))
        while not picture.done():
            seen.append(webui.request("/sdapi/v1/progress")["current_image"])
    assert picture.result() == plain
    images = [Image.open(io.BytesIO(base64.b64decode(data))) for data in dict.fromkeys(seen) if data]
    assert len(images) > 1
    assert np.std(images[-1].convert("RGB")) > 5, "nothing is to be seen"
    assert webui.probe("parameters") == bits
    assert_no_errors(said())


def test_png_info(webui: Client):
    """What the picture says of itself is what the API reads out of it, and makes it again."""
    webui.set(fp8_storage="Enable", fp8_format="int8", fp8_clip_l=True)
    body = {"prompt": PROMPT, "steps": 4, "width": 64, "height": 64, "seed": 1, "sampler_name": "Euler", "cfg_scale": 4}
    answer = webui.request("/sdapi/v1/txt2img", body)
    found = webui.request("/sdapi/v1/png-info", {"image": "data:image/png;base64," + answer["images"][0]})["info"]
    assert found == json.loads(answer["info"])["infotexts"][0]
    for part in ("FP8 weight: Enable", "FP8 format: int8"):
        assert part in found
    picture = webui.txt2img()
    webui.set(fp8_storage="Disable", fp8_format="float8_e4m3fn", fp8_clip_l=False)
    assert webui.txt2img() != picture
    assert webui.txt2img(override_settings=webui.probe("paste", text=found)) == picture


@pytest.mark.parametrize("half", [False, True], ids=["as it is", "half"])
def test_checkpoint_merger(webui: Client, models, half):
    """With 8-bit weights and merged LoRAs in memory it writes the very file that it writes without."""
    webui.set(sd_model_checkpoint="sd1-A.safetensors")

    def merge(name: str) -> Path:
        names = ["sd1-A.safetensors", "sd1-B.safetensors"]
        return Path(webui.probe("merge_checkpoints", names=names, file=f"{name}-{half}", multiplier=0.3, half=half))

    full = merge("merged-full")
    webui.set(fp8_storage="Enable", fp8_clip_l=True)
    webui.txt2img(PROMPT + "<lora:lora-A:1>")
    bits = webui.probe("parameters")
    stored = merge("merged-stored")
    assert webui.probe("parameters") == bits
    assert stored.read_bytes() == full.read_bytes()
    source, merged = load_file(models.find("sd1-A")), load_file(stored)
    changed = [key for key, value in merged.items() if not torch.equal(value.float(), source[key].float())]
    assert len(changed) > 100
    webui.set(sd_model_checkpoint=stored.name)
    assert webui.status()["enabled"] is True
    assert webui.txt2img() != webui.txt2img(override_settings={"sd_model_checkpoint": "sd1-A.safetensors"})


# Hypernetworks and training


def write_hypernetwork(path: Path, seed: int) -> None:
    """A hypernetwork with two random layers for each of the widths that the small model has."""
    generator = torch.Generator().manual_seed(seed)

    def random_layers(width: int) -> dict[str, torch.Tensor]:
        shapes = {"linear.0.weight": (2 * width, width), "linear.1.weight": (width, 2 * width)}
        weights = {key: torch.randn(shape, generator=generator) * 0.06 for key, shape in shapes.items()}
        return {**weights, "linear.0.bias": torch.zeros(2 * width), "linear.1.bias": torch.zeros(width)}

    layers = {width: (random_layers(width), random_layers(width)) for width in (64, 128)}
    about = {"step": 0, "name": path.stem, "layer_structure": [1, 2, 1], "activation_func": "linear"}
    old = {"is_layer_norm": False, "activate_output": False, "dropout_structure": [0, 0, 0]}
    # In the older kind of file: the WebUI refuses to read what newer versions of torch write into the other.
    torch.save({**layers, **about, **old}, path, _use_new_zipfile_serialization=False)


@pytest.fixture
def hypernetwork(webui: Client, shared_webui) -> Iterator[str]:
    folder = shared_webui.data / "models/hypernetworks"
    folder.mkdir(exist_ok=True)
    write_hypernetwork(folder / "random.pt", seed=3)
    webui.probe("refresh_hypernetworks")
    yield "random"
    webui.probe("take_hypernetworks_off")


@pytest.mark.parametrize("way", ["Automatic", "None"])
@both_formats
def test_hypernetwork(webui: Client, hypernetwork, attention, console, storage, way):
    """Without an optimisation of attention the WebUI hangs the hypernetwork's layers into the model."""
    attention(way)
    with console() as said:
        assert_acts_alike(webui, storage, shots(), shots(words=f"<hypernet:{hypernetwork}:1>"))
    assert_no_errors(said())


def test_a_hypernetwork_stays_in_full_precision(webui: Client, hypernetwork, attention):
    """Converting the model leaves alone what the WebUI hung into it, and off means off with it too."""
    attention("None")
    take = shots(words=f"<hypernet:{hypernetwork}:1>")
    full, before = take(webui), webui.probe("hypernetwork_bits")
    webui.set(fp8_storage="Enable")
    converted, stored = webui.probe("hypernetwork_bits"), take(webui)
    webui.probe("forget_hypernetworks")
    assert take(webui) == stored
    webui.set(fp8_format="int8")
    webui.set(fp8_storage="Disable")
    assert take(webui) == full
    assert converted == before


STEPS = 8
COMMON = {
    "id_task": "",
    "learn_rate": "0.005",
    "batch_size": 1,
    "gradient_step": 1,
    "training_width": 64,
    "training_height": 64,
    "varsize": False,
    "steps": STEPS,
    "clip_grad_mode": "disabled",
    "clip_grad_value": "0.1",
    "shuffle_tags": False,
    "tag_drop_out": 0,
    "latent_sampling_method": "once",
    "use_weight": False,
    "create_image_every": 4,
    "preview_from_txt2img": True,
    "preview_prompt": PROMPT,
    "preview_negative_prompt": "",
    "preview_steps": 4,
    "preview_cfg_scale": 4,
    "preview_seed": 1,
    "preview_width": 64,
    "preview_height": 64,
}
KINDS = {
    "embedding": (
        {"num_vectors_per_token": 2, "overwrite_old": True, "init_text": "circle"},
        {"save_embedding_every": 0, "save_image_with_stored_embedding": False, "template_filename": "subject.txt"},
    ),
    "hypernetwork": (
        {"enable_sizes": ["64", "128"], "overwrite_old": True, "layer_structure": "1, 2, 1"}
        | {"activation_func": "linear", "weight_init": "Normal", "add_layer_norm": False, "use_dropout": False},
        {"save_hypernetwork_every": 0, "template_filename": "hypernetwork.txt"},
    ),
}
"""What can be trained to what creating and training it takes."""


@dataclass(frozen=True)
class Trained:
    """What a training gave.

    Attributes:
        before, after: what the file holds, flat: name to tensor or anything else.
        losses: one a step.
        seen: what the parameters of the model were while it was trained, each time that somebody looked.
    """

    before: dict[str, Any]
    after: dict[str, Any]
    losses: list[float]
    seen: list[dict[str, str]]

    def change(self) -> np.ndarray:
        """Of all numbers."""
        tensors = [name for name, value in self.after.items() if isinstance(value, torch.Tensor)]
        return np.concatenate([(self.after[name] - self.before[name]).detach().flatten().numpy() for name in tensors])


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, tuple) else None
    if items is None:
        yield name, value
    for key, inner in items or ():
        yield from _flat(inner, f"{name}/{key}")


def _content(path: Path) -> dict[str, Any]:
    # Only plain tensors: torch refuses to read a class of ours from it.
    return dict(_flat(torch.load(path, weights_only=True)))


class School:
    """A WebUI that trains, and pictures to learn from."""

    def __init__(self, running, pictures: Path) -> None:
        self.running, self.pictures = running, pictures
        self.client: Client = running.client
        self._full: dict[str, Trained] = {}

    def full(self, kind: str) -> Trained:
        """What training in full precision gives; made once."""
        if kind not in self._full:
            Album(self.client).hold(FULL)
            self._full[kind] = self.train(kind, f"full-{kind}")
        return self._full[kind]

    def train(self, kind: str, name: str) -> Trained:
        """Create and train one with the model as it is."""
        creating, training = KINDS[kind]
        folder = "embeddings" if kind == "embedding" else "models/hypernetworks"
        file, logs = self.running.data / folder / f"{name}.pt", self.running.data / "trainings"
        self.client.probe("seed", number=1)
        self.client.request(f"/sdapi/v1/create/{kind}", {"name": name, **creating})
        before = _content(file)
        sampler = (
            {"preview_sampler_name": "Euler"}
            if self.running.installation.version >= (1, 7)
            else {"preview_sampler_index": 0}
        )
        body = {**COMMON, **training, **sampler, f"{kind}_name": name}
        body |= {"data_root": str(self.pictures), "log_directory": str(logs)}
        self.client.probe("seed", number=2)
        position, seen = len(self.running.log()), []
        work = in_background(lambda: self.client.request(f"/sdapi/v1/train/{kind}", body))
        while not work.done():
            parameters = self.client.probe("parameters")
            if self.client.request("/sdapi/v1/progress?skip_current_image=true")["state"]["job"].startswith("train"):
                seen.append(parameters)
        assert "error: None" in work.result()["info"]
        assert_no_errors(self.running.log()[position:])
        previews = list(logs.rglob(f"{name}/images/*.png"))
        assert previews, "no picture was made while it was trained"
        (losses,) = logs.rglob(f"{name}/*loss.csv")
        with losses.open(newline="") as lines:
            rows = [float(row["loss"]) for row in csv.DictReader(lines)]
        return Trained(before, _content(file), rows, seen)


@pytest.fixture(scope="module")
def school(rack, tmp_path_factory) -> School:
    """A WebUI of its own that reads the files that newer versions of torch write."""
    running = rack.start((*PLAIN_PRECISION, "--disable-safe-unpickle"), training_write_csv_every=1)
    running.client.probe("mend_training")
    (running.data / "embeddings").mkdir(exist_ok=True)
    folder = tmp_path_factory.mktemp("pictures")
    for number, colour in enumerate(((200, 40, 40), (40, 160, 60), (50, 80, 200))):
        image = np.full((64, 64, 3), colour, np.uint8)
        image[16:48, 16 + 4 * number : 48] = 255 - image[16:48, 16 + 4 * number : 48]
        Image.fromarray(image).save(folder / f"{number}-a square.png")
    return School(running, folder)


@pytest.mark.parametrize("kind", KINDS)
@both_formats
def test_training(school: School, storage, kind):
    """It learns what it learns in full precision, the base stays in 8 bits and as it was, and none of it is saved."""
    full, client = school.full(kind), school.client
    client.set(fp8_clip_l=True)
    Album(client).hold(storage)
    picture, bits = client.txt2img(), of_the_base(client.probe("parameters"))
    assert sum(value.startswith(f"{storage}:") for value in bits.values()) > 100

    trained = school.train(kind, f"{storage}-{kind}")
    assert len(trained.seen) > 1
    for seen in (*trained.seen, client.probe("parameters")):
        assert of_the_base(seen) == bits
    assert client.txt2img() == picture

    assert len(trained.losses) == len(full.losses) >= STEPS - 1
    np.testing.assert_allclose(trained.losses, full.losses, rtol=0.1)
    assert trained.change().any()
    assert cosine(trained.change(), full.change()) > 0.8
    assert trained.after.keys() == full.after.keys()
    shapes = [[v.shape for v in t.after.values() if isinstance(v, torch.Tensor)] for t in (trained, full)]
    assert shapes[0] == shapes[1]
    client.set(fp8_storage="Disable", fp8_clip_l=False, sd_model_checkpoint=f"{START}.safetensors")
