"""Make the embedded teacher: a small Qwen3 model, trained from nothing on Python's own documentation.

    python scripts/train_embedded_teacher.py          # makes qat_lora/assets/teacher again, up to float noise

Reads the train side of `qat_lora.data.corpus`, fits a byte-level BPE tokenizer on it, trains the model, measures the
loss on the eval side, and writes a transformers directory plus `training.json`, the record of how it was made. The
folder is rewritten every `--save-every` steps, so an interrupted run leaves a loadable model that says how far it came.
The CPU does it all: float32 weights, bfloat16 products (autocast), compiled by inductor where g++ is there.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import logging
import math
import platform
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import tokenizers
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from qat_lora.data.corpus import corpus_texts

END_OF_TEXT = "<|endoftext|>"  # begins, ends and pads; id 0


def main() -> None:
    """Train, evaluate and write the teacher that the command line describes."""
    args = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    texts = {split: list(corpus_texts(split)) for split in ("train", "eval")}
    tokenizer = fit_tokenizer(texts["train"], vocab_size=args.vocab_size)
    streams = {split: token_stream(documents, tokenizer) for split, documents in texts.items()}
    model = Qwen3ForCausalLM(teacher_config(args))
    origin = {
        "command": command_line(args),
        "versions": versions(),
        "corpus": {split: corpus_record(texts[split], streams[split]) for split in texts},
        "parameters": model.num_parameters(),
    }
    logging.info("%s", origin)

    started = time.perf_counter()
    for step, train_loss in train(model, streams["train"], args):
        wall_seconds = time.perf_counter() - started
        if step % args.log_every == 0:
            logging.info("step %d loss %.4f seconds_per_step %.3f", step, train_loss, wall_seconds / step)
        if step % args.save_every == 0 or step == args.steps:
            progress = {
                "steps_done": step,
                "tokens_seen": step * args.batch_size * args.seq_len,
                "wall_seconds": round(wall_seconds, 1),
                "train_loss": round(train_loss, 4),
            }
            with torch.random.fork_rng():  # how often we look must not change what is trained
                progress |= evaluate(model, streams["eval"], seq_len=args.seq_len)
                progress["sample"] = sample(model, tokenizer)
                write_teacher(args.output, model, tokenizer, origin | progress)
            logging.info("step %d saved in %s: held-out loss %s", step, args.output, progress["heldout_loss"])


def parse_arguments() -> argparse.Namespace:
    """Return the command line; its defaults are those that made the shipped teacher."""
    parser = argparse.ArgumentParser(description="Train the embedded teacher.")
    parser.add_argument("--output", type=Path, default=Path("qat_lora/assets/teacher"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1800)
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per step")
    parser.add_argument("--seq-len", type=int, default=512, help="tokens per sequence")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="at the peak, after warm-up")
    parser.add_argument("--warmup-steps", type=int, default=100)
    parser.add_argument("--decay-fraction", type=float, default=0.3, help="share of steps the rate falls over")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.1, help="on embeddings and block outputs")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--log-every", type=int, default=25)
    parser.add_argument("--save-every", type=int, default=250)
    return parser.parse_args()


def teacher_config(args: argparse.Namespace) -> Qwen3Config:
    """Return the architecture: every in_features (192, 512) is divisible by 64, so all group sizes fit."""
    return Qwen3Config(
        vocab_size=args.vocab_size,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )


def fit_tokenizer(texts: list[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """Fit a byte-level BPE whose id 0 is <|endoftext|>."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    options = {"vocab_size": vocab_size, "special_tokens": [END_OF_TEXT], "initial_alphabet": alphabet}
    bpe.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(**options, show_progress=False))
    special = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
    return PreTrainedTokenizerFast(tokenizer_object=bpe, model_max_length=512, **special)


