"""Other extensions that make a model in memory, or write into the one that is loaded, over 8-bit weights.

What they do with FP8 weight off is what they have to do with it on, up to rounding. Each extension runs in a WebUI that
holds no further one. Its checkout is sought in ``--extensions DIR``; what it cannot do even with FP8 weight off is
skipped with that reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from live.alike import assert_acts_alike, assert_no_errors, shots
from live.clicks import Page
from live.client import ApiError, Client
from live.conftest import START, reset
from live.test_other_extensions import OUTLINE
from live.test_pictures import FULL, LEAST_COSINE, PROMPTS, Album, cosine, pixels_changed
from live.webui import EMBEDDED, WebUI

Save = Callable[[str], Path]
FORMATS = ("float8_e4m3fn", "int8")
OTHER = {"float8_e4m3fn": "int8", "int8": "float8_e4m3fn"}
OTHER_PARENT = "shapes-other"
UNET = "model.diffusion_model."
COUNT = 2
STEPS = 6
LORA = EMBEDDED.parent / "loras/shapes-outline.safetensors"
HALF = 1e-3
"""Error of weights in float16, relative to their size."""
LEAST_ERROR = 0.1
"""How far a merge is from its first parent, at the least; the second one is made so that this holds."""
ROUNDING = {"float8_e4m3fn": 0.03, "int8": 0.01}
"""Error of weights in a format, relative to their size."""
NO_SHARE = 0.03
"""Part of a LoRA that rounding may look like."""


def error(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> float:
    """Of weights by name, relative to the size of those that are wanted."""
    assert found.keys() == wanted.keys()
    noise = sum(float(((found[name] - wanted[name]) ** 2).sum()) for name in wanted)
    return float(np.sqrt(noise / sum(float((value**2).sum()) for value in wanted.values())))


def share(found: dict[str, np.ndarray], without: dict[str, np.ndarray], delta: dict[str, np.ndarray]) -> float:
    """How much of a change is in weights: 0 for nothing of it, 1 for all of it."""
    inner = sum(float(((found[name] - without[name]) * delta[name]).sum()) for name in delta)
    return inner / sum(float((value**2).sum()) for value in delta.values())


def unet_of(state_dict: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """The weights and biases of the UNet in float64."""
    return {name: value.double().numpy() for name, value in state_dict.items() if name.startswith(UNET)}


def write_other_parent(path: Path) -> None:
    """A checkpoint in the layout of the embedded one, every value of its UNet changed."""
    generator, weights = torch.Generator().manual_seed(5), load_file(EMBEDDED)
    for name, value in weights.items():
        if name.startswith(UNET):
            noise = torch.randn(value.shape, generator=generator)
            weights[name] = (value.float() * (1 + 0.3 * noise)).to(value.dtype)
    save_file(weights, path)
    path.with_suffix(".yaml").symlink_to(EMBEDDED.with_suffix(".yaml"))


def merged_files(folder: Path, alpha: float) -> dict[str, np.ndarray]:
    """The weighted sum of both parents in float64."""
    first, second = unet_of(load_file(EMBEDDED)), unet_of(load_file(folder / f"{OTHER_PARENT}.safetensors"))
    return {name: (1 - alpha) * value + alpha * second[name] for name, value in first.items()}


@dataclass(frozen=True)
class Shot:
    """What a model is: its UNet's weights without and with a LoRA, and pictures of both, (COUNT, 64, 64, 3)."""

    weights: dict[str, np.ndarray]
    weights_with_lora: dict[str, np.ndarray]
    pictures: np.ndarray
    pictures_with_lora: np.ndarray

    @property
    def delta(self) -> dict[str, np.ndarray]:
        """What the LoRA adds, where it adds something."""
        added = {name: self.weights_with_lora[name] - value for name, value in self.weights.items()}
        return {name: value for name, value in added.items() if value.any()}


def likeness(some: np.ndarray, others: np.ndarray) -> float:
    """PSNR in dB."""
    noise = np.mean((some.astype(float) - others.astype(float)) ** 2)
    return float("inf") if noise == 0 else float(10 * np.log10(255**2 / noise))


