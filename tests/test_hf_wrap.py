"""Wrapped models: equal to unwrapped ones where everything is kept, and to themselves elsewhere."""

import copy
import sys
import warnings

import hf_models
import pytest
import torch
import transformers

import dynchunk
from dynchunk import BoundaryRule, FixedStride, HashScore
from dynchunk.attention import (
    GatedPool,
    Hash,
    MeanPool,
    Midpoints,
    Policy,
    TopK,
    full,
)
from dynchunk.attention.specs import AsScored
from dynchunk.integrations.hf.cache import ChunkedCache
from dynchunk.integrations.wrap import supported

RULE = BoundaryRule(2, max_length=6)
POOLED = {"reduction": MeanPool(), "window": 8, "cover": "tail"}
POLICIES = {
    "fixed": Policy(FixedStride(4), **POOLED),
    "hash": Policy(RULE, Hash(2), **POOLED),
    "views": Policy(RULE, Hash(2), views=(AsScored(), Midpoints()), **POOLED),
    "window": Policy(window=8),
}


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def models():
    return {family: hf_models.build(family) for family in hf_models.FAMILIES}


def wrap(model, policy=None, **options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "dynchunk.wrap: mean-pooled")
        return dynchunk.wrap(model, policy, **options)


def logits(model, ids, mask, **options):
    return model(ids, attention_mask=mask, position_ids=hf_models.positions(mask), **options).logits


# Everything kept: the same model


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", hf_models.FAMILIES)
def test_keeping_everything_is_the_unwrapped_model(family, implementation, models):
    model = models[family]
    if family == "gpt_oss" and implementation == "sdpa":
        implementation = model.config._attn_implementation  # it has no other than eager
    model.set_attn_implementation(implementation)
    ids, mask = hf_models.batch((5, 20, 13))
    one = ids[1:2]
    expected = logits(model, ids, mask), logits(model, one, mask[1:2], use_cache=False)
    text = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    with wrap(model):
        assert model.dynchunk.report.tested
        found = logits(model, ids, mask), logits(model, one, mask[1:2], use_cache=False)
        for x, y in zip(found, expected, strict=True):
            real = mask.bool() if len(x) == 3 else mask[1:2].bool()
            torch.testing.assert_close(x[real], y[real], atol=1e-4, rtol=1e-4)
        again = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    assert torch.equal(again, text)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma3_text"])
def test_bfloat16_is_as_near_to_float32_as_unwrapped(family):
    ids, mask = hf_models.batch((9, 30))
    real, exact = mask.bool(), logits(hf_models.build(family), ids, mask)
    model = hf_models.build(family).bfloat16()
    off = (logits(model, ids, mask).float() - exact)[real].square().mean().sqrt()
    with wrap(model):
        found = logits(model, ids, mask)
        assert found.dtype == torch.bfloat16
        assert (found.float() - exact)[real].square().mean().sqrt() < 1.3 * off
        text = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    assert text.shape == (2, 34)


MODES = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 10},
    "beams": {"num_beams": 3, "do_sample": False},
    "returned": {"do_sample": True, "num_return_sequences": 3},
    "beams-returned": {"num_beams": 3, "num_return_sequences": 2, "do_sample": False},
    "prefill-in-chunks": {"do_sample": False, "prefill_chunk_size": 6},
    "no-cache": {"do_sample": False, "use_cache": False},
}


def generate(model, ids, mask, tokens=12, **options):
    torch.manual_seed(7)
    return model.generate(ids, attention_mask=mask, max_new_tokens=tokens, **options)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_every_mode_of_generation(family, mode, models):
    model = models[family]
    ids, mask = hf_models.batch((9, 17))
    expected = generate(model, ids, mask, **MODES[mode])
    with wrap(model):
        assert torch.equal(generate(model, ids, mask, **MODES[mode]), expected)


def test_prompt_lookup_and_assisted_generation_go_back(models):
    model = models["llama"]
    pattern = torch.tensor([[5, 9, 14, 3]]).repeat(1, 6)
    mask = torch.ones_like(pattern)
    for options in (
        {"prompt_lookup_num_tokens": 3},
        {"assistant_model": hf_models.build("llama", seed=1)},
    ):
        expected = generate(model, pattern, mask, do_sample=False, **options)
        with wrap(model):
            cache = model.dynchunk.cache()
            crops = []
            crop = cache.crop
            cache.crop = lambda n, crop=crop, crops=crops: (crops.append(n), crop(n))
            found = generate(model, pattern, mask, do_sample=False, cache=cache, **options)
        assert torch.equal(found, expected)
        assert min(crops) < 0


