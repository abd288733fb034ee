"""Rows of several documents: positions by hand, what is stored of them, and which labels are none."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from qat_lora.cache import (
    CacheWriter,
    KDCacheDataset,
    build_cache,
    load_manifest,
    summarise,
)
from qat_lora.cache.codec import decoded, encoded
from qat_lora.errors import CacheMismatch, ConfigError
from qat_lora.kd import label_mask
from qat_lora.kd.positions import document_positions
from tests.cache.blocks import Blocks
from tests.cache.conftest import SEQ_LEN, TinyTeacher, blocks_of, manifest_of
from tests.cache.test_build import Interrupted, contents, stop_after

ROWS = 7


def starts_of(rows: int, seq_len: int = SEQ_LEN, seed: int = 3) -> torch.Tensor:
    starts = np.random.RandomState(seed).rand(rows, seq_len) < 0.4
    starts[:, 0] = True
    return torch.from_numpy(starts)


def packed_blocks(rows: int = ROWS, *, last_length: int = 3) -> Blocks:
    return blocks_of(rows, last_length=last_length)._replace(starts_RT=starts_of(rows))


class DocumentTeacher(TinyTeacher):
    """Looks at the current token, at its position, and at the first token of its document."""

    def __call__(self, input_ids_BT, position_ids_BT):
        self.shapes.append((tuple(input_ids_BT.shape), position_ids_BT.dtype))
        first_BT = input_ids_BT.gather(1, torch.arange(input_ids_BT.shape[1]) - position_ids_BT)
        place_BT1 = position_ids_BT[..., None].float()
        return self.embedding_VH[input_ids_BT] + 0.5 * self.embedding_VH[first_BT] + 0.1 * place_BT1


def build(directory, *, blocks=None, progress=None, **changes):
    blocks, teacher = packed_blocks() if blocks is None else blocks, DocumentTeacher()
    writer = CacheWriter(directory, manifest_of(blocks, **({"packing": "documents"} | changes)))
    build_cache(teacher, teacher.head, blocks, writer, batch_size=2, chunk_tokens=4, progress=progress)
    writer.finish()
    return teacher


def positions_by_hand(starts) -> list[list[int]]:
    found = []
    for row in starts:
        place, positions = -1, []
        for t, begins in enumerate(row):
            place = 0 if begins or t == 0 else place + 1
            positions.append(place)
        found.append(positions)
    return found


@pytest.mark.parametrize("seq_len", [1, 5, 8, 33])
def test_positions_count_from_the_last_start(seq_len) -> None:
    starts = starts_of(20, seq_len).numpy()
    starts[0, 0] = False
    found = document_positions(starts)
    assert found.dtype == np.int64
    assert found.tolist() == positions_by_hand(starts)


@pytest.mark.parametrize("seq_len", [5, 8, 17])
def test_a_start_takes_a_bit(seq_len) -> None:
    blocks = blocks_of(4, seq_len=seq_len)
    manifest = manifest_of(blocks, packing="documents", source_digest="")
    plain = manifest_of(blocks)
    assert manifest.bytes_per_row - plain.bytes_per_row == math.ceil(seq_len / 8)
    fields = {name: np.zeros(*spec) for name, spec in manifest.fields(4).items()}
    fields["starts"] = starts_of(4, seq_len).numpy()
    tensors = encoded(manifest, fields)
    assert {name: (x.shape, x.dtype) for name, x in tensors.items()} == manifest.tensors(4)
    by_hand = [sum(int(bit) << t for t, bit in enumerate(row)) for row in fields["starts"]]
    assert [int.from_bytes(row.tobytes(), "little") for row in tensors["starts"]] == by_hand
    found = decoded(manifest, tensors)["starts"]
    assert found.dtype == bool and np.array_equal(found, fields["starts"])


@pytest.mark.parametrize("preload", [False, True])
def test_rows_are_read_with_the_positions_of_their_documents(tmp_path, preload) -> None:
    build(tmp_path)
    dataset = KDCacheDataset(tmp_path, preload=preload)
    wanted = torch.tensor(positions_by_hand(starts_of(ROWS).tolist()))
    assert (wanted == 0).sum() > ROWS, "rows of one document alone prove nothing"
    for row in range(ROWS):
        assert torch.equal(dataset[row]["position_ids"], wanted[row])
    batch = next(dataset.batches(3))
    assert torch.equal(batch["position_ids"], wanted[torch.from_numpy(dataset.batch_rows(3, 0))])
    assert batch["position_ids"].dtype == torch.int64
    (last,) = list(dataset.eval_batches(8))
    assert torch.equal(last["position_ids"], wanted[[*range(ROWS), 0]])
    assert last["length"].tolist() == [SEQ_LEN] * (ROWS - 1) + [3, 0]


def test_the_teacher_is_given_the_positions(tmp_path) -> None:
    teacher = build(tmp_path)
    assert set(teacher.shapes) == {((2, SEQ_LEN), torch.int64)}
    dataset, live = KDCacheDataset(tmp_path), DocumentTeacher()
    for row in range(ROWS):
        item = dataset[row]
        logits = live.head(live(item["input_ids"][None], item["position_ids"][None])[0])
        assert torch.equal(item["topk_ids"], logits.topk(4, -1).indices)
        expected = logits.log_softmax(-1).topk(4, -1).values
        torch.testing.assert_close(item["topk_logprobs"], expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("calls", [1, 3, 4])
def test_an_interrupted_build_ends_with_the_same_bytes(tmp_path, calls) -> None:
    build(tmp_path / "whole")
    with pytest.raises(Interrupted):
        build(tmp_path / "stopped", progress=stop_after(calls))
    build(tmp_path / "stopped")
    assert contents(tmp_path / "stopped") == contents(tmp_path / "whole")


def test_only_caches_of_documents_hold_starts(tmp_path) -> None:
    build(tmp_path / "documents")
    assert load_file(tmp_path / "documents" / "shard-00000.safetensors")["starts"].dtype == np.uint8
    for packing in ("stream", "pad"):
        manifest = manifest_of(blocks_of(3), packing=packing)
        assert "starts" not in manifest.tensors(3) and "starts" not in manifest.fields(3)
    assert load_manifest(tmp_path / "documents").packing == "documents"


def test_rows_that_lack_starts_or_have_them_for_nothing_are_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="packing='documents', but the rows lack starts"):
        build(tmp_path / "a", blocks=blocks_of(4))
    with pytest.raises(ValueError, match="packing='stream'"):
        build(tmp_path / "b", packing="stream")


def test_another_packing_is_another_cache(tmp_path) -> None:
    build(tmp_path)
    with pytest.raises(CacheMismatch, match="packing: there 'documents', asked for 'pad'"):
        CacheWriter(tmp_path, manifest_of(packed_blocks(), packing="pad"))
    tags = {manifest_of(packed_blocks(), packing=packing).digest for packing in ("stream", "documents", "pad")}
    assert len(tags) == 3
    with pytest.raises(ConfigError, match="packing='sorted' is unknown; choose one of stream, documents, pad"):
        manifest_of(packed_blocks(), packing="sorted")


def test_the_last_token_of_a_document_has_no_label() -> None:
    starts = starts_of(6)
    lengths = torch.tensor([SEQ_LEN, SEQ_LEN, 4, 3, 1, 0])
    positions = torch.from_numpy(document_positions(starts.numpy()))
    expected = [
        [t + 1 < length and not row[t + 1] for t in range(SEQ_LEN)]
        for row, length in zip(starts.tolist(), lengths.tolist(), strict=True)
    ]
    found = label_mask(lengths, SEQ_LEN, positions)
    assert found.tolist() == expected
    assert (found != label_mask(lengths, SEQ_LEN)).any()


def test_padding_counts_in_no_number_of_a_summary(tmp_path) -> None:
    """Whatever lies behind a row's length, mass, entropy and tokens are the same."""
    found = []
    for name, seed in (("a", 1), ("b", 2)):
        blocks = blocks_of(ROWS)
        lengths, source = torch.tensor([1, 2, 5, 3, 3, 1, 4], dtype=torch.int32), np.random.RandomState(seed)
        padding = np.arange(SEQ_LEN) >= lengths.numpy()[:, None]
        ids = np.where(padding, source.randint(0, 29, padding.shape), blocks.input_ids_RT.numpy()).astype(np.int32)
        blocks, teacher = Blocks(torch.from_numpy(ids), lengths), TinyTeacher()
        writer = CacheWriter(tmp_path / name, manifest_of(blocks, packing="pad"))
        build_cache(teacher, teacher.head, blocks, writer, batch_size=2, chunk_tokens=4)
        writer.finish()
        found.append(summarise(tmp_path / name))
    assert found[0].tokens == found[1].tokens == 19
    assert found[0].index.rows == ROWS
    assert found[0].kept_mass == pytest.approx(found[1].kept_mass, abs=1e-12)
    assert found[0].entropy == pytest.approx(found[1].entropy, abs=1e-12)
