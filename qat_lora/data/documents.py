"""Documents of any source, each a text or token ids, on their way to rows.

Owns what is asked of a source before long work begins. Does not own reading (`text`, `tokens`) nor packing (`blocks`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from qat_lora.config.source import SourceConfig
from qat_lora.data.blocks import Document
from qat_lora.data.hub import fetch
from qat_lora.data.paths import HUB_PREFIX, has_tokens
from qat_lora.data.shuffle import shuffled
from qat_lora.data.text import read_texts
from qat_lora.data.tokens import token_documents
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
        for name, is_default in (
            ("data_format", config.data_format == "auto"),
            ("chat_template", config.chat_template == "none"),
        ):
            if not is_default:
                raise ConfigError(
                    f"{name}={getattr(config, name)} is for texts, but {spec!r} holds token ids; drop "
                    f"--{name.replace('_', '-')}."
                )


def fetch_source(spec: str, config: SourceConfig) -> None:
    """Bring what is on a hub to the local disk, unless it is streamed; nothing for all else."""
    if spec.startswith(HUB_PREFIX) and not config.streaming:
        fetch(spec)


def read_documents(
    spec: str, config: SourceConfig, tokenizer: Any, *, vocab_size: int | None = None
) -> Iterator[Document]:
    """Yield the documents of a source: texts, or ids that are read where they are sliced, as int64.

    Raises:
        DataError: the source is missing, wrong or empty; while iterating, not on the call.
    """
    if not has_tokens(spec):
        yield from read_texts(spec, config, tokenizer)
        return
    yield from shuffled(token_documents(spec, vocab_size=vocab_size), config)


def source_words(spec: str, config: SourceConfig) -> str:
    """The source as it was given, with the settings under which its rows were read where they are not the defaults."""
    defaults = SourceConfig()
    changed = [
        f"{f.name}={getattr(config, f.name)}"
        for f in dataclasses.fields(config)
        if getattr(config, f.name) != getattr(defaults, f.name)
    ]
    return f"{spec} ({', '.join(changed)})" if changed else spec
