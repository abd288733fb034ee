"""Devices that nobody has here, on the CPU: CUDA as `FakeCuda`, an Apple GPU's copies as `LosingSource`.

`FakeCuda` is a mode of torch. Within it `torch.device("cuda", 0)` exists: its tensors lie in host memory, are known by
their storage, and say that they are on it. As on CUDA

- a device without an index is refused by `torch.cuda.set_device`, `synchronize` and the like;
- tensors of the host and of the device do not go together, but for numbers of the host;
- work is asked for and done later: each operation takes `seconds_per_op` on a clock of its own;
- whatever makes the host wait for the device is counted, and waits: a value that is read, a copy to the host, a copy
  from memory that is not pinned, operations whose result has a length that the host must know.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

CUDA = torch.device("cuda", 0)
_GROUPED = clip_grad._group_tensors_by_device_and_dtype
_READS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "is_nonzero",
    "equal",
    "_unique2",
    "unique_dim",
    "bincount",
}


class FakeCuda(contextlib.ExitStack):
    """The device and, while one is in the block, the modes that make it.

    Attributes:
        syncs: innermost lines of ours at which the host waited, one for each time; `synchronize` is not among them.
        seconds_per_op: of the device's clock.
        work: operations that the device was given.
    """

    def __init__(self, *, seconds_per_op: float = 0.0) -> None:
        super().__init__()
        self.seconds_per_op = seconds_per_op
        self.syncs: list[str] = []
        self.work = 0
        self.done_at = 0.0
        self._there: dict[int, StorageWeakRef] = {}
        self._pinned: dict[int, StorageWeakRef] = {}

    def __enter__(self) -> FakeCuda:
        fakes = {
            "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0,
            "set_device": _with_index, "synchronize": self._synchronize, "mem_get_info": self._memory,
            "max_memory_allocated": lambda device=None: 2**30, "memory_stats": lambda device=None: {},
            "memory_allocated": lambda device=None: 2**30, "reset_peak_memory_stats": lambda device=None: None,
            "empty_cache": lambda: None, "is_current_stream_capturing": lambda: False,
            "is_bf16_supported": lambda *a, **k: True,
        }  # fmt: skip
        for name, fake in fakes.items():
            self.enter_context(mock.patch.object(torch.cuda, name, fake))
        for name in ("autocast", "is_autocast_enabled", "get_autocast_dtype"):
            self.enter_context(mock.patch.object(torch, name, _of_host(getattr(torch, name))))
        self.enter_context(
            mock.patch.object(Tensor, "pin_memory", lambda x: self._pin(x))
        )  # also by threads without the modes
        self.enter_context(mock.patch.object(clip_grad, "_group_tensors_by_device_and_dtype", self._grouped))
        self.enter_context(_Functions(self))
        self.enter_context(_Operations(self))
        return self

    def holds(self, x: Any) -> bool:
        return isinstance(x, Tensor) and _key(x) in self._there

    def take(self, x: Tensor) -> Tensor:
        self._there[_key(x)] = StorageWeakRef(x.untyped_storage())
        return x

    def is_pinned(self, x: Tensor) -> bool:
        return _key(x) in self._pinned

    def host_waits(self) -> None:
        frame, line = sys._getframe(1), ""
        while frame is not None and "/qat_lora/" not in (line := f"{frame.f_code.co_filename}:{frame.f_lineno}"):
            frame = frame.f_back
        self.syncs.append(line)
        self._wait()

    def does(self, seconds: float | None = None) -> None:
        """Give the device work of so many seconds."""
        self.work += 1
        self.done_at = max(self.done_at, time.perf_counter()) + (self.seconds_per_op if seconds is None else seconds)

    def _wait(self) -> None:
        time.sleep(max(0.0, self.done_at - time.perf_counter()))

    def _synchronize(self, device: Any = None) -> None:
        if device is not None:
            _with_index(device)
        self._wait()

    def _memory(self, device: Any) -> tuple[int, int]:
        _with_index(device)
        return 60 * 2**30, 80 * 2**30

    def _grouped(self, tensors: Any) -> Any:
        """As torch's, which asks where tensors are in C++."""
        groups = _GROUPED(tensors)
        return {(CUDA if self.holds(x[0][0][0]) else device, dtype): x for (device, dtype), x in groups.items()}

    def _pin(self, x: Tensor) -> Tensor:
        copy = x.clone()
        self._pinned[_key(copy)] = StorageWeakRef(copy.untyped_storage())
        return copy


