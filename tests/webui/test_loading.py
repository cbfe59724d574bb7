"""Converting while loading, in place and on a reload: the same bits; switching, failing, and nothing more than that."""

from __future__ import annotations

import pytest
import torch
from helpers import FORMAT_BY_DEFAULT, FORMAT_NAMES, failing_pack, format_in_use, need_format, need_kernels
from torch import nn

from webui.nets import INT8_ANEW

DEFAULT = FORMAT_BY_DEFAULT
BLOCK = [f"model.diffusion_model.input_blocks.1.0.{name}" for name in ("in_layers.2", "skip_connection")]
ATTENTION = [f"model.diffusion_model.middle_block.0.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")]
MMDIT = [f"model.diffusion_model.joint_blocks.0.attn.{name}" for name in ("qkv", "proj")]
CLIP = [f"transformer.text_model.encoder.layers.0.{name}" for name in ("self_attn.q_proj", "mlp.fc1")]
OPEN_CLIP = [f"model.transformer.resblocks.0.{name}" for name in ("attn.out_proj", "mlp.c_fc")]


def under(prefix, names):
    return [f"{prefix}.{name}" for name in names]


PARTS = {
    "sd1": {"UNet": [*BLOCK, *ATTENTION], "fp8_clip_l": under("cond_stage_model", CLIP)},
    "sd2": {"UNet": [*BLOCK, *ATTENTION], "fp8_open_clip": under("cond_stage_model", OPEN_CLIP)},
    "sdxl": {
        "UNet": [*BLOCK, *ATTENTION],
        "fp8_clip_l": under("conditioner.embedders.0", CLIP),
        "fp8_open_clip": under("conditioner.embedders.1", OPEN_CLIP),
    },
    "sd3": {
        "UNet": MMDIT,
        "fp8_clip_l": under("text_encoders.clip_l", CLIP),
        "fp8_open_clip": under("text_encoders.clip_g", CLIP),
        "fp8_t5": under("text_encoders.t5xxl", CLIP),
    },
}
"""What the default policy converts: the diffusion model, and each text encoder by the option that chooses it."""

ALL_ENCODERS = {"fp8_clip_l": True, "fp8_open_clip": True, "fp8_t5": True}
ON = {"fp8_storage": "Enable"}


def reads(host):
    return len(host.sd_models.files_read)


@pytest.mark.parametrize("kind", PARTS)
class TestWhatIsConverted:
    def test_the_diffusion_model_alone_by_default(self, newest, kind):
        newest.checkpoint(kind=kind)
        newest.start(**ON)
        assert newest.quantized() == PARTS[kind]["UNet"]

    def test_each_text_encoder_by_itself(self, newest, kind):
        newest.checkpoint(kind=kind)
        newest.start(**ON)
        for key in ALL_ENCODERS:
            newest.set(**{key: True})
            assert newest.quantized() == PARTS[kind]["UNet"] + PARTS[kind].get(key, [])
            newest.assert_packed("a", DEFAULT)
            newest.set(**{key: False})

    def test_all_text_encoders_and_every_other_tensor_as_it_was(self, host, kind):
        host.checkpoint(kind=kind)
        host.start(**ALL_ENCODERS)
        plain = host.fingerprint()
        host.set(**ON)
        layers = [layer for part in PARTS[kind].values() for layer in part]
        assert sorted(host.quantized()) == sorted(layers)
        now = host.fingerprint()
        changed = {name for name in plain if now[name] != plain[name]}
        aliases = {
            name for name in changed if name.startswith("cond_stage_model.embedders")
        }  # of SDXL, under two names
        assert changed - aliases == {f"{layer}.weight" for layer in layers}

    def test_all_loaded_at_once(self, host, kind):
        host.checkpoint(kind=kind)
        host.start(**ON, **ALL_ENCODERS)
        host.assert_packed("a", DEFAULT)
        assert sorted(host.quantized()) == sorted(layer for part in PARTS[kind].values() for layer in part)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16 file", "fp32 file"])
