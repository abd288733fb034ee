"""What a row says: a text, or a chat as a list of messages.

Owns the formats text, alpaca, sharegpt and messages, how one is recognised, and every way in which a row can be wrong.
Does not own where rows come from (`text`, `hub`) nor how a chat becomes text (`chat`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from qat_lora.config.source import DataFormat
from qat_lora.errors import DataError

TEXT_KEYS = ("text", "content")
CHAT_KEYS = ("messages", "conversations")
ALPACA_KEYS = ("instruction", "input", "output", "system")
ROW_KEYS = TEXT_KEYS + CHAT_KEYS + ALPACA_KEYS
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")  # the names that transformers knows
SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}

_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can hold one half of a pair, UTF-8 and tokenizers cannot

Message = dict[str, str]  # role, content, and reasoning_content where there is some


class Row(NamedTuple):
    """One row of a source: a text or an object with keys, and where it stands, for errors."""

    place: str
    value: Any


def content_of(row: Row, data_format: DataFormat) -> str | list[Message]:
    """Return the text of a row, or its messages; both may be empty.

    Raises:
        DataError: the row is not in this format, or, for ``auto``, in none.
    """
    if isinstance(row.value, str):
        if data_format not in ("auto", "text"):
            raise DataError(
                f"{row.place} is plain text, but data_format={data_format}; use .jsonl rows, or --data-format text."
            )
        return row.value
    form = recognised(row) if data_format == "auto" else data_format
    content = _text(row) if form == "text" else _with_system(row, _READERS[form](row))
    texts = [content] if isinstance(content, str) else [text for message in content for text in message.values()]
    if half := next((found[0] for text in texts if (found := _SURROGATE.search(text))), None):
        raise DataError(f"{row.place} holds {half!r}, half of a character and no text; repair or remove the row.")
    return content


def recognised(row: Row) -> DataFormat:
    """Return the format that the keys of a row show: chats first, since some data sets hold them as text too."""
    value = row.value
    for key in CHAT_KEYS:
        if isinstance(turns := value.get(key), list):
            is_sharegpt = bool(turns) and isinstance(turns[0], Mapping) and turns[0].get("from") is not None
            return "sharegpt" if is_sharegpt else "messages"
    if value.get("instruction") is not None and value.get("output") is not None:
        return "alpaca"
    if any(key in value for key in TEXT_KEYS):
        return "text"
    raise DataError(
        f"{row.place} has no string under 'text' or 'content', no list under 'messages' or 'conversations' and no "
        f"'instruction' with an 'output', but the keys {list(value)}; rename them or remove the row."
    )


def _text(row: Row) -> str:
    found = [row.value[key] for key in TEXT_KEYS if row.value.get(key) is not None]
    text = next((x for x in found if isinstance(x, str)), None)
    if text is None and (found or not any(key in row.value for key in TEXT_KEYS)):
        what = _shown(found[0]) if found else f"the keys {list(row.value)}"
        raise DataError(f"{row.place} has no string under 'text' or 'content', but {what}; add one or remove the row.")
    return text or ""


def _alpaca(row: Row) -> list[Message]:
    fields = {key: row.value.get(key) for key in ALPACA_KEYS}
    for key, value in fields.items():
        is_needed = key in ("instruction", "output")
        if not isinstance(value, str) and (is_needed or value is not None):
            found = _shown(value) if key in row.value else f"the keys {list(row.value)}"
            raise DataError(
                f"{row.place} is no alpaca row: it needs a string under {key!r}, but has {found}; correct the row or "
                "--data-format."
            )
    question = fields["instruction"] + (f"\n\n{fields['input']}" if (fields["input"] or "").strip() else "")
    return [{"role": "user", "content": question}, {"role": "assistant", "content": fields["output"]}]


def _sharegpt(row: Row) -> list[Message]:
    messages = []
    for place, turn in _turns(row, ("conversations",)):
        speaker = turn.get("from")
        if not isinstance(speaker, str) or speaker not in SPEAKERS:
            raise DataError(
                f"{place} is from {speaker!r:.40}; sharegpt knows {', '.join(SPEAKERS)}: correct the row or "
                "--data-format."
            )
        messages.append({"role": SPEAKERS[speaker], "content": _string(turn.get("value"), "value", place)})
    return messages


def _messages(row: Row) -> list[Message]:
    messages = []
    for place, turn in _turns(row, CHAT_KEYS):
        if turn.get("tool_calls"):
            raise DataError(
                f"{place} holds tool calls, which are not rendered; remove such rows, or give them as text."
            )
        role = _string(turn.get("role"), "role", place)
        message = {"role": role, "content": _string(_parts_joined(turn.get("content")), "content", place)}
        reasoning = next((turn[key] for key in REASONING_KEYS if turn.get(key) is not None), None)
        if reasoning is not None:
            message["reasoning_content"] = _string(reasoning, "reasoning_content", place)
        messages.append(message)
    return messages


_READERS = {"alpaca": _alpaca, "sharegpt": _sharegpt, "messages": _messages}


def _with_system(row: Row, messages: list[Message]) -> list[Message]:
    """The messages behind a system prompt that stands beside them, unless they bring their own."""
    system = row.value.get("system")
    has_own = any(message["role"] == "system" for message in messages)
    if not messages or has_own or not isinstance(system, str) or not system.strip():
        return messages
    return [{"role": "system", "content": system}, *messages]


def _turns(row: Row, keys: tuple[str, ...]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    turns = next((row.value[key] for key in keys if row.value.get(key) is not None), None)
    if not isinstance(turns, list):
        found = f"the keys {list(row.value)}" if turns is None else _shown(turns)
        raise DataError(
            f"{row.place} has no list under {' or '.join(map(repr, keys))}, but {found}; correct the row or "
            "--data-format."
        )
    for number, turn in enumerate(turns, start=1):
        place = f"{row.place} message {number}"
        if not isinstance(turn, Mapping):
            raise DataError(f"{place} is {_shown(turn)}, no object; correct the row.")
        yield place, turn


def _parts_joined(content: Any) -> Any:
    """Some write a content as a list of parts; where all are text, that is their text."""
    if isinstance(content, list) and all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in content):
        return "".join(part["text"] for part in content)
    return content


def _string(value: Any, key: str, place: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{place} has no string under {key!r}, but {_shown(value)}; correct the row or --data-format.")
    return value


def _shown(value: Any) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
