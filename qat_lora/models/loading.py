"""Models and tokenizers of the outside world: find, load, identify, take apart into trunk and head.

The only file that imports transformers. A *trunk* maps ids to the last hidden state; a *head* maps hidden states to
logits. Training keeps the two apart because the [B, T, V] logits of a whole batch must never exist at once.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn

from qat_lora.errors import ModelError, OutputError
from qat_lora.models.identity import tokenizer_digest, tokenizer_size, weights_digest
from qat_lora.models.lean.attention import causal_attention
from qat_lora.models.lean.layers import Scan, ScannedLayers, why_unlike
from qat_lora.models.packing import packing_known
from qat_lora.models.placement import Placement, at_hand

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

EMBEDDED = "embedded"
_CHUNKED = "qat_lora_chunked"  # the name that transformers knows our attention by

# What transformers raises at files that it cannot make sense of.
_UNREADABLE = (
    *(OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError),
    StrictDataclassError,
)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_ATTENTION_WORDS = ("attn", "attention")
_ROUTERS = ("gate", "router", "shared_expert_gate")  # a mixture's choice of experts is small and must stay exact
_MLP_WORDS = ("mlp", "feed_forward", "ffn", "experts", "block_sparse_moe")


@dataclass(frozen=True)
class Identity:
    """What a model is, independent of where it lies.

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


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode, its tokenizer and identity; `stored_bits` is the width its weights have on disk."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    identity: Identity
    stored_bits: int


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
    if placement is not None:
        placement.check(folder)
    tokenizer = load_tokenizer(folder)
    weights = weights_digest(folder)
    if placement is None:
        model = _load_model(folder, dtype)
    else:
        model = placement.loaded(functools.partial(_load_model, folder, placement.dtype))
        weights += f":{placement.quantization}" if placement.quantization else ""
    size = tokenizer_size(tokenizer)
    identity = Identity(name, weights, tokenizer_digest(tokenizer), model.config.get_text_config().vocab_size, size)
    return Loaded(model.eval().requires_grad_(False), tokenizer, identity, _stored_bits(folder))


def identify(name: str) -> Identity:
    """Return the identity of a model without loading its weights."""
    from transformers import AutoConfig

    folder = resolve(name)
    tokenizer = load_tokenizer(folder)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        vocab_size = config.get_text_config().vocab_size  # as in `load`: a composite model's own config has none
    except _UNREADABLE as error:
        raise ModelError(f"no config.json can be read in {folder} ({_first_line(error)}); add the model's.") from None
    size = tokenizer_size(tokenizer)
    return Identity(name, weights_digest(folder), tokenizer_digest(tokenizer), vocab_size, size)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer that lies with a model."""
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):  # transformers would make up an empty one
        raise ModelError(
            f"{folder} holds no tokenizer ({', '.join(_TOKENIZER_FILES)}); add the model's tokenizer files."
        )
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except _UNREADABLE as error:
        raise ModelError(
            f"no tokenizer can be read in {folder} ({_first_line(error)}); add its tokenizer files."
        ) from None


def causal_lm(model: nn.Module) -> PreTrainedModel:
    """Return the transformers causal LM inside a model that peft may have wrapped."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def trunk_hidden(model: nn.Module, input_ids_BT: Tensor, position_ids_BT: Tensor | None = None) -> Tensor:
    """Last hidden state [B, T, H] after the final norm.

    Rows are causal and padded on the right, so no mask is needed. Where `position_ids_BT` (int64) begin anew within a
    row, attention does too. Transformers sees this in the positions and masks what each kind of its layers must not
    see; our own attention does it by the positions, which are brought to it in the place of a mask.
    """
    lm = causal_lm(model)
    given: dict[str, Tensor] = {}
    if position_ids_BT is not None:
        given["position_ids"] = position_ids_BT
        if lm.config.get_text_config()._attn_implementation == _CHUNKED:
            given["attention_mask"] = position_ids_BT[:, None, :, None]  # one of four sides is handed on as it is
    with packing_known(position_ids_BT is not None):
        return lm.base_model(input_ids=input_ids_BT, use_cache=False, **given).last_hidden_state