class Bench:
    """A WebUI with an extension that merges.

    Args:
        running: it.
    """

    def __init__(self, running: WebUI) -> None:
        self.running, self.client = running, running.client
        self.folder = running.data / "models/Stable-diffusion"
        self._shots: dict[str, Shot | str] = {}
        self._fields: dict[str, Any] = {}
        other = self.folder / f"{OTHER_PARENT}.safetensors"
        if not other.exists():
            write_other_parent(other)
        self.refresh()

    def refresh(self) -> None:
        """Let the WebUI look for checkpoints."""
        self.client.request("/sdapi/v1/refresh-checkpoints", {})

    def begin(self) -> None:
        """The first parent from its file, FP8 weight off; a merge may go by the file name of the first parent."""
        self._fields = {}
        self.client.set(fp8_storage="Disable", sd_model_checkpoint=f"{OTHER_PARENT}.safetensors")
        reset(self.client)

    def hold(self, storage: str) -> None:
        """Bring the model into full precision or a format."""
        Album(self.client).hold(storage)

    def title(self, stem: str) -> str:
        """The title of a checkpoint."""
        found = self.client.request("/sdapi/v1/sd-models")
        return next(each["title"] for each in found if Path(each["filename"]).stem == stem)

    def use(self, **fields: Any) -> None:
        """Fields of all requests for pictures until the next beginning."""
        self._fields = fields

    def pictures(self, networks: str = "", **fields: Any) -> np.ndarray:
        """Pictures with the model as it is."""
        fields = {"steps": STEPS, **self._fields, **fields}
        made = [
            self.client.txt2img(prompt + networks, seed=seed, **fields).pixels
            for seed, (prompt, _) in enumerate(PROMPTS[:COUNT])
        ]
        return np.stack(made)

    def weights(self) -> dict[str, np.ndarray]:
        """The weights and biases of the UNet as a reader sees them, in the names that checkpoints have."""
        names = [name for name in self.client.probe("dtypes") if name.startswith(UNET)]
        path = self.running.data / "weights.npz"
        self.client.probe("save_values", names=names, path=str(path))
        with np.load(path) as values:
            return dict(values)

    def shot(self) -> Shot:
        """Without, with, and once more without a LoRA, which must leave nothing."""
        pictures, weights, bits = self.pictures(), self.weights(), self.client.probe("parameters")
        with_lora, weights_with = self.pictures(OUTLINE), self.weights()
        np.testing.assert_array_equal(self.pictures(), pictures)
        assert self.client.probe("parameters") == bits
        return Shot(weights, weights_with, pictures, with_lora)

    def full(self, name: str, make: Callable[[Bench], object]) -> Shot:
        """The same made in full precision, once; skips the test if the extension cannot."""
        if name != START:
            self.parent()
        if name not in self._shots:
            self.begin()
            position = len(self.running.log())
            try:
                make(self)
                self._shots[name] = self.shot()
            except (ApiError, AssertionError):
                self._shots[name] = self.running.log()[position:][-300:]
        if isinstance(shot := self._shots[name], str):
            pytest.skip(f"{name}: it fails with FP8 weight off: {shot}")
        return shot

    def parent(self) -> Shot:
        """The first parent in full precision; made before anything else, as that takes its place."""
        return self.full(START, lambda bench: None)

    def formats(self) -> list[str]:
        """Of the parts that are in 8 bits."""
        return [part["format"] for part in self.client.status()["parts"]]


def assert_is(bench: Bench, found: Shot, wanted: Shot, rounding: float, least_cosine: float) -> None:
    """A model is another up to rounding, and not the first parent."""
    parent = bench.parent()
    errors = [error(each.weights, wanted.weights) for each in (parent, found)]
    errors.append(error(found.weights_with_lora, wanted.weights_with_lora))
    assert errors[0] >= LEAST_ERROR
    assert max(errors[1:]) <= rounding, f"{errors[1:]}, that of the parent is {errors[0]}"
    assert_nearer(found.pictures, wanted.pictures, parent.pictures)
    assert_nearer(found.pictures_with_lora, wanted.pictures_with_lora, parent.pictures_with_lora)
    changes = [pixels_changed(each.pictures_with_lora, each.pictures) for each in (found, wanted)]
    assert cosine(*changes) >= least_cosine


