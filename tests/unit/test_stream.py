"""StreamingConversion: the bits of convert_model, with plain weights of one layer at a time."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
from helpers import (
    EVERYTHING,
    FORMAT_NAMES,
    MIB,
    TORCH_VERSION,
    TOY_CONVERTED,
    LiveStorages,
    ToyUNet,
    all_tensors,
    assert_same_bits,
    assert_same_model,
    failing_pack,
    need_format,
    plain_tensors,
    quantized_names,
    seeded,
    storage_census,
    tied_pair,
)
from torch import nn

from lib_fp8 import ConversionError, Policy, QuantWeight, StreamingConversion, convert_model

INT8 = Policy("int8", EVERYTHING)


def checkpoint(seed=2, dtype=torch.float32):
    """The state dict of a trained ToyUNet."""
    return seeded(ToyUNet, seed).to(dtype).state_dict()


def stream(model, policy, state, dtype=None, progress=None, **kwargs):
    with StreamingConversion([(model, policy)], dtype, progress) as streaming:
        model.load_state_dict(state, **kwargs)
    return streaming.reports()[0]


def fresh(policy, state):
    """What convert_model makes of a plain model that has loaded the state dict."""
    model = seeded(ToyUNet).to(state["tokens.weight"].dtype)
    model.load_state_dict(state)
    return model, convert_model(model, policy)


def hooks(model):
    return sum(
        len(module._load_state_dict_pre_hooks) + len(module._load_state_dict_post_hooks) for module in model.modules()
    )


# How the WebUI fills a model


@contextlib.contextmanager
def created_on_meta():
    """The WebUI's InitializeOnMeta in short: Linear, Conv2d and MHA are made without values, ``.to()`` does nothing."""
    with contextlib.ExitStack() as stack:
        for kind in (nn.Linear, nn.Conv2d, nn.MultiheadAttention):

            def init(self, *args, original=kind.__init__, **kwargs):
                original(self, *args, **{**kwargs, "device": "meta"})

            stack.enter_context(mock.patch.object(kind, "__init__", init))
        stack.enter_context(mock.patch.object(nn.Module, "to", return_value=None))
        yield


@contextlib.contextmanager
def filled_like_a_webui(state, dtype=None):
    """The WebUI's LoadStateDictOnMeta in short.

    ``load_state_dict`` is given shapes only; each module takes its values out of the real state dict, which is
    emptied on the way, and makes room for its parameters just before it is filled.
    """
    load_module, load_model = nn.Module._load_from_state_dict, nn.Module.load_state_dict

    def load_leaf(self, given, prefix, *args, **kwargs):
        used = []
        for name, param in self._parameters.items():
            if param is None:
                continue
            value = state.pop(prefix + name, None)
            if value is not None:
                given[prefix + name] = value.to(dtype=dtype)
                used.append(prefix + name)
            if param.is_meta:
                kind = param.dtype if value is None else value.dtype
                self._parameters[name] = nn.Parameter(
                    torch.zeros_like(param, device="cpu", dtype=kind), param.requires_grad
                )
        for name in self._buffers:
            if (value := state.pop(prefix + name, None)) is not None:
                given[prefix + name] = value
                used.append(prefix + name)
        load_module(self, given, prefix, *args, **kwargs)
        for key in used:
            given.pop(key, None)

    def load(self, given, strict=True):
        if given is state:
            given = {key: value.to(device="meta") for key, value in given.items()}
        return load_model(self, given, strict=strict)

    with (
        mock.patch.object(nn.Module, "load_state_dict", load),
        mock.patch.object(nn.Module, "_load_from_state_dict", load_leaf),
    ):
        yield


# Bits


def test_the_bits_of_convert_model(storage_format, logical_dtype, device):
    state, policy = checkpoint(dtype=logical_dtype), Policy(storage_format.name)
    model = seeded(ToyUNet).to(logical_dtype).to(device)
    report = stream(model, policy, state)
    expected, expected_report = fresh(policy, state)
    assert_same_model(model, expected)
    for field in ("format", "converted", "kept", "bytes_before", "bytes_after", "notes"):
        assert getattr(report, field) == getattr(expected_report, field), field