@pytest.mark.parametrize("flags", [{}, {"no_half": True}, {"disable_model_loading_ram_optimization": True}], ids=str)
def test_first_load_reload_and_in_place_give_the_same_bits(host, dtype, flags):
    vars(host.shared.cmd_opts).update(flags)
    a, b = host.checkpoint("a", dtype=dtype), host.checkpoint("b", seed=2, dtype=dtype)
    host.start(sd_model_checkpoint=a.title, **ON, **ALL_ENCODERS)
    first = host.fingerprint()
    host.assert_packed("a", DEFAULT)
    host.switch_to(b)
    host.assert_packed("b", DEFAULT)
    host.switch_to(a)
    assert host.fingerprint() == first
    host.set(fp8_storage="Disable")
    assert not host.quantized()
    before = reads(host)
    host.set(**ON)
    assert host.fingerprint() == first
    assert reads(host) == before


@pytest.mark.parametrize("format_name", FORMAT_NAMES)
def test_every_format_and_from_one_to_the_next(newest, format_name):
    need_format(format_name)
    newest.checkpoint()
    newest.start(fp8_format=format_name, **ON)
    newest.assert_packed("a", format_name)
    for other in FORMAT_NAMES:
        newest.set(fp8_format=other)
        newest.assert_packed("a", format_in_use(other))


def test_off_means_off(host):
    """Never on, on and off again, and loaded while on: the same bits, the same picture."""
    host.checkpoint(dtype=torch.float32)
    host.start(**ALL_ENCODERS)
    bits, picture = host.fingerprint(), host.job().pictures[0]
    assert host.set(**ON) == [True]
    on = host.job().pictures[0]
    assert 0 < (on - picture).abs().max() < 0.1 * picture.abs().max()
    host.set(fp8_storage="Disable")
    assert host.fingerprint() == bits
    assert torch.equal(host.job().pictures[0], picture)


def test_switching_draws_no_random_numbers(newest):
    newest.checkpoint()
    newest.start()
    state = torch.get_rng_state()
    newest.set(**ON)
    newest.set(fp8_format="int8")
    newest.set(fp8_storage="Disable")
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("before", "change", "expected_reads"),
    [
        ({}, ON, 0),
        (ON, {"fp8_clip_l": True}, 0),
        (ON, {"fp8_lora": "Add at run time"}, 0),
        (ON, {"fp8_storage": "Disable"}, 1),
        (ON, INT8_ANEW, 1),
        (ON, {"fp8_keep_layers": "to_q"}, 1),
        ({**ON, "fp8_clip_l": True}, {"fp8_clip_l": False}, 1),
        ({}, {"fp8_format": "int8"}, 0),
        ({}, {"fp8_storage": "Enable for SDXL"}, 0),
    ],
    ids=str,
)
def test_what_a_change_reads(host, before, change, expected_reads):
    host.checkpoint()
    host.start(**before)
    read = reads(host)
    assert host.set(**change) == [True]
    assert reads(host) - read == expected_reads
    assert host.job().pictures
    assert reads(host) - read == expected_reads
    if host.format_in_use():
        host.assert_packed("a", format_in_use(host.opts.fp8_format))


def test_ten_jobs_load_nothing(host):
    host.checkpoint()
    host.start(**ON, **ALL_ENCODERS)
    read, bits, applied = reads(host), host.fingerprint(), len(host.sd_unet.applied)
    pictures = [picture for _ in range(10) for picture in host.job(n_iter=2).pictures]
    assert all(torch.equal(picture, pictures[0]) for picture in pictures)
    assert reads(host) == read
    assert host.fingerprint() == bits
    assert len(host.sd_unet.applied) == applied + 10  # one for each job, none for a reload


@pytest.mark.parametrize(
    ("saved", "overrides", "jobs_with_plain_ones_after"),
    [
        # the first job, the second that is like it, one without overrides
        ({}, ON, (0, 0, 1)),
        (ON, INT8_ANEW, (1, 0, 1)),
        (ON, {"fp8_storage": "Disable"}, (1, 0, 0)),
    ],
    ids=str,
)
def test_a_job_with_overrides_changes_the_storage_once(host, saved, overrides, jobs_with_plain_ones_after):
    """The WebUI looks after the model before and after it puts the overrides in force."""
    host.checkpoint()
    host.start(**saved)
    plain = host.fingerprint()
    seen = []
    for wanted in (overrides, overrides, {}):
        before = reads(host)
        host.job(n_iter=2, **wanted)
        seen.append(reads(host) - before)
        assert (host.fingerprint() == plain) == (wanted == {})
    assert tuple(seen) == jobs_with_plain_ones_after
    assert host.opts.fp8_storage == saved.get("fp8_storage", "Disable")


