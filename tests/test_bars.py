"""The project's bars on the embedded teacher, at full length: `make proof`. Both demos train on one cache."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable

import pytest

from qat_lora.cli import commands
from qat_lora.cli.demo import demo
from qat_lora.config.cache import CacheRun

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list]:
    """(preset) -> the rows of a demo's table, whose cache is built by the first and copied by the others."""
    folder, build, made = tmp_path_factory.mktemp("bars"), commands.cache, []

    def cache(run: CacheRun) -> None:
        if not made:
            build(run)
            made.append(run.output)
        else:
            shutil.copytree(made[0], run.output)

    def rows(preset: str) -> list:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(commands, "cache", cache)
            return demo(folder / preset, preset=preset, device="cpu")

    return rows


def test_two_bits_qat_halves_the_kl_and_recovery_takes_another_15_percent(demos) -> None:
    started = time.perf_counter()
    teacher, rtn, qat, recovered, exported = demos("q2_g32")
    print(
        f"q2_g32: rtn {rtn.kl:.4f} qat {qat.kl:.4f} recovered {recovered.kl:.4f}, {time.perf_counter() - started:.0f} s"
    )
    assert qat.kl <= 0.5 * rtn.kl
    assert recovered.kl <= 0.85 * qat.kl
    assert exported.kl == recovered.kl
    assert teacher.perplexity < recovered.perplexity < qat.perplexity < rtn.perplexity


def test_four_bits_no_stage_ends_worse_than_it_began(demos) -> None:
    _, rtn, qat, recovered, _ = demos("q4_g32")
    print(f"q4_g32: rtn {rtn.kl:.5f} qat {qat.kl:.5f} recovered {recovered.kl:.5f}")
    assert qat.kl <= rtn.kl
    assert recovered.kl <= qat.kl
