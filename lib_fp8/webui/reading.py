"""Refusing checkpoint files that cannot be used, by name and before anything is done with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from modules import sd_models

from lib_fp8.checkpoint.dialects import find_dialect
from lib_fp8.checkpoint.header import DamagedError, Header, header_of_file, header_of_tensors
from lib_fp8.checkpoint.tensors import can_be_read
from lib_fp8.webui.patching import Patches


def install(patches: Patches) -> None:
    """Be there when the WebUI reads a checkpoint: to load it, or to merge it with others."""
    patches.replace(sd_models, "read_state_dict", _refusing)
    patches.replace(sd_models, "send_model_to_cpu", _if_there_is_one)


def check_usable(filename: str, consequence: str = "") -> Header:
    """What a checkpoint file says about itself.

    Args:
        filename: the file.
        consequence: a sentence about what follows from a refusal.

    Raises:
        RuntimeError: it is not there, cannot be read, is damaged, or holds what cannot be used; says what to do.
    """
    try:
        header = header_of_file(filename)
    except FileNotFoundError as error:
        raise _refusal(f"{filename} is missing", "Put it back, or", consequence) from error
    except OSError as error:
        raise _refusal(f"{filename} cannot be read ({error})", "Make it readable, or", consequence) from error
    except DamagedError as error:
        raise _refusal(
            f"{filename} is damaged or incomplete and cannot be loaded ({error})", "Download it again, or", consequence
        ) from error
    _refuse_dialects(filename, header, consequence)
    unread = sorted({info.dtype for info in header.tensors.values() if not can_be_read(info.dtype)})
    if unread:
        raise _refusal(
            f"{filename} holds {' and '.join(unread)} values, which the installed torch or safetensors cannot read",
            "Take the float16 file of this model, or",
            consequence,
        )
    return header


def is_usable(filename: str) -> bool:
    """Whether a checkpoint file is there and can be used."""
    try:
        check_usable(filename)
    except RuntimeError:
        return False
    return True


def _refuse_dialects(filename: str, header: Header, consequence: str = "") -> None:
    """The WebUI would take the codes for the weights, or find none of its own."""
    if (dialect := find_dialect(header)) is not None:
        raise _refusal(
            f"{filename} holds weights in a form that cannot be read yet: {dialect.name} (found: {dialect.why})",
            "Take the float16 file of this model, or one that is plain float8, or",
            consequence,
        )


def _refusal(what: str, advice: str, consequence: str) -> RuntimeError:
    return RuntimeError(f"{what}. {advice} choose another checkpoint. {consequence}".rstrip())


def _refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    def read_state_dict(checkpoint_file: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(info.filename == checkpoint_file for info in list(sd_models.checkpoints_list.values())):
            return original(checkpoint_file, *args, **kwargs)  # a VAE or a network
        header = check_usable(checkpoint_file)
        state_dict = original(checkpoint_file, *args, **kwargs)
        if not header.tensors:  # a pickled file tells only now what it holds
            _refuse_dialects(checkpoint_file, header_of_tensors(state_dict))
        return state_dict

    return read_state_dict


def _if_there_is_one(original: Callable[..., Any]) -> Callable[..., Any]:
    """WebUI 1.9 sends the former model away before it loads another, and fails where the first was refused."""

    def send_model_to_cpu(model: Any) -> None:
        if model is not None:
            original(model)

    return send_model_to_cpu
