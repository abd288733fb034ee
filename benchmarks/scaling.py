"""What several ranks cost: bytes sent per step, time of a step with one rank and with two, efficiency on paper.

    python benchmarks/scaling.py [--parts bytes time paper] [--rounds 20] [--json PATH]

**bytes**: two gloo ranks train the embedded teacher for a few steps, QAT and recovery, with the runs that users start.
Every collective of a step is counted where it is called. Baseline: 4 bytes per trained parameter.

**time**: the same two processes step in turn, never two legs at once: one rank with all rows of a step, one rank with
half of them, both with half each, and both with half each but no sums between them. The last says what the two cost
each other by sharing a machine. Ratios are medians, with quartiles, of the ratio within a round. Baseline: one rank.

**paper**: Qwen3-0.6B on v6e chips, 4 rows x 1,024 tokens per chip and micro-batch. Nothing of it was run. With W chips
in one ring, A micro-batches per step, and the collectives of a step that the first part counts:

    t_step = max(bytes accessed / HBM bandwidth, FLOPs / peak), of one micro-batch as compiled (docs/TPU.md)
    t_comm = sum over collectives of  2 (W - 1) / W * bytes / ring bandwidth  +  2 (W - 1) * hop
    efficiency = A t_step / (A t_step + t_comm)

No overlap of the two is assumed, and t_step holds the optimizer once per micro-batch. Baseline: one chip, efficiency 1.
A second, pessimistic efficiency takes the step at its FLOPs alone, the hop ten times as long, and beside the ring what
`reduce_gradients` moves in memory: gradients into one buffer, division, and back, 6 times their bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tpu_compile import CHIPS, QWEN3_600M

import qat_lora
from qat_lora import adapters, models
from qat_lora.cli import commands
from qat_lora.config import AdapterConfig
from qat_lora.config.cache import CacheRun
from qat_lora.config.presets import scheme
from qat_lora.quant import freeze_codes, quantize_model
from qat_lora.train.student import trained_parameters

PRESET = "q4_g32"
FLOAT32 = 4  # bytes: what is trained, and so its gradient
PEAK_FLOPS, HBM_BYTES_PER_SECOND, _ = CHIPS["v6e"]  # as in docs/TPU.md
# Public: "Bidirectional inter-chip interconnect (ICI) bandwidth (per chip)" 800 GBps, 4 ports, 2D torus, 256 chips
# (https://docs.cloud.google.com/tpu/docs/v6e). Assumed: both directions of all ports are in it, in equal parts.
ICI_LINK_BYTES_PER_SECOND = 800e9 / (4 * 2)
# Assumed: a ring runs both ways round at once, so a chip sends on two links. Slices below 16 x 16 are grids without the
# links around, whose corners have no more than two; the whole pod could run a second ring beside the first.
RING_LINKS = 2
# Assumed, for want of a public figure: from one chip to the next, with what starts a transfer.
HOP_SECONDS = 1e-6
PESSIMISTIC_HOP_SECONDS = 10 * HOP_SECONDS
# The other collectives of a step, as part "bytes" counts them: three counts of positions, one loss.
SMALL_COLLECTIVES = (12, 4)
BUFFER_PASSES = 6  # read and write, three times
CHIP_NUMBERS = (4, 8, 64, 256)
ACCUMULATIONS = (1, 8)


@dataclass(frozen=True)
class CompiledStep:
    """A micro-batch of 4 x 1,024 tokens of Qwen3-0.6B as docs/TPU.md has it: bytes accessed and FLOPs."""

    name: str
    stage: str
    bytes_accessed: float
    flops: float


STEPS = (
    CompiledStep("recovery r=8, layers kept", "recovery", 262e9, 12.5e12),
    CompiledStep("recovery r=8, recomputed", "recovery", 345e9, 15.8e12),
    CompiledStep("QAT, recomputed", "qat", 384e9, 19.3e12),
)


# ---- on paper


def trained_of(config: Any, stage: str, preset: str = PRESET) -> int:
    """Number of parameters that a stage trains in a model of this config, from the package's own placement.

    Everything lies on the meta device: no weight is made.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(config)
    targets = models.target_linears(model)
    quantize_model(model, scheme(preset), targets, search=False)
    if stage == "qat":
        trained_parameters(model, ("weights", "scales", "luts"))
    else:
        freeze_codes(model)
        model = adapters.attach(model, targets, AdapterConfig(), base_name="blank")
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def ring_bytes(payload: float, ranks: int) -> float:
    """Bytes that each rank sends in a ring all-reduce of `payload` bytes: all but its own part, twice."""
    return 2 * (ranks - 1) / ranks * payload


def ring_seconds(payload: float, ranks: int, *, bytes_per_second: float, hop: float) -> float:
    """Seconds of a ring all-reduce: its bytes at the bandwidth, and one hop for each of its 2 (W - 1) turns."""
    return ring_bytes(payload, ranks) / bytes_per_second + 2 * (ranks - 1) * hop