def assert_nearer(found: np.ndarray, wanted: np.ndarray, parents: np.ndarray) -> None:
    """Pictures are more like those that are wanted than the first parent's are, clearly."""
    alike, parents_alike = likeness(found, wanted), likeness(parents, wanted)
    assert alike >= parents_alike + 6, f"{alike:.1f} dB, the parent's {parents_alike:.1f} dB"


@pytest.fixture
def bench_with(rack, other_extension):
    """``bench_with(name)`` gives the bench of the WebUI with that extension, as it begins."""

    def give(name: str) -> Bench:
        running = rack.shared(other_extension(name))
        if running.client.url not in _benches:
            _benches[running.client.url] = Bench(running)
        bench = _benches[running.client.url]
        bench.begin()
        return bench

    return give


_benches: dict[str, Bench] = {}


# What every model made in memory has to go through, whoever made it


def check_made(bench: Bench, storage: str, name: str, make: Callable[[Bench], object]) -> None:
    """Made over 8-bit weights."""
    wanted = bench.full(name, make)
    bench.begin()
    bench.hold(storage)
    make(bench)
    found = bench.shot()
    assert bench.formats() == [storage]
    assert_is(bench, found, wanted, ROUNDING[storage], LEAST_COSINE[storage])


def check_other_format(bench: Bench, storage: str, name: str, make: Callable[[Bench], object]) -> None:
    """Made, then converted into the other format."""
    wanted = bench.full(name, make)
    bench.begin()
    bench.hold(storage)
    make(bench)
    bench.hold(OTHER[storage])
    assert bench.formats() == [OTHER[storage]]
    assert_is(bench, bench.shot(), wanted, sum(ROUNDING.values()), min(LEAST_COSINE[each] for each in FORMATS))


def check_switched_off(bench: Bench, storage: str, name: str, make: Callable[[Bench], object]) -> None:
    """Made, a LoRA used, and switched off."""
    wanted = bench.full(name, make)
    bench.begin()
    bench.hold(storage)
    make(bench)
    bench.pictures(OUTLINE)
    bench.hold(FULL)
    assert bench.client.status()["enabled"] is False
    assert bench.formats() == []
    assert_is(bench, bench.shot(), wanted, ROUNDING[storage], LEAST_COSINE[storage])


def check_overridden(bench: Bench, storage: str, override: dict, name: str, make: Callable[[Bench], object]) -> None:
    """One job in another storage, with a LoRA; what is there afterwards is still the merge."""
    wanted = bench.full(name, make)
    bench.begin()
    bench.hold(storage)
    make(bench)
    bench.pictures(OUTLINE)
    plain, with_lora = (bench.pictures(text, override_settings=override) for text in ("", OUTLINE))
    assert_nearer(plain, wanted.pictures, bench.parent().pictures)
    assert_nearer(with_lora, wanted.pictures_with_lora, bench.parent().pictures_with_lora)
    found = bench.shot()
    assert bench.formats() == [storage]
    assert_is(bench, found, wanted, sum(ROUNDING.values()), LEAST_COSINE[storage])


@dataclass(frozen=True)
class Saved:
    """A file that a merge was saved into.

    Attributes:
        tensors: what it holds.
        loaded: the model that the file gives, with FP8 weight as before.
        lasts: whether the model that was saved makes the same pictures as before.
    """

    tensors: dict[str, torch.Tensor]
    loaded: Shot
    lasts: bool


def save_and_load(bench: Bench, storage: str, networks: str, make: Callable[[Bench], object], save: Save) -> Saved:
    """Make a merge, use it, save it, and load what was saved."""
    bench.begin()
    bench.hold(storage)
    make(bench)
    before = bench.pictures(networks)
    path = save(f"saved-{bench.client.probe('counters')['loads']}")
    lasts = np.array_equal(bench.pictures(networks), before)
    configuration = path.with_name(path.name.removesuffix(path.suffix) + ".yaml")
    configuration.symlink_to(EMBEDDED.with_suffix(".yaml"))
    bench.begin()
    bench.hold(storage)
    bench.refresh()
    bench.client.set(sd_model_checkpoint=bench.title(path.stem))
    assert bench.client.probe("checkpoint") == path.name
    saved = Saved(read(path), bench.shot(), lasts)
    bench.begin()
    path.unlink()
    configuration.unlink()
    bench.refresh()
    return saved


