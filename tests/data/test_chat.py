"""Training texts are what a model reads and writes in use, with and without thinking."""

from __future__ import annotations

import dataclasses
import json

import pytest
import tokenizers
import transformers

from qat_lora.config.source import SourceConfig
from qat_lora.data import pack, read_texts
from qat_lora.data.chat import ChatRenderer
from qat_lora.errors import DataError

EOS = "<|im_end|>"
# The markup of chat models with two modes, in the three ways of treating `enable_thinking` that there are.
TURN = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
NO_THINK = "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
IGNORING = "{% for m in messages %}" + TURN + "{% endfor %}" + PROMPT + "{% endif %}"
IN_PROMPT = "{% for m in messages %}" + TURN + "{% endfor %}" + PROMPT + NO_THINK + "{% endif %}"
# As Qwen3's: a block around the reasoning of the last answer whatever the mode, and thoughts of earlier turns dropped.
IN_ANSWER = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% set answer = m.content.split('</think>')[-1].lstrip() %}"
    "{% if loop.last %}{% set thought = m.reasoning_content or (m.content.split('</think>')[0].split('<think>')[-1]"
    ".strip() if '</think>' in m.content else '') %}{{ '<|im_start|>assistant\\n<think>\\n' + thought + "
    "'\\n</think>\\n\\n' + answer + '<|im_end|>\\n' }}{% else %}{{ '<|im_start|>assistant\\n' + answer + "
    "'<|im_end|>\\n' }}{% endif %}{% else %}" + TURN + "{% endif %}{% endfor %}" + PROMPT + NO_THINK + "{% endif %}"
)
QUESTION, ANSWER = {"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hi."}
THOUGHT = ANSWER | {"reasoning_content": "Hm."}
TAGGED = ANSWER | {"content": "<think>\nHm.\n</think>\n\nHi."}
HEAD = "<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n"
WITHOUT, WITH = HEAD + "<think>\n\n</think>\n\nHi." + EOS, HEAD + "<think>\nHm.\n</think>\n\nHi." + EOS


def tokenizer(template, eos=EOS):
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, eos: 1, "Hi": 2}, unk_token="?"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, unk_token="?")
    made.chat_template = template
    return made


def texts(template, mode, *messages):
    return ChatRenderer(tokenizer(template), mode).texts(messages, "a.jsonl:7")


@pytest.mark.parametrize("answer", [THOUGHT, TAGGED])
def test_reasoning_is_kept_with_thinking_and_taken_out_without(answer):
    assert texts(IN_ANSWER, "think", QUESTION, answer) == [WITH]
    assert texts(IN_ANSWER, "no-think", QUESTION, answer) == [WITHOUT]
    assert texts(IN_ANSWER, "both", QUESTION, answer) == [WITHOUT, WITH]


def test_an_answer_without_reasoning_is_the_same_text_in_both_modes_of_such_a_template():
    """A model of this kind opens a block in either mode, so there is no second text."""
    for mode in ("think", "no-think", "both"):
        assert texts(IN_ANSWER, mode, QUESTION, ANSWER) == [WITHOUT]


def test_a_block_that_the_template_writes_into_the_prompt_alone_is_in_the_text():
    assert texts(IN_PROMPT, "no-think", QUESTION, ANSWER) == [WITHOUT]
    assert texts(IN_PROMPT, "think", QUESTION, ANSWER) == [HEAD + "Hi." + EOS]
    assert texts(IN_PROMPT, "both", QUESTION, ANSWER) == [WITHOUT, HEAD + "Hi." + EOS]


@pytest.mark.parametrize("template", [IN_PROMPT, IN_ANSWER])
def test_a_text_begins_with_what_the_model_is_given_in_use(template):
    made, chat = tokenizer(template), [QUESTION, TAGGED, QUESTION]
    for mode, thinking in (("no-think", False), ("think", True)):
        prompt = made.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, enable_thinking=thinking)
        (text,) = ChatRenderer(made, mode).texts([*chat, ANSWER], "here")
        if mode == "think" or template == IN_ANSWER:
            assert text.startswith(prompt)
        else:  # this template keeps earlier thoughts; a text without thinking has none
            assert text.startswith(prompt.replace("<think>\nHm.\n</think>\n\n", "", 1))


