"""Checkpoints in 8-bit layouts of other programs: refused by name, whoever wants to read them; plain ones load."""

from __future__ import annotations

import json
import re

import pytest
import safetensors.torch
import torch
from dialect_files import COMFY_SCALED, DIALECTS, FP8, HARMLESS, at, safetensors_bytes
from helpers import all_tensors

from lib_fp8 import QuantWeight
from lib_fp8.checkpoint import tensors
from webui.host import Host, fresh_modules
from webui.nets import ON

OFF = {"fp8_storage": "Disable"}
LAYER = "model.diffusion_model.middle_block.0.to_q"
INT8, SCALED = "bitsandbytes int8", "scaled fp8"


def put(host, name, case):
    """A checkpoint of the kind that the host knows, one layer of it in a foreign layout."""
    _, layer, metadata = DIALECTS[case]
    host.checkpoint(name)
    ordinary = {
        key: ("F16", tuple(value.shape)) for key, value in host.values(name).items() if key != f"{LAYER}.weight"
    }
    (host.folder / f"{name}.safetensors").write_bytes(safetensors_bytes({**ordinary, **layer}, metadata))
    return host.sd_models.CheckpointInfo(host.folder / f"{name}.safetensors")


def pickled(host, name="b"):
    """The same as ``torch.save`` writes it, with the layer in the int8 of bitsandbytes."""
    host.checkpoint(name)
    values = host.values(name)
    values[f"{LAYER}.weight"] = torch.ones(16, 16, dtype=torch.int8)
    values[f"{LAYER}.SCB"] = torch.ones(16)
    torch.save({"state_dict": values, "epoch": 1}, host.folder / f"{name}.ckpt")
    return host.sd_models.CheckpointInfo(host.folder / f"{name}.ckpt")


def refused(name, file):
    return pytest.raises(
        RuntimeError, match=rf"{re.escape(file)} holds weights .* cannot be read yet: {re.escape(name)}"
    )


@pytest.fixture(params=[ON, OFF], ids=["on", "off"])
def loaded(host, request):
    host.a = host.checkpoint("a")
    host.start(sd_model_checkpoint=host.a.title, **request.param)
    return host


def assert_in_use(host, bits):
    assert host.fingerprint() == bits
    host.opts.sd_model_checkpoint = host.a.title
    assert host.model.sd_checkpoint_info is host.a
    assert host.job().pictures


@pytest.mark.parametrize("case", DIALECTS)
def test_each_is_refused_before_the_loaded_model_is_taken_apart(newest, case):
    newest.a, b = newest.checkpoint("a"), put(newest, "b", case)
    newest.start(sd_model_checkpoint=newest.a.title, **ON)
    bits = newest.fingerprint()
    newest.sd_models.files_read.clear()
    with refused(DIALECTS[case][0], "b.safetensors") as caught:
        newest.switch_to(b)
    assert newest.sd_models.files_read == []
    assert "float16 file" in str(caught.value)
    assert "plain float8" in str(caught.value)
    assert "The model that was loaded before stays in use" in str(caught.value)
    assert_in_use(newest, bits)


