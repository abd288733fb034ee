"""Choosing a device, the public words about devices, and what each computes in, on a machine that has a CPU alone."""

from __future__ import annotations

import logging
import mmap

import pytest
import torch

import qat_lora
from qat_lora.config import PlaceConfig
from qat_lora.config.presets import scheme
from qat_lora.errors import DeviceError
from qat_lora.quant import CodedLinear, QuantLinear, freeze_codes, quantize_model
from qat_lora.runtime import LocalRuntime, runtime_for
from qat_lora.runtime.memory import process_memory
from qat_lora.runtime.precision import lower_frozen, precision_for

NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@pytest.fixture(autouse=True)
def _no_pjrt(monkeypatch) -> None:
    monkeypatch.delenv("PJRT_DEVICE", raising=False)


@NO_CUDA
def test_auto_takes_the_best_device_and_says_which_and_why(caplog) -> None:
    with caplog.at_level(logging.INFO):
        runtime = runtime_for(PlaceConfig())
    assert runtime.device.type == qat_lora.detect_device_type()
    assert f"device {runtime.device.type}" in caplog.text
    assert runtime.precision.reason in caplog.text


@NO_CUDA
def test_an_absent_device_is_an_error_that_says_why(caplog) -> None:
    with pytest.raises(DeviceError, match=r"--device cuda is not here: torch sees no CUDA device"):
        runtime_for(PlaceConfig(device="cuda"))
    with caplog.at_level(logging.WARNING):
        runtime = runtime_for(PlaceConfig(device="cuda", allow_fallback=True))
    assert runtime.device.type == "cpu"
    assert "continuing on the CPU" in caplog.text


def test_a_tpu_without_torch_xla_or_a_chip_is_an_error_that_says_how_to_get_one() -> None:
    if not qat_lora.is_tpu_available():
        with pytest.raises(DeviceError, match=r"--device tpu is not here: torch_xla (is not installed|finds no TPU)"):
            runtime_for(PlaceConfig(device="tpu"))


