"""Puts the motion module that ``wanted`` names into the UNet before the overrides of a job are in force."""

from modules import scripts, shared
from scripts.animatediff_mm import mm_animatediff as motion_module

wanted = None


class AnimateDiffScript(scripts.Script):
    hacked = False

    def title(self):
        return "AnimateDiff"

    def show(self, is_img2img):
        return scripts.AlwaysVisible

    def before_process(self, p):
        if wanted is not None:
            motion_module.inject(shared.sd_model, wanted)
            AnimateDiffScript.hacked = True
        elif self.hacked:
            motion_module.restore(shared.sd_model)
            AnimateDiffScript.hacked = False

    def postprocess(self, p, pictures):
        if wanted is not None:
            motion_module.restore(shared.sd_model)
            AnimateDiffScript.hacked = False
