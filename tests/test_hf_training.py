"""Gradients through wrapped models, checkpointing, compilation."""

import warnings

import hf_models
import pytest
import torch
import transformers
from torch import distributed, nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard

import dynchunk
from dynchunk import BoundaryRule, FixedStride
from dynchunk.attention import Hash, Learned, MeanPool, Midpoints, Policy, Router, full
from dynchunk.attention.specs import AsScored
from dynchunk.integrations.hf.trainable import load_weights

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


# Entries with weights

LEARNED = Policy(
    BoundaryRule(1, max_length=6), Learned(1), views=(AsScored(), Midpoints()), **POOLED
)


def shake(model):
    """Give every new weight a value that matters."""
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "entry_pooling" in name or "boundary_scores" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.3)


def new_weights(model):
    return {
        name: p
        for name, p in model.named_parameters()
        if "entry_pooling" in name or "boundary_scores" in name
    }


@pytest.mark.parametrize("name", ["fixed", "views"])
def test_entries_with_weights_start_as_the_means(name):
    ids, mask = hf_models.batch((12, 39))
    model = hf_models.build("llama")
    place = hf_models.positions(mask)
    options = {"attention_mask": mask, "position_ids": place, "use_cache": False}
    with torch.no_grad():
        with wrap(model, POLICIES[name]):
            expected = model(ids, **options).logits
        with wrap(model, POLICIES[name], trainable=True):
            assert len(new_weights(model)) == 2 * 4
            found = model(ids, **options).logits
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()])
    assert not new_weights(model)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("policy", [POLICIES["views"], LEARNED], ids=["hash", "learned"])
def test_weights_of_entries_stream_as_they_train(policy, family):
    ids, mask = hf_models.batch((12, 39))
    place = hf_models.positions(mask)
    with dynchunk.wrap(hf_models.build(family), policy, trainable=True) as model:
        shake(model)
        alone = model(ids, attention_mask=mask, position_ids=place, use_cache=False).logits
        cache, found = None, []
        with torch.no_grad():
            for part in torch.arange(39).split([20] + [1] * 19):
                seen = mask[:, : part[-1] + 1]
                out = model(
                    ids[:, part], attention_mask=seen, position_ids=place[:, part], cache=cache
                )
                cache, _ = out.cache, found.append(out.logits)
        real = mask.bool()
        torch.testing.assert_close(torch.cat(found, 1)[real], alone[real], atol=1e-4, rtol=1e-4)


def test_every_new_weight_gets_a_gradient_also_with_checkpointing():
    ids, mask = hf_models.batch((30, 39))
    model = hf_models.build("llama").train()
    with dynchunk.wrap(model, LEARNED, trainable=True):
        shake(model)
        loss_and_gradients(model, ids, mask)
        gradients = {name: p.grad.clone() for name, p in new_weights(model).items()}
        assert all(g.any() for g in gradients.values())
        model.gradient_checkpointing_enable({"use_reentrant": False})
        loss_and_gradients(model, ids, mask)
        for name, p in new_weights(model).items():
            torch.testing.assert_close(p.grad, gradients[name])


def test_some_steps_of_training_lower_the_loss():
    ids, mask = hf_models.batch((60, 60))
    with dynchunk.wrap(hf_models.build("llama").train(), LEARNED, trainable=True) as model:
        model.requires_grad_(False)
        weights = list(new_weights(model).values())
        optimizer = torch.optim.Adam([w.requires_grad_() for w in weights], lr=0.05)
        losses = []
        for _ in range(15):
            loss = model(ids, attention_mask=mask, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1


def test_what_was_trained_is_saved_and_loaded(tmp_path):
    ids, mask = hf_models.batch((30, 39))
    model = hf_models.build("llama")
    with torch.no_grad():
        with dynchunk.wrap(model, LEARNED, trainable=True):
            shake(model)
            expected = model(ids, attention_mask=mask).logits
            model.save_pretrained(tmp_path)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        with dynchunk.wrap(loaded):  # the config says that entries have weights
            before = loaded(ids, attention_mask=mask).logits
            load_weights(loaded, tmp_path)
            found = loaded(ids, attention_mask=mask).logits
        torch.testing.assert_close(found[mask.bool()], expected[mask.bool()])
        assert not torch.allclose(before[mask.bool()], expected[mask.bool()], atol=1e-3)
        with (
            dynchunk.wrap(hf_models.build("llama"), POLICIES["fixed"], trainable=True) as other,
            pytest.raises(ValueError, match="it lacks or has beside them"),
        ):
            load_weights(other, tmp_path)
    with pytest.raises(ValueError, match="expected one wrapped with trainable=True"):
        load_weights(model, tmp_path)


def test_adapters_save_the_new_modules_and_train_them():
    peft = pytest.importorskip("peft")
    ids, _ = hf_models.batch((39,))
    model = dynchunk.wrap(hf_models.build("llama").train(), POLICIES["views"], trainable=True)
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["entry_pooling"])
    )
    adapted(ids, labels=ids).loss.backward()
    trained = {
        name for name, p in adapted.named_parameters() if p.grad is not None and p.grad.any()
    }
    assert sum("entry_pooling.modules_to_save" in name for name in trained) == 2 * 4
    assert sum("lora_B" in name for name in trained) == 2
    adapted.eval()
    with torch.no_grad():
        text = adapted.generate(input_ids=ids, max_new_tokens=8, do_sample=False)
    assert text.shape == (1, 47)


def test_the_trainer_trains_it(tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed, which Trainer needs")
    ids, _ = hf_models.batch((40, 40, 40, 40))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    options = transformers.TrainingArguments(
        str(tmp_path), max_steps=3, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        disable_tqdm=True, save_strategy="no", learning_rate=0.01,
    )  # fmt: skip
    with dynchunk.wrap(hf_models.build("llama"), LEARNED, trainable=True) as model:
        before = {name: p.clone() for name, p in new_weights(model).items()}
        transformers.Trainer(model, options, train_dataset=rows).train()
        moved = [name for name, p in new_weights(model).items() if not torch.equal(p, before[name])]
        assert len(moved) == len(before)


@pytest.fixture
def process_group():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_gradients_of_a_distributed_model(family, kind, process_group):
    """One process: what matters is that every weight is found, gathered and freed."""
    ids, mask = hf_models.batch((30, 39))
    model, other = (hf_models.build(family).train() for _ in range(2))
    for one in (model, other):
        shake(dynchunk.wrap(one, LEARNED, trainable=True))
    loss_and_gradients(model, ids, mask)
    if kind == "ddp":
        parallel = nn.parallel.DistributedDataParallel(other)
    else:
        mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
        for layer in (*other.model.layers, other):
            fully_shard(layer, mesh=mesh)
        parallel = other
    loss_and_gradients(parallel, ids, mask)
    for x, y in zip(model.parameters(), other.parameters(), strict=True):
        found = y.grad.full_tensor() if kind == "fsdp2" else y.grad
        torch.testing.assert_close(found, x.grad)


def test_what_cannot_be_trained_is_refused():
    model = hf_models.build("llama")
    kind = type(model)
    for policy, message in (
        (full(), "expected a policy with chunks and MeanPool entries"),
        (Policy(BoundaryRule(0, threshold=0.5), Router(), **POOLED), "expected Learned"),
    ):
        with pytest.raises(ValueError, match=message):
            dynchunk.wrap(model, policy, trainable=True)
        assert type(model) is kind
        assert "dynchunk" not in vars(model.config)
    with pytest.raises(ValueError, match="trainable=True"):
        wrap(model, LEARNED)
