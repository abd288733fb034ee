"""Sources of texts and of token ids, and fixed-length token rows."""

from qat_lora.data.blocks import Blocks, Document, tokenize_blocks
from qat_lora.data.documents import check_source, fetch_source, read_documents, source_words
from qat_lora.data.text import read_texts
from qat_lora.data.tokens import rows_stay, token_blocks

__all__ = [
    "Blocks",
    "Document",
    "check_source",
    "fetch_source",
    "read_documents",
    "read_texts",
    "rows_stay",
    "source_words",
    "token_blocks",
    "tokenize_blocks",
]