def use_chunked_attention(model: nn.Module) -> None:
    """Replace torch's attention by `lean.attention`; raises ModelError where a model's own does more than that.

    It has no mask, so transformers builds none. In doing so it would look whether rows are packed, a host read in every
    forward, which on XLA cuts the graph in the middle.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(_CHUNKED, _chunked_attention)
    lm = causal_lm(model)
    lm.set_attn_implementation(_CHUNKED)
    if lm.config.get_text_config()._attn_implementation != _CHUNKED:
        raise ModelError(f"{type(lm).__name__} does not let its attention be replaced, which XLA needs; use --device.")


def _chunked_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """Transformers' interface: [B, heads, T, D] in, [B, T, heads, D] out; see `trunk_hidden` for the mask."""
    position_BT = None
    if attention_mask is not None and attention_mask.dtype == torch.int64:
        position_BT, attention_mask = attention_mask[:, 0, :, 0], None
    odd = [name for name in ("softcap", "s_aux", "position_bias") if settings.get(name) is not None]
    if odd or settings.get("dropout") or attention_mask is not None or not getattr(module, "is_causal", True):
        what = odd[0] if odd else "dropout, a mask or no causality"
        raise ModelError(f"{type(module).__name__} computes attention with {what}, which is not known on XLA.")
    scaling = settings.get("scaling") or query.shape[-1] ** -0.5
    window = settings.get("sliding_window")
    output = causal_attention(query, key, value, scaling=scaling, window=window, position_BT=position_BT)
    return output.transpose(1, 2), None


def checkpoint_layers(model: nn.Module, checkpoint: Callable[..., Tensor]) -> None:
    """Let `checkpoint` run every decoder layer in training: called with the layer's forward and its hidden states."""
    lm = causal_lm(model)
    if not has_checkpointing(model):
        raise ModelError(f"{type(lm).__name__} has no gradient checkpointing; use --gradient-checkpointing off.")
    lm._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=checkpoint)
    lm.enable_input_require_grads()  # else a reentrant checkpoint of frozen inputs drops the gradients inside it


def has_checkpointing(model: nn.Module) -> bool:
    """Whether `checkpoint_layers` can be done."""
    return bool(causal_lm(model).supports_gradient_checkpointing)


def activation_bytes(model: nn.Module, tokens: int, compute: torch.dtype, *, lean: bool) -> int:
    """About what backward keeps of `tokens` tokens without checkpointing, in bytes.

    Per layer and token, in the compute dtype: residuals, norms and their inputs (8 H), queries, keys, values and
    attention's output twice (4 heads * D), the MLP's products (5 I); and float32 copies for the norms and adapters
    (half as much again). With lean norms and MLPs: the residuals (2 H), queries and keys before and after their turn,
    values, attention's output as it is and as the next product reads it, and the MLP's two factors.
    """
    config = causal_lm(model).config.get_text_config()
    heads = config.num_attention_heads
    head_width = getattr(config, "head_dim", None) or config.hidden_size // heads
    queries, keys = head_width * heads, head_width * (getattr(config, "num_key_value_heads", None) or heads)
    if lean:
        values = 2.0 * config.hidden_size + 4 * queries + 3 * keys + 2 * config.intermediate_size
    else:
        values = 1.5 * (8 * config.hidden_size + 4 * queries + 5 * config.intermediate_size)
    return int(config.num_hidden_layers * tokens * values * compute.itemsize)