def test_a_job_that_asks_for_another_checkpoint_too(host):
    a, b = host.checkpoint("a"), host.checkpoint("b", seed=2)
    host.start(sd_model_checkpoint=a.title)
    read = reads(host)
    host.job(sd_model_checkpoint=b.title, fp8_storage="Enable", fp8_format="int8")
    host.assert_packed("b", "int8")
    assert host.sd_models.files_read[read:] == ["b.safetensors"]
    host.job()
    assert host.model.sd_checkpoint_info is a
    assert not host.quantized()


class TestTheBuiltInConversion:
    def test_never_runs(self, host):
        a, b = host.checkpoint("a"), host.checkpoint("b", kind="sdxl")
        host.start(sd_model_checkpoint=a.title, **ON)
        steps = [
            host.job,
            lambda: host.set(fp8_storage="Disable"),
            lambda: host.set(fp8_storage="Enable for SDXL"),
            lambda: host.switch_to(b),
            lambda: host.job(fp8_storage="Enable"),
            lambda: host.switch_to(a),
            lambda: host.job(fp8_storage="Disable"),
            host.reload_ui,
            host.job,
        ]
        for step in steps:
            step()
            assert not getattr(host.devices, "fp8", False)
        assert host.sd_models.conversions == []

    def test_what_it_left_is_converted_anew(self, newest):
        """The extension is switched on while the WebUI has float8 weights of its own."""
        need_format(FORMAT_NAMES[0])
        newest.checkpoint()
        newest.start(extension=False, cache_fp16_weight=True, **ON)
        assert newest.devices.fp8
        assert newest.sd_models.conversions
        newest.reload_ui()
        newest.job()
        assert not newest.devices.fp8
        newest.assert_packed("a", DEFAULT)
        assert not any(hasattr(module, "fp16_weight") for module in newest.model.modules())

    def test_takes_over_again_when_the_extension_is_switched_off(self, newest):
        need_format(FORMAT_NAMES[0])
        newest.checkpoint()
        newest.start(extension=False, **ON)
        built_in = newest.fingerprint()
        newest.reload_ui()
        newest.job()
        assert newest.fingerprint() != built_in
        newest.reload_ui(extension=False)
        now = newest.fingerprint()
        for name in built_in.keys() - {"alphas_cumprod"}:  # which the WebUI itself rounds when it loads over float8
            assert now[name] == built_in[name], name
        assert newest.devices.fp8


class TestSeveralCheckpoints:
    @pytest.fixture
    def two(self, host):
        a, b = host.checkpoint("a"), host.checkpoint("b", kind="sdxl", seed=2)
        host.start(sd_model_checkpoint=a.title, sd_checkpoints_limit=2)
        return a, b

    def test_each_has_its_own_state(self, host, two):
        """With "Enable for SDXL", going to and fro reads and converts nothing again."""
        a, b = two
        host.set(fp8_storage="Enable for SDXL")
        host.switch_to(b)
        plain, packed = (host.fingerprint(m) for m in reversed(host.sd_models.model_data.loaded_sd_models))
        read, weights = reads(host), list(map(id, host.unet.parameters()))
        for info in (a, b) * 3:
            assert host.switch_to(info).sd_checkpoint_info is info
            assert host.job().pictures
        assert host.fingerprint() == packed
        assert list(map(id, host.unet.parameters())) == weights
        host.switch_to(a)
        assert host.fingerprint() == plain
        assert reads(host) == read

    def test_each_follows_the_settings_when_it_is_used_next(self, host, two):
        a, b = two
        host.switch_to(b)
        host.set(fp8_format="int8", **ON)
        first, second = host.model, host.sd_models.model_data.loaded_sd_models[1]
        host.assert_packed("b", "int8", first)
        assert host.format_in_use(second) is None
        host.switch_to(a)
        host.assert_packed("a", "int8", second)
        host.set(fp8_storage="Disable")
        assert host.format_in_use(first) == "int8"
        host.switch_to(b)
        assert host.format_in_use(first) is None

    def test_a_refiner_leaves_the_chosen_checkpoint_alone(self, host, two):
        a, b = two
        host.set(**ON)
        with host.sd_models.SkipWritingToConfig():
            host.sd_models.reload_model_weights(info=b)
        host.assert_packed("b", DEFAULT)
        assert host.opts.sd_model_checkpoint == a.title


