"""Entry point for the WebUI: installs the extension; all logic is in lib_fp8."""

from pathlib import Path

from modules import scripts

from lib_fp8 import webui

webui.install()
webui.register_callbacks(Path(scripts.basedir()))


class Fp8Weight(scripts.Script):
    """Tells the extension how far a job has come."""

    def title(self):
        return "FP8 weight"

    def show(self, is_img2img):
        return scripts.AlwaysVisible

    def before_process(self, p, *args):
        webui.before_process(p)

    def before_process_batch(self, p, *args, **kwargs):
        webui.before_process_batch(p)