class TestWhereverItIsRead:
    def test_chosen(self, loaded):
        bits, b = loaded.fingerprint(), put(loaded, "b", SCALED)
        with refused(COMFY_SCALED, "b.safetensors"):
            loaded.switch_to(b)
        assert_in_use(loaded, bits)

    def test_for_one_job(self, loaded):
        """As the API and the X/Y/Z plot do."""
        bits, b = loaded.fingerprint(), put(loaded, "b", SCALED)
        with refused(COMFY_SCALED, "b.safetensors"):
            loaded.job(sd_model_checkpoint=b.title)
        assert_in_use(loaded, bits)

    def test_as_a_refiner(self, loaded):
        bits, b = loaded.fingerprint(), put(loaded, "b", SCALED)
        with refused(COMFY_SCALED, "b.safetensors"), loaded.sd_models.SkipWritingToConfig():
            loaded.sd_models.reload_model_weights(info=b)
        assert_in_use(loaded, bits)

    def test_beside_another(self, loaded):
        bits, b = loaded.fingerprint(), put(loaded, "b", SCALED)
        loaded.opts.sd_checkpoints_limit = 2
        with refused(COMFY_SCALED, "b.safetensors"):
            loaded.switch_to(b)
        assert_in_use(loaded, bits)

    def test_loaded_by_another_extension(self, loaded):
        b = put(loaded, "b", SCALED)
        with refused(COMFY_SCALED, "b.safetensors"):
            loaded.sd_models.load_model(b)
        assert loaded.switch_to(loaded.a).sd_checkpoint_info is loaded.a

    @pytest.mark.parametrize("parents", ["ab", "ba"])
    def test_merged(self, loaded, parents):
        """int8 codes would be merged as if they were weights."""
        loaded.b = put(loaded, "b", "int8 alone")
        first, second = (getattr(loaded, name).title for name in parents)
        with refused("8-bit codes without a description", "b.safetensors"):
            loaded.extras.run_modelmerger(first, second, 0.5, "merged")
        assert not (loaded.folder / "merged.safetensors").exists()
        loaded.checkpoint("b", seed=2)
        assert loaded.extras.run_modelmerger(first, second, 0.5, "merged").exists()

    def test_pickled(self, loaded):
        """What it holds shows only when it has been read; the former model is whole again."""
        bits, b = loaded.fingerprint(), pickled(loaded)
        with refused(INT8, "b.ckpt"):
            loaded.switch_to(b)
        assert_in_use(loaded, bits)

    @pytest.mark.parametrize("change", [{"fp8_keep_layers": "to_q"}, OFF], ids=str)
    def test_put_in_the_place_of_the_loaded_one(self, host, change):
        host.a = host.checkpoint("a")
        host.start(**ON)
        bits = host.fingerprint()
        put(host, "a", SCALED)
        assert host.set(**change) == [False]
        assert COMFY_SCALED in host.errors.shown[-1]
        assert host.fingerprint() == bits

    @pytest.mark.parametrize("suffix", ["safetensors", "ckpt", "gguf"])
    def test_gguf_under_any_name(self, loaded, suffix):
        path = loaded.folder / f"b.{suffix}"
        path.write_bytes(b"GGUF\3\0\0\0" + bytes(100))
        with refused("GGUF", path.name):
            loaded.switch_to(loaded.sd_models.CheckpointInfo(path))


class TestTheFirst:
    """The WebUI catches what the first load raises, and goes on without a model."""

    def start(self, host, info, **options):
        with refused(INT8 if info.filename.endswith("ckpt") else COMFY_SCALED, info.name) as caught:
            host.start(sd_model_checkpoint=info.title, **options)
        host._build_page()
        return str(caught.value)

    @pytest.mark.parametrize("options", [ON, OFF], ids=["on", "off"])
    @pytest.mark.parametrize("kind", ["safetensors", "ckpt"])
    def test_another_can_be_chosen(self, host, options, kind):
        b = put(host, "b", SCALED) if kind == "safetensors" else pickled(host)
        assert "stays in use" not in self.start(host, b, **options)
        assert host.model is None
        with refused(COMFY_SCALED if kind == "safetensors" else INT8, b.name):
            host.job()
        a = host.checkpoint("a")
        assert host.switch_to(a).sd_checkpoint_info is a
        assert bool(host.quantized()) == (options is ON)
        assert host.job().pictures

    def test_another_can_be_chosen_in_1_9(self, tmp_path):
        """That release, by itself, can load nothing any more after its first load has failed."""
        with fresh_modules("1.9"):
            host = Host("1.9", tmp_path)
            self.start(host, put(host, "b", SCALED), **ON)
            assert host.switch_to(host.checkpoint("a")) is not None
            assert host.job().pictures


