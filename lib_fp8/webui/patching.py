"""Replacing functions of the WebUI, and putting every one of them back, last one first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from modules import patches

_KEY = "lib_fp8"


class Patches:
    """The replacements that are in force; the WebUI's own ``modules.patches`` keeps the originals."""

    def __init__(self) -> None:
        self._applied: list[tuple[Any, str]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace ``owner.name`` by what ``make(original)`` returns."""
        original = getattr(owner, name)
        patches.patch(_KEY, owner, name, make(original))
        self._applied.append((owner, name))

    def replaces(self, owner: Any, name: str) -> bool:
        """Whether ``owner.name`` is replaced."""
        return (owner, name) in self._applied

    def undo(self) -> None:
        """Put all originals back, in reverse order; does nothing where nothing is replaced."""
        while self._applied:
            owner, name = self._applied.pop()
            patches.undo(_KEY, owner, name)
