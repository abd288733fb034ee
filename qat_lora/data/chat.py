"""Chats as the text that a model reads and writes: by its tokenizer's own template, or plainly joined.

Owns what a chat with or without thinking looks like as a training text, and which of its characters an assistant wrote.
Does not own the messages (`formats`), and knows no model's markup but the <think> tags, in which data sets keep
reasoning.

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

import hashlib
import itertools
import json
import logging
import re
from collections.abc import Sequence
from typing import Any

from qat_lora.config.source import ChatTemplate
from qat_lora.data.formats import Message
from qat_lora.errors import DataError

logger = logging.getLogger(__name__)

Spans = tuple[tuple[int, int], ...]

_REASONING = re.compile(r"\A\s*<think>.*?</think>\s*", re.DOTALL)
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # how a template marks what the assistant writes


class ChatText(str):
    """A chat as a text, which knows what of it an assistant wrote.

    Attributes:
        answers: from which character to which before, one pair for each answer, its end of turn included.
        ends_with_answer: the text ends with an answer without an end of turn, for which eos stands.
        chat: says which chat this is, where it is written as several texts; else empty.
    """

    answers: Spans = ()
    ends_with_answer: bool = False
    chat: bytes = b""

    @classmethod
    def of(cls, text: str, answers: Spans, *, ends_with_answer: bool = False) -> ChatText:
        """Make a text of these answers."""
        made = cls(text)
        made.answers, made.ends_with_answer = answers, ends_with_answer
        return made


def plain_text(messages: Sequence[Message]) -> ChatText:
    """The contents of a chat's messages with an empty line between: no roles, no reasoning kept beside a content."""
    said = [(message["role"], content) for message in messages if (content := message["content"].strip())]
    answers, at = [], 0
    for role, content in said:
        if role == "assistant":
            answers.append((at, at + len(content)))
        at += len(content) + 2
    text = "\n\n".join(content for _, content in said)
    return ChatText.of(text, tuple(answers), ends_with_answer=bool(said) and said[-1][0] == "assistant")


