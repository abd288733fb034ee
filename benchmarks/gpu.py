"""For whoever has one GPU: does everything run there, is it right, how fast, in how much memory. At most 8 minutes.

    python benchmarks/gpu.py [--device cuda|mps|cpu] [--output gpu_report] [--quick]

Prints a report and writes `report.json` into the output folder. In this order:

    equality        loss and gradients of a QAT step, float32, against the CPU
    host waits      how often the host waits for the device in a step: 0 is right
    repeatable      whether the same steps twice end in the same bits
    steps           seconds, tokens per second and peak memory of four kinds of step, in what the device computes in
    demo            the five commands in short, and the table they end with

The exit code is 1 where something is wrong. The project's own machines have no GPU: please send `report.json`.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import json
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from step_time import KINDS, build

from qat_lora import __version__
from qat_lora.cache import KDCacheDataset
from qat_lora.cli import commands
from qat_lora.cli.demo import demo
from qat_lora.config import KDConfig, OptimConfig, PlaceConfig
from qat_lora.config.cache import CacheRun
from qat_lora.files import write_json
from qat_lora.runtime import Runtime, runtime_for
from qat_lora.train.loop import TrainState, accumulate_gradients, train_step
from qat_lora.train.objective import Batch, KDObjective

PRESET = "q2_g32"
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-4, 2e-3  # relative; float32, sums in another order
KD = KDConfig(hard_weight=0.1, ce_alpha=0.1)


class Steps:
    """One kind of step on a device."""

    def __init__(self, kind: str, dataset: KDCacheDataset, runtime: Runtime, batch_size: int) -> None:
        torch.manual_seed(0)
        self.runtime, self.state = runtime, _on_device(copy.deepcopy(_built(kind)), runtime)
        self.objective = KDObjective(KD, dataset.manifest.target_spec, runtime, total_steps=1000)
        self.batches: list[Batch] = [
            runtime.to_device(batch) for batch, _ in zip(dataset.batches(batch_size), range(4), strict=False)
        ]
        runtime.zero_grad(self.state.optimizer)

    def gradients(self) -> tuple[float, dict[str, torch.Tensor]]:
        """The loss of two micro-batches, and the gradients on the host."""
        loss = accumulate_gradients(self.state, self.batches[:2], self.objective, self.runtime, first_position=0)
        grads = {name: p.grad.float().cpu() for name, p in self.state.trained.items() if p.grad is not None}
        return loss.item(), grads

    def step(self) -> None:
        """One optimizer step."""
        train_step(self.state, self.batches[:1], self.objective, OptimConfig(), self.runtime)


@functools.cache
def _built(kind: str) -> TrainState:
    return build(kind, PRESET)


def _on_device(state: TrainState, runtime: Runtime) -> TrainState:
    """The state with its model, and the optimizer's moments, on the device."""
    model = runtime.place(state.model)
    for p in state.trained.values():
        moments = state.optimizer.state[p]
        for name in ("exp_avg", "exp_avg_sq", "step"):
            on_device = name != "step" or runtime.device.type == "cuda"
            moments[name] = moments[name].to(runtime.device if on_device else "cpu")
    return dataclasses.replace(state, model=model)


def equality(dataset: KDCacheDataset, place: PlaceConfig) -> dict[str, Any]:
    places = (PlaceConfig(device="cpu", dtype="fp32"), dataclasses.replace(place, dtype="fp32"))
    (loss, grads), (other, others) = (Steps("QAT", dataset, runtime_for(p), 8).gradients() for p in places)
    apart = {name: ((grad - others[name]).norm() / grad.norm().clamp(min=1e-12)).item() for name, grad in grads.items()}
    worst = max(apart, key=lambda name: apart[name])
    found = {"loss_cpu": loss, "loss_device": other, "worst_gradient": worst, "worst_relative_error": apart[worst]}
    is_right = abs(loss - other) <= LOSS_TOLERANCE * abs(loss) and apart[worst] <= GRADIENT_TOLERANCE
    return found | {"tensors": len(grads), "right": is_right}


