"""Others ask the Lora extension's backups for the weights without networks, put them back, and reset or replace them.

What they do is played step by step as public extensions do it: sd-webui-supermerger, sd-webui-model-mixer and
sd-webui-cd-tuner.
"""

from __future__ import annotations

import pytest
import safetensors.torch
import torch
from helpers import FORMAT_BY_DEFAULT, decoded
from torch import nn
from torch.nn import Parameter

from lib_fp8 import QuantWeight
from webui.nets import ATTENTION, IN_8_BITS, KEPT, LINEAR_AND_CONV, ON, PARTS, TO_OUT, TO_Q, key_of

CHOICES = ("Merge from checkpoint file", "Merge from copy in RAM", "Add at run time")
CLASSES = (nn.Linear, nn.Conv2d, nn.GroupNorm, nn.LayerNorm, nn.MultiheadAttention)


@pytest.fixture(params=CHOICES)
def started(request, host):
    def start(kind="sd1"):
        host.checkpoint(kind=kind)
        return host.start(fp8_lora=request.param, **ON)

    return start


def owners(layer):
    return (layer, layer.out_proj) if isinstance(layer, nn.MultiheadAttention) else (layer, layer)


def put_back_by_assignment(layer):
    """sd-webui-supermerger, "save current merge"."""
    if not hasattr(layer, "network_weights_backup"):
        return
    weights, bias = getattr(layer, "network_weights_backup", None), getattr(layer, "network_bias_backup", None)
    if weights is None and bias is None:
        return
    with torch.no_grad():
        first, last = owners(layer)
        if weights is not None and first is not last:
            first.in_proj_weight = frozen_as(weights[0], first.in_proj_weight)
            last.weight = frozen_as(weights[1], last.weight)
        elif weights is not None:
            first.weight = frozen_as(weights, first.weight)
        last.bias = None if bias is None else frozen_as(bias, last.bias)


def frozen_as(value, parameter):
    return Parameter(value.detach().requires_grad_(parameter.requires_grad), requires_grad=parameter.requires_grad)


class Mixer:
    """sd-webui-model-mixer: while a state dict is made, each layer is put back; later it is put forward again."""

    def __init__(self, host):
        self.host = host
        self.kept = {}

    def state_dict(self, prepare):
        before = [(cls, vars(cls).get("state_dict")) for cls in CLASSES]
        for cls in CLASSES:
            cls.state_dict = self._preparing(cls.state_dict, prepare)
        try:
            return self.host.model.state_dict()
        finally:
            for cls, original in before:
                if original is None:
                    del cls.state_dict
                else:
                    cls.state_dict = original

    @staticmethod
    def _preparing(original, prepare):
        def state_dict(module, *args, **kwargs):
            with torch.no_grad():
                prepare(module)
            return original(module, *args, **kwargs)

        return state_dict

    def put_back(self, layer):
        weights, bias = getattr(layer, "network_weights_backup", None), getattr(layer, "network_bias_backup", None)
        if weights is None and bias is None:
            return
        first, last = owners(layer)
        if layer not in self.kept:
            held = [first.in_proj_weight] if first is not last else []
            self.kept[layer] = (
                [weight.to("cpu", copy=True) for weight in (*held, last.weight)],
                None if last.bias is None else last.bias.to("cpu", copy=True),
            )
        self._copy(layer, weights if isinstance(weights, tuple) else [weights], bias)

    def put_forward(self, layer):
        if layer in self.kept:
            self._copy(layer, *self.kept.pop(layer))

    def _copy(self, layer, weights, bias):
        first, last = owners(layer)
        if first is not last:
            first.in_proj_weight.copy_(weights[0])
        last.weight.copy_(weights[-1])
        if bias is None:
            last.bias = None
        elif last.bias is None:
            last.bias = Parameter(bias.clone(), requires_grad=False)
        else:
            last.bias.copy_(bias)


def networks_for(nets, kind):
    return nets.make("a", PARTS if kind == "sd2" else LINEAR_AND_CONV, bias=True)


def share(saved, host, nets, net, name):
    """How much of a network is in a weight of a state dict: 0 none, 1 all of it."""
    delta = nets.expected(name, [net], torch.zeros(host.layers[name].weight.shape))
    value = saved[key_of(name, host)]
    value = decoded(value, torch.float64) if isinstance(value, QuantWeight) else value.double()
    return float(((value - nets.original(name).double()) * delta).sum() / delta.square().sum())


