"""Texts to rows: nothing lost, nothing added but eos and padding."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from qat_lora.data import pack
from qat_lora.errors import ConfigError, DataError

EOS = 0


class ByteTokenizer:
    """One token per character; remembers how it was called."""

    eos_token_id = EOS

    def __init__(self):
        self.calls = []

    def __call__(self, texts, **options):
        self.calls.append((len(texts), options))
        return {"input_ids": [[ord(c) for c in text] for text in texts]}


def calls_of(tokenizer):
    """What was asked of it for documents, less the search for what it adds by itself."""
    return [call for call in tokenizer.calls if set(call[1]) != {"add_special_tokens"}]


def flat(blocks):
    return [x for row, n in zip(blocks.input_ids_RT.tolist(), blocks.length_R.tolist(), strict=True) for x in row[:n]]


def expected(texts):
    return [x for text in texts for x in [*map(ord, text), EOS]]


@pytest.mark.parametrize("seq_len", [1, 3, 4, 7, 100])
def test_rows_are_the_texts_each_followed_by_eos(seq_len):
    texts = ["abcd", "e", "fghijkl"]
    blocks = pack(texts, ByteTokenizer(), seq_len)
    assert flat(blocks) == expected(texts)
    rows = -(-15 // seq_len)
    assert blocks.input_ids_RT.shape == (rows, seq_len) and blocks.length_R.shape == (rows,)
    assert blocks.input_ids_RT.dtype == blocks.length_R.dtype == np.int32
    assert (blocks.length_R[:-1] == seq_len).all()
    assert (blocks.input_ids_RT.reshape(-1)[15:] == EOS).all()


def test_texts_are_neither_truncated_nor_given_special_tokens():
    tokenizer = ByteTokenizer()
    pack(["x" * 5000], tokenizer, 8)
    assert calls_of(tokenizer) == [(1, {"add_special_tokens": False, "truncation": False, "verbose": False})]


def test_a_list_and_a_stream_of_many_texts_give_the_same_rows_and_empty_texts_none():
    texts = [f"text {i}" if i % 7 else "" for i in range(300)]
    blocks = pack(iter(texts), ByteTokenizer(), 16)
    assert flat(blocks) == expected(t for t in texts if t)
    assert blocks.digest() == pack(texts, ByteTokenizer(), 16).digest()


@pytest.mark.parametrize("max_rows", [1, 2, 3])
def test_max_rows_keeps_the_first_rows(max_rows):
    texts = ["abcdefgh", "ijklmn"]
    whole, cut = (
        pack(texts, ByteTokenizer(), 4),
        pack(texts, ByteTokenizer(), 4, max_rows=max_rows),
    )
    assert np.array_equal(cut.input_ids_RT, whole.input_ids_RT[:max_rows])
    assert np.array_equal(cut.length_R, whole.length_R[:max_rows])


def test_max_rows_reads_no_more_text_than_it_needs_and_may_exceed_the_text():
    endless = (f"text {i}" for i in itertools.count())
    assert len(pack(endless, ByteTokenizer(), 8, max_rows=5).length_R) == 5
    assert pack(["abc"], ByteTokenizer(), 8, max_rows=5).length_R.tolist() == [4]


def test_the_digest_changes_with_ids_lengths_and_shape():
    base = pack(["abcdef"], ByteTokenizer(), 4)
    others = [
        pack(["abcdeg"], ByteTokenizer(), 4),
        pack(["abcde"], ByteTokenizer(), 4),
        pack(["abcdef"], ByteTokenizer(), 8),
        dataclasses.replace(base, length_R=base.length_R - 1),
    ]
    digests = {x.digest() for x in [base, *others]}
    assert len(digests) == 5 and all(len(d) == 64 for d in digests)


def test_ids_beyond_the_vocabulary_are_refused_naming_the_id():
    pack(["abc"], ByteTokenizer(), 4, vocab_size=ord("c") + 1)
    with pytest.raises(DataError, match=f"id {ord('c')}, but the model's vocabulary has {ord('c')} tokens"):
        pack(["abc"], ByteTokenizer(), 4, vocab_size=ord("c"))


def test_a_tokenizer_without_eos_is_refused():
    tokenizer = ByteTokenizer()
    tokenizer.eos_token_id = None
    with pytest.raises(DataError, match="ByteTokenizer has no eos token"):
        pack(["abc"], tokenizer, 4)


@pytest.mark.parametrize("texts", [[], [""], ["", ""]])
def test_no_text_is_refused(texts):
    with pytest.raises(DataError, match="gives no tokens"):
        pack(texts, ByteTokenizer(), 4)


class LetterTokenizer(ByteTokenizer):
    """Knows small letters only, and encodes all else to nothing."""

    def __call__(self, texts, **options):
        return super().__call__(["".join(c for c in text if c.islower()) for text in texts], **options)


@pytest.mark.parametrize("max_rows", [None, 1])
def test_a_tokenizer_that_gives_nothing_but_the_appended_eos_is_refused(max_rows):
    with pytest.raises(DataError, match="LetterTokenizer gives no tokens .* check the tokenizer files"):
        pack(["12", "34", "56"], LetterTokenizer(), 2, max_rows=max_rows)


def test_a_text_without_a_token_leaves_no_eos():
    blocks = pack(["12", "ab", "34", "c"], LetterTokenizer(), 3, max_rows=2)
    assert flat(blocks) == expected(["ab", "c"])


def test_documents_that_are_ids_already_lie_among_texts_in_their_order():
    tokenizer = ByteTokenizer()
    ids = np.array([7, 8], dtype=np.int64)
    blocks = pack(["a", ids, np.empty(0, dtype=np.int64), "b", ids], tokenizer, 10)
    assert blocks.input_ids_RT.tolist() == [[97, EOS, 7, 8, EOS, 98, EOS, 7, 8, EOS]]
    assert [count for count, _ in calls_of(tokenizer)] == [2]
    many = [np.array([n]) for n in range(1, 301)]
    assert flat(pack(many, tokenizer, 16)) == [x for n in range(1, 301) for x in (n, EOS)]


def test_a_document_that_ends_with_eos_gets_no_second():
    blocks = pack([np.array([1, EOS]), "a\0", np.array([2, EOS, EOS])], ByteTokenizer(), 7)
    assert flat(blocks) == [1, EOS, 97, EOS, 2, EOS, EOS]


def test_sizes_that_make_no_rows_are_refused():
    with pytest.raises(ConfigError, match="seq_len=0"):
        pack(["abc"], ByteTokenizer(), 0)
    with pytest.raises(ConfigError, match="max_rows=0"):
        pack(["abc"], ByteTokenizer(), 4, max_rows=0)


def test_a_tokenizer_of_transformers_works_without_a_warning(caplog):
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<eos>": 0, "a": 1, "b": 2, "?": 3}, unk_token="?"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", unk_token="?", model_max_length=2
    )
    blocks = pack(["a b a b", "b"], tokenizer, 4, vocab_size=4)
    assert blocks.input_ids_RT.tolist() == [[1, 2, 1, 2], [0, 2, 0, 0]]
    assert blocks.length_R.tolist() == [4, 3]
    assert not caplog.records


def documents_in(blocks):
    """The pieces between two starts, each with the row and the place that it begins at."""
    found = []
    for row, (ids, length, starts) in enumerate(
        zip(blocks.input_ids_RT.tolist(), blocks.length_R, blocks.starts_RT, strict=True)
    ):
        begins = [t for t in range(length) if starts[t]]
        for first, stop in zip(begins, [*begins[1:], length], strict=True):
            found.append((row, first, ids[first:stop]))
    return found


@pytest.mark.parametrize("seq_len", [1, 3, 4, 5, 7, 100])
@pytest.mark.parametrize("max_rows", [None, 2])
def test_documents_lie_as_in_a_stream_and_each_begins_anew_and_so_does_what_is_cut(seq_len, max_rows):
    texts = ["abcd", "e", "fghijkl"]
    stream = pack(texts, ByteTokenizer(), seq_len, max_rows=max_rows)
    blocks = pack(texts, ByteTokenizer(), seq_len, packing="documents", max_rows=max_rows)
    assert np.array_equal(blocks.input_ids_RT, stream.input_ids_RT) and np.array_equal(blocks.length_R, stream.length_R)
    assert stream.starts_RT is None and blocks.starts_RT.dtype == np.bool_
    wanted, at = [], 0
    for text in texts:
        for i, x in enumerate(expected([text])):
            if i == 0 or at % seq_len == 0:
                wanted.append((at // seq_len, at % seq_len, []))
            wanted[-1][2].append(x)
            at += 1
    assert documents_in(blocks) == [piece for piece in wanted if max_rows is None or piece[0] < max_rows]


def test_padding_begins_no_document():
    blocks = pack(["abc"], ByteTokenizer(), 8, packing="documents")
    assert blocks.starts_RT.tolist() == [[True] + [False] * 7]


@pytest.mark.parametrize("seq_len", [1, 3, 4, 5, 7, 100])
def test_padded_rows_hold_one_document_and_a_long_one_takes_several(seq_len):
    texts = ["abcd", "e", "fghijkl"]
    blocks = pack(texts, ByteTokenizer(), seq_len, packing="pad")
    wanted = []
    for text in texts:
        ids = expected([text])
        wanted += [ids[i : i + seq_len] for i in range(0, len(ids), seq_len)]
    rows = blocks.input_ids_RT.tolist()
    assert [row[:n] for row, n in zip(rows, blocks.length_R.tolist(), strict=True)] == wanted
    assert all(x == EOS for row, n in zip(rows, blocks.length_R.tolist(), strict=True) for x in row[n:])
    assert blocks.input_ids_RT.dtype == blocks.length_R.dtype == np.int32 and blocks.starts_RT is None


def test_padded_rows_stop_at_max_rows_and_read_no_further():
    endless = (f"text {i}" for i in itertools.count())
    blocks = pack(endless, ByteTokenizer(), 4, packing="pad", max_rows=3)
    assert blocks.length_R.tolist() == [4, 3, 4]


@pytest.mark.parametrize("packing", ["stream", "documents", "pad"])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_documents_of_ids_are_laid_like_texts_with_an_eos_each(packing, dtype):
    texts = ["abcd", "e", "fghijkl"]
    ids = [np.array([ord(c) for c in text], dtype) for text in texts]
    ended = np.append(ids[2], EOS)
    only_eos, tokenizer = np.array([EOS], dtype), ByteTokenizer()
    mixed = pack([ids[0], "e", only_eos, np.array([], dtype), ended], tokenizer, 5, packing=packing)
    assert mixed.digest() == pack(texts, ByteTokenizer(), 5, packing=packing).digest()
    assert [count for count, _ in calls_of(tokenizer)] == [1]
    pack([ids[0]], tokenizer, 5, packing=packing)
    assert len(calls_of(tokenizer)) == 1, "nothing to tokenise, nothing asked of the tokenizer"


@pytest.mark.parametrize("packing", ["stream", "documents", "pad"])
def test_ids_of_a_document_beyond_the_vocabulary_are_refused(packing):
    with pytest.raises(DataError, match="id 4294967297, but the model's vocabulary has 500 tokens"):
        pack([np.array([7, 2**32 + 1])], ByteTokenizer(), 4, packing=packing, vocab_size=500)


def test_the_digest_changes_with_where_documents_begin():
    blocks = [pack(texts, ByteTokenizer(), 4, packing="documents") for texts in (["ab", "cd"], ["ab\0cd"])]
    assert np.array_equal(blocks[0].input_ids_RT, blocks[1].input_ids_RT)
    assert blocks[0].digest() != blocks[1].digest()
    assert blocks[0].digest() != dataclasses.replace(blocks[0], starts_RT=None).digest()
