"""What a TPU cannot compile does not land: libtpu compiles every kind of step for v6e. `make test-tpu` runs it.

Small shapes, so a minute in all; the tables of Qwen3-0.6B in docs/TPU.md come from the same code.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMPILER = Path(os.environ.get("QAT_LORA_TPU_PYTHON", ROOT / ".venv-tpu" / "bin" / "python"))
pytestmark = [
    pytest.mark.tpu_compiler,
    pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="torch_xla is not installed"),
    pytest.mark.skipif(not COMPILER.exists(), reason=f"{COMPILER} is missing; run make test-tpu"),
]


@pytest.fixture(scope="module")
def small_model(tmp_path_factory) -> Path:
    from transformers import Qwen3Config

    folder = tmp_path_factory.mktemp("small")
    Qwen3Config(
        vocab_size=32003, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, intermediate_size=256, tie_word_embeddings=True,
    ).save_pretrained(folder)  # fmt: skip
    return folder


def compile_steps(model: Path, *arguments: str) -> list[str]:
    """Lines of the report; a step that does not compile, or does not fit, is an exit code."""
    script = str(ROOT / "benchmarks" / "tpu_compile.py")
    shape = ["--batch-size", "2", "--seq-len", "256", "--top-k", "32", "--no-cost", "--model", str(model)]
    environment = os.environ | {"PJRT_DEVICE": "CPU", "QAT_LORA_TPU_PYTHON": str(COMPILER)}
    done = subprocess.run(
        [sys.executable, script, *shape, *arguments], env=environment, capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if ": fits, peak" in line]
    assert lines, done.stdout
    return lines


def test_recovery_and_qat_compile_in_every_form(small_model) -> None:
    presets = ["q4_g32", "q4_r32", "q2_g32"]
    assert len(compile_steps(small_model, "--stage", "recovery", "qat", "--preset", *presets)) == 6


@pytest.mark.parametrize("sync", ["step", "optimizer"])
def test_each_way_to_cut_the_graph_compiles(small_model, sync) -> None:
    arguments = ["--stage", "recovery", "--sync", sync, "--accumulation-steps", "2"]
    assert len(compile_steps(small_model, *arguments, "--gradient-checkpointing", "on", "off")) == 2


def test_scanned_layers_compile(small_model) -> None:
    assert len(compile_steps(small_model, "--stage", "recovery", "qat", "--scan-layers", "on")) == 2


def test_evaluation_fidelity_and_cache_building_compile(small_model) -> None:
    assert len(compile_steps(small_model, "--stage", "eval", "fidelity", "cache")) == 3


def test_rows_of_several_documents_compile_in_every_form(small_model) -> None:
    stages = ["recovery", "eval", "cache"]
    assert len(compile_steps(small_model, "--packing", "documents", "--stage", *stages)) == 3
    assert len(compile_steps(small_model, "--packing", "documents", "--stage", "qat", "--scan-layers", "on")) == 1


def test_a_program_that_does_not_fit_is_an_exit_code(small_model) -> None:
    """The watch itself: 4,096 rows of 4,096 tokens with kept activations fit into no chip."""
    with pytest.raises(AssertionError, match=r"does not compile|DOES NOT FIT"):
        arguments = ["--stage", "recovery", "--gradient-checkpointing", "off", "--seq-len", "4096"]
        compile_steps(small_model, *arguments, "--batch-size", "4096")
