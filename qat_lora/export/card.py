"""The model card of an export: YAML that model hubs read, what the numbers are, and lines of Python that load it.

The lines run as they are in the folder of the card, wherever that folder has been moved to.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qat_lora.evaluate import Fidelity, Size
from qat_lora.files import write_atomically

# What a folder is -> its first sentence.
_SENTENCES = {
    "dequantized": "The rounded weights of a quantised student, in float32. Its logits are the student's, bit for bit.",
    "merged": "A quantised student with its recovery adapters folded into the weights, in float32. Its logits are the "
    "student's up to the rounding of that sum.",
    "pair": "A quantised student: rounded weights in float32 (`base`) and recovery adapters (`adapter`). Together their"
    " logits are the student's, bit for bit. There is no model at the top of this folder on purpose: a loader "
    "without peft would lose the adapters without a word.",
    "base": "The rounded weights of a quantised student, WITHOUT its recovery adapters: alone they are not the student."
    " Load them with the folder `adapter` beside this one.",
    "adapter": "Recovery adapters of a quantised student. They belong on the rounded weights in the folder `base` "
    "beside this one, and on no other model: on the full-precision model they load without an error and are wrong.",
    "adapter alone": "Recovery adapters of a quantised student, without the rounded weights that they belong on. They "
    "belong on no other model: on the full-precision model they load without an error and are wrong. Make their base "
    "first, in the folder that holds the run's, and move the folder `dequantized` into this one:",
}


@dataclass(frozen=True)
class Facts:
    """What a card says of a student.

    Attributes:
        teacher: name of the full-precision model.
        checkpoint: the file that was exported, as its run's folder and its name.
        scheme: the form of the weights, in words.
        size: bits per weight, adapters apart.
        data: the text of the cache that it was trained on.
        held_out_kl: on held-out rows of that cache; None where the checkpoint does not say.
        fidelity: rows that `qat-lora eval` has measured of this checkpoint.
    """

    teacher: str
    checkpoint: str
    scheme: str
    size: Size
    data: str
    held_out_kl: float | None
    fidelity: Sequence[Fidelity]

    @property
    def base_to_make(self) -> str:
        """What adapter_config.json names where the base lies nowhere yet; no loader takes it for a model."""
        return f"base of: {_command(self.checkpoint)}"


def write_card(folder: Path, facts: Facts, *, what: str, base: str, adapter: str = "") -> None:
    """Write README.md; `base` and `adapter` are paths as seen from the folder."""
    parts = [
        _front_matter(facts, what, base),
        f"# {what} of {Path(facts.teacher).name}".replace("pair", "quantised student"),
        _SENTENCES[what],
        *([f"    {_command(facts.checkpoint)}"] if what == "adapter alone" else []),
        "Run in this folder:",
        f"```python\n{_loading_lines(base, adapter)}\n```",
        _facts(facts),
        *([_fidelity(facts.fidelity)] if facts.fidelity else []),
    ]
    text = "\n\n".join(parts) + "\n"
    write_atomically(folder / "README.md", lambda stream: stream.write(text.encode()))


def _command(checkpoint: str) -> str:
    return f"qat-lora export --checkpoint {checkpoint} --format dequantized --output dequantized"


def _front_matter(facts: Facts, what: str, base: str) -> str:
    is_adapter = what in ("adapter", "adapter alone")
    lines = [f"library_name: {'peft' if is_adapter else 'transformers'}", "pipeline_tag: text-generation"]
    if what == "adapter":
        lines += [f"base_model: {base}", "base_model_relation: adapter"]
    elif not is_adapter and _is_hub_id(facts.teacher):
        lines += [f"base_model: {facts.teacher}", "base_model_relation: quantized"]
    return "\n".join(["---", *lines, "tags: [qat_lora]", "---"])


def _is_hub_id(name: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not name.startswith(".") and not Path(name).exists()


def _loading_lines(base: str, adapter: str) -> str:
    model = f'AutoModelForCausalLM.from_pretrained("{base}", dtype="float32")'
    ids = 'tokenizer("Once", return_tensors="pt").input_ids'
    lines = [
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n",
        f'tokenizer = AutoTokenizer.from_pretrained("{base}")',
        f"model = {model}",
        f"print(tokenizer.decode(model.generate({ids}, max_new_tokens=20)[0]))",
    ]
    if adapter:
        lines[0] = f"from peft import PeftModel\n{lines[0]}"
        lines[2] = f'base = {model}\nmodel = PeftModel.from_pretrained(base, "{adapter}")'
    return "\n".join(lines)


def _facts(facts: Facts) -> str:
    adapter_bits = facts.size.adapter_bits
    bits = f"{facts.size.bits_per_weight - adapter_bits:.2f}" + (f" + {adapter_bits:.2f} adapters" * bool(adapter_bits))
    kl = "not recorded" if facts.held_out_kl is None else f"{facts.held_out_kl:.4f} nats per token"
    return "\n".join(
        [
            f"- quantised from: `{Path(facts.teacher).name if Path(facts.teacher).is_dir() else facts.teacher}`",
            f"- form: {facts.scheme}",
            f"- bits per weight, scales counted: {bits}. This folder holds float32: it is exact, not small.",
            f"- trained on: {facts.data}",
            f"- held-out KL on rows of that text: {kl}",
        ]
    )


def _fidelity(rows: Sequence[Fidelity]) -> str:
    lines = ["| data | tokens per row | perplexity | KL | top-1 |", "|---|---:|---:|---:|---:|"]
    for row in rows:
        kl, top1 = ("-" if x is None else format(x, spec) for x, spec in ((row.kl, ".4f"), (row.top1, ".1%")))
        lines.append(f"| {row.data} | {row.seq_len} | {row.perplexity:.2f} | {kl} | {top1} |")
    return "\n".join(lines)
