"""Texts to rows: nothing lost, nothing added but eos and padding."""

from __future__ import annotations

import itertools

import pytest
import torch

from qat_lora.data import tokenize_blocks
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


def flat(blocks):
    return [x for row, n in zip(blocks.input_ids_RT.tolist(), blocks.lengths_R.tolist(), strict=True) for x in row[:n]]


def expected(texts):
    return [x for text in texts for x in [*map(ord, text), EOS]]


@pytest.mark.parametrize("seq_len", [1, 3, 4, 7, 100])
def test_rows_are_the_texts_each_followed_by_eos(seq_len):
    texts = ["abcd", "e", "fghijkl"]
    blocks = tokenize_blocks(texts, ByteTokenizer(), seq_len)
    assert flat(blocks) == expected(texts)
    rows = -(-15 // seq_len)
    assert blocks.input_ids_RT.shape == (rows, seq_len) and blocks.lengths_R.shape == (rows,)
    assert blocks.input_ids_RT.dtype == blocks.lengths_R.dtype == torch.int32
    assert (blocks.lengths_R[:-1] == seq_len).all()
    assert (blocks.input_ids_RT.flatten()[15:] == EOS).all()


def test_texts_are_neither_truncated_nor_given_special_tokens():
    tokenizer = ByteTokenizer()
    tokenize_blocks(["x" * 5000], tokenizer, 8)
    assert tokenizer.calls == [(1, {"add_special_tokens": False, "truncation": False, "verbose": False})]


def test_a_list_and_a_stream_of_many_texts_give_the_same_rows_and_empty_texts_none():
    texts = [f"text {i}" if i % 7 else "" for i in range(300)]
    blocks = tokenize_blocks(iter(texts), ByteTokenizer(), 16)
    assert flat(blocks) == expected(t for t in texts if t)
    assert blocks.digest() == tokenize_blocks(texts, ByteTokenizer(), 16).digest()


@pytest.mark.parametrize("max_rows", [1, 2, 3])
def test_max_rows_keeps_the_first_rows(max_rows):
    texts = ["abcdefgh", "ijklmn"]
    whole, cut = (
        tokenize_blocks(texts, ByteTokenizer(), 4),
        tokenize_blocks(texts, ByteTokenizer(), 4, max_rows=max_rows),
    )
    assert torch.equal(cut.input_ids_RT, whole.input_ids_RT[:max_rows])
    assert torch.equal(cut.lengths_R, whole.lengths_R[:max_rows])


def test_max_rows_reads_no_more_text_than_it_needs_and_may_exceed_the_text():
    endless = (f"text {i}" for i in itertools.count())
    assert len(tokenize_blocks(endless, ByteTokenizer(), 8, max_rows=5).lengths_R) == 5
    assert tokenize_blocks(["abc"], ByteTokenizer(), 8, max_rows=5).lengths_R.tolist() == [4]


def test_the_digest_changes_with_ids_lengths_and_shape():
    base = tokenize_blocks(["abcdef"], ByteTokenizer(), 4)
    others = [
        tokenize_blocks(["abcdeg"], ByteTokenizer(), 4),
        tokenize_blocks(["abcde"], ByteTokenizer(), 4),
        tokenize_blocks(["abcdef"], ByteTokenizer(), 8),
        base._replace(lengths_R=base.lengths_R - 1),
    ]
    digests = {x.digest() for x in [base, *others]}
    assert len(digests) == 5 and all(len(d) == 64 for d in digests)


def test_ids_beyond_the_vocabulary_are_refused_naming_the_id():
    tokenize_blocks(["abc"], ByteTokenizer(), 4, vocab_size=ord("c") + 1)
    with pytest.raises(DataError, match=f"id {ord('c')}, but the model's vocabulary has {ord('c')} tokens"):
        tokenize_blocks(["abc"], ByteTokenizer(), 4, vocab_size=ord("c"))


def test_a_tokenizer_without_eos_is_refused():
    tokenizer = ByteTokenizer()
    tokenizer.eos_token_id = None
    with pytest.raises(DataError, match="ByteTokenizer has no eos token"):
        tokenize_blocks(["abc"], tokenizer, 4)


@pytest.mark.parametrize("texts", [[], [""], ["", ""]])
def test_no_text_is_refused(texts):
    with pytest.raises(DataError, match="gives no tokens"):
        tokenize_blocks(texts, ByteTokenizer(), 4)


class LetterTokenizer(ByteTokenizer):
    """Knows small letters only, and encodes all else to nothing."""

    def __call__(self, texts, **options):
        return super().__call__(["".join(c for c in text if c.islower()) for text in texts], **options)


@pytest.mark.parametrize("max_rows", [None, 1])
def test_a_tokenizer_that_gives_nothing_but_the_appended_eos_is_refused(max_rows):
    with pytest.raises(DataError, match="LetterTokenizer gives no tokens .* check the tokenizer files"):
        tokenize_blocks(["12", "34", "56"], LetterTokenizer(), 2, max_rows=max_rows)


def test_a_text_without_a_token_leaves_no_eos():
    blocks = tokenize_blocks(["12", "ab", "34", "c"], LetterTokenizer(), 3, max_rows=2)
    assert flat(blocks) == expected(["ab", "c"])


def test_sizes_that_make_no_rows_are_refused():
    with pytest.raises(ConfigError, match="seq_len=0"):
        tokenize_blocks(["abc"], ByteTokenizer(), 0)
    with pytest.raises(ConfigError, match="max_rows=0"):
        tokenize_blocks(["abc"], ByteTokenizer(), 4, max_rows=0)


def test_a_tokenizer_of_transformers_works_without_a_warning(caplog):
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<eos>": 0, "a": 1, "b": 2, "?": 3}, unk_token="?"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", unk_token="?", model_max_length=2
    )
    blocks = tokenize_blocks(["a b a b", "b"], tokenizer, 4, vocab_size=4)
    assert blocks.input_ids_RT.tolist() == [[1, 2, 1, 2], [0, 2, 0, 0]]
    assert blocks.lengths_R.tolist() == [4, 3]
    assert not caplog.records
