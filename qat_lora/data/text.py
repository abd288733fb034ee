"""Texts from where people keep them: files, folders, hub datasets, and the corpus in the package.

Owns how texts are read, row by row. Does not own which files a source names, nor the order (`paths`), formats
(`formats`), chat templates (`chat`), tokenisation (`encode`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from qat_lora.config.source import SourceConfig
from qat_lora.data import corpus
from qat_lora.data.chat import ChatRenderer, plain_text
from qat_lora.data.formats import ROW_KEYS, Row, content_of, recognised
from qat_lora.data.hub import hub_rows
from qat_lora.data.paths import HUB_PREFIX, find_files, is_local, shuffled
from qat_lora.errors import DataError

logger = logging.getLogger(__name__)

EMBEDDED: dict[str, Literal["train", "eval"]] = {"embedded:train": "train", "embedded:eval": "eval"}


def read_texts(spec: str, config: SourceConfig | None = None, tokenizer: Any = None) -> Iterator[str]:
    """Yield the texts of a source, one after the other, without the empty ones.

    Args:
        spec: a ``.txt`` file (one text), a ``.jsonl`` file (one object per line), a folder or a glob of those (in the
            order of their names), ``hf:dataset[:config][:split]`` (split ``train`` unless given), or
            ``embedded:train`` / ``embedded:eval``.
        config: formats, chat templates and shuffling; by default rows of every format, chats plainly joined.
        tokenizer: whose chat template is applied; needed where `config` asks for one.

    Raises:
        DataError: the source is missing, cannot be read, is in another format, or holds no text. Raised while
            iterating, not on the call.
    """
    if not spec:
        raise DataError(
            "No text source is named; give a .txt or .jsonl file, a folder, 'hf:dataset' or 'embedded:train'."
        )
    config = config or SourceConfig()
    rows = _rows(spec, config)
    if not config.streaming:  # a stream is shuffled by `datasets`
        rows = shuffled(rows, config)
    is_empty = True
    for text in _rendered(rows, spec, config, tokenizer):
        if text.strip():
            is_empty = False
            yield text
    if is_empty:
        raise DataError(f"The text source {spec!r} holds no text; choose one that does.")


def _rendered(rows: Iterator[Row], spec: str, config: SourceConfig, tokenizer: Any) -> Iterator[str]:
    mode = config.chat_template
    renderer = None if mode == "none" else ChatRenderer(tokenizer, mode)
    is_first = config.data_format == "auto"
    for row in rows:
        if is_first and isinstance(row.value, dict):
            is_first = False
            logger.info("%s: the first row is in the format %s", spec, recognised(row))
        content = content_of(row, config.data_format)
        if isinstance(content, list):
            yield from renderer.texts(content, row.place) if renderer else (plain_text(content),)
        elif renderer is None:
            yield content
        else:
            raise DataError(
                f"{row.place} holds a text, no chat, so chat_template={mode} has nothing to render; use "
                "--chat-template none, or name chats alone."
            )


def _rows(spec: str, config: SourceConfig) -> Iterator[Row]:
    if spec.startswith(HUB_PREFIX):
        return (Row(f"{spec} row {n}", dict(row)) for n, row in enumerate(hub_rows(spec, config, ROW_KEYS), start=1))
    if not is_local(spec):
        if spec not in EMBEDDED:
            raise DataError(f"The text source {spec!r} is unknown; use 'embedded:train' or 'embedded:eval'.")
        return (Row(spec, text) for text in corpus.corpus_texts(EMBEDDED[spec]))
    return (row for path in find_files(spec) for row in _file_rows(path))


def _file_rows(path: Path) -> Iterator[Row]:
    try:
        if path.suffix == ".txt":
            yield Row(str(path), path.read_text(encoding="utf-8-sig"))
            return
        with open(path, encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield Row(f"{path}:{number}", _parsed(line, f"{path}:{number}"))
    except UnicodeDecodeError as error:
        raise DataError(f"{str(path)!r} is not UTF-8 ({error.reason} at byte {error.start}); convert it.") from error
    except OSError as error:
        raise DataError(f"Cannot read {str(path)!r} ({error.strerror}); check the path and its permissions.") from error


def _parsed(line: str, place: str) -> Any:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{place} is no JSON ({error.msg} at column {error.colno}); repair or remove the line."
        ) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, lists in lists in lists
        raise DataError(f"{place} cannot be read ({str(error).split(';')[0]}); repair or remove the line.") from error
    if not isinstance(value, dict):  # also a string, which would pass for the text of a .txt file
        raise DataError(
            f"{place} has no string under 'text' or 'content', but is a JSON {type(value).__name__}; write one object "
            "per line."
        )
    return value
