"""Where recovery adapters go, after Apple's quality-recovery adapters: q, v, o and the MLP, but not k."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from qat_lora.config import AdapterConfig
from qat_lora.errors import ConfigError

log = logging.getLogger(__name__)

_KEY_PROJECTIONS = ("k_proj", "key", "key_proj", "wk")
# q, k and v in one matrix: of Phi3, of GPT-NeoX and Falcon, of others
_FUSED_PROJECTIONS = ("qkv_proj", "query_key_value", "c_attn", "qkv", "Wqkv")


def adapted_linears(targets: Mapping[str, str], config: AdapterConfig) -> list[str]:
    """Names of the Linears to adapt, out of the targets and their role (see `models.target_linears`).

    Where q, k and v are one matrix, keys are adapted with it, whatever `include_k_proj` says; that is logged.
    """
    own = {name: name.rsplit(".", 1)[-1] for name in targets}
    chosen = [
        name
        for name, role in targets.items()
        if role == "mlp" or (not config.mlp_only and (config.include_k_proj or own[name] not in _KEY_PROJECTIONS))
    ]
    if not chosen:
        raise ConfigError("no Linear is left to adapt; drop --mlp-only.")
    fused = [own[name] for name in chosen if own[name] in _FUSED_PROJECTIONS]
    if fused and not config.include_k_proj:
        log.warning("%s holds q, k and v in one matrix, so k is adapted too; --mlp-only adapts none of them", fused[0])
    return chosen


def short_names(chosen: Iterable[str], all_names: Iterable[str]) -> list[str]:
    """Last parts (q_proj ..) where these pick exactly the chosen modules, which reads better; else the full names."""
    chosen = set(chosen)
    last = {name.rsplit(".", 1)[-1] for name in chosen}
    picked = {name for name in all_names if name.rsplit(".", 1)[-1] in last}
    return sorted(last if picked == chosen else chosen)
