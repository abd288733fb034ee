"""Trace the real training, evaluation and cache-building steps for XLA without running or even storing anything.

Every tensor is a placeholder, so a model of any size takes seconds and no memory. `CaptureRuntime` is the XLA runtime
of the package but for two things: a model is placed as placeholders, and where the graph is cut, it is written to a
file as an HloModuleProto, and what it would have computed becomes placeholders too. Needs torch_xla; PJRT_DEVICE=CPU
will do.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch_xla
from torch import Tensor, nn
from torch_xla.core.xla_builder import create_placeholder_tensor

from qat_lora import adapters, models
from qat_lora.cache import CacheManifest
from qat_lora.config import AdapterConfig, ExecutionConfig, KDConfig, OptimConfig, Packing
from qat_lora.config.presets import scheme
from qat_lora.evaluate import Windows, cached_kl, measure
from qat_lora.kd.reduce import reduced
from qat_lora.models.lean.loops import in_turn
from qat_lora.quant import freeze_codes, quantize_model
from qat_lora.runtime.precision import lower_frozen, precision_for
from qat_lora.runtime.xla.device import XlaRuntime
from qat_lora.runtime.xla.graphs import cuts
from qat_lora.train.execution import lower_layers
from qat_lora.train.loop import TrainState, train_step
from qat_lora.train.objective import KDObjective
from qat_lora.train.optim import build_optimizer
from qat_lora.train.student import trained_parameters

_XLAC = torch_xla._XLAC


@dataclass(frozen=True)
class Case:
    """What is traced: `stage` is qat, recovery, eval, fidelity or cache; shapes are one micro-batch's.

    `unrolled` traces loops turn by turn, for a cost analysis that counts the body of a loop once.
    """

    config: Any
    stage: str
    preset: str = "q4_g32"
    batch_size: int = 4
    seq_len: int = 1024
    top_k: int = 128
    packing: Packing = "stream"
    accumulation_steps: int = 1
    recovery_r: int = 8
    dtype: str = "bf16"
    kd: KDConfig = KDConfig()
    unrolled: bool = False
    execution: ExecutionConfig = ExecutionConfig()


@dataclass(frozen=True)
class Program:
    """One graph of a step.

    Attributes:
        phase: where it was cut. path: its HloModuleProto. runs: how often it runs in one optimizer step.
        resident_bytes: of everything alive on the device that it does not take in.
        donated_bytes: of outputs that take the place of an input, as torch_xla lets what is changed in place do.
    """

    phase: str
    path: Path
    resident_bytes: int
    donated_bytes: int
    runs: int = 1


class CaptureRuntime(XlaRuntime):
    """The XLA runtime, writing graphs down instead of running them."""

    def __init__(self, folder: Path, *, dtype: str, sync: Any, unrolled: bool) -> None:
        """Write programs into a folder; compute in `dtype` (bf16 or fp32), as on a TPU."""
        super().__init__(dtype=dtype, sync=sync)
        self.precision = precision_for("tpu", dtype)
        self.programs: dict[str, Program] = {}
        self._folder = folder
        self._before: dict[int, weakref.ref[Tensor]] = {}  # what was alive at the last cut
        if unrolled:
            self.loop = in_turn  # type: ignore[method-assign]
        self._saved: list[weakref.ref[Tensor]] = []
        self._kept: list[tuple[weakref.ref[Tensor], int]] = []  # of these what the last cut left, with bytes

    def place(self, model: nn.Module) -> nn.Module:
        """Make placeholders of a model on the meta device, ties kept."""
        lower_frozen(model, self.precision.frozen)
        placeholders: dict[int, Any] = {}
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                for name, x in tensors.items():
                    if x is not None:
                        placeholders.setdefault(id(x), (_like(x), x))  # x is held, or its id would be used again
                        tensors[name] = placeholders[id(x)][0]
        return model

    def mark_step(self, phase: Any) -> None:
        """Write down what is pending and forget how it would be computed."""
        if not cuts(self.sync, phase):
            return
        live = {_XLAC._xla_get_tensor_id(x): x for x in self._live()}
        tensors = list(live.values())
        needed = _XLAC._check_tensor_need_materialization(tensors) if tensors else []
        pending = [x for x, needs in zip(tensors, needed, strict=True) if needs]
        if pending and phase != "set-up":
            donated = sum(_bytes(x) for x in pending if self._was_alive(x))
            resident = sum(_bytes(x) for x, needs in zip(tensors, needed, strict=True) if not needs)
            self._write(phase, pending, resident, donated)
        self._before = {id(x): weakref.ref(x) for x in tensors}
        for x in pending:
            _XLAC._replace_xla_tensor(x, create_placeholder_tensor(x.shape, x.dtype))
        kept = {_XLAC._xla_get_tensor_id(x): x for x in (reference() for reference in self._saved) if x is not None}
        self._saved = [weakref.ref(x) for x in kept.values()]
        self._kept = [(weakref.ref(x), _bytes(x)) for x in kept.values()]

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Let autograd show the tensors that it keeps for backward; a real cut of the graph finds them by itself."""
        with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda x: x):
            yield

    def _keep(self, x: Tensor) -> Tensor:
        if x.device.type == "xla":
            self._saved.append(weakref.ref(x))  # autograd holds what it packs, as long as it needs it
        return x

    def _live(self) -> Iterable[Tensor]:
        gc.collect()
        found = [x for x in gc.get_objects() if isinstance(x, Tensor) and x.device.type == "xla"]
        saved = [x for x in (reference() for reference in self._saved) if x is not None]
        return [*found, *saved, *(x.grad for x in found if x.is_leaf and x.grad is not None)]

    def _was_alive(self, x: Tensor) -> bool:
        """Whether a tensor was there at the last cut, so that what is pending is a change in place."""
        reference = self._before.get(id(x))
        return reference is not None and reference() is x

    def _write(self, phase: str, pending: list[Tensor], resident_bytes: int, donated_bytes: int) -> None:
        graph_hash = _XLAC._get_graph_hash(pending).hex()
        if graph_hash in self.programs:
            seen = self.programs[graph_hash]
            self.programs[graph_hash] = replace(seen, runs=seen.runs + 1)
            return
        path = self._folder / f"{len(self.programs):02d}_{phase.replace(' ', '_')}.hlo.pb"
        path.write_bytes(_XLAC._get_xla_tensors_hlo_proto(pending))
        _, inputs = _XLAC._get_tensors_xla_device_data_node(pending)
        consumed = sum(size for reference, size in self._kept if reference() is None)  # by the backward just traced
        others = max(0, resident_bytes + donated_bytes + consumed - sum(map(_bytes, inputs)))
        self.programs[graph_hash] = Program(phase, path, others, donated_bytes)


