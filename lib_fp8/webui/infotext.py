"""What a picture's generation parameters say of 8-bit weights, and reading it back when they are pasted."""

from __future__ import annotations

from typing import Any

from modules import shared

from lib_fp8.formats import E4M3FN_UNSCALED
from lib_fp8.webui.settings import DISABLE, FORMAT, INFOTEXT, KEEP, SWITCH, TEXT_ENCODER_KEYS, value_of
from lib_fp8.webui.storage import record_of

_SWITCH_LABEL = INFOTEXT[SWITCH]
_EMPTY = "None"
"""What stands for an empty text: the WebUI cannot read a field without a value."""
_OWN = [key for key in INFOTEXT if key != SWITCH]


def write(p: Any) -> None:
    """Enter the storage that the model really has; options at their defaults are left out."""
    for label in INFOTEXT.values():
        p.extra_generation_params.pop(label, None)
    record = record_of(shared.sd_model)
    policy = record.applied.policy
    if policy is None:
        return
    p.extra_generation_params[_SWITCH_LABEL] = value_of(SWITCH)
    p.extra_generation_params[INFOTEXT[FORMAT]] = policy.format
    absent = {key for kind, key in TEXT_ENCODER_KEYS.items() if kind not in record.reports}
    for key in _OWN:
        value = value_of(key)
        if key != FORMAT and key not in absent and value != shared.opts.get_default(key):
            p.extra_generation_params[INFOTEXT[key]] = _EMPTY if isinstance(value, str) and not value.strip() else value


def complete_pasted(infotext: str, params: dict[str, Any]) -> None:
    """Fill in what a pasted infotext leaves out, so that the override settings give the picture again.

    Fields at their defaults are not written. An infotext that has "FP8 weight" but no format is from the WebUI's own
    conversion: unscaled, of all layers and text encoders.
    """
    if params.setdefault(_SWITCH_LABEL, DISABLE) == DISABLE:
        return
    if INFOTEXT[FORMAT] not in params:
        params[INFOTEXT[FORMAT]] = E4M3FN_UNSCALED.name
        params[INFOTEXT[KEEP]] = _EMPTY
        params.update((INFOTEXT[key], "True") for key in TEXT_ENCODER_KEYS.values())
    fields = infotext.strip().rpartition("\n")[2]
    for label in (INFOTEXT[key] for key in TEXT_ENCODER_KEYS.values()):
        if f"{label}: True" in fields:  # WebUI 1.6 reads no label with a hyphen
            params.setdefault(label, "True")
    for key in _OWN:
        params.setdefault(INFOTEXT[key], str(shared.opts.get_default(key)))
    if params[INFOTEXT[KEEP]] == _EMPTY:
        params[INFOTEXT[KEEP]] = ""
