"""ChunkedCache: batches in, one state, and what transformers asks of a cache."""

import copy

import numpy as np
import pytest
import torch

transformers = pytest.importorskip(
    "transformers", minversion="5.24", reason="transformers >= 5.24 is not installed (extra hf)"
)

from dynchunk.attention import Hash, MeanPool, Midpoints, Policy, full  # noqa: E402
from dynchunk.attention.specs import AsScored  # noqa: E402
from dynchunk.boundaries import BoundaryRule, FixedStride, HashScore  # noqa: E402
from dynchunk.integrations.hf.cache import ChunkedCache  # noqa: E402
from dynchunk.integrations.hf.ragged import Ragged  # noqa: E402

RULE = BoundaryRule(2, max_length=6)
POOLED = {"reduction": MeanPool(), "window": 8, "cover": "tail", "rope": None, "sink": False}
POLICIES = {
    "full": full(rope=None),
    "fixed": Policy(FixedStride(3), **POOLED),
    "hash": Policy(RULE, Hash(2), **POOLED),
    "views": Policy(RULE, Hash(2), views=(AsScored(), Midpoints()), **POOLED),
}


LONGEST = 200


def rows(seed, tokens):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((LONGEST, 4, 8), (LONGEST, 2, 8), (LONGEST, 2, 6))
    found = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [x[:tokens] for x in found]


def run(cache, ids, mask=None, splits=(), seed=0):
    """Feed padded ids [B, T] in parts; return outputs [B, T, H, D_v]."""
    ids = torch.as_tensor(ids)
    batch, total = ids.shape
    mask = torch.ones_like(ids) if mask is None else torch.as_tensor(mask)
    x = [torch.stack([rows(seed + b, total)[i] for b in range(batch)]) for i in range(3)]
    x = [one.masked_fill(mask[:, :, None, None] == 0, torch.nan) for one in x]
    out, start = [], cache.get_seq_length()
    for end in (*splits, total):
        part = slice(start, end)
        ragged = Ragged.of((batch, end - start), mask[:, :end], past=cache.real)
        cache.begin(ragged, ragged.pack(ids[:, part]))
        q, k, v = (ragged.pack(one[:, part]) for one in x)
        out.append(ragged.unpack(cache.layer(0).mix(q, k, v)))
        cache.end()
        start = end
    return torch.cat(out, 1)