def step_seconds(bytes_accessed: float, flops: float) -> float:
    """Roofline of one micro-batch on a v6e."""
    return max(bytes_accessed / HBM_BYTES_PER_SECOND, flops / PEAK_FLOPS)


def efficiency(micro_batch: float, accumulation: int, outside: float) -> float:
    """Share of a step that is not spent `outside` its micro-batches; all in seconds."""
    return micro_batch * accumulation / (micro_batch * accumulation + outside)


def on_paper() -> list[dict[str, Any]]:
    """One row per compiled step and number of chips."""
    from transformers import Qwen3Config

    config = Qwen3Config(**QWEN3_600M)
    trained = {stage: trained_of(config, stage) for stage in ("recovery", "qat")}
    rows = []
    for step in STEPS:
        gradients = FLOAT32 * trained[step.stage]
        seconds = step_seconds(step.bytes_accessed, step.flops)
        buffer = BUFFER_PASSES * gradients / HBM_BYTES_PER_SECOND
        for chips in CHIP_NUMBERS:
            usual, slow = (
                sum(
                    ring_seconds(payload, chips, bytes_per_second=RING_LINKS * ICI_LINK_BYTES_PER_SECOND, hop=hop)
                    for payload in (gradients, *SMALL_COLLECTIVES)
                )
                for hop in (HOP_SECONDS, PESSIMISTIC_HOP_SECONDS)
            )
            row: dict[str, Any] = {
                "step": step.name, "chips": chips, "trained": trained[step.stage], "gradient_bytes": gradients,
                "sent_bytes": ring_bytes(gradients, chips), "step_seconds": seconds, "comm_seconds": usual,
                "buffer_seconds": buffer,
            }  # fmt: skip
            for accumulation in ACCUMULATIONS:
                row[f"efficiency_{accumulation}"] = efficiency(seconds, accumulation, usual)
                row[f"pessimistic_{accumulation}"] = efficiency(step.flops / PEAK_FLOPS, accumulation, slow + buffer)
            rows.append(row)
    return rows


# ---- over two ranks of this machine


def make_cache(folder: Path) -> None:
    """A KD cache of the embedded teacher, 64 rows of 128 tokens, where `scaling_ranks` looks for it."""
    commands.cache(CacheRun(output=folder / "cache", max_rows=64, seq_len=128))


def over_ranks(name: str, folder: Path, **settings: int) -> list[dict[str, Any]]:
    """Run a program of `scaling_ranks` on two gloo ranks of one thread each; what each of them found."""
    root = str(Path(qat_lora.__file__).parents[1])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": root, "GLOO_SOCKET_IFNAME": "lo"}
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *(str(Path(__file__).with_name("scaling_ranks.py")), name, str(folder), json.dumps(settings)),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the ranks ended with {done.returncode}: {done.stderr[-3000:]}")
    return [json.loads((folder / f"{name}{rank}.json").read_text()) for rank in range(2)]


def counted(folder: Path, steps: int) -> list[dict[str, Any]]:
    """One row per stage and collective of a step; raises where steps or ranks differ."""
    found, other = over_ranks("count", folder, steps=steps)
    if found != other:
        raise RuntimeError("the ranks counted differently")
    rows = []
    for stage, run in found.items():
        first, *rest = run["steps"]
        if any(step != first for step in rest):
            raise RuntimeError(f"the steps of {stage} called different collectives: {run['steps']}")
        expected = FLOAT32 * run["trained"]
        if run["reduced_bytes"] != steps * sum(size for what, _, size in first if what == "gradients"):
            raise RuntimeError(f"reduced_bytes={run['reduced_bytes']} is not what all_reduce was given")
        for kind in dict.fromkeys(map(tuple, first)):
            what, call, size = kind
            row = {"stage": stage, "what": what, "call": call, "per_step": first.count(list(kind)), "bytes": size}
            row |= {"sent_bytes": {w: ring_bytes(size, w) for w in (2, *CHIP_NUMBERS)}, "trained": run["trained"]}
            rows.append(row | ({"baseline": expected, "ratio": size / expected} if what == "gradients" else {}))
    return rows


def timed(folder: Path, rows: int, rounds: int) -> list[dict[str, Any]]:
    """One row per stage: medians of each leg and quartiles of the ratios; a leg lasts until both ranks are done."""
    per_rank = over_ranks("clock", folder, rows=rows, rounds=rounds)
    table = []
    for stage in per_rank[0]:
        legs = {
            leg: [max(each) for each in zip(*(rank[stage][leg] for rank in per_rank), strict=True)]
            for leg in per_rank[0][stage]
        }
        ratios = {
            "speedup": (legs["one, all rows"], legs["two"]),
            "per_rank": (legs["one, half"], legs["two"]),
            "sharing": (legs["one, half"], legs["two apart"]),
            "sums": (legs["two apart"], legs["two"]),
        }
        row: dict[str, Any] = {"stage": stage, "seconds": {leg: statistics.median(x) for leg, x in legs.items()}}
        for name, (over, under) in ratios.items():
            row[name] = statistics.quantiles([a / b for a, b in zip(over, under, strict=True)], n=4)
        table.append(row)
    return table