def token_stream(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Return all documents as one row of token ids, each document led by <|endoftext|>."""
    encodings = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    ids = [token for encoding in encodings for token in [tokenizer.bos_token_id, *encoding.ids]]
    return torch.tensor(ids, dtype=torch.long)


def train(model: Qwen3ForCausalLM, stream: Tensor, args: argparse.Namespace) -> Iterator[tuple[int, float]]:
    """Train in place; yield (steps done, smoothed loss) after each optimizer step."""
    add_dropout(model, args.dropout)
    loss_of = torch.compile(next_token_loss) if shutil.which("g++") else next_token_loss
    optimizers = make_optimizers(model, args)
    schedules = [LambdaLR(optimizer, lambda step: learning_rate_factor(step, args)) for optimizer in optimizers]
    batches = endless_batches(stream, args)
    smoothed = math.log(args.vocab_size)
    for step in range(1, args.steps + 1):
        model.train()
        loss = loss_of(model, next(batches))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        smoothed += max(0.02, 1 / step) * (loss.item() - smoothed)
        yield step, smoothed


def add_dropout(model: Qwen3ForCausalLM, probability: float) -> None:
    """Drop parts of the embeddings and of what each block adds: the corpus is small and seen many times."""

    def drop(module: torch.nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return F.dropout(output, probability, training=module.training)

    for name, module in model.named_modules():
        if name.endswith(("embed_tokens", "o_proj", "down_proj")):
            module.register_forward_hook(drop)


def next_token_loss(model: Qwen3ForCausalLM, ids_BT: Tensor) -> Tensor:
    """Return the mean cross-entropy of each token given those before it."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits_BTV = model(input_ids=ids_BT[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits_BTV.float().flatten(0, 1), ids_BT[:, 1:].flatten())


def make_optimizers(model: Qwen3ForCausalLM, args: argparse.Namespace) -> list[Optimizer]:
    """Return Muon for the blocks' matrices, and AdamW for the embedding and (undecayed) the norms' gains."""
    gains = [p for p in model.parameters() if p.ndim == 1]
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    embedding = model.get_input_embeddings().parameters()
    shared = {"lr": args.learning_rate, "weight_decay": args.weight_decay}
    adamw = AdamW([{"params": embedding}, {"params": gains, "weight_decay": 0.0}], **shared)
    return [Muon(matrices, adjust_lr_fn="match_rms_adamw", **shared), adamw]


def learning_rate_factor(step: int, args: argparse.Namespace) -> float:
    """Rise in a line during warm-up, stay, then fall in a line to nought."""
    falling_steps = max(1.0, args.decay_fraction * args.steps)
    return min(1.0, (step + 1) / max(1, args.warmup_steps), (args.steps - step) / falling_steps)


def endless_batches(stream: Tensor, args: argparse.Namespace) -> Iterator[Tensor]:
    """Yield [B, T+1] batches for ever; each epoch cuts the stream at another offset and shuffles the cuts."""
    generator = torch.Generator().manual_seed(args.seed)
    while True:
        offset = int(torch.randint(args.seq_len, (1,), generator=generator))
        rows = stream[offset:].unfold(0, args.seq_len + 1, args.seq_len)
        order = torch.randperm(len(rows), generator=generator)
        for start in range(0, len(rows) - args.batch_size + 1, args.batch_size):  # whole batches: one shape to compile
            yield rows[order[start : start + args.batch_size]]


@torch.no_grad()
def evaluate(model: Qwen3ForCausalLM, stream: Tensor, *, seq_len: int) -> dict[str, float]:
    """Return held-out loss and perplexity of the weights as saved (bfloat16), in float32 arithmetic."""
    rounded = copy.deepcopy(model).bfloat16().float().eval()
    rows = stream.unfold(0, seq_len + 1, seq_len)
    losses = []
    for ids_BT in rows.split(16):
        logits_BTV = rounded(input_ids=ids_BT[:, :-1]).logits
        losses.append(F.cross_entropy(logits_BTV.flatten(0, 1), ids_BT[:, 1:].flatten(), reduction="none"))
    loss = torch.cat(losses).mean().item()
    return {"heldout_loss": round(loss, 4), "heldout_perplexity": round(math.exp(loss), 3)}


def sample(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> str:
    """Return a continuation of a fixed prompt, drawn with a fixed seed."""
    inputs = tokenizer("If the file", return_tensors="pt", return_token_type_ids=False)
    torch.manual_seed(0)
    ids = model.eval().generate(**inputs, max_new_tokens=160, do_sample=True, temperature=0.8, top_k=40)
    return str(tokenizer.decode(ids[0], skip_special_tokens=True))


def command_line(args: argparse.Namespace) -> str:
    """Return the command that repeats this run: every option but where the result is written."""
    shaping = {name.replace("_", "-"): value for name, value in vars(args).items() if name != "output"}
    return " ".join(["python scripts/train_embedded_teacher.py", *(f"--{k} {v}" for k, v in shaping.items())])


def corpus_record(texts: list[str], stream: Tensor) -> dict[str, int | str]:
    """Return the size of one side of the corpus, and a digest that tells another Python's text apart."""
    characters, digest = sum(map(len, texts)), hashlib.sha256("\0".join(texts).encode()).hexdigest()
    return {"documents": len(texts), "characters": characters, "tokens": len(stream), "sha256": digest}


def versions() -> dict[str, str]:
    """Return what the result depends on beside the options; the corpus is the text of this Python version."""
    libraries = {module.__name__: str(module.__version__) for module in (torch, transformers, tokenizers)}
    return {"python": platform.python_version(), **libraries, "machine": platform.machine()}


def write_teacher(folder: Path, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, record: dict) -> None:
    """Write a transformers directory in bfloat16, and the record beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    saved = copy.deepcopy(model).bfloat16()
    saved.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0)
    saved.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
