"""A build that continues does not tokenise again."""

from __future__ import annotations

import pytest

from qat_lora.cli import commands
from qat_lora.cli.main import main


@pytest.fixture
def tokenised(monkeypatch) -> list[str]:
    """The sources whose rows were read, in order."""
    sources, read = [], commands.read_rows
    monkeypatch.setattr(commands, "read_rows", lambda spec, *a, **k: (sources.append(spec), read(spec, *a, **k))[1])
    return sources


def test_rows_are_kept_until_the_cache_is_finished(tmp_path, teacher_dir, text_file, tokenised) -> None:
    text = tmp_path / "text.txt"
    text.write_text(text_file.read_text())

    def build(output, *more: str) -> int:
        argv = ["cache", "--teacher", teacher_dir, "--data", text, "--seq-len", 24, "--top-k", 8, "--max-rows", 40]
        argv += ["--rows-per-shard", 16, "--eval-fraction", 0.1, "--packing", "documents", "--device", "cpu"]
        return main([str(a) for a in (*argv, "--output", output, "--quiet", *more)])

    def kept(output) -> list:
        return list(output.glob(".rows-*"))

    assert build(tmp_path / "once") == 0 and len(tokenised) == 1 and not kept(tmp_path / "once")
    assert build(tmp_path / "c", "--part", "1/3") == 0 and len(tokenised) == 2
    (path,) = kept(tmp_path / "c")
    assert build(tmp_path / "c", "--part", "2/3") == 0 and len(tokenised) == 2
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")  # the last array is damaged
    assert build(tmp_path / "c", "--part", "2/3") == 0 and len(tokenised) == 3
    words = text.read_text()
    text.write_text("Another text. " + words)
    assert build(tmp_path / "c") == 2 and len(tokenised) == 4, "a source that changed is another cache"
    text.write_text(words)
    assert build(tmp_path / "c") == 0 and not kept(tmp_path / "c")
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("once", "c")]
    assert files[0] == files[1]