def check_saved(
    bench: Bench, storage: str, networks: str, name: str, make: Callable[[Bench], object], save: Save, way: str = ""
) -> None:
    """Saved, after pictures with or without a LoRA; the file has nothing of the LoRA, and loads.

    Args:
        save: gets a stem of a file name.
        way: tells one ``save`` from another.
    """
    wanted = bench.full(name, make)
    key = bench.client.url, name, networks, way
    if key not in _saved_in_full:
        position = len(bench.running.log())
        try:
            in_full = save_and_load(bench, FULL, networks, make, save)
            assert error(unet_of(in_full.tensors), wanted.weights) <= HALF, "it saves something else than its merge"
            _saved_in_full[key] = in_full
        except (ApiError, AssertionError) as problem:
            _saved_in_full[key] = f"{str(problem)[:200]}; {bench.running.log()[position:][-300:]}"
    if isinstance(in_full := _saved_in_full[key], str):
        pytest.skip(f"it fails with FP8 weight off: {in_full}")
    found = save_and_load(bench, storage, networks, make, save)
    assert found.lasts or not in_full.lasts
    assert all(type(value) is torch.Tensor for value in found.tensors.values())
    kinds = [{each: value.dtype for each, value in saved.tensors.items()} for saved in (in_full, found)]
    assert kinds[0] == kinds[1]
    assert abs(share(unet_of(found.tensors), wanted.weights, wanted.delta)) <= NO_SHARE
    assert error(unet_of(found.tensors), wanted.weights) <= ROUNDING[storage]
    assert_is(bench, found.loaded, wanted, ROUNDING[storage], LEAST_COSINE[storage])


_saved_in_full: dict[tuple, Saved | str] = {}


def read(path: Path) -> dict[str, torch.Tensor]:
    """A checkpoint file; one that is pickled may hold tensors only."""
    if path.suffix == ".safetensors":
        return load_file(path)
    found = torch.load(path, map_location="cpu", weights_only=True)
    return found.get("state_dict", found)


OVERRIDES = {
    "off": {"fp8_storage": "Disable"},
    "other": {"fp8_storage": "Enable", "fp8_format": "int8"},
    "text": {"fp8_storage": "Enable", "fp8_clip_l": True},
}


# sd-webui-supermerger: loads a merge of checkpoint files under the file name of the first

ALPHA = 0.5


@pytest.fixture
def supermerger(bench_with) -> Bench:
    return bench_with("sd-webui-supermerger")


def merge_on_memory(bench: Bench) -> None:
    """Press "Merge!"."""
    models = {"Model_A": bench.title(START), "Model_B": bench.title(OTHER_PARENT)}
    answer = Page(bench.client).press("Merge!", alpha=ALPHA, **models)
    assert "Merged model loaded" in answer[0], answer[0]


def save_merge(bench: Bench, suffix: str, *more: str) -> Save:
    """Press "Save current merge(fp16 only)"."""

    def save(name: str) -> Path:
        settings = ["overwrite", *(["safetensors"] if suffix == ".safetensors" else []), *more]
        fields = {"Custom_Name_(Optional)": name + suffix, "save_settings": settings}
        answer = Page(bench.client).press("Save current merge(fp16 only)", **fields)
        said = answer[0].get("value", "") if isinstance(answer[0], dict) else answer[0]
        assert "Merged model saved in" in said, said
        return bench.folder / (name + suffix)

    return save


MEMORY = "merge on memory", merge_on_memory


def test_merge_on_memory_is_the_merge(supermerger: Bench):
    """With FP8 weight off, up to float16."""
    wanted = merged_files(supermerger.folder, ALPHA)
    assert error(supermerger.full(*MEMORY).weights, wanted) <= HALF


@pytest.mark.parametrize("storage", FORMATS)
def test_merge_on_memory(supermerger: Bench, storage):
    check_made(supermerger, storage, *MEMORY)


@pytest.mark.parametrize("storage", FORMATS)
def test_merge_on_memory_in_another_format(supermerger: Bench, storage):
    check_other_format(supermerger, storage, *MEMORY)