class TestFailingToPack:
    def assert_gave_up(self, host, plain, capsys):
        """Full precision, said clearly, and not tried again by the next jobs."""
        assert host.fingerprint() == plain
        said = capsys.readouterr().err
        assert "no more memory, said the test" in said
        assert "layer " in said
        read = reads(host)
        for _ in range(3):
            p = host.job()
        assert "FP8 weight" not in p.extra_generation_params
        assert host.fingerprint() == plain
        assert reads(host) == read
        assert capsys.readouterr().err == ""
        assert "no more memory" in host.panel.status_html()
        assert host.panel.status()["enabled"] is False

    def assert_tries_again(self, host):
        host.set(**INT8_ANEW)
        host.assert_packed("a", "int8")
        assert "no more memory" not in host.panel.status_html()
        assert host.panel.status()["problem"] is None

    @pytest.fixture
    def plain(self, host):
        """The bits of the model in full precision."""
        host.a = host.checkpoint()
        host.start(fp8_clip_l=True)
        return host.fingerprint()

    @pytest.mark.parametrize("call", [0, 6])
    def test_in_place_leaves_the_model_untouched(self, host, plain, call, capsys):
        weights = list(map(id, host.model.parameters()))
        with failing_pack(call):
            host.set(**ON)
        assert list(map(id, host.model.parameters())) == weights
        self.assert_gave_up(host, plain, capsys)
        self.assert_tries_again(host)

    @pytest.mark.parametrize("call", [0, 6])
    @pytest.mark.parametrize("ram_optimization", [True, False])
    def test_during_the_first_load(self, host, plain, call, ram_optimization, capsys):
        host.shared.cmd_opts.disable_model_loading_ram_optimization = not ram_optimization
        host.opts.fp8_storage = "Enable"
        with failing_pack(call):
            host.sd_models.load_model(host.a)
        self.assert_gave_up(host, plain, capsys)
        self.assert_tries_again(host)

    def test_during_a_reload_and_a_change_of_format(self, host, plain, capsys):
        b = host.checkpoint("b", seed=2)
        host.set(**ON)
        host.switch_to(b)
        with failing_pack(3):
            host.switch_to(host.a)
        self.assert_gave_up(host, plain, capsys)
        self.assert_tries_again(host)
        with failing_pack(3):
            host.set(**{key: host.opts.get_default(key) for key in INT8_ANEW})
        self.assert_gave_up(host, plain, capsys)

    def test_switching_off_and_on_tries_again(self, host, plain):
        with failing_pack(0):
            host.set(**ON)
        host.set(fp8_storage="Disable")
        assert host.panel.status()["problem"] is None
        host.set(**ON)
        host.assert_packed("a", DEFAULT)


class TestBrokenFiles:
    @pytest.fixture
    def loaded(self, host, request):
        host.a, host.b = host.checkpoint("a"), host.checkpoint("b", seed=2)
        host.start(sd_model_checkpoint=host.a.title, **ON)
        return host.fingerprint()

    def assert_in_use(self, host, bits):
        """The model from before is whole, wrapped, and makes pictures."""
        assert host.fingerprint() == bits
        host.opts.sd_model_checkpoint = host.a.title
        assert host.model.sd_checkpoint_info is host.a
        assert host.job().pictures

    @pytest.mark.parametrize("size", [1000, 4, 0, None])
    def test_a_broken_one_is_refused_before_the_loaded_model_is_taken_apart(self, host, loaded, size):
        """The WebUI unwraps the text encoder, then reads, and does not wrap it again if that fails."""
        path = host.folder / "b.safetensors"
        path.write_bytes(path.read_bytes()[:size]) if size is not None else path.unlink()
        words = "missing" if size is None else "damaged or incomplete"
        with pytest.raises(RuntimeError, match=rf"b\.safetensors is {words}") as caught:
            host.switch_to(host.b)
        assert "The model that was loaded before stays" in str(caught.value)
        self.assert_in_use(host, loaded)

    def test_one_with_wrong_shapes_is_given_up_by_the_webui(self, host, loaded):
        """The WebUI loads the previous one again: into the same bits as before."""
        import safetensors.torch

        values = host.values("b")
        values["model.diffusion_model.middle_block.0.to_v.weight"] = torch.zeros(3, 3)
        safetensors.torch.save_file(values, host.b.filename)
        with pytest.raises(RuntimeError, match="size mismatch"):
            host.switch_to(host.b)
        self.assert_in_use(host, loaded)

    @pytest.mark.parametrize("change", [{"fp8_storage": "Disable"}, INT8_ANEW], ids=str)
    @pytest.mark.parametrize("damage", ["gone", "truncated"])
    def test_the_own_one_is_gone_or_cut(self, host, loaded, change, damage):
        path = host.folder / "a.safetensors"
        content = path.read_bytes()
        path.unlink() if damage == "gone" else path.write_bytes(content[:1000])
        assert host.set(**change) == [False]
        assert "changing setting" in host.errors.shown[-1]
        self.assert_in_use(host, loaded)
        with pytest.raises(Exception, match=r"."):
            host.job(**change)
        self.assert_in_use(host, loaded)
        path.write_bytes(content)
        assert host.set(**change) == [True]