def _key(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _with_index(device: Any) -> None:
    if torch.device(device).index is None:
        raise ValueError(f"Expected a torch.device with a specified index or an integer, but got:{device}")


def _of_host(of_kind: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a device type, which for the device does what it does for the host."""
    return lambda kind, *args, **kwargs: of_kind("cpu" if kind == "cuda" else kind, *args, **kwargs)


def _is_cuda(x: Any) -> bool:
    """Whether an argument names the device, which in a call of torch is not a tensor."""
    if isinstance(x, str) and x.startswith("cuda"):
        return True
    return isinstance(x, torch.device) and x.type == "cuda"


def _is_host(x: Any) -> bool:
    return (isinstance(x, torch.device) and x.type == "cpu") or x == "cpu"


class _Functions(TorchFunctionMode):
    """What names a device: factories, moves, and the questions where a tensor is."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func == Tensor.device.__get__ and self.cuda.holds(args[0]):
            return CUDA
        if func == Tensor.is_cuda.__get__:
            return self.cuda.holds(args[0])
        if name in ("_parse_to", "device", "autocast"):
            return func(*args, **kwargs)
        if func is Tensor.is_pinned:
            return self.cuda.is_pinned(args[0])
        if name in ("cpu", "numpy", "tolist", "__array__") and self.cuda.holds(args[0]):
            if name in ("numpy", "__array__"):
                raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()")
            return getattr(self._to_host(args[0]), name)()
        if name in ("to", "cuda", "type_as", "_to"):
            return self._moved(func, args, kwargs)
        if any(_is_cuda(x) for x in kwargs.values()) or any(_is_cuda(x) for x in args):
            args, kwargs = tree_map(lambda x: torch.device("cpu") if _is_cuda(x) else x, (args, kwargs))
            made = func(*args, **kwargs)
            if name in ("tensor", "as_tensor", "asarray"):  # written by the host, uploaded, and waited for
                self.cuda.host_waits()
            return tree_map(lambda x: self.cuda.take(x) if isinstance(x, Tensor) else x, made)
        return func(*args, **kwargs)

    def _to_host(self, x: Tensor, *, wait: bool = True) -> Tensor:
        if wait:
            self.cuda.host_waits()
        return x.detach().clone() if not x.requires_grad else x.clone()

    def _moved(self, func: Any, args: Any, kwargs: Any) -> Any:
        x, *rest = args
        target = kwargs.get(
            "device", next((a for a in rest if _is_cuda(a) or _is_host(a) or isinstance(a, Tensor)), None)
        )
        if isinstance(target, Tensor):
            target = CUDA if self.cuda.holds(target) else torch.device("cpu")
        wants, is_there = _is_cuda(target) or func is Tensor.cuda, self.cuda.holds(x)
        args, kwargs = tree_map(lambda a: torch.device("cpu") if _is_cuda(a) else a, ((x, *rest), kwargs))
        if target is None and func is not Tensor.cuda or wants == is_there:
            return func(*args, **kwargs)
        waits = not (kwargs.get("non_blocking") and (is_there or self.cuda.is_pinned(x)))
        with _Free(self.cuda):
            copy = func(*args, **kwargs)
            copy = copy.clone() if _key(copy) == _key(x) else copy
        if waits:
            self.cuda.host_waits()
        return self.cuda.take(copy) if wants else copy


class _Free(contextlib.ContextDecorator):
    """Within it operations are not judged: a copy between host and device."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def __enter__(self) -> None:
        self.cuda.free = True

    def __exit__(self, *error: Any) -> None:
        self.cuda.free = False


class _Operations(TorchDispatchMode):
    """What is computed: where, and whether the host must wait for it. It sees the backward as well."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self.cuda = cuda
        cuda.free = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        there = [x for x in tensors if self.cuda.holds(x)]
        if not there or self.cuda.free:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        strangers = [x for x in tensors if not self.cuda.holds(x) and x.dim()]
        if name == "copy_" and strangers:
            if not (args[2:] and args[2] and self.cuda.is_pinned(strangers[0])):
                self.cuda.host_waits()
        elif strangers and name != "set_":
            shapes = [tuple(x.shape) for x in strangers]
            raise RuntimeError(f"Expected all tensors to be on the same device: {func} of cuda:0 and cpu {shapes}")
        self.cuda.does()
        if name in _READS or (name in ("index", "index_put", "index_put_") and _has_mask(args[1])):
            self.cuda.host_waits()
        made = func(*args, **kwargs)
        for x in tree_leaves(made):
            if isinstance(x, Tensor):
                self.cuda.take(x)
        return made


def _has_mask(indices: Any) -> bool:
    return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in tree_leaves(indices))


class LosingSource(TorchFunctionMode):
    """An Apple GPU's copies: one that nobody waits for, from memory that is not pinned, reads what is there later."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") != "to" or not kwargs.get("non_blocking") or args[0].is_pinned():
            return func(*args, **kwargs)
        return torch.full_like(args[0], torch.nan)
