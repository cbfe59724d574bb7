"""The embedded model is a Stable Diffusion 1 checkpoint; files that are not are refused with a reason."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from demo.generation import GenerationError, Work, generate
from demo.loading import CheckpointError, family_of, load_pipeline
from demo.model import CHECKPOINT, CLIP
from tools.tiny_sd.layout import checkpoint
from tools.tiny_sd.networks import load_networks, make_networks

SD1_UNET_KEYS = 686
"""Of every Stable Diffusion 1 checkpoint, and the highest block numbers in them."""


def test_size_and_layout():
    assert CHECKPOINT.stat().st_size <= 25 * 1000**2
    with safe_open(CHECKPOINT, "pt") as opened:
        keys = set(opened.keys())
        dtypes = {opened.get_slice(key).get_dtype() for key in keys}
    assert dtypes == {"F16", "I64"}
    unet = {key for key in keys if key.startswith("model.diffusion_model.")}
    assert len(unet) == SD1_UNET_KEYS
    for channel_change in ("input_blocks.4.0", "input_blocks.7.0", "output_blocks.11.0"):
        assert f"model.diffusion_model.{channel_change}.skip_connection.weight" in unet


def test_export_and_single_file_loading_undo_each_other(tmp_path):
    fresh = make_networks(CLIP, seed=3)
    file = tmp_path / "fresh.safetensors"
    save_file(checkpoint(fresh, torch.float32), file)
    loaded = load_networks(file)
    for part in ("unet", "vae", "text_encoder"):
        wanted, got = getattr(fresh, part).state_dict(), getattr(loaded, part).state_dict()
        assert wanted.keys() == got.keys()
        assert all(torch.equal(wanted[name], got[name]) for name in wanted)


def test_families(tmp_path):
    assert family_of(CHECKPOINT) == "shapes-sd1"
    for width, place, family in ((768, 1, "sd1"), (2048, 4, "sdxl")):
        file = tmp_path / f"{family}.safetensors"
        attention = f"model.diffusion_model.input_blocks.{place}.1.transformer_blocks.0.attn2.to_k.weight"
        tensors = {
            attention: torch.zeros(2, width),
            "model.diffusion_model.input_blocks.0.0.weight": torch.zeros(2, 4, 3, 3),
        }
        save_file(tensors, file)
        assert family_of(file) == family


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("model.ckpt", b"", "only .safetensors"),
        ("broken.safetensors", b"no file", "no whole safetensors file"),
        ("short.safetensors", None, "no whole safetensors file"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, name, content, said):
    file = tmp_path / name
    file.write_bytes(CHECKPOINT.read_bytes()[:100_000] if content is None else content)
    with pytest.raises(CheckpointError, match=said):
        load_pipeline(file)


def test_other_kinds_of_model(tmp_path):
    file = tmp_path / "lora.safetensors"
    save_file({"lora_unet_x.alpha": torch.zeros(1)}, file)
    with pytest.raises(CheckpointError, match="Stable Diffusion 1 or SDXL"):
        load_pipeline(file)
    with pytest.raises(CheckpointError, match="no such file"):
        load_pipeline(tmp_path / "absent.safetensors")


@pytest.mark.parametrize(
    "lacking",
    [
        "model.diffusion_model.out.2.",
        "first_stage_model.decoder.conv_in.",
        "cond_stage_model.transformer.text_model.encoder.layers.1.mlp.fc1.",
        "first_stage_model.",
        "cond_stage_model.",
    ],
)
def test_a_checkpoint_with_holes(tmp_path, lacking):
    file = tmp_path / "holes.safetensors"
    save_file({key: value for key, value in load_file(CHECKPOINT).items() if not key.startswith(lacking)}, file)
    with pytest.raises(CheckpointError, match=r"holes\.safetensors: \S+"):
        load_pipeline(file)


def test_a_damaged_checkpoint_is_told(tmp_path):
    tensors = load_file(CHECKPOINT)
    tensors["model.diffusion_model.out.2.bias"][0] = torch.nan
    save_file(tensors, tmp_path / "nan.safetensors")
    pipeline = load_pipeline(tmp_path / "nan.safetensors")
    with pytest.raises(GenerationError, match="NaN"):
        generate(pipeline, Work(("x",), (0,), 64, steps=1))


def test_tokenizer_is_clips():
    vocabulary = json.loads((CLIP / "vocab.json").read_text(encoding="utf-8"))
    assert len(vocabulary) == 49408
    assert vocabulary["<|endoftext|>"] == 49407
