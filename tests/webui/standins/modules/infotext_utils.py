"""Writing, parsing and pasting generation parameters (``generation_parameters_copypaste`` before 1.8)."""

import json
import re

from modules import at_least, script_callbacks, shared

_label = r"\w[\w \-/]+" if at_least(7) else r"[\w ]+"
_field = re.compile(rf'\s*({_label}):\s*("(?:\\.|[^\\"])+"|[^,]*)(?:,|$)')


def quote(text):
    return json.dumps(text) if any(char in str(text) for char in ",\n:") else text


def parse_generation_parameters(text):
    *prompt, last = text.strip().split("\n")
    params = {"Prompt": "\n".join(prompt)}
    for key, value in _field.findall(last):
        try:
            if value[0] == '"' and value[-1] == '"':
                value = json.loads(value)
            params[key] = value
        except (IndexError, ValueError):
            print(f'Error parsing "{key}: {value}"')
    params.setdefault("Clip skip", "1")
    if at_least(8):
        params.setdefault("FP8 weight", "Disable")
    return params


def _labels():
    return [(info.infotext, key) for key, info in shared.opts.data_labels.items() if info.infotext]


def override_texts(text):
    """What the paste button puts into the field "Override settings": what differs from the options now."""
    params = parse_generation_parameters(text)
    script_callbacks.run("infotext_pasted", text, params)
    found = []
    for label, key in _labels():
        if (value := params.get(label)) is not None:
            value = shared.opts.cast_value(key, value)
            if value != getattr(shared.opts, key, None):
                found.append(f"{label}: {value}")
    return found


def create_override_settings_dict(texts):
    params = dict(text.split(":", maxsplit=1) for text in texts)
    return {key: shared.opts.cast_value(key, params[label].strip()) for label, key in _labels() if label in params}
