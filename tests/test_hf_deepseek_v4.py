"""A wrapped DeepSeek V4: equal to transformers' where that is right, and right where it is not."""

import copy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from v4_models import CSA, HCA, SLIDING, tiny

transformers = pytest.importorskip(
    "transformers", minversion="5.24", reason="transformers >= 5.24 is not installed (extra hf)"
)

import dynchunk  # noqa: E402
from dynchunk.attention import Hash, Learned, MeanPool, TokenClasses  # noqa: E402
from dynchunk.boundaries import BoundaryRule, HashScore  # noqa: E402
from dynchunk.boundaries.scores.base import Score  # noqa: E402
from dynchunk.integrations.hf.deepseek_v4 import v4_policies  # noqa: E402

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
#: (stride of CSA, stride of HCA, window, tokens)
SHAPES = [(4, 128, 128, 300), (3, 5, 16, 53), (16, 3, 128, 150)]
IDS = ["r4-r128-W128-T300", "r3-r5-W16-T53", "r16-r3-W128-T150"]
PAD = 63


def sample(batch, tokens, seed=0):
    """Token ids, of which none is PAD."""
    return torch.randint(PAD, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def content(model):
    """Policies whose windows follow the text."""
    policies = v4_policies(model.config)
    rules = {CSA: BoundaryRule(1, max_length=6), HCA: BoundaryRule(2, max_length=9)}
    return {
        kind: replace(policies[kind], boundaries=rule, score=Hash(2), window=20)
        for kind, rule in rules.items()
    }


@pytest.fixture(scope="module")
def theirs():
    return tiny(3, 5, 16)


@pytest.fixture(scope="module")
def ours(theirs):
    return dynchunk.wrap(copy.deepcopy(theirs))


@pytest.fixture(scope="module")
def by_content(theirs):
    model = copy.deepcopy(theirs)
    return dynchunk.wrap(model, content(model))


@pytest.fixture(params=["strides", "content"])
def wrapped(request, ours, by_content):
    return {"strides": ours, "content": by_content}[request.param]


@torch.no_grad()
def whole(model, ids, **inputs):
    """Logits of ids [B, T] at once, without a cache."""
    return model(ids, use_cache=False, **inputs).logits


@torch.no_grad()
def feed(model, ids, splits=(), cache=None, mask=None):
    """Logits of ids [B, T] in parts that end at ``splits``, and the cache."""
    out, start, past = [], 0, 0 if cache is None else cache.get_seq_length()
    for end in (*splits, ids.shape[1]):
        part = None if mask is None else mask[:, : past + end]
        found = model(ids[:, start:end], attention_mask=part, cache=cache, use_cache=True)
        cache, start = found.cache, end
        out.append(found.logits)
    return torch.cat(out, 1), cache


def padded(rows, left=0, right=0):
    """Rows of ids, on the right of a batch but for ``right`` columns; and its mask."""
    width = max(map(len, rows))
    ids = torch.full((len(rows), left + width + right), PAD)
    mask = torch.zeros_like(ids)
    for b, row in enumerate(rows):
        end = left + width
        ids[b, end - len(row) : end], mask[b, end - len(row) : end] = row, 1
    return ids, mask


# Equal to transformers where it is right


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_a_prompt_at_once_in_parts_and_token_by_token_equals_theirs(shape):
    *sizes, tokens = shape
    model, ids = tiny(*sizes), sample(2, tokens)
    expected = whole(model, ids)
    dynchunk.wrap(model)
    torch.testing.assert_close(whole(model, ids), expected, **CLOSE)
    for splits in ((), range(tokens - 40, tokens), (1, 2, 7, tokens // 2)):
        torch.testing.assert_close(feed(model, ids, splits)[0], expected, **CLOSE)


@settings(max_examples=12)
@given(st.sets(st.integers(1, 52)), st.integers(0, 3))
def test_any_split_equals_the_whole(theirs, ours, by_content, splits, seed):
    ids = sample(1, 53, seed)
    for model, expected in ((ours, whole(theirs, ids)), (by_content, whole(by_content, ids))):
        torch.testing.assert_close(feed(model, ids, sorted(splits))[0], expected, **CLOSE)


def test_hash_experts_and_inputs_embeds_are_theirs():
    model = tiny(3, 5, 16, mlp_layer_types=["hash_moe", "moe", "hash_moe"])
    ids = sample(2, 30)
    expected, embeds = whole(model, ids), model.model.embed_tokens(ids)
    dynchunk.wrap(model)
    torch.testing.assert_close(whole(model, ids), expected, **CLOSE)
    model = tiny(3, 5, 16)
    expected = whole(model, ids)
    dynchunk.wrap(model)
    with torch.no_grad():
        found = model(inputs_embeds=model.model.embed_tokens(ids)).logits
    torch.testing.assert_close(found, expected, **CLOSE)
    assert embeds.shape == (2, 30, 32)


def test_bfloat16_is_as_near_as_theirs(theirs):
    ids = sample(2, 60)
    exact = whole(theirs, ids)
    model = copy.deepcopy(theirs).bfloat16()
    for name, parameter in model.named_parameters():  # as from_pretrained leaves them
        if "norm" in name or "sinks" in name or "position_bias" in name:
            parameter.data = parameter.data.float()

    def error():
        return float((whole(model, ids).float() - exact).square().mean().sqrt())

    plain = error()
    dynchunk.wrap(model)
    assert model.model.layers[1].self_attn.q_a_norm.weight.dtype == torch.float32
    assert error() < 1.2 * plain
    assert feed(model, ids, (20, 21))[0].dtype == torch.bfloat16


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_case_32_few_index_heads_tie_and_only_there_transformers_differs(heads):
    model, ids = tiny(3, 5, 16, index_heads=heads, layers=[CSA]), sample(1, 80)
    scorer, seen = model.model.layers[0].self_attn.compressor.indexer.scorer, []
    hook = scorer.register_forward_hook(lambda _, args, out: seen.append(out[0]))
    expected = whole(model, ids)
    hook.remove()
    visible = (torch.arange(80)[:, None] + 1) // 3
    scores = seen[0].masked_fill(torch.arange(26) >= visible, -torch.inf)
    best = scores.sort(descending=True).values
    clear = (visible[:, 0] <= 3) | (best[:, 2] - best[:, 3] > 1e-6)
    assert 30 < int(clear.sum()) < 80 or heads > 1
    dynchunk.wrap(model)
    found = whole(model, ids)
    torch.testing.assert_close(found[0, clear], expected[0, clear], **CLOSE)
    # Ours has one order of ties: however a prompt is cut, it reads the same entries.
    for splits in (range(1, 80), (4, 8), (13, 14, 50)):
        torch.testing.assert_close(feed(model, ids, splits)[0], found, **CLOSE)


# Right where transformers is not


@pytest.mark.parametrize("left", range(7))
def test_case_2_padding_on_either_side_changes_nothing(wrapped, left):
    rows = [sample(1, n, n)[0] for n in (5, 9, 16)]
    for right in (0, left):
        ids, mask = padded(rows, left, right)
        position = (mask.cumsum(1) - 1).clamp(min=0)
        torch.testing.assert_close(
            whole(wrapped, ids, attention_mask=mask, position_ids=position)[mask == 1],
            whole(wrapped, ids, attention_mask=mask)[mask == 1],
            **CLOSE,
        )
        one_shot = whole(wrapped, ids, attention_mask=mask)
        streamed = feed(wrapped, ids, (3, 4, 9), mask=mask)[0]
        for b, row in enumerate(rows):
            expected = whole(wrapped, row[None])[0]
            for found in (one_shot, streamed):
                torch.testing.assert_close(found[b, mask[b] == 1], expected, **CLOSE)


def test_case_2_what_padding_holds_does_not_matter(theirs):
    model = dynchunk.wrap(copy.deepcopy(theirs))
    ids, mask = padded([sample(1, n, n)[0] for n in (5, 16)])
    expected = whole(model, ids, attention_mask=mask)
    with torch.no_grad():
        model.model.embed_tokens.weight[PAD] = torch.nan
    found = whole(model, ids, attention_mask=mask)
    assert torch.equal(found[mask == 1], expected[mask == 1])
    found, _ = feed(model, ids, (7, 8), mask=mask)
    torch.testing.assert_close(found[mask == 1], expected[mask == 1], **CLOSE)


def test_case_19_packed_documents_do_not_see_each_other(wrapped):
    lengths = (1, 3, 4, 22)
    documents = [sample(1, n, n) for n in lengths]
    position = torch.cat([torch.arange(n) for n in lengths])[None]
    together = torch.cat(documents, 1)
    found = whole(wrapped, together, position_ids=position).split(lengths, 1)
    for logits, document in zip(found, documents, strict=True):
        torch.testing.assert_close(logits, whole(wrapped, document), **CLOSE)
    documents[1] = (documents[1] + 1) % PAD
    other = whole(wrapped, torch.cat(documents, 1), position_ids=position).split(lengths, 1)
    same = [torch.allclose(a, b, **CLOSE) for a, b in zip(found, other, strict=True)]
    assert same == [True, False, True, True]
    with torch.no_grad():
        assert wrapped(together, position_ids=position).cache is None
    with pytest.raises(ValueError, match="use_cache: expected False or None with documents"):
        wrapped(together, position_ids=position, use_cache=True)


def test_case_20_no_later_token_changes_an_earlier_one(wrapped):
    ids = sample(1, 24)
    expected = whole(wrapped, ids)
    for j in range(24):
        other = ids.clone()
        other[0, j] = (other[0, j] + 1) % PAD
        found = whole(wrapped, other)
        torch.testing.assert_close(found[:, :j], expected[:, :j], **CLOSE)
        assert not torch.allclose(found[:, j], expected[:, j], **CLOSE)


@pytest.mark.parametrize("prompt", [6, 7, 8, 40])
def test_case_27_a_reordered_batch_equals_a_recomputed_one(wrapped, prompt):
    ids, order = sample(3, prompt + 9), torch.tensor([1, 0, 0])
    _, cache = feed(wrapped, ids[:, :prompt])
    cache.reorder_cache(order)
    found, _ = feed(wrapped, ids[:, prompt:], (1, 2), cache)
    again = torch.cat([ids[order, :prompt], ids[:, prompt:]], 1)
    torch.testing.assert_close(found, whole(wrapped, again)[:, prompt:], **CLOSE)


@pytest.mark.parametrize("back", [1, 2, 3, 5, 12, 29, 30])
def test_case_31_crop_equals_never_having_seen_the_tokens(wrapped, back):
    ids, other = sample(2, 30), sample(2, 12, seed=1)
    _, cache = feed(wrapped, ids)
    cache.crop(-back)
    assert cache.get_seq_length() == 30 - back
    found, _ = feed(wrapped, other, (1, 5), cache)
    again = torch.cat([ids[:, : 30 - back], other], 1)
    torch.testing.assert_close(found, whole(wrapped, again)[:, 30 - back :], **CLOSE)


def test_case_31_crop_past_the_rollback_is_refused(theirs):
    model = dynchunk.wrap(copy.deepcopy(theirs), rollback=4)
    _, cache = feed(model, sample(1, 30))
    with pytest.raises(ValueError, match="lost the raw tokens to go back from 30 to 20"):
        cache.crop(-10)
    cache.crop(-4)
    assert cache.get_seq_length() == 26


def test_case_31_repeated_and_selected_rows_equal_recomputed_ones(wrapped):
    rows = [sample(1, n, n)[0] for n in (5, 9, 16)]
    ids, mask = padded(rows)
    _, cache = feed(wrapped, ids, mask=mask)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([4, 1, 0]))
    more = sample(3, 8, seed=5)
    order = torch.tensor([2, 0, 0])
    mask = torch.cat([mask[order], torch.ones_like(more)], 1)
    found, _ = feed(wrapped, more, (1, 4), cache, mask)
    for b, row in enumerate(order.tolist()):
        again = torch.cat([rows[row], more[b]])[None]
        torch.testing.assert_close(found[b], whole(wrapped, again)[0, -8:], **CLOSE)


# generate()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2},
        {"do_sample": True, "num_return_sequences": 3},
        {"prefill_chunk_size": 5},
    ],
    ids=["greedy", "beams", "two-of-four-beams", "sampling", "prefill-in-chunks"],
)
def test_generate_equals_theirs(theirs, ours, options):
    prompt, found = sample(2, 17), []
    for model in (theirs, ours):
        torch.manual_seed(3)
        found.append(model.generate(prompt, max_new_tokens=20, eos_token_id=None, **options))
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"prefill_chunk_size": 4}],
    ids=["greedy", "beams", "prefill-in-chunks"],
)
def test_a_left_padded_batch_generates_what_each_row_does_alone(wrapped, options):
    options = options | {"max_new_tokens": 12, "eos_token_id": None, "pad_token_id": PAD}
    rows = [sample(1, n, n)[0] for n in (5, 9, 16)]
    ids, mask = padded(rows)
    found = wrapped.generate(ids, attention_mask=mask, **options)[:, 16:]
    for b, row in enumerate(rows):
        alone = wrapped.generate(row[None], **options)[0, len(row) :]
        assert torch.equal(found[b], alone)


