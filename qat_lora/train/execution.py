"""How a run's steps are executed: layers recomputed or looped over, and what `--tpu-autoscale` changes."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable
from typing import TypeVar

from torch import Tensor, nn

from qat_lora import models
from qat_lora.config import ExecutionConfig, OptimConfig, QatRun, RecoveryRun, Sync
from qat_lora.errors import ConfigError, ModelError
from qat_lora.runtime import Runtime

log = logging.getLogger(__name__)

Run = TypeVar("Run", QatRun, RecoveryRun)

# Seconds that libtpu takes at most to compile a step's graphs on two idle cores: docs/TPU.md.
_SECONDS_PER_LAYER = 8
_SECONDS_SCANNED = 130
# Forward and backward in one program: the compiler decides what is kept, and lets more of it pile up.
_ONE_PROGRAM_KEEPS = 3


def autoscaled(run: Run, runtime: Runtime) -> Run:
    """Return the run with twice the batch and 1.2 times the learning rate, where that is asked for and means anything.

    A TPU's matrix unit is idle at the batch sizes that suit a GPU of the same memory.
    """
    if not run.execution.tpu_autoscale:
        return run
    if not runtime.static_graph:
        log.warning("--tpu-autoscale does nothing on %s", runtime.device)
        return run
    loop = dataclasses.replace(run.loop, batch_size=2 * run.loop.batch_size)
    factor = 1.0 if run.loop.global_batch_size else 1.2  # where the rows of a step stay, so does the rate
    optim = dataclasses.replace(run.optim, lr=factor * run.optim.lr)
    log.info(
        "--tpu-autoscale: batch_size %d -> %d, lr %g -> %g",
        run.loop.batch_size, loop.batch_size, run.optim.lr, optim.lr,
    )  # fmt: skip
    done = dataclasses.replace(run.execution, tpu_autoscale=False)  # what is saved is what was run
    return dataclasses.replace(run, loop=loop, optim=optim, execution=done)


def with_global_batch(run: Run, runtime: Runtime) -> Run:
    """Return the run with the accumulation that makes up its global batch on so many devices, where it names one."""
    loop, devices = run.loop, runtime.world_size * runtime.devices
    if not loop.global_batch_size:
        return run
    steps, rest = divmod(loop.global_batch_size, loop.batch_size * devices)
    if rest or not steps:
        raise ConfigError(
            f"global_batch_size={loop.global_batch_size} is no multiple of batch_size={loop.batch_size} on {devices} "
            f"device(s); use {max(1, steps) * loop.batch_size * devices}, or another --batch-size."
        )
    if loop.accumulation_steps not in (1, steps):
        raise ConfigError(
            f"global_batch_size={loop.global_batch_size} makes accumulation_steps={steps} of batch_size="
            f"{loop.batch_size} on {devices} device(s), but accumulation_steps={loop.accumulation_steps}; drop one of "
            "them."
        )
    return dataclasses.replace(run, loop=dataclasses.replace(loop, accumulation_steps=steps))


def state_bytes(trained: Iterable[Tensor], optim: OptimConfig) -> int:
    """Bytes that training takes on this rank beside the weights: gradient, two moments, moving average, in float32."""
    parts = (x.to_local() if hasattr(x, "to_local") else x for x in trained)
    return sum(x.numel() for x in parts) * 4 * (4 if optim.ema_decay else 3)


def lower_layers(
    model: nn.Module, execution: ExecutionConfig, runtime: Runtime, *, tokens: int, to_come_bytes: int = 0
) -> None:
    """Set how a model's layers run in training, in place, once it is quantised, adapted and placed.

    ``auto`` decides by `tokens`, those of one micro-batch on one device, and by `to_come_bytes`, which the device will
    hold beside the weights and the activations but does not yet hold.
    """
    config = models.causal_lm(model).config.get_text_config()
    depth, dropout = config.num_hidden_layers, getattr(config, "attention_dropout", None)
    if runtime.static_graph and dropout:
        raise ModelError(
            f"the model drops out attention with p={dropout}, which is not known on XLA; set attention_dropout to 0 in "
            "its config.json."
        )
    if execution.scan_layers:
        if not runtime.static_graph:
            raise ConfigError(
                f"scan_layers=True needs torch_xla, but the device is {runtime.device}; drop --scan-layers."
            )
        if execution.gradient_checkpointing == "off":
            raise ConfigError(
                "scan_layers=True recomputes each layer in backward, but gradient_checkpointing=off; drop one of them."
            )
        models.scan_decoder(model, runtime.scan)
    elif execution.gradient_checkpointing == "on" or (
        execution.gradient_checkpointing == "auto"
        and not _keeps_activations(model, runtime, tokens, execution.sync, to_come_bytes)
    ):
        models.checkpoint_layers(model, runtime.checkpoint)
    if runtime.static_graph:
        seconds = _SECONDS_SCANNED if execution.scan_layers else _SECONDS_PER_LAYER * depth
        log.info("%d layers: expect up to %d s of compiling on two idle host cores, less on more", depth, seconds)


def _keeps_activations(model: nn.Module, runtime: Runtime, tokens: int, sync: Sync, to_come_bytes: int) -> bool:
    """Whether what backward would keep takes less than half of what will be free on the device, on every rank.

    On every rank the same: they must not trace different graphs.
    """
    free_bytes = runtime.memory().free_bytes
    needed = models.activation_bytes(model, tokens, runtime.precision.compute, lean=_is_lean(model))
    if runtime.static_graph and sync != "phase":
        needed *= _ONE_PROGRAM_KEEPS
    left_bytes = None if free_bytes is None else max(0, free_bytes - to_come_bytes)
    fits = left_bytes is None or needed < left_bytes / 2
    all_agree = runtime.all_equal(lambda: bytes([fits]))
    can_recompute = models.has_checkpointing(model)
    keeps = not can_recompute or (fits and all_agree)
    if not fits and not can_recompute:
        log.warning("the model cannot recompute its layers (it has no gradient checkpointing): less --batch-size helps")
    if not all_agree:
        log.info("activations do not fit on every rank: recomputed in backward on all of them")
    elif left_bytes is not None:
        words = "kept" if keeps else "recomputed in backward (--gradient-checkpointing off keeps them)"
        log.info("activations of about %.2f GiB, %.2f GiB free: %s", needed / 2**30, left_bytes / 2**30, words)
    return keeps


def _is_lean(model: nn.Module) -> bool:
    """Whether the model's norms and MLPs were all replaced by lean ones."""
    kinds = ("RMSNorm", "MLP")
    found = [m for m in model.modules() if type(m).__name__.endswith(kinds)]
    return bool(found) and all("forward" in vars(m) for m in found)
