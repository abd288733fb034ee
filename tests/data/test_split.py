"""Bos, held-out documents and answers: what a row holds beside its tokens."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tokenizers
import transformers

from qat_lora.config.source import SourceConfig
from qat_lora.data import bos_of, pack, read_rows
from qat_lora.data.chat import ChatText
from qat_lora.data.split import SECTION_ROWS
from qat_lora.errors import DataError
from qat_lora.evaluate import stream_windows, text_windows
from tests.data.test_rows import EOS, ByteTokenizer

PACKINGS = ["stream", "documents", "pad"]
BOS = 300


def tokenizer(template="<s> $A", special=(("<s>", 1),)):
    """Of words a to z, which puts before a text what its post-processor says."""
    words = {"</s>": 0, "<s>": 1, "<t>": 2, "?": 3} | {chr(97 + i): 4 + i for i in range(26)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    if template:
        backend.post_processor = tokenizers.processors.TemplateProcessing(single=template, special_tokens=[*special])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", additional_special_tokens=["<s>", "<t>"], unk_token="?"
    )


class BosTokenizer(ByteTokenizer):
    def __call__(self, texts, *, add_special_tokens=True, **options):
        found = super().__call__(texts, add_special_tokens=add_special_tokens, **options)
        front = [BOS] if add_special_tokens else []
        return {"input_ids": [front + ids for ids in found["input_ids"]]}


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, ()), ("<s> $A", (1,)), ("<s> <t> $A", (1, 2)), ("$A </s>", ()), ("<s> $A </s>", (1,)), ("</s> $A", (0,))
    ],
)  # fmt: skip
def test_bos_is_what_the_tokenizer_itself_puts_before_a_text(template, expected):
    special = [("<s>", 1), ("<t>", 2), ("</s>", 0)]
    assert bos_of(tokenizer(template, special)) == expected


@pytest.mark.parametrize("packing", PACKINGS)
def test_every_document_begins_with_bos_once(packing):
    """Whether it is a text, a text that writes bos itself as chat templates do, or ids with or without it."""
    documents = ["a b", "<s> c", np.array([7, 8, 9, 10]), np.array([1, 11]), "<s>", np.array([1, 0])]
    wanted = [[1, 4, 5, 0], [1, 6, 0], [1, 7, 8, 9, 10, 0], [1, 11, 0]]
    rows = pack(documents, tokenizer(), 4, packing=packing)
    flat = [x for ids, n in zip(rows.input_ids_RT.tolist(), rows.length_R, strict=True) for x in ids[:n]]
    assert flat == [x for ids in wanted for x in ids] and rows.bos == (1,)
    without = pack(documents, tokenizer(None), 4, packing=packing)
    assert without.bos == () and without.digest() != rows.digest()
    flat = [x for ids, n in zip(without.input_ids_RT.tolist(), without.length_R, strict=True) for x in ids[:n]]
    assert flat == [4, 5, 0, 1, 6, 0, 7, 8, 9, 10, 0, 1, 11, 0, 1, 0, 1, 0], "what a document writes itself stays"


def test_a_bos_that_is_eos_too_is_no_end(packing="stream"):
    rows = pack(["a", "b"], tokenizer("</s> $A", [("</s>", 0)]), 6)
    assert rows.input_ids_RT.tolist() == [[0, 4, 0, 0, 5, 0]] and rows.length_R.tolist() == [6]


def test_rows_of_ids_that_stay_get_no_bos(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(4, 12).reshape(2, 4))
    rows = read_rows(str(tmp_path / "a.npy"), SourceConfig(), tokenizer(), 4)
    assert rows.input_ids_RT.tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]] and rows.bos is None


def numbered(lengths):
    """Documents of ids that occur in no other, from 1 on, and which document each id is of."""
    ends = np.cumsum(lengths)
    ids = np.arange(1, ends[-1] + 1)
    return np.split(ids, ends[:-1]), np.repeat(np.arange(len(lengths)), lengths)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("max_rows", [None, 700])
def test_no_held_out_row_shares_a_document_with_a_training_row(packing, max_rows):
    """Documents of about 1,000 tokens in rows of 128, of which every held-out row shared one when rows were chosen."""
    lengths = np.random.RandomState(0).randint(500, 1500, 120)
    documents, document_of = numbered(lengths)
    rows = pack(documents, ByteTokenizer(), 128, packing=packing, eval_fraction=0.1, max_rows=max_rows)
    seen = {True: set(), False: set()}
    for ids, held_out in zip(rows.input_ids_RT, rows.held_out_R, strict=True):
        seen[bool(held_out)] |= set(document_of[ids[ids != EOS] - 1].tolist())
    assert len(seen[True]) >= 4 and not seen[True] & seen[False]
    assert 0.04 < rows.held_out_R.mean() < 0.2
    assert rows.input_ids_RT.shape[0] == (max_rows or len(rows.length_R))
    if max_rows is None:
        assert seen[True] | seen[False] == set(range(120))
        every = np.sort(np.concatenate([ids[:n] for ids, n in zip(rows.input_ids_RT, rows.length_R, strict=True)]))
        assert np.array_equal(every[every != EOS], np.arange(1, lengths.sum() + 1)), "every token once"


def test_the_side_of_a_document_follows_from_its_tokens_alone():
    documents, _ = numbered([60] * 100)
    taken = {}
    for order in (documents, documents[::-1], documents[30:]):
        rows = pack(order, ByteTokenizer(), 16, packing="pad", eval_fraction=0.2)
        taken |= {int(ids[0]): bool(side) for ids, side in zip(rows.input_ids_RT, rows.held_out_R, strict=True)}
        for ids, side in zip(rows.input_ids_RT, rows.held_out_R, strict=True):
            assert taken.setdefault(int(ids[0]), bool(side)) == side
    fewer = pack(documents, ByteTokenizer(), 16, packing="pad", eval_fraction=0.1)
    held = {int(ids[0]) for ids, side in zip(fewer.input_ids_RT, fewer.held_out_R, strict=True) if side}
    assert held < {first for first, side in taken.items() if side}, "a larger share keeps what a smaller one held out"


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_long_document_is_cut_into_sections_that_count_as_documents(packing):
    tokens = 20 * SECTION_ROWS * 8
    rows = pack([np.arange(1, tokens + 1)], ByteTokenizer(), 8, packing=packing, eval_fraction=0.2)
    section_of = {bool(side): set() for side in (True, False)}
    for ids, side in zip(rows.input_ids_RT, rows.held_out_R, strict=True):
        section_of[bool(side)] |= set(((ids[ids != EOS] - 1) // (SECTION_ROWS * 8)).tolist())
    assert section_of[True] and section_of[False] and not section_of[True] & section_of[False]
    assert section_of[True] | section_of[False] == set(range(20))
    whole = pack([np.arange(1, tokens + 1)], ByteTokenizer(), 8, packing=packing)
    pieces = 1 + sum(a in section_of[True] and a + 1 in section_of[False] or a in section_of[False] and a + 1
                     in section_of[True] for a in range(19))  # fmt: skip
    eos = sum((ids[:n] == EOS).sum() for ids, n in zip(rows.input_ids_RT, rows.length_R, strict=True))
    assert eos == pieces, "sections of one side that follow each other are not cut"
    assert not whole.held_out_R.any()


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(("texts", "max_rows"), [(["abcdefgh" * 4], None), (["ab" * 9, "cd" * 9], None),
                                                 (["abcdefgh" * 99], 5), (["abc"] * 2 + ["xyz"], None),
                                                 ([f"{i:02d}" for i in range(100)], 10)])  # fmt: skip
def test_a_tiny_source_has_rows_on_both_sides(packing, texts, max_rows):
    rows = pack(texts, ByteTokenizer(), 4, packing=packing, eval_fraction=0.001, max_rows=max_rows)
    assert rows.held_out_R.any() and not rows.held_out_R.all()
    rows = pack(texts, ByteTokenizer(), 4, packing=packing, eval_fraction=0.999, max_rows=max_rows)
    assert rows.held_out_R.any() and not rows.held_out_R.all()


@pytest.mark.parametrize(("texts", "max_rows"), [(["abc"], None), (["abc"] * 3, None), (["ab" * 50, "cd"], 1)])
def test_a_source_that_cannot_be_split_says_what_to_do(texts, max_rows):
    with pytest.raises(DataError, match=r"no two rows of different documents.* give more text.*--eval-fraction 0"):
        pack(texts, ByteTokenizer(), 4, eval_fraction=0.05, max_rows=max_rows)
    assert not pack(texts, ByteTokenizer(), 4, max_rows=max_rows).held_out_R.any()


def test_a_split_stream_is_read_no_further_than_the_rows_need():
    read = itertools.count()
    endless = (f"text {next(read)}" for _ in itertools.count())
    rows = pack(endless, ByteTokenizer(), 8, max_rows=50, eval_fraction=0.1)
    assert rows.input_ids_RT.shape == (50, 8) and (rows.length_R == 8).all() and next(read) <= 128


def test_rows_of_ids_that_stay_are_split_by_row(tmp_path):
    ids = np.arange(1, 401).reshape(100, 4)
    np.save(tmp_path / "a.npy", np.concatenate([ids, ids[:50]]))
    rows = read_rows(str(tmp_path / "a.npy"), SourceConfig(), tokenizer(), 4, eval_fraction=0.2)
    assert np.array_equal(rows.held_out_R[:50], rows.held_out_R[100:]), "equal rows are on one side"
    assert 5 <= rows.held_out_R[:100].sum() <= 40 and rows.starts_RT is None
    alone = read_rows(str(tmp_path / "a.npy"), SourceConfig(), tokenizer(), 4, eval_fraction=0.2, packing="documents")
    assert alone.starts_RT[:, 0].all() and alone.starts_RT.sum() == 150
    assert np.array_equal(alone.held_out_R, rows.held_out_R)


@pytest.mark.parametrize("row_length", [4, 8, 13])
@pytest.mark.parametrize("stride", [0, 1, 3])
def test_every_window_begins_with_bos_and_none_is_predicted(tmp_path, row_length, stride):
    """Each word of the text is predicted once, but for the first of a whole window that begins inside a document."""
    texts = ["a b c d e", "f g", "h i j k l m n o p q r s", "t"]
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    made = tokenizer()
    windows = text_windows(str(tmp_path / "a.jsonl"), SourceConfig(), made, row_length, stride=stride)
    assert (windows.input_ids_RT[:, 0] == 1).all()
    predicted = [ids[1:][c[:-1]].tolist() for ids, c in zip(windows.input_ids_RT, windows.counted_RT, strict=True)]
    assert 1 not in itertools.chain(*predicted)
    words = [x for text in texts for x in [*made(text, add_special_tokens=False)["input_ids"], 0]]
    if stride:
        assert [x for window in predicted for x in window] == words
        assert all(len(window) <= stride + 1 for window in predicted[1:])
    else:
        lost = len(words) - sum(map(len, predicted))
        assert 0 < lost < len(windows.input_ids_RT)
    first = text_windows(str(tmp_path / "a.jsonl"), SourceConfig(), made, row_length, stride=stride, max_rows=2)
    assert first.input_ids_RT.tolist() == windows.input_ids_RT[:2].tolist()
    assert first.counted_RT.tolist() == windows.counted_RT[:2].tolist()


def test_windows_by_hand():
    documents = [[1, 4, 5, 6, 7, 8, 0], [1, 9, 0]]
    whole = stream_windows(documents, (1,), 4)
    assert whole.input_ids_RT.tolist() == [[1, 4, 5, 6], [1, 7, 8, 0], [1, 9, 0, 0]]
    assert whole.counted_RT.int().tolist() == [[1, 1, 1, 0], [0, 1, 1, 0], [1, 1, 0, 0]]
    strided = stream_windows(documents, (1,), 4, 2)
    assert strided.input_ids_RT.tolist() == [[1, 4, 5, 6], [1, 5, 6, 7], [1, 7, 8, 0], [1, 0, 1, 9], [1, 9, 0, 0]]
    assert strided.counted_RT.int().tolist() == [[1, 1, 1, 0], [0, 0, 1, 0], [0, 1, 1, 0], [0, 0, 1, 0], [0, 1, 0, 0]]
    plain = stream_windows(documents, (), 4)
    assert plain.input_ids_RT.tolist() == [[1, 4, 5, 6], [7, 8, 0, 1], [9, 0, 0, 0]]
    assert plain.counted_RT.int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 0], [1, 0, 0, 0]]


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_texts_of_one_chat_are_on_one_side_whatever_their_length(packing):
    """With and without thinking the answer is the same, so one of them in training shows the other."""
    texts = []
    for number in range(1, 101):
        for repeated in (1, 40):  # the longer one is over a section, and is not cut
            text = ChatText.of(chr(1000 + number) * repeated, ())
            text.chat = bytes([number]) * 8
            texts.append(text)
    rows = pack(texts, ByteTokenizer(), 4, packing=packing, eval_fraction=0.3, max_rows=None)
    found: dict[int, set[bool]] = {}
    for ids, n, side in zip(rows.input_ids_RT, rows.length_R, rows.held_out_R, strict=True):
        for token in set(ids[:n].tolist()) - {EOS}:
            found.setdefault(token, set()).add(bool(side))
    assert len(found) == 100 and {frozenset(sides) for sides in found.values()} == {
        frozenset([True]),
        frozenset([False]),
    }
