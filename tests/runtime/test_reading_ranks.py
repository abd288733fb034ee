"""Reading over real ranks: one stream, taken in turn, whatever the number of shards and rows.

`tests/cache/test_reader.py` does the same with readers of one process; here ranks would wait for each other for ever.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import asdict
from pathlib import Path

import pytest

from qat_lora.cache import KDCacheDataset
from qat_lora.cli import commands
from tests.conftest import cache_run
from tests.runtime.reading_ranks import SEED, Case, Rows
from tests.runtime.test_distributed import on_ranks

pytestmark = pytest.mark.ranks
ROWS_PER_STEP = 8
# name -> (rows, rows per shard): 37 divides by no number of ranks and rows; 5 and 3 are fewer than a batch of two ranks
SHAPES = {"1 shard": (37, 37), "3 shards": (37, 13), "5 shards": (37, 8), "few rows": (5, 2), "fewest rows": (3, 1)}


@pytest.fixture(scope="module")
def caches(tmp_path_factory, teacher_dir, text_file) -> dict[str, Path]:
    """Caches of rows that are all different."""
    folder, words = tmp_path_factory.mktemp("reading"), text_file.read_text().split()
    source = random.Random(0)
    (folder / "text.txt").write_text("\n".join(" ".join(source.choices(words, k=12)) for _ in range(200)))
    for name, (rows, rows_per_shard) in SHAPES.items():
        run = cache_run(
            teacher_dir, folder / "text.txt", folder / name, max_rows=rows, rows_per_shard=rows_per_shard, top_k=1
        )
        index = commands.cache(run)
        assert (index.rows, len(index.shards)) == (rows, -(-rows // rows_per_shard))
        assert len({tuple(row) for row in rows_of(folder / name)}) == rows
    return {name: folder / name for name in SHAPES}


def rows_of(cache: Path) -> Rows:
    dataset = KDCacheDataset(cache)
    return [dataset[row]["input_ids"].tolist() for row in range(len(dataset))]


def stream_of(cache: Path, first: int, rows: int) -> Rows:
    """What a reader that is alone reads, row by row."""
    batches = KDCacheDataset(cache, seed=SEED).batches(1, position=first)
    return [batch["input_ids"][0].tolist() for batch in itertools.islice(batches, rows)]


def in_turn(per_rank: list[list[Rows]], batch_size: int) -> Rows:
    """Rows of all ranks in the order of the stream: a batch of each, then the next of each."""
    assert len({len(batches) for batches in per_rank}) == 1, "as many batches on every rank"
    assert {len(batch) for batches in per_rank for batch in batches} == {batch_size}, "of one size"
    return [row for turn in zip(*per_rank, strict=True) for batch in turn for row in batch]


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_read_one_stream_in_turn_and_end_together(tmp_path, caches, world_size) -> None:
    """Two epochs and an evaluation of every cache, and the stream of one taken up after each of its steps."""
    cases = [Case(str(cache), 4, preload=preload) for cache in caches.values() for preload in (False, True)]
    taken_up = range(0, 2 * 37, ROWS_PER_STEP)
    cases += [Case(str(caches["5 shards"]), ROWS_PER_STEP // world_size, before) for before in taken_up]
    found = on_ranks(world_size, tmp_path, "tests.runtime.reading_ranks:read_all", [asdict(case) for case in cases])
    for case, *per_rank in zip(cases, *found, strict=True):
        everything = rows_of(Path(case.cache))
        stream = in_turn([found["stream"] for found in per_rank], case.batch_size)
        rows = len(everything)
        assert len(stream) >= 2 * rows
        assert stream == stream_of(Path(case.cache), case.rows_before, len(stream)), case
        if not case.rows_before:
            for epoch in (stream[:rows], stream[rows : 2 * rows]):
                assert sorted(epoch) == sorted(everything), "every row once"
            assert stream[:rows] != stream[rows : 2 * rows]
        evaluation = in_turn([found["evaluation"] for found in per_rank], case.batch_size)
        assert [row for row in evaluation if row] == everything
        assert len(evaluation) < rows + world_size * case.batch_size, "no batch of nothing on all ranks"