class TestTheEmptyPrompt:
    def fresh(self, host):
        with host.devices.autocast(), torch.no_grad():
            return host.sd_models.get_empty_cond(host.model)

    @pytest.mark.parametrize(("kind", "encoder"), [("sd1", "fp8_clip_l"), ("sd2", "fp8_open_clip"), ("sd3", "fp8_t5")])
    def test_is_encoded_again_when_its_encoder_changes_and_only_then(self, host, kind, encoder):
        host.checkpoint(kind=kind)
        host.start()
        encoded = host.model.cond_stage_model_empty_prompt
        full = encoded.clone()
        host.set(fp8_format="int8", **ON)
        assert host.model.cond_stage_model_empty_prompt is encoded
        host.set(**{encoder: True})
        packed = host.model.cond_stage_model_empty_prompt
        assert packed is not encoded
        assert torch.equal(packed, self.fresh(host))
        host.set(**{encoder: False})
        assert torch.equal(host.model.cond_stage_model_empty_prompt, full)

    def test_of_a_converting_first_load(self, host):
        host.checkpoint()
        host.start(fp8_clip_l=True, **ON)
        assert torch.equal(host.model.cond_stage_model_empty_prompt, self.fresh(host))

    def test_when_the_extension_is_switched_off(self, host):
        host.checkpoint()
        host.start(fp8_clip_l=True, **ON)
        host.opts.fp8_storage = "Enable for SDXL"  # so that the WebUI's own conversion stays out of it
        host.reload_ui(extension=False)
        assert torch.equal(host.model.cond_stage_model_empty_prompt, self.fresh(host))


class TestSwitchingTheExtensionOff:
    """The saved switch means SDXL, so that the WebUI's own conversion does not take over the SD1 models."""

    @pytest.fixture
    def plain(self, host):
        host.a, host.b = host.checkpoint("a"), host.checkpoint("b", seed=2)
        host.start(sd_model_checkpoint=host.a.title, sd_checkpoints_limit=2)
        plain = host.fingerprint()
        host.set(fp8_clip_l=True, **ON)
        host.opts.fp8_storage = "Enable for SDXL"
        return plain

    def test_gives_full_precision_back(self, host, plain):
        host.reload_ui(extension=False)
        assert host.fingerprint() == plain
        assert host.job().pictures

    def test_also_by_the_master_switch_of_all_extensions(self, host, plain):
        host.opts.disable_all_extensions = "all"
        host.reload_ui(extension=False)
        assert host.fingerprint() == plain

    def test_decodes_where_the_file_is_gone(self, host, plain, capsys):
        (host.folder / "a.safetensors").unlink()
        host.reload_ui(extension=False)
        assert not host.quantized()
        assert "8 layers were decoded from 8 bits instead" in capsys.readouterr().err
        for (name, now), was in zip(host.fingerprint().items(), plain.values()):
            assert now[:2] == was[:2], name
        assert host.job().pictures

    def test_reload_ui_alone_keeps_the_model(self, host, plain):
        bits, read = host.fingerprint(), reads(host)
        host.reload_ui()
        assert host.fingerprint() == bits
        assert reads(host) == read

    def test_keeps_the_chosen_checkpoint(self, host, plain):
        host.set(**ON)
        host.switch_to(host.b)
        host.switch_to(host.a)
        host.opts.fp8_storage = "Enable for SDXL"
        host.reload_ui(extension=False)
        assert not any(map(host.quantized, host.sd_models.model_data.loaded_sd_models))
        assert host.opts.sd_model_checkpoint == host.a.title
        host.job()
        assert host.fingerprint() == plain
        host.switch_to(host.b)
        assert not host.quantized()


