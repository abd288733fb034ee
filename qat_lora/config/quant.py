"""The quantised form of a Linear, and which form each kind of Linear takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qat_lora.errors import ConfigError
from qat_lora.settings import Settings

Levels = Literal["balanced", "int", "affine", "ternary", "nf4", "iq4_nl", "lut"]
Scales = Literal["channel", "group", "lowrank"]
ScaleDtype = Literal["float16", "bfloat16", "float32"]

_ONLY_WIDTH = {"ternary": 2, "nf4": 4, "iq4_nl": 4}  # bits of the grids that have one width; the others have all


@dataclass(frozen=True)
class LinearQuant(Settings):
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
        super().__post_init__()
        if self.bits not in (2, 3, 4, 8):
            raise ConfigError(f"bits must be 2, 3, 4 or 8, but quant bits={self.bits}; choose one of these.")
        if self.group_size < 1:
            raise ConfigError(
                f"group_size must be a positive number, but quant group_size={self.group_size}; "
                "use 32, 64 or 128, or scales='channel' for one scale per row."
            )
        if self.rank < 1:
            raise ConfigError(f"rank must be a positive number, but quant rank={self.rank}; use 4 to 32.")
        fixed = _ONLY_WIDTH.get(self.levels)
        if fixed is not None and self.bits != fixed:
            raise ConfigError(
                f"levels={self.levels!r} are stored in {fixed} bits, but quant bits={self.bits}; set bits={fixed}."
            )

    @property
    def has_offset(self) -> bool:
        """Whether each scale has an offset Z."""
        return self.levels == "affine"

    @property
    def is_learned(self) -> bool:
        """Whether the levels are trained and stored."""
        return self.levels == "lut"


@dataclass(frozen=True)
class QuantScheme(Settings):
    """Which form the MLP's Linears take and which the attention's; embeddings and lm_head stay as they are."""

    mlp: LinearQuant = LinearQuant()
    attention: LinearQuant = LinearQuant()
