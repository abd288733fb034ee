"""The project's bars on the embedded teacher, at full length: `make proof`."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from qat_lora.cli.demo import demo

pytestmark = pytest.mark.slow


def test_two_bits_qat_halves_the_kl_and_recovery_takes_another_15_percent(tmp_path: Path) -> None:
    started = time.perf_counter()
    teacher, rtn, qat, recovered, exported = demo(tmp_path / "demo", preset="q2_g32", device="cpu")
    print(
        f"q2_g32: rtn {rtn.kl:.4f} qat {qat.kl:.4f} recovered {recovered.kl:.4f}, {time.perf_counter() - started:.0f} s"
    )
    assert qat.kl <= 0.5 * rtn.kl
    assert recovered.kl <= 0.85 * qat.kl
    assert exported.kl == recovered.kl
    assert teacher.perplexity < recovered.perplexity < qat.perplexity < rtn.perplexity


def test_four_bits_no_stage_ends_worse_than_it_began(tmp_path: Path) -> None:
    _, rtn, qat, recovered, _ = demo(tmp_path / "demo", preset="q4_g32", device="cpu")
    print(f"q4_g32: rtn {rtn.kl:.5f} qat {qat.kl:.5f} recovered {recovered.kl:.5f}")
    assert qat.kl <= rtn.kl
    assert recovered.kl <= qat.kl
