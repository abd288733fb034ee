"""What a KD cache costs: to build, to read, and in memory, on this machine.

    building    build_cache over the embedded teacher, shards written, against its bare forward pass: trunk and head on
                the same batches in the same chunks, nothing stored
    reading     rows in random order read, unpacked and collated by one thread, against what a QAT step of the embedded
                teacher takes on one thread and on all; preloaded and streamed
    memory      the resident set of a process that streams a synthetic cache, split off, in random order over epochs:
                anonymous pages and file pages, the highest seen beyond what it had with everything imported

What is compared is interleaved, so that a busy machine slows both alike; a ratio is the median over rounds of the ratio
within a round. The synthetic caches go through the real writer and are deleted afterwards.

    python benchmarks/cache.py [--only build|read|memory] [--rounds 10] [--threads N] [--json PATH] [--markdown PATH]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from step_time import stepper
from torch import Tensor

from qat_lora import models
from qat_lora.cache import (
    CacheManifest,
    CacheWriter,
    KDCacheDataset,
    build_cache,
)
from qat_lora.cli import commands
from qat_lora.config.cache import CacheRun
from qat_lora.data import pack, read_texts
from qat_lora.runtime import LocalRuntime

SEQ_LEN, TOP_K, BATCH, CHUNK_TOKENS = 128, 64, 8, 256
BARS = {"build": ("at least", 0.85), "read": ("at least", 20.0), "memory": ("at most", 64.0)}
MB = 1e6
Row = dict[str, Any]


def seconds(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def manifest_of(rows: int, vocab_size: int, **changes: Any) -> CacheManifest:
    values: dict[str, Any] = dict(teacher="benchmark", teacher_digest="t", tokenizer_digest="k", source="benchmark")
    values |= dict(vocab_size=vocab_size, seq_len=SEQ_LEN, top_k=TOP_K, rows=rows, source_digest=f"rows {rows}")
    return CacheManifest(**(values | changes))


def measure_build(args: argparse.Namespace) -> list[Row]:
    """Tokens per second of a build and of the bare forward pass, over the same rows."""
    runtime, loaded = LocalRuntime("cpu"), models.load(models.EMBEDDED)
    texts = read_texts("embedded:train")
    blocks = pack(texts, loaded.tokenizer, SEQ_LEN, max_rows=args.build_rows)
    head = models.head_parts(loaded.model, runtime.precision.compute)

    def hidden_states(ids_BT: Tensor) -> Tensor:
        return models.hidden_and_head(loaded.model, ids_BT, runtime)[0].unflatten(0, ids_BT.shape)

    @torch.no_grad()
    def bare() -> None:
        for ids_BT in torch.from_numpy(blocks.input_ids_RT).long().split(BATCH):
            for hidden_cH in hidden_states(ids_BT).flatten(0, 1).split(CHUNK_TOKENS):
                head(hidden_cH)

    def build() -> None:
        with tempfile.TemporaryDirectory() as folder:
            writer = CacheWriter(folder, manifest_of(args.build_rows, loaded.identity.vocab_size))
            build_cache(hidden_states, head, blocks, writer, batch_size=BATCH, chunk_tokens=CHUNK_TOKENS)
            writer.finish()

    took: dict[str, list[float]] = {"bare forward": [], "build": []}
    for round_number in range(args.rounds + 1):
        for name, act in (("bare forward", bare), ("build", build)):
            spent = seconds(act)
            if round_number:
                took[name].append(spent)
    ratios = [a / b for a, b in zip(took["bare forward"], took["build"], strict=True)]
    tokens = args.build_rows * SEQ_LEN
    speeds = {name: tokens / statistics.median(spent) for name, spent in took.items()}
    return [
        {"kind": "bare forward", "tokens_per_second": speeds["bare forward"]},
        {"kind": "build", "tokens_per_second": speeds["build"], "ratio": statistics.median(ratios), "bar": "build"},
    ]


def measure_read(args: argparse.Namespace) -> list[Row]:
    """Tokens per second of reading on one thread and of QAT steps, on one thread and on torch's own number."""
    all_threads, batches_each = torch.get_num_threads(), 40
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        commands.cache(CacheRun(output=cache, max_rows=512, seq_len=SEQ_LEN, top_k=TOP_K))
        args.preset, args.batch_size = "q2_g32", BATCH
        step = stepper("QAT", cache, args)
        readers = {name: KDCacheDataset(cache, preload=name == "preloaded") for name in ("preloaded", "streamed")}
        streams = {name: reader.batches(BATCH) for name, reader in readers.items()}
        took: dict[str, list[float]] = {name: [] for name in (*readers, "step, 1 thread", "step, all threads")}
        for round_number in range(args.rounds + 1):
            spent = {}
            torch.set_num_threads(1)
            for name, stream in streams.items():
                spent[name] = seconds(lambda: [next(stream) for _ in range(batches_each)]) / batches_each  # noqa: B023
            spent["step, 1 thread"] = seconds(step)
            torch.set_num_threads(all_threads)
            spent["step, all threads"] = seconds(step)
            for name in took if round_number else ():
                took[name].append(spent[name])
    rows: list[Row] = []
    for name, each in took.items():
        row: Row = {"kind": name, "tokens_per_second": BATCH * SEQ_LEN / statistics.median(each)}
        if name in readers:
            for base in ("1 thread", "all threads"):
                pairs = zip(took[f"step, {base}"], each, strict=True)
                row["ratio" if base == "1 thread" else "ratio_all_threads"] = statistics.median(a / b for a, b in pairs)
            row["bar"] = "read"
        rows.append(row)
    return rows


