"""Teachers that are loaded straight to where they run: on disk by accelerate's hooks, or quantised by bitsandbytes.

What needs a GPU is not run: that layers are shared out over several, or over one and the host, is accelerate's own.
The disk is, by a bound on the host's memory, and with it all that our forward must do about hooks and absent weights.
"""

from __future__ import annotations

import dataclasses
import importlib.machinery
import json
import sys
import types
from pathlib import Path

import pytest
import torch

from qat_lora import models
from qat_lora.cache import CacheManifest, load_manifest
from qat_lora.cli import commands
from qat_lora.config.cache import CacheRun
from qat_lora.errors import CacheMismatch, CheckpointError, ConfigError, DeviceError, ModelError
from qat_lora.models import loading
from qat_lora.models.placement import Placement, memory_bytes, places_of
from qat_lora.runtime import LocalRuntime
from qat_lora.train.run import run_qat
from tests.conftest import cache_run, qat_run

ON_CPU = Placement(torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def untied_dir(tmp_path_factory, teacher_dir) -> Path:
    """The tiny teacher with a head of its own, stored in bf16, which the CPU does not compute in."""
    folder = tmp_path_factory.mktemp("untied")
    loaded = models.load(str(teacher_dir))
    model, config = loaded.model, loaded.model.config
    config.tie_word_embeddings = False
    head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    model.lm_head = head.requires_grad_(False)
    models.save_pretrained(model.to(torch.bfloat16), loaded.tokenizer, folder)
    found = models.load(str(folder))
    assert found.stored_bits == 16 and not torch.equal(
        found.model.lm_head.weight, found.model.model.embed_tokens.weight
    )
    return folder


@pytest.fixture
def loads(monkeypatch) -> list[models.Loaded]:
    """All that `models.load` returns in this test."""
    found: list[models.Loaded] = []
    load = models.load
    monkeypatch.setattr(models, "load", lambda *args, **words: found.append(load(*args, **words)) or found[-1])
    return found


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("memory", "on_disk"), [("cpu=1KB", "all"), ("cpu=100KB", "some"), ("cpu=1GiB", "none")])
def test_a_teacher_on_disk_makes_the_same_bytes(
    tmp_path, teacher_dir, untied_dir, text_file, loads, tied, memory, on_disk
) -> None:
    run = cache_run(teacher_dir if tied else untied_dir, text_file, tmp_path / "plain", max_rows=40)
    commands.cache(run)
    commands.cache(dataclasses.replace(run, output=tmp_path / "spread", device_map="auto", max_memory=(memory,)))
    absent = [p.is_meta for p in loads[1].model.parameters()]
    assert on_disk == ("all" if all(absent) else "some" if any(absent) else "none")
    assert files_of(tmp_path / "spread") == files_of(tmp_path / "plain")
    assert loads[0].identity == loads[1].identity


def test_the_head_is_fetched_once_for_all_chunks(tmp_path, untied_dir, text_file, monkeypatch) -> None:
    """A head on disk would be read for each 256 tokens, and a layer is read once per batch."""
    run = cache_run(untied_dir, text_file, tmp_path / "spread", max_rows=40, device_map="auto", max_memory=("cpu=1KB",))
    from accelerate.utils import OffloadedWeightsLoader

    read: list[str] = []
    get = OffloadedWeightsLoader.__getitem__
    monkeypatch.setattr(OffloadedWeightsLoader, "__getitem__", lambda self, key: read.append(key) or get(self, key))
    commands.cache(run)
    checks = 2  # of the head: through the model's own forward and through ours
    assert read.count("lm_head.weight") == checks + 1
    batches = 40 // run.rows_per_shard * 2 + 1
    assert read.count("model.layers.0.mlp.up_proj.weight") == 2 + batches


def test_what_was_written_for_the_disk_goes_with_the_model(teacher_dir) -> None:
    written: list[Path] = []

    def load(*, offload_folder: str, **words) -> torch.nn.Module:
        written.append(Path(offload_folder) / "weight.safetensors")
        written[0].write_text("anew")
        return torch.nn.Linear(1, 1)

    model = dataclasses.replace(ON_CPU, spread=True).load(load)
    assert written[0].exists()
    del model
    assert not written[0].parent.exists()


def words_of(placement: Placement) -> dict:
    found: list[dict] = []
    placement.load(lambda **words: found.append(words) or torch.nn.Linear(1, 1))
    found[0].pop("offload_folder", None)
    return found[0]


