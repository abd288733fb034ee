"""Choosing a device, and the public words about devices, on a machine that has a CPU alone."""

from __future__ import annotations

import logging
import mmap

import pytest
import torch

import qat_lora
from qat_lora.config import PlaceConfig
from qat_lora.errors import DeviceError
from qat_lora.runtime import LocalRuntime, runtime_for
from qat_lora.runtime.local import process_memory

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
    assert "going on with the CPU" in caplog.text


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