def test_several_processes_are_refused_rather_than_let_write_over_each_other(monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(DeviceError, match="WORLD_SIZE=4"):
        runtime_for(PlaceConfig(device="cpu"))


def test_the_public_words_are_harmless_where_the_hardware_is_absent() -> None:
    assert not qat_lora.is_xla_device("cpu")
    assert not qat_lora.is_xla_device(torch.device("cpu"))
    assert qat_lora.is_xla_device("xla:0")
    qat_lora.xla_mark_step()
    qat_lora.clear_memory()
    if not qat_lora.is_tpu_available():
        assert not qat_lora.enable_transparent_hugepages()
    use = qat_lora.log_memory_usage("test", "cpu")
    assert 0 < use.used_bytes <= use.peak_bytes < use.total_bytes


def test_memory_follows_what_is_allocated() -> None:
    before = process_memory()
    held = mmap.mmap(-1, 64 * 2**20)  # pages of its own: the allocator may hand out memory that is resident already
    held.write(bytes(range(256)) * (len(held) // 256))
    after = process_memory()
    assert after.used_bytes - before.used_bytes > 48 * 2**20
    held.close()
    assert process_memory().peak_bytes >= after.used_bytes - 2**20  # the kernel counts per thread, and adds up late


def test_bf16_is_autocast_and_leaves_weights_alone() -> None:
    runtime = LocalRuntime("cpu", dtype="bf16")
    linear = torch.nn.Linear(4, 4)
    with runtime.autocast():
        assert linear(torch.ones(1, 4)).dtype is torch.bfloat16
    assert linear.weight.dtype is torch.float32
    with LocalRuntime("cpu").autocast():
        assert linear(torch.ones(1, 4)).dtype is torch.float32


def test_saving_is_whole_or_not_at_all(tmp_path) -> None:
    runtime = LocalRuntime("cpu")
    runtime.save({"x": torch.ones(2)}, tmp_path / "deep" / "a.pt")
    with pytest.raises((TypeError, AttributeError, RuntimeError)):
        runtime.save({"x": lambda: None}, tmp_path / "deep" / "a.pt")
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["a.pt"]
    assert torch.equal(torch.load(tmp_path / "deep" / "a.pt", weights_only=True)["x"], torch.ones(2))


FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("device", "dtype", "compute", "frozen"),
    [
        ("cpu", "auto", FP32, FP32),
        ("cpu", "bf16", BF16, FP32),
        ("cuda", "auto", BF16, FP32),
        ("cuda", "fp32", FP32, FP32),
        ("mps", "auto", FP32, FP32),
        ("tpu", "auto", BF16, BF16),
        ("tpu", "fp32", FP32, FP32),
        ("xla", "auto", FP32, FP32),
        ("xla", "bf16", BF16, BF16),
    ],
)
def test_bf16_is_native_on_xla_alone_and_autocast_elsewhere(device, dtype, compute, frozen) -> None:
    found = precision_for(device, dtype)
    assert (found.compute, found.frozen) == (compute, frozen)
    assert found.reason == (f"--dtype {dtype}" if dtype != "auto" else found.reason)
    assert len(found.reason.split()) >= 2


class Block(torch.nn.Module):
    """As a decoder has it: plain parameters, buffers of every kind, a tie, quantised layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 64)
        self.head = torch.nn.Linear(64, 7, bias=False)
        self.head.weight = self.embed.weight
        self.up_proj = torch.nn.Linear(64, 64)
        self.down_proj = torch.nn.Linear(64, 64)
        self.register_buffer("inv_freq", torch.tensor([1.0, 1 / 3]))
        self.register_buffer("hidden", torch.tensor([1 / 3]), persistent=False)
        self.register_buffer("ids", torch.arange(3))
        self.codes = torch.nn.Parameter(torch.arange(3), requires_grad=False)
        self.lora_A = torch.nn.Linear(64, 2, bias=False)


TARGETS = {"up_proj": "mlp", "down_proj": "mlp"}


def test_only_frozen_floating_parameters_are_lowered() -> None:
    block = Block().requires_grad_(False)
    block.lora_A.weight.requires_grad_(True)
    lower_frozen(block, BF16)
    assert block.embed.weight.dtype is BF16 and block.up_proj.weight.dtype is BF16 and block.up_proj.bias.dtype is BF16
    assert block.lora_A.weight.dtype is FP32 and block.codes.dtype is torch.int64
    assert (block.inv_freq.dtype, block.hidden.dtype, block.ids.dtype) == (FP32, FP32, torch.int64)
    assert torch.equal(block.inv_freq, torch.tensor([1.0, 1 / 3]))
    assert block.head.weight is block.embed.weight


@pytest.mark.parametrize("preset", ["q2_g32", "q2a4", "q4_r32"])
@pytest.mark.parametrize("trained", [True, False])
def test_quantised_layers_keep_their_masters_scales_and_codes_whatever_is_trained(preset, trained) -> None:
    block = Block()
    quantize_model(block, scheme(preset), TARGETS, search=True)
    block.requires_grad_(False)
    for layer in block.modules():
        if isinstance(layer, QuantLinear):
            layer.requires_grad_(trained)
    before = {name: x.clone() for name, x in block.up_proj.state_dict(keep_vars=False).items()}
    lower_frozen(block, BF16)
    assert isinstance(block.up_proj, QuantLinear)
    for name, x in block.up_proj.state_dict().items():
        assert x.dtype is before[name].dtype is FP32 and torch.equal(x, before[name]), name
    assert block.embed.weight.dtype is BF16
    freeze_codes(block)
    assert isinstance(block.up_proj, CodedLinear)
    before = {name: x.clone() for name, x in block.up_proj.named_buffers()}
    lower_frozen(block, BF16)
    for name, x in block.up_proj.named_buffers():
        assert x.dtype is before[name].dtype and torch.equal(x, before[name]), name
    assert block.up_proj.packed_OP.dtype is torch.uint8


def test_float32_lowers_nothing() -> None:
    block = Block().requires_grad_(False).double()
    lower_frozen(block, FP32)
    assert block.embed.weight.dtype is torch.float64


def test_a_local_device_compiles_nothing_and_calls_at_once() -> None:
    runtime = LocalRuntime("cpu")
    calls: list[float] = []
    runtime.log_later(calls.append, torch.tensor(0.25))
    assert calls == [0.25]
    assert (list(runtime.compilations()), runtime.metrics()) == ([], {})
    assert not runtime.static_graph
