"""One frozen dataclass per command: the whole of what it may be told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, get_args

from qat_lora.config.adapter import AdapterConfig
from qat_lora.config.kd import KDConfig
from qat_lora.config.loop import LoopConfig
from qat_lora.config.optim import OptimConfig
from qat_lora.config.place import ExecutionConfig, PlaceConfig
from qat_lora.config.quant import QuantScheme
from qat_lora.config.source import SourceConfig
from qat_lora.errors import ConfigError, did_you_mean
from qat_lora.settings import Settings, setting
from qat_lora.urls import Location

Trainable = Literal["weights", "scales", "luts"]


@dataclass(frozen=True)
class QatRun(Settings):
    """`qat-lora qat`: train the quantised student against the cache."""

    command: ClassVar[str] = "qat"

    preset: str = setting("q2_g32", "named scheme and settings")
    model: str = setting("", "directory or hub id of the model to quantise; default: the cache's teacher")
    cache_dir: Location = setting(Path("caches/embedded"), "folder or URL of the KD cache", "--kd-cache-dir")
    output: Path = setting(Path("runs/qat"), "folder of the run")
    checkpoint: str = setting("", "start from this student instead of from error-searched rounding")
    train: tuple[Trainable, ...] = setting(("weights", "scales", "luts"), "what is trained: weights, scales, luts")
    scheme: QuantScheme = QuantScheme()
    kd: KDConfig = KDConfig()
    optim: OptimConfig = OptimConfig()
    loop: LoopConfig = LoopConfig()
    execution: ExecutionConfig = ExecutionConfig()
    place: PlaceConfig = PlaceConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        known = get_args(Trainable)
        if not self.train:
            raise ConfigError(f"train is empty, so nothing would be trained; name some of {', '.join(known)}.")
        for word in self.train:
            if word not in known:
                raise ConfigError(f"train={word!r} is unknown.{did_you_mean(word, known)}")


@dataclass(frozen=True)
class RecoveryRun(Settings):
    """`qat-lora recover`: freeze the student and train LoRA adapters against the same cache."""

    command: ClassVar[str] = "recover"

    checkpoint: str = setting("", "the student, e.g. runs/qat/best.pt")
    model: str = setting("", "directory or hub id of the model that was quantised; default: the checkpoint's")
    cache_dir: Location = setting(Path("caches/embedded"), "folder or URL of the KD cache", "--kd-cache-dir")
    output: Path = setting(Path("runs/recovery"), "folder of the run")
    adapter: AdapterConfig = AdapterConfig()
    kd: KDConfig = KDConfig()
    optim: OptimConfig = OptimConfig(lr=3e-3)
    loop: LoopConfig = LoopConfig(max_steps=200)
    execution: ExecutionConfig = ExecutionConfig()
    place: PlaceConfig = PlaceConfig()


@dataclass(frozen=True)
class EvalRun(Settings):
    """`qat-lora eval`: perplexity, KL to the teacher and top-1 agreement on a text."""

    command: ClassVar[str] = "eval"

    model: str = setting("", "directory or hub id to evaluate; with --checkpoint the model that was quantised")
    checkpoint: str = setting("", "a checkpoint of qat or recover to evaluate on top of --model")
    adapter_dir: str = setting("", "a peft adapter to load on top of --model", "--adapter")
    teacher: str = setting(
        "", "directory or hub id to compare with; default: the model that --checkpoint was made from, else none"
    )
    data: str = setting("", "text to evaluate on, as for cache; default, for the embedded model alone: embedded:eval")
    seq_len: int = setting(0, "tokens per window; 0: those of the cache that --checkpoint was trained on, else 128")
    stride: int = setting(0, "tokens between two windows; 0: windows do not overlap")
    max_rows: int = setting(0, "windows at most; 0 takes the whole text")
    rtn: bool = setting(True, "measure the rounded start of --checkpoint too, if it is not in --output yet")
    eval_batch_size: int = setting(8, "windows per forward", "--batch-size", at_least=1)
    stage: str = setting("", "name of the row in the table; default: what the checkpoint is, else 'model'")
    output: str = setting("", "JSON file that the rows are added to; default: fidelity.json beside the checkpoint")
    source: SourceConfig = SourceConfig()
    place: PlaceConfig = PlaceConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seq_len == 1:
            raise ConfigError("seq_len must be at least 2, but seq_len=1; a window of one token predicts nothing.")
        if self.seq_len and self.stride >= self.seq_len:
            raise ConfigError(
                f"stride must be smaller than seq_len, but stride={self.stride} and seq_len={self.seq_len}; "
                f"use --stride {self.seq_len // 2}, or 0 for windows that do not overlap."
            )


@dataclass(frozen=True)
class ExportRun(Settings):
    """`qat-lora export`: what was trained, in a form that others can load, verified by reloading it."""

    command: ClassVar[str] = "export"

    checkpoint: str = setting("", "a checkpoint of qat or recover")
    model: str = setting("", "directory or hub id of the model that was quantised; default: the checkpoint's")
    format: Literal["adapter", "dequantized", "merged"] = setting(
        "dequantized",
        "dequantized: the rounded weights as a transformers folder, with adapters two folders, base and adapter; "
        "merged: adapters folded into the weights, one folder; adapter: the adapters alone",
    )
    output: Path = setting(Path("export"), "new folder")
    threads: int = setting(0, "CPU threads; 0 leaves torch's own choice")


AnyRun = QatRun | RecoveryRun | EvalRun | ExportRun
