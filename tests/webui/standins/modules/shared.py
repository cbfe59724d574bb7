"""The state that all share, and the options that the WebUI itself has."""

import sys
from types import ModuleType, SimpleNamespace

import gradio as gr

from modules import at_least
from modules.options import OptionInfo, Options, options_section
from modules.shared_cmd_options import cmd_opts  # noqa: F401  # shared.cmd_opts is how it is used

options_templates = {
    **options_section(
        ("sd", "Stable Diffusion", "sd")[: 3 if at_least(7) else 2],
        {
            "sd_model_checkpoint": OptionInfo(None, "Stable Diffusion checkpoint"),
            "sd_checkpoints_limit": OptionInfo(1, "Maximum number of checkpoints loaded", gr.Number),
            "sd_checkpoints_keep_in_cpu": OptionInfo(True, "Only keep one model on device"),
            "disable_mmap_load_safetensors": OptionInfo(False, "Disable memmapping for loading .safetensors files."),
            "sd_checkpoint_cache": OptionInfo(0, "Checkpoints to cache in RAM", gr.Number),
            "CLIP_stop_at_last_layers": OptionInfo(1, "Clip skip", infotext="Clip skip"),
        },
    ),
    **options_section(
        ("optimizations", "Optimizations", "sd")[: 3 if at_least(7) else 2],
        {"cross_attention_optimization": OptionInfo("Automatic", "Cross attention optimization", gr.Dropdown)},
    ),
}
if at_least(8):
    options_templates |= options_section(
        ("optimizations", "Optimizations", "sd"),
        {
            "fp8_storage": OptionInfo(
                "Disable", "FP8 weight", gr.Radio, {"choices": ["Disable", "Enable for SDXL", "Enable"]}
            ).info("the WebUI's own words"),
            "cache_fp16_weight": OptionInfo(False, "Cache FP16 weight for LoRA").info("costs memory"),
        },
    )
options_templates |= options_section(
    ("compatibility", "Compatibility", "sd")[: 3 if at_least(7) else 2],
    {"lora_functional": OptionInfo(False, "Lora: old method")},
)
options_templates |= options_section(
    (None, "Hidden options"),
    {"disabled_extensions": OptionInfo([], ""), "disable_all_extensions": OptionInfo("none", "")},
)

opts = Options(options_templates)
state = SimpleNamespace(sampling_step=0)


class _Shared(ModuleType):
    @property
    def sd_model(self):
        return sys.modules["modules.sd_models"].model_data.sd_model


sys.modules[__name__].__class__ = _Shared
