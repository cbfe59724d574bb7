"""ControlNet: builds a model by what its file holds, keeps it, and lets it act on the UNet for a job."""

from collections import OrderedDict, namedtuple
from copy import copy
from pathlib import Path

import safetensors.torch
import torch
from modules import scripts, shared
from modules.tiny_models import WIDTH
from torch import nn

ControlModel = namedtuple("ControlModel", ["model", "type"])
TO_Q, TO_OUT = "middle_block.0.to_q", "middle_block.0.to_out.0"


class _Plugable(nn.Module):
    def __init__(self, control_model):
        super().__init__()
        self.control_model = control_model

    def hook(self, unet):
        original = unet.forward
        unet.forward = lambda x, context: original(x, context) + self.control_model(x)
        return lambda: vars(unet).pop("forward", None)


class ControlNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.time_embed = nn.Sequential(nn.Linear(4, 8))
        self.input_hint_block = nn.Sequential(nn.Conv2d(4, WIDTH, 3, padding=1))
        self.input_blocks = nn.ModuleList([nn.ModuleList([nn.Conv2d(4, WIDTH, 3, padding=1)])])
        self.middle_block = nn.ModuleList([nn.Conv2d(WIDTH, WIDTH, 3, padding=1)])
        self.zero_convs = nn.ModuleList([nn.Conv2d(WIDTH, WIDTH, 1)])
        self.middle_block_out = nn.Sequential(nn.Conv2d(WIDTH, 4, 1))

    def forward(self, x):
        h = self.input_blocks[0][0](x) + self.input_hint_block(x.abs())
        return self.middle_block_out(self.zero_convs[0](self.middle_block[0](h)))


class LinearWithLoRA(nn.Module):
    """No nn.Linear: computes with the weight of a layer of the UNet, and what is added to it."""

    weight_module = None

    def __init__(self, up, down):
        super().__init__()
        self.up, self.down = nn.Parameter(up), nn.Parameter(down)

    def forward(self, x):
        weight = self.weight_module[0].weight.to(x) + torch.mm(self.up, self.down).to(x)
        return nn.functional.linear(x, weight)


class _ControlLora(nn.Module):
    def __init__(self, up, down):
        super().__init__()
        self.to_q = LinearWithLoRA(up, down)

    def forward(self, x):
        return self.to_q(x.reshape(-1, WIDTH)).reshape(x.shape)


class LLLite(nn.Module):
    def __init__(self):
        super().__init__()
        name = "lllite_unet_middle_block_0_to_out_0"
        module = nn.Module()
        module.conditioning1 = nn.Sequential(nn.Conv2d(3, 8, 1))
        module.down = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        setattr(self, name, module)
        self.modules = {name: module}  # really: the method of that name is gone

    def hook(self, unet):
        (module,) = self.modules.values()
        layer = unet.get_submodule(TO_OUT)
        original = layer.forward
        layer.forward = lambda x: original(x + module.down(x))
        return lambda: vars(layer).pop("forward", None)


def build_model_by_guess(state_dict, unet, model_path):
    if "lora_controlnet" in state_dict:
        return ControlModel(_Plugable(_ControlLora(state_dict["to_q.up"], state_dict["to_q.down"])), "ControlLoRA")
    network, kind = (LLLite(), "LLLite") if "lllite" in model_path else (_Plugable(ControlNet()), "ControlNet")
    network.load_state_dict(state_dict)
    return ControlModel(network, kind)


wanted = ()
folder = None


class Script(scripts.Script):
    model_cache = OrderedDict()
    builds = 0
    undo = ()

    def title(self):
        return "ControlNet"

    def show(self, is_img2img):
        return scripts.AlwaysVisible

    @staticmethod
    def clear_control_model_cache():
        Script.model_cache.clear()

    @staticmethod
    def load_control_model(unet, model):
        if model in Script.model_cache:
            found = Script.model_cache[model]
            return ControlModel(copy(found.model), found.type)
        Script.builds += 1
        path = str(Path(folder) / model)
        built = build_model_by_guess(safetensors.torch.load_file(path), unet, path)
        getattr(built, "model", built).to("cpu", dtype=torch.float32 if shared.cmd_opts.no_half else torch.float16)
        Script.model_cache[model] = built
        return built

    def process(self, p):
        unet = shared.sd_model.model.diffusion_model
        for name in wanted:
            built = self.load_control_model(unet, name)
            network = getattr(built, "model", built)
            if isinstance(getattr(network, "control_model", None), _ControlLora):
                network.control_model.to_q.weight_module = [unet.get_submodule(TO_Q)]
            Script.undo = (*Script.undo, network.hook(unet))

    def postprocess(self, p, pictures):
        for undo in reversed(Script.undo):
            undo()
        Script.undo = ()