def test_prompt_lookup_and_a_second_turn_work_which_they_do_not_in_transformers(theirs, wrapped):
    prompt, options = sample(1, 6).repeat(1, 4), {"max_new_tokens": 30, "eos_token_id": None}
    with pytest.raises(ValueError, match="stateful"):
        theirs.generate(prompt, prompt_lookup_num_tokens=3, **options)
    plain = wrapped.generate(prompt, **options)
    assert torch.equal(wrapped.generate(prompt, prompt_lookup_num_tokens=3, **options), plain)
    first = wrapped.generate(prompt, return_dict_in_generate=True, **options)
    turn = torch.cat([first.sequences, sample(1, 7, seed=2)], 1)
    again = wrapped.generate(turn, cache=first.cache, **options)
    assert torch.equal(again, wrapped.generate(turn, **options))


# Windows that follow the text


def test_boundaries_after_a_prefix_are_those_without_it(by_content):
    ids = sample(1, 60)
    ends = {}
    for shift in range(8):
        _, cache = feed(by_content, torch.cat([sample(1, shift, seed=9), ids], 1))
        found = [cache.state.chunks(layer)[0].starts - shift for layer in (1, 2)]
        ends[shift] = [starts[starts > 20].tolist() for starts in found]
    assert ends[0][0] != ends[0][1]
    assert len(ends[0][0]) > len(ends[0][1]) > 3
    assert all(one == ends[0] for one in ends.values())


