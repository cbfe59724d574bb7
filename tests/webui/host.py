"""One stand-in WebUI: its modules, its checkpoints, and what a user does with it."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import safetensors.torch
import torch
from helpers import ROOT, all_tensors, assert_packed_like, bits, quantized_names, reference_pack, to_numpy
from torch import nn

import lib_fp8
from lib_fp8 import QuantWeight

STANDINS = Path(__file__).parent / "standins"
SCRIPT = ROOT / "scripts" / "fp8_weight.py"
FOREIGN = ("modules", "gradio", "fastapi", "networks", "network_families", "scripts")
LAYER_TYPES = (nn.Module, nn.Linear, nn.Conv2d, nn.GroupNorm, nn.LayerNorm, nn.MultiheadAttention)
PATCHED = (
    *("forward", "load_state_dict", "_load_from_state_dict", "state_dict"),
    *("network_weights_backup", "network_bias_backup"),
)


def _is_ours(name: str) -> bool:
    return name.split(".")[0] in FOREIGN or name == "lib_fp8.webui" or name.startswith("lib_fp8.webui.")


@functools.lru_cache(maxsize=None)
def _compiled(path: str, source: bytes) -> Any:
    return compile(source, path, "exec", dont_inherit=True)


@contextlib.contextmanager
def fresh_modules(generation: str):
    """Stand-ins and lib_fp8.webui are imported anew inside, and gone afterwards, with whatever they did to torch."""
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_ours(name)}
    vars(lib_fp8).pop("webui", None)
    path = sys.path
    torch_before = [(cls, name, vars(cls).get(name)) for cls in LAYER_TYPES for name in PATCHED]
    sys.path = [str(STANDINS), *path]
    # The same few files are imported for each test: they are compiled once, even where Python keeps no cache.
    compile_once = mock.patch.object(SourceFileLoader, "source_to_code", lambda _, data, path: _compiled(path, data))
    try:
        with compile_once:
            importlib.import_module("modules").generation = generation
            yield
    finally:
        sys.path = path
        for cls, name, value in torch_before:
            if value is not None:
                setattr(cls, name, value)
            elif name in vars(cls):
                delattr(cls, name)
        for name in [name for name in sys.modules if _is_ours(name)]:
            del sys.modules[name]
        vars(lib_fp8).pop("webui", None)
        sys.modules.update(hidden)


@functools.lru_cache(maxsize=None)
def _checkpoint_file(kind: str, seed: int, dtype: torch.dtype) -> bytes:
    return safetensors.torch.save(importlib.import_module("modules.tiny_models").state_dict(kind, seed, dtype))


class Host:
    """The WebUI. Modules are attributes: ``host.sd_models``, ``host.loading`` (of the extension), ``host.networks``."""

    def __init__(self, generation: str, folder: Path):
        self.generation = generation
        self.folder = folder
        self.minor = int(generation.split(".")[1])

    def __getattr__(self, name: str) -> Any:
        known = (full for full in (f"modules.{name}", f"lib_fp8.webui.{name}", name) if full in sys.modules)
        vars(self)[name] = found = importlib.import_module(next(known, f"modules.{name}"))
        return found

    @property
    def opts(self) -> Any:
        return self.shared.opts

    @property
    def model(self) -> Any:
        return self.sd_models.model_data.sd_model

    @property
    def unet(self) -> nn.Module:
        return self.model.model.diffusion_model

    # Files

    def checkpoint(self, name: str = "a", kind: str = "sd1", seed: int = 1, dtype: torch.dtype = torch.float16) -> Any:
        """Write a checkpoint and let the WebUI know it."""
        filename = self.folder / f"{name}.safetensors"
        filename.write_bytes(_checkpoint_file(kind, seed, dtype))
        return self.sd_models.CheckpointInfo(filename)

    def values(self, name: str = "a") -> dict[str, torch.Tensor]:
        """What a checkpoint file holds."""
        return safetensors.torch.load_file(self.folder / f"{name}.safetensors")

    # Start, reload, stop

    def start(self, *, extension: bool = True, lora: bool = True, others: tuple[str, ...] = (), **saved: Any) -> Host:
        """Start with saved settings: scripts, first load, page. Load nothing where there is no checkpoint."""
        self.opts.data.update(saved)
        self.with_lora = lora
        self.others = others
        self._load_scripts(extension)
        if self.sd_models.checkpoints_list:
            self.sd_models.load_model()
        self._build_page()
        return self

    def _load_scripts(self, extension: bool) -> None:
        scripts = [STANDINS / "webui" / "scripts" / "xyz_grid.py"]
        scripts += [STANDINS / "lora" / "scripts" / "lora_script.py"] * self.with_lora
        scripts += [STANDINS / name / "scripts" / f"{name}.py" for name in self.others]
        scripts += [SCRIPT] * extension
        errors = len(self.errors.shown)
        self.scripts.load_scripts(scripts)
        assert self.errors.shown[errors:] == [], self.errors.shown

    def _build_page(self) -> None:
        self.script_callbacks.run("before_ui")
        self.script_callbacks.run("ui_settings")
        self.opts.reorder()
        self.app = importlib.import_module("fastapi").FastAPI()
        self.app.add_api_route("/sdapi/v1/memory", dict, dependencies=["login"])
        self.script_callbacks.run("app_started", None, self.app)

    def reload_ui(self, *, extension: bool = True) -> None:
        """Settings > Reload UI, after the extension was perhaps switched off."""
        if not extension:
            self.opts.disabled_extensions = [ROOT.name]
        self.script_callbacks.run("script_unloaded")
        self._load_scripts(extension)
        self._build_page()

    # Use

    def set(self, **options: Any) -> list[bool]:
        """Apply settings as the page and the API do, with their callbacks; whether each was changed."""
        return [self.opts.set(key, value) for key, value in options.items()]

    def job(self, prompt: str = "a cat", n_iter: int = 1, restore: bool = True, **overrides: Any) -> Any:
        """Make pictures."""
        p = self.processing.StableDiffusionProcessing(prompt, overrides, n_iter, restore)
        return self.processing.process_images(p)

    def switch_to(self, info: Any) -> Any:
        """Choose another checkpoint in the quick settings."""
        self.opts.sd_model_checkpoint = info.title
        return self.sd_models.reload_model_weights()

    def settings_page(self) -> dict[str, Any]:
        """The components of the settings page, in order."""
        gradio, page = importlib.import_module("gradio"), {}
        for key, info in self.opts.data_labels.items():
            if info.section[0] is None:
                continue
            kind = info.component or {bool: gradio.Checkbox, int: gradio.Number}.get(type(info.default), gradio.Textbox)
            value = self.opts.data.get(key, info.default)
            page[key] = kind(label=info.label, value=value, elem_id=f"setting_{key}", **(info.component_args or {}))
        return page

    def run_networks(self, *networks: Any) -> None:
        """Merge networks as the forward of every layer does, and tell of it as the end of a job does."""
        self.networks.loaded_networks[:] = networks
        for layer in self.layers.values():
            self.networks.network_apply_weights(layer)
        self.snapshot.publish()

    @property
    def layers(self) -> dict[str, nn.Module]:
        """The layers that merge in their forward, by the names that the Lora extension gives them."""
        found = self.model.network_layer_mapping.items()
        in_attention = nn.modules.linear.NonDynamicallyQuantizableLinear  # read by its parent, whose forward merges
        return {
            name: layer
            for name, layer in found
            if isinstance(layer, LAYER_TYPES[1:]) and not isinstance(layer, in_attention)
        }

    # What is true

    def fingerprint(self, model: nn.Module | None = None) -> dict[str, Any]:
        """Kind, dtype, bits and number of branches of all parameters and buffers, by names as before the hijack."""
        return {name.replace("wrapped.", ""): _raw(tensor) for name, tensor in all_tensors(model or self.model).items()}

    def quantized(self, model: nn.Module | None = None) -> list[str]:
        """Names of the layers in 8 bits, by names that do not depend on the hijack."""
        return [name.replace("wrapped.", "") for name in quantized_names(model or self.model)]

    def assert_packed(self, name: str, format_name: str, model: nn.Module | None = None) -> None:
        """Every layer in 8 bits holds what the reference makes of the file's values, rounded to float16 before."""
        values = self.values(name)
        dtype = None if self.shared.cmd_opts.no_half else torch.float16
        layers = self.quantized(model)
        weights = [weight for weight in (model or self.model).parameters() if isinstance(weight, QuantWeight)]
        assert len(layers) == len(weights) > 0
        for layer, weight in zip(layers, weights):
            assert weight.format.name == format_name
            expected = reference_pack(values[f"{layer}.weight"].to(dtype), format_name)
            assert_packed_like(weight.qdata, weight.scale, expected, format_name)

    def format_in_use(self, model: nn.Module | None = None) -> str | None:
        """The storage format of the diffusion model, None for full precision."""
        formats = {
            weight.format.name
            for weight in (model or self.model).model.diffusion_model.parameters()
            if isinstance(weight, QuantWeight)
        }
        assert len(formats) <= 1
        return next(iter(formats), None)


def _raw(tensor: torch.Tensor) -> Any:
    if isinstance(tensor, QuantWeight):
        scale = None if tensor.scale is None else to_numpy(tensor.scale).tobytes()
        return tensor.format.name, str(tensor.dtype), bits(tensor.qdata).tobytes(), scale, len(tensor.branches)
    return "plain", str(tensor.dtype), np.ascontiguousarray(to_numpy(tensor)).tobytes()
