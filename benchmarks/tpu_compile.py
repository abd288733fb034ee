"""What a TPU's own compiler says of our steps, on a machine without a TPU: does it fit, what does it cost, how long.

    python benchmarks/tpu_compile.py                                   Qwen3-0.6B, recovery and QAT, v6e
    python benchmarks/tpu_compile.py --stage recovery --scan-layers on --batch-size 16 --topology v5e:1x1
    python benchmarks/tpu_compile.py --model DIR --stage qat --preset q4_r32 --sync step --json out.json
    python benchmarks/tpu_compile.py --stage recovery --scan-layers on --largest-batch

The real step of the real loop is traced with placeholders (`tpu_trace`), every graph of it is compiled by libtpu for
the topology (`tpu_compiler`), nothing is run. Two environments are set up where they are missing: `.venv-xla` with
torch_xla, `.venv-tpu` with jax[tpu], whose versions stand below.

Peak is of all graphs of a step, the worst moment: what is resident, a graph's outputs and temporaries, and the code of
all of them, which stays loaded. FLOPs and bytes accessed are XLA's cost analysis. It counts the body of a loop once, so
they are taken from the program without loops at one and two layers, and continued to the model's depth. The roofline
time of a graph is the longer of its FLOPs at the chip's bf16 peak and its bytes at its bandwidth.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
COMPILER_PACKAGES = ("jax[tpu]==0.10.2", "libtpu==0.0.42.1")
# name -> (bf16 FLOP/s, HBM bytes/s, HBM bytes that programs may use)
CHIPS = {"v6e": (918e12, 1.6e12, 31.25 * 2**30), "v5e": (197e12, 0.8e12, 15.75 * 2**30)}
QWEN3_600M = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}


@dataclasses.dataclass(frozen=True)
class Report:
    """What one case came to; bytes and seconds."""

    name: str
    fits: bool
    peak_bytes: float
    code_bytes: float
    compile_seconds: float
    flops: float
    formula_flops: float
    bytes_accessed: float
    roofline_seconds: float
    tokens_per_second: float
    programs: list[dict[str, Any]]
    error: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Compile the cases asked for, print a table, write JSON."""
    args = _arguments(argv)
    if importlib.util.find_spec("torch_xla") is None:
        return _in_xla_environment(sys.argv[1:] if argv is None else list(argv))
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
    reports = []
    for case in _cases(args):
        report = _largest(case, args) if args.largest_batch else compiled(case, args.topology, cost=not args.no_cost)
        reports.append(report)
        _print(report)
        if args.json:
            args.json.write_text(json.dumps([dataclasses.asdict(r) for r in reports], indent=1) + "\n")
    return 0 if all(r.fits for r in reports) else 1


def compiled(case: Any, topology: str, *, cost: bool = True) -> Report:
    """Trace a case, compile its graphs for a topology and add them up."""
    chip = CHIPS[topology.split(":")[0]]
    with tempfile.TemporaryDirectory() as folder:
        programs = _compile(case, topology, Path(folder) / "programs")
    if errors := [p["error"] for p in programs if "error" in p]:
        return Report(_name(case), False, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, programs, errors[0][:400])
    code = sum(p["code_bytes"] for p in programs)
    moments = [
        p["resident_bytes"] + p["argument_bytes"] + p["output_bytes"] - p["donated_bytes"] + p["temporary_bytes"]
        for p in programs
    ]
    peak = max(moments) + code
    flops, moved, seconds = _cost(case, topology, chip) if cost else (0.0, 0.0, 0.0)
    tokens = case.batch_size * case.seq_len * case.accumulation_steps
    return Report(
        name=_name(case),
        fits=peak <= chip[2],
        peak_bytes=peak,
        code_bytes=code,
        compile_seconds=sum(p["compile_seconds"] for p in programs),
        flops=flops,
        formula_flops=formula_flops(case),
        bytes_accessed=moved,
        roofline_seconds=seconds,
        tokens_per_second=tokens / seconds if seconds else 0.0,
        programs=programs,
    )


