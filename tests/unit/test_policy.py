"""Policy and plan: what is converted, what is kept and why."""

from __future__ import annotations

import pytest
import torch
from helpers import TOY_CONVERTED, ToyUNet, all_tensors, seeded
from torch import nn

from lib_fp8 import PatternError, Policy, UnknownFormatError, convert_model, plan
from lib_fp8.policy import quantized_layers


def named(*names):
    """A model with a small Linear under each dotted name."""
    root = nn.Module()
    for name in names:
        *parents, last = name.split(".")
        module = root
        for parent in parents:
            if not hasattr(module, parent):
                module.add_module(parent, nn.Module())
            module = getattr(module, parent)
        module.add_module(last, nn.Linear(2, 2))
    return root


def reasons(model, policy):
    return {layer.name: layer.kept_because for layer in plan(model, policy)}


def test_defaults():
    assert Policy().format == "float8_e4m3fn"
    assert Policy() == Policy()
    assert hash(Policy()) == hash(Policy())


def test_an_unknown_format_is_refused():
    with pytest.raises(UnknownFormatError):
        Policy("float7")


@pytest.mark.parametrize("pattern", ["(", "*x", "[a"])
def test_a_bad_pattern_is_named(pattern):
    with pytest.raises(PatternError) as caught:
        Policy(keep=("fine", pattern))
    assert repr(pattern) in str(caught.value)


def test_toy_unet():
    model = ToyUNet()
    plans = plan(model, Policy())
    assert [layer.name for layer in plans if layer.kept_because is None] == TOY_CONVERTED
    assert all(model.get_submodule(layer.name) is layer.module for layer in plans)
    assert [layer.name for layer in plans] == [
        name for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d))
    ]


def test_what_is_kept_by_default_is_small():
    with torch.device("meta"):
        model = ToyUNet(512)
    sizes = [(layer.module.weight.numel(), layer.kept_because) for layer in plan(model, Policy())]
    assert sum(size for size, kept in sizes if kept) < 0.02 * sum(size for size, _ in sizes)


@pytest.mark.parametrize(
    "name",
    [
        *("time_embed.0", "time_embed.2", "label_emb.0.0", "input_blocks.0.0", "out.2"),
        *("input_blocks.4.0.emb_layers.1", "output_blocks.11.0.emb_layers.1"),
        *("conv_in", "conv_out", "x_embedder.proj", "t_embedder.mlp.0", "y_embedder.mlp.2", "context_embedder"),
        *("final_layer.linear", "final_layer.adaLN_modulation.1"),
    ],
)
def test_kept_by_default(name):
    (reason,) = reasons(named(name), Policy()).values()
    assert reason.startswith("pattern ")


@pytest.mark.parametrize(
    "name",
    [
        *("input_blocks.0.1", "input_blocks.10.0", "output_blocks.2.0", "out.20", "middle_block.1.proj_in"),
        *("blocks.conv_in", "conv_in_2", "joint_blocks.0.x_block.attn.qkv", "joint_blocks.1.final_layer"),
    ],
)
def test_converted_by_default(name):
    assert reasons(named(name), Policy()) == {name: None}


def test_own_patterns_replace_the_defaults():
    model = named("time_embed", "a.attn", "b.attn2")
    assert reasons(model, Policy(keep=("attn$", "^b"))) == {
        "time_embed": None,
        "a.attn": "pattern attn$",
        "b.attn2": "pattern ^b",
    }


def test_only_linear_and_conv2d_count():
    class OwnLinear(nn.Linear):
        pass

    model = nn.ModuleList(
        [
            *(nn.Linear(2, 2), nn.Conv2d(2, 2, 1), OwnLinear(2, 2), nn.Conv1d(2, 2, 1), nn.Conv3d(2, 2, 1)),
            *(nn.ConvTranspose2d(2, 2, 1), nn.Embedding(2, 2), nn.LayerNorm(2), nn.Bilinear(2, 2, 2)),
        ]
    )
    assert reasons(model, Policy()) == {"0": None, "1": None, "2": None}


def test_integer_weights_are_kept():
    model = named("a")
    model.a.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.int8), requires_grad=False)
    assert reasons(model, Policy()) == {"a": "torch.int8 weight"}


def test_a_shared_layer_is_listed_once():
    layer = nn.Linear(2, 2)
    assert len(plan(nn.Sequential(layer, layer), Policy())) == 1


def test_planning_touches_nothing():
    model = ToyUNet()
    before = all_tensors(model)
    plan(model, Policy())
    after = all_tensors(model)
    assert all(after[name] is tensor for name, tensor in before.items())


def test_the_plan_of_a_model_on_meta_or_in_8_bits_is_the_same():
    expected = reasons(ToyUNet(), Policy("int8"))
    assert reasons(ToyUNet().to("meta"), Policy("int8")) == expected
    converted = seeded(ToyUNet)
    convert_model(converted, Policy("int8"))
    assert reasons(converted, Policy("int8")) == expected
    assert [name for name, _, _ in quantized_layers(converted)] == TOY_CONVERTED
    assert all(module.weight is weight for _, module, weight in quantized_layers(converted))
