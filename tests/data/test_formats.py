"""Rows of every format become the same messages, and a row that is wrong is named."""

from __future__ import annotations

import json

import pytest

from qat_lora.config.source import SourceConfig
from qat_lora.data import read_texts
from qat_lora.data.chat import plain_text
from qat_lora.data.formats import Row, content_of
from qat_lora.errors import DataError

QUESTION, ANSWER = {"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hi."}
ROWS = {
    "alpaca": {"instruction": "Hi?", "input": "", "output": "Hi."},
    "sharegpt": {"conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Hi."}]},
    "messages": {"messages": [QUESTION, ANSWER]},
}


def content(value, data_format="auto"):
    return content_of(Row("a.jsonl:7", value), data_format)


def refused(value, data_format="auto"):
    with pytest.raises(DataError) as caught:
        content(value, data_format)
    text = str(caught.value)
    assert text.startswith("a.jsonl:7 ") and "\n" not in text and text.endswith(".")
    return text


@pytest.mark.parametrize("data_format", ROWS)
def test_each_format_gives_messages_named_or_recognised(data_format):
    assert content(ROWS[data_format], data_format) == [QUESTION, ANSWER]
    assert content(ROWS[data_format]) == [QUESTION, ANSWER]


@pytest.mark.parametrize("data_format", ["auto", "text"])
def test_a_text_is_under_text_or_content(data_format):
    assert content({"text": "a", "content": "b"}, data_format) == "a"
    assert content({"text": None, "content": "b"}, data_format) == "b"
    assert content({"text": None}, data_format) == ""


def test_alpaca_joins_instruction_and_input_and_may_have_a_system_prompt():
    row = {"system": "Be kind.", "instruction": "Add.", "input": "1 2", "output": "3"}
    assert content(row) == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Add.\n\n1 2"},
        {"role": "assistant", "content": "3"},
    ]
    assert content(row | {"system": " ", "input": None})[0] == {"role": "user", "content": "Add."}


@pytest.mark.parametrize("data_format", ["sharegpt", "messages"])
def test_a_system_prompt_beside_the_messages_comes_first_unless_they_have_one(data_format):
    system = {"role": "system", "content": "Be kind."}
    row = ROWS[data_format] | {"system": "Be kind."}
    assert content(row) == [system, QUESTION, ANSWER]
    assert content(row | {"system": " "}) == content(row | {"system": None}) == [QUESTION, ANSWER]
    assert content({"messages": [system, QUESTION], "system": "Be rude."}) == [system, QUESTION]


def test_sharegpt_knows_both_names_of_each_speaker():
    turns = [{"from": name, "value": name} for name in ("system", "human", "gpt", "user", "assistant")]
    roles = [message["role"] for message in content({"conversations": turns})]
    assert roles == ["system", "user", "assistant", "user", "assistant"]


def test_messages_may_stand_under_conversations_and_have_parts_and_reasoning():
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i?"}]
    for key in ("reasoning_content", "reasoning", "thinking"):
        row = {"conversations": [QUESTION | {"content": parts, "tool_calls": None}, ANSWER | {key: "Hm."}]}
        expected = [QUESTION, ANSWER | {"reasoning_content": "Hm."}]
        assert content(row) == content(row, "messages") == expected


def test_a_chat_wins_over_a_text_that_stands_beside_it():
    """As in data sets that also hold the row in their own rendering."""
    assert content(ROWS["alpaca"] | {"text": "### Hi?"}) == [QUESTION, ANSWER]
    assert content(ROWS["alpaca"] | {"text": "### Hi?"}, "text") == "### Hi?"


def test_an_empty_chat_is_no_error_and_no_text(tmp_path):
    assert content({"messages": []}) == content({"conversations": []}, "sharegpt") == []
    path = tmp_path / "a.jsonl"
    path.write_text('{"messages": []}\n{"text": "x"}\n')
    assert list(read_texts(str(path))) == ["x"]


