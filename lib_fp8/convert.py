"""Converting a model: in place and whole or not at all, leaf by leaf while weights are loaded, and back.

Two ways lead to the same bits. ``convert_model`` takes a model that holds its weights; ``StreamingConversion``
wraps a ``load_state_dict`` and packs each layer right after its values arrive, before the next layer is filled,
so that no device ever holds the full-precision model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from lib_fp8 import formats
from lib_fp8.capability import is_out_of_memory
from lib_fp8.formats import Format
from lib_fp8.policy import LayerPlan, Policy, plan, quantized_layers
from lib_fp8.quantize import row_absmax
from lib_fp8.qweight import LOGICAL_DTYPES, QuantWeight
from lib_fp8.report import Report, count_reasons, measure

Progress = Callable[[LayerPlan], None]
"""Called once for each layer that is to be converted, after it."""
Keep = Callable[[torch.nn.Module, torch.Tensor], None]
"""Called with each layer that is converted and its weight as it is before packing."""


class ConversionError(RuntimeError):
    """Converting a layer failed; the message names the layer and the cause, which is chained.

    Attributes:
        whole: whether the model is as it was. False only if a device failed after it had taken other layers.
    """

    def __init__(self, message: str, *, whole: bool = True):
        super().__init__(message)
        self.whole = whole


def usable_format(policy: Policy, device: torch.device) -> tuple[Format | None, str | None]:
    """The format of a policy, or what takes over where the device cannot use it, then with a line for the user.

    Returns:
        The format, None where the device can use no format at all; and the line, None where nothing took over.

    Raises:
        Exception: the device has no memory for trying.
    """
    wanted = formats.get_format(policy.format)
    problems = []
    for candidate in dict.fromkeys((wanted, *formats.FALLBACKS)):
        if (problem := candidate.problem(device)) is not None:
            problems.append(problem)
        elif candidate is wanted:
            return wanted, None
        else:
            return candidate, f"{problems[0]}: {candidate.name} is used instead of {wanted.name}"
    return None, f"{'; '.join(dict.fromkeys(problems))}: the weights stay in full precision"


class _Packer:
    """Packs layers one by one and keeps the account that becomes the report."""

    def __init__(self, policy: Policy, progress: Progress | None, keep: Keep | None):
        self._policy = policy
        self._progress = progress
        self._keep = keep
        self._seconds = 0.0
        self._outcomes: dict[str, str | None] = {}
        self._clamped: set[str] = set()
        self._notes: dict[str, None] = {}
        self._format_name = policy.format

    def settle(self, layer: LayerPlan, kept_because: str | None) -> None:
        """Note what became of a layer; a module that is reached by several names may be told of more than once."""
        if kept_because is None and layer.name not in self._outcomes and self._progress is not None:
            self._progress(layer)
        self._outcomes[layer.name] = kept_because

    def pack(self, layer: LayerPlan, weight: torch.Tensor, dtype: torch.dtype | None = None) -> QuantWeight | None:
        """Pack one weight, rounded to a dtype before; None where it must stay as it is.

        What a device has no memory for is packed on the CPU and stays there. The bits are the same.

        Raises:
            ConversionError: its cause is what packing raised; out of memory only if the CPU had none either.
        """
        if (dtype or weight.dtype) not in LOGICAL_DTYPES:
            self.settle(layer, f"{dtype or weight.dtype} weight")
            return None
        start = time.perf_counter()
        try:
            storage_format, note = usable_format(self._policy, weight.device)
            if note is not None:
                self._notes[note] = None
            if storage_format is None:
                self.settle(layer, "no format that the device can use")
                return None
            packed = self._pack_with_memory(layer, weight, storage_format, dtype)
        except Exception as error:
            raise ConversionError(f"layer {layer.name} could not be packed: {error}") from error
        finally:
            self._seconds += time.perf_counter() - start
        if packed is None:
            self.settle(layer, "NaN or infinity in the weight")
        else:
            self._format_name = storage_format.name
        return packed

    def _pack_with_memory(
        self, layer: LayerPlan, weight: torch.Tensor, storage_format: Format, dtype: torch.dtype | None
    ) -> QuantWeight | None:
        try:
            return self._pack_finite(layer, weight, storage_format, dtype)
        except Exception as error:
            if weight.device.type == "cpu" or not is_out_of_memory(error):
                raise
        # Not in the handler: while it lasts, the traceback holds what packing has taken of the device already.
        return self._pack_finite(layer, weight.to("cpu"), storage_format, dtype)

    def _pack_finite(
        self, layer: LayerPlan, weight: torch.Tensor, storage_format: Format, dtype: torch.dtype | None
    ) -> QuantWeight | None:
        weight = weight.to(dtype or weight.dtype)
        absmax = row_absmax(weight)
        if not bool(torch.isfinite(absmax).all()):
            return None
        packed = QuantWeight.from_weight(weight, storage_format, absmax)
        if self._keep is not None:
            self._keep(layer.module, weight)
        if storage_format.scale_of is None and bool((absmax > storage_format.largest).any()):
            self._clamped.add(layer.name)
        return packed

    def report(self, model: torch.nn.Module) -> Report:
        notes = list(self._notes)
        if self._clamped:
            largest = formats.get_format(self._format_name).largest
            notes.append(
                f"values beyond +-{largest:g} were clamped in {len(self._clamped)} layers; a scaled format keeps them"
            )
        before, after = measure(model)
        present = {name for name, _ in model.named_modules()}  # loading SSD-1B takes blocks out of an SDXL model
        outcomes = [reason for name, reason in self._outcomes.items() if name in present]
        return Report(
            format=self._format_name,
            converted=outcomes.count(None),
            kept=count_reasons(reason for reason in outcomes if reason is not None),
            bytes_before=before,
            bytes_after=after,
            seconds=self._seconds,
            notes=tuple(notes),
        )


def convert_model(model: torch.nn.Module, policy: Policy, progress: Progress | None = None) -> Report:
    """Convert the layers of a model in place: all of those the policy names, or none.

    Args:
        model: any module; its Linear and Conv2d layers may be on any device.
        policy: what to convert.
        progress: called after each layer.

    Raises:
        ConversionError: nothing was changed.
    """
    return convert_models([(model, policy)], progress)[0]


def convert_models(
    targets: Sequence[tuple[torch.nn.Module, Policy]], progress: Progress | None = None, keep: Keep | None = None
) -> list[Report]:
    """Convert several models in place, all or none; a report for each.

    Packed weights wait in host memory until every layer is packed, and only then take the places of the originals.
    The device therefore never holds more than the models and one layer, and it is fullest when the first one moves.
    A weight shared by several layers stays shared. Layers that are in 8 bits already are left alone.

    Raises:
        ConversionError: nothing was changed, unless its ``whole`` is False.
    """
    with torch.inference_mode(False), torch.no_grad():  # the weights must be of use outside inference mode too
        return _convert_models(targets, progress, keep)


def _convert_models(
    targets: Sequence[tuple[torch.nn.Module, Policy]], progress: Progress | None, keep: Keep | None
) -> list[Report]:
    packers = []
    staged: list[tuple[LayerPlan, QuantWeight, torch.device]] = []
    shared: dict[int, QuantWeight | None] = {}
    for model, policy in targets:
        packer = _Packer(policy, progress, keep)
        packers.append(packer)
        for layer in plan(model, policy):
            if layer.kept_because is not None:
                packer.settle(layer, layer.kept_because)
                continue
            weight = layer.module._parameters["weight"]
            assert weight is not None
            if isinstance(weight, QuantWeight):
                continue
            if id(weight) not in shared:
                packed = packer.pack(layer, weight.detach())
                shared[id(weight)] = None if packed is None else _moved(layer, packed, torch.device("cpu"))
            if (waiting := shared[id(weight)]) is not None:
                staged.append((layer, waiting, weight.device))
                packer.settle(layer, None)
    placed: dict[int, torch.nn.Parameter] = {}
    try:
        _place(staged, placed)
    except ConversionError:
        raise
    except BaseException:  # an interrupt comes between two layers: it is raised when all have their weights
        _place(staged, placed)
        raise
    return [packer.report(model) for packer, (model, _) in zip(packers, targets)]


def _moved(layer: LayerPlan, packed: QuantWeight, device: torch.device, *, whole: bool = True) -> QuantWeight:
    try:
        return packed.to(device)  # type: ignore[return-value]
    except Exception as error:
        raise ConversionError(f"layer {layer.name} could not be moved to {device}: {error}", whole=whole) from error


def _place(staged: list[tuple[LayerPlan, QuantWeight, torch.device]], placed: dict[int, torch.nn.Parameter]) -> None:
    """Give all layers their weights; those that are placed already are known by the id of what they were made of."""
    for layer, waiting, device in staged:
        if id(waiting) not in placed:
            moved = _moved(layer, waiting, device, whole=not placed)
            placed[id(waiting)] = torch.nn.Parameter(moved, requires_grad=False)
        layer.module._parameters["weight"] = placed[id(waiting)]


def restore_model(model: torch.nn.Module, originals: Mapping[str, torch.Tensor] | None = None) -> int:
    """Put plain weights back in place of all QuantWeights.

    Args:
        model: the module.
        originals: name of a layer to its original weight; a layer that is missing gets its decoded weight.

    Returns:
        Number of layers that were restored. A weight shared by several layers stays shared.

    Raises:
        ValueError: an original has another shape than its layer; nothing was changed.
    """
    layers = quantized_layers(model)
    found = originals or {}
    for name, _, weight in layers:
        if name in found and found[name].shape != weight.shape:
            raise ValueError(f"{name}: shape {tuple(found[name].shape)}, but the layer has {tuple(weight.shape)}")
    plain: dict[int, torch.nn.Parameter] = {}
    for name, module, weight in layers:
        if id(weight) not in plain:
            value = found[name].to(weight.device, weight.dtype) if name in found else weight.dequantize()
            plain[id(weight)] = torch.nn.Parameter(value, requires_grad=False)
        module._parameters["weight"] = plain[id(weight)]
    return len(layers)


class StreamingConversion:
    """Converts the layers of a model while its weights are loaded.

    Use as a context around ``load_state_dict``. Before a layer is filled, a QuantWeight in it gives way to a plain
    weight, so that values arrive unrounded; after it is filled, it is packed if the policy says so. A value that is a
    QuantWeight of the policy's format already is taken as it is. A layer that the state dict does not name, or names
    with another shape, keeps its values. A weight shared by several layers stays shared.

    Args:
        targets: (model, policy) pairs; a policy of None restores plain weights.
        dtype: dtype to which loaded weights are rounded before packing, None for the one they arrive in. The WebUI
            casts the whole model to float16 after loading; packing must start from the same values.
        progress: called after each converted layer.
        keep: called with each layer and its weight before packing.

    Raises:
        ConversionError: out of ``load_state_dict``; load again without conversion to have a whole model.
    """

    def __init__(
        self,
        targets: Sequence[tuple[torch.nn.Module, Policy | None]],
        dtype: torch.dtype | None = None,
        progress: Progress | None = None,
        keep: Keep | None = None,
    ):
        self._dtype = dtype
        self._progress = progress
        self._keep = keep
        self._targets = targets
        self._packers: list[_Packer | None] = []
        self._handles: list[Any] = []
        self._sharing: dict[torch.nn.Module, list[torch.nn.Module]] = {}

    def __enter__(self) -> StreamingConversion:
        try:
            self._hook_all()
        except BaseException:  # an interrupt; a hook that stayed would pack at every later load
            self.__exit__(None, None, None)
            raise
        return self

    def _hook_all(self) -> None:
        for model, policy in self._targets:
            packer = None if policy is None else _Packer(policy, self._progress, self._keep)
            self._packers.append(packer)
            layers = plan(model, policy or Policy(keep=()))
            self._note_sharing(layers)
            for layer in layers:
                converts = packer is not None and layer.kept_because is None
                before = self._before_load_hook(layer, policy if converts else None)
                self._handles.append(layer.module._register_load_state_dict_pre_hook(before))
                if packer is None:
                    continue
                if layer.kept_because is not None:
                    packer.settle(layer, layer.kept_because)
                    continue
                self._handles.append(layer.module.register_load_state_dict_post_hook(self._pack_hook(layer, packer)))

    def _note_sharing(self, layers: list[LayerPlan]) -> None:
        owners: dict[int, list[torch.nn.Module]] = {}
        for layer in layers:
            if (weight := layer.module._parameters.get("weight")) is not None:
                owners.setdefault(id(weight), []).append(layer.module)
        self._sharing.update((module, group) for group in owners.values() if len(group) > 1 for module in group)

    def _set_weight(self, module: torch.nn.Module, weight: torch.Tensor) -> None:
        parameter = torch.nn.Parameter(weight, requires_grad=False)
        for owner in self._sharing.get(module, [module]):
            owner._parameters["weight"] = parameter

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._sharing.clear()

    def _before_load_hook(self, layer: LayerPlan, policy: Policy | None) -> Callable[..., None]:
        def make_room(state_dict: Mapping[str, torch.Tensor], prefix: str, *_: Any) -> None:
            weight, value = layer.module._parameters.get("weight"), state_dict.get(prefix + "weight")
            if weight is None or value is None or weight.is_meta or value.shape != weight.shape:
                return
            if policy is not None and isinstance(value, QuantWeight) and value.format.name == policy.format:
                self._set_weight(layer.module, value.to(weight.device, weight.dtype, copy=True))
            elif isinstance(weight, QuantWeight):
                self._set_weight(layer.module, torch.empty(weight.shape, dtype=weight.dtype, device=weight.device))

        return make_room

    def _pack_hook(self, layer: LayerPlan, packer: _Packer) -> Callable[..., None]:
        def pack_after_load(module: torch.nn.Module, incompatible_keys: Any) -> None:
            weight = module._parameters.get("weight")
            if weight is None or weight.is_meta:
                return
            if not isinstance(weight, QuantWeight):
                packed = packer.pack(layer, weight.detach(), self._dtype)
                if packed is None:
                    return
                self._set_weight(module, _moved(layer, packed, weight.device))
            packer.settle(layer, None)

        return pack_after_load

    def reports(self) -> list[Report | None]:
        """A report for each target, None for those that were only restored. Call after loading."""
        return [
            None if packer is None else packer.report(model) for (model, _), packer in zip(self._targets, self._packers)
        ]