# Pooled: each row alone, any split, any mode


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("name", POLICIES)
def test_rows_of_a_padded_batch_are_each_row_alone(name, left, models):
    """CASES 2 and 35: rows of 5, 9, 16 (and 40) tokens, padded on either side."""
    with wrap(models["llama"], POLICIES[name]) as model:
        lengths = (5, 9, 16, 40)
        ids, mask = hf_models.batch(lengths, left=left)
        together = logits(model, ids, mask)
        for b in range(len(lengths)):
            real = mask[b].bool()
            alone = model(ids[b : b + 1, real]).logits
            torch.testing.assert_close(together[b][real], alone[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
def test_prefill_equals_one_token_at_a_time(family, name, models):
    with wrap(models[family], POLICIES[name]) as model:
        ids, mask = hf_models.batch((30, 41))
        whole = logits(model, ids, mask)
        cache, found = None, []
        place = hf_models.positions(mask)
        for part in torch.arange(ids.shape[1]).split([7, 20] + [1] * 14):
            seen = mask[:, : part[-1] + 1]
            out = model(ids[:, part], attention_mask=seen, position_ids=place[:, part], cache=cache)
            cache, _ = out.cache, found.append(out.logits)
        real = mask.bool()
        torch.testing.assert_close(torch.cat(found, 1)[real], whole[real], atol=1e-4, rtol=1e-4)
        without = logits(model, ids, mask, use_cache=False)
        torch.testing.assert_close(without[real], whole[real], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", POLICIES)
def test_pooled_greedy_text_is_that_of_full_forwards(name, models):
    with wrap(models["llama"], POLICIES[name]) as model:
        ids, mask = hf_models.batch((9, 24))
        found = generate(model, ids, mask, do_sample=False)
        again = generate(model, ids, mask, do_sample=False, use_cache=False)
        assert torch.equal(found, again)


@pytest.mark.parametrize("mode", ["beams", "returned", "prefill-in-chunks"])
def test_pooled_rows_are_generated_alone(mode, models):
    """CASES 27 for beams: what is reordered is the state of chunks, too."""
    with wrap(models["llama"], POLICIES["hash"]) as model:
        ids, mask = hf_models.batch((11, 26))
        options = {**MODES[mode], "do_sample": False, "num_return_sequences": 1}
        together = generate(model, ids, mask, **options)
        for b in range(2):
            real = mask[b].bool()
            alone = generate(model, ids[b : b + 1, real], mask[b : b + 1, real], **options)
            assert torch.equal(together[b, ids.shape[1] :], alone[0, int(real.sum()) :])


def test_pooled_prompt_lookup_is_greedy(models):
    with wrap(models["llama"], POLICIES["hash"]) as model:
        ids = torch.tensor([[5, 9, 14, 3]]).repeat(1, 8)
        mask = torch.ones_like(ids)
        greedy = generate(model, ids, mask, do_sample=False)
        lookup = generate(model, ids, mask, do_sample=False, prompt_lookup_num_tokens=3)
        assert torch.equal(greedy, lookup)


@pytest.mark.parametrize("name", ["hash", "window"])
def test_no_future_token_changes_a_past_logit(name, models):
    """CASES 20."""
    with wrap(models["llama"], POLICIES[name]) as model:
        ids, _ = hf_models.batch((30,))
        before = model(ids).logits
        for t in (0, 5, 13, 29):
            other = ids.clone()
            other[:, t] = other[:, t] % 60 + 2
            after = model(other).logits
            torch.testing.assert_close(after[:, :t], before[:, :t], atol=1e-6, rtol=0)
            assert not torch.allclose(after[:, t:], before[:, t:], atol=1e-3)


def test_turns_go_on_with_the_same_cache(models):
    with wrap(models["llama"], POLICIES["hash"]) as model:
        ids, mask = hf_models.batch((9, 24))
        out = generate(model, ids, mask, do_sample=False, return_dict_in_generate=True)
        more, _ = hf_models.batch((7, 7), seed=3)
        turn = torch.cat([out.sequences, more], 1)
        seen = torch.cat([mask, torch.ones(2, turn.shape[1] - mask.shape[1], dtype=mask.dtype)], 1)
        fresh = generate(model, turn, seen, do_sample=False)
        assert torch.equal(generate(model, turn, seen, do_sample=False, cache=out.cache), fresh)


def test_packed_documents_do_not_see_each_other(models):
    """Also where transformers, with a cache, would let them."""
    ids, _ = hf_models.batch((30,))
    place = torch.cat([torch.arange(11), torch.arange(19)])[None]
    for name in POLICIES:
        with wrap(models["llama"], POLICIES[name]) as model:
            out = model(ids, position_ids=place)
            for part in (slice(0, 11), slice(11, 30)):
                alone = model(ids[:, part]).logits
                torch.testing.assert_close(out.logits[:, part], alone, atol=1e-4, rtol=1e-4)
            assert out.cache is None


def test_positions_and_masks_keep_the_logical_length(models):
    """CASES 33: positions count tokens seen, not rows held."""
    with wrap(models["llama"], Policy(window=8), rollback=0) as model:
        ids, _ = hf_models.batch((150,))
        cache = model(ids[:, :149]).cache
        assert (cache.get_seq_length(), cache.state.physical_lengths(0)) == (149, (7,))
        out = model(ids[:, 149:], cache=cache).logits
        torch.testing.assert_close(out, model(ids).logits[:, 149:], atol=1e-4, rtol=1e-4)


def test_bytes_are_those_of_kv_heads_and_of_storages():
    """CASES 34 and 36: 9 query heads, 3 KV heads, what the storages hold."""
    model = hf_models.build(
        "llama", hidden_size=72, num_attention_heads=9, num_key_value_heads=3, head_dim=8
    )
    ids, _ = hf_models.batch((1000,))
    with wrap(model, Policy(FixedStride(4), **POOLED), rollback=0):
        cache = model(ids).cache
        tokens = 2 * 2 * 3 * 8 * 4  # layers, keys and values, KV heads, channels, bytes
        assert cache.full_nbytes == 1000 * tokens
        storages = {
            x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
            for layer in cache.state.layers
            for x in (*layer.rows.values(), *layer.entries.values())
        }
        assert 0.25 * 1000 * tokens < sum(storages.values()) <= cache.nbytes < 0.45 * 1000 * tokens
        assert f"{cache.nbytes / cache.full_nbytes:.3f} of a full cache" in repr(cache)
    with wrap(model):
        assert 1000 * tokens <= model(ids).cache.nbytes < 1.2 * 1000 * tokens


def test_adapters_and_their_wrapping():
    peft = pytest.importorskip("peft")
    model = hf_models.build("llama")
    model = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    ).eval()
    ids, mask = hf_models.batch((9, 17))
    before = type(model), type(model.get_base_model())
    expected, text = logits(model, ids, mask), generate(model, ids, mask, do_sample=False)
    with wrap(model) as wrapped:
        assert isinstance(wrapped, peft.PeftModel)
        assert isinstance(wrapped(ids).cache, ChunkedCache)
        real = mask.bool()
        found = logits(wrapped, ids, mask)
        torch.testing.assert_close(found[real], expected[real], atol=1e-4, rtol=1e-4)
        assert torch.equal(generate(wrapped, ids, mask, do_sample=False), text)
    assert (type(model), type(model.get_base_model())) == before
    adapted = peft.get_peft_model(
        wrap(hf_models.build("llama"), POLICIES["hash"]), peft.LoraConfig(target_modules=["q_proj"])
    )
    assert isinstance(adapted(ids).cache, ChunkedCache)
    dynchunk.unwrap(adapted)
    assert type(adapted.get_base_model()) is transformers.LlamaForCausalLM


def test_copies_of_a_wrapped_model_are_wrapped(models):
    ids, _ = hf_models.batch((30,))
    with wrap(models["llama"], POLICIES["hash"]) as model:
        other, expected = copy.deepcopy(model), model(ids).logits
        dynchunk.unwrap(other)
        assert not torch.allclose(other(ids).logits, expected, atol=1e-3)
        assert torch.equal(model(ids).logits, expected)


# What wrap says and leaves behind


def test_unwrapping_leaves_nothing_behind(models):
    model = models["gemma3_text"]
    before = {name: x.clone() for name, x in model.state_dict().items()}
    config, kind = model.config.to_json_string(), type(model)
    names = set(vars(model)), set(vars(model.model)), set(vars(model.config))
    ids, mask = hf_models.batch((9, 17))
    expected = logits(model, ids, mask)
    assert dynchunk.unwrap(wrap(model, POLICIES["fixed"])) is model
    assert type(model) is kind
    assert model.config.to_json_string() == config
    assert (set(vars(model)), set(vars(model.model)), set(vars(model.config))) == names
    assert not model.model._forward_pre_hooks
    assert not model.model._forward_hooks
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert torch.equal(logits(model, ids, mask), expected)
    with pytest.raises(ValueError, match=r"expected one that dynchunk\.wrap returned"):
        dynchunk.unwrap(model)


def test_an_error_inside_the_block_unwraps_too(models):
    model = models["llama"]
    kind = type(model)
    with pytest.raises(KeyError), wrap(model):
        raise KeyError
    assert type(model) is kind


def test_the_policy_survives_saving(models, tmp_path):
    ids, _ = hf_models.batch((30,))
    policies = [None, POLICIES["hash"]]
    with wrap(models["llama"], policies) as model:
        expected = model(ids).logits
        model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(loaded) is transformers.LlamaForCausalLM
    assert not torch.allclose(loaded(ids).logits, expected, atol=1e-3)
    config = loaded.config.to_json_string()
    with wrap(loaded):
        assert loaded.dynchunk.report.wrapped == (1,)
        torch.testing.assert_close(loaded(ids).logits, expected)
    assert loaded.config.to_json_string() == config


def test_some_layers_only(models):
    ids, mask = hf_models.batch((30, 22))
    for implementation in ("sdpa", "eager"):
        model = models["qwen3"]
        model.set_attn_implementation(implementation)
        expected = logits(model, ids, mask)
        with wrap(model, full(), layers=[1]):
            assert (model.dynchunk.report.wrapped, model.dynchunk.report.kept) == ((1,), (0,))
            found = logits(model, ids, mask)
        torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], atol=1e-4, rtol=1e-4)


