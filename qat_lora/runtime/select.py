"""Choose the runtime once, by the name that the user gave."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch

from qat_lora.config import PlaceConfig, Shard, Sync
from qat_lora.errors import ConfigError, DeviceError
from qat_lora.runtime.base import Runtime
from qat_lora.runtime.device import detect_device_type
from qat_lora.runtime.local import LocalRuntime

log = logging.getLogger(__name__)


def runtime_for(
    place: PlaceConfig,
    *,
    sync: Sync = "phase",
    shard: Shard = "none",
    folder: Path | None = None,
    many: bool = False,
) -> Runtime:
    """Return the runtime for ``--device``; raises DeviceError, or falls back to the CPU where that is allowed.

    `sync` is where XLA cuts its graph; `shard` whether one model is spread over devices; `folder` is where a TPU may
    keep its compiled programs, in ``xla_cache``; `many` says that the command knows how to share its work with ranks.
    """
    processes = os.environ.get("WORLD_SIZE", "1")
    if processes != "1" and not many:
        raise DeviceError(f"WORLD_SIZE={processes}, but this command runs on one device; run it without torchrun.")
    asked_for_tpu = os.environ.get("PJRT_DEVICE", "").upper() == "TPU"  # even where torch_xla is missing
    kind = ("tpu" if asked_for_tpu else detect_device_type()) if place.device == "auto" else place.device
    missing = _why_absent(kind)
    if missing and not place.allow_fallback:
        raise DeviceError(f"--device {kind} is not here: {missing}, or use --device auto.")
    if missing:
        log.warning("--device %s is not here (%s); continuing on the CPU", kind, missing)
        kind = "cpu"
    if processes != "1" and kind == "mps":
        raise DeviceError(f"WORLD_SIZE={processes} needs --device cpu, cuda or tpu, not {kind}; run without torchrun.")
    _check_shard(shard, kind, processes)
    runtime = _start(kind, place, sync, shard, folder, several=processes != "1")
    log.info("device %s, compute in %s: %s", runtime.device, runtime.precision.compute, runtime.precision.reason)
    return runtime


def _start(kind: str, place: PlaceConfig, sync: Sync, shard: Shard, folder: Path | None, *, several: bool) -> Runtime:
    how: dict[str, Any] = {"dtype": place.dtype}
    if several:
        how["barrier_timeout"] = place.barrier_timeout
    if kind == "tpu":
        how |= {"sync": sync, "cache_dir": folder / "xla_cache" if folder else None}
        if several:
            from qat_lora.runtime.xla.chips import ChipsRuntime

            return ChipsRuntime(**how)
        if shard != "none":
            from qat_lora.runtime.xla.spmd import SpmdRuntime

            return SpmdRuntime(**how, spreads_model=shard == "spmd")
        from qat_lora.runtime.xla.device import XlaRuntime

        return XlaRuntime(**how)
    how["threads"] = place.threads
    if several and shard == "fsdp":
        from qat_lora.runtime.fsdp import FsdpRuntime

        return FsdpRuntime(kind, **how)
    if several:
        from qat_lora.runtime.distributed import DistributedRuntime

        return DistributedRuntime(kind, **how)
    return LocalRuntime(kind, **how)


def _check_shard(shard: Shard, kind: str, processes: str) -> None:
    """Raise ConfigError where a way to spread a model does not go with the device or with how ranks were started."""
    if shard == "fsdp" and (kind not in ("cpu", "cuda") or processes == "1"):
        raise ConfigError(
            f"shard=fsdp spreads a model over ranks on --device cpu or cuda, but WORLD_SIZE={processes} on {kind}; "
            "start with torchrun, or use --shard spmd on TPU."
        )
    if shard.startswith("spmd") and (kind != "tpu" or processes != "1"):
        raise ConfigError(
            f"shard={shard} runs one process for all TPU chips, but WORLD_SIZE={processes} on {kind}; use "
            "--device tpu without --num-chips, or --shard fsdp under torchrun."
        )


def _why_absent(kind: str) -> str:
    """Say what is missing for a device type and how to get it; empty where it is there."""
    if kind == "cuda" and not torch.cuda.is_available():
        return "torch sees no CUDA device; install a CUDA build of torch and a driver"
    if kind == "mps" and not torch.backends.mps.is_available():
        return "torch sees no Apple GPU; run on an Apple-silicon Mac"
    if kind == "tpu":
        from qat_lora.runtime.xla.device import why_absent

        return why_absent()
    return ""