def tokens(batch, total, seed=0):
    return torch.randint(50, (batch, total), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", POLICIES)
def test_any_split_is_one_shot(name):
    ids = tokens(1, 40)
    whole = run(ChunkedCache([POLICIES[name]]), ids)
    for splits in ((1, 2, 3), (20,), tuple(range(25, 40))):
        torch.testing.assert_close(run(ChunkedCache([POLICIES[name]]), ids, splits=splits), whole)


@pytest.mark.parametrize("name", POLICIES)
def test_padding_of_either_side_changes_no_row(name):
    lengths, width = (5, 9, 16), 20
    for left in (True, False):
        mask = torch.zeros(3, width, dtype=torch.int64)
        ids = torch.full((3, width), 7)
        for b, n in enumerate(lengths):
            place = slice(width - n, width) if left else slice(0, n)
            mask[b, place], ids[b, place] = 1, tokens(1, n, b)[0]
        together = run(ChunkedCache([POLICIES[name]]), ids, mask, splits=(11, 12))
        for b in range(3):
            own, row = mask[b] > 0, torch.zeros(1, width, dtype=torch.int64)
            row[:] = mask[b]
            alone = run(ChunkedCache([POLICIES[name]]), ids[b : b + 1], row, seed=b)
            torch.testing.assert_close(together[b][own], alone[0][own])
            assert not together[b][~own].any()


def test_lengths_are_logical_and_rows_physical():
    cache = ChunkedCache([POLICIES["fixed"]])
    mask = torch.tensor([[0] * 10 + [1] * 190, [1] * 200])
    run(cache, tokens(2, 200), mask)
    assert (cache.get_seq_length(), cache.state.lengths) == (200, (190, 200))
    assert max(cache.state.physical_lengths(0)) < 66 + 80  # entries; a window and a rollback
    assert cache.layers[0].get_mask_sizes(3) == (203, 0)


@pytest.mark.parametrize("name", POLICIES)
def test_crop_is_never_having_seen(name):
    ids = tokens(2, 40)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    fresh = run(ChunkedCache([POLICIES[name]]), ids, mask)
    other = ids.clone()
    other[:, 30:] = 3
    cache = ChunkedCache([POLICIES[name]])
    run(cache, other, mask)
    cache.crop(-10)
    torch.testing.assert_close(run(cache, ids, mask), fresh[:, 30:])


@pytest.mark.parametrize("name", POLICIES)
def test_reorder_in_the_middle_of_a_chunk(name):
    """CASES 27: reorder [1, 0, 0] mid-chunk with distinct rows is recomputing them."""
    ids, cache = tokens(3, 26), ChunkedCache([POLICIES[name]])
    run(cache, ids[:, :20])
    index = torch.tensor([1, 0, 0])
    cache.reorder_cache(index)
    again = ChunkedCache([POLICIES[name]])
    x = [torch.stack([rows(int(b), 26)[i] for b in index]) for i in range(3)]
    ragged = Ragged.of((3, 20), past=None)
    again.begin(ragged, ragged.pack(ids[index, :20]))
    again.layer(0).mix(*(ragged.pack(one[:, :20]) for one in x))
    again.end()
    out = []
    for one in (cache, again):
        ragged = Ragged.of((3, 6), past=one.real)
        one.begin(ragged, ragged.pack(ids[:, 20:]))
        out.append(one.layer(0).mix(*(ragged.pack(y[:, 20:]) for y in x)))
        one.end()
    torch.testing.assert_close(*out)


def test_repeat_select_reset_and_fork():
    cache = ChunkedCache([POLICIES["hash"]])
    run(cache, tokens(2, 12))
    cache.batch_repeat_interleave(2)
    assert cache.state.lengths == (12, 12, 12, 12)
    cache.batch_select_indices(torch.tensor([True, False, True, False]))
    assert cache.batch_size == 2
    other = copy.deepcopy(cache)
    cache.crop(-5)
    assert (other.get_seq_length(), cache.get_seq_length()) == (12, 7)
    assert other.layers[0].get_seq_length() == 12
    cache.reset()
    assert (cache.get_seq_length(), cache.batch_size) == (0, -1)


def test_a_given_score_streams_like_the_one_of_the_policy():
    own = POLICIES["hash"]
    given = Policy(RULE, **POOLED)
    ids = tokens(2, 40)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    whole = run(ChunkedCache([own]), ids, mask)
    for splits in ((), (9, 10, 11, 30)):
        cache = ChunkedCache([given], score=HashScore(2, 0))
        torch.testing.assert_close(run(cache, ids, mask, splits), whole)


def test_native_layers_have_transformers_own_cache():
    config = transformers.Gemma3TextConfig(
        num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], sliding_window=4
    )
    cache = ChunkedCache([None, full(rope=None)], config=config)
    assert cache.is_sliding == [True, False]
    k = torch.randn(1, 2, 6, 8)
    cache.update(k, k, 0)
    assert cache.layers[0].get_seq_length() == 6
    assert cache.nbytes >= 2 * 3 * 2 * 8 * 4


def test_mask_errors_say_what_to_do():
    with pytest.raises(ValueError, match="which the policy decides"):
        Ragged.of((1, 3), torch.ones(1, 1, 3, 3))
    with pytest.raises(ValueError, match=r"shape \[1, 5\]: 2 columns of the past"):
        Ragged.of((1, 3), torch.ones(1, 3), past=np.ones((1, 2), bool))
    with pytest.raises(ValueError, match="start a new one"):
        Ragged.of((1, 3), torch.ones(1, 5), past=np.zeros((1, 2), bool))


def test_scores_and_ids_that_are_missing():
    policy = Policy(RULE, **POOLED)
    with pytest.raises(ValueError, match=r"pass wrap\(\.\.\., score=\.\.\.\)"):
        run(ChunkedCache([policy]), tokens(1, 4))
    with pytest.raises(ValueError, match="pass input_ids"):
        ChunkedCache([POLICIES["hash"]]).begin(Ragged.of((1, 3)))


def test_mix_needs_a_policy_without_weights():
    with pytest.raises(ValueError, match=r"policy: reduction: expected MeanPool\(own=False"):
        run(ChunkedCache([Policy(FixedStride(2), rope=None)]), tokens(1, 4))
    with pytest.raises(ValueError, match="policy: rope: expected None"):
        run(ChunkedCache([full()]), tokens(1, 4))
    cache = ChunkedCache([POLICIES["views"]])
    cache.begin(Ragged.of((1, 3)), torch.tensor([1, 2, 3]))
    x = torch.randn(3, 1, 8)
    with pytest.raises(ValueError, match="k: expected a multiple of 2 KV heads"):
        cache.layer(0).mix(x, x, x)


def test_what_is_held_is_where_the_inputs_are_although_there_are_no_ids():
    cache = ChunkedCache([full(rope=None)])
    cache.begin(Ragged.of((2, 3)), device="meta")
    assert cache.state.device.type == "meta"
