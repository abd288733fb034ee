"""Small teachers and caches for the tests of this folder."""

from __future__ import annotations

import dataclasses
import functools
import json

import numpy as np
import pytest
import torch

from qat_lora.cache import CacheManifest, CacheWriter, build_cache, row_keys, source_digest, token_arrays
from qat_lora.cache.manifest import sealed
from qat_lora.kd import Head
from tests.cache.blocks import Blocks

VOCAB, HIDDEN, SEQ_LEN = 29, 6, 5


class TinyTeacher:
    """A function from token ids to hidden states that looks at the current and the first token."""

    def __init__(self, vocab_size=VOCAB, seed=0):
        source = torch.Generator().manual_seed(seed)
        self.embedding_VH = torch.randn(vocab_size, HIDDEN, generator=source)
        self.head = Head(torch.randn(vocab_size, HIDDEN, generator=source))
        self.shapes = []

    def __call__(self, input_ids_BT):
        self.shapes.append(tuple(input_ids_BT.shape))
        hidden = self.embedding_VH[input_ids_BT]
        return hidden + 0.5 * hidden[:, :1]


def blocks_of(rows, *, seq_len=SEQ_LEN, vocab_size=VOCAB, last_length=None, seed=1):
    ids = np.random.RandomState(seed).randint(0, vocab_size, (rows, seq_len)).astype(np.int32)
    lengths = np.full(rows, seq_len, np.int32)
    if last_length is not None:
        lengths[-1] = last_length
    return Blocks(torch.from_numpy(ids), torch.from_numpy(lengths))


def manifest_of(blocks, **changes):
    rows, seq_len = blocks.input_ids_RT.shape
    values = dict(
        teacher="tiny",
        teacher_digest="t" * 64,
        tokenizer_digest="k" * 64,
        vocab_size=VOCAB,
        seq_len=seq_len,
        top_k=4,
        rows=rows,
        source="made up",
        temperatures=(1.0, 2.0),
        logprob_bits=32,
        rows_per_shard=3,
    )
    manifest = CacheManifest(**{"source_digest": "", **values, **changes})
    if "source_digest" in changes:
        return manifest
    keys = row_keys(token_arrays(blocks, manifest))
    return dataclasses.replace(manifest, source_digest=source_digest(keys, seq_len))


def build(directory, rows=7, *, blocks=None, teacher=None, progress=None, batch_size=2, last_length=3, **changes):
    """Build a whole cache and return the teacher."""
    blocks = blocks or blocks_of(rows, last_length=last_length)
    teacher = teacher or TinyTeacher()
    writer = CacheWriter(directory, manifest_of(blocks, **changes))
    build_cache(teacher, teacher.head, blocks, writer, batch_size=batch_size, chunk_tokens=4, progress=progress)
    writer.finish()
    return teacher


def edit_record(path, **changes):
    """Change or, with None, remove fields of a record file, with a digest that fits."""
    data = {**json.loads(path.read_text()), **changes}
    path.write_bytes(sealed({k: v for k, v in data.items() if k != "digest" and v is not None}))


@pytest.fixture(scope="session")
def cache_of(tmp_path_factory):
    """(rows) -> a finished cache of so many rows that no test may change."""

    @functools.cache
    def make(rows):
        directory = tmp_path_factory.mktemp(f"cache_of_{rows}")
        build(directory, rows=rows, top_k=1)
        return directory

    return make


@pytest.fixture
def cache(tmp_path):
    """A finished cache of 7 rows in shards of 3, the last row 3 tokens long."""
    build(tmp_path / "cache")
    return tmp_path / "cache"
