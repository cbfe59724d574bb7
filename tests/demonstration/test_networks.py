"""LoRAs reach the layers that their keys name, in both spellings, with the right difference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file as load_numpy
from safetensors.torch import load_file, save_file

from demo.model import LORAS
from demo.networks import NetworkError, deltas_of, layers_of

QUERY = "down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"


def test_both_spellings_name_the_same_layer(pipeline):
    layers = layers_of(pipeline)
    expected = pipeline.unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1.to_q
    assert layers[f"lora_unet_{QUERY}"] is expected
    assert layers["lora_unet_input_blocks_1_1_transformer_blocks_0_attn1_to_q"] is expected
    assert layers["lora_unet_output_blocks_5_2_conv"] is pipeline.unet.up_blocks[1].upsamplers[0].conv
    assert layers["lora_unet_output_blocks_2_1_conv"] is pipeline.unet.up_blocks[0].upsamplers[0].conv
    encoder = getattr(pipeline.text_encoder, "text_model", pipeline.text_encoder).encoder
    assert layers["lora_te_text_model_encoder_layers_1_mlp_fc2"] is encoder.layers[1].mlp.fc2


@pytest.mark.parametrize("name", ["outline", "stripes"])
def test_the_difference_is_up_times_down(pipeline, name):
    file = LORAS / f"shapes-{name}.safetensors"
    layers = layers_of(pipeline)
    deltas = deltas_of(file, layers)
    tensors = load_numpy(file)
    names = {key.split(".")[0] for key in tensors}
    assert len(deltas) == len(names) > 50
    for key in names:
        down, up = (tensors[f"{key}.lora_{part}.weight"].astype(np.float64) for part in ("down", "up"))
        scale = float(tensors[f"{key}.alpha"]) / down.shape[0]
        wanted = scale * np.tensordot(up.reshape(up.shape[:2]), down, axes=1)
        got = deltas[layers[key]].double().numpy()
        assert got.shape == tuple(layers[key].weight.shape)
        np.testing.assert_allclose(got, wanted.reshape(got.shape), atol=1e-6 * abs(wanted).max())


def lora(file, name=f"lora_unet_{QUERY}", width=64):
    save_file({f"{name}.lora_down.weight": torch.zeros(2, width), f"{name}.lora_up.weight": torch.zeros(64, 2)}, file)
    return file


def test_alpha_scales_the_difference(pipeline, tmp_path):
    layers, file, name = layers_of(pipeline), tmp_path / "scaled.safetensors", f"lora_unet_{QUERY}"
    down, up = torch.ones(2, 64), torch.full((64, 2), 0.5)
    save_file(
        {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up, f"{name}.alpha": torch.tensor(0.5)}, file
    )
    assert torch.equal(deltas_of(file, layers)[layers[name]], torch.full((64, 64), 0.25))


def test_networks_that_do_not_fit(pipeline, tmp_path):
    layers = layers_of(pipeline)
    assert len(deltas_of(lora(tmp_path / "fits.safetensors"), layers)) == 1
    with pytest.raises(NetworkError, match="no layer for lora_unet_nowhere"):
        deltas_of(lora(tmp_path / "nowhere.safetensors", "lora_unet_nowhere"), layers)
    with pytest.raises(NetworkError, match="shape"):
        deltas_of(lora(tmp_path / "wide.safetensors", width=96), layers)
    (tmp_path / "text.safetensors").write_text("no network")
    for bad, said in (("text", "no whole"), ("absent", "no such file")):
        with pytest.raises(NetworkError, match=said):
            deltas_of(tmp_path / f"{bad}.safetensors", layers)
    for family, part in (("loha", "hada_w1_a"), ("norm", "b_norm"), ("dora", "dora_scale"), ("full", "diff")):
        with pytest.raises(NetworkError, match=f"kohya's format only; it holds {part}"):
            deltas_of(LORAS / f"shapes-{family}.safetensors", layers)
    half = lora(tmp_path / "half.safetensors")
    save_file({key: value for key, value in load_file(half).items() if "up" not in key}, half)
    with pytest.raises(NetworkError, match="incomplete"):
        deltas_of(half, layers)
    save_file({key: value / 0 for key, value in load_file(lora(half)).items()}, half)
    with pytest.raises(NetworkError, match="NaN"):
        deltas_of(half, layers)
