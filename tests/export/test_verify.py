"""What verification must see: a merge that is wrong, and ids from all over the vocabulary."""

from __future__ import annotations

import pytest
import torch

from qat_lora import models
from qat_lora.errors import ExportMismatch
from qat_lora.export.verify import probe_ids, verify_export


def test_a_merge_may_round_its_weights_once_more_and_no_worse(teacher_dir) -> None:
    student = models.load(str(teacher_dir)).model
    weights = [student.get_submodule(name).weight for name in models.target_linears(student)]
    with torch.no_grad():
        torch._foreach_mul_(weights, 1 + 1e-6)
        assert 0 < verify_export(student, teacher_dir, exact=False) < 1e-4
        torch._foreach_mul_(weights, 1.1)
    with pytest.raises(ExportMismatch, match="differs from the student by"):
        verify_export(student, teacher_dir, exact=False)


@pytest.mark.parametrize("vocab_size", [211, 32003, 151936])
def test_the_probe_has_different_ids_from_every_part_of_the_vocabulary(vocab_size) -> None:
    ids = probe_ids(vocab_size)
    assert ids.shape == (2, 32)
    assert len(set(ids.flatten().tolist())) == 64
    assert set((ids.flatten() * 16 // vocab_size).tolist()) == set(range(16))
