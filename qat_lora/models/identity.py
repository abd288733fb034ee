"""Digests of models and tokenizers, by which a cache and a run know that they are of the same ones."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from qat_lora.errors import ModelError


def tokenizer_size(tokenizer: Any) -> int:
    """The greatest id that a tokenizer can give, plus 1."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


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
