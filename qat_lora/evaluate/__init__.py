"""How far a student is from its teacher: perplexity, KL(teacher || student) at T = 1, top-1 agreement, size."""

from qat_lora.evaluate.cached import cached_kl
from qat_lora.evaluate.fidelity import Fidelity, measure
from qat_lora.evaluate.size import Size, size_of
from qat_lora.evaluate.table import fidelity_table, read_fidelity, write_fidelity
from qat_lora.evaluate.windows import Windows, stream_windows, text_windows, whole_windows

__all__ = [
    "Fidelity", "Size", "Windows", "cached_kl", "fidelity_table", "measure", "read_fidelity", "size_of",
    "stream_windows", "text_windows", "whole_windows", "write_fidelity",
]  # fmt: skip
