"""Token ids from files: rows that fit stay as they are, all others are documents, and nothing is guessed."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from qat_lora.config.source import SourceConfig
from qat_lora.data import check_source, given_rows, pack, read_documents
from qat_lora.errors import ConfigError, DataError
from tests.data.test_rows import EOS, ByteTokenizer

PLAIN = SourceConfig()
ROWS = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
LENGTHS = [4, 2, 3]
MASK = [[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]]


def write(path, content):
    if path.suffix == ".npy":
        np.save(path, content)
    elif path.suffix == ".safetensors":
        save_file({name: np.array(x) for name, x in content.items()}, path)
    else:
        torch.save(content, path)
    return str(path)


def documents(spec, config=PLAIN, **settings):
    return [x[:].tolist() for x in read_documents(spec, config, ByteTokenizer(), **settings)]


def blocks(spec, seq_len=4, config=PLAIN, **settings):
    found = given_rows(spec, config, seq_len, fill_id=EOS, **settings)
    return None if found is None else (found.input_ids_RT.tolist(), found.length_R.tolist())


def refused(path, content):
    """Either way of reading refuses it, in one sentence."""
    spec = write(path, content)
    with pytest.raises(DataError) as caught:
        documents(spec)
    with pytest.raises(DataError, match=r"\.$"):
        blocks(spec)
    text = str(caught.value)
    assert text.endswith(".") and "\n" not in text and str(path) in text
    return text


FORMS = {
    "a.pt": torch.tensor(ROWS),
    "b.pt": {"input_ids": torch.tensor(ROWS, dtype=torch.int32), "other": torch.zeros(2)},
    "c.pt": [torch.tensor(row) for row in ROWS],
    "d.pt": ROWS,
    "e.pt": [{"input_ids": row, "labels": row} for row in ROWS],
    "a.npy": np.array(ROWS, dtype=np.uint16),
    "b.npy": np.array(ROWS, dtype=">i8"),
    "a.safetensors": {"input_ids": np.array(ROWS, dtype=np.int32)},
}


@pytest.mark.parametrize("name", FORMS)
def test_rows_of_the_wanted_length_stay_and_others_are_documents(tmp_path, name):
    spec = write(tmp_path / name, FORMS[name])
    assert blocks(spec) == (ROWS, [4, 4, 4])
    assert blocks(spec, seq_len=3) is None and blocks(spec, seq_len=5) is None
    assert documents(spec) == ROWS
    packed = pack(read_documents(spec, PLAIN, ByteTokenizer()), ByteTokenizer(), 5)
    assert packed.input_ids_RT.tolist() == [[*row, EOS] for row in ROWS]
    kept = given_rows(spec, PLAIN, 4, fill_id=EOS)
    assert kept.input_ids_RT.dtype == kept.length_R.dtype == np.int32
    assert {x[:].dtype for x in read_documents(spec, PLAIN, ByteTokenizer())} == {np.dtype(np.int64)}


PADDED = {
    "a.pt": {"input_ids": torch.tensor(ROWS), "attention_mask": torch.tensor(MASK)},
    "b.pt": {"input_ids": torch.tensor(ROWS), "attention_mask": torch.tensor(MASK).bool()},
    "c.pt": {"input_ids": ROWS, "lengths": LENGTHS},
    "d.pt": [{"input_ids": ids, "attention_mask": mask} for ids, mask in zip(ROWS, MASK, strict=True)],
    "e.pt": {"input_ids": torch.tensor(ROWS), "lengths": torch.tensor(LENGTHS), "attention_mask": MASK},
    "a.safetensors": {"input_ids": ROWS, "attention_mask": MASK},
    "b.safetensors": {"input_ids": ROWS, "lengths": np.array(LENGTHS, dtype=np.uint8)},
}


@pytest.mark.parametrize("name", PADDED)
def test_padding_on_the_right_is_a_length_and_its_ids_do_not_matter(tmp_path, name):
    spec = write(tmp_path / name, PADDED[name])
    expected = [[1, 2, 3, 4], [5, 6, EOS, EOS], [9, 10, 11, EOS]]
    assert blocks(spec, vocab_size=12) == (expected, LENGTHS), "the 12 behind the end of its row is no id"
    assert documents(spec, vocab_size=12) == [row[:n] for row, n in zip(ROWS, LENGTHS, strict=True)]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.pt", [[1, 2, 3], [4], [5, 6]]),
        ("b.pt", [torch.tensor([1, 2, 3]), torch.tensor([4]), torch.tensor([5, 6])]),
        ("c.pt", {"input_ids": [[1, 2, 3], [4, 9], [5, 6]], "attention_mask": [[1, 1, 1], [1, 0], [1, 1]]}),
        ("d.pt", {"input_ids": torch.arange(1, 7), "lengths": torch.tensor([3, 1, 2])}),
        ("a.safetensors", {"input_ids": np.arange(1, 7), "lengths": np.array([3, 1, 2])}),
    ],
)
def test_rows_of_different_lengths_are_documents_each_ended_by_eos(tmp_path, name, content):
    spec = write(tmp_path / name, content)
    assert documents(spec) == [[1, 2, 3], [4], [5, 6]] and blocks(spec, 3) is None
    packed = pack(read_documents(spec, PLAIN, ByteTokenizer()), ByteTokenizer(), 9)
    assert packed.input_ids_RT.tolist() == [[1, 2, 3, EOS, 4, EOS, 5, 6, EOS]]


def test_one_long_row_is_one_document_whatever_its_length(tmp_path):
    for name, content in (("a.npy", np.arange(1, 5)), ("a.pt", torch.arange(1, 5)), ("b.pt", [1, 2, 3, 4])):
        spec = write(tmp_path / name, content)
        assert documents(spec) == [[1, 2, 3, 4]] and blocks(spec, 4) is None


def test_a_document_that_ends_with_eos_gets_no_second(tmp_path):
    spec = write(tmp_path / "a.pt", [[1, EOS], [2], [3, EOS, EOS]])
    packed = pack(read_documents(spec, PLAIN, ByteTokenizer()), ByteTokenizer(), 7)
    assert packed.input_ids_RT.tolist() == [[1, EOS, 2, EOS, 3, EOS, EOS]]


def test_the_files_of_a_folder_are_one_source_and_one_other_length_makes_all_documents(tmp_path):
    write(tmp_path / "b.npy", np.array(ROWS[1:]))
    write(tmp_path / "a.pt", torch.tensor(ROWS[:1]))
    assert blocks(str(tmp_path)) == (ROWS, [4, 4, 4])
    assert blocks(str(tmp_path / "*.npy")) == (ROWS[1:], [4, 4])
    write(tmp_path / "c.npy", np.array([[1, 2]]))
    assert blocks(str(tmp_path)) is None and documents(str(tmp_path)) == [*ROWS, [1, 2]]


def test_max_rows_and_the_buffer_choose_among_rows_that_stay(tmp_path):
    many = np.arange(1, 101).reshape(50, 2)
    write(tmp_path / "a.npy", many[:20])
    write(tmp_path / "b.npy", many[20:])
    assert blocks(str(tmp_path), 2, max_rows=30) == (many[:30].tolist(), [2] * 30)
    config = SourceConfig(shuffle_buffer=50, data_seed=1)
    ids, _ = blocks(str(tmp_path), 2, config)
    assert sorted(ids) == many.tolist() != ids and documents(str(tmp_path), config) == ids
    assert blocks(str(tmp_path), 2, config, max_rows=7)[0] == ids[:7]


def rows_of(spec, packing, seq_len, max_rows, vocab_size=None):
    read = read_documents(spec, PLAIN, ByteTokenizer(), vocab_size=vocab_size)
    found = pack(read, ByteTokenizer(), seq_len, packing=packing, max_rows=max_rows)
    return [x if x is None else x.tolist() for x in (found.input_ids_RT, found.length_R, found.starts_RT)]


@pytest.mark.parametrize("packing", ["stream", "documents", "pad"])
def test_of_a_long_row_no_more_is_read_than_the_rows_hold(tmp_path, packing):
    """Neither into memory, nor to look for ids that the vocabulary lacks."""
    ids_N = np.ones(2**21, dtype=np.int32)
    ids_N[100] = 999
    spec = write(tmp_path / "a.npy", ids_N)
    rows_of(spec, packing, 8, 1)  # what is imported at first use counts no more
    tracemalloc.start()
    try:
        found = rows_of(spec, packing, 8, 4, vocab_size=500)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found[0] == [[1] * 8] * 4 and found[1] == [8] * 4
    assert most < ids_N.nbytes // 8
    with pytest.raises(DataError, match=r"a\.npy row 1 holds the id 999, but the model's vocabulary has 500"):
        rows_of(spec, packing, 8, 13, vocab_size=500)


@pytest.mark.parametrize("packing", ["stream", "documents", "pad"])
@pytest.mark.parametrize("seq_len", [1, 2, 3])
def test_the_first_rows_of_ids_are_those_of_all_wherever_eos_stands(tmp_path, packing, seq_len):
    for number in range(16):
        ids = [EOS if number >> bit & 1 else 5 + bit for bit in range(4)]
        spec = write(tmp_path / "a.pt", [ids, [7, 8, 9]])
        every = rows_of(spec, packing, seq_len, None)
        for rows in range(1, len(every[0]) + 1):
            assert rows_of(spec, packing, seq_len, rows) == [x if x is None else x[:rows] for x in every]


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        ([[0, 1, 1, 1], *MASK[1:]], "row 1 is padded on the left; pad on the right"),
        ([MASK[0], [1, 0, 1, 0], MASK[2]], "row 2 is padded in the middle"),
        ([*MASK[:2], [0, 0, 0, 0]], "row 3 has the length 0"),
        ([*MASK[:2], [1, 1, 2, 0]], "row 3: attention_mask is not a 0 or 1"),
        (MASK[:2], "attention_mask has 2 rows, input_ids 3"),
        ([row[:3] for row in MASK], "row 1: attention_mask is not a 0 or 1 for each of 4 tokens"),
    ],
)
def test_a_mask_with_anything_but_padding_on_the_right_is_refused(tmp_path, mask, words):
    assert words in refused(tmp_path / "a.pt", {"input_ids": ROWS, "attention_mask": mask})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"tokens": ROWS}, "has no tensor input_ids, but ['tokens']"),
        (torch.ones(2, 3), "holds torch.float32, no integers"),
        (torch.ones(2, 3, dtype=torch.bfloat16), "holds torch.bfloat16, no integers"),
        (torch.ones(2, 3, dtype=torch.bool), "holds bool, no integers"),
        ([["a", "b"]], "no integers"),
        ([[1.5, 2.0]], "holds float64, no integers"),
        (torch.ones(2, 3, 4, dtype=torch.long), "neither [rows, tokens] nor [tokens]"),
        ([torch.ones(2, 3, dtype=torch.long), torch.ones(3, dtype=torch.long)], "neither [rows, tokens] nor [tokens]"),
        ([[1, 2], [3, [4]]], "is no table of numbers"),
        (torch.empty(0, 4, dtype=torch.long), "at least one row"),
        ([], "length 0"),
        ({"input_ids": ROWS, "lengths": [4, 5, 1]}, "row 2 has the length 5 of 4 tokens"),
        ({"input_ids": ROWS, "lengths": [4, 0, 1]}, "row 2 has the length 0"),
        ({"input_ids": ROWS, "lengths": [4, 1]}, "2 lengths for 3 rows"),
        ({"input_ids": ROWS, "lengths": ROWS}, "lengths is no list of numbers"),
        ({"input_ids": ROWS, "lengths": [4, 4, 4], "attention_mask": MASK}, "lengths and attention_mask disagree"),
        ({"input_ids": [1, 2, 3], "lengths": [2, 2]}, "add up to 4, but there are 3 tokens"),
        ({"input_ids": [1, 2, 3], "lengths": [4, -1]}, "add up to 3, but there are 3 tokens; give positive"),
        ([{"input_ids": [1]}, {"attention_mask": [1]}], "not every row has input_ids"),
        (torch.tensor(3), "input_ids is a single Tensor ('tensor(3)'), no list or tensor of numbers"),
        (5, "input_ids is a single int ('5')"),
        (None, "input_ids is nothing, no list"),
        ({"input_ids": None}, "input_ids is nothing, no list"),
        ([1, [2]], "input_ids row 1 is a single int ('1')"),
        ({"input_ids": ROWS, "lengths": 4}, "lengths is a single int ('4'), no list"),
        ({"input_ids": [1, 2, 3], "lengths": torch.tensor(3)}, "lengths is a single Tensor"),
        ({"input_ids": ROWS, "attention_mask": True}, "attention_mask is a single bool"),
        (torch.tensor(ROWS).to_sparse(), "input_ids is no table of numbers (can't convert Sparse layout"),
    ],
)
def test_what_is_no_table_of_ids_is_refused(tmp_path, content, words):
    assert words in refused(tmp_path / "a.pt", content)


def test_a_single_number_in_an_array_is_refused(tmp_path):
    assert "input_ids is a single memmap ('3'), no list" in refused(tmp_path / "a.npy", np.array(3))


@pytest.mark.parametrize(("bad", "vocab_size"), [(12, 12), (-1, 12), (2**31, None)])
def test_an_id_outside_the_vocabulary_is_named_with_its_file(tmp_path, bad, vocab_size):
    spec = write(tmp_path / "a.npy", np.array([ROWS[0], [5, 6, 7, bad]]))
    with pytest.raises(DataError, match=rf"a\.npy row 2 holds the id {bad}, but"):
        documents(spec, vocab_size=vocab_size)
    with pytest.raises(DataError, match=rf"a\.npy holds the id {bad}, but"):
        blocks(spec, vocab_size=vocab_size)


@pytest.mark.parametrize("name", ["a.pt", "a.npy", "a.safetensors"])
def test_a_damaged_file_is_named(tmp_path, name):
    whole = {"a.pt": torch.arange(1000), "a.npy": np.arange(1000), "a.safetensors": {"input_ids": np.arange(1000)}}
    data = (tmp_path / name, write(tmp_path / name, whole[name]))[0].read_bytes()
    four = (b"J\0\0\0", b"abcd", b"PK\3\4", b"\x80\2.\n")  # of which the first is a number cut short, in a pickle
    for content in (b"", data[:9], data[: len(data) // 2], b"garbage" * 100, *four):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=rf"{name} ") as caught:
            documents(str(tmp_path / name))
        assert "allow_pickle" not in str(caught.value) and "\n" not in str(caught.value)


def test_nothing_is_unpickled(tmp_path):
    torch.save({"input_ids": torch.tensor(ROWS), "evil": tmp_path}, tmp_path / "a.pt")
    np.save(tmp_path / "a.npy", np.array([[1], [2, 3]], dtype=object))
    with pytest.raises(DataError, match=r"a\.pt is damaged or holds more than tensors, and is not unpickled"):
        documents(str(tmp_path / "a.pt"))
    with pytest.raises(DataError, match=r"Cannot read .*a\.npy \(.*Python objects"):
        documents(str(tmp_path / "a.npy"))


def test_a_folder_of_texts_and_ids_is_refused(tmp_path):
    write(tmp_path / "a.npy", np.array(ROWS))
    (tmp_path / "b.txt").write_text("x")
    with pytest.raises(DataError, match=r"holds both texts and token ids \(such as .*a\.npy'\); name one kind"):
        check_source(str(tmp_path), PLAIN)
    check_source(str(tmp_path / "*.npy"), PLAIN)


def test_settings_of_texts_are_refused_for_ids(tmp_path):
    spec = write(tmp_path / "a.npy", np.array(ROWS))
    with pytest.raises(ConfigError, match=r"chat_template=think is for texts, but .* drop --chat-template"):
        check_source(spec, SourceConfig(chat_template="think"))
    with pytest.raises(ConfigError, match="data_format=alpaca is for texts"):
        check_source(spec, SourceConfig(data_format="alpaca"))
    with pytest.raises(ConfigError, match="chat_template=think needs chats, but data_format=text"):
        check_source("embedded:train", SourceConfig(chat_template="think", data_format="text"))