@pytest.mark.parametrize("storage", FORMATS)
def test_merge_on_memory_switched_off(supermerger: Bench, storage):
    check_switched_off(supermerger, storage, *MEMORY)


@pytest.mark.parametrize("override", OVERRIDES.values(), ids=OVERRIDES)
def test_merge_on_memory_overridden_for_one_job(supermerger: Bench, override):
    check_overridden(supermerger, FORMATS[0], override, *MEMORY)


@pytest.mark.parametrize("networks", ["", OUTLINE], ids=["plain", "lora"])
@pytest.mark.parametrize("suffix", [".safetensors", ".ckpt"])
@pytest.mark.parametrize("storage", FORMATS)
def test_merge_on_memory_saved(supermerger: Bench, storage, suffix, networks):
    check_saved(supermerger, storage, networks, *MEMORY, save_merge(supermerger, suffix), suffix)


@pytest.mark.parametrize("storage", FORMATS)
def test_switched_on_after_the_merge(supermerger: Bench, storage):
    """Made in full precision, then converted and back: the merge itself, not one of its parents."""
    wanted = supermerger.full(*MEMORY)
    supermerger.begin()
    supermerger.client.set(fp8_format=storage)
    merge_on_memory(supermerger)
    supermerger.hold(storage)
    assert supermerger.formats() == [storage]
    assert_is(supermerger, supermerger.shot(), wanted, ROUNDING[storage], LEAST_COSINE[storage])
    supermerger.hold(FULL)
    assert_is(supermerger, supermerger.shot(), wanted, ROUNDING[storage], LEAST_COSINE[storage])


# sd-webui-model-mixer: loads a merge under the name of no file, and writes single blocks into the loaded model


@pytest.fixture
def mixer(bench_with) -> Bench:
    bench = bench_with("sd-webui-model-mixer")
    bench.client.set(mm_use_unet_partial_update=True)
    return bench


BLOCKS = 26


def mix(*steps: tuple[float, bool]) -> Callable[[Bench], None]:
    """Have pictures made of mixes, one after the other: the weight of the output blocks, and whether all is loaded."""

    def make(bench: Bench) -> None:
        for weight, anew in steps:
            bench.use(alwayson_scripts={"Model Mixer": {"args": _mixing(bench, weight, anew)}})
            bench.pictures(OUTLINE)

    return make


def _mixing(bench: Bench, weight: float, anew: bool) -> list[Any]:
    """The arguments of its script, one second model of two that it has room for."""
    states = {"save_settings": [], "calc_settings": ["full"] if anew else []}
    text_encoder = ALPHA if anew else 0.0  # else it loads all: with both parents' the same, it is left alone
    blocks = ",".join(map(str, [text_encoder, *[ALPHA] * 13, *[weight] * (BLOCKS - 14)]))
    first = [bench.title(START), "None", 2, "", states]
    for_each = {
        "use": (True, False),
        "model": (bench.title(OTHER_PARENT), "None"),
        "mode": ("Sum", "Sum"),
        "alpha": (ALPHA, ALPHA),
        "advanced": (True, True),
        "blocks": (["ALL"], []),
        "simple": ([], []),
        "weights": (blocks, ""),
        "use elemental": (False, False),
        "elemental": ("", ""),
        "calculation": ("Normal", "Normal"),
    }
    return [True, *first, *(value for pair in for_each.values() for value in pair)]


FULL_MIX = "full mix", mix((ALPHA, True))
PARTIAL_MIX = "partial mix", mix((0.1, False), (0.8, False))
MIXES = {"full": FULL_MIX, "partial": PARTIAL_MIX}
"""The second is written into the first parent, and then, with a LoRA in, into itself."""


def test_mix_is_the_merge(mixer: Bench):
    """With FP8 weight off, up to float16."""
    wanted = merged_files(mixer.folder, ALPHA)
    assert error(mixer.full(*FULL_MIX).weights, wanted) <= HALF


@pytest.mark.parametrize("mixed", MIXES.values(), ids=MIXES)
@pytest.mark.parametrize("storage", FORMATS)
def test_mix(mixer: Bench, storage, mixed):
    """A partial one is written into the model while a LoRA is in."""
    check_made(mixer, storage, *mixed)


