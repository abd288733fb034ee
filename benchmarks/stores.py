"""What a cache's store costs the student: held-out KL at equal steps, beside bytes per token on disk.

    python benchmarks/stores.py [--steps 350] [--rows 4096] [--seeds 1] [--only NAME ...] [--json PATH]

Each store caches the same rows of the embedded teacher, and the demo's 2-bit student is trained on each with the same
seeds, row order and settings. Then each student's logits are compared with the live teacher's, over the whole
vocabulary, on held-out text. Baseline: all logits. Bytes are those of the folder, all included.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qat_lora import models
from qat_lora.cache import summarise
from qat_lora.cli import commands
from qat_lora.cli.demo import CACHE_ROWS, EVAL_ROWS, QAT_STEPS, SEQ_LEN
from qat_lora.cli.evaluation import measure_rows
from qat_lora.config import EvalRun, KDConfig, LoopConfig, presets
from qat_lora.config.cache import CacheRun
from qat_lora.runtime import LocalRuntime
from qat_lora.train.student import load_student

PRESET = "q2_g32"


@dataclass(frozen=True)
class Case:
    """One way to keep a distribution, and the loss that goes with it."""

    name: str
    store: dict[str, Any]
    kd: KDConfig = field(default_factory=KDConfig)


CASES = (
    Case("full logits", {"store": "full"}),
    *(
        Case(f"top {k}, renormalised", {"top_k": k, "logprob_bits": 5}, KDConfig(support="candidates"))
        for k in (12, 48)
    ),
    *(Case(f"top {k} + tail", {"top_k": k, "logprob_bits": 5}) for k in (12, 48)),
    Case("top 58 + tail, 4 bits", {"top_k": 58, "logprob_bits": 4}),
    Case("top 58 + 16 draws of the tail, 4 bits", {"top_k": 58, "logprob_bits": 4, "tail_draws": 16}),
    *(Case(f"{n} draws", {"store": "sampled", "samples": n}) for n in (16, 32, 44, 50)),
)


def measured(case: Case, folder: Path, *, steps: int, rows: int, seeds: int) -> dict[str, Any]:
    """Build, train and compare; the cache is removed at the end."""
    cache = folder / "cache"
    commands.cache(CacheRun(data="embedded:train", output=cache, seq_len=SEQ_LEN, max_rows=rows, **case.store))
    summary = summarise(cache)
    on_disk = sum(path.stat().st_size for path in cache.iterdir())
    kls, started = [], time.perf_counter()
    for seed in range(seeds):
        loop = LoopConfig(
            max_steps=steps, save_every=0, eval_every=0, preload=case.store.get("store") != "full", seed=seed
        )
        run = presets.qat_run(PRESET, cache_dir=cache, output=folder / f"qat-{seed}", loop=loop)
        best = commands.qat(dataclasses.replace(run, kd=case.kd)).best
        kls.append(held_out_kl(best))
    seconds = time.perf_counter() - started
    shutil.rmtree(folder)
    return {
        "name": case.name, "bytes_per_token": on_disk / summary.tokens, "kl": kls, "kept_mass": summary.kept_mass,
        "seconds": seconds,
    }  # fmt: skip


def held_out_kl(student: Path) -> float:
    """KL(teacher || student) in nats per token over the whole vocabulary, on the demo's held-out text."""
    loaded = models.load(models.EMBEDDED)
    teacher = models.load(models.EMBEDDED)
    run = EvalRun(model=models.EMBEDDED, data="embedded:eval", seq_len=SEQ_LEN, max_rows=EVAL_ROWS)
    model, _ = load_student(loaded, student)
    return measure_rows(run, LocalRuntime("cpu"), model, teacher, loaded)[-1].kl


def table(results: list[dict[str, Any]]) -> str:
    """The rows of docs/benchmarks."""
    base = statistics.mean(results[0]["kl"])
    lines = ["| store | bytes per token | kept mass | held-out KL | to full logits |", "|---|---|---|---|---|"]
    for row in results:
        kl = statistics.mean(row["kl"])
        lines.append(
            f"| {row['name']} | {row['bytes_per_token']:,.1f} | {row['kept_mass']:.4f} | {kl:.5f} "
            f"| {kl / base - 1:+.2%} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=QAT_STEPS, help="of training, for each store")
    parser.add_argument("--rows", type=int, default=CACHE_ROWS, help="of each cache; full logits take 2 MB each")
    parser.add_argument("--seeds", type=int, default=1, help="of training, averaged")
    parser.add_argument("--only", nargs="+", default=[], help="names of stores; full logits come first in any case")
    parser.add_argument("--json", type=Path, help="write the numbers here, too")
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    for case in CASES:
        if args.only and case is not CASES[0] and case.name not in args.only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            results.append(measured(case, Path(folder) / "case", steps=args.steps, rows=args.rows, seeds=args.seeds))
        print(table(results), flush=True)
        if args.json:
            args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
