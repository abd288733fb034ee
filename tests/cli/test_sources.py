"""Chats and token ids through the commands: what ends up in a cache, and what is evaluated."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from qat_lora import models
from qat_lora.cache import KDCacheDataset
from qat_lora.cli import evaluation
from qat_lora.cli.main import main
from qat_lora.config import EvalRun, KDConfig
from qat_lora.errors import CacheMismatch, ConfigError, DataError
from qat_lora.runtime import LocalRuntime
from qat_lora.train.run import run_qat
from tests.conftest import SEQ_LEN, qat_run
from tests.data.test_chat import IN_PROMPT

CPU = "--device cpu --quiet"
CHATS = [
    {"messages": [{"role": "user", "content": f"the quick fox {letter}"}, {"role": "assistant", "content": "jumps"}]}
    for letter in "abcdefghijkl"
]
# In the letters that the tiny tokenizer knows.
TEMPLATE = IN_PROMPT.replace("<|im_end|>", "<|end|>").replace("<|im_start|>", "").replace("<think>", "hmmm")


@pytest.fixture
def chat_teacher(tmp_path, teacher_dir):
    folder = tmp_path / "teacher"
    shutil.copytree(teacher_dir, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def chats(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in CHATS))
    return path


def run(command: str) -> None:
    assert main(command.split()) == 0


def cached(folder, *flags):
    run(f"cache --output {folder} --seq-len {SEQ_LEN} --top-k 4 {CPU} {' '.join(map(str, flags))}")
    cache = KDCacheDataset(folder)
    rows = [cache[i] for i in range(len(cache))]
    return cache.manifest, [row["input_ids"][: int(row["length"])].tolist() for row in rows]


def test_a_cache_holds_each_chat_once_or_twice_in_the_words_of_the_template(tmp_path, chat_teacher, chats):
    tokenizer = models.load_tokenizer(chat_teacher)
    found = {}
    for mode in ("none", "no-think", "think", "both"):
        flags = ("--teacher", chat_teacher, "--data", chats, "--chat-template", mode, "--eval-fraction", 0)
        manifest, rows = cached(tmp_path / mode, *flags)
        found[mode] = manifest
        text = tokenizer.decode([i for row in rows for i in row], clean_up_tokenization_spaces=False)
        assert text.count("jumps") == (24 if mode == "both" else 12)
        assert text.count("hmmm") == (0 if mode in ("none", "think") else 12)
        assert text.count("<|end|><|end|>") == 0 and text.endswith("jumps<|end|>")
        assert text.count("user\n") == (0 if mode == "none" else text.count("jumps"))
    assert len({manifest.source_digest for manifest in found.values()}) == 4
    assert found["none"].source == str(chats)
    assert found["both"].source == f"{chats} (chat_template=both)"


def test_words_about_the_source_are_no_part_of_what_a_cache_is(tmp_path, teacher_dir, chats):
    """Read as named or as recognised, the rows are the same, so a build may go on under the other name."""
    flags = ("--teacher", teacher_dir, "--data", chats)
    first, _ = cached(tmp_path / "cache", *flags)
    again, _ = cached(tmp_path / "cache", *flags, "--data-format", "messages")
    other, _ = cached(tmp_path / "other", *flags, "--data-format", "messages")
    assert first.identity() == again.identity() == other.identity()
    assert other.source == f"{chats} (data_format=messages)"


def test_a_cache_of_a_stream_is_the_same_on_disk_and_streamed_again(tmp_path, teacher_dir, chats, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    (tmp_path / "set").mkdir()
    shutil.copy(chats, tmp_path / "set" / "train.jsonl")
    flags = ("--teacher", teacher_dir, "--data", f"hf:{tmp_path / 'set'}", "--max-rows", 3)
    streamed, _ = cached(tmp_path / "a", *flags, "--streaming")
    downloaded, _ = cached(tmp_path / "b", *flags)
    local, _ = cached(tmp_path / "c", *flags[:2], "--data", chats, "--max-rows", 3)
    assert streamed.source_digest == downloaded.source_digest == local.source_digest
    shuffled, _ = cached(tmp_path / "d", *flags, "--streaming", "--shuffle-buffer", 5)
    again, _ = cached(tmp_path / "e", *flags, "--streaming", "--shuffle-buffer", 5)
    assert shuffled.source_digest == again.source_digest != streamed.source_digest
    assert shuffled.source.endswith("set (streaming=True, shuffle_buffer=5)")


def test_rows_of_ids_are_cached_as_they_are(tmp_path, teacher_dir):
    ids = np.random.RandomState(0).randint(1, 100, (5, SEQ_LEN))
    lengths = np.array([SEQ_LEN, 3, SEQ_LEN, 7, SEQ_LEN])
    torch.save({"input_ids": torch.tensor(ids), "lengths": torch.tensor(lengths)}, tmp_path / "a.pt")
    _, rows = cached(tmp_path / "cache", "--teacher", teacher_dir, "--data", tmp_path / "a.pt")
    assert rows == [row[:n].tolist() for row, n in zip(ids, lengths, strict=True)]


def test_evaluation_reads_the_same_sources(tmp_path, chat_teacher, chats):
    def tokens(*flags):
        run(f"eval --model {chat_teacher} --output {tmp_path}/f.json --seq-len 24 {CPU} {' '.join(map(str, flags))}")
        return json.loads((tmp_path / "f.json").read_text())[-1]["tokens"]

    thinking, both = (tokens("--data", chats, "--chat-template", mode) for mode in ("think", "both"))
    assert both > 2 * thinking


def test_rows_of_ids_are_windows_or_with_a_stride_one_stream_without_their_padding(tmp_path, teacher_dir):
    ids, lengths = torch.arange(1, 97).reshape(4, 24), [24, 5, 24, 2]
    torch.save({"input_ids": ids, "lengths": lengths}, tmp_path / "a.pt")
    loaded = models.load(str(teacher_dir))

    def windows(**settings):
        return evaluation.eval_windows(EvalRun(data=str(tmp_path / "a.pt"), seq_len=24, **settings), loaded)

    assert windows().counted_RT.sum(1).tolist() == [n - 1 for n in lengths]
    stream = torch.cat([row[:n] for row, n in zip(ids, lengths, strict=True)])
    strided = windows(stride=8)
    assert strided.counted_RT.sum() == len(stream) - 1
    for number, row in enumerate(strided.input_ids_RT):
        part = stream[number * 8 : number * 8 + 24]
        assert torch.equal(row[: len(part)], part)
    first = windows(stride=8, max_rows=3)
    assert torch.equal(first.input_ids_RT, strided.input_ids_RT[:3])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--chat-template think", "has no chat template, but chat_template=think"),
        ("--chat-template maybe", "chat_template='maybe' is unknown"),
        ("--data-format csv", "data_format='csv' is unknown"),
        ("--data-format alpaca", "chats.jsonl:1 is no alpaca row"),
        ("--streaming", "streaming=True is for hf: sources"),
        ("--shuffle-buffer -1", "shuffle_buffer must be at least 0"),
    ],
)
def test_a_mistake_is_one_sentence_and_nothing_is_written(tmp_path, teacher_dir, chats, capsys, flags, words):
    command = f"cache --teacher {teacher_dir} --data {chats} --output {tmp_path}/cache --seq-len 24 {flags} {CPU}"
    assert main(command.split()) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


def test_with_a_stride_no_more_of_a_long_row_is_read_than_the_windows_hold(tmp_path, teacher_dir):
    ids_N = np.random.RandomState(0).randint(1, 100, 1000)
    loaded = models.load(str(teacher_dir))

    def windows(max_rows):
        np.save(tmp_path / "a.npy", ids_N)
        run = EvalRun(data=str(tmp_path / "a.npy"), seq_len=24, stride=8, max_rows=max_rows)
        return evaluation.eval_windows(run, loaded)

    every = windows(0)
    ids_N[100:] = 9999  # beyond the vocabulary, were they looked at
    for count in (1, 2, 7):
        first = windows(count)
        assert torch.equal(first.input_ids_RT, every.input_ids_RT[:count])
        assert torch.equal(first.counted_RT, every.counted_RT[:count])
    with pytest.raises(DataError, match="holds the id 9999"):
        windows(20)


@pytest.mark.parametrize("stride", [0, 8])
def test_no_source_is_said_to_be_none_whatever_lies_in_the_current_folder(
    tmp_path, teacher_dir, chats, capsys, monkeypatch, stride
):
    np.save(tmp_path / "a.npy", np.arange(9))
    monkeypatch.chdir(tmp_path)
    command = f"eval --model {teacher_dir} --output f.json --seq-len 24 --max-rows 2 --stride {stride} {CPU} --data"
    assert main([*command.split(), ""]) == 2
    assert "no text is given for model" in capsys.readouterr().err


@pytest.mark.parametrize(
    "row", ['{"text": "the fox \\ud800"}', '{"messages": [{"role": "user", "content": "\\udc00"}]}']
)
def test_half_of_a_character_is_named_with_its_line(tmp_path, teacher_dir, capsys, row):
    (tmp_path / "a.jsonl").write_text('{"text": "the quick fox"}\n' + row + "\n")
    command = f"cache --teacher {teacher_dir} --data {tmp_path}/a.jsonl --output {tmp_path}/cache --seq-len 24 {CPU}"
    assert main(command.split()) == 2
    assert "a.jsonl:2 holds '\\ud" in capsys.readouterr().err


def test_settings_reach_the_source_in_any_order(tmp_path, chats, teacher_dir):
    """By --set too, where one is set before the other."""
    plain, _ = cached(tmp_path / "a", "--teacher", teacher_dir, "--data", chats)
    flags = ("--set", "source.data_seed=3", "--set", "source.shuffle_buffer=12")
    by_set, _ = cached(tmp_path / "b", "--teacher", teacher_dir, "--data", chats, *flags)
    by_flag, _ = cached(
        tmp_path / "c", "--teacher", teacher_dir, "--data", chats, "--shuffle-buffer", 12, "--data-seed", 3
    )
    assert plain.source_digest != by_set.source_digest == by_flag.source_digest
    assert by_flag.source == f"{chats} (shuffle_buffer=12, data_seed=3)"


def test_a_cache_of_chats_knows_answers_and_held_out_documents_and_a_run_takes_both(tmp_path, chat_teacher, chats):
    flags = ("--teacher", chat_teacher, "--data", chats, "--chat-template", "think", "--eval-fraction", 0.3)
    manifest, rows = cached(tmp_path / "c", *flags)
    assert manifest.answers and manifest.eval_fraction == 0.3 and manifest.bos == ()
    cache = KDCacheDataset(tmp_path / "c")
    tokenizer = models.load_tokenizer(chat_teacher)
    answers = [
        i for row in map(cache.__getitem__, range(len(cache))) for i in row["input_ids"][row["answer"] != 0].tolist()
    ]
    text = tokenizer.decode(answers, clean_up_tokenization_spaces=False)
    assert text.count("jumps<|end|>") == 12 and "user" not in text and "quick" not in text
    train, held_out = (KDCacheDataset(tmp_path / "c", split=split) for split in ("train", "eval"))
    assert len(train) + len(held_out) == len(rows) and min(len(train), len(held_out)) > 0
    run = qat_run(tmp_path / "c", tmp_path / "q", kd=KDConfig(loss_on="answers"), loop={"max_steps": 1})
    assert run_qat(run, LocalRuntime("cpu")).state.step == 1
    (tmp_path / "a.txt").write_text("the quick fox " * 40)
    plain, _ = cached(tmp_path / "p", "--teacher", chat_teacher, "--data", tmp_path / "a.txt")
    assert not plain.answers
    with pytest.raises(ConfigError, match="loss_on='answers' needs to know .* use --loss-on all"):
        run_qat(replace(run, cache_dir=tmp_path / "p", output=tmp_path / "r"), LocalRuntime("cpu"))


def test_a_cache_without_the_bos_of_the_model_is_refused(tmp_path, teacher_dir, chats):
    cached(tmp_path / "c", "--teacher", teacher_dir, "--data", chats)
    cache = KDCacheDataset(tmp_path / "c")
    cache.require(bos=())
    with pytest.raises(CacheMismatch, match=r"has bos=\(\), but the run needs bos=\(1,\); the model expects these ids"):
        cache.require(bos=(1,))
    cache.manifest = replace(cache.manifest, bos=None)
    cache.require(bos=(1,))  # rows of ids, converted caches: not known