def test_what_transformers_is_told() -> None:
    gpu = dataclasses.replace(ON_CPU, device=torch.device("cuda", 1))
    assert words_of(gpu) == {"device_map": {"": torch.device("cuda", 1)}}
    assert words_of(dataclasses.replace(gpu, spread=True)) == {"device_map": "auto"}
    bounded = dataclasses.replace(gpu, spread=True, max_memory=memory_bytes(["0=1.5GiB", "1=20GB", "cpu=3MB"]))
    assert words_of(bounded) == {"device_map": "auto", "max_memory": {0: 1610612736, 1: 20 * 10**9, "cpu": 3 * 10**6}}
    assert words_of(dataclasses.replace(gpu, quantization="4bit"))["quantization_config"] == {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_compute_dtype": "float32",
    }


def test_the_places_that_a_bound_does_not_name_are_free_too(monkeypatch) -> None:
    monkeypatch.setattr("accelerate.utils.get_max_memory", lambda: {0: 100, 1: 200, "cpu": 1000})
    gpu = dataclasses.replace(ON_CPU, device=torch.device("cuda"), spread=True, max_memory={1: 10})
    assert words_of(gpu)["max_memory"] == {0: 90, 1: 10, "cpu": 900}
    assert words_of(dataclasses.replace(ON_CPU, spread=True))["max_memory"] == {"cpu": 900}, "GPUs were not asked for"
    gpu.check(Path(), None)
    for device, place in (("cuda", 2), ("cpu", 0)):
        wrong = dataclasses.replace(gpu, device=torch.device(device), max_memory={place: 10})
        with pytest.raises(ConfigError, match=f"max_memory names {place}, but --device {device} has "):
            wrong.check(Path(), None)


@pytest.mark.parametrize("word", ["20GiB", "0=20", "0=20GiB;cpu=1GiB", "tpu=1GiB", "0=-1GiB"])
def test_sizes_that_cannot_be_read(word) -> None:
    with pytest.raises(ConfigError, match="max_memory takes device=size .* write --max-memory 0=20GiB,cpu=64GiB"):
        memory_bytes([word])


def test_a_bound_without_a_map_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_memory=cpu=1GiB .* add --device-map auto"):
        CacheRun(max_memory=("cpu=1GiB",))


class Ranks(LocalRuntime):
    world_size = 2


class Compiled(LocalRuntime):
    static_graph = True


@pytest.mark.parametrize(
    ("kind", "said"), [(Ranks, "2 ranks would each .* --part"), (Compiled, "whole compiled graphs; drop --device-map")]
)
def test_who_cannot_have_a_spread_teacher(tmp_path, teacher_dir, text_file, monkeypatch, loads, kind, said) -> None:
    monkeypatch.setattr(commands, "runtime_for", lambda *args, **words: kind("cpu"))
    with pytest.raises(ConfigError, match=f"device_map=auto .*{said}"):
        commands.cache(cache_run(teacher_dir, text_file, tmp_path / "c", device_map="auto"))
    assert not loads, "before long work begins"
    assert not list((tmp_path / "c").glob("*"))


# ---- quantised teachers


@pytest.fixture
def no_bitsandbytes(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)


def test_without_bitsandbytes(tmp_path, teacher_dir, text_file, no_bitsandbytes) -> None:
    with pytest.raises(ModelError, match=r"'bitsandbytes'; pip install 'qat_lora\[bitsandbytes\]'"):
        commands.cache(cache_run(teacher_dir, text_file, tmp_path / "c", quantize_teacher="8bit"))


def test_a_device_that_bitsandbytes_does_not_know(tmp_path, teacher_dir, text_file, monkeypatch) -> None:
    library = types.ModuleType("bitsandbytes")
    library.supported_torch_devices = {"cuda", "xpu"}  # type: ignore[attr-defined]
    library.__spec__ = importlib.machinery.ModuleSpec("bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes", library)
    with pytest.raises(DeviceError, match="knows cuda, xpu but not cpu; use another --device"):
        commands.cache(cache_run(teacher_dir, text_file, tmp_path / "c", quantize_teacher="4bit"))


def test_weights_that_are_quantised_already(tmp_path, teacher_dir) -> None:
    config = json.loads((teacher_dir / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ModelError, match="quantised already .* cannot become 8bit; drop --quantize-teacher"):
        models.load(str(tmp_path), placement=dataclasses.replace(ON_CPU, quantization="8bit"))


@pytest.fixture
def rounded_teachers(monkeypatch) -> list[dict]:
    """bitsandbytes at transformers' boundary: a library that is there, and Linears that are rounded on loading."""
    import transformers

    library = types.ModuleType("bitsandbytes")
    library.supported_torch_devices = {"cpu"}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "bitsandbytes", library)
    asked: list[dict] = []
    load = transformers.AutoModelForCausalLM.from_pretrained

    def from_pretrained(folder, **words):
        config = words.pop("quantization_config", None)
        model, info = load(folder, **words)
        if config is not None:
            asked.append(config)
            with torch.no_grad():
                for layer in model.base_model.layers.modules():
                    if isinstance(layer, torch.nn.Linear):
                        step = layer.weight.abs().max() / (127 if config.get("load_in_8bit") else 7)
                        layer.weight.copy_((layer.weight / step).round() * step)
        return model, info

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    return asked