def trace(case: Case, folder: Path) -> list[Program]:
    """Trace one optimizer step, or one batch of an evaluation or a cache build, and return its programs in order."""
    folder.mkdir(parents=True, exist_ok=True)
    runtime = CaptureRuntime(folder, dtype=case.dtype, sync=case.execution.sync, unrolled=case.unrolled)
    _TRACERS[case.stage](case, runtime)
    return list(runtime.programs.values())


def _blank_model(config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    model.tie_weights()
    return model.eval().requires_grad_(False)


def _student(case: Case) -> nn.Module:
    model = _blank_model(case.config)
    targets = models.target_linears(model)
    quantize_model(model, scheme(case.preset), targets, search=False)
    if case.stage == "qat":
        trained_parameters(model, ("weights", "scales", "luts"))
        return model
    freeze_codes(model)
    return adapters.attach(model, targets, AdapterConfig(recovery_r=case.recovery_r), base_name="blank")


def _train(case: Case, runtime: CaptureRuntime) -> None:
    model = _student(case)
    models.place(model, runtime)
    lower_layers(model, case.execution, runtime, tokens=case.batch_size * case.seq_len)
    if case.stage == "qat":
        weights, scales = trained_parameters(model, ("weights", "scales", "luts"))
    else:
        weights, scales = {name: p for name, p in model.named_parameters() if p.requires_grad}, {}
    optim = OptimConfig()
    state = TrainState(model, weights | scales, build_optimizer(weights.values(), scales.values(), optim))
    objective = KDObjective(case.kd, _manifest(case).target_spec, runtime, total_steps=100)
    batches = [_batch(case) for _ in range(case.accumulation_steps)]
    model.train()
    runtime.zero_grad(state.optimizer)
    runtime.mark_step("set-up")
    with runtime.tracing():
        train_step(state, batches, objective, optim, runtime)


def _eval(case: Case, runtime: CaptureRuntime) -> None:
    model = _student(case)
    models.place(model, runtime)
    runtime.mark_step("set-up")
    batches = [_batch(case), _batch(case)]
    runtime.wrap_loader = iter  # type: ignore[assignment,method-assign]  # placeholders need no loader
    with _unread():
        cached_kl(model, batches, _manifest(case).target_spec, runtime=runtime, chunk_tokens=case.kd.chunk_tokens)


def _fidelity(case: Case, runtime: CaptureRuntime) -> None:
    student = _student(case)
    teacher = _blank_model(case.config)
    for model in (student, teacher):
        models.place(model, runtime)
    runtime.to_device = lambda batch: {k: create_placeholder_tensor(x.shape, x.dtype) for k, x in batch.items()}  # type: ignore[method-assign]
    ids = torch.zeros(case.batch_size, case.seq_len, dtype=torch.long)
    with _unread():
        measure(student, teacher, Windows(ids, ids == 0), batch_size=case.batch_size, runtime=runtime)


def _cache(case: Case, runtime: CaptureRuntime) -> None:
    model = models.place(_blank_model(case.config), runtime)
    head = models.head_parts(model, runtime.precision.compute)
    batch = _batch(case)
    ids_BT, positions_BT = batch["input_ids"], batch.get("position_ids")
    with torch.no_grad():
        hidden_SH, _ = models.hidden_and_head(model, ids_BT, runtime, position_ids_BT=positions_BT)
        hidden_BTH = hidden_SH.unflatten(0, ids_BT.shape)
        kept = reduced(hidden_BTH, head, _manifest(case).target_spec, case.kd.chunk_tokens)
    del hidden_SH, hidden_BTH
    runtime.mark_step("cache")
    del kept


_TRACERS: dict[str, Callable[[Case, CaptureRuntime], None]] = {
    "qat": _train,
    "recovery": _train,
    "eval": _eval,
    "fidelity": _fidelity,
    "cache": _cache,
}


def _manifest(case: Case) -> CacheManifest:
    return CacheManifest(
        teacher="blank",
        teacher_digest="",
        tokenizer_digest="",
        vocab_size=case.config.vocab_size,
        seq_len=case.seq_len,
        top_k=case.top_k,
        rows=case.batch_size,
        source="blank",
        source_digest="",
        temperatures=(case.kd.temperature,),
        logprob_bits=16,
        rows_per_shard=case.batch_size,
        packing=case.packing,
    )


def _batch(case: Case) -> dict[str, Tensor]:
    rows = (case.batch_size, case.seq_len)
    shapes = {
        "input_ids": (rows, torch.int64),
        "length": (rows[:1], torch.int64),
        "topk_ids": ((*rows, case.top_k), torch.int64),
        "topk_logprobs": ((*rows, case.top_k), torch.float32),
        "tail": ((*rows, 1), torch.float32),
    }
    if case.packing == "documents":
        shapes["position_ids"] = (rows, torch.int64)
    return {name: create_placeholder_tensor(shape, dtype) for name, (shape, dtype) in shapes.items()}


@contextmanager
def _unread() -> Iterator[None]:
    """Let a placeholder that is read be 0."""
    item, cpu = Tensor.item, Tensor.cpu
    Tensor.item = lambda self: 0.0  # type: ignore[assignment,method-assign]
    Tensor.cpu = lambda self: torch.zeros(self.shape, dtype=self.dtype)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        Tensor.item, Tensor.cpu = item, cpu  # type: ignore[method-assign]


def _like(x: Tensor) -> Tensor:
    blank = create_placeholder_tensor(x.shape, x.dtype)
    return nn.Parameter(blank, requires_grad=x.requires_grad) if isinstance(x, nn.Parameter) else blank


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