class TestNoFalseAlarm:
    @pytest.mark.parametrize("options", [ON, OFF], ids=["on", "off"])
    @pytest.mark.parametrize("vae", [torch.float16, torch.bfloat16], ids=str)
    def test_a_float8_unet_with_the_rest_in_16_bits(self, host, options, vae):
        """Every weight is the file's value, cast directly."""
        if not tensors.can_be_read("F8_E4M3"):
            pytest.skip("the installed torch and safetensors do not read float8")
        if options is OFF:
            try:
                torch.zeros_like(torch.empty(1, device="meta"), device="cpu", dtype=torch.float8_e4m3fn)
            except RuntimeError as error:
                pytest.skip(f"the WebUI itself cannot load such a file with this torch: {error}")
        host.checkpoint()
        values = {
            name: value.to(
                torch.float8_e4m3fn if ".diffusion_model." in name else vae if "first_stage" in name else value.dtype
            )
            for name, value in host.values().items()
        }
        values["cond_stage_model.transformer.text_model.embeddings.position_ids"] = torch.arange(77).half()
        values["model.diffusion_model.logit_scale"] = torch.tensor(4.6)
        values["model_ema.num_updates"] = torch.tensor(7, dtype=torch.int32)
        safetensors.torch.save_file(values, host.folder / "a.safetensors")
        host.start(**options)
        assert bool(host.quantized()) == (options is ON)
        for name, tensor in all_tensors(host.unet).items():
            plain = tensor.dequantize() if isinstance(tensor, QuantWeight) else tensor
            assert torch.equal(plain, values["model.diffusion_model." + name].half()), name

    @pytest.mark.parametrize("case", HARMLESS)
    def test_ordinary_files(self, newest, case, tmp_path):
        path = tmp_path / "b.safetensors"
        path.write_bytes(safetensors_bytes(*HARMLESS[case]))
        newest.start()
        if any(not tensors.can_be_read(dtype) for dtype, _ in HARMLESS[case][0].values()):
            pytest.skip("the installed torch and safetensors do not read it")
        assert newest.reading.check_usable(str(path)).tensors.keys() == HARMLESS[case][0].keys()

    def test_what_is_no_checkpoint_is_let_through(self, newest):
        """A VAE, a network: the WebUI reads them with the same function."""
        newest.checkpoint("a")
        newest.start()
        path = newest.folder / "vae.safetensors"
        safetensors.torch.save_file({"x.weight": torch.ones(2, 2, dtype=torch.int8)}, path)
        assert list(newest.sd_models.read_state_dict(str(path))) == ["x.weight"]


def test_float8_where_nothing_installed_reads_it(newest, monkeypatch):
    """As with the torch and the safetensors of WebUI 1.6 and 1.7: it is no damage."""
    newest.a = newest.checkpoint("a")
    newest.start(sd_model_checkpoint=newest.a.title)
    path = newest.folder / "b.safetensors"
    path.write_bytes(safetensors_bytes(at(weight=FP8)))
    monkeypatch.setattr(newest.reading, "can_be_read", lambda dtype: not dtype.startswith("F8"))
    with pytest.raises(RuntimeError, match=r"b\.safetensors holds F8_E4M3 values, which the installed torch") as caught:
        newest.switch_to(newest.sd_models.CheckpointInfo(path))
    assert "damaged" not in str(caught.value)
    assert "Take the float16 file" in str(caught.value)
    put(newest, "c", SCALED)
    with refused(COMFY_SCALED, "c.safetensors"):
        newest.switch_to(newest.sd_models.CheckpointInfo(newest.folder / "c.safetensors"))


def test_metadata_alone_do_not_refuse(newest):
    newest.checkpoint("a")
    values, path = newest.values("a"), newest.folder / "b.safetensors"
    safetensors.torch.save_file(values, path, {"_quantization_metadata": json.dumps({"layers": {}})})
    newest.start()
    assert newest.switch_to(newest.sd_models.CheckpointInfo(path)).sd_checkpoint_info.filename == str(path)
