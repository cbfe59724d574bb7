"""Run by the WebUI at every start: checks what is there and explains it. Installs nothing."""

import importlib.util

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


def findings() -> list[str]:
    """What the user should know about this installation, one line each; empty if all is well."""
    lines = []
    missing = [name for name in ("torch", "safetensors", "gradio") if importlib.util.find_spec(name) is None]
    if missing:
        lines.append(f"{', '.join(missing)} not found; the WebUI itself installs what is missing")
    elif not _has_float8():
        lines.append(
            "this torch has no float8 formats (they came with torch 2.1); int8 is used instead, at the same size"
        )
    return lines


def _has_float8() -> bool:
    import torch

    return all(hasattr(torch, name) for name in FLOAT8)


if __name__ == "__main__":
    for line in findings():
        print(f"FP8 weight: {line}")
