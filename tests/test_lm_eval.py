import json
from pathlib import Path

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import dynchunk
from dynchunk.attention import MeanPool, Policy
from dynchunk.boundaries import FixedStride
from dynchunk.integrations.lm_eval import ChunkedLM

TASKS = Path(__file__).parents[1] / "benchmarks" / "tasks"
POOLED = Policy(FixedStride(4), reduction=MeanPool(), window=8, cover="tail")
PAIRS = [("the cat sat", " on"), ("", "dog"), ("on the mat the dog", " ran over it"), ("a", "a")]


def make_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def tokenizer():
    """One token a character."""
    characters = {chr(i): i for i in range(128)}
    tokenizer = Tokenizer(models.WordLevel(characters, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(?m:.)"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="\0", pad_token="\0")


def likelihoods(lm):
    encode = lm.tokenizer.encode
    requests = [((a, b), encode(a) or [0], encode(b)) for a, b in PAIRS]
    return lm._loglikelihood_tokens(requests, disable_tqdm=True)


def assert_same(found, expected):
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    values = [[value for value, _ in side] for side in (found, expected)]
    torch.testing.assert_close(*map(torch.tensor, values), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("stepwise", [False, True])
def test_keeping_everything_changes_no_likelihood(tokenizer, stepwise):
    options = {"device": "cpu", "batch_size": 2, "max_length": 64}
    expected = likelihoods(HFLM(pretrained=make_model(), tokenizer=tokenizer, **options))
    lm = ChunkedLM(dynchunk.wrap(make_model()), tokenizer, stepwise=stepwise, **options)
    assert_same(likelihoods(lm), expected)


@pytest.mark.filterwarnings("ignore:dynchunk.wrap")
def test_stepping_equals_one_forward_where_the_policy_does(tokenizer):
    """Entries do not depend on how a text is split, so neither does its likelihood."""
    model = dynchunk.wrap(make_model(), POOLED)
    options = {"device": "cpu", "max_length": 64}
    plain = likelihoods(ChunkedLM(model, tokenizer, **options))
    assert_same(likelihoods(ChunkedLM(model, tokenizer, stepwise=True, **options)), plain)


@pytest.mark.filterwarnings("ignore:dynchunk.wrap")
def test_the_task_that_ships_runs_and_records_the_policy(tokenizer):
    lm = ChunkedLM(dynchunk.wrap(make_model(), POOLED), tokenizer, device="cpu", max_length=512)
    found = simple_evaluate(
        lm,
        tasks=["dynchunk_recall"],
        limit=3,
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
        metadata={"records": 3, "filler": 2},
        bootstrap_iters=0,
    )
    assert found["results"]["dynchunk_recall"]["exact_match,none"] == 0  # weights are random
    samples = found["samples"]["dynchunk_recall"]
    assert [len(s["doc"]["text"]) - len(s["doc"]["text"].lstrip()) for s in samples] == [0, 1, 2]
    assert all(s["doc"]["answer"].strip() in s["doc"]["text"] for s in samples)
    kept = json.loads(json.dumps(found["config"]["dynchunk_policies"]))
    assert Policy.from_dict(kept[0]).boundaries == POOLED.boundaries


def test_an_unwrapped_model_is_refused(tokenizer):
    with pytest.raises(ValueError, match="model: expected one that dynchunk"):
        ChunkedLM(make_model(), tokenizer)
