"""Text sources and fixed-length token rows."""

from qat_lora.data.blocks import Blocks, tokenize_blocks
from qat_lora.data.text import read_texts

__all__ = ["Blocks", "read_texts", "tokenize_blocks"]
