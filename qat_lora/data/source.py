"""From a source, as it is named on the command line, to documents and to rows.

Owns what is asked of a source before long work begins, and the choice between rows that are taken as they are and
documents that are packed. Does not own reading (`text`, `tokens`) nor packing (`rows`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from qat_lora.config import Packing
from qat_lora.config.source import SourceConfig
from qat_lora.data.encode import Document
from qat_lora.data.hub import load_dataset
from qat_lora.data.paths import HUB_PREFIX, has_tokens, shuffled
from qat_lora.data.rows import TokenRows, pack
from qat_lora.data.text import read_texts
from qat_lora.data.tokens import given_rows, token_documents
from qat_lora.errors import ConfigError


def check_source(spec: str, config: SourceConfig) -> None:
    """Raise where settings do not fit the source, or local files are not there: before models are loaded."""
    if config.streaming and not spec.startswith(HUB_PREFIX):
        raise ConfigError(
            f"streaming=True is for hf: sources, but data={spec!r}; drop --streaming, files are read row by row anyway."
        )
    if config.data_format == "text" and config.chat_template != "none":
        raise ConfigError(
            f"chat_template={config.chat_template} needs chats, but data_format=text; give another --data-format or "
            "--chat-template none."
        )
    if has_tokens(spec):
        for name, default in (("data_format", "auto"), ("chat_template", "none")):
            if (value := getattr(config, name)) != default:
                raise ConfigError(
                    f"{name}={value} is for texts, but {spec!r} holds token ids; drop --{name.replace('_', '-')}."
                )


def fetch_source(spec: str, config: SourceConfig) -> None:
    """Bring what is on a hub to the local disk, unless it is streamed; nothing for all else."""
    if spec.startswith(HUB_PREFIX) and not config.streaming:
        load_dataset(spec, streaming=False)


def read_documents(
    spec: str, config: SourceConfig, tokenizer: Any, *, vocab_size: int | None = None
) -> Iterator[Document]:
    """Yield the documents of a source: texts, or ids that are read where they are sliced, as int64.

    Raises:
        DataError: the source is missing, wrong or empty; while iterating, not on the call.
    """
    if has_tokens(spec):
        yield from shuffled(token_documents(spec, vocab_size=vocab_size), config)
    else:
        yield from read_texts(spec, config, tokenizer)


def read_rows(
    spec: str,
    config: SourceConfig,
    tokenizer: Any,
    seq_len: int,
    *,
    packing: Packing = "stream",
    eval_fraction: float = 0.0,
    max_rows: int | None = None,
    vocab_size: int | None = None,
) -> TokenRows:
    """Return the rows of a source: documents packed, or rows of ids that have this length as they are."""
    fill_id = tokenizer.eos_token_id or 0
    rows = given_rows(spec, config, seq_len, fill_id=fill_id, vocab_size=vocab_size, max_rows=max_rows)
    if rows is not None:
        return rows.split(packing=packing, eval_fraction=eval_fraction)
    return pack(
        read_documents(spec, config, tokenizer, vocab_size=vocab_size),
        tokenizer,
        seq_len,
        packing=packing,
        eval_fraction=eval_fraction,
        max_rows=max_rows,
        vocab_size=vocab_size,
    )


def source_words(spec: str, config: SourceConfig) -> str:
    """The source as it was given, with the settings under which its rows were read where they are not the defaults."""
    fields = [(field, getattr(config, field.name)) for field in dataclasses.fields(config)]
    changed = [f"{field.name}={value}" for field, value in fields if value != field.default]
    return f"{spec} ({', '.join(changed)})" if changed else spec
