"""The cache as a state machine: after any operations, the next logits are those of a fresh run."""

import os
import tempfile
from pathlib import Path

import attention_oracle as oracle
import torch
from attention_oracle import POLICIES, VOCAB
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from dynchunk.attention import ChunkedTransformer, ModelConfig
from dynchunk.boundaries import SharePlan
from dynchunk.cache import Cache

#: Random steps in all: those of the issue.
STEPS = 20_000 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 1_500
STEPS_EACH = 50

LONGEST, MOST_ROWS = 40, 4


def model_of(*names, heads=(2, 1), **options):
    pattern = tuple(POLICIES[name] for name in names)
    sizes = {"heads": heads[0], "kv_heads": heads[1], "head_dim": 8, "mlp_dim": 8}
    config = ModelConfig(VOCAB, 8, len(names), **sizes, pattern=pattern, **options)
    torch.manual_seed(0)
    return oracle.randomise(ChunkedTransformer(config)).double()


#: Small models that between them have every policy, K = V or not, shared boundaries or none.
MODELS = {
    "grids": lambda: model_of("fixed-staggered", "overlap", slopes=True, shared_kv=True),
    "mean": lambda: model_of("mean", "tail", "full"),
    "top-k": lambda: model_of("top-2", "sliding", shared_kv=True),
    "hash": lambda: model_of("top-2-overlap-views", "hash-moved", "hash-rescored", heads=(4, 2)),
    "learned": lambda: model_of("learned", "router", "mean-own", shared_kv=True),
    "every-layer": lambda: model_of(
        "classes", "classes", sharing=SharePlan.every_layer(2), slopes=True
    ),
}


def expected_logits(model, histories, counts):
    """Logits of the last ``counts`` tokens of each history, all at once and without a cache."""
    packed = torch.cat([torch.tensor(tokens, dtype=torch.int64) for tokens in histories])
    lengths = [len(tokens) for tokens in histories]
    cu = torch.tensor([0, *lengths]).cumsum(0)
    logits = model(packed, cu).logits
    ends = cu[1:].tolist()
    return torch.cat([logits[end - n : end] for end, n in zip(ends, counts, strict=True)])


class CacheMachine(RuleBasedStateMachine):
    """One cache, perhaps a fork of it, and the tokens that each sequence has really seen."""

    @initialize(
        name=st.sampled_from(sorted(MODELS)),
        rollback=st.sampled_from([None, 6]),
        batch=st.integers(1, 3),
        page_size=st.sampled_from([1, 3, 64]),
    )
    def start(self, name, rollback, batch, page_size):
        self.model = MODELS[name]()
        self.cache = Cache.of(self.model.config, batch, rollback=rollback, page_size=page_size)
        self.histories = [[] for _ in range(batch)]
        self.other = None

    def _append(self, counts, seed, vocab):
        counts = [
            min(n, LONGEST - len(tokens)) for n, tokens in zip(counts, self.histories, strict=True)
        ]
        generator = torch.Generator().manual_seed(seed)
        new = [torch.randint(vocab, (n,), generator=generator) for n in counts]
        for tokens, more in zip(self.histories, new, strict=True):
            tokens += more.tolist()
        cu = torch.tensor([0, *counts]).cumsum(0)
        got = self.model(torch.cat(new), cu, cache=self.cache).logits
        expected = expected_logits(self.model, self.histories, counts)
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)

    @rule(seed=st.integers(0, 1000), vocab=st.sampled_from([VOCAB, 3]), times=st.integers(1, 4))
    def append_a_token(self, seed, vocab, times):
        for i in range(times):
            self._append([1] * self.cache.batch, seed + i, vocab)

    @rule(data=st.data(), seed=st.integers(0, 1000), vocab=st.sampled_from([VOCAB, 3]))
    def append_some(self, data, seed, vocab):
        sizes = st.sampled_from([0, 1, 2, 3, 5, 9])
        self._append(data.draw(st.tuples(*[sizes] * self.cache.batch)), seed, vocab)

    @rule(data=st.data(), seed=st.integers(0, 1000))
    def append_many(self, data, seed):
        sizes = st.integers(0, LONGEST // 2)
        self._append(data.draw(st.tuples(*[sizes] * self.cache.batch)), seed, VOCAB)

    @rule(data=st.data())
    def crop(self, data):
        to = []
        for tokens, least in zip(self.histories, self.cache.croppable, strict=True):
            choices = st.integers(least, len(tokens))
            to.append(data.draw(choices | st.just(0) if data.draw(st.booleans()) else choices))
        self.cache.crop(to)
        self.histories = [tokens[:n] for tokens, n in zip(self.histories, to, strict=True)]

    @rule(n=st.integers(1, 6))
    def drop_the_last(self, n):
        allowed = all(
            len(tokens) - n >= least or len(tokens) <= n
            for tokens, least in zip(self.histories, self.cache.croppable, strict=True)
        )
        if allowed:
            self.cache.crop(-n)
            self.histories = [tokens[: max(0, len(tokens) - n)] for tokens in self.histories]

    @rule(data=st.data())
    def reorder(self, data):
        rows = data.draw(st.tuples(*[st.integers(0, self.cache.batch - 1)] * self.cache.batch))
        self.cache.reorder(torch.tensor(rows))
        self.histories = [list(self.histories[b]) for b in rows]

    @rule(data=st.data())
    def select(self, data):
        rows = data.draw(
            st.lists(st.integers(0, self.cache.batch - 1), min_size=1, max_size=MOST_ROWS)
        )
        self.cache.select(rows)
        self.histories = [list(self.histories[b]) for b in rows]

    @precondition(lambda self: 2 * self.cache.batch <= MOST_ROWS)
    @rule()
    def repeat(self):
        self.cache.repeat(2)
        self.histories = [list(tokens) for tokens in self.histories for _ in range(2)]

    @rule(data=st.data())
    def reset(self, data):
        if data.draw(st.integers(0, 4)) == 0:
            self.cache.reset()
            self.histories = [[] for _ in self.histories]
        else:
            b = data.draw(st.integers(0, self.cache.batch - 1))
            self.cache.reset(b)
            self.histories[b] = []

    @rule()
    def fork(self):
        self.other = (self.cache.fork(), [list(tokens) for tokens in self.histories])

    @precondition(lambda self: self.other is not None)
    @rule(keep=st.booleans())
    def change_to_the_fork(self, keep):
        mine = (self.cache, self.histories)
        self.cache, self.histories = self.other
        self.other = mine if keep else None

    @rule()
    def save_and_load(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "cache.safetensors"
            self.cache.save(path)
            self.cache = Cache.load(path, self.model.config)

    @invariant()
    def all_invariants_hold(self):
        if hasattr(self, "cache"):
            self.cache.check()
            assert self.cache.lengths == tuple(map(len, self.histories))
            if self.other is not None:
                self.other[0].check()


def test_any_operations_then_tokens_equal_a_fresh_run():
    options = {"max_examples": STEPS // STEPS_EACH, "stateful_step_count": STEPS_EACH}
    run_state_machine_as_test(CacheMachine, settings=settings(deadline=None, **options))
