"""How long a run is and what happens every so often."""

from __future__ import annotations

from dataclasses import dataclass

from qat_lora.settings import Settings, setting


@dataclass(frozen=True)
class LoopConfig(Settings):
    """How long, how much at once, and what happens every so often. A step is an optimizer step, counted from 0."""

    max_steps: int = setting(300, "optimizer steps", at_least=1)
    batch_size: int = setting(8, "rows per micro-batch on one device", at_least=1)
    accumulation_steps: int = setting(1, "micro-batches per optimizer step", at_least=1)
    global_batch_size: int = setting(
        0, "rows per optimizer step over all ranks, from which --accumulation-steps follows; 0: the other way round"
    )
    log_every: int = setting(10, "steps between two log lines", at_least=1)
    eval_every: int = setting(100, "steps between two evaluations on held-out cache rows; 0: at start and end only")
    save_every: int = setting(100, "steps between two checkpoints; 0: at the end only")
    keep_last: int = setting(2, "numbered checkpoints kept beside best.pt and last.pt")
    eval_rows: int = setting(64, "at most this many held-out rows per evaluation", at_least=1)
    seed: int = setting(0, "seed of the row order, of dropout and of every initial value", below=2**32)
    preload: bool | None = setting(
        None, "read the whole cache into RAM; auto: where all ranks of the host have the memory for it", "--preload"
    )
    shuffle_shards: int = setting(
        0, "shuffle rows within so many shards at a time, for a cache larger than the disk; 0: over the whole cache"
    )
    disk_cache_gb: float = setting(
        0.0, "GB of a remote cache kept on the local disk; 0: QAT_LORA_DISK_CACHE_GB, or all but a tenth of the disk"
    )
