"""Writes random checkpoints in the real layouts, with LoRAs for them. Run by a WebUI's Python, outside the tests.

    python recipe.py WEBUI FOLDER NAMES FLAGS...

FOLDER gets NAME.safetensors and NAME.yaml for each of the names (joined by commas), and their LoRAs in ``lora``. The
layouts are those of the WebUI's own classes, built from its own configurations, in which only sizes are changed.
Configurations name CLIP by a folder below the working folder. FLAGS are the WebUI's.
"""

from __future__ import annotations

import re
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

LDM = "repositories/stable-diffusion-stability-ai/configs/stable-diffusion"
SGM = "repositories/generative-models/configs/inference"
CLIP, CLIP_REAL_SIZE = "clip/small", "clip/real-size"
CLIPS = {
    CLIP: {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4},
    CLIP_REAL_SIZE: {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
}
"""Folder to the sizes of a text encoder."""
OPEN_CLIP, OPEN_CLIP_WIDTH = "ViT-S-32-alt", 256
"""The smallest that open_clip knows; ten layers, and as wide where it leaves."""
SIZES = 256
"""Width of the embedding of each number that SDXL is told: sizes, corners, the score."""

UNET, VAE = "unet_config.params", "first_stage_config.params.ddconfig"
NETWORK, EMBEDDERS = "network_config.params", "conditioner_config.params.emb_models"
SMALL_VAE = {f"{VAE}.ch": 32}
SMALL_UNET = {f"{UNET}.model_channels": 32, **SMALL_VAE}
SD1 = {**SMALL_UNET, f"{UNET}.context_dim": 64, "cond_stage_config.params.version": CLIP}
SD2 = {
    **SMALL_UNET,
    f"{UNET}.num_head_channels": 16,
    f"{UNET}.context_dim": OPEN_CLIP_WIDTH,
    "cond_stage_config.params.arch": OPEN_CLIP,
}
SDXL = {
    **SMALL_VAE,
    f"{NETWORK}.model_channels": 32,
    f"{NETWORK}.num_head_channels": 16,
    f"{NETWORK}.transformer_depth": [1, 2, 2],
    f"{NETWORK}.context_dim": 64 + OPEN_CLIP_WIDTH,
    f"{NETWORK}.adm_in_channels": OPEN_CLIP_WIDTH + 6 * SIZES,
    f"{EMBEDDERS}[0].params.version": CLIP,
    f"{EMBEDDERS}[0].params.layer_idx": 3,
    f"{EMBEDDERS}[1].params.arch": OPEN_CLIP,
}
REFINER = {
    **SMALL_VAE,
    f"{NETWORK}.model_channels": 32,
    f"{NETWORK}.num_head_channels": 16,
    f"{NETWORK}.transformer_depth": 2,
    f"{NETWORK}.context_dim": [OPEN_CLIP_WIDTH] * 4,
    f"{NETWORK}.adm_in_channels": OPEN_CLIP_WIDTH + 5 * SIZES,
    f"{EMBEDDERS}[0].params.arch": OPEN_CLIP,
}


@dataclass(frozen=True)
class Kind:
    """A checkpoint.

    Attributes:
        seed: of its values.
        configuration: where the WebUI has it.
        changes: of that, below ``model.params``.
        loras: name of a LoRA to the parts of the model that it is for.
    """

    seed: int
    configuration: str
    changes: dict[str, object]
    loras: dict[str, tuple[str, ...]] = field(default_factory=dict)


FULL_SIZE = "full-size"
KINDS = {
    "sd1-A": Kind(
        1, "configs/v1-inference.yaml", SD1, {"lora-A": ("unet", "te"), "lora-B": ("unet", "te"), "sd1-te": ("te",)}
    ),
    "sd1-B": Kind(2, "configs/v1-inference.yaml", SD1),
    "sd1-inpaint": Kind(3, "configs/v1-inpainting-inference.yaml", SD1),
    "sd1-p2p": Kind(4, "configs/instruct-pix2pix.yaml", SD1),
    "sd2": Kind(5, f"{LDM}/v2-inference.yaml", SD2, {"sd2-te": ("te",), "sd2-unet": ("unet",)}),
    "sd2-v": Kind(6, f"{LDM}/v2-inference-v.yaml", SD2),
    "sdxl": Kind(
        7,
        f"{SGM}/sd_xl_base.yaml",
        SDXL,
        {"sdxl-te1": ("te1",), "sdxl-te2": ("te2",), "sdxl-all": ("unet", "te1", "te2")},
    ),
    "sdxl-refiner": Kind(8, f"{SGM}/sd_xl_refiner.yaml", REFINER),
    FULL_SIZE: Kind(9, "configs/v1-inference.yaml", {"cond_stage_config.params.version": CLIP_REAL_SIZE}),
}

PARTS = ("model.diffusion_model.", "first_stage_model.", "cond_stage_model.", "conditioner.")
"""What checkpoints hold of a model; the rest, such as the noise schedule, is computed."""
END_OF_BRANCH = re.compile(r"\.(out_layers\.3|proj_out|to_out\.0|ff\.net\.2|conv2|out_proj|fc2|c_proj)\.weight$")
"""What is added to what comes in; less than that, so that the layers stay of one size and errors do not grow."""


def value(torch, seed: int, key: str, shape):
    """Float16 values that keep the size of what goes through; the same for the same key, whatever else there is."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {key}".encode()))
    noise = torch.randn(shape, generator=generator)
    if noise.dim() < 2:
        noise = 1 + 0.1 * noise if key.endswith("weight") else 0.02 * noise
    elif "embedding" in key:
        noise *= 0.02
    else:
        noise *= (0.4 if END_OF_BRANCH.search(key) else 1.0) * noise[0].numel() ** -0.5
    return noise.half()


# LoRAs, as kohya's programs name their layers: by diffusers' names, for the UNet of SDXL by the checkpoint's own

_IN_BLOCKS = r"(?:attn[12]\.to_(?:[qkv]|out\.0)|ff\.net\.(?:0\.proj|2))"
_UNET = re.compile(
    rf"model\.diffusion_model\.(.+)\.(\d)\.(proj_in|proj_out|transformer_blocks\.\d+\.{_IN_BLOCKS})\.weight"
)
_CLIP = re.compile(
    r"(?:cond_stage_model|conditioner\.embedders\.0)\.transformer\.text_model\.encoder\.layers\.(.+_proj|.+fc[12])\.weight"
)
_OPEN_CLIP = re.compile(
    r"(?:cond_stage_model|conditioner\.embedders\.1)\.model\.transformer\.resblocks\.(\d+)\."
    r"(attn\.in_proj_|attn\.out_proj\.|mlp\.c_fc\.|mlp\.c_proj\.)weight"
)
_DIFFUSERS = {
    "attn.in_proj_": ("self_attn_q_proj", "self_attn_k_proj", "self_attn_v_proj"),
    "attn.out_proj.": ("self_attn_out_proj",),
    "mlp.c_fc.": ("mlp_fc1",),
    "mlp.c_proj.": ("mlp_fc2",),
}


def _attention_of_diffusers(block: str) -> str:
    """``input_blocks.4`` is ``down_blocks_1_attentions_0``."""
    kind, *number = block.split(".")
    if kind == "middle_block":
        return "mid_block_attentions_0"
    up = kind == "output_blocks"
    level, place = divmod(int(number[0]) - (not up), 3)
    return f"{'up' if up else 'down'}_blocks_{level}_attentions_{place}"


def layers_for_lora(key: str, shape, sdxl: bool) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """For a weight of a checkpoint: part of the model, kohya's name of the layer, shape; three if it is q, k and v."""
    shape = tuple(shape)
    if found := _UNET.fullmatch(key):
        block, number, rest = found.groups()
        place = f"{block}.{number}" if sdxl else _attention_of_diffusers(block)
        yield "unet", f"lora_unet_{place}.{rest}".replace(".", "_"), shape
    elif found := _CLIP.fullmatch(key):
        encoder = "te1" if sdxl else "te"
        yield encoder, f"lora_{encoder}_text_model_encoder_layers_{found[1]}".replace(".", "_"), shape
    elif found := _OPEN_CLIP.fullmatch(key):
        encoder, names = "te2" if sdxl else "te", _DIFFUSERS[found[2]]
        for name in names:
            yield (
                encoder,
                f"lora_{encoder}_text_model_encoder_layers_{found[1]}_{name}",
                (shape[0] // len(names), shape[1]),
            )


RANK, ALPHA, SIZE = 4, 2.0, 0.3
"""The last: of what is added, of the size of a weight."""


def lora(torch, name: str, parts: tuple[str, ...], shapes: dict[str, object], sdxl: bool) -> dict[str, object]:
    """A LoRA for all layers of some parts of a checkpoint."""
    tensors = {}
    for key, shape in shapes.items():
        for part, layer, (outputs, inputs, *kernel) in layers_for_lora(key, shape, sdxl):
            if part in parts:
                tensors[f"{layer}.lora_down.weight"] = value(torch, 0, f"{name} {layer} down", (RANK, inputs, *kernel))
                up = value(torch, 0, f"{name} {layer} up", (outputs, RANK, *kernel))
                tensors[f"{layer}.lora_up.weight"] = up * SIZE * RANK / ALPHA
                tensors[f"{layer}.alpha"] = torch.tensor(ALPHA)
    return tensors


def build(kind: Kind, webui: Path):
    """The configuration, and the model without values."""
    from ldm.util import instantiate_from_config
    from modules import sd_disable_initialization, sd_models
    from omegaconf import OmegaConf

    configuration = OmegaConf.load(webui / kind.configuration)
    for name, changed in kind.changes.items():
        OmegaConf.update(configuration.model.params, name, changed, merge=False, force_add=True)
    repaired = configuration.copy()
    sd_models.repair_config(repaired)
    with sd_disable_initialization.DisableInitialization(), sd_disable_initialization.InitializeOnMeta():
        return configuration, instantiate_from_config(repaired.model)


def make(name: str, webui: Path, folder: Path) -> None:
    """Write a checkpoint and its LoRAs into a folder."""
    import torch
    from omegaconf import OmegaConf
    from safetensors.torch import save_file

    kind = KINDS[name]
    configuration, model = build(kind, webui)
    state = {key: tensor for key, tensor in model.state_dict().items() if key.startswith(PARTS)}
    shapes = {key: tensor.shape for key, tensor in state.items() if tensor.is_floating_point()}
    kept = {key: tensor.clone() for key, tensor in state.items() if key not in shapes}
    values = {key: value(torch, kind.seed, key, shape) for key, shape in shapes.items()}
    save_file(kept | values, folder / f"{name}.safetensors")
    OmegaConf.save(configuration, folder / f"{name}.yaml")
    (folder / "lora").mkdir(exist_ok=True)
    for lora_name, parts in kind.loras.items():
        tensors = lora(torch, lora_name, parts, shapes, sdxl=hasattr(model, "conditioner"))
        save_file(tensors, folder / f"lora/{lora_name}.safetensors")


def main() -> None:
    """Become a WebUI, as far as its classes need it, and write what is asked for."""
    _, webui, folder, names, *flags = sys.argv
    sys.path[0] = webui
    sys.argv[1:] = flags
    from modules import initialize, initialize_util

    initialize.imports()
    sys.path.append(f"{webui}/extensions-builtin/LDSR")
    import sd_hijack_autoencoder  # noqa: F401  # which the class of instruct-pix2pix needs

    getattr(initialize_util, "fix_pytorch_lightning", lambda: None)()  # since 1.10 the WebUI runs with newer ones too
    for name in names.split(","):
        make(name, Path(webui), Path(folder))


if __name__ == "__main__":
    main()
