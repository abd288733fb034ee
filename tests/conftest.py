"""Shared pieces: a tiny teacher on disk with its own tokenizer, a cache of it, and a machine without network."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

from qat_lora.cli import commands
from qat_lora.config import LoopConfig, OptimConfig, PlaceConfig, QatRun, RecoveryRun
from qat_lora.config.cache import CacheRun
from qat_lora.config.presets import scheme
from qat_lora.runtime import LocalRuntime

VOCAB = 211  # a prime, so that no other size can be taken for it
SEQ_LEN = 24
CPU = PlaceConfig(device="cpu")
OWN_THREADS = torch.get_num_threads()
torch.set_num_threads(1)  # for what is made once per session, before the first test has a say


@pytest.fixture(autouse=True, scope="session")
def _own_disk_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Copies of shards and token rows of tests lie in a folder of theirs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QAT_LORA_CACHE_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _one_thread(request: pytest.FixtureRequest) -> None:
    """Small matrices are faster on one thread, and a shared machine starves spinning ones.

    A slow proof times and runs what a user runs, so it has torch's own number of threads.
    """
    torch.set_num_threads(OWN_THREADS if request.node.get_closest_marker("slow") else 1)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = [
        "the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog",
        "while", "seven", "small", "wizards", "box", "with", "great", "joy",
    ]  # fmt: skip
    lines = [" ".join(words[(i * k) % len(words)] for k in range(1, 12)) + "." for i in range(160)]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="session")
def teacher_dir(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Path:
    """A random two-layer Qwen3 with a short last group everywhere (44 and 36 inputs, groups of 32)."""
    return make_teacher(tmp_path_factory.mktemp("teacher"), text_file, seed=0)


@pytest.fixture(scope="session")
def other_teacher_dir(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Path:
    """The same architecture and tokenizer, other weights."""
    return make_teacher(tmp_path_factory.mktemp("other"), text_file, seed=1)


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory, teacher_dir: Path, text_file: Path) -> Path:
    """The whole vocabulary of the tiny teacher in float32, at two temperatures."""
    folder = tmp_path_factory.mktemp("caches") / "tiny"
    commands.cache(cache_run(teacher_dir, text_file, folder, top_k=VOCAB, logprob_bits=32))
    return folder


@pytest.fixture
def runtime() -> LocalRuntime:
    return LocalRuntime("cpu")


def make_teacher(folder: Path, text_file: Path, *, seed: int) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(set(text_file.read_text().replace(" ", "Ġ").replace("\n", "Ċ")))
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 60, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train([str(text_file)], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>", pad_token="<|end|>")
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=44,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=12,
        intermediate_size=52,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        eos_token_id=0,
        bos_token_id=0,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for p in model.parameters():  # a random model is nearly uniform; sharpen it so that rounding hurts
            if p.dim() == 2:
                p.mul_(4.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def cache_run(teacher: Path, text: Path, output: Path, **settings) -> CacheRun:
    defaults = {
        "seq_len": SEQ_LEN,
        "temperatures": (1.0, 2.0),
        "rows_per_shard": 16,
        "eval_fraction": 0.2,
        "place": CPU,
    }
    if settings.get("store", "topk") == "topk":
        defaults["top_k"] = 8
    return CacheRun(teacher=str(teacher), data=str(text), output=output, **(defaults | settings))


def qat_run(cache_dir: Path, output: Path, *, preset: str = "q2_g32", loop=None, **settings) -> QatRun:
    return QatRun(
        preset=preset,
        scheme=scheme(preset),
        cache_dir=cache_dir,
        output=output,
        loop=LoopConfig(**({"max_steps": 6, "batch_size": 4, "eval_rows": 8} | (loop or {}))),
        **({"optim": OptimConfig(lr=2e-3, warmup_steps=2), "place": CPU} | settings),
    )


def recovery_run(cache_dir: Path, output: Path, checkpoint: Path, *, loop=None, **settings) -> RecoveryRun:
    return RecoveryRun(
        checkpoint=str(checkpoint),
        cache_dir=cache_dir,
        output=output,
        loop=LoopConfig(**({"max_steps": 6, "batch_size": 4, "eval_rows": 8} | (loop or {}))),
        **({"optim": OptimConfig(lr=2e-3, warmup_steps=2), "place": CPU} | settings),
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files whose tests start processes come first, so that no worker is left alone with one of them at the end."""
    items.sort(key=lambda item: "tests/runtime/" not in item.nodeid)


@pytest.fixture(autouse=True)
def _no_waits_between_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails at a URL is tried again at once."""
    monkeypatch.setattr("qat_lora.urls.RETRY_SECONDS", (0.0, 0.0, 0.0))
