import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops_oracle import assert_close, few, normal

from dynchunk.chunks import Chunks
from dynchunk.ops.layout import Spans
from dynchunk.ops.pool import pool
from dynchunk.ops.pool_state import PoolState, pool_state


def feed(chunks, steps, values, gate=None, slot_bias=None):
    """State after the tokens came in pieces of ``steps``."""
    state = PoolState.empty(len(chunks), *values.shape[1:], dtype=values.dtype)
    begin = 0
    while begin < len(values):
        end = min(begin + next(steps), len(values))
        starts, ends = chunks.starts.clamp(begin, end), chunks.ends.clamp(begin, end)
        piece = None if gate is None else gate[begin:end]
        state = pool_state(
            values[begin:end], state, starts - begin, ends - begin, starts - chunks.starts,
            gate=piece, slot_bias=slot_bias,
        )  # fmt: skip
        begin = end
    return state


@few
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.sampled_from(["mean", "gate", "gate+bias"]),
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
)
def test_p3_any_split_gives_the_entries_of_one_shot(lengths, mode, steps):
    chunks = Chunks.from_lengths(lengths)
    values = normal(chunks.num_tokens, 2, 3)
    gate = 30 * normal(*values.shape, seed=1) if "gate" in mode else None
    slot_bias = normal(4, 2, 3, seed=2) if "bias" in mode else None
    endless = (n for _ in iter(int, 1) for n in steps)
    state = feed(chunks, endless, values, gate, slot_bias)
    expected = pool(values, Spans.of(chunks), gate=gate, slot_bias=slot_bias)
    assert_close(state.entries(), expected)


def test_its_size_does_not_depend_on_the_chunk():
    values = normal(1000, 1, 4)
    state = feed(Chunks.from_lengths([1000]), iter([7] * 1000), values)
    assert [x.numel() for x in state] == [4, 4, 4]
    assert_close(state.entries(), values.mean(0, keepdim=True))


def test_a_chunk_without_a_token_keeps_its_state():
    at = torch.zeros(2, dtype=torch.int64)
    state = pool_state(torch.ones(3, 1, 4), PoolState.empty(2, 1, 4), at, at, at)
    assert all(torch.equal(a, b) for a, b in zip(state, PoolState.empty(2, 1, 4), strict=True))
    assert not state.entries().any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"values": torch.zeros(3, 4)}, r"values: .*\[T, H, D\]"),
        ({"state": PoolState.empty(2, 1, 5)}, r"state.highest: .*D = 4"),
        ({"state": PoolState.empty(2, 1, 4, dtype=torch.float64)}, "state: .*float32"),
        ({"starts": torch.zeros(3, dtype=torch.int64)}, "starts: .*N = 2"),
        ({"gate": torch.zeros(2, 1, 4)}, "gate: .*broadcasts"),
        ({"impl": "fast"}, "impl: expected one of None, 'reference', 'triton'"),
    ],
)
def test_errors_name_the_argument(changes, message):
    at = torch.zeros(2, dtype=torch.int64)
    arguments = {
        "values": torch.zeros(3, 1, 4),
        "state": PoolState.empty(2, 1, 4),
        "starts": at,
        "ends": at,
        "slots": at,
    }
    with pytest.raises(ValueError, match=message):
        pool_state(**(arguments | changes))
