"""What the tests of several ranks and devices begin from, and what one CPU makes of the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qat_lora.runtime import LocalRuntime
from qat_lora.train.run import run_qat, run_recovery
from tests.conftest import qat_run
from tests.runtime import ranks


@pytest.fixture(scope="session")
def student(cache_dir, tmp_path_factory) -> Path:
    """Some steps of QAT on the shared cache. A module with a cache of its own has a student of its own."""
    folder = tmp_path_factory.mktemp("student")
    return run_qat(qat_run(cache_dir, folder, loop={"max_steps": 3}), LocalRuntime("cpu")).best


@pytest.fixture(scope="session")
def alone(cache_dir, tmp_path_factory, student) -> dict[str, dict[str, Any]]:
    """What one device makes of the whole batch, by stage."""
    runtime = LocalRuntime("cpu")
    found = {}
    for stage, function in (("qat", run_qat), ("recover", run_recovery)):
        run = ranks.settings(stage, cache_dir, tmp_path_factory.mktemp(stage), student, 1)
        found[stage] = ranks.outcome(function(run, runtime), runtime)
    return found