def test_a_score_beside_the_policy_is_that_of_the_policy(theirs, by_content):
    model = copy.deepcopy(theirs)
    policies = {kind: replace(one, score=None) for kind, one in content(model).items()}
    dynchunk.wrap(model, policies, score=HashScore(2))
    ids = sample(1, 40)
    expected = whole(by_content, ids)
    torch.testing.assert_close(whole(model, ids), expected, **CLOSE)
    torch.testing.assert_close(feed(model, ids, (11, 12, 13))[0], expected, **CLOSE)


class Counted(Score):
    """HashScore(2), which counts how often it is asked."""

    receptive_field, calls = 1, 0

    def score(self, tokens, offsets):
        self.calls += 1
        return HashScore(2).score(tokens, offsets)


def test_boundaries_are_scored_once_a_forward_for_each_type_of_layer():
    model, score, ids = tiny(3, 5, 16, layers=[CSA, HCA, CSA, HCA]), Counted(), sample(2, 30)
    policies = {kind: replace(one, score=None) for kind, one in content(model).items()}
    dynchunk.wrap(model, policies, score=score)
    _, cache = feed(model, ids)
    assert score.calls == 2
    feed(model, ids, (1, 2), cache)
    assert score.calls == 2 + 3 * 2
    model(ids, use_cache=False).logits.sum().backward()
    assert score.calls == 2 + 3 * 2 + 2


