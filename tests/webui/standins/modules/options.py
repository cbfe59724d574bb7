"""Options: before 1.7, ``data`` knows only what was there when it was made or loaded."""

from modules import at_least, errors
from modules.shared_cmd_options import cmd_opts


class OptionInfo:
    def __init__(
        self,
        default=None,
        label="",
        component=None,
        component_args=None,
        onchange=None,
        section=None,
        refresh=None,
        comment_before="",
        comment_after="",
        infotext=None,
        restrict_api=False,
    ):
        self.default, self.label, self.component, self.component_args = default, label, component, component_args
        self.onchange, self.section, self.refresh = onchange, section, refresh
        self.comment_before, self.comment_after = comment_before, comment_after
        self.infotext, self.restrict_api = infotext, restrict_api
        self.do_not_save = False
        if at_least(7):
            self.category_id = None

    def info(self, text):
        self.comment_after += f"<span class='info'>({text})</span>"
        return self


def options_section(section, options):
    for info in options.values():
        info.section = section
        if at_least(7) and len(section) == 3:
            info.section, info.category_id = section[:2], section[2]
    return options


class Options:
    _fields = ("data", "data_labels", "restricted_opts", "typemap")
    typemap = {int: float}

    def __init__(self, data_labels, restricted_opts=()):
        self.data_labels = data_labels
        self.restricted_opts = set(restricted_opts)
        self.data = {key: info.default for key, info in data_labels.items()}

    def __setattr__(self, key, value):
        if key in self._fields or not (key in self.data or key in self.data_labels):
            return super().__setattr__(key, value)
        assert not cmd_opts.freeze_settings, "changing settings is disabled"
        info = self.data_labels[key]
        if info.do_not_save:
            return None
        if isinstance(info.component_args, dict) and info.component_args.get("visible", True) is False:
            raise RuntimeError(f"not possible to set {key} because it is restricted")
        if at_least(8):
            sections, keys = cmd_opts.freeze_settings_in_sections or "", cmd_opts.freeze_specific_settings or ""
            assert info.section[0] not in [name.strip() for name in sections.split(",")], f"{key} is frozen"
            assert key not in [name.strip() for name in keys.split(",")], f"{key} is frozen"
        if cmd_opts.hide_ui_dir_config and key in self.restricted_opts:
            raise RuntimeError(f"not possible to set {key} because it is restricted")
        self.data[key] = value
        return None

    def __getattr__(self, key):
        if key in self._fields:
            raise AttributeError(key)
        if key in self.data:
            return self.data[key]
        if key in self.data_labels:
            return self.data_labels[key].default
        raise AttributeError(key)

    def set(self, key, value, is_api=False, run_callbacks=True):
        before = self.data.get(key)
        info = self.data_labels[key]
        if before == value or info.do_not_save or (is_api and info.restrict_api):
            return False
        try:
            setattr(self, key, value)
        except RuntimeError:
            return False
        if run_callbacks and info.onchange is not None:
            try:
                info.onchange()
            except Exception as error:
                errors.display(error, f"changing setting {key} to {value}")
                setattr(self, key, before)
                return False
        return True

    def get_default(self, key):
        info = self.data_labels.get(key)
        return None if info is None else info.default

    def add_option(self, key, info):
        self.data_labels[key] = info
        if at_least(7) and not info.do_not_save:
            self.data.setdefault(key, info.default)

    def reorder(self):
        """Options of a section come together; a new dictionary takes the place of the old one."""
        first_seen = list(dict.fromkeys(info.section for info in self.data_labels.values()))
        self.data_labels = dict(sorted(self.data_labels.items(), key=lambda item: first_seen.index(item[1].section)))

    def cast_value(self, key, value):
        expected = type(self.data_labels[key].default)
        if value is None or expected is type(None):
            return None
        return False if expected is bool and value == "False" else expected(value)