def test_the_report_says_what_is_done(models):
    with wrap(models["gpt_oss"], POLICIES["hash"]) as model:
        text = str(model.dynchunk.report)
    assert "1 of 2 layers wrapped" in text
    assert "sliding_attention  left as it is" in text
    assert "BoundaryRule(radius=2" in text
    assert "Hash x MeanPool x All, window 8 (tail)" in text
    assert "can be wrapped" in str(supported(models["gpt_oss"]))


def test_pooling_warns_once_of_what_it_costs(models):
    with pytest.warns(UserWarning, match=r"\.34 to \.46 nats") as found:
        dynchunk.wrap(models["llama"], POLICIES["hash"])
    dynchunk.unwrap(models["llama"])
    assert len(found) == 1
    assert found[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dynchunk.unwrap(dynchunk.wrap(models["llama"], POLICIES["window"]))


def test_a_score_of_ones_own(models):
    ids, mask = hf_models.batch((30, 22))
    with wrap(models["llama"], POLICIES["hash"]) as model:
        expected = generate(model, ids, mask, do_sample=False)
    with wrap(models["llama"], Policy(RULE, **POOLED), score=HashScore(2, 0)) as model:
        assert torch.equal(generate(model, ids, mask, do_sample=False), expected)


# Errors


def gemma2():
    config = transformers.Gemma2Config(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
        intermediate_size=8, vocab_size=8, head_dim=8, layer_types=["full_attention"],
    )  # fmt: skip
    return transformers.Gemma2Model(config)


def t5():
    config = transformers.T5Config(d_model=8, d_kv=8, d_ff=8, num_layers=1, num_heads=1)
    return transformers.T5Model(config)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: torch.nn.Linear(2, 2), "expected a transformers model"),
        (lambda: hf_models.build("mistral", sliding_window=8), "it has sliding_attention"),
        (gemma2, "attn_logit_softcapping"),
        (t5, "it has an encoder"),
        (lambda: wrap(hf_models.build("llama")), r"it is wrapped already: dynchunk\.unwrap"),
    ],
    ids=["no model", "all sliding", "softcap", "encoder", "twice"],
)
def test_models_that_cannot_be_wrapped(build, message):
    model = build()
    with pytest.raises(ValueError, match=f"model: it cannot be wrapped: .*{message}"):
        dynchunk.wrap(model)
    assert supported(model).problems


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        (Policy(FixedStride(4)), {}, "policy: reduction: expected MeanPool"),
        (Policy(FixedStride(4), reduction=GatedPool()), {}, "Raw or Evict, which have no weights"),
        (
            Policy(FixedStride(4), selection=TopK(4), **POOLED),
            {},
            "the indexer of TopK has weights",
        ),
        (Policy(RULE, Hash(2), views=(AsScored(),) * 3, **POOLED), {}, "divides the model's 2 KV"),
        ([full()], {}, "policy: expected one for each of 2 layers"),
        (full(), {"layers": [5]}, r"layers: expected numbers in \[0, 2\), got 5"),
    ],
)
def test_policies_that_do_not_fit(policy, options, message, models):
    model = models["llama"]
    kind = type(model)
    with pytest.raises(ValueError, match=message):
        wrap(model, policy, **options)
    assert type(model) is kind


