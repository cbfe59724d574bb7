"""The most that a model takes while its weights are loaded, counted from its tensors layer by layer."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from lib_fp8.report import stored_bytes


def _own_bytes(module: torch.nn.Module) -> int:
    own = (*module._parameters.values(), *module._buffers.values())
    return stored_bytes(tensor for tensor in own if tensor is not None)


class LoadPeak:
    """Follows the bytes of a model's parameters and buffers through ``load_state_dict``.

    Use as a context, and enter it before a ``StreamingConversion``: each layer is then counted when it is filled and
    again when it is packed, with both beside each other in between. What packing holds besides (4 MiB or so) and the
    state dict are not counted, nor anything on the meta device.

    Args:
        model: all of it, not only the parts that are converted.

    Attributes:
        peak: bytes at the worst moment so far.
    """

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self._held: dict[torch.nn.Module, int] = {}
        self._now = self.peak = 0
        self._last: torch.nn.Module | None = None
        self._handles: list[Any] = []

    def __enter__(self) -> LoadPeak:
        self._held = {module: _own_bytes(module) for module in self._model.modules()}
        self._now = self.peak = sum(self._held.values())
        try:
            for module in self._held:
                self._handles.append(module.register_load_state_dict_post_hook(self._filled))
        except BaseException:  # an interrupt; a hook that stayed would count for ever
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._settle_last()

    def _filled(self, module: torch.nn.Module, incompatible_keys: Any) -> None:
        self._settle_last()
        self._count(module, _own_bytes(module))
        self.peak = max(self.peak, self._now)
        self._last = module

    def _settle_last(self) -> None:
        if self._last is not None and (after := _own_bytes(self._last)) != self._held[self._last]:
            self.peak = max(self.peak, self._now + after)
            self._count(self._last, after)

    def _count(self, module: torch.nn.Module, own: int) -> None:
        self._now += own - self._held[module]
        self._held[module] = own
