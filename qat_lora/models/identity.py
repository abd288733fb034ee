"""What a model is, wherever it is stored: digests of weights and tokenizer, which caches and runs are compared by."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qat_lora.errors import ModelError


@dataclass(frozen=True)
class Identity:
    """What a model is, independent of where it is stored.

    Attributes:
        name: as it was asked for.
        weights: digest of the weight files, with ":8bit" or ":4bit" behind it where they were quantised on loading.
        tokenizer: digest of the tokenizer.
        vocab_size: V, rows of the embedding and width of the logits.
        tokenizer_size: the tokenizer's greatest id + 1. Ids from there up to V, if any, are padding: no text has them.
    """

    name: str
    weights: str
    tokenizer: str
    vocab_size: int
    tokenizer_size: int

    @classmethod
    def of(cls, name: str, folder: Path, tokenizer: Any, vocab_size: int, quantization: str = "") -> Identity:
        """Identify the weights in a folder; `quantization` is what loading did to them."""
        weights = weights_digest(folder) + (f":{quantization}" if quantization else "")
        tokenizer_size = max(tokenizer.get_vocab().values(), default=-1) + 1
        return cls(name, weights, tokenizer_digest(tokenizer), vocab_size, tokenizer_size)


def weights_digest(folder: Path) -> str:
    """sha256 over the weight files of a model folder, in the order of their names."""
    weight_files = sorted(folder.glob("*.safetensors"))
    if not weight_files:
        raise ModelError(f"{folder} holds no *.safetensors weights; save the model with safe_serialization.")
    digest = hashlib.sha256()
    for path in weight_files:
        with path.open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def tokenizer_digest(tokenizer: Any) -> str:
    """sha256 over what a tokenizer does to text: its serialised pipeline, else its vocabulary; no paths."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        tree = json.loads(backend.to_str())
        tree["truncation"] = tree["padding"] = None  # set by use, no part of the identity
        text = json.dumps(tree, sort_keys=True)
    else:
        text = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(text.encode()).hexdigest()
