"""Models that were trained with full attention, and read or keep whole chunks of raw tokens."""

import hf_models
import pytest
import torch

import dynchunk
from dynchunk import BoundaryRule
from dynchunk.attention import Evict, Hash, Policy, Quest, Raw

RULE = BoundaryRule(2, max_length=6)
RAW = {"window": 8, "cover": "tail"}
POLICIES = {
    "quest": Policy(RULE, Hash(2), reduction=Raw(), selection=Quest(0.5), **RAW),
    "evict": Policy(RULE, Hash(2), reduction=Evict(2.0, observe=4), **RAW),
}
EVERYTHING = {
    "quest": Policy(RULE, Hash(2), reduction=Raw(), selection=Quest(1.0), **RAW),
    "evict": Policy(RULE, Hash(2), reduction=Evict(1.0, observe=4), **RAW),
}


@pytest.fixture(scope="module")
def model():
    return hf_models.build("llama")


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def generate(model, ids, mask, **options):
    return model.generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=False, **options)


@pytest.mark.parametrize("name", EVERYTHING)
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_choosing_everything_is_the_unwrapped_model(family, name):
    model = hf_models.build(family)
    ids, mask = hf_models.batch((60, 90))
    expected = generate(model, ids, mask)
    with dynchunk.wrap(model, EVERYTHING[name]):
        assert torch.equal(generate(model, ids, mask), expected)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize("name", POLICIES)
def test_rows_are_generated_alone(name, options, model):
    """CASES 33 and 35: each row chooses its own chunks; positions count the tokens seen."""
    ids, mask = hf_models.batch((60, 90))
    plain = generate(model, ids, mask, **options)
    with dynchunk.wrap(model, POLICIES[name], rollback=0):
        together = generate(model, ids, mask, return_dict_in_generate=True, **options)
        lengths = (89, 119) if not options else (89,) * 3 + (119,) * 3
        assert together.cache.state.lengths == lengths
        for b in range(2):
            real = mask[b].bool()
            alone = generate(model, ids[b : b + 1, real], mask[b : b + 1, real], **options)
            new = alone[0, int(real.sum()) :]
            assert torch.equal(together.sequences[b, ids.shape[1] :], new)
    assert not torch.equal(together.sequences, plain)


def test_what_is_evicted_is_not_held(model):
    ids, _ = hf_models.batch((1000,))
    policy = Policy(RULE, Hash(2), reduction=Evict(4.0), **RAW)
    with dynchunk.wrap(model, policy, rollback=0):
        cache = model(ids).cache
        assert cache.state.physical_lengths(0) == (1000,)  # the prompt may go on
        model(ids[:, :1], cache=cache)
    assert cache.get_seq_length() == 1001
    assert max(cache.state.physical_lengths(0)) < 300
    assert cache.full_nbytes == 1001 * 2 * 2 * 2 * 8 * 4
    assert cache.nbytes < 0.52 * cache.full_nbytes  # with all bookkeeping, for heads of 8 channels
    assert f"{cache.nbytes / cache.full_nbytes:.3f} of a full cache" in repr(cache)


def test_prompt_lookup_with_quest_is_greedy(model):
    """With eviction it need not be: drafts change when, and by which queries, chunks go."""
    ids = torch.tensor([[5, 9, 14, 3]]).repeat(1, 12)
    mask = torch.ones_like(ids)
    with dynchunk.wrap(model, POLICIES["quest"]):
        greedy = generate(model, ids, mask)
        assert torch.equal(generate(model, ids, mask, prompt_lookup_num_tokens=3), greedy)
    with dynchunk.wrap(model, POLICIES["evict"]):
        cache = model.dynchunk.cache()
        text = generate(model, ids, mask, prompt_lookup_num_tokens=3, cache=cache)
        assert cache.get_seq_length() == text.shape[1] - 1


@torch.enable_grad()
def test_choices_of_raw_tokens_refuse_a_gradient(model):
    ids, _ = hf_models.batch((30,))
    with (
        dynchunk.wrap(model, POLICIES["evict"]),
        pytest.raises(ValueError, match="Evict chooses raw tokens, which has no gradient"),
    ):
        model(ids, use_cache=False)
