"""AnimateDiff's motion modules: loaded by name, kept, put between the layers of the UNet for a job, and taken out."""

from pathlib import Path

import torch
from modules import devices, sd_models, shared
from modules.tiny_models import WIDTH, _LayerNorm
from torch import nn


class MotionModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = _LayerNorm(WIDTH)
        self.to_q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.proj_out = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("pe", torch.linspace(-1, 1, WIDTH))

    def forward(self, x, *_):
        h = self.to_q(self.norm(x.transpose(1, -1)) + self.pe.to(x))
        return x + self.proj_out(h).transpose(1, -1)


class MotionWrapper(nn.Module):
    def __init__(self, mm_name, is_xl=False):
        super().__init__()
        self.mm_name, self.is_xl = mm_name, is_xl
        self.down_blocks = nn.ModuleList([MotionModule()])
        self.mid_block = MotionModule()


class AnimateDiffMM:
    mm_injected = False

    def __init__(self):
        self.mm = None
        self.folder = None
        self.loads = 0

    def load(self, model_name):
        if self.mm is None or self.mm.mm_name != model_name:
            self.loads += 1
            state_dict = sd_models.read_state_dict(Path(self.folder) / f"{model_name}.safetensors")
            self.mm = MotionWrapper(model_name, is_xl="xl" in model_name)
            self.mm.load_state_dict(state_dict, strict=True)
        self.mm.to(devices.device).eval()
        if not shared.cmd_opts.no_half:
            self.mm.half()

    def inject(self, sd_model, model_name):
        if AnimateDiffMM.mm_injected:
            self.restore(sd_model)
        unet = sd_model.model.diffusion_model
        self.load(model_name)
        assert sd_model.is_sdxl == self.mm.is_xl, "Motion module incompatible with SD."
        unet.middle_block.insert(len(unet.middle_block) - 1, self.mm.mid_block)
        unet.input_blocks[1].append(self.mm.down_blocks[0])
        self.prev_alphas, sd_model.alphas_cumprod = sd_model.alphas_cumprod, sd_model.alphas_cumprod.square()
        for name, module in self.mm.named_modules():
            module.network_layer_name = name.replace(".", "_")
            sd_model.network_layer_mapping[module.network_layer_name] = module
        AnimateDiffMM.mm_injected = True

    def restore(self, sd_model):
        if not AnimateDiffMM.mm_injected:
            return
        unet, is_xl = sd_model.model.diffusion_model, self.mm.is_xl  # whatever else it asks of the one it keeps
        assert is_xl is not None
        sd_model.alphas_cumprod, self.prev_alphas = self.prev_alphas, None
        unet.input_blocks[1].pop(-1)
        unet.middle_block.pop(-2)
        AnimateDiffMM.mm_injected = False
        if sd_model.lowvram:
            self.mm.to(devices.cpu)

    def remove(self):
        del self.mm
        self.mm = None


mm_animatediff = AnimateDiffMM()