def assert_all_as_if_nothing_had_been(host, nets, kind, bits, merged, net):
    """With the same networks, with others, without."""
    other = nets.make("other", PARTS if kind == "sd2" else LINEAR_AND_CONV)
    host.run_networks(net)
    assert host.fingerprint() == merged
    host.run_networks(other)
    host.run_networks()
    assert host.fingerprint() == bits
    host.run_networks(net)
    assert host.fingerprint() == merged


@pytest.mark.parametrize("kind", ["sd1", "sd2"])
def test_put_back_by_assignment_and_saved(started, nets, kind):
    host = started(kind)
    bits, net = host.fingerprint(), networks_for(nets, kind)
    host.run_networks(net)
    merged = host.fingerprint()
    host.sd_hijack.model_hijack.undo_hijack(host.model)
    for module in host.model.modules():
        put_back_by_assignment(module)
    saved = host.model.state_dict()
    host.sd_hijack.model_hijack.hijack(host.model)
    assert host.fingerprint() == bits
    if kind == "sd1":
        strengths = [abs(share(saved, host, nets, net, name)) for name in LINEAR_AND_CONV]
        assert max(strengths) < 0.1, "what rounding to 8 bits alone may add"
        assert share(saved, host, nets, net, KEPT) == 0
    assert_all_as_if_nothing_had_been(host, nets, kind, bits, merged, net)


@pytest.mark.parametrize("kind", ["sd1", "sd2"])
def test_put_back_and_put_forward(started, nets, kind):
    host = started(kind)
    bits, net, mixer = host.fingerprint(), networks_for(nets, kind), Mixer(host)
    host.run_networks(net)
    merged, effects = host.fingerprint(), values(host)
    mixer.state_dict(mixer.put_back)
    assert host.fingerprint() == bits
    mixer.state_dict(mixer.put_forward)
    assert (host.fingerprint(), values(host)) == (merged, effects)
    assert_all_as_if_nothing_had_been(host, nets, kind, bits, merged, net)
    assert values(host) == effects


def values(host):
    weights = {name: host.layers[name].weight for name in LINEAR_AND_CONV if name in host.layers}
    return {name: (w.dequantize() if isinstance(w, QuantWeight) else w).tolist() for name, w in weights.items()}


@pytest.mark.parametrize("kind", ["sd1", "sd2"])
def test_put_back_and_forgotten(started, nets, kind):
    """cd-tuner: the books are deleted; networks are brought to the layer anew."""
    host = started(kind)
    bits, net = host.fingerprint(), networks_for(nets, kind)
    host.run_networks(net)
    merged = host.fingerprint()
    for layer in host.layers.values():
        if getattr(layer, "network_weights_backup", None) is None:
            continue
        weights, (first, last) = layer.network_weights_backup, owners(layer)
        with torch.no_grad():
            if first is not last:
                first.in_proj_weight.copy_(weights[0])
            last.weight.copy_(weights[-1] if isinstance(weights, tuple) else weights)
        del layer.network_weights_backup
        assert getattr(layer, "network_weights_backup", None) is None
        del layer.network_current_names
        bias = getattr(layer, "network_bias_backup", None)
        if bias is not None:
            with torch.no_grad():
                last.bias.copy_(bias)
            del layer.network_bias_backup
    assert host.fingerprint() == bits
    assert_all_as_if_nothing_had_been(host, nets, kind, bits, merged, net)


def test_a_layer_that_is_changed_for_one_picture(started, nets):
    """cd-tuner: its weight is replaced by a stronger one before a picture, and put back after it."""
    host = started()
    bits, net, layer = host.fingerprint(), nets.make("a", [KEPT, TO_Q]), host.layers[KEPT]
    host.run_networks(net)
    host.run_networks()
    stored = layer.weight.clone()
    for _ in range(2):
        layer.weight = Parameter(stored * 2)
        host.run_networks(net)
        nets.assert_merged(net, layers=[KEPT], base=lambda _: stored * 2)
        with torch.no_grad():
            layer.weight.copy_(layer.network_weights_backup)
        del layer.network_weights_backup, layer.network_current_names
        layer.weight = Parameter(stored.clone())
    host.run_networks(net)
    nets.assert_merged(net, layers=[KEPT])
    host.run_networks()
    assert host.fingerprint() == bits


