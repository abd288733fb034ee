"""Models and tokenizers of the outside world, found, loaded and written: with `attention`, the door to transformers."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import nn

from qat_lora.errors import ModelError, OutputError, first_line
from qat_lora.models.families import role_of
from qat_lora.models.forward import check_documents, check_head
from qat_lora.models.identity import Identity
from qat_lora.models.placement import Placement

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

EMBEDDED = "embedded"

# What transformers raises at files that it cannot make sense of.
_UNREADABLE = (
    *(OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError),
    *(StrictDataclassError, SafetensorError),
)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode, and all that is known of it before it is changed.

    Attributes:
        model: frozen; quantisation and adapters change it in place.
        tokenizer: the one in the model's folder.
        identity: digests and sizes.
        stored_bits: the width that its weights have on disk.
        context: the positions that it knows; None where there is no bound.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    identity: Identity
    stored_bits: int
    context: int | None

    def check(self, *, seq_len: int, documents: bool = False) -> None:
        """Raise ModelError where the head is not known, or rows of this length, or of several documents, do not fit."""
        if self.context is not None and seq_len > self.context:
            raise ModelError(
                f"rows of seq_len={seq_len} tokens exceed the model's context of {self.context}; use --seq-len "
                f"{self.context}."
            )
        check_head(self.model)
        if documents:
            check_documents(self.model)


def resolve(name: str) -> Path:
    """Return the local folder of a model: the embedded one, a directory, or a hub snapshot, downloaded if need be."""
    if name == EMBEDDED:
        return Path(str(files("qat_lora") / "assets" / "teacher"))
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file() or name.count("/") > 1 or name.startswith((".", "/", "~")) or not name:
        raise ModelError(f"model {name!r} is no directory; give a transformers folder, a hub id, or 'embedded'.")
    return _snapshot(name)


def load(name: str, *, dtype: torch.dtype = torch.float32, placement: Placement | None = None) -> Loaded:
    """Load a causal LM and its tokenizer: frozen, in evaluation mode, with attention that needs no mask.

    On the CPU in `dtype`, or as a `placement` says.
    """
    folder = resolve(name)
    config, vocab_size, context = _config(folder)
    if placement is not None:
        placement.check(folder, config)
    tokenizer = load_tokenizer(folder)
    identity = Identity.of(name, folder, tokenizer, vocab_size, placement.quantization if placement else "")
    if placement is None:
        model = _load_model(folder, dtype)
        _use_plain_linears(model)
    else:
        model = placement.load(functools.partial(_load_model, folder, placement.dtype))
    return Loaded(model.eval().requires_grad_(False), tokenizer, identity, _stored_bits(folder), context)


def identify(name: str) -> Identity:
    """Return the identity of a model without loading its weights."""
    folder = resolve(name)
    _, vocab_size, _ = _config(folder)
    return Identity.of(name, folder, load_tokenizer(folder), vocab_size)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer in a model's folder."""
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):  # transformers would make up an empty one
        raise ModelError(
            f"{folder} holds no tokenizer ({', '.join(_TOKENIZER_FILES)}); add the model's tokenizer files."
        )
    with _readable("tokenizer", folder, "add its tokenizer files"):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def save_pretrained(model: PreTrainedModel, tokenizer: Any, folder: Path) -> None:
    """Write an ordinary transformers folder: config, safetensors, tokenizer."""
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except SafetensorError as error:  # how safetensors says that the disk is full
        raise OutputError(
            f"{folder} cannot be written ({first_line(error)}); free space or give another --output."
        ) from None


@contextlib.contextmanager
def _readable(what: str, folder: Path, fix: str) -> Iterator[None]:
    """Raise ModelError where transformers can make no sense of a folder's files."""
    try:
        yield
    except _UNREADABLE as error:
        raise ModelError(f"no {what} can be read in {folder} ({first_line(error)}); {fix}.") from None


