"""Training against each kind of store: what it learns from, and what it cannot be asked for."""

from __future__ import annotations

import pytest

from qat_lora.cache import KDCacheDataset
from qat_lora.cli import commands
from qat_lora.config import KDConfig
from qat_lora.errors import CacheMismatch, ConfigError
from qat_lora.runtime import LocalRuntime
from qat_lora.train.run import run_qat
from tests.conftest import VOCAB, cache_run, qat_run


@pytest.fixture(scope="module")
def caches(teacher_dir, text_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    for name, settings in {
        "full": {"store": "full"},
        "topk": {"top_k": VOCAB, "logprob_bits": 32},
        "tail draws": {"top_k": 12, "logprob_bits": 32, "tail_draws": 200, "temperatures": (1.0, 2.0)},
        "sampled": {"store": "sampled", "samples": 400},
        "sampled at 2": {"store": "sampled", "samples": 400, "proposal_temperature": 2.0},
    }.items():
        commands.cache(cache_run(teacher_dir, text_file, folder / name, **settings))
    return folder


def losses(caches, name, folder, **changes):
    run = qat_run(caches / name, folder / name, loop={"max_steps": 5, "log_every": 1}, **changes)
    rows = run_qat(run, LocalRuntime("cpu")).losses.rows
    return [row["loss"] for row in rows if row["loss"] == row["loss"]], [
        row["eval_kl"] for row in rows if row["eval_kl"] == row["eval_kl"]
    ]


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_every_store_trains_alike(caches, tmp_path, temperature) -> None:
    """Full logits and all candidates are the same loss; 400 draws come near, where they are from the teacher itself."""
    kd = KDConfig(temperature=temperature)
    drawn = "sampled" if temperature == 1.0 else "sampled at 2"
    found = {name: losses(caches, name, tmp_path, kd=kd) for name in ("full", "topk", drawn, "tail draws")}
    for ours, theirs in zip(found["full"], found["topk"], strict=True):
        assert len(ours) >= 2 and ours == pytest.approx(theirs, rel=2e-5)
    for name in (drawn, "tail draws")[: 2 if temperature == 1.0 else 1]:  # at 2, ratios make draws scatter
        ours, theirs = found["full"][0], found[name][0]
        assert ours == pytest.approx(theirs, rel=0.1) and ours != pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize(
    ("kd", "error", "words"),
    [
        (KDConfig(hard_weight=0.5), ConfigError, "hard_weight=0.5 needs the teacher's most probable token"),
        (KDConfig(support="candidates"), ConfigError, "support='candidates' needs"),
        (KDConfig(top_k=5), CacheMismatch, "store='sampled', which has no candidates"),
        (KDConfig(temperature=3.0), CacheMismatch, "temperature=3.0"),
    ],
)
def test_what_draws_cannot_tell_is_refused_before_the_first_step(caches, tmp_path, kd, error, words) -> None:
    with pytest.raises(error) as caught:
        run_qat(qat_run(caches / "sampled", tmp_path, kd=kd), LocalRuntime("cpu"))
    assert words in str(caught.value)


def test_anchor_rows_of_a_cache_without_candidates(caches, tmp_path) -> None:
    kd = KDConfig(anchor_kl_weight=0.5, anchor_samples=4, ce_alpha=0.2)
    trained, held_out = losses(caches, "sampled", tmp_path, kd=kd)
    assert len(trained) >= 2 and held_out[-1] < held_out[0]
    assert KDCacheDataset(caches / "sampled").manifest.contents == "400 draws"
