"""The command line."""

from types import SimpleNamespace

cmd_opts = SimpleNamespace(
    no_half=False,
    precision="autocast",
    freeze_settings=False,
    freeze_settings_in_sections=None,  # from 1.8 on, as the next one
    freeze_specific_settings=None,
    hide_ui_dir_config=False,
    disable_console_progressbars=True,
    disable_model_loading_ram_optimization=False,
)
