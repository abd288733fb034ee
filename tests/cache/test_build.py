"""A build that stops at any moment goes on to the very same files."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from qat_lora.cache import CacheWriter, KDCacheDataset, build_cache, load_cache, load_manifest
from qat_lora.cache.manifest import SHARD_BYTES, sealed
from qat_lora.cache.write import write_file
from qat_lora.data import TokenRows
from qat_lora.errors import CacheError, CacheMismatch, ConfigError, OutputError
from tests.cache.conftest import TinyTeacher, blocks_of, build, manifest_of


def contents(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(directory.iterdir())}


class Interrupted(Exception):
    pass


def stop_after(calls):
    def progress(done, total):
        nonlocal calls
        calls -= 1
        if calls == 0:
            raise Interrupted

    return progress


@pytest.mark.parametrize("calls", [1, 2, 3, 4, 5])
def test_an_interrupted_build_resumes_to_byte_identical_files(tmp_path, calls):
    build(tmp_path / "whole")
    with pytest.raises(Interrupted):
        build(tmp_path / "stopped", progress=stop_after(calls))
    done_before = {n: b for n, b in contents(tmp_path / "stopped").items() if n.startswith("shard")}
    teacher = build(tmp_path / "stopped")
    assert contents(tmp_path / "stopped") == contents(tmp_path / "whole")
    for name, data in done_before.items():
        assert contents(tmp_path / "whole")[name] == data
    assert len(teacher.shapes) == 5 - 2 * len(done_before), "finished shards are not computed again"


def test_a_killed_process_leaves_a_cache_that_resumes_to_byte_identical_files(tmp_path):
    build(tmp_path / "whole")
    script = (
        "import os, signal\n"
        "from tests.cache.conftest import build\n"
        "def progress(done, total):\n"
        "    if done == 5: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"build({str(tmp_path / 'killed')!r}, progress=progress)\n"
    )
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, "-c", script], cwd=root, env=environment, check=False)
    assert ended.returncode == -signal.SIGKILL
    with pytest.raises(CacheError, match="has . of 3 shards and lacks .*run the same build command again"):
        KDCacheDataset(tmp_path / "killed")
    killed = f".shard-00001.safetensors.{socket.gethostname()}.{2**22 + 5}.1.tmp"  # of a process that cannot be
    (tmp_path / "killed" / killed).write_bytes(b"half a shard")
    build(tmp_path / "killed")
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_a_file_that_is_no_sound_shard_is_written_again(tmp_path):
    build(tmp_path / "whole")
    with pytest.raises(Interrupted):
        build(tmp_path / "stopped", progress=stop_after(3))
    (tmp_path / "stopped" / "shard-00001.safetensors").write_bytes(b"unnamed")
    build(tmp_path / "stopped")
    assert contents(tmp_path / "stopped") == contents(tmp_path / "whole")


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("spoil", [lambda p: p.unlink(), lambda p: os.truncate(p, 50)])
def test_building_again_restores_a_shard_that_is_missing_or_cut_short(tmp_path, index, spoil):
    build(tmp_path)
    whole = contents(tmp_path)
    spoil(tmp_path / f"shard-{index:05d}.safetensors")
    build(tmp_path)
    assert contents(tmp_path) == whole


def test_building_a_finished_cache_again_does_nothing(tmp_path):
    build(tmp_path)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
    assert build(tmp_path).shapes == []
    assert {p: p.stat().st_mtime_ns for p in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("teacher_digest", "u" * 64),
        ("tokenizer_digest", "j" * 64),
        ("top_k", 5),
        ("temperatures", (1.0, 3.0)),
        ("logprob_bits", 5),
        ("rows_per_shard", 4),
        ("source_digest", "0" * 64),
    ],
)
def test_a_directory_with_another_cache_is_refused_showing_both_values(tmp_path, name, value):
    build(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(CacheMismatch) as caught:
        CacheWriter(tmp_path, manifest_of(blocks_of(7, last_length=3), **{name: value}))
    stored = load_manifest(tmp_path).to_json()[name]
    wanted = list(value) if isinstance(value, tuple) else value
    assert f"{name}: there {stored!r}, asked for {wanted!r}" in str(caught.value)
    assert contents(tmp_path) == before


def test_the_names_of_teacher_and_source_may_differ_since_their_digests_decide(tmp_path):
    build(tmp_path)
    writer = CacheWriter(tmp_path, manifest_of(blocks_of(7, last_length=3), teacher="a/path", source="b"))
    assert writer.missing == [] and writer.finish().complete


def test_another_sequence_length_is_refused(tmp_path):
    build(tmp_path)
    with pytest.raises(CacheMismatch, match="seq_len: there 5, asked for 6"):
        CacheWriter(tmp_path, manifest_of(blocks_of(7, seq_len=6)))


def test_shards_without_a_manifest_are_not_written_over(tmp_path):
    build(tmp_path)
    (tmp_path / "manifest.json").unlink()
    before = contents(tmp_path)
    with pytest.raises(CacheError, match="shard-00000.safetensors but no manifest.json"):
        CacheWriter(tmp_path, manifest_of(blocks_of(7)))
    assert contents(tmp_path) == before


def test_a_directory_that_cannot_be_made_or_written_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    for path in (tmp_path / "file" / "cache", tmp_path / "file"):
        with pytest.raises(OutputError) as caught:
            CacheWriter(path, manifest_of(blocks_of(7)))
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert (tmp_path / "file").read_text() == "not a directory"


def test_a_shard_of_wrong_shape_or_dtype_or_that_is_there_is_refused(tmp_path):
    writer = CacheWriter(tmp_path, manifest_of(blocks_of(7)))
    good = {name: np.zeros(shape, dtype) for name, (shape, dtype) in writer.manifest.fields(3).items()}
    with pytest.raises(ValueError, match="tail must be float32"):
        writer.write_shard(0, {**good, "tail": good["tail"].astype(np.float64)})
    with pytest.raises(ValueError, match="topk_ids must lie in 0..28, got 0..29"):
        writer.write_shard(0, {**good, "topk_ids": good["topk_ids"] + (np.arange(4) == 3) * 29})
    with pytest.raises(ValueError, match="needs the fields"):
        writer.write_shard(0, {"tail": good["tail"]})
    with pytest.raises(ValueError, match="2 rows"):
        writer.write_shard(0, {name: x[:2] for name, x in good.items()})
    assert not list(tmp_path.glob("shard-*"))
    with pytest.raises(CacheError, match="lacks shard-00000"):
        writer.finish()
    writer.write_shard(0, good)
    assert CacheWriter(tmp_path, writer.manifest).missing == [1, 2]


@pytest.mark.parametrize("short_of", [0, 1])
def test_a_disk_that_will_be_full_is_told_of_before_the_work(tmp_path, monkeypatch, caplog, short_of):
    manifest = manifest_of(blocks_of(7))
    wanted = 7 * manifest.bytes_per_row - short_of
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=wanted))
    CacheWriter(tmp_path, manifest)
    said = f"{tmp_path} has {wanted:,} bytes free, but the shards to be written take about {wanted + 1:,} bytes"
    assert [record.getMessage() for record in caplog.records] == [said] * short_of


def test_the_manifest_survives_its_json_form(tmp_path):
    build(tmp_path)
    index, manifest = load_cache(tmp_path), load_manifest(tmp_path)
    assert index.complete and len(index.shards) == 3 and manifest.rows == index.rows == 7
    content = (tmp_path / "manifest.json").read_bytes()
    assert content == sealed(manifest.to_json())
    assert json.loads(content) == {**manifest.to_json(), "digest": json.loads(content)["digest"]}


def test_the_temperature_one_is_always_stored_and_first():
    assert manifest_of(blocks_of(2), temperatures=(2.0, 1.0, 2.0)).temperatures == (1.0, 2.0)
    assert manifest_of(blocks_of(2), temperatures=()).temperatures == (1.0,)


@pytest.mark.parametrize(("vocab_size", "bits"), [(2, 1), (29, 5), (32, 5), (33, 6), (65536, 16), (151936, 18)])
def test_ids_take_the_bits_that_the_vocabulary_needs_and_shards_have_a_bounded_size(vocab_size, bits):
    manifest = manifest_of(blocks_of(2, seq_len=100), vocab_size=vocab_size, top_k=2, rows_per_shard=0)
    assert manifest.id_bits == bits
    assert manifest.tensors(3)["topk_ids"] == ((3, -(-100 * 2 * bits // 8)), np.dtype(np.uint8))
    assert SHARD_BYTES - manifest.bytes_per_row < manifest.rows_per_shard * manifest.bytes_per_row <= SHARD_BYTES


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"top_k": 30}, "top_k=30 exceeds the vocabulary of 29"),
        ({"top_k": 0}, "top_k=0"),
        ({"rows": 0}, "rows=0"),
        ({"rows": 10**13}, "rows=10000000000000"),
        ({"seq_len": 10**12}, "seq_len=1000000000000"),
        ({"eval_fraction": 1.0}, "eval_fraction"),
        ({"temperatures": (0.0,)}, "temperatures"),
        ({"logprob_bits": 3}, "logprob_bits=3"),
        ({"store": "topp"}, "store='topp'"),
        ({"store": "sampled"}, "samples=0"),
        ({"store": "sampled", "samples": 4, "proposal_temperature": 0.0}, "proposal_temperature"),
    ],
)
def test_settings_that_make_no_cache_are_refused(changes, words):
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        manifest_of(blocks_of(2), **changes)


def test_a_file_and_its_folder_are_synced(tmp_path, monkeypatch):
    """Of a name that is not on the disk a power cut leaves nothing."""
    synced, fsync = [], os.fsync

    def noted(descriptor):
        synced.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    assert write_file(tmp_path / "a", b"x")
    assert synced == [(tmp_path / "a").stat().st_ino, tmp_path.stat().st_ino]


def test_an_error_in_the_writing_thread_ends_the_build_at_once(tmp_path, monkeypatch):
    teacher, blocks = TinyTeacher(), blocks_of(60)
    writer = CacheWriter(tmp_path, manifest_of(blocks))
    monkeypatch.setattr(writer, "write_encoded", lambda index, pieces: 1 / 0)
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        build_cache(teacher, teacher.head, blocks, writer, batch_size=3)
    assert len(teacher.shapes) < 20 and threading.active_count() == before


def test_draws_behind_the_end_of_a_row_are_blank(tmp_path):
    build(tmp_path, rows=1, last_length=2, store="sampled", samples=4)
    assert (KDCacheDataset(tmp_path)[0]["draw_ids"][2:] == 0).all()


def test_tagged_rows_are_the_held_out_ones_and_answers_come_with_the_batch(tmp_path):
    source = np.random.RandomState(0)
    ids = source.randint(0, 29, (7, 5)).astype(np.int32)
    held_out, answer = np.arange(7) % 3 == 1, source.rand(7, 5) < 0.5
    rows = TokenRows(ids, np.full(7, 5, np.int32), None, held_out, answer)
    build(tmp_path, blocks=rows, eval_fraction=0.3, answers=True)
    for split, chosen in (("eval", held_out), ("train", ~held_out)):
        for dataset in (
            KDCacheDataset(tmp_path, split=split, preload=True),
            KDCacheDataset(tmp_path, eval_fraction=0.9).part(split, 0.9),
        ):
            (batch,) = dataset.eval_batches(int(chosen.sum()))
            assert batch["input_ids"].tolist() == ids[chosen].tolist()
            assert batch["answer"].tolist() == answer[chosen].tolist()


def test_an_index_that_a_kill_left_half_written_is_removed_like_a_shard(tmp_path, monkeypatch):
    """Its temporary file has a name that says whose it is; under another one it would stay in the folder for ever."""
    names, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (names.append(Path(a).name), replace(a, b)))
    build(tmp_path / "c")
    (name,) = [name for name in names if name.startswith(".index.json.")]
    left = tmp_path / "c" / name.replace(f".{os.getpid()}.", f".{2**22 + 5}.")  # of a process that cannot be
    left.write_bytes(b"half an index")
    build(tmp_path / "c")
    assert not left.exists()
