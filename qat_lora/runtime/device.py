"""What this machine offers: the public words about devices, each a no-op where the hardware is absent.

Looks only at what is installed and present; starts no device. torch_xla is touched through `sys.modules` when something
else has loaded it already.
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import sys
from pathlib import Path

import torch

from qat_lora.runtime.memory import MemoryUse, device_memory, process_memory

log = logging.getLogger(__name__)

# PCI ids, as torch_xla knows them: v2/v3, v4, v5p, v5e, v6e and newer.
_GOOGLE, _TPU_CHIPS = "0x1ae0", {"0x0027", "0x005e", "0x0056", "0x0062", "0x0063", "0x006f", "0x0076"}
_HUGEPAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def is_tpu_available() -> bool:
    """Whether torch_xla is installed and would find a TPU: PJRT_DEVICE=TPU, or a TPU chip among the devices."""
    if importlib.util.find_spec("torch_xla") is None:
        return False
    chosen = os.environ.get("PJRT_DEVICE", "").upper()
    return chosen == "TPU" or (not chosen and (any(Path("/dev").glob("accel[0-9]*")) or _has_google_chip()))


def _has_google_chip() -> bool:
    """Whether a TPU is on the PCI bus: v5e and newer show no /dev/accel, but a vfio device like any other."""
    for vendor in Path("/sys/bus/pci/devices").glob("*/vendor"):
        if vendor.read_text().strip() == _GOOGLE and (vendor.parent / "device").read_text().strip() in _TPU_CHIPS:
            return True
    return False


def detect_device_type() -> str:
    """The best device type there: ``tpu``, ``cuda``, ``mps`` or ``cpu``."""
    if is_tpu_available():
        return "tpu"
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def is_xla_device(device: torch.device | str) -> bool:
    """Whether a device is one of torch_xla's."""
    return _kind(device) == "xla"


def _kind(device: torch.device | str | None) -> str:
    return str(getattr(device, "type", device or detect_device_type())).split(":")[0]


def xla_mark_step() -> None:
    """Cut torch_xla's lazy graph and start its execution; nothing where torch_xla is not in use."""
    torch_xla = sys.modules.get("torch_xla")
    # other libraries import torch_xla merely because it is there; what counts is that a device was started
    if torch_xla is not None and torch_xla._XLAC._xla_runtime_is_initialized():
        torch_xla.sync()


def clear_memory(device: torch.device | str | None = None) -> None:
    """Free what Python and the device's allocator hold without need."""
    gc.collect()
    kind = _kind(device)
    if kind == "cuda" and torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif kind == "mps" and torch.backends.mps.is_available():
        torch.mps.empty_cache()
    elif kind in ("xla", "tpu"):
        xla_mark_step()


def log_memory_usage(tag: str = "", device: torch.device | str | None = None) -> MemoryUse:
    """Log the bytes in use, on CUDA and TPU those of the device, else of the process, and return them."""
    kind = _kind(device)
    use = device_memory(kind) or process_memory()
    gib = 2**30
    log.info("memory %s used %.2f GiB, peak %.2f GiB (%s)", tag, use.used_bytes / gib, use.peak_bytes / gib, kind)
    return use


def enable_transparent_hugepages() -> bool:
    """Turn transparent hugepages on, which TPU v5e and newer want at start; False, with a warning, where it may not.

    A no-op that returns False on machines without a TPU.
    """
    if not is_tpu_available() or not _HUGEPAGES.exists():
        return False
    if "[always]" in _HUGEPAGES.read_text():
        return True
    try:
        _HUGEPAGES.write_text("always")
    except OSError:
        log.warning("transparent hugepages are off, so the TPU starts slowly; run: sudo scripts/enable_hugepages.sh")
        return False
    return True
