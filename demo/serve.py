"""Serves the extension's settings in a page of their own, without a WebUI: `python run.py demo --serve`.

Behind the page is the stand-in for the WebUI that the tests use; the model in it has the layers and the values of the
embedded checkpoint, so converting it and the figures in the panel are real. It makes no pictures.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from demo.model import CHECKPOINT

ROOT = Path(__file__).resolve().parent.parent
STANDINS = ROOT / "tests" / "webui" / "standins"


class Layers(nn.Module):
    """A tree of plain layers with the names and shapes of a checkpoint; it holds values and computes nothing."""

    lowvram = False
    kind = "sd1"

    def __init__(self, shapes: dict[str, list[int]]) -> None:
        super().__init__()
        for key, shape in shapes.items():
            *path, kind = key.split(".")
            if kind == "weight":
                self._add(path, _layer(path[-1], shape, f"{'.'.join(path)}.bias" in shapes))
        self.register_buffer("alphas_cumprod", torch.linspace(0.99, 0.01, 11, device="cpu"), persistent=False)

    def _add(self, path: list[str], layer: nn.Module) -> None:
        parent: nn.Module = self
        for name in path[:-1]:
            if name not in parent._modules:
                parent.add_module(name, nn.Module())
            parent = parent._modules[name] or parent
        parent.add_module(path[-1], layer)

    def get_learned_conditioning(self, texts: list[str]) -> torch.Tensor:
        """What the WebUI asks for after a load; there is nobody to read it."""
        return torch.zeros(len(texts), 77, 64)


def _layer(name: str, shape: list[int], bias: bool) -> nn.Module:
    if len(shape) == 4:
        return nn.Conv2d(shape[1], shape[0], (shape[2], shape[3]), bias=bias)
    if len(shape) == 2:
        return nn.Embedding(shape[0], shape[1]) if "embedding" in name else nn.Linear(shape[1], shape[0], bias=bias)
    return nn.LayerNorm(shape)


def shapes_of(checkpoint: Path) -> dict[str, list[int]]:
    """Names and shapes of the tensors of a checkpoint."""
    with safe_open(checkpoint, "pt") as opened:
        return {key: opened.get_slice(key).get_shape() for key in opened.keys()}  # noqa: SIM118


def start_standin() -> Any:
    """Bring the stand-in to the point where a WebUI builds its page, and return its options."""
    sys.path.append(str(STANDINS))  # behind the real gradio and fastapi, of which it has stand-ins too
    import modules

    modules.generation = "1.6"  # the switch is the extension's own there
    from modules import script_callbacks, scripts, sd_models, shared, tiny_models

    tiny_models.StableDiffusion = lambda _: Layers(shapes_of(CHECKPOINT))
    sd_models.CheckpointInfo(CHECKPOINT)
    scripts.load_scripts([ROOT / "scripts" / "fp8_weight.py"])
    sd_models.load_model()
    script_callbacks.run("before_ui")
    return shared.opts


def build_page(opts: Any) -> Any:
    """The settings as the WebUI shows them: labels, explanations, Apply settings."""
    import gradio as gr

    css = ".info { opacity: .65 } footer { display: none !important }"
    with gr.Blocks(title="FP8 weight", analytics_enabled=False, css=css) as page:
        gr.Markdown(f"## FP8 weight\nThe extension's settings, at work on `{CHECKPOINT.name}`.")
        apply = gr.Button("Apply settings", variant="primary")
        outcome = gr.HTML()
        inputs: dict[str, Any] = {}
        refreshers: list[tuple[Callable[[], str], Any]] = []
        for key, info in opts.data_labels.items():
            if not key.startswith("fp8_"):
                continue
            kind = info.component or {bool: gr.Checkbox, int: gr.Number}.get(type(info.default), gr.Textbox)
            value = opts.data.get(key, info.default)
            made = kind(label=info.label, value=value, elem_id=f"setting_{key}", **(info.component_args or {}))
            if info.comment_after:
                gr.HTML(info.comment_after)
            if info.do_not_save:
                refreshers.append((functools.partial(getattr, info, "default"), made))
            else:
                inputs[key] = made

        def submit(*values: Any) -> list[str]:
            changed = [opts.data_labels[key].label for key, value in zip(inputs, values) if opts.set(key, value)]
            said = f"{len(changed)} settings changed{': ' if changed else ''}{', '.join(changed)}."
            return [said, *(read() for read, _ in refreshers)]

        apply.click(submit, inputs=list(inputs.values()), outputs=[outcome, *(panel for _, panel in refreshers)])
    return page


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(prog="run.py demo --serve", description=__doc__)
    parser.add_argument("--port", type=int, default=7861, help="default: %(default)s")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    options = parser.parse_args()
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    page = build_page(start_standin())
    print(f"The settings are at http://127.0.0.1:{options.port}; Ctrl+C ends it.", flush=True)
    page.queue().launch(
        server_name="127.0.0.1", server_port=options.port, inbrowser=options.open, show_api=False, quiet=True
    )


if __name__ == "__main__":
    main()