def test_a_chat_that_ends_with_a_question_is_rendered_as_it_is():
    text = HEAD.removesuffix("\n<|im_start|>assistant\n")
    for mode in ("no-think", "think", "both"):
        assert texts(IN_PROMPT, mode, QUESTION) == [text]
    assert texts(IN_PROMPT, "no-think", ANSWER) == ["<|im_start|>assistant\nHi." + EOS]


def test_a_template_that_ignores_thinking_is_said_once_and_nothing_is_written_twice(caplog):
    for mode, told in (("think", 1), ("no-think", 1), ("both", 2)):
        renderer = ChatRenderer(tokenizer(IGNORING), mode)
        caplog.clear()
        with caplog.at_level("INFO"):
            for _ in range(3):
                assert renderer.texts([QUESTION, ANSWER], "here") == [HEAD + "Hi." + EOS]
        said = [record.message for record in caplog.records]
        assert len(said) == told and "ignores enable_thinking" in said[0]
        assert mode != "both" or "such chats are written once" in said[1]
    caplog.clear()
    with caplog.at_level("INFO"):
        for template in (IN_PROMPT, IN_ANSWER):
            texts(template, "think", QUESTION, ANSWER)
    assert not caplog.records


def test_the_end_of_a_turn_that_is_eos_ends_the_text_and_gets_no_second(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": [QUESTION, ANSWER]}) + "\n" + json.dumps({"messages": [QUESTION]}))
    config = SourceConfig(chat_template="no-think")
    for eos, ends in ((EOS, [f"Hi.{EOS}", f"Hi?{EOS}"]), ("<eos>", [f"Hi.{EOS}\n", f"Hi?{EOS}\n"])):
        made = tokenizer(IN_PROMPT, eos)
        found = list(read_texts(str(path), config, made))
        assert [text[-len(end) :] for text, end in zip(found, ends, strict=True)] == ends
        ids = pack(found, made, 64).input_ids_RT[0].tolist()
        alone = [made(text, add_special_tokens=False)["input_ids"] for text in found]
        added = [] if eos == EOS else [1]
        joined = [*alone[0], *added, *alone[1], *added]
        assert ids[: len(joined)] == joined and joined[-1] == 1 and (joined[-2] == 1) is False


def test_a_tokenizer_without_a_template_is_refused_with_the_fix(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": [QUESTION, ANSWER]}))
    with pytest.raises(DataError, match=r"no chat template, but chat_template=think; use --chat-template none"):
        list(read_texts(str(path), SourceConfig(chat_template="think"), tokenizer(None)))
    assert list(read_texts(str(path), SourceConfig(), None)) == ["Hi?\n\nHi."]


def test_a_text_has_nothing_to_render(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": [QUESTION]}) + '\n{"text": "x"}')
    with pytest.raises(DataError, match=rf"{path}:2 holds a text, no chat"):
        list(read_texts(str(path), SourceConfig(chat_template="both"), tokenizer(IN_PROMPT)))


def test_a_chat_that_the_template_refuses_is_named_with_its_roles():
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}"
    with pytest.raises(DataError, match=r"refuses a.jsonl:7 with the roles assistant, user \(user first\)"):
        texts(template, "think", ANSWER, QUESTION)
    with pytest.raises(DataError, match="refuses a.jsonl:7"):
        texts("{{ messages[0].content + 3 }}", "think", QUESTION)


# As the template above, with the mark that transformers knows for what an assistant writes.
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}{% else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}" + PROMPT + NO_THINK + "{% endif %}"
)
BARE_TURN = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}" + (
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
SECOND, THIRD = {"role": "user", "content": "And?"}, {"role": "assistant", "content": "Hi. Hi"}


def answers(text):
    return [str(text)[begin:end] for begin, end in text.answers]