def _config(folder: Path) -> tuple[Any, int, int | None]:
    """A model's config, and of its text decoder the size of the vocabulary and the context."""
    from transformers import AutoConfig

    with _readable("config.json", folder, "add the model's"):
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        of_text = config.get_text_config()  # a composite model's own config has neither
        return config, of_text.vocab_size, getattr(of_text, "max_position_embeddings", None)


def _load_model(folder: Path, dtype: torch.dtype, **words: Any) -> PreTrainedModel:
    """Load the weights of a folder; `words` are a placement's for transformers."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # a model that loads in seconds needs no bar of its own
    memory = "the free memory and --max-memory, " if words else ""
    with _readable("causal LM", folder, f"check config.json and the weights, {memory}or download the model again"):
        model, info = _with_some_attention(folder, dtype=dtype, **words)
    layers = sorted(key for key in info["unexpected_keys"] if key.endswith(".weight") and role_of(key.split(".")[:-1]))
    if layers:
        log.warning("%s holds weights that its config does not use, %s among them", folder, layers[0])
    if info["missing_keys"]:  # transformers would continue with random values
        missing = sorted(info["missing_keys"])
        raise ModelError(f"{folder} lacks {len(missing)} weights, {missing[0]} among them; download the model again.")
    return model


def _with_some_attention(folder: Path, **words: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load with torch's fused attention, or with the family's own where transformers refuses the fused one."""
    from transformers import AutoModelForCausalLM

    refusal = ""
    for attention in ("sdpa", "eager"):
        try:
            model, info = AutoModelForCausalLM.from_pretrained(
                folder, attn_implementation=attention, local_files_only=True, output_loading_info=True, **words
            )
        except ValueError as error:
            if not re.search("attention implementation|attn_implementation", str(error)):
                raise
            refusal = first_line(error)
            continue
        if refusal:
            log.info("%s has no fused attention: its own is used, which takes more memory", type(model).__name__)
        return model, info
    raise ModelError(f"the model in {folder} runs with neither sdpa nor eager attention ({refusal}); use another.")


def _use_plain_linears(model: nn.Module) -> None:
    """Make a family's own kind of Linear torch's, in place, where a trial shows that it computes the same."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and type(module) is not nn.Linear and _computes_linear(module):
            module.__class__ = nn.Linear


@torch.no_grad()
def _computes_linear(module: nn.Linear) -> bool:
    """Whether a module with its own settings, and a small weight, computes what a Linear of that weight does."""
    small, has_bias = copy.copy(module), module._parameters.get("bias") is not None
    plain = nn.Linear(3, 2, bias=has_bias, device="meta")
    plain.weight = nn.Parameter(torch.tensor([[1.0, -2.0, 0.5], [0.25, 3.0, -1.0]], device="cpu"))
    if has_bias:
        plain.bias = nn.Parameter(torch.tensor([0.5, -4.0], device="cpu"))
    small.in_features, small.out_features, small._parameters = 3, 2, plain._parameters
    x = torch.linspace(-3.0, 5.0, 15, device="cpu").pow(3).view(5, 3)
    try:
        return torch.allclose(small(x), plain(x))
    except (TypeError, AttributeError, RuntimeError):
        return False


def _stored_bits(folder: Path) -> int:
    """Bits of one value of the first tensor on disk, from the header of its file."""
    with safe_open(sorted(folder.glob("*.safetensors"))[0], framework="pt") as stored:
        dtype = stored.get_slice(next(iter(stored.keys()))).get_dtype()  # such as F32, BF16, F8_E4M3
    return int("".join(c for c in dtype.split("_")[0] if c.isdigit()))


def _snapshot(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (LocalEntryNotFoundError, ConnectionError) as error:
        raise ModelError(
            f"model {name!r} is not in the local hub cache and the hub cannot be reached ({first_line(error)}); "
            "connect to the network, or give a local directory."
        ) from None
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ModelError(
            f"model {name!r} cannot be had from the hub ({first_line(error)}); check the id, or log in if it is gated."
        ) from None