def write_synthetic(folder: Path, size_mb: int) -> int:
    """A cache of about so many MB of made-up numbers; its bytes."""
    one = manifest_of(1, 4096)
    rows = int(size_mb * MB) // one.bytes_per_row
    writer = CacheWriter(folder, manifest_of(rows, 4096, rows_per_shard=256))
    source = np.random.RandomState(0)
    made = {name: source.randint(1, 4096, shape).astype(dtype) for name, (shape, dtype) in one.fields(256).items()}
    made["lengths"][:] = SEQ_LEN
    for index in writer.missing:
        count = len(writer.manifest.shard_rows(index))
        made["input_ids"] = source.randint(0, 4096, (256, SEQ_LEN)).astype(np.int32)
        writer.write_shard(index, {name: np.ascontiguousarray(x[:count]) for name, x in made.items()})
    return writer.finish().size_bytes


def resident_mb() -> dict[str, float]:
    """Anonymous and file-backed pages of this process, Linux only."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {kind: int(status[kind].split()[0]) * 1024 / MB for kind in ("RssAnon", "RssFile")}


def print_memory_of(args: argparse.Namespace) -> None:
    """The child process of `measure_memory`: opens, splits and streams, and prints its highest growth by kind."""
    with tempfile.TemporaryDirectory() as folder:  # what the first read of any cache loads is not the cache's
        write_synthetic(Path(folder), 8)
        next(KDCacheDataset(folder, split="train", eval_fraction=0.05).batches(BATCH))
    before = resident_mb()
    highest = dict.fromkeys((*before, "both"), 0.0)

    def note() -> None:
        now = {kind: value - before[kind] for kind, value in resident_mb().items()}
        for kind, value in {**now, "both": sum(now.values())}.items():
            highest[kind] = max(highest[kind], value)

    reader = KDCacheDataset(args.memory_of, split="train", eval_fraction=0.05)
    note()
    batches = LocalRuntime("cpu").wrap_loader(reader.batches(BATCH))  # with the thread that reads ahead
    epochs = 0.0
    with contextlib.closing(batches):
        for number, _ in enumerate(batches, 1):
            if number % 50 == 0:
                note()
            epochs = number * BATCH / len(reader)
            if epochs >= args.epochs:
                break
    note()
    print(json.dumps({**highest, "epochs": epochs}))


def measure_memory(args: argparse.Namespace) -> list[Row]:
    """One row per size, and the difference between the largest and the smallest."""
    rows: list[Row] = []
    for size in args.sizes_mb:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            spent = time.perf_counter()
            written = write_synthetic(Path(folder), size)
            spent = time.perf_counter() - spent
            argv = [sys.executable, __file__, "--memory-of", folder, "--epochs", str(args.epochs)]
            out = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
            found = json.loads(out.splitlines()[-1])
        rows.append({"kind": f"streaming {size} MB", "cache_mb": written / MB, "write_seconds": spent, **found})
    rows[-1] |= {"flat_mb": rows[-1]["both"] - rows[0]["both"], "bar": "memory"}
    return rows


def lines_of(rows: list[Row], args: argparse.Namespace) -> list[str]:
    """The table, in markdown."""
    lines = ["| what | tokens/s | ratio | of | bar |", "|---|---:|---:|---|---|"]
    for row in (row for row in rows if "tokens_per_second" in row):
        bar = " ".join(map(str, BARS[row["bar"]])) if "bar" in row else ""
        of = {"build": "bare forward", "read": "QAT step on one thread"}.get(row.get("bar", ""), "")
        ratio = f"{row['ratio']:.2f}" if "ratio" in row else ""
        lines.append(f"| {row['kind']} | {row['tokens_per_second']:,.0f} | {ratio} | {of} | {bar} |")
        if "ratio_all_threads" in row:
            lines.append(f"| | | {row['ratio_all_threads']:.2f} | QAT step on {torch.get_num_threads()} threads | |")
    if memory := [row for row in rows if "both" in row]:
        lines += ["", "| streamed cache | epochs | anonymous MB | file MB | both at once | more than the first | bar |"]
        lines += ["|---|---:|---:|---:|---:|---:|---|"]
        for row in memory:
            flat = f"{row['flat_mb']:.1f} | at most 64 MB" if "flat_mb" in row else " | "
            lines.append(
                f"| {row['cache_mb']:,.0f} MB | {row['epochs']:.2f} | {row['RssAnon']:.1f} | {row['RssFile']:.1f} | "
                f"{row['both']:.1f} | {flat} |"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=("build", "read", "memory"))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the teacher and of the steps")
    parser.add_argument("--build-rows", type=int, default=256, help="rows per round of a build")
    parser.add_argument("--sizes-mb", type=int, nargs="+", default=[50, 2000])
    parser.add_argument("--epochs", type=float, default=2.0, help="epochs read while memory is watched")
    parser.add_argument("--folder", help="where the synthetic caches go for a while")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--markdown", type=Path, help="also write the tables here")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory_of:
        print_memory_of(args)
        return
    torch.set_num_threads(args.threads)
    parts = {"build": measure_build, "read": measure_read, "memory": measure_memory}
    rows = [row for name, measure in parts.items() if args.only in (None, name) for row in measure(args)]
    lines = lines_of(rows, args)
    print("\n".join(lines))
    if args.markdown:
        args.markdown.write_text("\n".join(lines) + "\n")
    if args.json:
        args.json.write_text(json.dumps({"rounds": args.rounds, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