def check_that_quantisation_is_part_of_the_teacher(tmp_path: Path, teacher: Path, text: Path) -> None:
    """Caches of a teacher at three widths: another distribution each, a digest each, and all train its own student."""
    digests, stored = {}, {}
    for how in ("none", "8bit", "4bit"):
        folder = tmp_path / how
        commands.cache(cache_run(teacher, text, folder, max_rows=20, rows_per_shard=20, quantize_teacher=how))
        digests[how], stored[how] = (
            load_manifest(folder).teacher_digest,
            (folder / "shard-00000.safetensors").read_bytes(),
        )
    assert digests == {how: digests["none"] + ("" if how == "none" else f":{how}") for how in digests}
    assert len(set(stored.values())) == 3
    with pytest.raises(CacheMismatch, match="teacher_digest: there '.*:8bit', asked for '.*:4bit'"):
        commands.cache(
            cache_run(teacher, text, tmp_path / "8bit", max_rows=20, rows_per_shard=20, quantize_teacher="4bit")
        )
    result = run_qat(qat_run(tmp_path / "8bit", tmp_path / "run", loop={"max_steps": 2}), LocalRuntime("cpu"))
    assert result.state.step == 2
    other = qat_run(tmp_path / "4bit", tmp_path / "run", loop={"max_steps": 4})
    with pytest.raises(CheckpointError, match="trained on a cache with teacher_digest=.*:8bit, this one has .*:4bit"):
        run_qat(other, LocalRuntime("cpu"), launch="resume")


def test_quantisation_is_part_of_the_teacher(tmp_path, teacher_dir, text_file, rounded_teachers) -> None:
    check_that_quantisation_is_part_of_the_teacher(tmp_path, teacher_dir, text_file)
    assert [sorted(asked)[0] for asked in rounded_teachers[:2]] == ["load_in_8bit", "bnb_4bit_compute_dtype"]


def test_bitsandbytes_itself(tmp_path, text_file, caplog) -> None:
    pytest.importorskip("bitsandbytes")
    check_that_quantisation_is_part_of_the_teacher(tmp_path, models.resolve(models.EMBEDDED), text_file)
    assert "MatMul8bitLt" not in caplog.text


def test_shapes_that_bitsandbytes_has_no_product_for(tmp_path, teacher_dir, text_file, monkeypatch) -> None:
    """Its packed products on a CPU want outputs in groups of 32, and it says so by an assertion."""

    def check_head(model) -> None:
        raise AssertionError("N must be divisible by block_n")

    monkeypatch.setattr(loading, "check_head", check_head)
    loaded, run = models.load(str(teacher_dir)), cache_run(teacher_dir, text_file, tmp_path)
    with pytest.raises(AssertionError):
        commands._check_teacher(loaded, run, None)
    with pytest.raises(ModelError, match="cannot run Qwen3ForCausalLM in 4bit on cpu .AssertionError: N must .* width"):
        commands._check_teacher(loaded, run, dataclasses.replace(ON_CPU, quantization="4bit"))


def test_a_student_of_other_weights_than_the_quantised_teacher_is_refused(
    tmp_path, teacher_dir, other_teacher_dir, text_file, rounded_teachers
) -> None:
    commands.cache(cache_run(teacher_dir, text_file, tmp_path / "c", max_rows=20, quantize_teacher="8bit"))
    with pytest.raises(CacheMismatch, match="teacher_digest="):
        run_qat(qat_run(tmp_path / "c", tmp_path / "run", model=str(other_teacher_dir)), LocalRuntime("cpu"))


def test_what_a_manifest_says_of_the_teacher(tmp_path) -> None:
    assert places_of(torch.nn.Linear(1, 1)) == "all on one device"
    values = dict(tokenizer_digest="k", vocab_size=4, seq_len=2, top_k=1, rows=1, source="s", source_digest="d")
    plain, rounded = (CacheManifest(teacher="t", teacher_digest=d, **values) for d in ("abc", "abc:8bit"))
    assert (plain.teacher_weights, plain.teacher_quantization) == ("abc", "")
    assert (rounded.teacher_weights, rounded.teacher_quantization) == ("abc", "8bit")