# ---- the command


def print_counted(rows: list[dict[str, Any]], steps: int) -> None:
    print(f"bytes per optimizer step and rank, counted over {steps} steps of 2 gloo ranks, embedded teacher, {PRESET},")
    print("accumulation 2; sent: what a ring all-reduce of that many ranks sends per rank; baseline: 4 x trained")
    print(f"{'stage':10}{'collective':22}{'per step':>9}{'bytes':>12}{'of 4 x trained':>16}", end="")
    print("".join(f"{f'sent, {w} ranks':>16}" for w in rows[0]["sent_bytes"]))
    for row in rows:
        ratio = f"{row['ratio']:.4f}" if "ratio" in row else "-"
        sent = "".join(f"{x:16,.0f}" for x in row["sent_bytes"].values())
        what = f"{row['what']} ({row['call']})"
        print(f"{row['stage']:10}{what:22}{row['per_step']:9}{row['bytes']:12,}{ratio:>16}{sent}")
    print()


def print_timed(table: list[dict[str, Any]], rows: int, rounds: int) -> None:
    def spread(quartiles: list[float]) -> str:
        low, middle, high = quartiles
        return f"{middle:.2f} ({low:.2f}-{high:.2f})"

    print(
        f"ms per step of {rows} or {rows // 2} rows x 128 tokens, {PRESET}, 1 thread per rank, {os.cpu_count()} cores,"
    )
    print(f"{rounds} rounds; ratios: median (quartiles) over rounds; baseline: one rank")
    for row in table:
        print(f"{row['stage']}:")
        for leg, seconds in row["seconds"].items():
            print(f"    {leg:24}{1000 * seconds:9.1f} ms")
        print(f"    equal rows per step, one / two (2 is ideal)             {spread(row['speedup'])}")
        print(f"    equal rows per rank, one / two (1 is ideal)             {spread(row['per_rank'])}")
        print(f"      of it by sharing the machine, one / two apart         {spread(row['sharing'])}")
        print(f"      of it by sums and waiting, two apart / two            {spread(row['sums'])}")
    print()


def print_paper(rows: list[dict[str, Any]]) -> None:
    ring = RING_LINKS * ICI_LINK_BYTES_PER_SECOND / 1e9
    print("Qwen3-0.6B on v6e, on paper: 4 rows x 1,024 tokens per chip and micro-batch, A micro-batches per step;")
    print(f"HBM {HBM_BYTES_PER_SECOND / 1e12} TB/s, ring {ring:.0f} GB/s, hop {HOP_SECONDS * 1e6:.0f} us; ", end="")
    print("in brackets the pessimistic efficiency; baseline: one chip")
    print(f"{'step':27}{'chips':>6}{'trained':>13}{'sent MB':>10}{'t_step ms':>11}{'t_comm ms':>11}", end="")
    print(f"{'buffer ms':>11}" + "".join(f"{f'A = {a}':>16}" for a in ACCUMULATIONS))
    for row in rows:
        print(f"{row['step']:27}{row['chips']:6}{row['trained']:13,}{row['sent_bytes'] / 1e6:10.1f}", end="")
        print("".join(f"{1e3 * row[x]:11.2f}" for x in ("step_seconds", "comm_seconds", "buffer_seconds")), end="")
        for a in ACCUMULATIONS:
            print(f"{row[f'efficiency_{a}']:9.1%} ({row[f'pessimistic_{a}']:4.0%})", end="")
        print()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=("bytes", "time", "paper"), default=("bytes", "time", "paper"))
    parser.add_argument("--steps", type=int, default=4, help="steps that are counted")
    parser.add_argument("--rows", type=int, default=16, help="rows per step that are timed, an even number")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, help="also write the tables here")
    args = parser.parse_args()
    found: dict[str, Any] = {"torch": torch.__version__, "machine": platform.machine(), "cores": os.cpu_count()}
    with tempfile.TemporaryDirectory() as folder:
        if {"bytes", "time"} & set(args.parts):
            make_cache(Path(folder))
        if "bytes" in args.parts:
            found["bytes"] = counted(Path(folder), args.steps)
            print_counted(found["bytes"], args.steps)
        if "time" in args.parts:
            found["time"] = timed(Path(folder), args.rows, args.rounds)
            print_timed(found["time"], args.rows, args.rounds)
    if "paper" in args.parts:
        found["paper"] = on_paper()
        print_paper(found["paper"])
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
