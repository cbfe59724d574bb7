"""As much of the X/Y/Z plot script as an axis needs; from 1.8 on it has the axis "FP8 mode" itself."""

from modules import at_least, scripts


class AxisOption:
    def __init__(self, label, type, apply, format_value=None, confirm=None, cost=0.0, choices=None):
        self.label, self.type, self.apply, self.confirm = label, type, apply, confirm
        self.cost, self.choices = cost, choices


def apply_override(field, boolean=False):
    def fun(p, x, xs):
        p.override_settings[field] = x.lower() == "true" if boolean else x

    return fun


axis_options = [AxisOption("Nothing", str, lambda p, x, xs: None)]
if at_least(8):
    axis_options.append(
        AxisOption(
            "FP8 mode",
            str,
            apply_override("fp8_storage"),
            cost=0.9,
            choices=lambda: ["Disable", "Enable for SDXL", "Enable"],
        )
    )


class Script(scripts.Script):
    def title(self):
        return "X/Y/Z plot"