def formula_flops(case: Any) -> float:
    """FLOPs of the matrix products of one optimizer step, from the shapes alone.

    With N the weights of the block Linears, S tokens, and a multiply-add counted as 2: forward 2 N S; backward for the
    activations the same, and for the weights once more where they are trained; recomputation one more forward.
    Attention: 2 products of T^2 D per head forward, 5 backward, of which the chunks leave out what no query sees. The
    head: 2 V H S forward, and as much for the gradient.
    """
    from qat_lora.models.lean.attention import CHUNK_QUERIES

    c, training = case.config, case.stage in ("qat", "recovery")
    tokens = case.batch_size * case.seq_len
    head_width = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    key_heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
    queries, keys = c.num_attention_heads * head_width, key_heads * head_width
    attention_weights, mlp_weights = c.hidden_size * (2 * queries + 2 * keys), 3 * c.hidden_size * c.intermediate_size
    linear = 2.0 * tokens * (attention_weights + mlp_weights)
    chunks = -(-case.seq_len // CHUNK_QUERIES)
    product = 2.0 * tokens * case.seq_len * queries * (chunks + 1) / (2 * chunks)
    width_sums = 2 * (c.hidden_size + queries) + c.hidden_size + keys + 3 * (c.hidden_size + c.intermediate_size)
    adapters = 2.0 * tokens * case.recovery_r * width_sums if case.stage == "recovery" else 0.0
    forward = linear + 2 * product + adapters
    layers = forward
    if training:
        weights = linear if case.stage == "qat" else adapters
        recomputed = forward if _recomputes(case) else 0.0
        layers = forward + recomputed + linear + weights + adapters + 5 * product
    head = 2.0 * tokens * c.vocab_size * c.hidden_size * (2 if training else 1)
    return case.accumulation_steps * (c.num_hidden_layers * layers + head)


def _cost(case: Any, topology: str, chip: tuple[float, float, float]) -> tuple[float, float, float]:
    """FLOPs, bytes and roofline seconds of a step, from the unrolled program at one and two layers."""
    found = []
    for depth in (1, 2):
        config = type(case.config)(**(case.config.to_dict() | {"num_hidden_layers": depth, "layer_types": None}))
        checkpointing = "on" if _recomputes(case) else "off"
        execution = dataclasses.replace(case.execution, scan_layers=False, gradient_checkpointing=checkpointing)
        shallow = dataclasses.replace(case, config=config, execution=execution, unrolled=True)
        with tempfile.TemporaryDirectory() as folder:
            found.append(_compile(shallow, topology, Path(folder) / "programs"))
    flops = moved = seconds = 0.0
    for one, two in zip(*found, strict=True):
        depth = case.config.num_hidden_layers
        f, b = (one[k] + (depth - 1) * (two[k] - one[k]) for k in ("flops", "bytes_accessed"))
        flops, moved = flops + one["runs"] * f, moved + one["runs"] * b
        seconds += one["runs"] * max(f / chip[0], b / chip[1])
    return flops, moved, seconds


def _largest(case: Any, args: argparse.Namespace) -> Report:
    """The largest batch that fits, by doubling and then halving the gap."""
    fitting, failing, batch = None, None, case.batch_size
    while failing is None or failing - fitting.batch > max(1, fitting.batch // 8):  # type: ignore[union-attr]
        report = compiled(dataclasses.replace(case, batch_size=batch), args.topology, cost=False)
        print(
            f"batch {batch}: {'fits' if report.fits else 'does not fit'} {report.peak_bytes / 1e9:.2f} GB", flush=True
        )
        if report.fits:
            fitting = argparse.Namespace(batch=batch, report=report)
        else:
            failing = batch
        if fitting is None:
            return report
        batch = 2 * fitting.batch if failing is None else (fitting.batch + failing) // 2
    return fitting.report


def _compile(case: Any, topology: str, folder: Path) -> list[dict[str, Any]]:
    """Trace a case and compile its programs, in an order that they are run in."""
    from tpu_trace import trace

    return [
        {"phase": p.phase, "runs": p.runs, "resident_bytes": p.resident_bytes, "donated_bytes": p.donated_bytes}
        | _compiled(p.path, topology)
        for p in trace(case, folder)
    ]


def _compiled(program: Path, topology: str) -> dict[str, Any]:
    """What the compiler says of one program, in a process of its own: reading one in may take 18 GB for a moment."""
    script = Path(__file__).with_name("tpu_compiler.py")
    done = subprocess.run(
        [str(_compiler_python()), str(script), topology, str(program)], capture_output=True, text=True
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        died = "was killed, for want of the host's memory" if done.returncode == -9 else f"ended with {done.returncode}"
        raise RuntimeError(f"the compiler {died}: {done.stderr[-1500:]}")
    found: dict[str, Any] = lines[0]
    return found


def _recomputes(case: Any) -> bool:
    return case.stage in ("qat", "recovery") and (
        case.execution.scan_layers or case.execution.gradient_checkpointing == "on"
    )


def _cases(args: argparse.Namespace) -> list[Any]:
    from tpu_trace import Case
    from transformers import AutoConfig, Qwen3Config

    from qat_lora.config import ExecutionConfig, KDConfig

    config = Qwen3Config(**QWEN3_600M) if args.model == "qwen3-0.6b" else AutoConfig.from_pretrained(args.model)
    return [
        Case(
            config,
            stage,
            preset=preset,
            batch_size=args.batch_size,
            seq_len=args.seq_len,
            top_k=args.top_k,
            packing=args.packing,
            accumulation_steps=args.accumulation_steps,
            recovery_r=args.recovery_r,
            dtype=args.dtype,
            kd=KDConfig(chunk_tokens=args.chunk_tokens),
            execution=ExecutionConfig(sync=args.sync, gradient_checkpointing=checkpointing, scan_layers=scan == "on"),
        )
        for stage in args.stage
        for preset in args.preset
        for scan in args.scan_layers
        for checkpointing in args.gradient_checkpointing
        if not (scan == "on" and checkpointing == "off")
    ]


def _name(case: Any) -> str:
    layers = "scanned" if case.execution.scan_layers else "recomputed" if _recomputes(case) else "kept"
    shape = f"{case.batch_size} x {case.seq_len}"
    accumulated = f" x {case.accumulation_steps}" if case.accumulation_steps > 1 else ""
    packed = f" {case.packing}" if case.packing != "stream" else ""
    return f"{case.stage} {case.preset} {shape}{accumulated}{packed} --sync {case.execution.sync}, layers {layers}"


def _print(report: Report) -> None:
    if report.error:
        print(f"{report.name}: does not compile: {report.error}", flush=True)
        return
    print(
        f"{report.name}: {'fits' if report.fits else 'DOES NOT FIT'}, peak {report.peak_bytes / 1e9:.2f} GB "
        f"(code {report.code_bytes / 1e9:.2f}), compile {report.compile_seconds:.0f} s",
        flush=True,
    )
    if report.flops:
        print(
            f"  {report.flops / 1e12:.1f} TFLOP (formula {report.formula_flops / 1e12:.1f}), "
            f"{report.bytes_accessed / 1e9:.0f} GB accessed, roofline {report.roofline_seconds * 1e3:.0f} ms, "
            f"{report.tokens_per_second:,.0f} tokens/s",
            flush=True,
        )
    for p in report.programs:
        print(
            f"    {p['phase']:<15} x{p['runs']}  arguments {p['argument_bytes'] / 1e9:6.2f}  outputs "
            f"{p['output_bytes'] / 1e9:5.2f}  temporaries {p['temporary_bytes'] / 1e9:5.2f}  code "
            f"{p['code_bytes'] / 1e9:5.2f} GB  compile {p['compile_seconds']:5.1f} s",
            flush=True,
        )


def _compiler_python() -> Path:
    """The interpreter of the environment that holds libtpu, made where it is missing."""
    if named := os.environ.get("QAT_LORA_TPU_PYTHON"):
        return Path(named)
    folder = ROOT / ".venv-tpu"
    python = folder / "bin" / "python"
    if not (folder / ".ready").exists():
        print("setting up .venv-tpu with jax[tpu], about 1 GB ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *COMPILER_PACKAGES], check=True)
        (folder / ".ready").touch()
    return python


def _in_xla_environment(arguments: list[str]) -> int:
    subprocess.run(["make", "--quiet", "venv-xla"], cwd=ROOT, check=True)
    python = ROOT / ".venv-xla" / "bin" / "python"
    return subprocess.run([str(python), __file__, *arguments]).returncode


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    many: dict[str, Any] = {"nargs": "+"}
    parser.add_argument("--model", default="qwen3-0.6b", help="qwen3-0.6b, or a folder with a config.json")
    stages = ["qat", "recovery", "eval", "fidelity", "cache"]
    parser.add_argument("--stage", choices=stages, default=["recovery", "qat"], **many)
    parser.add_argument("--preset", default=["q4_g32"], **many)
    parser.add_argument("--gradient-checkpointing", choices=["on", "off"], default=["on"], **many)
    parser.add_argument("--scan-layers", choices=["on", "off"], default=["off"], **many)
    parser.add_argument("--sync", choices=["phase", "step", "optimizer"], default="phase")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--accumulation-steps", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--top-k", type=int, default=128)
    parser.add_argument("--packing", choices=["stream", "documents"], default="stream", help="of the cache's rows")
    parser.add_argument("--recovery-r", type=int, default=8)
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--topology", default="v6e:1x1", help="as libtpu names it: v6e:1x1, v5e:1x1, ...")
    parser.add_argument("--largest-batch", action="store_true", help="search the largest batch that fits")
    parser.add_argument("--no-cost", action="store_true", help="leave out FLOPs, bytes and roofline")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