def scan_decoder(model: nn.Module, scan: Scan) -> None:
    """Let `scan` run the decoder's layers, in place, once the model is quantised and adapted.

    Names, state dict and peft's structure stay as they are: only the list that the trunk loops over is another class.
    Raises ModelError where the layers are not alike.
    """
    lm = causal_lm(model)
    layers = getattr(lm.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        raise ModelError(f"{type(lm.base_model).__name__} has no list of layers to scan; drop --scan-layers.")
    if reason := why_unlike(list(layers), lm.config.get_text_config()):
        raise ModelError(f"the decoder's layers cannot be scanned: {reason}; drop --scan-layers.")
    lm.base_model.layers = ScannedLayers(layers, scan)


def head_parts(model: nn.Module, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Callable[[Tensor], Tensor] | None]:
    """The head as (weight [V, H], bias [V] or None, what follows on the logits or None), the first two in `dtype`.

    What follows is the scale of Cohere and Granite and the soft cap of Gemma, as the model's config names them.
    """
    lm = causal_lm(model)
    layer, config = lm.get_output_embeddings(), lm.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    softcap = float(getattr(config, "final_logit_softcapping", None) or 0.0)

    def transform(logits: Tensor) -> Tensor:
        scaled = logits * scale
        return softcap * torch.tanh(scaled / softcap) if softcap else scaled

    plain = scale == 1.0 and not softcap
    with at_hand(layer):
        bias = getattr(layer, "bias", None)
        return layer.weight.to(dtype), None if bias is None else bias.to(dtype), None if plain else transform


def check_head(model: nn.Module) -> None:
    """Raise ModelError where trunk and head together do not give the logits of the model's own forward."""
    with torch.no_grad():
        first = next(model.parameters())
        ids_BT = torch.arange(8, device="cpu" if first.is_meta else first.device)[None]  # hooks fetch both
        own = causal_lm(model)(input_ids=ids_BT, use_cache=False).logits.float().cpu()
        hidden_BTH = trunk_hidden(model, ids_BT)
        weight_VH, bias_V, transform = head_parts(model, hidden_BTH.dtype)
        ours = nn.functional.linear(hidden_BTH.to(weight_VH.device), weight_VH, bias_V).float()
        ours = (ours if transform is None else transform(ours)).cpu()
    # another order of operations; a missing scale or cap is far off
    tolerance = max(1e-4, 4 * torch.finfo(hidden_BTH.dtype).eps)
    if not torch.allclose(own, ours, rtol=tolerance, atol=tolerance):
        raise ModelError(
            f"{type(causal_lm(model)).__name__} does something to its logits that qat_lora does not know (largest "
            f"difference {(own - ours).abs().max():.3g}); add it to qat_lora.models.head_parts."
        )


def check_context(model: nn.Module, seq_len: int) -> None:
    """Raise ModelError where rows are longer than the context that the model knows."""
    context = getattr(causal_lm(model).config.get_text_config(), "max_position_embeddings", None)
    if context is not None and seq_len > context:
        raise ModelError(
            f"rows of seq_len={seq_len} tokens exceed the model's context of {context}; use --seq-len {context}."
        )


def target_linears(model: nn.Module) -> dict[str, str]:
    """Names of the block Linears and their role, ``attention`` or ``mlp``, in model order.

    Embeddings, the head and anything outside the decoder's layers are left alone.
    """
    head = causal_lm(model).get_output_embeddings()
    found = {name: role for name, role, layer in _block_linears(model) if layer is not head}
    fused = [name for name, p in model.named_parameters() if p.dim() > 2 and _role(name.split(".")) == "mlp"]
    if fused:
        raise ModelError(
            f"{fused[0]} holds the experts of a mixture in one tensor, which cannot be quantised; use a dense model."
        )
    if not found:
        kinds = sorted({type(m).__name__ for m in model.modules() if hasattr(m, "weight")})
        raise ModelError(
            f"{type(model).__name__} has no nn.Linear in an attention or MLP block (its layers: {', '.join(kinds)}); "
            "use a model whose blocks are made of nn.Linear, such as Llama or Qwen3."
        )
    return found


def save_pretrained(model: PreTrainedModel, tokenizer: Any, folder: Path) -> None:
    """Write an ordinary transformers folder: config, safetensors, tokenizer."""
    from safetensors import SafetensorError

    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except SafetensorError as error:  # how safetensors says that the disk is full
        raise OutputError(
            f"{folder} cannot be written ({_first_line(error)}); free space or give another --output."
        ) from None


def _block_linears(model: nn.Module) -> Iterator[tuple[str, str, nn.Linear]]:
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear) or ".lora_" in name:  # peft's own Linears are no part of the model
            continue
        *parts, last = name.split(".")
        if last in _ROUTERS:
            continue
        role = _role(parts)
        if role is not None:
            yield name, role, layer


def _role(parts: Sequence[str]) -> str | None:
    """``attention`` or ``mlp`` by the names of the modules around a layer; None outside the blocks."""
    if any(word in part for part in parts for word in _ATTENTION_WORDS):
        return "attention"
    return "mlp" if any(word in part for part in parts for word in _MLP_WORDS) else None


def _load_model(folder: Path, dtype: torch.dtype, **placed: Any) -> PreTrainedModel:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # a model that loads in seconds needs no bar of its own
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True, output_loading_info=True, **placed
        )
    except (*_UNREADABLE, SafetensorError) as error:
        raise ModelError(
            f"no causal LM can be read in {folder} ({_first_line(error)}); check config.json and the weights, "
            f"{'the free memory and --max-memory, ' if placed else ''}or download the model again."
        ) from None
    if layers := sorted(key for key in info["unexpected_keys"] if _role(key.split(".")) and key.endswith(".weight")):
        log.warning("%s holds weights that its config does not use, %s among them", folder, layers[0])
    if info["missing_keys"]:  # transformers would go on with random values
        missing = sorted(info["missing_keys"])
        raise ModelError(f"{folder} lacks {len(missing)} weights, {missing[0]} among them; download the model again.")
    return model


def _stored_bits(folder: Path) -> int:
    """Bits of one value of the first tensor on disk, from the header of its file."""
    from safetensors import safe_open

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
            f"model {name!r} is not in the local hub cache and the hub cannot be reached ({_first_line(error)}); "
            "connect to the network, or give a local directory."
        ) from None
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ModelError(
            f"model {name!r} cannot be had from the hub ({_first_line(error)}); check the id, or log in if it is gated."
        ) from None


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:160] if text else type(error).__name__
