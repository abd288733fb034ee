"""A reader sees the old file or the whole one after it; a proof of writing leaves no trace."""

from __future__ import annotations

import json
import os
import resource
import signal
import stat
import tempfile
from pathlib import Path

import pytest
import torch

from qat_lora.errors import DiskFull, OutputError
from qat_lora.files import check_writable, write_atomically, write_json


def names_below(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*"))


def write_half_and(error: Exception):
    def write(stream) -> None:
        stream.write(b"half")
        stream.flush()
        raise error

    return write


@pytest.mark.parametrize(
    ("error", "seen"),
    [(KeyError("a bug"), KeyError), (KeyboardInterrupt(), KeyboardInterrupt), (OSError(28, "No space"), OutputError)],
    ids=["a bug", "an interruption", "a full disk"],
)
def test_a_writer_that_fails_leaves_the_old_content_and_nothing_else(error, seen, tmp_path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(seen):
        write_atomically(path, write_half_and(error))
    assert path.read_bytes() == b"old"
    assert names_below(tmp_path) == ["file"]


def test_a_writer_that_fails_leaves_no_file_where_none_was(tmp_path) -> None:
    with pytest.raises(OutputError, match=r"file cannot be written \(No space\); choose another --output"):
        write_atomically(tmp_path / "file", write_half_and(OSError(28, "No space")))
    assert names_below(tmp_path) == []


@pytest.mark.parametrize("limit", [70, 4_000, 50_000, 80_500])
def test_a_disk_that_fills_up_under_torch_save_is_named(limit, tmp_path) -> None:
    """Whose writer raises a RuntimeError of its own in place of the system's error."""
    path, limits = tmp_path / "file", resource.getrlimit(resource.RLIMIT_FSIZE)
    path.write_bytes(b"old")
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        with pytest.raises(DiskFull, match=r"file cannot be written \(File too large\); choose another --output"):
            write_atomically(path, lambda stream: torch.save({"x": torch.zeros(20_000)}, stream))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert path.read_bytes() == b"old"
    assert names_below(tmp_path) == ["file"]


def test_readers_see_the_old_content_until_the_file_is_whole(tmp_path) -> None:
    path = tmp_path / "made" / "file"
    write_atomically(path, lambda stream: stream.write(b"old"))

    def write(stream) -> None:
        stream.write(b"one and ")
        stream.flush()
        assert path.read_bytes() == b"old"
        stream.write(b"two")

    with path.open("rb") as reader:
        write_atomically(path, write)
        assert reader.read() == b"old", "a reader that has opened the file goes on in the old one"
    assert path.read_bytes() == b"one and two"
    assert names_below(tmp_path) == ["made", "made/file"]


@pytest.mark.parametrize("replace", [True, False])
def test_a_file_that_did_not_come_to_its_place_is_an_error(tmp_path, replace) -> None:
    """Somebody sweeps up temporary files while one is being written."""
    path = tmp_path / "file"
    if replace:
        path.write_bytes(b"old")

    def write(stream) -> None:
        stream.write(b"new")
        next(tmp_path.glob(".file.*")).unlink()

    with pytest.raises(OutputError, match="cannot be written"):
        write_atomically(path, write, replace=replace)
    assert names_below(tmp_path) == ["file"] * replace


def test_json_reads_back_as_what_was_written_keys_in_their_order(tmp_path) -> None:
    tree = {"z": [1, 2.5, None, True], "a": {"text": "Grüße, 世界\n", "tiny": 1e-300}, "empty": []}
    write_json(tmp_path / "tree.json", tree)
    text = (tmp_path / "tree.json").read_text(encoding="utf-8")
    assert json.loads(text) == tree
    assert list(json.loads(text)) == ["z", "a", "empty"]
    assert text.endswith("}\n") and "世界" in text
    assert names_below(tmp_path) == ["tree.json"]


def test_proving_that_a_folder_can_be_written_leaves_no_trace(tmp_path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("x")
    before = names_below(tmp_path)
    for folder in (tmp_path, tmp_path / "kept", tmp_path / "kept" / "deep" / "deeper", tmp_path / "one"):
        check_writable(folder)
        assert names_below(tmp_path) == before, folder


def test_a_full_disk_which_takes_an_empty_file_is_refused(tmp_path) -> None:
    limits, before = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        with pytest.raises(DiskFull, match="cannot be written"):
            check_writable(tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert names_below(tmp_path) == []


@pytest.mark.parametrize("below", ["file", "file/run", "file/deep/run"])
def test_a_folder_below_a_file_is_refused(below, tmp_path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match=r"cannot be written \(.*\); choose another --output"):
        check_writable(tmp_path / below)
    assert names_below(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "x"


def test_a_refusal_after_folders_were_made_removes_them(tmp_path, monkeypatch) -> None:
    def refused(*args, **kwargs):
        raise OSError(28, "No space")

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    with pytest.raises(OutputError, match="No space"):
        check_writable(tmp_path / "deep" / "run")
    assert names_below(tmp_path) == []


def test_the_file_is_on_the_disk_before_its_name_is_and_the_name_before_the_end(tmp_path, monkeypatch) -> None:
    """What a power cut leaves: fsync of the bytes, then the rename, then fsync of the folder."""
    acts: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        acts.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def renamed(source, target) -> None:
        acts.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    write_atomically(tmp_path / "file", lambda stream: stream.write(b"bytes"))
    assert acts == ["file", "rename", "folder"]
