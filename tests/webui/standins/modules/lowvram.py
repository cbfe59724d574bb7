"""--medvram and --lowvram: of a model's big parts, the one that is called is on the device, all others on the CPU."""

import torch

from modules import devices, shared

cpu = torch.device("cpu")
module_in_gpu = None


def send_everything_to_cpu():
    global module_in_gpu
    if module_in_gpu is not None:
        module_in_gpu.to(cpu)
    module_in_gpu = None


def is_needed(sd_model):
    return any(getattr(shared.cmd_opts, flag, False) for flag in ("lowvram", "medvram"))


def apply(sd_model):
    if not is_needed(sd_model):
        sd_model.lowvram = False
    elif not sd_model.lowvram:
        sd_model.lowvram = True
        _setup(sd_model, use_medvram=not getattr(shared.cmd_opts, "lowvram", False))


def _setup(sd_model, use_medvram):
    parents = {}

    def send_me_to_gpu(module, _):
        global module_in_gpu
        module = parents.get(module, module)
        if module_in_gpu is not module:
            send_everything_to_cpu()
            module.to(devices.device)
            module_in_gpu = module

    def track(part, called=None):
        """``called`` is what the networks of the stand-in call of a part."""
        called = called or part
        parents[called] = part
        called.register_forward_pre_hook(send_me_to_gpu)

    def send_to_device_without(owner, *names):
        parts = [getattr(owner, name) for name in names]
        for name in names:
            setattr(owner, name, None)
        owner.to(devices.device)
        for name, part in zip(names, parts):
            setattr(owner, name, part)

    encoder = next(name for name in ("conditioner", "text_encoders", "cond_stage_model") if name in sd_model._modules)
    send_to_device_without(sd_model, "first_stage_model", "model", encoder)
    if encoder == "text_encoders":
        for part in sd_model.text_encoders.children():
            track(part)
    else:
        inner = getattr(sd_model, encoder)
        track(getattr(inner, "wrapped", inner))
    unet = sd_model.model.diffusion_model
    if use_medvram:
        track(sd_model.model, called=unet)
        return
    names = [name for name in ("input_blocks", "middle_block", "output_blocks", "time_embed") if hasattr(unet, name)]
    send_to_device_without(unet, *names)
    track(unet.time_embed)
    for block in [*unet.input_blocks, *getattr(unet, "output_blocks", ()), unet.middle_block]:
        track(block, called=block[0])