def test_without_transformers_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'dynchunk\[hf\]'"):
        dynchunk.wrap(torch.nn.Linear(2, 2))


def test_forwards_that_are_refused(models):
    ids, mask = hf_models.batch((9, 12))
    with wrap(models["llama"], POLICIES["hash"]) as model:
        with pytest.raises(ValueError, match="output_attentions: entries stand for several"):
            model(ids, output_attentions=True)
        with pytest.raises(ValueError, match="which the policy decides"):
            model(ids, attention_mask=torch.ones(2, 1, 12, 12))
        with pytest.raises(ValueError, match="inputs_embeds: the policy's boundaries follow"):
            model(inputs_embeds=torch.randn(2, 12, 32))
        with pytest.raises(ValueError, match=r"got DynamicCache"):
            model(ids, cache=transformers.DynamicCache())
        with pytest.raises(ValueError, match="cache_implementation: expected None: the policy"):
            generate(model, ids, mask, cache_implementation="static")
        angles = model.model.rotary_emb(ids, torch.arange(3)[None])
        with pytest.raises(RuntimeError, match="called without its model"):
            model.model.layers[0].self_attn(torch.randn(1, 3, 32), angles)
        cache = model(ids, attention_mask=mask).cache
        with pytest.raises(ValueError, match="start a new one"):
            model(ids[:, :1], attention_mask=torch.ones(2, 13), cache=cache)
    with (
        wrap(models["llama"], POLICIES["fixed"]) as model,
        pytest.raises(ValueError, match="filled under another policy"),
    ):
        model(ids[:, :1], attention_mask=torch.cat([mask, mask[:, -1:]], 1), cache=cache)


