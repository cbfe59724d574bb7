"""A LoRA as kohya's trainer builds it: a small path beside each layer, which neither reads nor writes its weight."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from demo.networks import Layer, layers_of
from tools.tiny_sd.networks import Networks


class LoRALayer(nn.Module):
    """``layer(x) + alpha / rank * up(down(x))``, in the place of the layer's own forward.

    Its parameters and buffer have the names of kohya's format. The layer is no part of it: who asks for its parameters
    gets `lora_down.weight`, (rank, in) or (rank, in, kH, kW), and `lora_up.weight`, (out, rank) or (out, rank, 1, 1),
    both float32. Until it is trained it adds zeros.
    """

    def __init__(self, layer: Layer, rank: int, alpha: float) -> None:
        super().__init__()
        self.lora_down: Layer
        self.lora_up: Layer
        if isinstance(layer, nn.Conv2d):
            where = (layer.kernel_size, layer.stride, layer.padding)
            self.lora_down = nn.Conv2d(layer.in_channels, rank, *where, bias=False)  # type: ignore[arg-type]
            self.lora_up = nn.Conv2d(rank, layer.out_channels, 1, bias=False)
        else:
            self.lora_down = nn.Linear(layer.in_features, rank, bias=False)
            self.lora_up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.lora_up.weight)
        self.register_buffer("alpha", torch.tensor(float(alpha)))
        self._factor = alpha / rank
        self._layer_forward = layer.forward
        layer.forward = self.forward  # type: ignore[method-assign, assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Output of the layer and of the path beside it; x as the layer takes it."""
        return self._layer_forward(x) + self._factor * self.lora_up(self.lora_down(x))


def attach(networks: Networks, rank: int, text_encoder: bool = False) -> nn.ModuleDict:
    """Put a fresh LoRA, always the same, beside what kohya's trainer adapts by default.

    Args:
        networks: the model; from now on its layers compute with the LoRA.
        rank: rank of each path, and alpha.
        text_encoder: whether the text encoder's layers are adapted too, beside the UNet's transformer blocks.

    Returns:
        Kohya's name of a layer to the path beside it. Its parameters are all that is to be trained, its state dict is
        what a file in kohya's format holds.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.ModuleDict(
            {
                name: LoRALayer(layer, rank, rank)
                for name, layer in layers_of(networks).items()
                if "_attentions_" in name or (text_encoder and name.startswith("lora_te_"))
            }
        )


def save(lora: nn.ModuleDict, file: Path) -> None:
    """Write a LoRA in kohya's format, float16, whole or not at all. Raises OSError or SafetensorError."""
    rank = next(iter(lora.parameters())).shape[0]
    metadata = {
        "ss_network_module": "networks.lora",
        "ss_network_dim": str(rank),
        "ss_network_alpha": str(float(rank)),
        "ss_output_name": file.stem,
    }
    unfinished = file.with_suffix(".part.safetensors")
    try:
        save_file({name: value.detach().half() for name, value in lora.state_dict().items()}, unfinished, metadata)
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)