def test_none_where_no_networks_are(started, nets):
    host = started()
    for used in ([], [nets.make("a", [TO_Q])], []):
        host.run_networks(*used)
        for name, layer in host.layers.items():
            has_one = bool(used) and name == TO_Q
            assert (getattr(layer, "network_weights_backup", None) is not None) == has_one
            assert getattr(layer, "network_bias_backup", None) is None


def test_what_is_asked_for_is_a_copy(started, nets):
    """Writing into it changes nothing, and it does not change when networks do."""
    host = started()
    host.run_networks(nets.make("a"))
    merged, backups = host.fingerprint(), {name: host.layers[name].network_weights_backup for name in LINEAR_AND_CONV}
    before = {name: (b.dequantize() if name in IN_8_BITS else b).clone() for name, b in backups.items()}
    host.set(fp8_lora=CHOICES[0])
    host.run_networks(nets.make("b"))
    for name, backup in backups.items():
        assert torch.equal(backup.dequantize() if name in IN_8_BITS else backup, before[name])
    host.run_networks(*host.networks.loaded_networks)
    with torch.no_grad():
        for backup in backups.values():
            backup.zero_()
    host.run_networks()
    nets.assert_merged()
    assert host.fingerprint().keys() == merged.keys()


def test_biases_come_along(started, nets):
    """Whoever finds a backup of the weight takes the bias for gone where there is none."""
    host = started()
    bias, net = host.layers[TO_OUT].bias.clone(), nets.make("a", [TO_OUT, TO_Q])
    host.run_networks(net)
    assert torch.equal(host.layers[TO_OUT].network_bias_backup, bias)
    assert host.layers[TO_Q].network_bias_backup is None
    biased = nets.make("b", [TO_OUT, TO_Q], bias=True)
    host.run_networks(biased)
    assert torch.equal(host.layers[TO_OUT].network_bias_backup, bias)
    assert host.layers[TO_Q].network_bias_backup is None


def test_an_assigned_backup_is_put_back(started, nets):
    """As the WebUI does at the next change of networks: it is what the layer is without them."""
    host = started()
    net, layer = nets.make("a", [TO_Q, KEPT]), host.layers[KEPT]
    host.run_networks(net)
    new = torch.randn(layer.weight.shape, generator=nets.rng).half()
    layer.network_weights_backup, layer.network_bias_backup = new, layer.bias.clone()
    host.run_networks()
    assert torch.equal(layer.weight, new)
    host.run_networks(net)
    nets.assert_merged(net, layers=[KEPT], base=lambda _: new)


def test_the_original_is_gone(host, nets):
    """Then nobody is given a wrong one: it is said, and the model is loaded anew."""
    host.checkpoint()
    host.start(**ON)
    host.networks.loaded_networks[:] = [nets.make("a")]
    host.job()
    overwrite(host)
    with pytest.raises(RuntimeError, match="has changed on disk"):
        hasattr(host.layers[TO_Q], "network_weights_backup")


def test_nothing_is_left_on_the_classes(host):
    host.start()
    defined = [cls for cls in CLASSES if "network_weights_backup" in vars(cls)]
    assert defined == list(CLASSES)
    host.reload_ui(extension=False)
    assert not any(hasattr(cls, name) for cls in CLASSES for name in ("network_weights_backup", "network_bias_backup"))


def test_without_the_lora_extension_nothing_is_defined(newest):
    newest.start(lora=False)
    assert not any(hasattr(cls, "network_weights_backup") for cls in CLASSES)


def test_attention_gives_a_pair(started, nets):
    host = started("sd2")
    attention = host.layers[ATTENTION]
    before = attention.in_proj_weight.clone()
    host.run_networks(nets.make("a", PARTS))
    first, second = attention.network_weights_backup
    assert torch.equal(first, before)
    assert isinstance(second, QuantWeight)
    assert second.format == attention.out_proj.weight.format


# Functions that others replace


def overwrite(host, seed=9):
    """Another checkpoint is written into the very file, under its name."""
    content = safetensors.torch.save(host.tiny_models.state_dict("sd1", seed, torch.float16))
    path = host.folder / "a.safetensors"
    with path.open("r+b") as file:
        file.write(content)
        file.truncate()


def reset_by_another(layer):
    layer.network_current_names = ()
    layer.network_weights_backup = None
    layer.network_bias_backup = None