def test_a_bad_setting_at_load_gives_full_precision(host, capsys):
    """A preset that writes into the options without their callbacks."""
    host.checkpoint()
    host.start()
    plain = host.fingerprint()
    host.opts.data.update(fp8_storage="Enable", fp8_format="int9")
    host.sd_models.load_model()
    assert host.fingerprint() == plain
    assert "'int9'" in capsys.readouterr().err
    assert "int9" in host.panel.status()["problem"]


@pytest.mark.parametrize("format_name", FORMAT_NAMES)
def test_precision_half(newest, format_name):
    """Nothing is cast by autocast there, not even the empty prompt while the model is loaded."""
    need_format(format_name)
    need_kernels(torch.float16)
    newest.shared.cmd_opts.precision = "half"
    newest.checkpoint()
    newest.start(fp8_format=format_name, fp8_clip_l=True, **ON)
    assert newest.errors.shown == []
    assert torch.isfinite(newest.job().pictures[0]).all()


def test_console_says_what_was_done(host, capsys):
    host.checkpoint()
    host.start(fp8_clip_l=True, **ON)
    said = capsys.readouterr().out
    assert f"FP8 weight: UNet 6 layers in {DEFAULT}, 5 kept" in said
    assert f"CLIP-L 2 layers in {DEFAULT}, 0 kept" in said


def test_the_unload_button(host):
    host.checkpoint()
    host.start(**ON)
    bits = host.fingerprint()
    host.sd_models.unload_model_weights()
    host.sd_models.reload_model_weights()
    if host.minor < 7:  # 1.6 brings its model back without the wrapping of the text encoder
        host.sd_hijack.model_hijack.hijack(host.model)
    assert host.fingerprint() == bits
    assert host.job().pictures


def test_a_checkpoint_that_cannot_be_read_leaves_the_former_model_usable(host, monkeypatch):
    """The WebUI unwraps the text encoder before it reads the file, and does not wrap it again when that fails."""
    host.checkpoint()
    other = host.checkpoint("b", seed=2)
    host.start(fp8_storage="Enable")
    before, picture = host.fingerprint(), host.job("a dog").pictures[0]

    def unreadable(*_):
        raise RuntimeError("the file may be malicious")

    with monkeypatch.context() as patched:
        patched.setattr(host.sd_models, "get_checkpoint_state_dict", unreadable)
        with pytest.raises(RuntimeError, match="malicious"):
            host.sd_models.reload_model_weights(info=other)
    assert host.sd_hijack.model_hijack.clip is host.model.cond_stage_model
    assert host.sd_models.model_data.loaded_sd_models == [host.model]
    assert host.fingerprint() == before
    assert torch.equal(host.job("a dog").pictures[0], picture)


@pytest.mark.parametrize("when", ["before the load", "after the load"])
def test_a_hypernetwork_that_hangs_in_attention_is_left_alone(host, when):
    """The WebUI puts its layers there; it reads them elsewhere."""
    host.checkpoint()
    host.start(**(ON if when == "before the load" else {}))
    attention = host.unet.middle_block[0]
    attention.hyper_k = hung = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)
    before = [weight.half() for weight in hung.parameters()]
    if when == "before the load":
        host.switch_to(host.checkpoint("b", seed=2))
    else:
        host.set(**ON)
    assert host.format_in_use() is not None
    assert not [name for name in host.quantized() if "hyper_k" in name]
    assert all(torch.equal(weight.half(), value) for weight, value in zip(hung.parameters(), before))


def test_the_webuis_own_conversion_before_leaves_no_trace(host):
    """The extension is switched on while a model is in the WebUI's own 8 bits."""
    if host.minor < 8:
        pytest.skip("this WebUI has no conversion of its own")
    need_format("float8_e4m3fn unscaled")
    host.checkpoint()
    host.start(extension=False)
    schedule = host.model.alphas_cumprod.clone()
    host.set(fp8_storage="Enable")
    host.sd_models.reload_model_weights()
    assert host.devices.fp8
    host.reload_ui()
    host.job()
    assert not host.devices.fp8
    assert torch.equal(host.model.alphas_cumprod, schedule)
    host.assert_packed("a", "float8_e4m3fn")
    assert all(parameter.element_size() > 1 for parameter in host.model.parameters())
