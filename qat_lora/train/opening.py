"""What a run names, opened once: its cache, the checkpoint that it begins from, and its model."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from qat_lora import models
from qat_lora.cache import KDCacheDataset
from qat_lora.config import QatRun, QuantScheme, RecoveryRun
from qat_lora.runtime import Runtime
from qat_lora.settings import to_json
from qat_lora.train.checkpoint import FORMAT, load_checkpoint

Launch = Literal["new", "resume", "from_scratch"]


@dataclass(frozen=True)
class Opening:
    """A run before its first step. Each thing is opened when it is first asked for, and then kept.

    Attributes:
        run: its settings, as they will be saved. launch: what is to become of an earlier run in its folder.
    """

    run: QatRun | RecoveryRun
    runtime: Runtime
    launch: Launch

    @property
    def last(self) -> Path:
        """The checkpoint that a resumed run continues from."""
        return self.run.output / "last.pt"

    @functools.cached_property
    def is_resumed(self) -> bool:
        """Whether there is a run to resume, and it is to be resumed."""
        return self.launch == "resume" and self.last.exists()

    @property
    def start_path(self) -> Path:
        """The checkpoint that the run begins from: its own, or that of `--checkpoint`."""
        return self.last if self.is_resumed else Path(self.run.checkpoint)

    @functools.cached_property
    def start(self) -> dict[str, Any] | None:
        """What is in that checkpoint; None where a run of QAT begins from a rounded model."""
        if not self.is_resumed and not self.run.checkpoint:
            return None
        return load_checkpoint(self.start_path, kind=self.run.command if self.is_resumed else QatRun.command)

    @property
    def has_other_eval_rows(self) -> bool:
        """Whether a resumed run evaluates another number of held-out rows than before."""
        before = self.start["run"]["loop"]["eval_rows"] if self.is_resumed and self.start else self.run.loop.eval_rows
        return bool(before != self.run.loop.eval_rows)

    @functools.cached_property
    def cache(self) -> KDCacheDataset:
        """The whole cache, with all the ids that its teacher has."""
        run, loop = self.run, self.run.loop
        return KDCacheDataset(
            run.cache_dir,
            rank=self.runtime.rank,
            world_size=self.runtime.world_size,
            preload=loop.preload,
            seed=loop.seed,
            shuffle_shards=loop.shuffle_shards,
            disk_cache_gb=loop.disk_cache_gb,
        )

    @functools.cached_property
    def loaded(self) -> models.Loaded:
        """The full-precision model, its tokenizer and identity."""
        name = self.run.model or self.cache.manifest.teacher
        if isinstance(self.run, RecoveryRun) and not self.run.model and self.start is not None:
            name = self.start["identity"]["name"]
        with self.runtime.rank_zero_first("model_download"):
            return models.load(name)

    def facts(self, scheme: QuantScheme, made_by: Mapping[str, Any]) -> dict[str, Any]:
        """The same part of all checkpoints of the run: what was run, on which model and cache, by which code."""
        manifest = self.cache.manifest
        return {
            "format": FORMAT,
            "kind": self.run.command,
            "run": to_json(self.run),
            "identity": asdict(self.loaded.identity),
            "cache": {**manifest.identity(), "source": manifest.source},
            **made_by,
            "scheme": to_json(scheme),
            "world_size": self.runtime.world_size * self.runtime.devices,
        }

    @functools.cached_property
    def train_rows(self) -> KDCacheDataset:
        """The rows that are trained on, with the ids that the student has."""
        return self._of_student.part("train")

    @functools.cached_property
    def held_out_rows(self) -> KDCacheDataset:
        """The rows that the run is evaluated on, none of which it trains on."""
        return self._of_student.part("eval")

    @property
    def _of_student(self) -> KDCacheDataset:
        return self.cache.for_vocabulary(self.loaded.identity.vocab_size)
