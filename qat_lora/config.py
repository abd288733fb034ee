"""Frozen values that describe a run: what they may hold, how they are checked, how they are written down.

Owns the dataclasses and their validation, but for `SourceConfig` in `qat_lora.source`. How such values are read,
overridden and written lives in `qat_lora.settings`, the named combinations in `qat_lora.presets`, the command-line
flags in `qat_lora.cli.flags`.

Every leaf field has a unique name over all groups of a run, so that ``--batch-size`` and ``--set loop.batch_size=`` can
only mean one thing. A field's help text, and other spellings of its flag, stand in its metadata.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, get_args

from qat_lora.errors import ConfigError, did_you_mean
from qat_lora.remote import Location
from qat_lora.settings import check_choices, check_range, setting
from qat_lora.source import SourceConfig

Levels = Literal["balanced", "int", "affine", "ternary", "nf4", "iq4_nl", "lut"]
Scales = Literal["channel", "group", "lowrank"]
Packing = Literal["stream", "documents", "pad"]
ScaleDtype = Literal["float16", "bfloat16", "float32"]
Device = Literal["auto", "cpu", "cuda", "mps", "tpu"]
Dtype = Literal["auto", "fp32", "bf16"]
Support = Literal["full", "candidates"]
Store = Literal["topk", "sampled", "full"]
Anneal = Literal["none", "linear", "cosine"]
Trainable = Literal["weights", "scales", "luts"]
Sync = Literal["phase", "step", "optimizer"]
Checkpointing = Literal["auto", "on", "off"]
Shard = Literal["none", "fsdp", "spmd", "spmd_data"]
MemDebug = Literal["off", "basic", "tensors", "metrics", "hlo"]


@dataclass(frozen=True)
class LinearQuant:
    """The quantised form of one Linear: W ~ S * L[I] (+ Z), with codes I of `bits` bits.

    Attributes:
        bits: width of a stored code: 2, 3, 4 or 8.
        levels: the grid L. ``balanced`` {.. -1.5 -.5 .5 1.5 ..}, ``int`` {-2^(b-1) .. 2^(b-1)-1}, ``affine`` {0 ..
            2^b-1} with an offset Z for each scale, ``ternary`` {-1 0 1} (2 bits), ``nf4`` and ``iq4_nl`` (4 bits),
            ``lut`` learned.
        scales: the form of S. One per output ``channel``, one per ``group`` of `group_size` inputs (the last group
            may be shorter), or ``lowrank``: S = A @ B of rank `rank`.
        group_size: inputs per group; for ``lowrank`` the groups whose searched scales are factorised to begin with.
        rank: rank of ``lowrank`` scales.
        scale_dtype: what scales, offsets and a LUT are stored as, and rounded to in every forward.
    """

    bits: int = 4
    levels: Levels = "int"
    scales: Scales = "group"
    group_size: int = 32
    rank: int = 32
    scale_dtype: ScaleDtype = "float16"

    def __post_init__(self) -> None:
        check_choices(self)
        if self.bits not in (2, 3, 4, 8):
            raise ConfigError(f"bits must be 2, 3, 4 or 8, but quant bits={self.bits}; choose one of these.")
        if self.group_size < 1:
            raise ConfigError(
                f"group_size must be a positive number, but quant group_size={self.group_size}; "
                "use 32, 64 or 128, or scales='channel' for one scale per row."
            )
        if self.rank < 1:
            raise ConfigError(f"rank must be a positive number, but quant rank={self.rank}; use 4 to 32.")
        fixed = {"ternary": 2, "nf4": 4, "iq4_nl": 4}.get(self.levels)
        if fixed is not None and self.bits != fixed:
            raise ConfigError(
                f"levels={self.levels!r} are stored in {fixed} bits, but quant bits={self.bits}; set bits={fixed}."
            )


@dataclass(frozen=True)
class QuantScheme:
    """Which form the MLP's Linears take and which the attention's; embeddings and lm_head stay as they are."""

    mlp: LinearQuant = LinearQuant()
    attention: LinearQuant = LinearQuant()


@dataclass(frozen=True)
class KDConfig:
    """What the student is asked to match, and how much each part weighs."""

    temperature: float = setting(1.0, "softmax temperature of the distillation loss; the loss is scaled by T^2")
    support: Support = setting(
        "full", "normalise the student over the full vocabulary, or over the cached candidates alone (biased)"
    )
    hard_weight: float = setting(0.0, "weight of cross entropy against the teacher's most probable token")
    hard_anneal: Anneal = setting("none", "how the hard weight falls to 0 over the run")
    ce_alpha: float = setting(0.0, "share of next-token cross entropy: (1 - alpha) * KD + alpha * CE")
    anchor_kl_weight: float = setting(0.0, "weight of the KL to the model's own start on fixed anchor rows")
    anchor_samples: int = setting(32, "how many anchor rows")
    chunk_tokens: int = setting(256, "tokens whose logits exist at once in the loss")
    seq_len: int = setting(0, "tokens per row that the cache must have; 0 takes what it has")
    top_k: int = setting(0, "cached candidates to use per position; 0 uses all that are stored")

    def __post_init__(self) -> None:
        check_choices(self)
        check_range(self, "temperature", above=0.0)
        check_range(self, "hard_weight", at_least=0.0)
        check_range(self, "ce_alpha", at_least=0.0, at_most=1.0)
        check_range(self, "anchor_kl_weight", at_least=0.0)
        check_range(self, "anchor_samples", at_least=1)
        check_range(self, "chunk_tokens", at_least=1)
        check_range(self, "seq_len", at_least=0)
        check_range(self, "top_k", at_least=0)


@dataclass(frozen=True)
class OptimConfig:
    """AdamW, its schedule and its clipping."""

    lr: float = setting(1e-3, "peak learning rate", "--learning-rate")
    scale_lr_ratio: float = setting(0.1, "learning rate of scales, offsets and LUTs, as a share of --lr")
    weight_decay: float = setting(0.0, "decoupled weight decay")
    beta1: float = setting(0.9, "AdamW beta1")
    beta2: float = setting(0.99, "AdamW beta2")
    eps: float = setting(1e-8, "AdamW epsilon")
    warmup_steps: int = setting(20, "optimizer steps of linear warm-up, from lr / warmup_steps upwards")
    min_lr_ratio: float = setting(0.05, "learning rate at the end of the cosine, as a share of --lr")
    clip_norm: float = setting(1.0, "largest norm of the whole gradient; 0 turns clipping off")
    ema_decay: float = setting(0.0, "decay per step of a moving average of the trained tensors; 0 turns it off")

    def __post_init__(self) -> None:
        for name in ("lr", "scale_lr_ratio", "eps"):  # to freeze the scales is another setting: what is trained
            check_range(self, name, above=0.0)
        for name in ("weight_decay", "clip_norm", "warmup_steps"):
            check_range(self, name, at_least=0.0)
        for name in ("beta1", "beta2", "ema_decay"):
            check_range(self, name, at_least=0.0, below=1.0)
        check_range(self, "min_lr_ratio", at_least=0.0, at_most=1.0)


@dataclass(frozen=True)
class LoopConfig:
    """How long, how much at once, and what happens every so often. A step is an optimizer step, counted from 0."""

    max_steps: int = setting(300, "optimizer steps")
    batch_size: int = setting(8, "rows per micro-batch on one device")
    accumulation_steps: int = setting(1, "micro-batches per optimizer step")
    global_batch_size: int = setting(
        0, "rows per optimizer step over all ranks, from which --accumulation-steps follows; 0: the other way round"
    )
    log_every: int = setting(10, "steps between two log lines")
    eval_every: int = setting(100, "steps between two evaluations on held-out cache rows; 0: at start and end only")
    save_every: int = setting(100, "steps between two checkpoints; 0: at the end only")
    keep_last: int = setting(2, "numbered checkpoints kept beside best.pt and last.pt")
    eval_fraction: float = setting(0.05, "share of the cache's rows held out for evaluation, chosen by row digest")
    eval_rows: int = setting(64, "at most this many held-out rows per evaluation")
    seed: int = setting(0, "seed of the row order, of dropout and of every initial value")
    preload: bool = setting(True, "read the whole cache into RAM and check its digests", "--preload")
    shuffle_shards: int = setting(
        0, "shuffle rows within so many shards at a time, for a cache larger than the disk; 0: over the whole cache"
    )
    disk_cache_gb: float = setting(
        0.0, "GB of a remote cache kept on the local disk; 0: QAT_LORA_DISK_CACHE_GB, or all but a tenth of the disk"
    )

    def __post_init__(self) -> None:
        for name in ("max_steps", "batch_size", "accumulation_steps", "log_every", "eval_rows"):
            check_range(self, name, at_least=1)
        for name in ("global_batch_size", "eval_every", "save_every", "keep_last", "seed", "shuffle_shards"):
            check_range(self, name, at_least=0)
        check_range(self, "disk_cache_gb", at_least=0.0)
        check_range(self, "seed", below=2**32)  # what a NumPy seed can hold
        check_range(self, "eval_fraction", above=0.0, below=1.0)


@dataclass(frozen=True)
class PlaceConfig:
    """Where a command runs and in which precision."""

    device: Device = setting("auto", "auto takes the best device there and says which")
    allow_fallback: bool = setting(False, "go on with the CPU, with a warning, where the named device is absent")
    dtype: Dtype = setting("auto", "compute precision; auto: fp32 on CPU and MPS, bf16 on CUDA and TPU")
    threads: int = setting(0, "CPU threads; 0 leaves torch's own choice")
    barrier_timeout: int = setting(600, "seconds after which a rank gives up waiting for the others")

    def __post_init__(self) -> None:
        check_choices(self)
        check_range(self, "threads", at_least=0)
        check_range(self, "barrier_timeout", at_least=1)


@dataclass(frozen=True)
class ExecutionConfig:
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
        -1, "XLA: stop when more graphs than this are compiled after the first step; -1 only warns"
    )
    mem_debug: MemDebug = setting("off", "write memory.jsonl into the run's folder, in that much detail")
    tpu_autoscale: bool = setting(False, "XLA: double --batch-size and raise --lr by 1.2")

    def __post_init__(self) -> None:
        check_choices(self)
        check_range(self, "max_recompiles", at_least=-1)


@dataclass(frozen=True)
class QatRun:
    """`qat-lora qat`: train the quantised student against the cache."""

    command: ClassVar[str] = "qat"

    preset: str = setting("q2_g32", "named scheme and settings, see qat_lora.presets", "--config")
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
        known = get_args(Trainable)
        if not self.train:
            raise ConfigError(f"train is empty, so nothing would be trained; name some of {', '.join(known)}.")
        for word in self.train:
            if word not in known:
                raise ConfigError(f"train={word!r} is unknown.{did_you_mean(word, known)}")


@dataclass(frozen=True)
class AdapterConfig:
    """Where recovery LoRA goes and how large it is (the placement of Apple's quality-recovery adapters)."""

    recovery_r: int = setting(8, "rank of the adapters", "--rank")
    recovery_alpha: float = setting(16.0, "LoRA alpha; the update is scaled by alpha / r", "--alpha")
    recovery_dropout: float = setting(0.0, "dropout before the adapters", "--dropout")
    include_k_proj: bool = setting(False, "adapt k_proj too")
    mlp_only: bool = setting(False, "adapt the MLP alone")

    def __post_init__(self) -> None:
        check_range(self, "recovery_r", at_least=1)
        check_range(self, "recovery_alpha", above=0.0)
        check_range(self, "recovery_dropout", at_least=0.0, below=1.0)
        if self.mlp_only and self.include_k_proj:
            raise ConfigError("include_k_proj=True adapts attention but mlp_only=True forbids it; drop one of them.")


@dataclass(frozen=True)
class RecoveryRun:
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
class EvalRun:
    """`qat-lora eval`: perplexity, KL to the teacher and top-1 agreement on a text."""

    command: ClassVar[str] = "eval"

    model: str = setting("", "directory or hub id to evaluate; with --checkpoint the model that was quantised")
    checkpoint: str = setting("", "a checkpoint of qat or recover to evaluate on top of --model")
    adapter_dir: str = setting("", "a peft adapter to load on top of --model", "--adapter")
    teacher: str = setting(
        "", "directory or hub id to compare with; default: the model that --checkpoint was made from, else none"
    )
    data: str = setting("embedded:eval", "text to evaluate on, as for cache")
    seq_len: int = setting(128, "tokens per window")
    stride: int = setting(0, "tokens between two windows; 0: windows do not overlap")
    max_rows: int = setting(0, "windows at most; 0 takes the whole text")
    eval_batch_size: int = setting(8, "windows per forward", "--batch-size")
    stage: str = setting("model", "name of the row in the table")
    output: Path = setting(Path("fidelity.json"), "JSON file with the result")
    source: SourceConfig = SourceConfig()
    place: PlaceConfig = PlaceConfig()

    def __post_init__(self) -> None:
        check_range(self, "seq_len", at_least=2)
        check_range(self, "eval_batch_size", at_least=1)
        check_range(self, "max_rows", at_least=0)
        check_range(self, "stride", at_least=0)
        if self.stride >= self.seq_len:
            raise ConfigError(
                f"stride must be smaller than seq_len, but stride={self.stride} and seq_len={self.seq_len}; "
                f"use --stride {self.seq_len // 2}, or 0 for windows that do not overlap."
            )


@dataclass(frozen=True)
class ExportRun:
    """`qat-lora export`: what was trained, in a form that others can load, verified by reloading it."""

    command: ClassVar[str] = "export"

    checkpoint: str = setting("", "a checkpoint of qat or recover")
    model: str = setting("", "directory or hub id of the model that was quantised; default: the checkpoint's")
    format: Literal["adapter", "dequantized", "merged"] = setting(
        "dequantized",
        "adapter: peft's own format; dequantized: the student as an ordinary transformers folder, adapters beside it; "
        "merged: adapters folded into the weights",
    )
    output: Path = setting(Path("export"), "new folder")

    def __post_init__(self) -> None:
        check_choices(self)


AnyRun = QatRun | RecoveryRun | EvalRun | ExportRun
