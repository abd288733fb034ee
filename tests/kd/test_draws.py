"""Draws: where they fall, that nothing is biased, and that they are read as they were drawn."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from qat_lora.cache import KDCacheDataset
from qat_lora.cache.bits import run_ends
from qat_lora.cache.codec import decoded, encoded
from qat_lora.errors import CacheError, ModelError
from qat_lora.kd import (
    SampledTarget,
    SparseTarget,
    sampled_kl,
    sparse_kl,
    targets,
)
from qat_lora.kd.draws import draw, ratio_of, uniforms
from qat_lora.kd.reduce import drawn_rows
from tests.cache.conftest import TinyTeacher, blocks_of, build, manifest_of

VOCAB = 1100  # three blocks, the last one short


def logits_of(rows: int = 6, vocab_size: int = VOCAB, seed: int = 0) -> torch.Tensor:
    z_SV = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
    z_SV[0] = 0.0
    z_SV[1, 700] = 30.0  # as good as certain
    z_SV[2, :600] = -torch.inf
    z_SV[2, 900:] = -torch.inf
    return z_SV


def ends_by_hand(z_V: np.ndarray, temperature: float) -> np.ndarray:
    """Cumulative probability, in float64, with 0 before it."""
    p_V = np.exp((z_V - z_V.max()) / temperature)
    return np.concatenate([[0.0], np.cumsum(p_V / p_V.sum())])


@pytest.mark.parametrize("temperature", [1.0, 0.8, 2.0])
@pytest.mark.parametrize("samples", [1, 7, 50])
def test_draws_lie_where_the_cumulative_probability_says(samples, temperature) -> None:
    z_SV = logits_of()
    u_S = torch.tensor([0.37, 0.3, 0.999, 1.0 - 2.0**-24, 0.5, 0.123])
    found_SN = draw((z_SV / temperature).softmax(-1), u_S, samples)
    assert found_SN.shape == (6, samples) and found_SN.dtype == torch.int64
    for ids_N, z_V, u in zip(found_SN.numpy(), z_SV.double().numpy(), u_S.tolist(), strict=True):
        assert ids_N.tolist() == sorted(ids_N)
        ends, points_N = ends_by_hand(z_V, temperature), (np.arange(samples) + u) / samples
        rounding = 3e-7  # of float32 beside 1
        assert (ends[ids_N] - rounding <= points_N).all() and (points_N < ends[ids_N + 1] + rounding).all()
    assert z_SV.gather(-1, found_SN).isfinite().all(), "a token without probability is never drawn"


@pytest.mark.parametrize("vocab_size", [1, 3, 511, 512, 513])
def test_any_vocabulary(vocab_size) -> None:
    z_SV = logits_of(40)[3:, :vocab_size]
    found_SN = draw(z_SV.softmax(-1), torch.linspace(0, 1 - 2.0**-24, len(z_SV)), 9)
    assert found_SN.min() >= 0 and found_SN.max() < vocab_size


def test_a_count_is_off_by_less_than_one() -> None:
    z_SV, samples = logits_of(), 50
    p_SV = z_SV.softmax(-1)
    for u in torch.rand(20, generator=torch.Generator().manual_seed(1)).tolist():
        counts_SV = torch.zeros_like(p_SV).scatter_add(
            -1, draw(p_SV, torch.full((6,), u), samples), torch.ones(6, samples)
        )
        assert (counts_SV - samples * p_SV).abs().max() < 1 + 1e-4


def gradient_of(loss_fn, u_SV: torch.Tensor) -> torch.Tensor:
    u_SV = u_SV.clone().requires_grad_()
    (grad_SV,) = torch.autograd.grad(loss_fn(u_SV).total, u_SV)
    return grad_SV


def sampled_target(z_SV, chance, samples, proposal, temperature) -> SampledTarget:
    found = drawn_rows(z_SV, chance, samples, proposal, (temperature,))
    weights_SN = torch.full(found["draw_ids"].shape, 1 / samples)
    if proposal != temperature:
        weights_SN = weights_SN * ratio_of(found["draw_ratios"][..., 0])
    return SampledTarget(found["draw_ids"], weights_SN, found["entropy"][:, 0])


@pytest.mark.parametrize(("proposal", "temperature"), [(1.0, 1.0), (0.8, 1.0), (1.2, 1.0), (1.0, 2.0), (2.0, 2.0)])
def test_the_mean_gradient_is_that_of_full_distillation_and_top_k_renormalised_is_not(proposal, temperature) -> None:
    """Over 2,000 seeds, each entry's mean lies within its standard error; so does the loss's."""
    rows, vocab_size, samples, seeds = 3, 40, 8, 2000
    z_SV = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(2))  # every token is drawn often
    u_SV = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(3))
    mask_S = torch.ones(rows, dtype=torch.bool)
    full = SparseTarget(torch.arange(vocab_size).expand(rows, -1), torch.log_softmax(z_SV / temperature, dim=-1))

    def full_loss(x_SV):
        return sparse_kl(x_SV, full, mask_S, temperature=temperature)

    expected_SV = gradient_of(full_loss, u_SV)
    count = 1 + samples * (proposal != temperature)
    chance = torch.from_numpy(uniforms(5, range(seeds), rows, count))
    grads, losses = [], []
    for numbers in chance:
        target = sampled_target(z_SV, numbers, samples, proposal, temperature)

        def loss(x_SV, target=target):
            return sampled_kl(x_SV, target, mask_S, temperature=temperature)

        grads.append(gradient_of(loss, u_SV))
        losses.append(loss(u_SV).total)
    grads, losses = torch.stack(grads).double(), torch.stack(losses).double()
    error_SV = grads.std(0) / seeds**0.5
    off_SV = (grads.mean(0) - expected_SV).abs() / (error_SV + 1e-6)
    # of 120 entries, normal ones would stay below 4.3 in 499 of 500 trials; the squares' mean is 1
    assert off_SV.max() < 4.3 and (off_SV**2).mean() < 1.5
    assert (losses.mean() - full_loss(u_SV).total).abs() < 4 * losses.std() / seeds**0.5 + 1e-5

    top = torch.log_softmax(z_SV / temperature, dim=-1).topk(samples, dim=-1)
    renormalised = SparseTarget(top.indices, torch.log_softmax(top.values, dim=-1))
    biased_SV = gradient_of(lambda x_SV: sparse_kl(x_SV, renormalised, mask_S, temperature=temperature), u_SV)
    assert ((biased_SV - expected_SV).abs() / (error_SV + 1e-6)).max() > 20


def test_the_rounding_of_ratios_has_no_bias() -> None:
    z_SV = torch.randn(4, 30, generator=torch.Generator().manual_seed(0)) * 4
    chance = torch.from_numpy(uniforms(0, range(4000), 4, 1 + 6))
    chance[..., 0] = chance[:1, :, :1].squeeze(-1)  # the same draws each time
    found = [drawn_rows(z_SV, numbers, 6, 0.7, (1.0,)) for numbers in chance]
    ids_SN = found[0]["draw_ids"]
    exact_SN = (torch.log_softmax(z_SV, -1) - torch.log_softmax(z_SV / 0.7, -1)).gather(-1, ids_SN).exp()
    ratios = torch.stack([ratio_of(each["draw_ratios"][..., 0]) for each in found]).double()
    assert (ratios.mean(0) - exact_SN).abs().max() / exact_SN.max() < 0.005
    assert ratios.std(0).max() > 0, "it is rounded at all"
    assert ((ratios / exact_SN).log2().abs() < 1 / 8 + 1e-5).all(), "to one of its two neighbours"
    for codes_nN in torch.stack([each["draw_ratios"][..., 0] for each in found]).unbind(1):
        varied_nN = codes_nN[:, codes_nN.float().std(0) > 0.1].numpy()
        correlation = np.corrcoef(varied_nN, rowvar=False) - np.eye(varied_nN.shape[1])
        assert varied_nN.shape[1] > 1 and np.abs(correlation).max() < 0.1, "each draw by a number of its own"
    codes = torch.arange(256)
    assert ratio_of(codes)[0] == 0 and ratio_of(codes)[128] == 1 and (ratio_of(codes).diff() > 0).all()


def test_random_numbers_depend_on_the_seed_and_the_row_alone() -> None:
    whole = uniforms(3, range(10), 5, 4)
    assert whole.shape == (10, 5, 4) and whole.dtype == np.float32 and whole.min() >= 0 and whole.max() < 1
    assert np.array_equal(uniforms(3, range(4, 6), 5, 4), whole[4:6])
    assert not np.array_equal(uniforms(4, range(10), 5, 4), whole)
    assert len(np.unique(whole)) == whole.size
    assert whole[0, 0, :2].tolist() == [PHILOX_3_0[0], PHILOX_3_0[1]], "the same for ever"


PHILOX_3_0 = (0.9342820048332214, 0.07916146516799927)  # the first two numbers of key (3, 0)


def sampled_manifest(**changes):
    return manifest_of(blocks_of(7, last_length=3), store="sampled", samples=8, **changes)


@pytest.mark.parametrize("temperatures", [(1.0,), (1.0, 2.0)])
@pytest.mark.parametrize("vocab_size", [29, 151936])
def test_draws_are_read_as_they_were_given(vocab_size, temperatures) -> None:
    manifest = sampled_manifest(vocab_size=vocab_size, temperatures=temperatures)
    source = np.random.RandomState(0)
    fields = {name: source.randint(0, 9, shape).astype(dtype) for name, (shape, dtype) in manifest.fields(3).items()}
    fields["lengths"][:] = [5, 5, 2]
    fields["draw_ids"] = np.sort(source.choice([0, 3, 7, vocab_size - 1], fields["draw_ids"].shape), axis=-1)
    fields["draw_ids"][0, 0] = vocab_size - 1
    fields["draw_ids"][2, 2:] = 0  # behind the end
    if "draw_ratios" in fields:
        fields["draw_ratios"] = (fields["draw_ids"] % 251 + 1)[..., None].astype(np.uint8)
        fields["draw_ratios"][2, 2:] = 0
    tensors = encoded(manifest, fields)
    fixed = {name: (x.shape, x.dtype) for name, x in tensors.items() if name not in manifest.streams}
    assert fixed == manifest.tensors(3)
    runs = [int(run_ends(ids).sum()) for ids in fields["draw_ids"]]
    sizes = [-(-count * manifest.id_bits // 8) for count in runs]
    assert tensors["draw_ids_ends"].tolist() == np.cumsum(sizes).tolist() and len(tensors["draw_ids"]) == sum(sizes)
    for name in manifest.streams:  # as a source hands them out
        ends = [0, *tensors[f"{name}_ends"]]
        rows = [tensors[name][a:b] for a, b in zip(ends, ends[1:], strict=False)]
        tensors[name] = np.stack([np.pad(row, (0, max(map(len, rows)) - len(row))) for row in rows])
    found = decoded(manifest, tensors)
    assert {name: (x.shape, x.dtype) for name, x in found.items()} == manifest.fields(3)
    for name, x in fields.items():
        assert np.array_equal(found[name], x), name


@pytest.mark.parametrize("preload", [False, True])
@pytest.mark.parametrize(("proposal", "temperatures"), [(1.0, (1.0,)), (0.8, (1.0, 2.0))])
def test_a_sampled_cache_gives_what_was_drawn(tmp_path, preload, proposal, temperatures) -> None:
    settings = dict(store="sampled", samples=8, proposal_temperature=proposal, temperatures=temperatures)
    teacher = build(tmp_path, **settings)
    dataset = KDCacheDataset(tmp_path, preload=preload)
    rows = dataset.batch_rows(4, 1)
    batch = dataset._read(rows)
    chance = np.stack([uniforms(0, range(row, row + 1), 5, 1 + 8 * len(dataset.manifest.weighed))[0] for row in rows])
    z_SV = teacher.head(teacher(batch["input_ids"])).flatten(0, 1)
    drawn = drawn_rows(z_SV, torch.from_numpy(chance).flatten(0, 1), 8, proposal, temperatures)
    is_token_S = (torch.arange(5) < batch["length"][:, None]).flatten()
    for i, temperature in enumerate(temperatures):
        target = targets(batch, temperature, dataset.manifest.target_spec)
        assert torch.equal(target.ids_SN[is_token_S], drawn["draw_ids"][is_token_S])
        assert torch.equal(target.entropy_S, drawn["entropy"][:, i].half().float())
        if proposal == temperature:
            assert (target.weights_SN == 1 / 8).all()
        else:
            of_last = (target.weights_SN * 8 / ratio_of(drawn["draw_ratios"][..., i])).log2().abs()
            assert of_last[is_token_S].max() < 1 / 8 + 1e-5, "of equal draws the last one's"


def test_bytes_per_token_of_a_large_vocabulary(tmp_path) -> None:
    """Twelve distinct tokens of 151,936: at most 45 bytes on disk, all included."""
    from qat_lora.cache import CacheWriter, summarise

    rows, length = 8, 512
    blocks = blocks_of(rows, seq_len=length, vocab_size=151936)
    manifest = manifest_of(
        blocks, vocab_size=151936, store="sampled", samples=50, temperatures=(1.0,), rows_per_shard=8
    )
    writer = CacheWriter(tmp_path, manifest)
    source = np.random.RandomState(0)
    distinct = np.sort(source.choice(151936, (rows, length, 12)), axis=-1)
    pick = np.sort(np.concatenate([np.arange(12), source.randint(0, 12, 38)]))
    fields = {
        "input_ids": blocks.input_ids_RT.numpy(),
        "lengths": blocks.lengths_R.numpy(),
        "draw_ids": distinct[..., pick],
        "entropy": np.zeros((rows, length, 1), np.float16),
    }
    writer.write_shard(0, fields)
    writer.finish()
    found = summarise(tmp_path)
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert size / (rows * length) <= 45
    assert sum(found.bytes_per_token.values()) == pytest.approx(39.4, abs=0.3)


def test_top_k_of_a_large_vocabulary_takes_at_most_400_bytes(tmp_path) -> None:
    from qat_lora.cache import CacheWriter

    rows, length = 4, 256
    blocks = blocks_of(rows, seq_len=length, vocab_size=151936)
    manifest = manifest_of(blocks, vocab_size=151936, top_k=128, logprob_bits=5, temperatures=(1.0,), rows_per_shard=4)
    writer = CacheWriter(tmp_path, manifest)
    fields = {name: np.zeros(shape, dtype) for name, (shape, dtype) in manifest.fields(rows).items()}
    writer.write_shard(0, fields | {"input_ids": blocks.input_ids_RT.numpy(), "lengths": blocks.lengths_R.numpy()})
    writer.finish()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) / (rows * length) <= 400


def test_full_logits_are_the_teacher_at_any_temperature(tmp_path) -> None:
    teacher = TinyTeacher()
    build(tmp_path, teacher=teacher, store="full", temperatures=(1.0, 2.0))
    dataset = KDCacheDataset(tmp_path)
    batch = next(dataset.batches(4))
    target = targets(batch, 2.0, dataset.manifest.target_spec)
    expected = torch.log_softmax(teacher.head(teacher(batch["input_ids"])).flatten(0, 1) / 2, dim=-1)
    torch.testing.assert_close(target.logprobs_SK, expected, rtol=0, atol=1e-6)
    assert torch.equal(target.ids_SK[3], torch.arange(29))


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_sampled_loss_is_its_formula(temperature) -> None:
    source = np.random.RandomState(0)
    u_SV, ids_SN = source.randn(5, 30), source.randint(0, 30, (5, 6))
    weights_SN, entropy_S = source.rand(5, 6), source.rand(5)
    mask_S = np.array([True, False, True, True, True])
    total, grad_SV = 0.0, np.zeros_like(u_SV)
    for s in np.flatnonzero(mask_S):
        e_V = np.exp(u_SV[s] / temperature)
        q_V = e_V / e_V.sum()
        total += temperature**2 * (-(weights_SN[s] * np.log(q_V[ids_SN[s]])).sum() - entropy_S[s])
        grad_SV[s] = temperature * weights_SN[s].sum() * q_V
        for weight, v in zip(weights_SN[s], ids_SN[s], strict=True):
            grad_SV[s, v] -= temperature * weight
    target = SampledTarget(*(torch.tensor(x) for x in (ids_SN, weights_SN, entropy_S)))
    u = torch.tensor(u_SV, requires_grad=True)
    loss = sampled_kl(u, target, torch.tensor(mask_S), temperature=temperature)
    assert loss.total.item() == pytest.approx(total, rel=1e-6) and loss.count.item() == 4
    (found_SV,) = torch.autograd.grad(loss.total, u)
    np.testing.assert_allclose(found_SV.numpy(), grad_SV, atol=1e-6)
    apart = sampled_kl(u, target, torch.tensor(mask_S), temperature=temperature, picked_SN=u.gather(-1, target.ids_SN))
    assert apart.total.item() == pytest.approx(total, rel=1e-6)


@pytest.mark.parametrize("name", ["draw_ids_ends", "draw_runs"])
@pytest.mark.parametrize("preload", [False, True])
def test_a_damaged_row_is_an_error_that_names_the_cache(tmp_path, name, preload) -> None:
    """The values of a shard are compared with nothing while it is streamed; what cannot be read is said."""
    build(tmp_path, rows=3, store="sampled", samples=8, temperatures=(1.0,))
    path = tmp_path / "shard-00000.safetensors"
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    begin, end = json.loads(data[8:start])[name]["data_offsets"]
    data[start + begin : start + end] = bytes([255]) * (end - begin)
    path.write_bytes(data)
    with pytest.raises(CacheError, match=str(tmp_path)):
        next(KDCacheDataset(tmp_path, preload=preload).batches(3))


@pytest.mark.parametrize("store", [{"store": "sampled", "samples": 4}, {"store": "full"}, {}, {"tail_draws": 3}])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_teacher_that_computes_no_numbers_is_refused(tmp_path, store, value) -> None:
    teacher = TinyTeacher()
    teacher.head = lambda hidden_SH: torch.zeros(len(hidden_SH), 29).index_fill(1, torch.tensor([3]), value)
    with pytest.raises(ModelError, match="logits are NaN or infinite at row 0, position 0"):
        build(tmp_path, teacher=teacher, **store)


def test_a_teacher_that_forbids_a_token_is_not(tmp_path) -> None:
    teacher = TinyTeacher()
    teacher.head = lambda hidden_SH: torch.zeros(len(hidden_SH), 29).index_fill(1, torch.tensor([3]), -torch.inf)
    for name, store in enumerate(({"store": "sampled", "samples": 4}, {"store": "full"}, {}, {"top_k": 29})):
        build(tmp_path / str(name), teacher=teacher, **store)
