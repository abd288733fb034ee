"""Streams of a hub: what is asked of `datasets`, how much is read, and in which order."""

from __future__ import annotations

import itertools
import json
import sys
import types

import pytest

from qat_lora.config.source import SourceConfig
from qat_lora.data import check_source, fetch_source, pack, read_documents, read_texts
from qat_lora.data.paths import shuffled
from qat_lora.errors import ConfigError, DataError
from tests.data.test_rows import ByteTokenizer

STREAM = SourceConfig(streaming=True)


class Stream:
    """As much of an iterable data set as is used; counts the rows that were asked for."""

    def __init__(self, rows, column_names=("text",)):
        self.rows, self.column_names, self.read, self.shuffles = rows, column_names, 0, []

    def __iter__(self):
        for row in self.rows:
            self.read += 1
            yield row

    def select_columns(self, columns):
        self.selected = columns
        return self

    def shuffle(self, *, seed, buffer_size):
        self.shuffles.append((seed, buffer_size))
        return self


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the package `datasets`; set `hub.made` to what it loads, and read `hub.calls`."""

    class DatasetsError(Exception):
        pass

    def load_dataset(*args, **settings):
        module.calls.append((*args, settings))
        return module.made

    module = types.SimpleNamespace(
        exceptions=types.SimpleNamespace(DatasetsError=DatasetsError), load_dataset=load_dataset, calls=[]
    )
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


def test_a_stream_is_read_no_further_than_the_rows_need(hub):
    hub.made = Stream({"text": f"text {n}"} for n in itertools.count())
    documents = read_documents("hf:me/some:raw:test", STREAM, ByteTokenizer())
    assert pack(documents, ByteTokenizer(), 8, max_rows=5).input_ids_RT.shape == (5, 8)
    assert hub.calls == [("me/some", "raw", {"split": "test", "streaming": True})]
    assert hub.made.read <= 64, "texts are tokenised 64 at a time"
    assert hub.made.selected == ["text"] and not hub.made.shuffles


def test_a_stream_is_shuffled_by_datasets_with_our_seed(hub):
    hub.made = Stream([{"text": "a"}, {"text": "b"}])
    config = SourceConfig(streaming=True, shuffle_buffer=100, data_seed=3)
    assert list(read_texts("hf:me/some", config)) == ["a", "b"]
    assert hub.made.shuffles == [(3, 100)]


def test_columns_that_a_stream_does_not_name_are_taken_as_they_come(hub):
    hub.made = Stream([{"text": "a", "id": 1}], column_names=None)
    assert list(read_texts("hf:me/some", STREAM)) == ["a"]


def test_a_row_that_fits_no_format_is_named_by_its_number(hub):
    hub.made = Stream([{"text": "a"}, {"text": 3}])
    with pytest.raises(DataError, match="^hf:me/some row 2 has no string under 'text'"):
        list(read_texts("hf:me/some", STREAM))


@pytest.mark.parametrize("error", [ConnectionError("timed out\nmore"), ValueError("timed out")])
def test_a_stream_that_breaks_off_is_an_error_and_no_short_text(hub, error):
    def rows():
        yield {"text": "a"}
        raise error

    hub.made = Stream(rows())
    with pytest.raises(
        DataError, match=r"^Reading 'hf:me/some' broke off after 1 rows \(timed out\); check the network"
    ):
        list(read_texts("hf:me/some", STREAM))


def test_what_is_streamed_or_local_is_not_fetched_first(hub, tmp_path):
    hub.made = Stream([])
    fetch_source("hf:me/some", STREAM)
    fetch_source(str(tmp_path), SourceConfig())
    fetch_source("embedded:train", SourceConfig())
    assert not hub.calls
    fetch_source("hf:me/some", SourceConfig())
    assert hub.calls == [("me/some", None, {"split": "train", "streaming": False})]


def test_streaming_what_lies_here_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    for spec in (str(tmp_path), "embedded:train"):
        with pytest.raises(ConfigError, match=r"streaming=True is for hf: sources.*drop --streaming"):
            check_source(spec, STREAM)
        check_source(spec, SourceConfig(shuffle_buffer=10))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A data set of 40 chats and 40 texts in three files, as `datasets` itself loads it."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    for part in range(3):
        rows = [{"messages": [{"role": "user", "content": f"{part}-{n}"}], "id": n} for n in range(20)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "set" / f"train-{part:05d}-of-00003.jsonl").write_text(text)
    return f"hf:{tmp_path / 'set'}"


def test_datasets_own_loader_gives_the_same_rows_streamed_and_not(folder):
    expected = [f"{part}-{n}" for part in range(3) for n in range(20)]
    for config in (SourceConfig(), STREAM):
        assert list(read_texts(folder, config)) == expected


@pytest.mark.parametrize("streaming", [True, False])
def test_the_order_of_a_shuffled_data_set_is_a_function_of_the_seed(folder, streaming):
    def texts(seed, buffer=10):
        config = SourceConfig(streaming=streaming, shuffle_buffer=buffer, data_seed=seed)
        return list(read_texts(folder, config))

    plain = texts(0, buffer=0)
    assert texts(0) == texts(0) != texts(1)
    assert sorted(texts(0)) == sorted(texts(1)) == sorted(plain) and texts(0) != plain


def test_a_folder_that_is_no_data_set_and_a_split_that_is_not_there(folder, tmp_path):
    for spec in (f"hf:{tmp_path / 'none'}", f"{folder}::test"):
        with pytest.raises(DataError, match="Cannot load"):
            list(read_texts(spec, STREAM))


def test_a_broken_row_of_a_real_stream(folder, tmp_path):
    with (tmp_path / "set" / "train-00002-of-00003.jsonl").open("a") as file:
        file.write("{bad\n")
    with pytest.raises(DataError, match=r"broke off after \d+ rows \(JSON parse error"):
        list(read_texts(folder, STREAM))


@pytest.mark.parametrize("buffer", [1, 4, 7, 50, 51])
def test_a_buffer_of_rows_loses_none_and_brings_none_far_forward(buffer):
    config = SourceConfig(shuffle_buffer=buffer, data_seed=1)
    order = list(shuffled(range(50), config))
    assert sorted(order) == list(range(50)) and order == list(shuffled(range(50), config))
    assert all(row - place < buffer for place, row in enumerate(order))
    assert (order == list(range(50))) is (buffer == 1)
    assert order != list(shuffled(range(50), SourceConfig(shuffle_buffer=buffer, data_seed=2))) or buffer == 1


def test_a_buffer_reads_no_further_than_its_size():
    read = itertools.count()
    rows = shuffled((next(read) for _ in itertools.count()), SourceConfig(shuffle_buffer=10))
    list(itertools.islice(rows, 5))
    assert next(read) == 15


def test_files_are_shuffled_too(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": str(n)}) + "\n" for n in range(20)))
    found = list(read_texts(str(path), SourceConfig(shuffle_buffer=20)))
    assert found != sorted(found, key=int) and sorted(found, key=int) == [str(n) for n in range(20)]
