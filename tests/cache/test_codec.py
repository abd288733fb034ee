"""Packed bits against Python's own integers, and fields there and back."""

from __future__ import annotations

import numpy as np
import pytest

from qat_lora.cache.bits import pack, unpack
from qat_lora.cache.codec import decoded, encoded
from tests.cache.conftest import blocks_of, manifest_of


def packed_by_hand(values: list[int], bits: int) -> bytes:
    """One large integer whose lowest bits are the first value's."""
    whole = sum(value << (place * bits) for place, value in enumerate(values))
    return whole.to_bytes(-(-len(values) * bits // 8), "little")


@pytest.mark.parametrize("bits", range(1, 33))
@pytest.mark.parametrize("count", [1, 7, 8, 9, 40])
def test_bits_lie_where_one_large_integer_has_them(bits, count) -> None:
    source = np.random.RandomState(bits * 100 + count)
    values_RN = source.randint(0, 2**bits, (3, count), dtype=np.int64)
    values_RN[0] = 2**bits - 1
    packed_RP = pack(values_RN, bits)
    assert packed_RP.dtype == np.uint8
    for values, packed in zip(values_RN, packed_RP, strict=True):
        assert packed.tobytes() == packed_by_hand(values.tolist(), bits)
    assert np.array_equal(unpack(packed_RP, bits, count), values_RN)


@pytest.mark.parametrize("vocab_size", [5, 29, 32, 4096, 65537, 151936])
def test_fields_are_read_as_they_were_given(vocab_size) -> None:
    manifest = manifest_of(blocks_of(2), vocab_size=vocab_size)
    source = np.random.RandomState(0)
    fields = {
        name: source.randint(0, vocab_size, shape).astype(dtype) for name, (shape, dtype) in manifest.fields(3).items()
    }
    fields["topk_ids"][0] = vocab_size - 1
    tensors = encoded(manifest, fields)
    assert {name: (x.shape, x.dtype) for name, x in tensors.items()} == manifest.tensors(3)
    found = decoded(manifest, tensors)
    assert {name: (x.shape, x.dtype) for name, x in found.items()} == manifest.fields(3)
    for name, x in fields.items():
        assert np.array_equal(found[name], x), name
