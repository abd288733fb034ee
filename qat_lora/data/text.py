"""Texts from where people keep them: files, folders, hub datasets, and the corpus in the package.

Owns the meaning of a source spec and every way in which one can be wrong. Does not own tokenisation, nor the
embedded corpus itself (`corpus`).
"""

from __future__ import annotations

import glob
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from qat_lora.errors import DataError

logger = logging.getLogger(__name__)

TEXT_KEYS = ("text", "content")
SUFFIXES = (".txt", ".jsonl")
HUB_PREFIX = "hf:"
EMBEDDED_NAME = "embedded"
EMBEDDED: dict[str, Literal["train", "eval"]] = {"embedded:train": "train", "embedded:eval": "eval"}


def read_texts(spec: str) -> Iterator[str]:
    """Yield the texts of a source, one after the other, without the empty ones.

    Args:
        spec: a ``.txt`` file (one text), a ``.jsonl`` file (one object with "text" or "content" per line), a
            folder or a glob of those (in the order of their names), ``hf:dataset[:config][:split]`` (split
            ``train`` unless given), or ``embedded:train`` / ``embedded:eval``.

    Raises:
        DataError: the source is missing, cannot be read, or holds no text. Raised while iterating, not on the
            call.
    """
    if not spec:
        raise DataError(
            "No text source is named; give a .txt or .jsonl file, a folder, 'hf:dataset' or 'embedded:train'."
        )
    texts = _texts(spec)
    is_empty = True
    for text in texts:
        if text.strip():
            is_empty = False
            yield text
    if is_empty:
        raise DataError(f"The text source {spec!r} holds no text; choose one that does.")


def _texts(spec: str) -> Iterator[str]:
    if spec == EMBEDDED_NAME or spec.startswith(f"{EMBEDDED_NAME}:"):  # not embedded_texts/, which is a folder
        return _embedded_texts(spec)
    if spec.startswith(HUB_PREFIX):
        return _hub_texts(spec)
    return (text for path in _files(spec) for text in _file_texts(path))


def _embedded_texts(spec: str) -> Iterator[str]:
    if spec not in EMBEDDED:
        raise DataError(f"The text source {spec!r} is unknown; use 'embedded:train' or 'embedded:eval'.")
    # At use, since it parses the standard library's sources.
    from qat_lora.data.corpus import corpus_texts

    return iter(corpus_texts(EMBEDDED[spec]))


def _files(spec: str) -> list[Path]:
    path = Path(spec).expanduser()
    if path.is_dir():
        found = [p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file()]
    elif path.is_file():
        found = [path]
    else:
        found = [Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file()]
    if not found:
        reason = "holds no .txt or .jsonl file" if path.is_dir() else "does not exist"
        raise DataError(
            f"The text source {spec!r} {reason}; give a .txt or .jsonl file, a folder or glob of those, "
            "'hf:dataset' or 'embedded:train'."
        )
    wrong = [p for p in found if p.suffix not in SUFFIXES]
    if wrong:
        raise DataError(f"{str(wrong[0])!r} is neither .txt nor .jsonl; rename or convert it.")
    return sorted(found)


def _file_texts(path: Path) -> Iterator[str]:
    try:
        if path.suffix == ".txt":
            yield path.read_text(encoding="utf-8")
            return
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _line_text(line, f"{path}:{number}")
    except UnicodeDecodeError as error:
        raise DataError(f"{str(path)!r} is not UTF-8 ({error.reason} at byte {error.start}); convert it.") from error
    except OSError as error:
        raise DataError(f"Cannot read {str(path)!r} ({error.strerror}); check the path and its permissions.") from error


def _line_text(line: str, place: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{place} is no JSON ({error.msg} at column {error.colno}); mend or remove the line."
        ) from error
    text = _row_text(row) if isinstance(row, dict) else None
    if text is None:
        raise DataError(f"{place} has no string under 'text' or 'content'; add one or remove the line.")
    return text


def _row_text(row: Mapping[str, Any]) -> str | None:
    return next((row[key] for key in TEXT_KEYS if isinstance(row.get(key), str)), None)


def _hub_texts(spec: str) -> Iterator[str]:
    name, config, split = _hub_parts(spec)
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"The text source {spec!r} needs the package 'datasets'; pip install 'qat_lora[hf]' or use local files."
        ) from error
    logger.info("reading %s (config %s, split %s)", name, config, split)
    try:
        # No network and no such dataset are OSErrors; no such config or split are ValueErrors.
        rows = datasets.load_dataset(name, config, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"Cannot load {spec!r} ({_first_line(error)}); check dataset, config, split and network, or use "
            "local files."
        ) from error
    columns = [key for key in TEXT_KEYS if key in rows.column_names]
    if not columns:
        raise DataError(
            f"The dataset {spec!r} has the columns {rows.column_names}, but neither 'text' nor 'content'; "
            "choose another dataset or convert it to .jsonl."
        )
    for row in rows.select_columns(columns):
        yield _row_text(row) or ""


def _hub_parts(spec: str) -> tuple[str, str | None, str]:
    # At most three parts: the split may hold a colon of its own, as in train[:1%].
    parts = spec.removeprefix(HUB_PREFIX).split(":", 2)
    if not parts[0]:
        raise DataError(
            f"The text source {spec!r} is malformed; write hf:dataset, hf:dataset:config or hf:dataset:config:split."
        )
    config = parts[1] if len(parts) > 1 and parts[1] else None
    return parts[0], config, parts[2] if len(parts) > 2 else "train"


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
