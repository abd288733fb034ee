"""Devices that are not here, by the fakes of `tests.devices`: CUDA's index, its clock and its waits, MPS's copies."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from qat_lora.config import KDConfig, PlaceConfig
from qat_lora.runtime import LocalRuntime, runtime_for
from qat_lora.train import loop
from qat_lora.train.run import run_qat, run_recovery
from tests.conftest import VOCAB, cache_run, qat_run, recovery_run
from tests.devices import CUDA, FakeCuda, LosingSource

KD = KDConfig(hard_weight=0.2, hard_anneal="linear", ce_alpha=0.1, anchor_kl_weight=0.5, anchor_samples=6)


@pytest.fixture
def cuda():
    with FakeCuda() as device:
        yield device


@pytest.fixture(scope="module")
def packed_cache(tmp_path_factory, teacher_dir, text_file) -> Path:
    """Rows of several documents each."""
    from qat_lora.cli import commands

    folder = tmp_path_factory.mktemp("packed") / "cache"
    commands.cache(cache_run(teacher_dir, text_file, folder, packing="documents", top_k=VOCAB, logprob_bits=32))
    return folder


def test_the_fake_is_like_cuda(cuda) -> None:
    """What the tests below lean on: places, and what is counted."""
    with pytest.raises(ValueError, match="specified index"):
        torch.cuda.set_device(torch.device("cuda"))
    x = torch.zeros(3, device=CUDA)
    assert x.device == CUDA and (x + 1).is_cuda and torch.ones(3).device.type == "cpu"
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3)
    assert cuda.syncs == []
    torch.ones(3).pin_memory().to(CUDA, non_blocking=True)
    assert cuda.syncs == [], "from pinned memory nobody waits"
    reads = [
        lambda: torch.ones(3).to(CUDA),
        lambda: torch.ones(3).to(CUDA, non_blocking=True),
        lambda: torch.tensor([1.0], device=CUDA),
        lambda: x.sum().item(),
        lambda: bool((x == 0).all()),
        lambda: x.cpu(),
        lambda: x.tolist(),
        lambda: x.nonzero(),
        lambda: x[x > 0],
        lambda: torch.ones(3).copy_(x),
    ]
    for number, read in enumerate(reads, start=1):
        read()
        assert len(cuda.syncs) == number, cuda.syncs


def test_a_gpu_has_its_number(cuda) -> None:
    runtime = runtime_for(PlaceConfig(device="cuda"))
    assert runtime.device == CUDA
    (batch,) = runtime.wrap_loader(iter([{"x": torch.arange(3)}]))
    assert batch["x"].device == CUDA and cuda.syncs == []


@pytest.fixture
def waits(monkeypatch, cuda) -> list[list[str]]:
    """Of each training step the lines at which the host waited for the device."""
    step, found = loop.train_step, []

    def counted(*args):
        before = len(cuda.syncs)
        info = step(*args)
        found.append(cuda.syncs[before:])
        return info

    monkeypatch.setattr(loop, "train_step", counted)
    return found


def test_no_step_of_qat_or_recovery_waits_for_the_gpu(waits, cuda, cache_dir, tmp_path) -> None:
    """Whole runs on the device, with every term of the loss; the numbers are those of the CPU."""
    settings = {"loop": {"max_steps": 2, "accumulation_steps": 2}, "kd": KD}
    runtime = LocalRuntime("cuda", dtype="fp32")
    qat = run_qat(qat_run(cache_dir, tmp_path / "qat", **settings), runtime)
    recovered = run_recovery(recovery_run(cache_dir, tmp_path / "rec", qat.best, **settings), runtime)
    assert waits == [[]] * 4
    assert cuda.syncs, "checkpoints are read"
    plain = run_qat(qat_run(cache_dir, tmp_path / "cpu", **settings), LocalRuntime("cpu"))
    assert qat.state.last_kl == pytest.approx(plain.state.last_kl, rel=1e-5)
    assert recovered.state.last_kl < recovered.state.first_kl


def test_a_step_in_bf16_on_rows_of_several_documents_does_not_wait_either(waits, packed_cache, tmp_path) -> None:
    run_qat(qat_run(packed_cache, tmp_path, loop={"max_steps": 1}), LocalRuntime("cuda"))
    assert waits == [[]]


def test_synchronize_waits_until_the_gpu_has_done_its_work(cuda) -> None:
    runtime = LocalRuntime("cuda")
    started = time.perf_counter()
    cuda.does(0.1)
    assert time.perf_counter() - started < 0.05
    runtime.synchronize()
    assert time.perf_counter() - started >= 0.1


def test_only_pinned_memory_is_copied_without_waiting() -> None:
    """On an Apple GPU a copy from pageable memory that is not waited for reads what is there later: pytorch #139550."""
    runtime = LocalRuntime("cpu")
    with LosingSource():
        given = torch.arange(5.0)
        moved = runtime.to_device({"x": given})["x"]
        assert moved.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
        assert torch.arange(5.0).to("cpu", non_blocking=True).isnan().all(), "the fake loses it"
