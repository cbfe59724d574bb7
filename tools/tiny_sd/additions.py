"""The networks trained on top of the model: two LoRAs, and one of each other family that LyCORIS trains."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from demo.shapes.drawing import Style

OUTLINE, STRIPES = Style(outlined=True), Style(striped=True)

TRANSFORMERS = {
    "enable_conv": False,
    "unet_target_module": ["Transformer2DModel"],
    "unet_target_name": [],
    "text_encoder_target_module": ["CLIPAttention", "CLIPMLP"],
    "text_encoder_target_name": [],
}
"""What kohya's trainer adapts by default: the transformer blocks of the UNet, and the text encoder."""
EVERYTHING = {
    "enable_conv": True,
    "unet_target_module": ["Transformer2DModel", "ResnetBlock2D", "Downsample2D", "Upsample2D"],
    "unet_target_name": ["conv_in", "conv_out"],
    "text_encoder_target_module": [],
    "text_encoder_target_name": [],
}
FEW_WHOLE_LAYERS = {
    "enable_conv": True,
    "unet_target_module": [],
    "unet_target_name": [
        r"conv_in$",
        r"conv_out$",
        r"up_blocks\.3\.attentions\.[12]\..*(to_out\.0|to_q|proj_out|to_k)$",
    ],
    "text_encoder_target_module": [],
    "text_encoder_target_name": [],
}
"""Few enough for a small file of complete differences."""
LINEAR = {**FEW_WHOLE_LAYERS, "unet_target_name": [r".*\.(to_q|to_k|to_v|to_out\.0|net\.0\.proj|net\.2)$"]}
"""The WebUI's GLoRA cannot do 1x1 convolutions."""
CROSS_ATTENTION = {**FEW_WHOLE_LAYERS, "unet_target_name": [r".*attn[12]\.(to_q|to_out\.0)$"]}
SCALES = {
    "enable_conv": True,
    "unet_target_module": [],
    "unet_target_name": [r".*\.(to_k|to_v|to_q|to_out\.0|net\.2|conv1|conv2|proj_out)$"],
    "text_encoder_target_module": [],
    "text_encoder_target_name": [],
}


@dataclass(frozen=True)
class Addition:
    """One network: what it shows, how it is built, and how long it is trained."""

    name: str
    style: Style
    algorithm: str = "lora"
    rank: int = 4
    conv_rank: int = 4
    preset: dict[str, Any] = field(default_factory=lambda: EVERYTHING)
    steps: int = 100
    rate: float = 5e-3
    extra: dict[str, Any] = field(default_factory=dict)
    """Further arguments of LyCORIS' network."""


ADDITIONS = (
    Addition("outline", OUTLINE, rank=6, preset=TRANSFORMERS, steps=500, rate=3e-3),
    Addition("stripes", STRIPES, rank=2, conv_rank=2, steps=300, rate=4e-3),
    Addition("loha", STRIPES, "loha", rank=1, conv_rank=1),
    Addition("lokr", STRIPES, "lokr", rank=1, conv_rank=1, extra={"factor": 4}),
    Addition("lokr-tucker", STRIPES, "lokr", rank=2, conv_rank=2, extra={"factor": 8, "use_tucker": True}),
    Addition("full", STRIPES, "full", preset=FEW_WHOLE_LAYERS, rate=1e-3),
    Addition("dora", OUTLINE, preset=TRANSFORMERS, extra={"weight_decompose": True, "wd_on_out": True}),
    Addition("dora-in", OUTLINE, preset=TRANSFORMERS, extra={"weight_decompose": True, "wd_on_out": False}),
    Addition("ia3", STRIPES, "ia3", preset=SCALES, rate=2e-2),
    Addition("glora", STRIPES, "glora", rank=2, preset=LINEAR),
    Addition("oft", STRIPES, "diag-oft", preset=TRANSFORMERS),
    Addition("boft", STRIPES, "boft", rank=8, preset=CROSS_ATTENTION),
    Addition("norm", STRIPES, rank=1, conv_rank=1, extra={"train_norm": True}),
)