@pytest.mark.parametrize(
    ("value", "data_format", "words"),
    [
        ({"body": 1, "id": 2}, "auto", "the keys ['body', 'id']"),
        ({"instruction": "a"}, "auto", "the keys ['instruction']"),
        ({"conversations": "a"}, "auto", "the keys ['conversations']"),
        ({"text": 3}, "auto", "int '3'"),
        ({"messages": []}, "text", "the keys ['messages']"),
        ({"instruction": "a"}, "alpaca", "a string under 'output', but has the keys ['instruction']"),
        ({"instruction": "a", "output": 3}, "alpaca", "a string under 'output', but has int '3'"),
        ({"instruction": "a", "output": "b", "input": []}, "alpaca", "a string under 'input', but has list '[]'"),
        ({"messages": [QUESTION]}, "sharegpt", "no list under 'conversations', but the keys ['messages']"),
        ({"conversations": [QUESTION]}, "sharegpt", "message 1 is from None"),
        ({"conversations": [{"from": "bing", "value": "x"}]}, "auto", "message 1 is from 'bing'"),
        ({"conversations": [{"from": "gpt", "value": None}]}, "auto", "message 1 has no string under 'value'"),
        ({"conversations": [{"from": "gpt", "value": "x"}]}, "messages", "message 1 has no string under 'role'"),
        ({"messages": [QUESTION, "x"]}, "auto", "message 2 is str 'x', no object"),
        ({"messages": [QUESTION, {"role": "assistant"}]}, "auto", "message 2 has no string under 'content'"),
        ({"messages": [ANSWER | {"tool_calls": [{}]}]}, "auto", "message 1 holds tool calls"),
        ({"messages": [ANSWER | {"reasoning": 3}]}, "auto", "no string under 'reasoning_content', but int '3'"),
        ({"messages": "x"}, "messages", "no list under 'messages' or 'conversations', but str 'x'"),
        ("just text", "alpaca", "is plain text, but data_format=alpaca"),
    ],
)
def test_a_row_that_does_not_fit_is_named_with_what_it_holds(value, data_format, words):
    assert words in refused(value, data_format)


def test_without_a_template_a_chat_is_its_contents_with_empty_lines_between():
    assert plain_text([{"role": "system", "content": " "}, QUESTION, ANSWER]) == "Hi?\n\nHi."


@pytest.mark.parametrize("data_format", ["auto", "mixed"])
def test_every_row_of_a_file_is_recognised_by_itself(tmp_path, data_format, caplog):
    rows = [*ROWS.values(), {"text": "Hi?\n\nHi."}]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    if data_format == "auto":
        with caplog.at_level("INFO"):
            assert list(read_texts(str(path), SourceConfig())) == ["Hi?\n\nHi."] * 4
        assert [r.message for r in caplog.records] == [f"{path}: the first row is in the format alpaca"]
        return
    with pytest.raises(DataError, match=rf"{path}:2 is no alpaca row"):
        list(read_texts(str(path), SourceConfig(data_format="alpaca")))


@pytest.mark.parametrize("speaker", [["human"], {"a": 1}, None, 3, "\ud800"])
@pytest.mark.parametrize("data_format", ["auto", "sharegpt"])
def test_a_speaker_that_is_no_name_is_refused(speaker, data_format):
    turns = [ROWS["sharegpt"]["conversations"][0], {"from": speaker, "value": "Hi."}]
    text = refused({"conversations": turns}, data_format)
    assert f"a.jsonl:7 message 2 is from {speaker!r}; sharegpt knows human" in text


@pytest.mark.parametrize(
    "value",
    [
        {"text": "a\ud800b"},
        ROWS["alpaca"] | {"output": "\ud800"},
        ROWS["sharegpt"] | {"system": "\ud800"},
        {"messages": [QUESTION, ANSWER | {"reasoning_content": "\ud800"}]},
    ],
)
def test_half_of_a_character_is_refused_and_a_whole_pair_is_read(value):
    assert "holds '\\ud800', half of a character" in refused(value)
    content(json.loads(json.dumps(value).replace("\\ud800", "\\ud83d\\ude00")))
    content({"text": "good", "other": "\ud800"})