def test_after_a_forward_that_failed_a_cache_has_to_be_reset(models):
    ids, mask = hf_models.batch((9, 12))
    with wrap(models["gemma3_text"], POLICIES["fixed"]) as model:
        expected = logits(model, ids, mask)
        cache = model.dynchunk.cache()
        fails = model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
        fails_early = model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
        for hook in (fails_early, fails):
            with pytest.raises(ZeroDivisionError):
                logits(model, ids, mask, cache=cache)
            hook.remove()
            cache.reset()
        logits(model, ids, mask, cache=cache)
        fails = model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
        more = torch.nn.functional.pad(mask, (0, 1), value=1)
        with pytest.raises(ZeroDivisionError):
            model(ids[:, :1], attention_mask=more, cache=cache)
        fails.remove()
        with pytest.raises(RuntimeError, match="reset"):
            model(ids[:, :1], attention_mask=more, cache=cache)
        cache.reset()
        torch.testing.assert_close(logits(model, ids, mask, cache=cache), expected)


def test_embeddings_do_where_no_score_reads_ids(models):
    ids, mask = hf_models.batch((9, 12))
    with wrap(models["llama"], POLICIES["fixed"]) as model:
        embeds = model.get_input_embeddings()(ids)
        expected = logits(model, ids, mask)[mask.bool()]
        place = hf_models.positions(mask)
        found = model(inputs_embeds=embeds, attention_mask=mask, position_ids=place).logits
        torch.testing.assert_close(found[mask.bool()], expected)
