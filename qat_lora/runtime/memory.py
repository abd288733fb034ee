"""Bytes in use: of a device where it counts them, else of the process."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class MemoryUse:
    """Bytes in use now and at the highest, on the device where it counts, else of the process.

    `free_bytes` are what is left to take, which on a host depends on other processes too; None where it is not known.
    """

    used_bytes: int
    peak_bytes: int
    total_bytes: int
    free_bytes: int | None = None


def device_memory(kind: str, device: torch.device | None = None) -> MemoryUse | None:
    """What a GPU (the current one, unless it is given) or a TPU counts; None where a kind of device counts nothing."""
    if kind == "cuda" and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info(device)
        return MemoryUse(total - free, torch.cuda.max_memory_allocated(device), total, free)
    return _xla_memory() if kind in ("xla", "tpu") else None


def process_memory() -> MemoryUse:
    """Resident bytes of this process and its peak, the machine's total and what is available of it.

    macOS tells only the peak, which then stands for both; Windows tells nothing. What is not known is 0 or None.
    """
    status = Path("/proc/self/status")
    if status.exists():  # getrusage's peak is inherited from the parent process there
        total, free = (_kib_field(Path("/proc/meminfo"), name) for name in ("MemTotal", "MemAvailable"))
        return MemoryUse(_kib_field(status, "VmRSS"), _kib_field(status, "VmHWM"), total, free)
    try:
        import resource
    except ImportError:  # Windows
        return MemoryUse(0, 0, 0)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on macOS
    return MemoryUse(peak, peak, 0)


def _xla_memory() -> MemoryUse | None:
    torch_xla, xm = sys.modules.get("torch_xla"), sys.modules.get("torch_xla.core.xla_model")
    if xm is None or torch_xla is None or not torch_xla._XLAC._xla_runtime_is_initialized():
        return None
    try:
        use = xm.get_memory_info(torch_xla.device())
    except RuntimeError:  # PJRT's CPU client, and the device that stands for all chips under GSPMD
        return None
    used, total = use["bytes_used"], use["bytes_limit"]
    return MemoryUse(used, use.get("peak_bytes_used", used), total, total - used)


def _kib_field(path: Path, name: str) -> int:
    """Bytes of a line such as ``VmRSS:  1234 kB``."""
    line = next(line for line in path.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
