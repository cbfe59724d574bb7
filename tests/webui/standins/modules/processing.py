"""A job: options are overridden while it runs, the model is looked after once before and once in each batch."""

import torch

from modules import at_least, devices, infotext_utils, scripts, sd_models, sd_unet, shared


class StableDiffusionProcessing:
    cached_c = [None, None]

    def __init__(self, prompt="", override_settings=None, n_iter=1, override_settings_restore_afterwards=True):
        self.prompt = prompt
        self.override_settings = override_settings or {}
        self.override_settings_restore_afterwards = override_settings_restore_afterwards
        self.n_iter = n_iter
        self.extra_generation_params = {}
        self.scripts = scripts.ScriptRunner()
        self.pictures = []
        self.infotexts = []
        self.encoded = 0

    def cached_params(self, required_prompts, steps, extra_network_data, hires_steps=None, use_old_scheduling=False):
        key = (required_prompts, steps, extra_network_data, hires_steps, shared.sd_model.sd_checkpoint_info)
        if at_least(8):
            key += (shared.opts.fp8_storage, shared.opts.cache_fp16_weight)
        return key

    def setup_conds(self):
        key = self.cached_params(self.prompt, 1, None)
        if self.cached_c[0] != key:
            with devices.autocast():
                self.cached_c[:] = key, shared.sd_model.get_learned_conditioning([self.prompt])
            self.encoded += 1
        self.c = self.cached_c[1]


def create_infotext(p):
    params = {"Steps": 1, "Sampler": "Euler", "Seed": 1, "Size": "8x8"}
    if at_least(8) and devices.fp8:
        params["FP8 weight"] = shared.opts.fp8_storage
    params |= p.extra_generation_params
    text = ", ".join(f"{key}: {infotext_utils.quote(value)}" for key, value in params.items() if value is not None)
    return f"{p.prompt}\n{text}"


def process_images(p):
    p.scripts.run("before_process", p)
    opts, overrides = shared.opts, p.override_settings
    if at_least(7):
        stored = {key: opts.data[key] for key in overrides if key in opts.data}
    else:
        stored = {key: opts.data[key] for key in overrides}
    try:
        if sd_models.checkpoint_aliases.get(overrides.get("sd_model_checkpoint")) is None:
            overrides.pop("sd_model_checkpoint", None)
            sd_models.reload_model_weights()
        for key, value in overrides.items():
            opts.set(key, value, is_api=True, run_callbacks=False)
            if key == "sd_model_checkpoint":
                sd_models.reload_model_weights()
        process_images_inner(p)
    finally:
        if p.override_settings_restore_afterwards:
            for key, value in stored.items():
                setattr(opts, key, value)
    return p


def process_images_inner(p):
    p.scripts.run("process", p)
    sd_unet.apply_unet()
    with torch.no_grad():
        for n in range(p.n_iter):
            sd_models.reload_model_weights()
            p.scripts.run("before_process_batch", p, batch_number=n, prompts=[p.prompt], seeds=[1], subseeds=[1])
            p.setup_conds()
            noise = torch.linspace(-1, 1, 64).reshape(1, 4, 4, 4)
            with devices.autocast():
                picture = shared.sd_model.model.diffusion_model(devices.cond_cast_unet(noise), p.c)
            p.pictures.append(picture.float())
            p.infotexts.append(create_infotext(p))
    p.scripts.run("postprocess", p, p.pictures)