class TestReplacedFunctions:
    def test_reset_is_not_needed(self, started, nets):
        """sd-webui-supermerger replaces it when the page is built."""
        host = started()
        host.networks.network_reset_cached_weight = reset_by_another
        a, bits = nets.make("a", bias=True), host.fingerprint()
        host.run_networks(a)
        other = host.checkpoint("b", seed=2)
        first = host.model.sd_checkpoint_info
        host.switch_to(other)
        host.assert_packed("b", FORMAT_BY_DEFAULT)
        host.run_networks(a)
        host.switch_to(first)
        assert host.fingerprint() == bits
        host.run_networks(a)
        host.run_networks()
        assert host.fingerprint() == bits

    def test_a_file_that_is_overwritten_while_networks_are_merged(self, host, nets):
        """One error, then the new file is loaded."""
        host.checkpoint()
        host.start(**ON)
        host.networks.network_reset_cached_weight = reset_by_another
        host.networks.loaded_networks[:] = [nets.make("a")]
        host.job()
        overwrite(host)
        host.networks.loaded_networks.clear()
        with pytest.raises(RuntimeError, match="is then loaded anew"):
            host.job()
        host.job()
        host.assert_packed("a", FORMAT_BY_DEFAULT)
        b = nets.make("b")
        host.run_networks(b)
        nets.assert_merged(b)
        host.run_networks()
        host.assert_packed("a", FORMAT_BY_DEFAULT)

    def test_nothing_is_kept_from_another_load(self, started, nets):
        """Though nobody resets anything: what a layer was known by is gone with its weights."""
        host = started()
        host.networks.network_reset_cached_weight = lambda layer: None
        a = nets.make("a", bias=True)
        host.run_networks(a)
        other = host.checkpoint("b", seed=2)
        host.switch_to(other)
        host.assert_packed("b", FORMAT_BY_DEFAULT)
        host.run_networks()
        host.assert_packed("b", FORMAT_BY_DEFAULT)
        values = host.values("b")
        assert torch.equal(host.layers[KEPT].weight, values[key_of(KEPT, host)].half())
        host.run_networks(a)
        host.run_networks()
        assert torch.equal(host.layers[KEPT].weight, values[key_of(KEPT, host)].half())

    @pytest.mark.parametrize("name", ["network_apply_weights", "network_forward"])
    def test_lost_ones_are_put_back_at_the_next_job(self, host, nets, name):
        host.checkpoint()
        host.start(**ON)
        theirs = host.patching.patches.originals["lib_fp8"][host.networks, name]
        for _ in range(2):
            setattr(host.networks, name, theirs)
            host.run_networks()
            host.job()
            assert getattr(host.networks, name) is not theirs
        host.opts.lora_functional = name == "network_forward"
        bits, a = host.fingerprint(), nets.make("a", [TO_Q])
        host.networks.loaded_networks[:] = [a]
        host.job()
        if name == "network_forward":
            assert host.fingerprint() == bits
        else:
            nets.assert_merged(a, layers=[TO_Q])
        host.reload_ui(extension=False)
        assert getattr(host.networks, name) is theirs

    def test_what_was_merged_meanwhile_is_taken_out(self, host, nets):
        """The Lora extension's own code merged, with backups of its own."""
        host.checkpoint()
        host.start(**ON)
        bits, ours = host.fingerprint(), host.networks.network_apply_weights
        host.networks.network_apply_weights = host.patching.patches.originals["lib_fp8"][
            host.networks, "network_apply_weights"
        ]
        a = nets.full("a", TO_Q)
        host.run_networks(a)
        assert host.fingerprint() != bits
        host.networks.network_apply_weights = ours
        host.run_networks(a, nets.full("b", TO_Q))
        host.run_networks()
        assert host.fingerprint() == bits

    def test_a_wrapper_that_calls_on_is_left_alone(self, newest, nets):
        newest.checkpoint()
        newest.start(**ON)
        ours, seen = newest.networks.network_apply_weights, []

        def theirs(layer):
            seen.append(layer)
            return ours(layer)

        newest.networks.network_apply_weights = theirs
        a = nets.make("a")
        newest.networks.loaded_networks[:] = [a]
        newest.job()
        assert newest.networks.network_apply_weights is theirs
        assert seen
        nets.assert_merged(a)

    def test_looking_uses_no_random_numbers(self, newest):
        newest.checkpoint()
        newest.start(**ON)
        state = torch.random.get_rng_state()
        assert newest.lora._is_reached(newest.networks, "network_apply_weights")
        assert newest.lora._is_reached(newest.networks, "network_forward")
        assert torch.equal(torch.random.get_rng_state(), state)
