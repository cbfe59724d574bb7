"""Trains the LoRAs and LyCORIS networks on the embedded model: `python run.py train networks`.

About a minute for each on two idle cores. Files that are there already are left alone.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path

import torch
from lycoris.kohya import LycorisNetworkKohya
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from demo.model import CHECKPOINT, LORAS
from tools.tiny_sd.additions import ADDITIONS, Addition
from tools.tiny_sd.networks import Networks, load_networks
from tools.tiny_sd.styles import style_loss
from tools.tiny_sd.training import Stage, train


class KohyaNames(nn.Module):
    """Gives the text encoder's layers the path that kohya's key names are made of."""

    def __init__(self, text_encoder: nn.Module) -> None:
        super().__init__()
        self.text_model = getattr(text_encoder, "text_model", text_encoder)


def make_network(addition: Addition, networks: Networks) -> LycorisNetworkKohya:
    """An untrained network, attached to the model."""
    torch.manual_seed(1)
    text_encoder = KohyaNames(networks.text_encoder)
    LycorisNetworkKohya.apply_preset(addition.preset)
    network = LycorisNetworkKohya(
        text_encoder,
        networks.unet,
        lora_dim=addition.rank,
        conv_lora_dim=addition.conv_rank,
        alpha=addition.rank,
        conv_alpha=addition.conv_rank,
        network_module=addition.algorithm,
        warn_on_unmatched=False,
        **addition.extra,
    )
    network.apply_to(text_encoder, networks.unet, bool(network.text_encoder_loras), True)
    return network


def train_addition(addition: Addition, networks: Networks, output: Path) -> None:
    """Train one network on pictures of its style and write it."""
    loss_of = style_loss(networks, addition.style)
    network = make_network(addition, networks)
    with tempfile.TemporaryDirectory() as folder:
        train(
            Stage(addition.name, addition.steps, addition.rate, flat=0.3, average=0.98), network, loss_of, Path(folder)
        )
    network.restore()
    network.save_weights(
        str(output), torch.float16, {"ss_network_module": "lycoris.kohya", "ss_output_name": addition.name}
    )
    if addition.algorithm == "glora":
        as_the_webui_reads_it(output)


def as_the_webui_reads_it(file: Path) -> None:
    """Exchange the two factors of GLoRA's products: LyCORIS wrote them the other way round when the WebUI learnt it."""
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    tensors = {
        _EXCHANGED.sub(lambda found: f".{found[1]}{3 - int(found[2])}.", k): v for k, v in load_file(file).items()
    }
    save_file(tensors, file, metadata)


_EXCHANGED = re.compile(r"\.([ab])([12])\.")


def main() -> int:
    """Train what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [addition.name for addition in ADDITIONS]
    parser.add_argument("names", nargs="*", help=f"default: all of {', '.join(known)}")
    parser.add_argument("--output", type=Path, default=LORAS)
    options = parser.parse_args()
    if unknown := set(options.names) - set(known):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(known)}")
    options.output.mkdir(parents=True, exist_ok=True)
    networks = load_networks(CHECKPOINT)
    for part in (networks.vae, networks.unet, networks.text_encoder):
        part.requires_grad_(False)
    for addition in ADDITIONS:
        file = options.output / f"shapes-{addition.name}.safetensors"
        if file.exists() or (options.names and addition.name not in options.names):
            continue
        unfinished = file.with_suffix(".part.safetensors")
        train_addition(addition, networks, unfinished)
        unfinished.replace(file)
        print(f"wrote {file}, {file.stat().st_size // 1024} KiB", flush=True)
    return 0


if __name__ == "__main__":
    torch.set_flush_denormal(True)
    raise SystemExit(main())
