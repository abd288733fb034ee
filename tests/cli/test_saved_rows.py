"""A build that continues does not tokenise again, nor does a second rank or part of the same machine."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from qat_lora.cli import commands
from qat_lora.cli.main import main
from qat_lora.data import TokenRows, saved
from qat_lora.data.saved import ABANDONED_SECONDS, SavedRows
from qat_lora.errors import DiskFull


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("QAT_LORA_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def kept(home: Path) -> list[Path]:
    """The files of rows that are kept."""
    return list(home.glob("rows/*.safetensors"))


@pytest.fixture
def tokenised(monkeypatch) -> list[str]:
    """The sources whose rows were read, in order."""
    sources, read = [], commands.read_rows
    monkeypatch.setattr(commands, "read_rows", lambda spec, *a, **k: (sources.append(spec), read(spec, *a, **k))[1])
    return sources


def test_rows_are_kept_until_the_cache_is_finished(tmp_path, teacher_dir, text_file, tokenised, home) -> None:
    text = tmp_path / "text.txt"
    text.write_text(text_file.read_text())

    def build(output, *more: str) -> int:
        argv = ["cache", "--teacher", teacher_dir, "--data", text, "--seq-len", 24, "--top-k", 8, "--max-rows", 40]
        argv += ["--rows-per-shard", 16, "--eval-fraction", 0.1, "--packing", "documents", "--device", "cpu"]
        return main([str(a) for a in (*argv, "--output", output, "--quiet", *more)])

    assert build(tmp_path / "once") == 0 and len(tokenised) == 1
    assert not list(home.glob("rows/*"))
    assert build(tmp_path / "c", "--part", "1/3") == 0 and len(tokenised) == 2
    (path,) = kept(home)
    assert build(tmp_path / "c", "--part", "2/3") == 0 and len(tokenised) == 2
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")  # the last array is damaged
    assert build(tmp_path / "c", "--part", "2/3") == 0 and len(tokenised) == 3
    words = text.read_text()
    text.write_text("Another text. " + words)
    assert build(tmp_path / "c") == 2 and len(tokenised) == 4, "a source that changed is another cache"
    text.write_text(words)
    assert build(tmp_path / "c") == 0
    assert not list(home.glob("rows/*")), "no rows and no lock of a finished cache, of whichever text"
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("once", "c")]
    assert files[0] == files[1]


def some_rows() -> TokenRows:
    return TokenRows(np.arange(6, dtype=np.int32).reshape(2, 3), np.array([3, 2], np.int32), None, np.zeros(2, bool))


def test_rows_of_a_cache_at_a_url_are_kept_on_this_machine(tmp_path, teacher_dir, text_file, tokenised, home) -> None:
    argv = ["cache", "--teacher", teacher_dir, "--data", text_file, "--seq-len", 24, "--top-k", 8, "--max-rows", 40]
    argv += ["--rows-per-shard", 16, "--device", "cpu", "--quiet", "--output", "memory://rows/c", "--part"]
    for part, files in (("1/2", 1), ("2/2", 0)):
        assert main([str(a) for a in (*argv, part)]) == 0
        assert len(tokenised) == 1 and len(kept(home)) == files


def test_of_several_that_begin_together_one_tokenises(home) -> None:
    made, begin = [], threading.Barrier(4)

    def make() -> TokenRows:
        made.append(1)
        time.sleep(0.05)  # the others come meanwhile
        return some_rows()

    def rank(_: int) -> str:
        begin.wait()
        return SavedRows(Path("c"), "embedded:train").get(make).digest()

    with ThreadPoolExecutor(4) as ranks:
        assert set(ranks.map(rank, range(4))) == {some_rows().digest()} and len(made) == 1


def all_made_side_by_side(count: int) -> None:
    """Several processes ask for rows at once, and each makes its own while the others do too."""
    begin, together = threading.Barrier(count), threading.Barrier(count)

    def make() -> TokenRows:
        together.wait(timeout=10)  # broken where one of them waits for another
        return some_rows()

    def rank(_: int) -> str:
        begin.wait()
        return SavedRows(Path("c"), "embedded:train").get(make).digest()

    with ThreadPoolExecutor(count) as ranks:
        assert set(ranks.map(rank, range(count))) == {some_rows().digest()}


def refuse(error: Exception) -> Callable[..., None]:
    def act(*_: object, **__: object) -> None:
        raise error

    return act


def test_nobody_waits_where_the_disk_cannot_be_written(home, monkeypatch) -> None:
    SavedRows(Path("c"), "embedded:train").get(some_rows)
    for path in kept(home):
        path.unlink()  # the lock stays, and can be taken
    monkeypatch.setattr(tempfile, "TemporaryFile", refuse(OSError(errno.EROFS, "read-only")))
    all_made_side_by_side(4)
    assert not kept(home)


def test_who_waited_in_vain_tokenises_beside_the_others(home, monkeypatch, caplog) -> None:
    caplog.set_level("INFO", logger="qat_lora")
    began, others_wait = threading.Event(), "waiting for another process that makes the token rows of embedded:train"

    def make() -> TokenRows:
        began.set()
        while caplog.messages.count(others_wait) < 3 and time.monotonic() < deadline:
            time.sleep(0.005)
        return some_rows()

    monkeypatch.setattr(saved, "write_atomically", refuse(DiskFull("full")))
    deadline = time.monotonic() + 10
    with ThreadPoolExecutor(1) as first:
        done = first.submit(lambda: SavedRows(Path("c"), "embedded:train").get(make))
        assert began.wait(10)
        all_made_side_by_side(3)
        assert done.result().digest() == some_rows().digest()
    assert caplog.messages == 3 * [others_wait] and not kept(home)


def test_rows_are_made_where_none_can_be_kept(home, monkeypatch) -> None:
    home.write_text("a file where the folder would be")
    assert SavedRows(Path("c"), "embedded:train").get(some_rows).digest() == some_rows().digest()
    monkeypatch.delenv("QAT_LORA_CACHE_HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    rows = SavedRows(Path("c"), "embedded:train")
    assert rows.path is None and rows.get(some_rows).digest() == some_rows().digest()
    rows.forget()


def test_rows_that_nobody_came_back_for_are_removed(home) -> None:
    for name in ("a", "b", "c"):
        SavedRows(Path(name), "embedded:train").get(some_rows)
    old = SavedRows(Path("a"), "embedded:train").path
    os.utime(old, (1, time.time() - ABANDONED_SECONDS - 9))
    SavedRows(Path("b"), "embedded:train").forget()
    assert kept(home) == [SavedRows(Path("c"), "embedded:train").path]
