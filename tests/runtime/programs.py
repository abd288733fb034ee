"""Programs that the XLA tests run in processes of their own: torch_xla takes its device once, from the environment.

They are forks (see `tests.runtime.forked`); python -m tests.runtime.programs MODULE:NAME ARGUMENTS... prints JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from qat_lora.cache import load_manifest
from qat_lora.config import ExecutionConfig, KDConfig, OptimConfig, PlaceConfig, RecoveryRun
from qat_lora.runtime import Runtime, runtime_for
from qat_lora.train.run import run_qat, run_recovery
from tests.conftest import cache_run, qat_run, recovery_run
from tests.runtime.forked import forked

ROOT = Path(__file__).parents[2]
LOOP = {"max_steps": 30, "accumulation_steps": 2, "eval_every": 10, "save_every": 10, "log_every": 1}
# Numbers that XLA might merge: 1 - 0.999 is the learning rate and the decay, and a hard weight that begins at 1.
OPTIM = OptimConfig(lr=1e-3, warmup_steps=5, clip_norm=0.5, weight_decay=1e-3, ema_decay=0.999)
KD = KDConfig(hard_weight=1.0, hard_anneal="linear", ce_alpha=0.1)


# What a test computes is small; nearly all of its time would go into making its programs fast.
XLA_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def run_program(name: str, *arguments: object, module: str = __name__, **environment: str) -> Any:
    """Run a program of a module in a fork that has its own device on PJRT's CPU, and return what it returned."""
    settings = {"PJRT_DEVICE": "CPU", "XLA_FLAGS": XLA_FLAGS} | environment
    done = forked(f"{module}:{name}", *map(str, arguments), timeout=600.0, **settings)
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stdout[-500:]}{done.stderr[-6000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def run_apart(name: str, *arguments: object, module: str = __name__, cwd: Path = ROOT, **environment: str) -> Any:
    """The same in a new process: for another folder, for variables that are read at import, for ranks as threads."""
    settings = os.environ | {"PJRT_DEVICE": "CPU", "PYTHONPATH": str(ROOT), "XLA_FLAGS": XLA_FLAGS} | environment
    command = [sys.executable, "-m", "tests.runtime.programs", f"{module}:{name}", *map(str, arguments)]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, cwd=cwd, timeout=600)
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stdout[-500:]}{done.stderr[-6000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def recovery(cache: Path, output: Path, student: Path, sync: str = "phase", **loop) -> RecoveryRun:
    return recovery_run(
        cache,
        output,
        student,
        loop=LOOP | loop,
        optim=OPTIM,
        kd=KD,
        execution=ExecutionConfig(sync=sync, max_recompiles=0),
    )


def outcome(result, runtime: Runtime) -> dict:
    state = result.state
    return {
        "losses": [row["loss"] for row in result.losses.rows if row["loss"] == row["loss"]],
        "kl": [row["eval_kl"] for row in result.losses.rows if row["eval_kl"] == row["eval_kl"]],
        "adapter": {name: p.detach().cpu().flatten().tolist() for name, p in state.trained.items()},
        "summary": json.loads((result.best.parent / "summary.json").read_text()),
        "graphs": [[g.phase, g.hash] for g in runtime.compilations()],
    }


def host_reads(runtime: Runtime) -> list[float]:
    """Is filled, from now on, with how often each training step reads from the device, deferred logging left out."""
    from qat_lora.runtime.xla import device
    from qat_lora.train import loop

    found: list[float] = []
    logged = [0.0]
    step, call = loop.train_step, device.XlaRuntime._make_calls

    def reads() -> float:
        metrics = runtime.metrics()
        return metrics.get("aten::_local_scalar_dense", 0) + metrics.get("TransferFromDeviceTime.count", 0)

    def counted_call(runtime: Runtime) -> None:
        before = reads()
        call(runtime)
        logged[0] += reads() - before

    def counted_step(*given: Any) -> Any:
        before, logged[0] = reads(), 0.0
        info = step(*given)
        found.append(reads() - before - logged[0])
        return info

    loop.train_step, device.XlaRuntime._make_calls = counted_step, counted_call
    return found


def train(cache: str, folder: str, student: str, sync: str) -> dict:
    """A whole recovery run on torch_xla's device."""
    runtime = runtime_for(PlaceConfig(device="tpu", dtype="fp32"), sync=sync)
    reads = host_reads(runtime)
    return {"host_reads": reads} | outcome(
        run_recovery(recovery(Path(cache), Path(folder), Path(student), sync), runtime), runtime
    )


def resume(cache: str, folder: str, student: str) -> dict:
    """The run of `train`, cut off after 20 steps by an interruption and gone on with."""
    runtime = runtime_for(PlaceConfig(device="tpu", dtype="fp32"))
    run = recovery(Path(cache), Path(folder), Path(student))
    return outcome(run_recovery(run, runtime, launch="resume"), runtime)


def interrupt(cache: str, folder: str, student: str) -> dict:
    """The first 20 steps of `train`, then an interruption."""

    class Stop(Exception):
        pass

    class StopAt20:
        every = 20

        def start(self, state): ...

        def after_step(self, state, info):
            raise Stop

        def end(self, state): ...

    runtime = runtime_for(PlaceConfig(device="tpu", dtype="fp32"))
    try:
        run_recovery(recovery(Path(cache), Path(folder), Path(student)), runtime, hooks=[StopAt20()])
    except Stop:
        return {"steps": 20}
    raise AssertionError("it was not interrupted")


def both_stages(cache: str, folder: str) -> dict:
    """QAT and recovery of a few steps, in bf16, with every way to run the layers; the held-out KLs."""
    runtime = runtime_for(PlaceConfig(device="tpu", dtype="bf16"))
    found = {}
    for name, execution in {
        "kept": ExecutionConfig(gradient_checkpointing="off"),
        "recomputed": ExecutionConfig(gradient_checkpointing="on"),
        "scanned": ExecutionConfig(scan_layers=True),
    }.items():
        execution = replace(execution, max_recompiles=0)
        # at twice this rate the few steps end 3% apart: bf16 rounds recomputed sums otherwise, and codes flip
        optim = OptimConfig(lr=1e-3, warmup_steps=2)
        qat = run_qat(qat_run(Path(cache), Path(folder) / name / "qat", execution=execution, optim=optim), runtime)
        recovered = run_recovery(
            recovery_run(Path(cache), Path(folder) / name / "rec", qat.best, execution=execution), runtime
        )
        found[name] = [qat.state.first_kl, qat.state.last_kl, recovered.state.last_kl]
        model = recovered.state.model.get_base_model()
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert str(model.lm_head.weight.dtype) == "torch.bfloat16"
        assert {str(p.dtype) for p in recovered.state.trained.values()} == {"torch.float32"}
        assert {str(p.dtype) for p in qat.state.trained.values()} == {"torch.float32"}
    return found


def build(teacher: str, text: str, folder: str) -> dict:
    """A cache built on torch_xla's device, and the phases whose graphs were compiled."""
    from qat_lora.cli import commands

    made: list[Runtime] = []
    commands.runtime_for = lambda *place, **words: made.append(runtime_for(*place, **words)) or made[-1]
    place = PlaceConfig(device="tpu", dtype="fp32")
    run = cache_run(Path(teacher), Path(text), Path(folder), top_k=16, logprob_bits=32, place=place)
    commands.cache(run)
    return {"graphs": [graph.phase for graph in made[0].compilations()], "device": str(made[0].device)}


def padded(cache: str, student: str, folder: str) -> dict:
    """QAT of a few steps, and an evaluation, of a student with fewer ids than the teacher of the cache."""
    import torch

    from qat_lora import models
    from qat_lora.evaluate import measure, whole_windows

    runtime = runtime_for(PlaceConfig(device="tpu", dtype="fp32"))
    trained = run_qat(qat_run(Path(cache), Path(folder), model=student), runtime).state
    smaller, teacher = (
        models.place(models.load(name).model, runtime) for name in (student, load_manifest(cache).teacher)
    )
    windows = whole_windows(torch.arange(96).reshape(4, 24), torch.full((4,), 24))
    scores, _ = measure(smaller, teacher, windows, batch_size=2, runtime=runtime)
    return {"kl": [trained.first_kl, trained.last_kl], "scores": [scores.kl, scores.top1, scores.perplexity]}


def training_hlo(folder: str) -> dict:
    """Shapes in the HLO of one whole training step, one graph, of a model with a vocabulary of 32,003 tokens."""
    import math
    import re

    import torch
    import torch_xla
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from qat_lora import adapters, models
    from qat_lora.config import AdapterConfig
    from qat_lora.config.presets import scheme
    from qat_lora.kd import TargetSpec
    from qat_lora.quant import freeze_codes, quantize_model
    from qat_lora.train.loop import TrainState, train_step
    from qat_lora.train.objective import KDObjective
    from qat_lora.train.optim import build_optimizer

    rows, length, vocab, top_k = 2, 64, 32003, 8
    runtime = runtime_for(PlaceConfig(device="tpu", dtype="fp32"), sync="optimizer")
    config = Qwen3Config(
        vocab_size=vocab, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, intermediate_size=48, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval().requires_grad_(False)
    targets = models.target_linears(model)
    quantize_model(model, scheme("q4_g32"), targets)
    freeze_codes(model)
    model = models.place(adapters.attach(model, targets, AdapterConfig(), base_name="blank"), runtime)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    state = TrainState(model, trained, build_optimizer(trained.values(), [], OPTIM))
    spec = TargetSpec("topk", vocab, top_k=top_k)
    objective = KDObjective(KDConfig(chunk_tokens=16, ce_alpha=0.1, hard_weight=0.1), spec, runtime, total_steps=9)
    logprobs = torch.log_softmax(torch.randn(rows, length, top_k + 1), -1)[..., :top_k]
    batch = {
        "input_ids": torch.randint(vocab, (rows, length)),
        "length": torch.full((rows,), length),
        "topk_ids": torch.randint(vocab, (rows, length, top_k)),
        "topk_logprobs": logprobs,
        "tail": 1 - logprobs.exp().sum(-1, keepdim=True),
    }
    runtime.zero_grad(state.optimizer)
    runtime.mark_step("set-up")
    batch = runtime.to_device(batch)
    model.train()
    texts = []

    def capture(phase: str) -> None:
        if phase == "optimizer":
            outputs = [*trained.values(), *(x for s in state.optimizer.state.values() for x in s.values())]
            texts.append(torch_xla._XLAC._get_xla_tensors_hlo(outputs))

    runtime.mark_step = capture
    train_step(state, [batch], objective, OPTIM, runtime)
    (text,) = texts
    shapes = sorted(set(re.findall(r"(?:f32|bf16|f16|pred|s64|s32)\[[\d,]+\]", text)))
    large = [s for s in shapes if math.prod(map(int, s.split("[")[1][:-1].split(","))) >= rows * length * vocab // 2]
    return {"large": large, "chunk": f"f32[16,{vocab}]" in shapes, "whiles": text.count(" while(")}


if __name__ == "__main__":
    module, name = sys.argv[1].split(":")
    print(json.dumps(getattr(importlib.import_module(module), name)(*sys.argv[2:])), flush=True)
    os._exit(0)  # threads of ranks may hang
