"""Gradients through wrapped models, checkpointing, compilation."""

import warnings

import hf_models
import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

import dynchunk
from dynchunk import BoundaryRule, FixedStride
from dynchunk.attention import Hash, MeanPool, Midpoints, Policy, full
from dynchunk.attention.specs import AsScored

POOLED = {"reduction": MeanPool(), "window": 8, "cover": "tail"}
POLICIES = {
    "full": full(),
    "fixed": Policy(FixedStride(4), **POOLED),
    "views": Policy(
        BoundaryRule(2, max_length=6), Hash(2), views=(AsScored(), Midpoints()), **POOLED
    ),
}


def wrap(model, policy, **options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "dynchunk.wrap: mean-pooled")
        return dynchunk.wrap(model, policy, **options)


def loss_and_gradients(model, ids, mask):
    labels = ids.masked_fill(mask == 0, -100)
    place = hf_models.positions(mask)
    loss = model(ids, attention_mask=mask, position_ids=place, labels=labels).loss
    model.zero_grad()
    loss.backward()
    return loss, [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "granite"])
def test_gradients_of_everything_kept_are_the_unwrapped_ones(family):
    model = hf_models.build(family).train()
    ids, mask = hf_models.batch((12, 19))
    loss, gradients = loss_and_gradients(model, ids, mask)
    with wrap(model, full()):
        again, found = loss_and_gradients(model, ids, mask)
    torch.testing.assert_close(again, loss)
    for x, y in zip(found, gradients, strict=True):
        torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", POLICIES)
def test_the_differentiable_forward_is_the_streaming_one(name):
    ids, mask = hf_models.batch((12, 39))
    place = hf_models.positions(mask)
    with wrap(hf_models.build("llama"), POLICIES[name]) as model:
        with torch.no_grad():
            streaming = model(ids, attention_mask=mask, position_ids=place).logits
        alone = model(ids, attention_mask=mask, position_ids=place, use_cache=False).logits
        real = mask.bool()
        torch.testing.assert_close(alone[real], streaming[real], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", POLICIES)
def test_checkpointing_changes_no_gradient(name):
    """Also when another forward comes between a forward and its backward."""
    model = hf_models.build("llama").train()
    ids, mask = hf_models.batch((12, 30))
    with wrap(model, POLICIES[name]):
        _, gradients = loss_and_gradients(model, ids, mask)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        first = model(ids, attention_mask=mask, position_ids=hf_models.positions(mask)).logits
        model(ids[:, :7])
        labels = ids.masked_fill(mask == 0, -100)
        loss = model.loss_function(first, labels, vocab_size=hf_models.VOCAB)
        model.zero_grad()
        loss.backward()
        found = [p.grad for p in model.parameters() if p.grad is not None]
    for x, y in zip(found, gradients, strict=True):
        torch.testing.assert_close(x, y)


def test_gradients_that_a_cache_would_lose_are_refused():
    ids, _ = hf_models.batch((12,))
    with wrap(hf_models.build("llama"), POLICIES["fixed"]) as model:
        loss = model(ids, labels=ids).loss
        with pytest.raises(RuntimeError, match="call the model with use_cache=False"):
            loss.backward()
        model(ids, labels=ids, use_cache=False).loss.backward()
        assert model.model.layers[0].self_attn.k_proj.weight.grad.any()


def test_dropout_of_attention_is_refused():
    model = hf_models.build("llama", attention_dropout=0.1).train()
    ids, _ = hf_models.batch((12,))
    with wrap(model, full()), pytest.raises(ValueError, match="attention_dropout: expected 0"):
        model(ids)


def test_a_compiled_model_decodes_the_same():
    """The graph breaks where the batch is read and in each layer's attention, and only there."""
    ids, mask = hf_models.batch((9, 24))
    model, compiler = hf_models.build("llama", num_hidden_layers=1), CompileCounter()
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad(), wrap(model, POLICIES["views"]):
        expected = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
        model.forward = torch.compile(model.forward, backend=compiler, dynamic=True)
        try:
            found = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
        finally:
            del model.forward
    assert torch.equal(found, expected)
    assert compiler.op_count > 20
    for reason in counters["graph_break"]:
        assert "torch.compiler.disable" in reason
