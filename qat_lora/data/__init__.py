"""Sources of texts, chats and token ids, and the token rows made of them: packed, split, with answers marked.

Not here: the order in which training uses rows (`cache`), and which predictions an evaluation counts (`evaluate`).
"""

from qat_lora.data.encode import bos_of, encoded, eos_of
from qat_lora.data.rows import TokenRows, pack
from qat_lora.data.source import check_source, fetch_source, read_documents, read_rows, source_words
from qat_lora.data.text import read_texts
from qat_lora.data.tokens import given_rows

__all__ = [
    "TokenRows", "bos_of", "check_source", "encoded", "eos_of", "fetch_source", "given_rows", "pack", "read_documents",
    "read_rows", "read_texts", "source_words",
]  # fmt: skip
