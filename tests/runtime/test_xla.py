"""The XLA runtime on torch_xla's CPU device: the same run as on the CPU. Needs torch_xla: `make test-xla`."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.xla,
    pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="torch_xla is not installed"),
]

PROGRAM = """
import sys, torch
from pathlib import Path
from qat_lora.config import PlaceConfig
from qat_lora.runtime import runtime_for
from qat_lora.train.run import run_qat, run_recovery
from tests.conftest import qat_run, recovery_run

cache, folder = Path(sys.argv[1]), Path(sys.argv[2])
last = {}
# XLA first: autograd counts its devices once, at its first backward
runtimes = {device: runtime_for(PlaceConfig(device=device, dtype="fp32")) for device in ("tpu", "cpu")}
for device, runtime in runtimes.items():
    qat = run_qat(qat_run(cache, folder / device / "qat"), runtime)
    recovered = run_recovery(recovery_run(cache, folder / device / "rec", qat.best), runtime)
    model = recovered.state.model
    base = model.get_base_model()
    assert base.lm_head.weight is base.model.embed_tokens.weight, "untied on " + device
    last[device] = (qat.state.last_kl, recovered.state.last_kl)
    print(device, last[device], recovered.state.model.device)
for ours, theirs in zip(*last.values()):
    assert abs(ours - theirs) <= 2e-3 * ours, last
"""


def test_qat_and_recovery_end_where_they_end_on_the_cpu(tmp_path, cache_dir) -> None:
    """In a process of its own: torch_xla takes its device once, from the environment.

    Tolerance 0.2%: six steps of Adam turn rounding of other kernels into other codes here and there.
    """
    import os

    environment = os.environ | {"PJRT_DEVICE": "CPU", "PYTHONPATH": "."}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(cache_dir), str(tmp_path)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-3000:]
    assert "xla:0" in done.stdout
