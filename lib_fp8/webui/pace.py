"""Whether the strengths of networks change while a picture is sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

_TOLERATED = 1
"""Changes within one sampling pass that are no reason to expect more (sd-webui-lora-block-weight: start, stop)."""


class Pace:
    """Watches the strengths from one layer call to the next.

    The answer depends on the current pass alone, so that a seed gives the same picture whatever was made before it.
    """

    def __init__(self) -> None:
        self._step = 0
        self._wanted: Sequence[Any] = ()
        self._changes = 0

    def is_fast(self, wanted: Sequence[Any], step: int, are_computed: Callable[[], bool]) -> bool:
        """Take note of the strengths at a sampling step, and say whether they change again and again.

        Args:
            wanted: (token, strengths ...) for each network.
            step: number of the sampling step; the first of a pass is 0.
            are_computed: whether strengths are made anew each time they are asked for; then one change is enough.
        """
        if step < self._step:
            self._changes = 0
        self._step = step
        if wanted != self._wanted:
            if step > 0 and [net[0] for net in wanted] == [net[0] for net in self._wanted]:
                self._changes += _TOLERATED + 1 if are_computed() else 1
            self._wanted = wanted
        return self._changes > _TOLERATED