def test_only_the_layers_of_the_types_given_change(theirs):
    model = copy.deepcopy(theirs)
    dynchunk.wrap(model, {HCA: content(model)[HCA]})
    own = v4_policies(model.config)
    policies = tuple(layer.self_attn.policy for layer in model.model.layers)
    assert policies == (own[SLIDING], own[CSA], content(model)[HCA]) == model.dynchunk.policies


# Training


def gradients(model, ids, **inputs):
    model.zero_grad()
    model(ids, **inputs).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_equal_theirs(theirs, checkpointing):
    ids, model = sample(2, 40), copy.deepcopy(theirs).train()
    expected = gradients(model, ids, labels=ids)
    dynchunk.wrap(model)
    if checkpointing:
        model.gradient_checkpointing_enable()
    found = gradients(model, ids, labels=ids)
    assert set(found) == set(expected)
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-5, msg=name)


def test_gradients_of_a_padded_row_are_those_without_padding(theirs):
    model = dynchunk.wrap(copy.deepcopy(theirs)).train()
    row = sample(1, 20)
    expected = gradients(model, row, labels=row)
    ids, mask = padded([row[0]], left=5, right=3)
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, 5] = -100  # nothing comes before it
    found = gradients(model, ids, labels=labels, attention_mask=mask)
    assert set(found) == set(expected)
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-5, msg=name)


