"""Named schemes and the settings that suit them: the only table of bits, grids, groups and ranks.

``q4_g32`` reads: 4 bits, one scale per group of 32 inputs. ``q4_r32``: 4 bits, low-rank scales of rank 32. ``q2a4``:
MLP in 2 bits, attention in 4.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qat_lora.config import LinearQuant, OptimConfig, QatRun, QuantScheme
from qat_lora.errors import ConfigError


def _group(bits: int, levels: str, group_size: int) -> QuantScheme:
    form = LinearQuant(bits=bits, levels=levels, scales="group", group_size=group_size)  # type: ignore[arg-type]
    return QuantScheme(mlp=form, attention=form)


def _lut(mlp_bits: int, mlp_rank: int, attention_bits: int, attention_rank: int) -> QuantScheme:
    return QuantScheme(
        mlp=LinearQuant(bits=mlp_bits, levels="lut", scales="lowrank", rank=mlp_rank),
        attention=LinearQuant(bits=attention_bits, levels="lut", scales="lowrank", rank=attention_rank),
    )


SCHEMES: dict[str, QuantScheme] = {
    # group scales; the zero-free balanced grid wins at 2 bits, the symmetric integers (GGUF's Q4_0) from 3 bits on
    "q4_g32": _group(4, "int", 32),
    "q3_g32": _group(3, "int", 32),
    "q2_g32": _group(2, "balanced", 32),
    "q2_g64": _group(2, "balanced", 64),
    # learned LUT and low-rank scales: (MLP bits, rank, attention bits, rank)
    "q4_r32": _lut(4, 32, 4, 32),
    "q4a4": _lut(4, 4, 4, 4),
    "q2a4": _lut(2, 32, 4, 8),
    "q2a2": _lut(2, 32, 2, 32),
}

# Learning rate of the master weights by the smallest width in the scheme: the coarser the grid, the further a weight
# has to travel before its code changes.
_LR_BY_BITS = {2: 1e-3, 3: 5e-4, 4: 1e-4, 8: 5e-5}


def scheme(name: str) -> QuantScheme:
    """Return the named scheme; raises ConfigError for an unknown name."""
    if name not in SCHEMES:
        raise ConfigError(f"preset {name!r} is unknown; choose one of {', '.join(SCHEMES)}.")
    return SCHEMES[name]


def qat_run(name: str, **settings: Any) -> QatRun:
    """Return the whole QAT run of that name: scheme, learning rate and the rest, with top-level settings replaced."""
    chosen = scheme(name)
    bits = min(chosen.mlp.bits, chosen.attention.bits)
    return replace(QatRun(preset=name, scheme=chosen, optim=OptimConfig(lr=_LR_BY_BITS[bits])), **settings)
