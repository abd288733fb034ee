"""The one reader: the stream of rows, the split, and every way in which a cache can be wrong."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import os
import pickle
import shutil
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from qat_lora.cache import KDCacheDataset, load_cache, load_manifest, verify
from qat_lora.cache import shards as shards_module
from qat_lora.cache.codec import decoded, encoded
from qat_lora.cache.codec import rows_of as rows_of_shard
from qat_lora.cache.index import SUMS, read_header, shard_file
from qat_lora.cache.manifest import SCHEMA
from qat_lora.errors import CacheError, CacheMismatch, ConfigError
from qat_lora.kd import position_mask
from tests.cache.conftest import SEQ_LEN, VOCAB, TinyTeacher, blocks_of, build, edit_record


def take(iterator, n):
    return list(itertools.islice(iterator, n))


def rows_of(batches):
    """Each row as its token ids, which are distinct in the caches made here."""
    return [tuple(row) for batch in batches for row in batch["input_ids"].tolist()]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [7, 11, 12])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_no_row_is_lost_or_repeated_within_an_epoch_over_all_ranks(cache_of, world_size, rows, batch_size):
    readers = [KDCacheDataset(cache_of(rows), rank=r, world_size=world_size, seed=3) for r in range(world_size)]
    micro_batches = -(-3 * rows // (world_size * batch_size))
    streams = [take(reader.batches(batch_size), micro_batches) for reader in readers]
    assert {b["input_ids"].shape for stream in streams for b in stream} == {(batch_size, SEQ_LEN)}
    joined = rows_of(stream[m] for m in range(micro_batches) for stream in streams)
    everything = set(rows_of(readers[0].eval_batches(1))) if world_size == 1 else None
    epochs = [joined[e * rows : (e + 1) * rows] for e in range(3)]
    for epoch in epochs:
        assert len(set(epoch)) == rows
        assert everything is None or set(epoch) == everything
    assert len({tuple(epoch) for epoch in epochs}) == 3, "each epoch has an order of its own"


def test_the_stream_depends_on_the_global_batch_and_not_on_how_ranks_share_it(tmp_path):
    build(tmp_path, rows=11)
    alone = rows_of(take(KDCacheDataset(tmp_path).batches(12), 4))
    for world_size in (2, 3, 4):
        readers = [KDCacheDataset(tmp_path, rank=r, world_size=world_size) for r in range(world_size)]
        streams = [take(reader.batches(12 // world_size), 4) for reader in readers]
        assert rows_of(stream[m] for m in range(4) for stream in streams) == alone


@pytest.mark.parametrize("position", [0, 1, 3, 10])
def test_a_stream_resumed_at_a_position_is_the_rest_of_the_whole_one(cache, position):
    reader = KDCacheDataset(cache, rank=1, world_size=2)
    whole = take(reader.batches(2), position + 4)
    resumed = take(KDCacheDataset(cache, rank=1, world_size=2).batches(2, position=position), 4)
    for ours, theirs in zip(resumed, whole[position:], strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_order_is_a_function_of_seed_and_epoch_that_is_written_down_here(cache):
    """Frozen: a position in a checkpoint must mean the same rows after an update of this package or NumPy."""
    reader = KDCacheDataset(cache, seed=5)
    assert reader.batch_rows(7, 0).tolist() == np.random.RandomState([5, 0]).permutation(7).tolist()
    assert [reader.batch_rows(7, m).tolist() for m in (0, 1)] == [
        [1, 4, 3, 5, 6, 2, 0],
        [0, 4, 5, 1, 2, 6, 3],
    ]
    assert reader.batch_rows(7, 0).tolist() != KDCacheDataset(cache, seed=6).batch_rows(7, 0).tolist()


def test_items_are_the_rows_that_went_in(cache):
    blocks, teacher, dataset = blocks_of(7, last_length=3), TinyTeacher(), KDCacheDataset(cache)
    assert len(dataset) == 7
    for row in (0, 3, 6, -1):
        item = dataset[row]
        assert torch.equal(item["input_ids"], blocks.input_ids_RT[row].long())
        assert item["length"] == blocks.lengths_R[row]
        top = torch.log_softmax(teacher.head(teacher(item["input_ids"][None])[0]), -1).topk(4, -1)
        assert torch.equal(item["topk_ids"], top.indices)
        torch.testing.assert_close(item["topk_logprobs"], top.values, rtol=0, atol=2e-6)
    for row in (7, -8):
        with pytest.raises(IndexError):
            dataset[row]


def test_dtypes_and_shapes_are_what_the_losses_take(cache):
    batch = next(KDCacheDataset(cache).batches(3))
    assert {name: (x.dtype, tuple(x.shape)) for name, x in batch.items()} == {
        "input_ids": (torch.int64, (3, 5)),
        "length": (torch.int64, (3,)),
        "topk_ids": (torch.int64, (3, 5, 4)),
        "topk_logprobs": (torch.float32, (3, 5, 4)),
        "tail": (torch.float32, (3, 5, 2)),
    }


def test_preloaded_and_streamed_batches_are_the_same(cache):
    streamed, preloaded = KDCacheDataset(cache), KDCacheDataset(cache, preload=True)
    for a, b in zip(take(streamed.batches(3), 9), take(preloaded.batches(3), 9), strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


def test_any_order_of_rows_is_read_into_that_order(cache):
    """Rows beside each other in a file are one read, wherever in the batch they go."""
    streamed, preloaded = (KDCacheDataset(cache, preload=preload)._shards for preload in (False, True))
    for rows in itertools.chain(itertools.permutations(range(7), 4), [(2, 2, 1, 1), (0,), range(7)]):
        ours, theirs = (source.read(np.array(rows)) for source in (streamed, preloaded))
        assert all(np.array_equal(ours[name], theirs[name]) for name in theirs), rows


def test_preloading_needs_the_files_no_more(cache):
    dataset = KDCacheDataset(cache, preload=True)
    shutil.rmtree(cache)
    assert len(take(dataset.batches(3), 5)) == 5


def test_few_files_stay_open(tmp_path, monkeypatch):
    monkeypatch.setattr(shards_module, "OPEN_FILES", 2)
    build(tmp_path, rows=11, rows_per_shard=1)
    dataset = KDCacheDataset(tmp_path)
    assert len(set(rows_of(take(dataset.batches(11), 1)))) == 11
    assert dataset._shards._file.cache_info().currsize == 2
    gc.collect()
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert sum(str(tmp_path) in line for line in maps.read_text().splitlines()) <= 2


def test_many_threads_read_more_files_than_stay_open(tmp_path, monkeypatch):
    """A file that leaves the open ones is being read by another thread at that moment."""
    monkeypatch.setattr(shards_module, "OPEN_FILES", 1)
    build(tmp_path, rows=12, rows_per_shard=1)
    dataset, wanted = KDCacheDataset(tmp_path), KDCacheDataset(tmp_path, preload=True)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda row: (row, dataset[row]), [row % 12 for row in range(240)]))
    assert all(torch.equal(item["topk_ids"], wanted[row]["topk_ids"]) for row, item in found)


def test_a_worker_process_can_be_given_the_dataset(cache):
    dataset = KDCacheDataset(cache)
    next(dataset.batches(2))
    copy = pickle.loads(pickle.dumps(dataset))
    assert torch.equal(copy[2]["topk_ids"], dataset[2]["topk_ids"])


def test_an_ordinary_data_loader_makes_the_same_kind_of_batch(cache):
    loader = torch.utils.data.DataLoader(KDCacheDataset(cache), batch_size=3)
    ours = next(KDCacheDataset(cache).eval_batches(3))
    theirs = next(iter(loader))
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_split_is_disjoint_whole_and_independent_of_seed_rank_and_shards(tmp_path):
    build(tmp_path / "a", rows=40, top_k=1)
    build(tmp_path / "b", rows=40, top_k=1, rows_per_shard=7)

    def side(name, split, **more):
        dataset = KDCacheDataset(tmp_path / name, split=split, eval_fraction=0.3, **more)
        return set(tuple(dataset[i]["input_ids"].tolist()) for i in range(len(dataset)))

    train, held_out = side("a", "train"), side("a", "eval")
    assert train & held_out == set()
    assert train | held_out == side("a", "all")
    assert 4 <= len(held_out) <= 20
    assert held_out == side("b", "eval") == side("a", "eval", seed=9, rank=1, world_size=2, preload=True)


def test_a_larger_share_keeps_the_rows_that_a_smaller_one_held_out(tmp_path):
    build(tmp_path, rows=40, top_k=1)
    held_out = [set(KDCacheDataset(tmp_path, split="eval", eval_fraction=f)._rows.tolist()) for f in (0.2, 0.4, 0.6)]
    assert held_out[0] < held_out[1] < held_out[2]


def test_the_train_stream_never_shows_a_held_out_row(tmp_path):
    build(tmp_path, rows=20, top_k=1)
    train = KDCacheDataset(tmp_path, split="train", eval_fraction=0.3)
    held_out = rows_of(KDCacheDataset(tmp_path, split="eval", eval_fraction=0.3).eval_batches(1))
    seen = set(rows_of(take(train.batches(3), 30)))
    assert held_out and not seen & set(held_out)
    assert len(seen) == len(train) == 20 - len(held_out)


def test_a_small_cache_holds_out_one_row_at_least(cache):
    held_out = KDCacheDataset(cache, split="eval", eval_fraction=1e-9)
    train = KDCacheDataset(cache, split="train", eval_fraction=1e-9)
    assert (len(held_out), len(train)) == (1, 6)
    larger = KDCacheDataset(cache, split="eval", eval_fraction=0.9)
    ids = [row["input_ids"].tolist() for row in (larger[i] for i in range(len(larger)))]
    assert held_out[0]["input_ids"].tolist() in ids


def test_an_empty_split_is_one_clear_error(cache):
    with pytest.raises(CacheError, match="eval split .* empty with eval_fraction=0.0"):
        KDCacheDataset(cache, split="eval")
    with pytest.raises(CacheError, match="train split .* empty"):
        KDCacheDataset(cache, split="train", eval_fraction=1 - 1e-12)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [1, 2, 4, 10])
def test_eval_batches_show_each_row_once_in_order_and_are_equally_many_on_all_ranks(cache, world_size, batch_size):
    readers = [KDCacheDataset(cache, rank=r, world_size=world_size) for r in range(world_size)]
    per_rank = [list(reader.eval_batches(batch_size)) for reader in readers]
    assert len({len(batches) for batches in per_rank}) == 1
    counted, tokens = [], 0
    for turn in zip(*per_rank, strict=True):
        for batch in turn:
            assert batch["input_ids"].shape == (batch_size, SEQ_LEN)
            tokens += position_mask(batch["length"], SEQ_LEN).sum().item()
            counted += [tuple(r) for r, n in zip(batch["input_ids"].tolist(), batch["length"], strict=True) if n > 0]
    assert counted == [tuple(r) for r in blocks_of(7).input_ids_RT.tolist()]
    assert tokens == 6 * SEQ_LEN + 3


def test_eval_batches_of_a_preloaded_cache_do_not_change_it(cache):
    dataset = KDCacheDataset(cache, preload=True)
    list(dataset.eval_batches(4))
    assert dataset[0]["length"] == SEQ_LEN


# ---- what can be wrong


def message(path, error=CacheError, **arguments):
    with pytest.raises(error) as caught:
        KDCacheDataset(path, **arguments)
    text = str(caught.value)
    assert str(path) in text and "\n" not in text and text.endswith(".")
    return text


def edit_manifest(cache, **changes):
    edit_record(cache / "manifest.json", **changes)


def edit_shard(cache, number, change):
    """Change the fields of a shard, and what vouches for it, so that nothing but its content is wrong."""
    index = load_cache(cache)
    path = cache / index.shards[number].file
    fields = decoded(index.manifest, rows_of_shard(index.manifest, load_file(path), 0, index.shards[number].rows))
    change({name: x for name, x in fields.items()})
    tensors = encoded(index.manifest, fields)
    sums = {name: getattr(index.shards[number], name) for name in SUMS}
    shard, content = shard_file(index.manifest, number, tensors, sums)
    path.write_bytes(content)
    shards = (*index.shards[:number], shard, *index.shards[number + 1 :])
    (cache / "index.json").write_bytes(dataclasses.replace(index, shards=shards).content())


def test_a_large_cache_is_read_in_part(tmp_path):
    """What Python and NumPy hold at once, for opening and a row of each shard, is less than one shard."""
    blocks = blocks_of(24, vocab_size=20_000, seq_len=20)
    build(tmp_path, blocks=blocks, teacher=TinyTeacher(20_000), vocab_size=20_000, store="full", rows_per_shard=12)
    tracemalloc.start()
    try:
        dataset = KDCacheDataset(tmp_path)
        rows = [dataset._shards.read(np.array([row])) for row in (0, 23)]
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 0.7 * load_cache(tmp_path).shards[0].size_bytes and rows[1]["logits"].nbytes == 20 * 20_000 * 4


def test_a_missing_directory_or_manifest(cache, tmp_path):
    assert "No manifest.json" in message(tmp_path / "nowhere")
    (cache / "manifest.json").unlink()
    assert "build_kd_cache.py" in message(cache)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff"])
def test_a_manifest_that_is_no_manifest(cache, text):
    (cache / "manifest.json").write_bytes(text.encode("latin-1"))
    assert "build the cache again" in message(cache)


def test_a_manifest_of_another_schema_or_with_fields_missing(cache):
    edit_manifest(cache, schema="qat_lora.kd_cache/0")
    assert f"'qat_lora.kd_cache/0', but this version reads {SCHEMA!r}" in message(cache, CacheMismatch)
    edit_manifest(cache, schema=SCHEMA, teacher_digest=None)
    assert "damaged (" in message(cache)


def test_an_unfinished_build(cache):
    (cache / "index.json").unlink()
    (cache / "shard-00001.safetensors").unlink()
    assert "has 2 of 3 shards and lacks 1: its build was interrupted" in message(cache)


def test_a_missing_shard(cache):
    (cache / "shard-00001.safetensors").unlink()
    assert "lacks its shard" in message(cache) and "shard-00001" in message(cache)


def test_a_truncated_shard(cache):
    path = cache / "shard-00002.safetensors"
    size = path.stat().st_size
    os.truncate(path, size - 10)
    assert f"shard-00002.safetensors' has {size - 10} bytes instead of {size}" in message(cache)


@pytest.mark.parametrize("preload", [False, True])
def test_a_shard_that_is_no_safetensors_file(cache, preload):
    path = cache / "shard-00000.safetensors"
    path.write_bytes(b"\0" * path.stat().st_size)
    with pytest.raises(CacheError, match="shard-00000.safetensors' is damaged: sha256"):
        KDCacheDataset(cache, preload=preload)[0]
    (cache / "index.json").unlink()
    assert "lacks 0" in message(cache)


def test_a_shard_of_another_cache_with_the_same_size(cache, tmp_path):
    build(tmp_path / "other", teacher=TinyTeacher(seed=1), teacher_digest="u" * 64)
    shutil.copy(tmp_path / "other" / "shard-00001.safetensors", cache / "shard-00001.safetensors")
    with pytest.raises(CacheError, match="shard-00001.safetensors' is damaged"):
        KDCacheDataset(cache)[3]
    (cache / "index.json").unlink()
    assert "is shard 1 of another KD cache" in message(cache, CacheMismatch)


def test_a_shard_of_this_cache_at_another_place(cache):
    shutil.copy(cache / "shard-00000.safetensors", cache / "shard-00001.safetensors")
    with pytest.raises(CacheError, match="shard-00001.safetensors' is damaged"):
        KDCacheDataset(cache)[3]
    (cache / "index.json").unlink()
    assert "another place in this one" in message(cache, CacheMismatch)


def test_a_shard_that_says_nothing_of_itself(cache):
    path = cache / "shard-00000.safetensors"
    save_file(load_file(path), path, metadata={"shard_of": "x"})
    (cache / "index.json").unlink()
    assert "lacks 0" in message(cache)


def test_flipped_bits_are_found_at_the_first_row_of_a_shard_by_preloading_and_by_verify(cache):
    verify(cache)
    path = cache / "shard-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.write_bytes(data)
    assert "shard-00001.safetensors' is damaged: sha256" in message(cache, preload=True)
    dataset = KDCacheDataset(cache)
    assert dataset[0]["length"] == SEQ_LEN, "a shard that is sound is read"
    for act in (lambda: dataset[3], lambda: verify(cache)):
        with pytest.raises(CacheError, match="shard-00001.* is damaged"):
            act()


@pytest.mark.parametrize(("name", "value"), [("topk_ids", VOCAB), ("input_ids", VOCAB + 3), ("input_ids", -1)])
@pytest.mark.parametrize("preload", [False, True])
def test_ids_beyond_the_vocabulary(cache, name, value, preload):
    edit_shard(cache, 1, lambda fields: fields[name].reshape(3, -1)[1].__setitem__(2, value))
    dataset = KDCacheDataset(cache, preload=preload)
    assert dataset[3]["length"] == SEQ_LEN
    with pytest.raises(CacheError, match=f"Row 4 of .* {name} value {value}, but the vocabulary has {VOCAB}"):
        dataset[4]


def test_draws_beyond_the_vocabulary(tmp_path):
    build(tmp_path, store="sampled", samples=3)
    edit_shard(tmp_path, 1, lambda fields: fields["draw_ids"][1, 0].__setitem__(2, VOCAB))
    with pytest.raises(CacheError, match=f"Row 4 of .* draw_ids value {VOCAB}, but the vocabulary has {VOCAB}"):
        KDCacheDataset(tmp_path)[4]


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "tail"), ({}, "topk_logprobs"), ({"logprob_bits": 5}, "largest_gap"),
        ({"store": "sampled", "samples": 3}, "entropy"), ({"store": "full"}, "logits"),
    ],
)  # fmt: skip
def test_numbers_that_are_not_finite_are_refused(tmp_path, settings, name, value):
    build(tmp_path, **settings)
    edit_shard(tmp_path, 1, lambda fields: fields[name].reshape(3, -1)[1].__setitem__(2, value))
    dataset = KDCacheDataset(tmp_path)
    assert dataset[3]["length"] == SEQ_LEN
    if (name, value) == ("logits", -np.inf):  # a token that the teacher forbids
        assert dataset[4]["logits"].isneginf().sum() == 1
        return
    with pytest.raises(CacheError, match="Row 4 of .* but the teacher's numbers are finite"):
        dataset[4]


# ---- files that were made to do harm


def test_an_index_cannot_name_a_file_outside_the_cache(cache):
    for name, value in (("content", "../../precious"), ("sha256", "../../precious/model"), ("sha256", "A" * 64)):
        tree = json.loads((cache / "index.json").read_text())
        tree["shards"][1][name] = value
        edit_record(cache / "index.json", shards=tree["shards"])
        assert "is no sha256" in message(cache)


@pytest.mark.parametrize(
    "change",
    [
        {"index": 0}, {"index": -1}, {"index": 7}, {"rows": 10**13}, {"keys": "AAAA"}, {"keys": "*"}, {"more": 1},
        {"tokens": 1.5}, {"entropy": "much"}, {"tensor_bytes": 3},
    ],
    ids=str,
)  # fmt: skip
def test_an_index_that_cannot_be_is_one_sentence(cache, change):
    tree = json.loads((cache / "index.json").read_text())
    tree["shards"][1] |= change
    edit_record(cache / "index.json", shards=tree["shards"])
    assert "index.json' is damaged (" in message(cache)


def test_an_index_of_another_cache_or_with_shards_missing(cache):
    tree = json.loads((cache / "index.json").read_text())
    edit_record(cache / "index.json", shards=tree["shards"][:2])
    assert "2 of 3 shards" in message(cache)
    edit_record(cache / "index.json", cache="0" * 64)
    assert "is of another cache than the manifest" in message(cache, CacheMismatch)


@pytest.mark.parametrize("changes", [{"rows": 10**13}, {"seq_len": 10**12}, {"vocab_size": 10**15}, {"rows": 10**9}])
def test_giant_sizes_are_one_sentence(cache, changes):
    edit_manifest(cache, **changes)
    (cache / "index.json").unlink()
    assert message(cache, Exception if changes == {"rows": 10**9} else CacheError)


def nested(depth=200_000):
    return "[" * depth + "]" * depth


def test_nested_json_and_headers_that_lie_are_one_sentence(cache):
    path = cache / "shard-00001.safetensors"
    whole = path.read_bytes()
    text = nested().encode()
    headers = [len(text).to_bytes(8, "little") + text, (2**63).to_bytes(8, "little"), (2**40).to_bytes(8, "little")]
    for header in headers:
        path.write_bytes(header + whole)
        with pytest.raises(CacheError, match="is no sound shard"):
            read_header(path, load_manifest(cache), 1, path.stat().st_size)
    for name in ("index.json", "manifest.json"):
        (cache / name).write_text(nested())
        assert f"Cannot read '{cache / name}'" in message(cache)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"seq_len": 6}, "seq_len=5, but the run needs seq_len=6"),
        ({"vocab_size": 30}, "vocab_size=29, but the run needs vocab_size=30"),
        ({"teacher_digest": "u"}, f"teacher_digest='{'t' * 64}', but the run needs teacher_digest='u'"),
        ({"tokenizer_digest": "u"}, f"tokenizer_digest='{'k' * 64}', but the run needs tokenizer_digest='u'"),
        ({"top_k": 5}, "top_k=4 candidates, but top_k=5 was asked for"),
        ({"temperature": 1.5}, "[1.0, 2.0], but the run needs temperature=1.5"),
    ],
)
def test_what_a_run_needs_and_the_cache_lacks_is_shown_with_both_values(cache, wanted, words):
    with pytest.raises(CacheMismatch) as caught:
        KDCacheDataset(cache).require(**wanted)
    assert words in str(caught.value) and str(cache) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_the_cache_serves_is_not_refused(cache):
    KDCacheDataset(cache).require(
        seq_len=5, top_k=3, temperature=2.0, vocab_size=29, teacher_digest="t" * 64, tokenizer_digest="k" * 64
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rank": 2, "world_size": 2}, "rank=2"),
        ({"rank": -1}, "rank=-1"),
        ({"split": "test"}, "split='test'"),
        ({"split": "eval", "eval_fraction": 1.5}, "eval_fraction=1.5"),
    ],
)
def test_arguments_that_make_no_reader_are_refused(cache, arguments, words):
    with pytest.raises(ConfigError, match=words):
        KDCacheDataset(cache, **arguments)
    with pytest.raises(ConfigError, match="batch_size=0"):
        next(KDCacheDataset(cache).batches(0))