def host_waits(dataset: KDCacheDataset, runtime: Runtime) -> dict[str, Any]:
    """Synchronisations that CUDA warns of in three steps of each kind; elsewhere nothing counts them."""
    if runtime.device.type != "cuda":
        return {"counted": False}
    found: dict[str, Any] = {"counted": True}
    for kind in KINDS:
        steps = Steps(kind, dataset, runtime, 8)
        steps.step()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                for _ in range(3):
                    steps.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        found[kind] = [f"{w.filename}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]
    return found | {"right": not any(found[kind] for kind in KINDS)}


def repeatable(dataset: KDCacheDataset, runtime: Runtime) -> dict[str, bool]:
    """Whether three steps from one state end in the same bits."""
    ends: dict[str, list[list[torch.Tensor]]] = {kind: [] for kind in ("QAT", "recovery")}
    for kind, of_kind in ends.items():
        for _ in range(2):
            steps = Steps(kind, dataset, runtime, 8)
            for _ in range(3):
                steps.step()
            of_kind.append([p.detach().cpu() for p in steps.state.trained.values()])
    return {kind: all(map(torch.equal, *of_kind)) for kind, of_kind in ends.items()}


def step_table(dataset: KDCacheDataset, runtime: Runtime, batch_size: int, rounds: int) -> list[dict[str, Any]]:
    rows = []
    for kind in KINDS:
        if runtime.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        steps = Steps(kind, dataset, runtime, batch_size)
        steps.step()
        seconds = [_seconds(steps.step, runtime) for _ in range(rounds)]
        tokens = steps.batches[0]["input_ids"].numel()
        median = statistics.median(seconds)
        peak = runtime.memory().peak_bytes
        rows.append({"kind": kind, "seconds": median, "tokens_per_second": tokens / median, "peak_bytes": peak})
    return rows


def _seconds(step: Callable[[], None], runtime: Runtime, *, steps: int = 3) -> float:
    """Of one step, by the wall clock between two moments at which the device has nothing to do."""
    runtime.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    runtime.synchronize()
    return (time.perf_counter() - started) / steps


def short_demo(output: Path, device: str, factor: float) -> dict[str, Any]:
    started = time.perf_counter()
    rows = demo(output, preset="q4_g32", device=device, steps_factor=factor, rows_factor=factor)
    return {"minutes": (time.perf_counter() - started) / 60, "rows": [dataclasses.asdict(row) for row in rows]}


def machine(runtime: Runtime) -> dict[str, Any]:
    on_cuda = runtime.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name() if on_cuda else str(runtime.device), "cuda": torch.version.cuda,
        "memory_bytes": runtime.memory().total_bytes, "compute": str(runtime.precision.compute),
        "torch": torch.__version__, "python": platform.python_version(), "qat_lora": __version__,
    }  # fmt: skip


def say(report: dict[str, Any]) -> None:
    equal, waits = report["equality"], report["host_waits"]
    print(f"\n{report['machine']['device']}, torch {report['machine']['torch']}, {report['machine']['compute']}")
    print(
        f"equality with the CPU, float32: {'right' if equal['right'] else 'WRONG'}; loss {equal['loss_device']:.6f}, "
    )
    print(f"  there {equal['loss_cpu']:.6f}; worst of {equal['tensors']} gradients {equal['worst_relative_error']:.1e}")
    print("host waits in three steps: " + ", ".join(f"{kind} {len(waits[kind])}" for kind in KINDS if kind in waits)
          if waits["counted"] else "host waits: not counted on this device")  # fmt: skip
    print("same bits twice: " + ", ".join(f"{kind} {'yes' if x else 'no'}" for kind, x in report["repeatable"].items()))
    print(f"{'step':<16}{'ms':>10}{'tokens/s':>12}{'peak MiB':>12}")
    for row in report["steps"]:
        peak = row["peak_bytes"] / 2**20
        print(f"{row['kind']:<16}{1e3 * row['seconds']:>10.2f}{row['tokens_per_second']:>12,.0f}{peak:>12,.0f}")
    print(f"demo in short: {report['demo']['minutes']:.1f} min; all in all {report['minutes']:.1f} min")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "mps", "cpu"))
    parser.add_argument("--output", type=Path, default=Path("gpu_report"))
    parser.add_argument("--quick", action="store_true", help="as little as shows that every part runs")
    args = parser.parse_args()
    started = time.perf_counter()
    place = PlaceConfig(device=args.device)
    runtime = runtime_for(place)
    batch_size, rounds, factor = (4, 1, 0.005) if args.quick else (32, 10, 0.2)
    args.output.mkdir(parents=True, exist_ok=True)
    cache = args.output / "cache"
    commands.cache(CacheRun(output=cache, max_rows=4 * batch_size, seq_len=32 if args.quick else 128, place=place))
    dataset = KDCacheDataset(cache, preload=True)
    report = {
        "machine": machine(runtime),
        "equality": equality(dataset, place),
        "host_waits": host_waits(dataset, runtime),
        "repeatable": repeatable(dataset, runtime),
        "steps": step_table(dataset, runtime, batch_size, rounds),
        "demo": short_demo(args.output / "demo", args.device, factor),
    }
    report["minutes"] = (time.perf_counter() - started) / 60
    write_json(args.output / "report.json", report)
    say(report)
    is_right = report["equality"]["right"] and report["host_waits"].get("right", True)
    print(f"{args.output / 'report.json'}: {json.dumps({'right': is_right})}")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