@pytest.mark.parametrize("mode", ["no-think", "think"])
@pytest.mark.parametrize("template", [IGNORING, IN_PROMPT, IN_ANSWER, MARKED])
def test_answers_are_what_an_assistant_writes_and_the_end_of_its_turn(template, mode):
    (text,) = texts(template, mode, {"role": "system", "content": "Hi."}, QUESTION, ANSWER, SECOND, THIRD)
    block = "<think>\n\n</think>\n\n" if template == IN_ANSWER and mode == "think" else ""
    assert answers(text) == ["Hi." + EOS, block + "Hi. Hi" + EOS]
    assert text.answers[1][1] == len(text)
    (text,) = texts(template, mode, QUESTION, TAGGED)
    thought = "<think>\nHm.\n</think>\n\n" if mode == "think" else ""
    assert answers(text) == [thought + "Hi." + EOS]
    assert [answers(text) for text in texts(template, mode, QUESTION)] == [[]]


def test_earlier_answers_are_found_where_the_template_drops_their_reasoning():
    (text,) = texts(IN_ANSWER, "think", QUESTION, THOUGHT, SECOND, THOUGHT)
    assert answers(text) == ["Hi." + EOS, "<think>\nHm.\n</think>\n\nHi." + EOS]


def test_white_space_that_ends_a_turn_belongs_to_the_answer():
    (text,) = texts(BARE_TURN, "think", QUESTION, ANSWER, SECOND, THIRD)
    assert answers(text) == ["Hi.\n", "Hi. Hi\n"]


def test_an_answer_that_a_template_does_not_show_is_left_out_and_said_once(caplog):
    unstable = "{{ messages | length }}{% for m in messages %}" + TURN + "{% endfor %}"
    renderer = ChatRenderer(tokenizer(unstable), "think")
    for _ in range(2):
        (text,) = renderer.texts([QUESTION, ANSWER], "a.jsonl:7")
        assert text.answers == ()
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1 and "does not show which part of a.jsonl:7 is answer 2" in said[0]


def test_a_mask_by_hand(tmp_path):
    """Tokens of the answers, each with its end of turn: by the template, joined plainly, and in rows."""
    words = ["<|im_end|>", "<|im_start|>", "user", "assistant", "Hi", "Ho", "And"]
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)} | {"?": 7}, "?"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=EOS, unk_token="?", additional_special_tokens=["<|im_start|>"]
    )
    rows = [("user", "And"), ("assistant", "Hi Ho"), ("user", "Hi"), ("assistant", "Ho")]
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": [{"role": role, "content": text} for role, text in rows]}))
    for template in (IN_PROMPT, MARKED):
        made.chat_template = template
        found = pack(read_texts(str(path), SourceConfig(chat_template="think"), made), made, 10)
        assert found.input_ids_RT.tolist() == [[1, 2, 6, 0, 1, 3, 4, 5, 0, 1], [2, 4, 0, 1, 3, 5, 0, 0, 0, 0]]
        assert found.answer_RT.astype(int).tolist() == [[0, 0, 0, 0, 0, 0, 1, 1, 1, 0], [0, 0, 0, 0, 0, 1, 1, 0, 0, 0]]
    plain = pack(read_texts(str(path), SourceConfig(), made), made, 8)
    assert plain.input_ids_RT.tolist() == [[6, 4, 5, 4, 5, 0, 0, 0]]
    assert plain.answer_RT.astype(int).tolist() == [[0, 1, 1, 0, 1, 1, 0, 0]]
    assert plain.digest() != dataclasses.replace(plain, answer_RT=None).digest()
    path.write_text(json.dumps({"text": "Hi Ho"}))
    assert pack(read_texts(str(path), SourceConfig(), made), made, 8).answer_RT is None
    path.write_text('{"text": "Hi"}\n' + json.dumps({"instruction": "And", "output": "Ho"}))
    mixed = pack(read_texts(str(path), SourceConfig(), made), made, 8)
    assert mixed.answer_RT.astype(int).tolist() == [[0, 0, 0, 1, 1, 0, 0, 0]], "a text has no answers"


def test_the_two_texts_of_a_chat_know_that_they_are_of_one_chat():
    first, other = texts(IN_ANSWER, "both", QUESTION, THOUGHT), texts(IN_ANSWER, "both", QUESTION, TAGGED)
    assert first[0].chat and first[0].chat == first[1].chat
    assert {x.chat for x in first}.isdisjoint(x.chat for x in other)
    assert texts(IN_ANSWER, "think", QUESTION, THOUGHT)[0].chat == b"", "a text alone is its own document"