@pytest.mark.parametrize("model_dtype", [torch.float32, torch.float16], ids=str)
def test_a_float32_checkpoint_for_a_float16_model(storage_format, model_dtype):
    """The WebUI casts to float16 after loading: rounded first, then packed."""
    state, policy = checkpoint(), Policy(storage_format.name)
    model = seeded(ToyUNet).to(model_dtype)
    stream(model, policy, state, dtype=torch.float16)
    assert quantized_names(model) == TOY_CONVERTED
    assert all(model.get_submodule(name).weight.dtype == torch.float16 for name in TOY_CONVERTED)
    expected, _ = fresh(policy, {key: value.half() for key, value in state.items()})
    assert_same_model(model.half(), expected)


@pytest.mark.parametrize("before", [*FORMAT_NAMES, None])
@pytest.mark.parametrize("after", [*FORMAT_NAMES, None])
def test_a_change_of_policy(before, after):
    """Whatever was there, a load gives what a fresh model would hold."""
    policies = [None if name is None else Policy(need_format(name).name) for name in (before, after)]
    model = seeded(ToyUNet).half()
    for seed, policy in enumerate(policies):
        stream(model, policy, checkpoint(seed, torch.float16))
    plain = seeded(ToyUNet).half()
    plain.load_state_dict(checkpoint(1, torch.float16))
    assert_same_model(model, plain if after is None else fresh(policies[1], checkpoint(1, torch.float16))[0])


def test_a_narrower_policy_makes_the_rest_plain():
    model, state = seeded(ToyUNet), checkpoint()
    stream(model, INT8, state)
    stream(model, Policy("int8"), state)
    assert_same_model(model, fresh(Policy("int8"), state)[0])


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
def test_a_state_dict_in_8_bits_is_not_rounded_again(storage_format, assign):
    if assign and TORCH_VERSION < (2, 1):
        pytest.skip(f"torch {torch.__version__} has no load_state_dict(assign=True)")
    source, _ = fresh(Policy(storage_format.name), checkpoint(dtype=torch.float16))
    model = seeded(ToyUNet).half()
    stream(model, Policy(storage_format.name), source.state_dict(), **({"assign": True} if assign else {}))
    assert_same_model(model, source)


def test_an_int8_state_dict_is_not_rounded_again():
    scale = 6.485e-05
    source = nn.Linear(4, 4, bias=False).half()
    source.weight.data = torch.full((4, 4), 127 * scale).half()
    convert_model(source, INT8)
    source.weight.scale.fill_(scale)
    model = nn.Linear(4, 4, bias=False).half()
    stream(model, INT8, source.state_dict())
    assert_same_bits(model.weight, source.weight)


@pytest.mark.skipif(TORCH_VERSION < (2, 1), reason="this torch has no load_state_dict(assign=True)")
def test_assigned_state_dicts(storage_format):
    state = checkpoint()
    model = seeded(ToyUNet).half()
    stream(model, Policy(storage_format.name), state, assign=True)
    assert_same_model(model, fresh(Policy(storage_format.name), state)[0])


@pytest.mark.parametrize("dtype", [None, torch.float16], ids=["", "to float16"])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.float16], ids=str)
def test_a_model_made_on_meta(storage_format, state_dtype, dtype):
    with created_on_meta():
        model = ToyUNet()
    assert model.middle_block[0].proj_out.weight.is_meta
    state = checkpoint(dtype=state_dtype)
    given = {key: value.clone() for key, value in state.items()}
    with StreamingConversion([(model, Policy(storage_format.name))], dtype), filled_like_a_webui(given):
        model.load_state_dict(given, strict=False)
    assert given == {}
    model.to(dtype or state_dtype)
    expected, _ = fresh(Policy(storage_format.name), {key: v.to(dtype or state_dtype) for key, v in state.items()})
    assert_same_model(model, expected)


def test_a_reload_like_the_webui_does_it(storage_format):
    model, _ = fresh(Policy(storage_format.name), checkpoint(dtype=torch.float16))
    state = checkpoint(3, torch.float16)
    given = dict(state)
    with StreamingConversion([(model, Policy("int8"))]), filled_like_a_webui(given):
        model.load_state_dict(given, strict=False)
    assert_same_model(model, fresh(Policy("int8"), state)[0])


# Which layers


def test_layers_that_are_not_named_keep_what_they_hold(storage_format):
    model, _ = fresh(Policy(storage_format.name), checkpoint(1))
    before = all_tensors(model)
    named = TOY_CONVERTED[0]
    for policy in (Policy("int8"), None):
        stream(model, policy, {f"{named}.weight": checkpoint()[f"{named}.weight"]}, strict=False)
        for name, tensor in all_tensors(model).items():
            assert (tensor is before[name]) == (name != f"{named}.weight")
    assert_same_bits(model.get_submodule(named).weight, nn.Parameter(checkpoint()[f"{named}.weight"]))


