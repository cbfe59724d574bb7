"""Files in the layouts that other programs write, with the names, dtypes and shapes that theirs have, and no values.

Each layout is given for one layer, 64 by 64 or a convolution; what the file has besides is up to the test.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

LAYER = "model.diffusion_model.middle_block.0.to_q"
CONV = "model.diffusion_model.input_blocks.1.0.in_layers.2"
BITS = {"F64": 64, "I64": 64, "F32": 32, "I32": 32, "F16": 16, "BF16": 16}


def safetensors_bytes(tensors, metadata=None) -> bytes:
    """A safetensors file of zeros; ``tensors``: name to dtype and shape."""
    header, position = ({"__metadata__": metadata} if metadata else {}), 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * BITS.get(dtype, 8) // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(position)


def write(path: Path, tensors, metadata=None) -> Path:
    path.write_bytes(safetensors_bytes(tensors, metadata))
    return path


def at(layer=LAYER, **last):
    """``at(weight=("I8", (64, 64)))``: tensors of one layer."""
    return {f"{layer}.{name}": what for name, what in last.items()}


FP8, FP8_2, INT8 = ("F8_E4M3", (64, 64)), ("F8_E5M2", (64, 64)), ("I8", (64, 64))
CONV8 = ("F8_E4M3", (16, 16, 3, 3))
MARKED = {"scaled_fp8": ("F8_E4M3", (2,))}
MARKED_INSIDE = {"model.diffusion_model.scaled_fp8": ("F8_E5M2", (0,))}
PACKED = ("U8", (64, 32))
CONF = ("U8", (28,))
COMFY_META = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": {}})}
TORCHAO_META = {"tensor_names": json.dumps([f"{LAYER}.weight"]), f"{LAYER}.weight": json.dumps({"_type": "Int8Tensor"})}

COMFY, COMFY_SCALED = "ComfyUI quantized weights (comfy_quant)", "ComfyUI scaled FP8 (scale_weight)"
KOHYA, WEIGHT_SCALE = "kohya scaled FP8 (scale_weight)", "ModelOpt, compressed-tensors or the like (weight_scale)"
F32 = ("F32", ())

DIALECTS = {
    "scaled fp8": (COMFY_SCALED, {**MARKED, **at(weight=FP8, scale_weight=F32)}, {}),
    "scaled fp8, marked under the prefix": (COMFY_SCALED, {**MARKED_INSIDE, **at(weight=FP8_2, scale_weight=F32)}, {}),
    "scaled fp8, scale of one element": (COMFY_SCALED, at(weight=FP8, scale_weight=("F32", (1,))), {}),
    "scaled fp8, one a row": (COMFY_SCALED, {**MARKED, **at(weight=FP8, scale_weight=("F32", (64,)))}, {}),
    "scaled fp8, blocks": (COMFY_SCALED, {**MARKED, **at(weight=FP8, scale_weight=("F32", (2, 2)))}, {}),
    "scaled fp8, input scale": (COMFY_SCALED, at(weight=FP8, scale_input=F32, scale_weight=F32), {}),
    "scaled fp8, float64": (COMFY_SCALED, at(CONV, weight=CONV8, scale_weight=("F64", ())), {}),
    "scaled fp8, marker and no scale": (COMFY_SCALED, {**MARKED, **at(weight=FP8)}, {}),
    "scaled int8": ("scaled int8 (scale_weight)", at(weight=INT8, scale_weight=F32), {}),
    "kohya, blocks": (KOHYA, at(weight=FP8, scale_weight=("BF16", (64, 1, 1))), {}),
    "kohya, blocks in float32": (KOHYA, at(weight=FP8_2, scale_weight=("F32", (64, 2, 1))), {}),
    "kohya, rows": (KOHYA, at(weight=FP8, scale_weight=("F32", (64, 1))), {}),
    "kohya, one a tensor": (KOHYA, at(CONV, weight=CONV8, scale_weight=("F16", ())), {}),
    "comfy fp8": (COMFY, at(comfy_quant=CONF, weight=FP8, weight_scale=F32), COMFY_META),
    "comfy fp8, told in the header alone": (COMFY, at(weight=FP8, weight_scale=F32), COMFY_META),
    "comfy fp8, header of no use": (COMFY, at(weight=FP8, weight_scale=F32), {"_quantization_metadata": "no JSON"}),
    "comfy fp8, from the older": (COMFY, at(comfy_quant=CONF, weight=FP8, weight_scale=F32, scale_weight=F32), {}),
    "comfy int8": (COMFY, at(comfy_quant=CONF, weight=INT8, weight_scale=("F32", (64, 1))), {}),
    "comfy int8 convolution": (
        COMFY,
        at(CONV, comfy_quant=CONF, weight=("I8", (16, 16, 3, 3)), weight_scale=("F32", (16, 1, 1, 1))),
        {},
    ),
    "comfy mxfp8": (COMFY, at(comfy_quant=CONF, weight=FP8, weight_scale=("F8_E8M0", (128, 4))), {}),
    "comfy nvfp4": (
        COMFY,
        at(comfy_quant=CONF, weight=PACKED, weight_scale=("F8_E4M3", (128, 4)), weight_scale_2=F32),
        {},
    ),
    "comfy w4a8": (
        COMFY,
        at(
            comfy_quant=CONF,
            weight=("I8", (64, 32)),
            weight_s_rel=("F8_E4M3", (64, 4)),
            weight_s_channel=("F32", (64,)),
        ),
        {},
    ),
    "comfy awq": (COMFY, at(comfy_quant=CONF, weight=("I8", (64, 32)), weight_scale=("BF16", (1, 64))), {}),
    "modelopt fp8": (WEIGHT_SCALE, at(weight=FP8, weight_scale=F32, input_scale=F32), {}),
    "modelopt nvfp4": (
        WEIGHT_SCALE,
        at(weight=PACKED, weight_scale=("F8_E4M3", (64, 4)), weight_scale_2=F32),
        {},
    ),
    "block-scaled fp8": ("block-scaled FP8 (weight_scale_inv)", at(weight=FP8, weight_scale_inv=("F32", (1, 1))), {}),
    "sdnq int8": ("SDNQ", at(weight=INT8, scale=("F32", (64, 1))), {}),
    "sdnq fp8": ("SDNQ", at(weight=FP8, scale=("BF16", (64, 1))), {}),
    "sdnq uint8": ("SDNQ", at(weight=("U8", (64, 64)), scale=("F32", (64, 1)), zero_point=("F32", (64, 1))), {}),
    "sdnq uint4": ("SDNQ", at(weight=("U8", (2048,)), scale=("F32", (64, 2, 1)), zero_point=("F32", (64, 2, 1))), {}),
    "sdnq matmul": ("SDNQ", at(weight=INT8, scale=("F32", (1, 64))), {}),
    "quanto float8": (
        "quanto",
        at(**{"weight._data": FP8, "weight._scale": ("BF16", (64, 1))}, input_scale=("BF16", ())),
        {},
    ),
    "quanto int8": (
        "quanto",
        at(CONV, **{"weight._data": ("I8", (16, 16, 3, 3)), "weight._scale": ("F16", (16, 1, 1, 1))}),
        {},
    ),
    "quanto int4": (
        "quanto",
        at(
            **{
                "weight._data._data": ("U8", (32, 64)),
                "weight._scale": ("F16", (64, 1)),
                "weight._shift": ("F16", (64, 1)),
            },
        ),
        {},
    ),
    "torchao": ("torchao", at(_weight_qdata=INT8, _weight_scale=("BF16", (64, 1))), TORCHAO_META),
    "torchao without metadata": ("torchao", at(_weight_qdata=FP8, _weight_scale=("F32", (64, 1))), {}),
    "torchao int4": ("torchao", at(_weight_qdata=("I32", (64, 8)), _weight_scale=("BF16", (2, 64))), TORCHAO_META),
    "nf4": (
        "bitsandbytes nf4",
        at(
            weight=("U8", (2048, 1)),
            **{
                "weight.absmax": ("F32", (64,)),
                "weight.quant_map": ("F32", (16,)),
                "weight.quant_state.bitsandbytes__nf4": ("U8", (80,)),
            },
        ),
        {},
    ),
    "fp4": (
        "bitsandbytes fp4",
        at(
            weight=("U8", (2048, 1)),
            **{"weight.absmax": ("F32", (64,)), "weight.quant_state.bitsandbytes__fp4": ("U8", (80,))},
        ),
        {},
    ),
    "nf4 in bfloat16": (
        "bitsandbytes nf4",
        at(
            weight=("BF16", (1024, 1)),
            **{
                "weight.absmax": ("U8", (64,)),
                "weight.quant_state.bitsandbytes__nf4": ("U8", (80,)),
            },
        ),
        {},
    ),
    "bitsandbytes int8": ("bitsandbytes int8", at(weight=INT8, SCB=("F32", (64,)), weight_format=("U8", ())), {}),
    "nunchaku int4": (
        "Nunchaku (SVDQuant)",
        at(
            qweight=("I8", (64, 32)),
            wscales=("BF16", (1, 64)),
            smooth_factor=("BF16", (64,)),
            proj_down=("BF16", (64, 32)),
            proj_up=("BF16", (64, 32)),
        ),
        {},
    ),
    "nunchaku nvfp4": ("Nunchaku (SVDQuant)", at(qweight=("I8", (64, 32)), wscales=("F8_E4M3", (4, 64))), {}),
    "int8 alone": ("8-bit codes without a description", at(weight=INT8), {}),
    "uint8 alone": ("8-bit codes without a description", at(weight=PACKED), {}),
}
"""Case to the dialect's name, the layer's tensors, the metadata."""

HALF, OTHER = ("F16", (64, 64)), "cond_stage_model.transformer.text_model"
HARMLESS = {
    "plain float16": (at(weight=HALF), {"format": "pt"}),
    "plain float8": (at(weight=FP8, bias=("F8_E4M3", (64,))), {"format": "pt"}),
    "both kinds of float8": ({**at(weight=FP8), **at(CONV, weight=("F8_E5M2", (16, 16, 3, 3)))}, {}),
    "float8 UNet, float16 encoder, bfloat16 VAE": (
        {
            **at(weight=FP8),
            **at(OTHER, weight=HALF),
            "first_stage_model.decoder.conv_in.weight": ("BF16", (4, 4, 3, 3)),
        },
        {},
    ),
    "all cast to float8, a scale among it": (at(weight=FP8, scale=("F8_E4M3", (64,)), logit_scale=("F8_E4M3", ())), {}),
    "float8 with the scales of activations": (at(weight=FP8, input_scale=F32, output_scale=F32), {}),
    "position_ids cast by a compressor": ({**at(weight=FP8), f"{OTHER}.embeddings.position_ids": ("F16", (1, 77))}, {}),
    "position_ids": ({**at(weight=HALF), f"{OTHER}.embeddings.position_ids": ("I64", (1, 77))}, {}),
    "logit_scale": ({**at(weight=HALF), "conditioner.embedders.1.model.logit_scale": F32}, {}),
    "norms with a scale": (
        at("model.diffusion_model.joint_blocks.0.ln_q", weight=("F16", (64,)), scale=("F16", (64,))),
        {},
    ),
    "scale of a norm without weight": (
        {**at(weight=FP8), **at("model.diffusion_model.q_norm", scale=("F32", (64,)))},
        {},
    ),
    "networks inside": (
        {**at(weight=HALF), "lora_unet_x.alpha": F32, "lora_unet_x.scale": F32, "x.dora_scale": F32},
        {},
    ),
    "EMA": (
        {**at(weight=HALF), "model_ema.decay": F32, "model_ema.num_updates": ("I32", ()), "model_ema.xweight": HALF},
        {},
    ),
    "decoded, scales left behind": ({**MARKED, **at(weight=HALF, scale_weight=F32, weight_scale=F32)}, {}),
    "decoded, description left behind": (at(weight=HALF), {**COMFY_META, "tensor_names": "[]"}),
    "a mask in bytes": (
        {**at(weight=HALF), f"{OTHER}.mask": ("U8", (77, 77)), f"{OTHER}.causal": ("BOOL", (77, 77))},
        {},
    ),
    "other metadata": (at(weight=FP8), {"modelspec.title": "a", "ss_network_args": '{"scale_weight_norms": 1}'}),
}
"""Case to tensors and metadata of files that hold what they say."""
