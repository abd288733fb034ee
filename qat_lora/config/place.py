"""Where a command runs, and how a training step runs there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qat_lora.settings import Settings, setting

Device = Literal["auto", "cpu", "cuda", "mps", "tpu"]
Dtype = Literal["auto", "fp32", "bf16"]
Sync = Literal["phase", "step", "optimizer"]
Checkpointing = Literal["auto", "on", "off"]
Shard = Literal["none", "fsdp", "spmd", "spmd_data"]
MemDebug = Literal["off", "basic", "tensors", "metrics", "hlo"]


@dataclass(frozen=True)
class PlaceConfig(Settings):
    """Where a command runs and in which precision."""

    device: Device = setting("auto", "auto takes the best device there and says which")
    allow_fallback: bool = setting(False, "continue on the CPU, with a warning, where the named device is absent")
    dtype: Dtype = setting("auto", "compute precision; auto: fp32 on CPU and MPS, bf16 on CUDA and TPU")
    threads: int = setting(0, "CPU threads; 0 leaves torch's own choice")
    barrier_timeout: int = setting(600, "seconds after which a rank gives up waiting for the others", at_least=1)


@dataclass(frozen=True)
class ExecutionConfig(Settings):
    """How a training step runs on its device. Nothing here changes what is computed, but `tpu_autoscale`."""

    sync: Sync = setting(
        "phase",
        "where XLA's lazy graph is cut: after every phase of a step, once per micro-batch, or once per optimizer step",
    )
    gradient_checkpointing: Checkpointing = setting(
        "auto", "recompute each layer in backward instead of keeping its activations; auto: where they would not fit"
    )
    shard: Shard = setting(
        "none",
        "spread one model over the devices: fsdp over torchrun's ranks, spmd over all TPU chips in one process; "
        "spmd_data: one process for all chips, but a model on each; none: a model for each process",
    )
    scan_layers: bool = setting(False, "XLA: trace and compile one decoder layer and loop over it")
    max_recompiles: int = setting(
        -1, "XLA: stop when more graphs than this are compiled after the first step; -1 only warns", at_least=-1
    )
    mem_debug: MemDebug = setting("off", "write memory.jsonl into the run's folder, in that much detail")
    tpu_autoscale: bool = setting(False, "XLA: double --batch-size and raise --lr by 1.2")
