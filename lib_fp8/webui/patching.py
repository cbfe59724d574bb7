"""Replacing functions of the WebUI, and putting every one of them back, last one first."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from modules import patches

_KEY = "lib_fp8"


class Patches:
    """The replacements that are in force; the WebUI's own ``modules.patches`` keeps the originals."""

    def __init__(self) -> None:
        self._applied: list[tuple[Any, str]] = []
        self._replacements: dict[tuple[Any, str], Callable[..., Any]] = {}
        self._inherited: set[tuple[Any, str]] = set()
        self._defined: set[tuple[Any, str]] = set()

    def replace(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace ``owner.name`` by what ``make(original)`` returns; again if others have put theirs there."""
        original = getattr(owner, name)
        if inherits := isinstance(owner, type) and name not in vars(owner):
            original = _asking_the_base_class(owner, name)
        replacement = make(original)
        if self.replaces(owner, name):
            self._forget(owner, name)
        patches.patch(_KEY, owner, name, replacement)
        self._applied.append((owner, name))
        self._replacements[owner, name] = replacement
        if inherits:
            self._inherited.add((owner, name))

    def define(self, owner: type, name: str, value: object) -> None:
        """Give a class an attribute that it does not have."""
        setattr(owner, name, value)
        self._applied.append((owner, name))
        self._defined.add((owner, name))

    def replaces(self, owner: Any, name: str) -> bool:
        """Whether ``owner.name`` is replaced, or defined."""
        return (owner, name) in self._applied

    def is_outermost(self, owner: Any, name: str) -> bool:
        """Whether ``owner.name`` is replaced, and is the replacement itself."""
        return self.replaces(owner, name) and getattr(owner, name) is self._replacements[owner, name]

    def _forget(self, owner: Any, name: str) -> None:
        self._applied.remove((owner, name))
        del self._replacements[owner, name], patches.originals[_KEY][owner, name]

    def undo(self) -> None:
        """Put all originals back, in reverse order; does nothing where nothing is replaced."""
        while self._applied:
            self._undo(*self._applied.pop())

    def undo_elsewhere(self, owners: Collection[Any], name: str) -> None:
        """Put ``name`` back in all that have it replaced but are none of these owners, such as modules of the past."""
        gone = [(owner, field) for owner, field in self._applied if field == name and owner not in owners]
        for owner, _ in gone:
            self._applied.remove((owner, name))
            self._undo(owner, name)

    def _undo(self, owner: Any, name: str) -> None:
        if (owner, name) in self._defined:
            self._defined.discard((owner, name))
            delattr(owner, name)
            return
        del self._replacements[owner, name]
        patches.undo(_KEY, owner, name)
        if (owner, name) in self._inherited:
            self._inherited.discard((owner, name))
            delattr(owner, name)


def _asking_the_base_class(owner: type, name: str) -> Callable[..., Any]:
    """At each call: the WebUI replaces ``Module.load_state_dict`` while a model loads, maybe this very moment."""

    def original(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(owner, self), name)(*args, **kwargs)

    return original