class ChatRenderer:
    """Renders chats by a tokenizer's template, with or without thinking or both.

    Raises:
        DataError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any, mode: ChatTemplate) -> None:
        self._name = type(tokenizer).__name__
        template = getattr(tokenizer, "chat_template", None)
        if not template:
            raise DataError(
                f"The tokenizer {self._name} has no chat template, but chat_template={mode}; use --chat-template none, "
                "or put the chat_template.jinja of its chat model beside the tokenizer's files."
            )
        self._tokenizer, self._mode = tokenizer, mode
        self._marks_answers = bool(_GENERATION.search(str(template))) and getattr(tokenizer, "is_fast", False)
        self._logged: set[str] = set()

    def texts(self, messages: Sequence[Message], place: str) -> list[ChatText]:
        """Return the text of a chat, or with ``both`` its texts without and with thinking, each text once.

        Raises:
            DataError: the template refuses the chat; names the place.
        """
        if not messages:
            return []
        if "compared" not in self._logged:
            self._logged.add("compared")
            self._compare(messages, place)
        modes = {"no-think": (False,), "think": (True,), "both": (False, True)}[self._mode]
        texts = list(dict.fromkeys(self._text(messages, thinking, place) for thinking in modes))
        if len(texts) < len(modes):
            self._log_once(
                logging.INFO, "%s reads the same with and without thinking; such chats are written once", place
            )
        if len(texts) > 1:
            chat = hashlib.sha256(json.dumps(list(messages), sort_keys=True).encode()).digest()
            for text in texts:
                text.chat = chat
        return texts

    def _text(self, messages: Sequence[Message], thinking: bool, place: str) -> ChatText:
        if not thinking:
            messages = [_without_reasoning(message) for message in messages]
        rendered = text = self._render(messages, place, thinking=thinking)
        shared = 0  # characters that come before the change
        if not thinking and (before := _before_answer(messages)):
            prompt = self._render(before, place, thinking=False, prompt=True)
            open_prompt = self._render(before, place, thinking=True, prompt=True)
            if not text.startswith(prompt) and text.startswith(open_prompt):
                text, shared = prompt + text.removeprefix(open_prompt), len(open_prompt)
        text = self._ended(text)
        if self._marks_answers:
            moved = len(text) - len(self._ended(rendered))
            marked = self._marked(messages, thinking)
            spans = tuple((a + moved * (a >= shared), b + moved * (b > shared)) for a, b in marked)
        else:
            spans = self._compared(messages, text, thinking, place)
        return ChatText.of(text, tuple((a, min(b, len(text))) for a, b in spans if a < len(text)))

    def _ended(self, text: str) -> str:
        """The text up to its last eos, where only white space follows: a model stops there."""
        stripped, eos = text.rstrip(), self._tokenizer.eos_token
        return stripped if eos and stripped.endswith(eos) else text

    def _marked(self, messages: Sequence[Message], thinking: bool) -> Spans:
        """Where the answers stand, as the template's {% generation %} marks them."""
        found = self._tokenizer.apply_chat_template(
            list(messages),
            enable_thinking=thinking,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"return_offsets_mapping": True},
        )
        spans = []
        tokens = zip(found["assistant_masks"], found["offset_mapping"], strict=True)
        for is_answer, run in itertools.groupby(tokens, key=lambda token: token[0]):
            offsets = [offset for _, offset in run]
            if is_answer:
                spans.append((offsets[0][0], offsets[-1][1]))
        return tuple(spans)

    def _compared(self, messages: Sequence[Message], text: str, thinking: bool, place: str) -> Spans:
        """Where the answers stand, as prompts and longer chats show that begin like the text.

        An assistant that speaks first answers nothing, and has no span.
        """
        spans = []
        for number in range(1, len(messages)):
            if messages[number]["role"] == "assistant":
                span = self._last_answer(messages[: number + 1], text, thinking, place)
                if span is None:
                    self._log_once(
                        logging.WARNING,
                        "the chat template of %s does not show which part of %s is answer %d; such answers are left "
                        "out with --loss-on answers", self._name, place, number + 1,
                    )  # fmt: skip
                else:
                    spans.append(span)
        return tuple(spans)

    def _last_answer(
        self, messages: Sequence[Message], text: str, thinking: bool, place: str
    ) -> tuple[int, int] | None:
        """Where in the text, which may continue, the last message stands; None where the template does not show it."""
        try:
            prompts = [self._render(messages[:-1], place, thinking=t, prompt=True) for t in {thinking, True}]
            shorter = self._render(messages, place, thinking=thinking)
        except DataError:
            return None
        begins = [len(prompt) for prompt in prompts if text.startswith(prompt)]
        begins_here = [len(prompt) for prompt in prompts if shorter.startswith(prompt)]
        if not begins or not begins_here:
            return None
        content = _without_reasoning(messages[-1])["content"].strip()
        answer = shorter[max(begins_here) :]
        is_bare = bool(content) and answer.rstrip().endswith(content)  # white space is the end of turn
        end = len(answer if is_bare else answer.rstrip())
        # Of an answer that is not the last, templates drop the reasoning: then only its end is in the text.
        for first in range(max(0, answer.rfind(content)) + 1):
            if text.startswith(answer[first:end], max(begins)):
                return max(begins), max(begins) + end - first
        return None

    def _compare(self, messages: Sequence[Message], place: str) -> None:
        """Log where thinking or not makes no difference to the template."""
        prompt = _before_answer(messages) or messages
        with_it, without = (
            (self._render(messages, place, thinking=t), self._render(prompt, place, thinking=t, prompt=True))
            for t in (True, False)
        )
        if with_it == without:
            logger.info("the chat template of %s ignores enable_thinking: think and no-think render alike", self._name)

    def _log_once(self, level: int, message: str, *values: object) -> None:
        if message not in self._logged:
            self._logged.add(message)
            logger.log(level, message, *values)

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
                f"The chat template of {self._name} refuses {place} with the roles {roles} ({error}); remove such rows "
                "or use --chat-template none."
            ) from error


def _before_answer(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages that an answer at the end answers; none where there is no such answer."""
    return messages[:-1] if messages[-1]["role"] == "assistant" else ()


def _without_reasoning(message: Message) -> Message:
    if message["role"] != "assistant":
        return message
    return {"role": message["role"], "content": _REASONING.sub("", message["content"])}
