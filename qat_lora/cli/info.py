"""What `qat-lora cache info` prints."""

from __future__ import annotations

from rich.table import Table

from qat_lora.cache import CacheSummary

_NORMALIZERS = {
    "estimated": "log-sum-exp and tail are estimates from uniform samples: see source",
    "candidates": "over the candidates alone, so that each is too probable (biased)",
}


def cache_table(summary: CacheSummary) -> Table:
    """What `qat-lora cache info` prints: one line per fact."""
    index, manifest = summary.index, summary.index.manifest
    table = Table(show_header=False)
    of_how_many = ", on average" if manifest.store == "sampled" else ""
    state = "complete" if index.complete else f"unfinished: {len(index.shards)} of {manifest.shard_count} shards"
    how = f" in {manifest.teacher_quantization}" if manifest.teacher_quantization else ""
    facts = {
        "teacher": f"{manifest.teacher} (weights {manifest.teacher_weights[:12]}{how}, V = {manifest.vocab_size:,})",
        "vocabulary": _vocabulary(manifest.vocab_size, manifest.tokenizer_size),
        "source": f"{manifest.source} (rows {manifest.source_digest[:12]})",
        "rows": f"{index.rows:,} of {manifest.rows:,}, of {manifest.seq_len} tokens; {summary.tokens:,} valid tokens",
        "packing": manifest.packing,
        "state": state,
        "stored": f"{manifest.contents}, {_how(summary)}; T = {', '.join(map(str, manifest.temperatures))}",
        **({} if manifest.normalizer == "exact" else {"normalised": _NORMALIZERS[manifest.normalizer]}),
        "kept mass": f"{summary.kept_mass:.5f} of the teacher's probability{of_how_many}",
        "entropy": f"{summary.entropy:.3f} nats per token{' at least' if manifest.store == 'topk' else ''}",
        "on disk": f"{index.size_bytes / 1e6:,.1f} MB in {len(index.shards)} shards",
        "bytes per token": f"{sum(summary.bytes_per_token.values()):.1f}",
    }
    for name, fact in facts.items():
        table.add_row(name, fact)
    for name, size in summary.bytes_per_token.items():
        table.add_row(f"  {name}", f"{size:.2f}")
    return table


def _how(summary: CacheSummary) -> str:
    manifest = summary.index.manifest
    if manifest.store == "topk":
        cost = f" on a grid that costs {summary.grid_kl:.1e} nats per token" if summary.grid_kl else ""
        return f"log-probabilities in {manifest.logprob_bits} bits{cost}"
    if manifest.store == "sampled":
        return f"drawn at T = {manifest.proposal_temperature:g} with seed {manifest.sampling_seed}"
    return "float32"


def _vocabulary(vocab_size: int, tokenizer_size: int) -> str:
    if not tokenizer_size:  # of a converted cache whose tokenizer nobody named
        return f"{vocab_size:,} ids"
    padding = max(0, vocab_size - tokenizer_size)
    return f"{tokenizer_size:,} ids of the tokenizer, {padding:,} of padding, of which a student may have more or fewer"
