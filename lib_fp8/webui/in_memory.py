"""Converting a model that no file can bring back: from one storage into another, leaf by leaf, by what it holds."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from lib_fp8 import Policy, QuantWeight
from lib_fp8.policy import LayerPlan, plan
from lib_fp8.source import Copies, Originals
from lib_fp8.webui import provenance
from lib_fp8.webui.loading import new_copies, new_record, progress, streaming, summarise
from lib_fp8.webui.storage import FULL_PRECISION, Storage, record_of, set_record
from lib_fp8.webui.targets import find_targets


def convert_in_memory(model: Any, wanted: Storage) -> int:
    """Bring all parts of a model into a storage without reading its weights from its file.

    A layer in 8 bits of which an original can be trusted, layer by layer, begins from that, any other from its decoded
    weight. One that is stored as wanted already keeps its bits. One layer at a time is held in full precision. If it
    breaks off, every layer holds its weight in one way or the other, and calling it again goes on.

    Args:
        model: no networks are in it.
        wanted: any storage.

    Returns:
        How many layers were decoded, since they have no original.

    Raises:
        ConversionError: a layer could not be packed.
    """
    before = record_of(model)
    before.is_unfinished = True
    targets, decoded = find_targets(model), 0
    copies = None if wanted == FULL_PRECISION else new_copies()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))  # the weights must be of use outside inference mode too
        stack.enter_context(torch.no_grad())
        told = stack.enter_context(progress(targets, wanted))
        stream = stack.enter_context(streaming(targets, wanted, told, copies))
        for target in targets:
            decoded += _convert(target.module, wanted.policy_for(target.kind), before.originals, copies)
    record = new_record(targets, wanted, model.sd_checkpoint_info.filename, copies)
    record.reports = {target.kind: report for target, report in zip(targets, stream.reports()) if report is not None}
    record.origin, record.refused, record.problem = before.origin, before.refused, before.problem
    set_record(model, record)
    record.note = provenance.note_for_user(model, decoded)
    summarise(record)
    return decoded


def _convert(part: torch.nn.Module, policy: Policy | None, originals: Originals | None, copies: Copies | None) -> int:
    """Load each layer with its own weight, for the conversion that wraps this to pack it."""
    layers = plan(part, policy or Policy(keep=()))
    owners: dict[int, list[LayerPlan]] = {}
    for layer in layers:
        owners.setdefault(id(layer.module._parameters.get("weight")), []).append(layer)
    decoded = 0
    for sharing in owners.values():
        first, weight = sharing[0].module, sharing[0].module._parameters.get("weight")
        packed = [layer.module for layer in sharing if policy is not None and layer.kept_because is None]
        if isinstance(weight, QuantWeight):
            stays = policy is not None and bool(packed) and weight.format.name == policy.format
            found = None
            if originals is not None and (copies is not None or not stays):
                found = originals.find(first, weight)
            if not stays:
                decoded += found is None
                plain = weight.dequantize() if found is None else found.value
                parameter = torch.nn.Parameter(plain, requires_grad=False)
                for layer in sharing:
                    layer.module._parameters["weight"] = parameter
            elif found is not None and copies is not None:
                copies.keep(first, found.value)
        for module in packed:
            module.load_state_dict({"weight": module._parameters["weight"]}, strict=False)
    return decoded
