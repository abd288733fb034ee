"""What each of several ranks reads (see `tests.runtime.forked`).

After every batch the ranks meet, and tell each other which number it has: a rank with fewer or other batches is told
within the barrier's seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from qat_lora.cache import KDCacheDataset
from qat_lora.config import PlaceConfig
from qat_lora.runtime import Runtime, runtime_for

PATIENCE = 10  # seconds
SEED = 3  # of the row order
Rows = list[list[int]]  # rows as their token ids; [] where the length is 0


@dataclass(frozen=True)
class Case:
    """A cache, rows per batch of one rank, and how many rows of the stream all ranks together have read before."""

    cache: str
    batch_size: int
    rows_before: int = 0
    preload: bool = False


def read(runtime: Runtime, case: Case) -> dict[str, Any]:
    """Two epochs of the stream, laid end to end, and an evaluation, as this rank sees them: batches of rows."""
    dataset = KDCacheDataset(
        case.cache, rank=runtime.rank, world_size=runtime.world_size, preload=case.preload, seed=SEED
    )
    together = case.batch_size * runtime.world_size
    assert case.rows_before % together == 0
    batches = -(-2 * len(dataset) // together)
    stream = dataset.batches(case.batch_size, position=case.rows_before // together)
    return {
        "stream": _together(runtime, itertools.islice(stream, batches), f"stream {case}"),
        "evaluation": _together(runtime, dataset.eval_batches(case.batch_size), f"evaluation {case}"),
    }


def _together(runtime: Runtime, batches: Iterable[dict[str, torch.Tensor]], tag: str) -> list[Rows]:
    """The rows of every batch; all ranks must come to the sum after each of them, and to the end after the last."""
    found: list[Rows] = []
    for number, batch in enumerate(batches):
        runtime.barrier(f"{tag}, batch {number}")
        total = runtime.all_reduce_sum(torch.tensor([number, 1]))
        assert total.tolist() == [number * runtime.world_size, runtime.world_size]
        ids, lengths = batch["input_ids"].tolist(), batch["length"].tolist()
        found.append([row if length else [] for row, length in zip(ids, lengths, strict=True)])
    runtime.barrier(f"{tag}, the end after {len(found)} batches")
    return found


def read_all(folder: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every case, one after the other."""
    runtime = runtime_for(PlaceConfig(device="cpu", barrier_timeout=PATIENCE), many=True)
    return [read(runtime, Case(**case)) for case in cases]
