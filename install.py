"""Run by the WebUI at every start: checks what is there and explains it. Installs nothing, imports nothing large."""

import importlib.util
import sys

OLDEST_PYTHON = (3, 10)
NEEDED = ("torch", "safetensors", "gradio")


def findings() -> list:
    """What the user should know about this installation, one line each; empty if all is well."""
    lines = []
    if sys.version_info < OLDEST_PYTHON:
        wanted = ".".join(map(str, OLDEST_PYTHON))
        lines.append(
            f"Python {wanted} or later is needed, this is {sys.version.split()[0]}; the extension does not load"
        )
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        lines.append(f"{', '.join(missing)} not found; the WebUI itself installs what is missing")
    return lines


if __name__ == "__main__":
    for line in findings():
        print(f"FP8 weight: {line}")