def test_a_gradient_through_a_cache_is_refused(theirs):
    model = dynchunk.wrap(copy.deepcopy(theirs))
    with pytest.raises(RuntimeError, match="no gradient through a cache"):
        model(sample(1, 9), use_cache=True).logits.sum().backward()
    model.train()
    assert model(sample(1, 9)).cache is None


# A wrapped model is the model it was


def test_unwrap_restores_the_model_bit_for_bit(theirs):
    model, ids = copy.deepcopy(theirs), sample(2, 30)
    parameters, names = {id(p) for p in model.parameters()}, list(model.state_dict())
    expected = whole(model, ids)
    attributes = [set(vars(module)) for module in model.modules()]
    dynchunk.wrap(model)
    assert {id(p) for p in model.parameters()} == parameters
    assert list(model.state_dict()) == names
    dynchunk.unwrap(model)
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert torch.equal(whole(model, ids), expected)
    assert type(model.model.layers[0].self_attn).__name__ == "DeepseekV4Attention"


def test_a_copy_of_a_wrapped_model_stands_alone(ours):
    other, ids = copy.deepcopy(ours), sample(1, 20)
    expected = whole(ours, ids)
    with torch.no_grad():
        other.model.layers[1].self_attn.kv_proj.weight.zero_()
    assert not torch.allclose(whole(other, ids), expected)
    assert torch.equal(whole(ours, ids), expected)
    dynchunk.unwrap(other)
    assert torch.equal(whole(ours, ids), expected)


def test_a_model_without_its_head_can_be_wrapped(theirs):
    model, ids = copy.deepcopy(theirs).model, sample(2, 30)
    with torch.no_grad():
        expected = model(ids, use_cache=False).last_hidden_state
        found = dynchunk.wrap(model)(ids).last_hidden_state
    torch.testing.assert_close(found, expected, **CLOSE)


def test_compiled_layers_decode_the_same():
    model, ids = tiny(3, 5, 16, layers=[CSA], hc_sinkhorn_iters=1), sample(2, 24)
    dynchunk.wrap(model)
    expected, _ = feed(model, ids)
    _, cache = feed(model, ids[:, :21])
    model.model.layers[0].compile(backend="eager", dynamic=True)
    found, _ = feed(model, ids[:, 21:], (1, 2), cache)
    torch.testing.assert_close(found, expected[:, 21:], **CLOSE)


@pytest.mark.parametrize("first", ["wrap", "adapter"])
def test_lora_adapters_work_loaded_before_or_after(theirs, first):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(
        target_modules=["q_a_proj", "kv_proj", "gate_proj", "o_b_proj"], init_lora_weights=False
    )

    def adapted(model):
        torch.manual_seed(4)
        return peft.get_peft_model(model, config).eval()

    ids, model = sample(2, 30), adapted(copy.deepcopy(theirs))
    expected = whole(model, ids)
    assert not torch.allclose(expected, whole(theirs, ids), atol=1e-2)
    if first == "adapter":
        dynchunk.wrap(model)
    else:
        model = adapted(dynchunk.wrap(copy.deepcopy(theirs)))
    torch.testing.assert_close(whole(model, ids), expected, **CLOSE)
    torch.testing.assert_close(feed(model, ids, (9, 10))[0], expected, **CLOSE)


def test_saved_weights_are_the_models_and_the_config_has_the_policies(theirs, by_content, tmp_path):
    by_content.save_pretrained(tmp_path)
    again = transformers.DeepseekV4ForCausalLM.from_pretrained(tmp_path)
    assert again.config.architectures == ["DeepseekV4ForCausalLM"]
    ids = sample(1, 20)
    torch.testing.assert_close(whole(again.eval(), ids), whole(theirs, ids), **CLOSE)
    assert dynchunk.wrap(again).dynchunk.policies == by_content.dynchunk.policies
    torch.testing.assert_close(whole(again, ids), whole(by_content, ids), **CLOSE)


