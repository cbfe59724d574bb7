"""The Lora extension's backups of weights, as other extensions ask for them, without keeping any.

They read ``layer.network_weights_backup`` and ``layer.network_bias_backup`` to have a layer without networks, copy or
assign what they find into it, and set both to None where the layer is to be loaded anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

WEIGHTS, BIAS = "network_weights_backup", "network_bias_backup"
"""Names of the attributes: the weight, of attention a pair; and the bias."""


class Backup:
    """An attribute of layers that is made when it is asked for.

    What others assign counts until networks are brought to the layer again, as in the Lora extension.

    Args:
        name: ``WEIGHTS`` or ``BIAS``.
        make: a layer to the value. Raises AttributeError where no networks are in the layer.
        forget: called with a layer of which the value is to be forgotten: what the layer holds counts from then on.
    """

    def __init__(self, name: str, make: Callable[[Any], Any], forget: Callable[[Any], None]):
        self._name, self._make, self._forget = name, make, forget

    def __get__(self, layer: torch.nn.Module | None, owner: type) -> Any:
        if layer is None:
            return self
        own = vars(layer)
        return own[self._name] if self._name in own else self._make(layer)

    def __set__(self, layer: torch.nn.Module, value: Any) -> None:
        vars(layer)[self._name] = value
        if value is None:
            self._forget(layer)

    def __delete__(self, layer: torch.nn.Module) -> None:
        self.__set__(layer, None)
