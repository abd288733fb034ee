"""Perplexity, KL(teacher || student) and top-1 agreement in one pass over the same positions, at T = 1.

Legend: R windows, T positions, S counted rows of one chunk, V vocabulary, H hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from qat_lora import models
from qat_lora.errors import DataError
from qat_lora.evaluate.windows import Windows
from qat_lora.kd import next_tokens
from qat_lora.runtime import Runtime

CHUNK_TOKENS = 512


@dataclass(frozen=True)
class Fidelity:
    """One row of the fidelity table.

    Attributes:
        stage: which model.
        bits_per_weight: of the quantised Linears, scales and adapters counted.
        perplexity: exp of the mean next-token negative log-likelihood, in tokens.
        kl: mean KL(teacher || student) in nats per token at T = 1; None where there was no teacher to compare with.
        top1: share of positions where both put the same token first; None likewise.
        size_bytes: of the whole model as stored.
        tokens: predictions counted.
        adapter_bits: the adapters' share of `bits_per_weight`.
        model, checkpoint, adapter, step: what was measured; `step` is the checkpoint's.
        teacher, data, seq_len, stride, max_rows: against what, on which text, in which windows.
        versions, date: of the libraries, and when (UTC).
    """

    stage: str
    bits_per_weight: float = 0.0
    perplexity: float = 0.0
    kl: float | None = None
    top1: float | None = None
    size_bytes: int = 0
    tokens: int = 0
    adapter_bits: float = 0.0
    model: str = ""
    checkpoint: str = ""
    adapter: str = ""
    step: int | None = None
    teacher: str = ""
    data: str = ""
    seq_len: int = 0
    stride: int = 0
    max_rows: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    date: str = ""


@dataclass(frozen=True)
class Scores:
    """What `measure` reads off the logits; see `Fidelity` for the units."""

    perplexity: float
    kl: float | None
    top1: float | None
    tokens: int


@torch.no_grad()
def measure(
    student: nn.Module,
    teacher: nn.Module | None,
    windows: Windows,
    *,
    batch_size: int,
    runtime: Runtime,
    on_rows: Callable[[int], None] = lambda done: None,
) -> tuple[Scores, Scores | None]:
    """Compare a student with its teacher, if one is given, on the windows' counted positions.

    Returns the scores of both. The models lie on the runtime's device and keep the mode they are in. `on_rows` is told
    the rows done. Where their vocabularies differ, in padding, KL and top-1 are those of both distributions given one
    of the ids that both have: softmax over the first min(V) logits. Perplexity is each one's own, over all of its ids.
    """
    tokens = int(windows.counted_RT.sum())
    if not tokens:
        raise DataError("the evaluation text gives no token to predict; give a longer text with --data.")
    models_used = [student] if teacher is None else [student, teacher]
    modes = [model.training for model in models_used]
    for model in models_used:
        model.eval()
    total = torch.zeros(4, dtype=torch.float64)
    for begin in range(0, windows.input_ids_RT.shape[0], batch_size):
        batch = runtime.to_device(_full_batch(windows, begin, batch_size))
        total += _batch_sums(student, teacher, batch["ids"], batch["counted"], runtime)
        on_rows(min(begin + batch_size, windows.input_ids_RT.shape[0]))
    for model, mode in zip(models_used, modes, strict=True):
        model.train(mode)
    nll, kl, same, teacher_nll = (total / tokens).tolist()
    perplexity, teacher_perplexity = (math.exp(min(x, 700.0)) for x in (nll, teacher_nll))  # exp overflows beyond
    if teacher is None:
        return Scores(perplexity, None, None, tokens), None
    return Scores(perplexity, kl, same, tokens), Scores(teacher_perplexity, 0.0, 1.0, tokens)


def _full_batch(windows: Windows, begin: int, batch_size: int) -> dict[str, Tensor]:
    """A batch of one size, the last one filled up with rows that do not count: a lazy device compiles one graph."""
    ids_BT, counted_BT = (x[begin : begin + batch_size] for x in (windows.input_ids_RT, windows.counted_RT))
    missing = min(batch_size, windows.input_ids_RT.shape[0]) - ids_BT.shape[0]
    if missing:
        ids_BT = torch.cat([ids_BT, ids_BT[:1].expand(missing, -1)])
        counted_BT = torch.cat([counted_BT, torch.zeros_like(counted_BT[:1]).expand(missing, -1)])
    return {"ids": ids_BT, "counted": counted_BT}


def _batch_sums(
    student: nn.Module, teacher: nn.Module | None, ids_BT: Tensor, counted_BT: Tensor, runtime: Runtime
) -> Tensor:
    """Sums over one batch, [4] float64 on the CPU: negative log-likelihood, KL, agreement, the teacher's likelihood."""
    different = [student] if teacher is None or teacher is student else [student, teacher]
    used = [models.hidden_and_head(model, ids_BT, runtime, dtype=torch.float32) for model in different]
    # what stays the same goes round with the sums, as a loop of the device needs it
    same = [x for _, head in used for x in (head.weight_VH, head.bias_V) if x is not None]

    def body(carry: list[Tensor], part: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        (next_C, weight_C, *hiddens), rest = part, list(carry[1:])
        log_probs = []
        for (_, head), hidden_CH in zip(used, hiddens, strict=True):
            weight_VH, bias_V = rest.pop(0), None if head.bias_V is None else rest.pop(0)
            log_probs.append(models.Head(weight_VH, bias_V, head.transform)(hidden_CH).log_softmax(-1))
        nll_C, teacher_nll_C = (-x.gather(1, next_C[:, None]).squeeze(1) for x in (log_probs[0], log_probs[-1]))
        logq_CV, logp_CV = _over_common_ids(log_probs[0], log_probs[-1])
        kl_C = (logp_CV.exp() * (logp_CV - logq_CV)).sum(-1)
        same_C = logp_CV.argmax(-1) == logq_CV.argmax(-1)
        return [
            carry[0] + (torch.stack([nll_C, kl_C, same_C, teacher_nll_C]).double() * weight_C).sum(-1),
            *carry[1:],
        ], []

    sums = torch.zeros(4, dtype=torch.float64, device=ids_BT.device)
    rows = [next_tokens(ids_BT).flatten(), counted_BT.flatten().double(), *(hidden for hidden, _ in used)]
    sums = runtime.loop(body, [sums, *same], rows, CHUNK_TOKENS)[0][0]
    runtime.mark_step("evaluation")
    return sums.cpu()


def _over_common_ids(logq_CV: Tensor, logp_CV: Tensor) -> tuple[Tensor, Tensor]:
    """Both log-probabilities over the ids that both have, renormalised where the other has more."""
    common = min(logq_CV.shape[-1], logp_CV.shape[-1])
    logq_CV, logp_CV = (x if x.shape[-1] == common else x[:, :common].log_softmax(-1) for x in (logq_CV, logp_CV))
    return logq_CV, logp_CV
