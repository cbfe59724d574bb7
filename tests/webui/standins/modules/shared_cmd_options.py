"""The command line."""

from types import SimpleNamespace

cmd_opts = SimpleNamespace(
    no_half=False,
    precision="autocast",
    freeze_settings=False,
    freeze_specific_settings=None,
    disable_console_progressbars=True,
    disable_model_loading_ram_optimization=False,
)