def test_a_bias_alone_does_not_touch_the_weight():
    model, _ = fresh(INT8, checkpoint(1))
    weight = model.middle_block[0].proj_out.weight
    bits = weight.clone()
    stream(model, INT8, {"middle_block.0.proj_out.bias": torch.ones(48)}, strict=False)
    assert model.middle_block[0].proj_out.weight is weight
    assert_same_bits(weight, bits)
    assert torch.equal(model.middle_block[0].proj_out.bias, torch.ones(48))


def test_targets_inside_a_larger_model():
    model = nn.ModuleDict(
        {"unet": seeded(ToyUNet), "te": seeded(ToyUNet), "clip": seeded(ToyUNet), "vae": seeded(ToyUNet)}
    )
    convert_model(model.te, INT8)
    state = {f"{part}.{key}": value for part in model for key, value in checkpoint().items()}
    targets = [(model.unet, Policy("int8")), (model.te, None), (model.clip, INT8)]
    with StreamingConversion(targets) as streaming:
        model.load_state_dict(state)
    plain = seeded(ToyUNet, 2)
    for part, expected in (("te", plain), ("vae", plain), ("unet", fresh(Policy("int8"), checkpoint())[0])):
        assert_same_model(model[part], expected)
    assert [None if report is None else report.converted for report in streaming.reports()] == [5, None, 12]
    assert len(quantized_names(model.clip)) == 12


def test_a_weight_that_is_not_finite_is_kept(storage_format):
    state = checkpoint()
    state[f"{TOY_CONVERTED[1]}.weight"][0, 0] = float("nan")
    model = seeded(ToyUNet)
    report = stream(model, Policy(storage_format.name), state)
    assert quantized_names(model) == [name for name in TOY_CONVERTED if name != TOY_CONVERTED[1]]
    assert any("NaN" in reason for reason, _ in report.kept)


def test_progress_hears_of_each_layer_once():
    told = []
    stream(seeded(ToyUNet), Policy("int8"), checkpoint(), progress=lambda layer: told.append(layer.name))
    assert told == TOY_CONVERTED


def test_the_model_looks_the_same():
    model = seeded(ToyUNet)
    model.middle_block.eval()

    def looks(model):
        return [(name, type(module), module.training) for name, module in model.named_modules()], [*model.state_dict()]

    before = looks(model)
    stream(model, Policy("int8"), checkpoint())
    assert looks(model) == before


def test_the_global_generator_is_not_drawn_from():
    model, state = seeded(ToyUNet), checkpoint()
    before = torch.get_rng_state()
    for policy in (INT8, None):
        stream(model, policy, state)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("first", [None, INT8], ids=["plain", "converted"])
def test_tied_weights_stay_tied(first):
    model, state = tied_pair(), dict(tied_pair().state_dict())
    if first is not None:
        convert_model(model, first)
    stream(model, INT8, state)
    assert model[0].weight is model[1].weight


# Failures


@pytest.mark.parametrize("call", [0, 3])
def test_a_failing_pack(call):
    model, state = seeded(ToyUNet), checkpoint()
    with failing_pack(call), pytest.raises(ConversionError, match="said the test") as caught:
        stream(model, Policy("int8"), state)
    assert TOY_CONVERTED[call] in str(caught.value)
    assert hooks(model) == 0
    stream(model, None, state)
    assert_same_model(model, seeded(ToyUNet, 2))


def test_hooks_are_gone_afterwards():
    model = seeded(ToyUNet)
    with StreamingConversion([(model, Policy("int8"))]):
        assert hooks(model) > 0
    assert hooks(model) == 0
    with pytest.raises(KeyboardInterrupt), StreamingConversion([(model, None)]):
        raise KeyboardInterrupt
    assert hooks(model) == 0
    model.load_state_dict(checkpoint())
    assert quantized_names(model) == []


@pytest.mark.parametrize("policy", [Policy("int8"), None], ids=["converting", "restoring"])
def test_a_wrong_shape_leaves_a_usable_model(rng, policy):
    model, _ = fresh(Policy("int8"), checkpoint(1))
    wrong = {**checkpoint(), f"{TOY_CONVERTED[0]}.weight": torch.zeros(3, 3)}
    with pytest.raises(RuntimeError, match="size mismatch"):
        stream(model, policy, wrong)
    assert hooks(model) == 0
    x = torch.randn(1, 4, 8, 8, generator=rng)
    assert model(x).shape == x.shape
    stream(model, policy, checkpoint())
    assert_same_model(model, seeded(ToyUNet, 2) if policy is None else fresh(policy, checkpoint())[0])