def test_a_partial_mix_is_partial(mixer: Bench):
    position = len(mixer.running.log())
    PARTIAL_MIX[1](mixer)
    assert mixer.running.log()[position:].count("UNet partial blocks have been successfully updated") == 2


@pytest.mark.parametrize("mixed", MIXES.values(), ids=MIXES)
@pytest.mark.parametrize("storage", FORMATS)
def test_mix_in_another_format(mixer: Bench, storage, mixed):
    check_other_format(mixer, storage, *mixed)


@pytest.mark.parametrize("mixed", MIXES.values(), ids=MIXES)
@pytest.mark.parametrize("storage", FORMATS)
def test_mix_switched_off(mixer: Bench, storage, mixed):
    check_switched_off(mixer, storage, *mixed)


@pytest.mark.parametrize("override", OVERRIDES.values(), ids=OVERRIDES)
def test_mix_overridden_for_one_job(mixer: Bench, override):
    check_overridden(mixer, FORMATS[0], override, *FULL_MIX)


@pytest.mark.parametrize("networks", ["", OUTLINE], ids=["plain", "lora"])
@pytest.mark.parametrize("storage", FORMATS)
def test_mix_saved(mixer: Bench, storage, networks):
    def save(name: str) -> Path:
        fields = {"Custom_Name_(Optional)": name, "Select_settings": ["fp16", "safetensors", "overwrite"]}
        answer = Page(mixer.client).press("Save current model", **fields)
        said = answer[0].get("value", "") if isinstance(answer[0], dict) else answer[0]
        assert "Merged model saved in" in said, said
        return mixer.folder / f"{name}.fp16.safetensors"

    check_saved(mixer, storage, networks, *FULL_MIX, save)


# sd-webui-cd-tuner: multiplies weights of the first and the last layers during a job, and puts them back


TUNED = {
    "plain": {"words": ""},
    "lora": {"words": OUTLINE},
    "same-layers": {"words": "<lora:shapes-full:1>"},
    "in-8-bits": {"words": OUTLINE, "keep": ""},
}
"""Networks, one of them of the very layers that it changes; and these layers in 8 bits, which by default are kept."""


@pytest.mark.parametrize("tuned", TUNED.values(), ids=TUNED)
@pytest.mark.parametrize("storage", FORMATS)
def test_cd_tuner(bench_with, storage, tuned):
    bench = bench_with("sd-webui-cd-tuner")
    if "keep" in tuned:
        bench.client.set(fp8_keep_layers=tuned["keep"])
    arguments = [True, 4, 2, 0, 0, 3, 2]  # others change layers that the small model lacks
    position = len(bench.running.log())
    without = shots(words=tuned["words"])
    assert_acts_alike(
        bench.client,
        storage,
        without,
        shots(words=tuned["words"], alwayson_scripts={"CD Tuner": {"args": arguments}}),
    )
    assert_no_errors(bench.running.log()[position:])


# sd-webui-regional-prompter: another LoRA in each region, switched while the layers run

REGIONS = "a red circle <lora:shapes-outline:1> BREAK a blue square <lora:shapes-stripes:1>"


def _regional(mode: str) -> dict[str, Any]:
    layout = ["Matrix", "Columns", "Mask", "Prompt", "1,1", "0.2", False, False, False, mode, []]
    return {"Regional Prompter": {"args": [True, False, *layout, "0", "0", "0.4", None, "0", "0", False]}}


@pytest.mark.parametrize("mode", ["Attention", "Latent"])
@pytest.mark.parametrize("storage", FORMATS)
def test_regional_prompter(bench_with, storage, mode):
    """A LoRA per region needs its mode "Latent"; in the other both act everywhere."""
    bench = bench_with("sd-webui-regional-prompter")
    position = len(bench.running.log())

    def regional(client: Client):
        fields = {"steps": STEPS, "width": 128, "alwayson_scripts": _regional(mode)}
        return [client.txt2img(REGIONS, seed=seed, **fields) for seed in range(COUNT)]

    def plain(client: Client):
        return [client.txt2img(REGIONS, seed=seed, steps=STEPS, width=128) for seed in range(COUNT)]

    assert_acts_alike(bench.client, storage, plain, regional)
    assert_no_errors(bench.running.log()[position:])
