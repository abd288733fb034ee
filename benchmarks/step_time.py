"""What a QAT step and a recovery step cost over what they replace, on this machine.

Four steps of the same model on the same batches against the same cached targets, with the same loop code:

    full fine-tune      plain nn.Linear, the block Linears trained
    QAT                 QuantLinear, its master weights and scales trained
    LoRA                plain nn.Linear frozen, peft adapters trained
    recovery            CodedLinear frozen, peft adapters trained

The steps are interleaved, so that a busy machine slows all alike; a ratio is the median over rounds of the ratio within
a round. Peak memory is measured in a process of its own for each, as growth of the resident set over three
steps of a model that is ready.

    python benchmarks/step_time.py [--preset q2_g32] [--rounds 20] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from qat_lora import adapters, models
from qat_lora.cache import KDCacheDataset
from qat_lora.cli import commands
from qat_lora.config import AdapterConfig, KDConfig, OptimConfig
from qat_lora.config.cache import CacheRun
from qat_lora.config.presets import scheme
from qat_lora.quant import freeze_codes
from qat_lora.runtime import LocalRuntime
from qat_lora.runtime.memory import process_memory
from qat_lora.train.loop import TrainState, train_step
from qat_lora.train.objective import KDObjective
from qat_lora.train.optim import build_optimizer
from qat_lora.train.student import round_to_nearest, trained_parameters

KINDS = ("full fine-tune", "QAT", "LoRA", "recovery")
BASELINE = {"QAT": "full fine-tune", "recovery": "LoRA"}
BARS = {"QAT": 1.3, "recovery": 1.15}


def build(kind: str, preset: str) -> TrainState:
    """The embedded teacher, made ready for one kind of step."""
    model: torch.nn.Module = models.load(models.EMBEDDED).model
    targets = models.target_linears(model)
    weights, scales = {}, {}
    if kind == "full fine-tune":
        model.requires_grad_(False)
        weights = {f"{name}.weight": model.get_submodule(name).weight.requires_grad_() for name in targets}
    else:
        if kind in ("QAT", "recovery"):
            round_to_nearest(model, scheme(preset))
        if kind == "QAT":
            weights, scales = trained_parameters(model, ("weights", "scales", "luts"))
        else:
            if kind == "recovery":
                freeze_codes(model)
            model = adapters.attach(model, targets, AdapterConfig(), base_name=models.EMBEDDED)
            weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return TrainState(
        model.train(), weights | scales, build_optimizer(weights.values(), scales.values(), OptimConfig())
    )


def stepper(kind: str, cache: Path, args: argparse.Namespace) -> Callable[[], None]:
    """A function that takes one optimizer step."""
    runtime, state = LocalRuntime("cpu"), build(kind, args.preset)
    dataset = KDCacheDataset(cache, preload=True)
    objective = KDObjective(KDConfig(), dataset.manifest.target_spec, runtime, total_steps=1000)
    batches = dataset.batches(args.batch_size)
    return lambda: train_step(state, [next(batches)], objective, OptimConfig(), runtime) and None


def peak_mib(kind: str, cache: Path, args: argparse.Namespace) -> float:
    """Growth of the resident set over three steps, in MiB, in a fresh process."""
    argv = [sys.executable, __file__, "--memory-of", kind, "--cache", str(cache), "--preset", args.preset]
    argv += ["--batch-size", str(args.batch_size)]
    return float(subprocess.run(argv, check=True, capture_output=True, text=True).stdout.split()[-1])


def print_memory_of(kind: str, args: argparse.Namespace) -> None:
    """The child process of `peak_mib`."""
    step = stepper(kind, Path(args.cache), args)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here; Linux only
    before = process_memory().used_bytes
    for _ in range(3):
        step()
    print((process_memory().peak_bytes - before) / 2**20)


def measure(cache: Path, args: argparse.Namespace) -> list[dict[str, float | str]]:
    """One row per kind: seconds, ratio to its baseline, peak memory."""
    steppers = {kind: stepper(kind, cache, args) for kind in KINDS}
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for round_number in range(args.rounds + 2):
        for kind, step in steppers.items():
            started = time.perf_counter()
            step()
            if round_number >= 2:
                seconds[kind].append(time.perf_counter() - started)
    rows: list[dict[str, float | str]] = []
    for kind in KINDS:
        base = BASELINE.get(kind, kind)
        ratios = [a / b for a, b in zip(seconds[kind], seconds[base], strict=True)]
        row = {"kind": kind, "step_seconds": statistics.median(seconds[kind]), "baseline": base}
        rows.append(row | {"ratio": statistics.median(ratios), "peak_mib": peak_mib(kind, cache, args)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", default="q2_g32")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--memory-of", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--cache", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory_of:
        print_memory_of(args.memory_of, args)
        return
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        commands.cache(CacheRun(output=cache, max_rows=64, seq_len=128))
        rows = measure(cache, args)
    print(
        f"{args.preset}, batch {args.batch_size} x 128 tokens, {torch.get_num_threads()} threads, {args.rounds} rounds"
    )
    print(f"{'step':16}{'ms':>8}{'ratio':>8}  {'of':16}{'bar':>6}{'peak MiB':>10}")
    for row in rows:
        bar = BARS.get(str(row["kind"]), "")
        print(
            f"{row['kind']:16}{1000 * float(row['step_seconds']):8.1f}{row['ratio']:8.2f}  {row['baseline']:16}"
            f"{bar!s:>6}{row['peak_mib']:10.0f}"
        )
    if args.json:
        args.json.write_text(json.dumps({"preset": args.preset, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
