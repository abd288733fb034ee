"""Chats as the text that a model reads and writes: by its tokenizer's own template, or plainly joined.

Owns what a chat with or without thinking looks like as a training text. Does not own the messages (`formats`), and
knows no model's markup but the <think> tags, in which data sets keep reasoning.

In use a model reads a prompt, which the template makes of all messages before the answer, and writes the answer behind
it. A training text is right where it is this prompt and this answer:

- Qwen3's template reads `enable_thinking` for the prompt alone: False puts an empty think block at its end. A chat that
  already ends with an answer is rendered with a think block around the answer's reasoning, an empty one where there is
  none, whatever `enable_thinking` says. So a text without thinking is the chat without its reasoning, and one with
  thinking the chat as it is; without reasoning in the data both are the same text.
- Other templates write the empty block into the prompt only. Then the text without thinking is that prompt, and behind
  it what the whole chat has behind the prompt with thinking.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any, Protocol

from qat_lora.config.source import ChatTemplate
from qat_lora.data.formats import Message
from qat_lora.errors import DataError

logger = logging.getLogger(__name__)

_REASONING = re.compile(r"\A\s*<think>.*?</think>\s*", re.DOTALL)


class ChatTokenizer(Protocol):
    """What is asked of a tokenizer here; those of transformers offer it."""

    chat_template: Any
    eos_token: Any

    def apply_chat_template(self, conversation: Any, **settings: Any) -> Any:
        """Render messages; with ``tokenize=False`` the result is a string."""


def plain_text(messages: Sequence[Message]) -> str:
    """The contents of a chat's messages with an empty line between: no roles, no reasoning kept beside a content."""
    return "\n\n".join(content for message in messages if (content := message["content"].strip()))


class ChatRenderer:
    """Renders chats by a tokenizer's template, with or without thinking or both.

    Raises:
        DataError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: ChatTokenizer, mode: ChatTemplate) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise DataError(
                f"The tokenizer {type(tokenizer).__name__} has no chat template, but chat_template={mode}; use "
                "--chat-template none, or put the chat_template.jinja of its chat model beside the tokenizer's files."
            )
        self._tokenizer, self._mode = tokenizer, mode
        self._was_compared = self._was_told_of_one = False

    def texts(self, messages: Sequence[Message], place: str) -> list[str]:
        """Return the text of a chat, or with ``both`` its texts without and with thinking, each text once.

        Raises:
            DataError: the template refuses the chat; names the place.
        """
        if not messages:
            return []
        if not self._was_compared:
            self._was_compared = True
            self._compare(messages, place)
        modes = {"no-think": (False,), "think": (True,), "both": (False, True)}[self._mode]
        texts = list(dict.fromkeys(self._text(messages, thinking, place) for thinking in modes))
        if len(texts) < len(modes) and not self._was_told_of_one:
            self._was_told_of_one = True
            logger.info("%s reads the same with and without thinking; such chats are written once", place)
        return texts

    def _text(self, messages: Sequence[Message], thinking: bool, place: str) -> str:
        if thinking:
            return self._ended(self._render(messages, place, thinking=True))
        bare = [_without_reasoning(message) for message in messages]
        text = self._render(bare, place, thinking=False)
        if before := _before_answer(bare):
            prompt = self._render(before, place, thinking=False, prompt=True)
            open_prompt = self._render(before, place, thinking=True, prompt=True)
            if not text.startswith(prompt) and text.startswith(open_prompt):
                text = prompt + text.removeprefix(open_prompt)
        return self._ended(text)

    def _ended(self, text: str) -> str:
        """The text up to its last eos, where only white space follows: a model stops there."""
        stripped, eos = text.rstrip(), self._tokenizer.eos_token
        return stripped if eos and stripped.endswith(eos) else text

    def _compare(self, messages: Sequence[Message], place: str) -> None:
        """Say so where thinking or not makes no difference to the template."""
        prompt = _before_answer(messages) or messages
        with_it, without = (
            (self._render(messages, place, thinking=t), self._render(prompt, place, thinking=t, prompt=True))
            for t in (True, False)
        )
        if with_it == without:
            name = type(self._tokenizer).__name__
            logger.info("the chat template of %s ignores enable_thinking: think and no-think render alike", name)

    def _render(self, messages: Sequence[Message], place: str, *, thinking: bool, prompt: bool = False) -> str:
        from jinja2 import TemplateError

        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=prompt, enable_thinking=thinking
                )
            )
        except (TemplateError, ValueError, TypeError, ImportError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(
                f"The chat template of {type(self._tokenizer).__name__} refuses {place} with the roles {roles} "
                f"({error}); remove such rows or use --chat-template none."
            ) from error


def _before_answer(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages that an answer at the end answers; none where there is no such answer."""
    return messages[:-1] if messages[-1]["role"] == "assistant" else ()


def _without_reasoning(message: Message) -> Message:
    if message["role"] != "assistant":
        return message
    return {"role": message["role"], "content": _REASONING.sub("", message["content"])}
