"""Every text source, and every way in which one can be wrong, one sentence each."""

from __future__ import annotations

import json
import sys
import types

import pytest

from qat_lora.data import corpus, read_texts
from qat_lora.errors import DataError


def refused(spec):
    with pytest.raises(DataError) as caught:
        list(read_texts(str(spec)))
    text = str(caught.value)
    assert "\n" not in text and text.endswith(".")
    return text


def write_jsonl(path, *rows):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
    return path


def test_a_text_file_is_one_text_line_breaks_and_all(tmp_path):
    (tmp_path / "a.txt").write_text("One\n\ntwo äöü\n", encoding="utf-8")
    assert list(read_texts(str(tmp_path / "a.txt"))) == ["One\n\ntwo äöü\n"]


def test_a_jsonl_file_is_one_text_per_line_and_blank_lines_and_empty_texts_are_none(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", {"text": "one"}, "", {"content": "two"}, {"text": "  "}, {"text": "3"})
    assert list(read_texts(str(path))) == ["one", "two", "3"]


def test_a_folder_and_a_glob_are_their_files_in_the_order_of_names(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "sub" / "c.txt").write_text("c")
    write_jsonl(tmp_path / "a.jsonl", {"text": "a1"}, {"text": "a2"})
    (tmp_path / "notes.md").write_text("not a source")
    assert list(read_texts(str(tmp_path))) == ["a1", "a2", "b", "c"]
    assert list(read_texts(str(tmp_path / "*.txt"))) == ["b"]
    assert list(read_texts(str(tmp_path / "**" / "*.txt"))) == ["b", "c"]


def test_texts_are_read_one_at_a_time(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", {"text": "good"}, "{bad")
    texts = read_texts(str(path))
    assert next(texts) == "good"
    with pytest.raises(DataError):
        next(texts)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{bad", "is no JSON"),
        ("[1, 2]", "has no string under 'text' or 'content'"),
        ('"just text"', "has no string"),
        ('{"body": "x"}', "has no string"),
        ('{"text": 3}', "has no string"),
        ('{"text": ' + "[" * 100_000, "cannot be read (maximum recursion depth"),
        ('{"text": ' + "1" * 5000 + "}", "cannot be read (Exceeds the limit"),
        ('{"text": "a\\ud800"}', "holds '\\ud800', half of a character and no text; repair or remove the row"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path, line, words):
    path = write_jsonl(tmp_path / "a.jsonl", {"text": "good"}, "", line)
    assert f"{path}:3 {words}" in refused(path)


def test_a_source_that_is_missing(tmp_path):
    assert "does not exist" in refused(tmp_path / "nothing.txt")
    assert "does not exist" in refused(tmp_path / "*.txt")
    assert "No text source is named" in refused("")


def test_a_folder_without_texts(tmp_path):
    (tmp_path / "a.md").write_text("x")
    assert "holds no .txt, .jsonl, .pt, .npy or .safetensors file" in refused(tmp_path)


def test_a_file_of_another_kind(tmp_path):
    (tmp_path / "a.pdf").write_bytes(b"x")
    assert "a.pdf' is neither .txt, .jsonl, .pt, .npy nor .safetensors" in refused(tmp_path / "a.pdf")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_source_with_no_text_in_it(tmp_path, name):
    (tmp_path / name).write_text(" \n\n")
    assert f"{name}' holds no text" in refused(tmp_path / name)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_file_that_is_not_utf8(tmp_path, name):
    (tmp_path / name).write_bytes(b"abc\xff\xfe")
    assert f"{name}' is not UTF-8" in refused(tmp_path / name)


def test_the_embedded_corpus_has_two_sides_and_no_third(monkeypatch):
    monkeypatch.setattr(corpus, "corpus_texts", lambda split: iter([f"text of {split}"]))
    for split in ("train", "eval"):
        assert list(read_texts(f"embedded:{split}")) == [f"text of {split}"]
    assert "'embedded:train' or 'embedded:eval'" in refused("embedded:test")
    assert "'embedded:train' or 'embedded:eval'" in refused("embedded")


def test_a_folder_whose_name_begins_like_the_embedded_corpus_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "embedded_texts").mkdir()
    (tmp_path / "embedded_texts" / "a.txt").write_text("mine")
    assert list(read_texts("embedded_texts")) == list(read_texts("embedded_texts/a.txt")) == ["mine"]
    assert "does not exist" in refused("embedded_none")


class Rows(list):
    """As much of a hub dataset as is used."""

    @property
    def column_names(self):
        return list(self[0])

    def select_columns(self, columns):
        return [{c: row[c] for c in columns} for row in self]


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the package `datasets`; set `hub.load_dataset`."""

    class DatasetsError(Exception):
        pass

    module = types.SimpleNamespace(exceptions=types.SimpleNamespace(DatasetsError=DatasetsError))
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


@pytest.mark.parametrize(
    ("spec", "call"),
    [
        ("hf:me/some", ("me/some", None, "train")),
        ("hf:me/some:raw-v1", ("me/some", "raw-v1", "train")),
        ("hf:me/some:raw-v1:train[:1%]", ("me/some", "raw-v1", "train[:1%]")),
        ("hf:me/some::validation", ("me/some", None, "validation")),
    ],
)
def test_a_hub_spec_is_dataset_config_and_split(hub, spec, call):
    calls = []

    def load_dataset(name, config, *, split, streaming):
        assert not streaming
        calls.append((name, config, split))
        return Rows([{"id": 1, "text": "a"}, {"id": 2, "text": ""}, {"id": 3, "text": "b"}])

    hub.load_dataset = load_dataset
    assert list(read_texts(spec)) == ["a", "b"]
    assert calls == [call]


def test_a_hub_that_cannot_be_reached_or_has_no_such_thing(hub):
    for error in (
        ConnectionError("Couldn't reach 'me/some' on the Hub\nmore"),
        FileNotFoundError("Dataset 'me/some' doesn't exist"),
        ValueError("Unknown split"),
        hub.exceptions.DatasetsError("broken"),
    ):

        def load_dataset(*args, error=error, **kwargs):
            raise error

        hub.load_dataset = load_dataset
        text = refused("hf:me/some")
        assert "Cannot load 'hf:me/some'" in text and str(error).splitlines()[0] in text and "network" in text


def test_a_hub_dataset_without_a_text_column(hub):
    hub.load_dataset = lambda *a, **k: Rows([{"question": "x"}])
    assert "has the columns ['question']" in refused("hf:me/some")


@pytest.mark.parametrize("spec", ["hf:", "hf::config"])
def test_a_malformed_hub_spec(spec):
    assert "malformed" in refused(spec)


def test_without_the_extra_the_error_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'qat_lora[hf]'" in refused("hf:me/some")


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path):
    (tmp_path / "a.txt").write_text("one", encoding="utf-8-sig")
    (tmp_path / "b.jsonl").write_text('{"text": "two"}\n', encoding="utf-8-sig")
    assert list(read_texts(str(tmp_path))) == ["one", "two"]