# Errors


def test_what_cannot_be_done_is_refused(theirs, ours):
    ids = sample(1, 8)
    with pytest.raises(ValueError, match="attention_mask: expected a mask of padding"):
        whole(ours, ids, attention_mask=torch.zeros(1, 1, 8, 8))
    with pytest.raises(ValueError, match="output_attentions"):
        whole(ours, ids, output_attentions=True)
    with pytest.raises(ValueError, match="caches of its own kind"):
        ours(ids, cache=transformers.DynamicCache())
    restart = {"position_ids": torch.arange(8)[None] % 4, "attention_mask": torch.ones_like(ids)}
    with pytest.raises(ValueError, match="position_ids: expected positions that go up by one"):
        whole(ours, ids, **restart)
    layer = ours.model.layers[0]
    with pytest.raises(RuntimeError, match="without its model"):
        layer(torch.zeros(1, 2, 4, 32))


def test_attention_dropout_is_refused_in_training_only():
    model, ids = tiny(3, 5, 16, attention_dropout=0.1), sample(1, 20)
    expected = whole(model, ids)
    dynchunk.wrap(model)
    torch.testing.assert_close(whole(model, ids), expected, **CLOSE)
    model.train()
    with pytest.raises(ValueError, match="attention_dropout: expected 0"):
        model(ids)


def test_a_cache_of_another_policy_is_refused(ours, by_content):
    _, cache = feed(by_content, sample(1, 9))
    with pytest.raises(ValueError, match="cache: it was filled under another policy"):
        feed(ours, sample(1, 1), cache=cache)


def test_policies_that_the_weights_do_not_allow_are_refused(theirs):
    model = copy.deepcopy(theirs)
    own = v4_policies(model.config)
    learned = replace(own[CSA], boundaries=BoundaryRule(1, max_length=6), score=Learned(1))
    for policy, message in (
        (own[CSA], "a policy for each type of layer"),
        ({"full_attention": own[CSA]}, "policy: expected types of layers of the model"),
        ({CSA: own[HCA]}, "the model's own but for boundaries"),
        ({CSA: replace(own[CSA], reduction=MeanPool())}, "the model's own but for boundaries"),
        ({CSA: learned}, "score: expected Hash or TokenClasses"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            dynchunk.wrap(model, policy)
    rule = BoundaryRule(1, max_length=6)
    dynchunk.wrap(model, {CSA: replace(own[CSA], boundaries=rule)})
    with pytest.raises(ValueError, match="score: the policy has boundaries and no score"):
        whole(model, sample(1, 9))
    with pytest.raises(ValueError, match="wrapped"):
        dynchunk.wrap(model)
    dynchunk.unwrap(model)
    tokens = replace(own[CSA], boundaries=rule, score=TokenClasses((7,)))
    dynchunk.wrap(model, {CSA: tokens})
    with pytest.raises(ValueError, match="inputs_embeds"):
        model(inputs_embeds=torch.zeros(1, 4, 32))


# Memory

PEAK = """
import resource, sys
import torch
from v4_models import CSA, HCA, SLIDING, tiny
import dynchunk

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

model = tiny(4, 128, 128, topk=512, layers=(SLIDING, HCA, CSA, HCA))
dynchunk.wrap(model)
with torch.no_grad():
    model(torch.zeros(1, 300, dtype=torch.int64), logits_to_keep=1)
    before = peak()
    out = model(torch.randint(64, (1, 8192)), logits_to_keep=1)
print(peak() - before, out.cache.nbytes)
"""


def test_memory_is_linear_in_the_tokens():
    run = [sys.executable, "-c", PEAK]
    found = subprocess.run(
        run, cwd=Path(__file__).parent, check=True, capture_output=True, text=True
    )
    mebibytes, held = map(float, found.stdout.split())
    # A mask of 8192 x 8192 alone would take 256 MiB, and transformers takes more than 4000.
    assert mebibytes < 250
    assert held < 64 * 8192
