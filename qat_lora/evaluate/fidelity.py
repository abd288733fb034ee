"""Perplexity, KL(teacher || student) and top-1 agreement in one pass over the same positions, at T = 1.

Legend: R windows, T positions, S counted rows of one chunk, V vocabulary, H hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qat_lora import models
from qat_lora.evaluate.windows import Windows
from qat_lora.kd import Head
from qat_lora.runtime import Runtime

CHUNK_TOKENS = 512


@dataclass(frozen=True)
class Fidelity:
    """One row of the fidelity table.

    Attributes:
        stage: which model. bits_per_weight: of the quantised Linears, scales and adapters counted.
        perplexity: exp of the mean next-token negative log-likelihood, in tokens. kl: mean KL(teacher || student) in
            nats per token at T = 1. top1: share of positions where both put the same token first. size_bytes: of the
            whole model as stored. tokens: predictions counted.
    """

    stage: str
    bits_per_weight: float
    perplexity: float
    kl: float
    top1: float
    size_bytes: int
    tokens: int


@dataclass(frozen=True)
class Scores:
    """What `measure` reads off the logits; see `Fidelity` for the units."""

    perplexity: float
    kl: float
    top1: float
    tokens: int


@torch.no_grad()
def measure(
    student: nn.Module,
    teacher: nn.Module,
    windows: Windows,
    *,
    batch_size: int,
    runtime: Runtime,
    on_batch: Callable[[int], None] = lambda rows: None,
) -> Scores:
    """Compare a student with its teacher on the windows' counted positions; the teacher itself has KL 0 and top-1 1.

    Both models lie on the runtime's device and are put into evaluation mode. `on_batch` is told the rows done.
    """
    was_training = student.training
    student.eval()
    teacher.eval()
    total = torch.zeros(3, dtype=torch.float64)
    for begin in range(0, windows.input_ids_RT.shape[0], batch_size):
        rows = slice(begin, begin + batch_size)
        ids_BT, counted_BT = windows.input_ids_RT[rows], windows.counted_RT[rows]
        total += _batch_sums(student, teacher, ids_BT, counted_BT, runtime)
        on_batch(ids_BT.shape[0])
    student.train(was_training)
    tokens = int(windows.counted_RT.sum())
    nll, kl, same = (total / max(1, tokens)).tolist()
    return Scores(math.exp(min(nll, 700.0)), kl, same, tokens)


def _batch_sums(student: nn.Module, teacher: nn.Module, ids_BT: Tensor, counted_BT: Tensor, runtime: Runtime) -> Tensor:
    """Sums of negative log-likelihood, KL and agreement over one batch: [3] float64 on the CPU."""
    on_device = runtime.to_device({"ids": ids_BT, "counted": counted_BT})
    ids, weight_S = on_device["ids"], on_device["counted"].flatten().double()
    next_S = torch.roll(ids, -1, dims=1).flatten()
    with runtime.autocast():
        ours_SH = models.trunk_hidden(student, ids).flatten(0, 1)
        theirs_SH = ours_SH if teacher is student else models.trunk_hidden(teacher, ids).flatten(0, 1)
    our_head, their_head = (Head(*models.head_parts(m, ours_SH.dtype)) for m in (student, teacher))
    sums = torch.zeros(3, dtype=torch.float64, device=ids.device)
    for begin in range(0, ours_SH.shape[0], CHUNK_TOKENS):
        part = slice(begin, begin + CHUNK_TOKENS)
        logq_SV = our_head(ours_SH[part]).float().log_softmax(-1)
        logp_SV = logq_SV if teacher is student else their_head(theirs_SH[part]).float().log_softmax(-1)
        nll_S = -logq_SV.gather(1, next_S[part, None]).squeeze(1)
        kl_S = (logp_SV.exp() * (logp_SV - logq_SV)).sum(-1)
        same_S = logp_SV.argmax(-1) == logq_SV.argmax(-1)
        sums += (torch.stack([nll_S, kl_S, same_S]).double() * weight_S[part]).sum(-1)
    runtime.mark_step()
    return sums.cpu()