@pytest.mark.parametrize("policy", [Policy("int8"), None], ids=["converting", "restoring"])
def test_a_layer_of_wrong_shape_keeps_its_values(policy):
    """As a plain layer does."""
    model, _ = fresh(Policy("int8"), checkpoint(1))
    name = TOY_CONVERTED[0]
    expected = model.get_submodule(name).weight.dequantize()
    with pytest.raises(RuntimeError, match="size mismatch"):
        stream(model, policy, {**checkpoint(), f"{name}.weight": torch.zeros(3, 3)})
    now = model.get_submodule(name).weight
    assert torch.equal(now.dequantize() if isinstance(now, QuantWeight) else now, expected)


# Memory

ROWS, COLUMNS, LEAVES = 2048, 4096, 4
LEAF = ROWS * COLUMNS * 2  # 16 MiB in float16
CHUNKS = 8 * MIB
"""What packing needs beside the leaf and its result: a few float32 copies of 2**18 elements, 1 MiB each."""


def on_meta(dtype=torch.float16):
    return nn.Sequential(*[nn.Linear(COLUMNS, ROWS, bias=False, device="meta", dtype=dtype) for _ in range(LEAVES)])


def large_state(dtype=torch.float16):
    values = torch.linspace(-1, 1, ROWS * COLUMNS).reshape(ROWS, COLUMNS).to(dtype)
    return {f"{leaf}.weight": values for leaf in range(LEAVES)}


def final_bytes(storage_format):
    return LEAVES * (ROWS * COLUMNS + (4 * ROWS if storage_format.scale_of else 0))


def fill(model, state, policy):
    """The first load of a model made on meta."""
    given = dict(state)
    with StreamingConversion([(model, policy)]), filled_like_a_webui(given):
        model.load_state_dict(given, strict=False)


@contextlib.contextmanager
def census(model):
    """Bytes of the model's parameters after each leaf; entered last, so that it counts after the leaf is packed."""
    counted = []
    handles = [
        leaf.register_load_state_dict_post_hook(lambda *_: counted.append(storage_census(model.parameters())))
        for leaf in model
    ]
    yield counted
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize(
    ("state_dtype", "dtype", "leaf"),
    [
        pytest.param(torch.float16, None, LEAF, id="float16"),
        pytest.param(torch.float32, None, 2 * LEAF, id="float32"),
        # the leaf as it arrives, and its float16 copy
        pytest.param(torch.float32, torch.float16, 2 * LEAF + LEAF, id="float32 to float16"),
    ],
)
def test_first_load_holds_one_plain_leaf_at_a_time(state_dtype, dtype, leaf):
    storage_format = need_format("int8")
    model, state, live = on_meta(state_dtype), large_state(state_dtype), LiveStorages()
    with StreamingConversion([(model, INT8)], dtype), filled_like_a_webui(state), census(model) as counted, live.watch:
        model.load_state_dict(state, strict=False)
    final = final_bytes(storage_format)
    assert quantized_names(model) == [str(leaf) for leaf in range(LEAVES)]
    assert counted == [final * done // LEAVES for done in range(1, LEAVES + 1)]
    assert live.now() == final
    assert final < live.peak <= final + leaf + CHUNKS


@pytest.mark.parametrize("name", ["float8_e4m3fn", "int8"])
def test_reload_holds_one_plain_leaf_at_a_time(name):
    storage_format = need_format(name)
    policy, final = Policy(name, EVERYTHING), final_bytes(storage_format)
    model, state = on_meta(), large_state()
    fill(model, state, policy)
    live = LiveStorages(plain_tensors(list(model.parameters())))
    assert live.now() == final
    with StreamingConversion([(model, policy)]), census(model) as counted, live.watch:
        model.load_state_dict(state)
    assert max(counted) <= final + LEAF
    assert counted[-1] == final == live.now()
    assert live.peak <= final + LEAF + CHUNKS


def test_restoring_holds_no_more_than_the_plain_model():
    model, state = on_meta(), large_state()
    fill(model, state, INT8)
    live = LiveStorages(plain_tensors(list(model.parameters())))
    with StreamingConversion([(model, None)]), census(model) as counted, live.watch:
        model.load_state_dict(state)
    assert counted == sorted(counted)
    assert counted[-1] == LEAVES * LEAF == live.now()
    assert live.peak <= LEAVES * LEAF + LEAF + CHUNKS
