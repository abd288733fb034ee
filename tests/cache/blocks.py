"""Token rows as tensors, for the tests of this folder."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from qat_lora.data import TokenRows


class Blocks(NamedTuple):
    """Rows of which none is held out."""

    input_ids_RT: Tensor
    lengths_R: Tensor
    starts_RT: Tensor | None = None

    @property
    def length_R(self) -> Tensor:
        return self.lengths_R

    def digest(self) -> str:
        starts_RT = None if self.starts_RT is None else self.starts_RT.numpy()
        held_out_R = np.zeros(len(self.lengths_R), bool)
        return TokenRows(self.input_ids_RT.numpy(), self.lengths_R.numpy(), starts_RT, held_out_R).digest()
