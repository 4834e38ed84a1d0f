"""The rule's edges: input formats, errors, the published probe, the stream's state."""

import math
import re
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynchunk import (
    BoundaryRule,
    Chunks,
    DelimiterScore,
    FixedStride,
    HashScore,
    Kind,
    SurprisalScore,
)
from dynchunk.testing import assert_streaming_equals_offline, sample_text
from dynchunk.testing.strategies import rules, scores

CODE = list(b'"""\ndef load(path):\n    with open(path) as f:\n        return f.read()\n\n' * 4)


def surprisal() -> SurprisalScore:
    return SurprisalScore.fit(sample_text(4096), order=3, vocab_size=256)


@pytest.mark.parametrize("ladder", [False, True])
@pytest.mark.parametrize(
    "score",
    [
        HashScore(1),
        HashScore(4),
        DelimiterScore.from_bytes(),
        DelimiterScore.from_bytes() + 0.5 * HashScore(4),
        surprisal(),
        surprisal() + 0.01 * HashScore(8),
    ],
    ids=["hash1", "hash4", "delimiter", "delimiter+hash", "surprisal", "surprisal+hash"],
)
def test_the_published_probe_leaves_the_code_after_the_run_alone(score, ladder):
    """arXiv 2609.36322, code probe: docstring filler of L "=" characters, L = 24..39."""
    rule = BoundaryRule(radius=2, min_length=2, max_length=8, ladder=ladder)
    seen = set()
    for L in range(24, 40):
        chunks = rule(score(torch.tensor(list(b'"""') + [ord("=")] * L + CODE)))
        starts = chunks.starts - 3 - L
        content = starts[(chunks.kinds == Kind.CONTENT) & (starts >= 0)]
        resynced = starts >= content[0]
        assert int(content[0]) < 8
        entries = zip(
            starts[resynced].tolist(),
            [*(chunks.visible_from[resynced] - 3 - L).tolist()[:-1], None],
            chunks.kinds[resynced].tolist(),
            strict=True,
        )
        seen.add(tuple(entries))
    assert len(seen) == 1


def test_the_published_probe_shifts_a_fixed_grid():
    """CASES 1: payload after k fillers; a grid has r different sets of chunks, a rule one."""
    for r in (2, 3, 4, 8):
        score, rule = HashScore(3), BoundaryRule(radius=1, max_length=2 * r)
        sets = {"fixed": set(), "content": set()}
        for k in range(2 * r):
            tokens = torch.tensor([ord("=")] * k + CODE)
            fixed, content = FixedStride(r)(tokens.double()), rule(score(tokens))
            for name, chunks in (("fixed", fixed), ("content", content)):
                starts = (chunks.starts - k).tolist()
                sets[name].add(tuple(s for s in starts if s >= 40))
        assert (len(sets["fixed"]), len(sets["content"])) == (r, 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_floating_dtype_is_compared_exactly(dtype):
    x = torch.rand(300).to(dtype)
    rule = BoundaryRule(radius=1, threshold=0.7, max_length=50)
    expected = rule(x.double())
    assert rule(x, impl="cpu").equal(expected)
    assert rule(x, impl="reference").equal(expected)
    stream = rule.stream()
    stream.push(x)
    assert stream.chunks().equal(expected)


def test_a_threshold_between_two_floats_is_not_rounded_down():
    below = torch.tensor([0.0, 0.7, 0.0])  # float32(0.7) < 0.7
    for impl in ("cpu", "reference"):
        assert len(BoundaryRule(1, threshold=0.7)(below, impl=impl)) == 1
        assert len(BoundaryRule(1, threshold=float(below[1]))(below, impl=impl)) == 2


def test_gradients_and_strides_are_no_obstacle():
    x = torch.rand(40, 2, requires_grad=True)[:, 0]
    assert BoundaryRule(1)(x).equal(BoundaryRule(1)(x.detach().clone()))


def test_infinities_are_ordinary_values():
    x = torch.tensor([0.0, -math.inf, math.inf, 0.0, -math.inf, math.inf, math.inf, 1.0])
    for impl in ("cpu", "reference"):
        assert BoundaryRule(1)(x, impl=impl).starts.tolist() == [0, 2, 5]


@pytest.mark.parametrize("impl", [None, "cpu", "reference"])
@pytest.mark.parametrize("at", [0, 1, 5, 9])
def test_nan_is_named_wherever_it_is(impl, at):
    x = torch.zeros(10)
    x[at] = math.nan
    with pytest.raises(ValueError, match=f"scores: expected numbers, got NaN at token {at}"):
        BoundaryRule(3)(x, impl=impl)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda rule: rule(torch.zeros(4, dtype=torch.int64)),
            "scores: expected a floating tensor",
        ),
        (lambda rule: rule(torch.zeros(2, 2, 2)), "scores: expected a tensor of shape"),
        (lambda rule: rule(torch.tensor(1.0)), "scores: expected a tensor of shape"),
        (lambda rule: rule(torch.zeros(4), [0, 3, 2, 4]), "offsets that never decrease"),
        (lambda rule: rule(torch.zeros(4), [0, 3]), "cu_seqlens: expected 4 (all tokens)"),
        (lambda rule: rule(torch.zeros(2, 2), [0, 4]), "cu_seqlens: expected None for scores [B"),
        (lambda rule: rule(torch.zeros(4), mask=torch.ones(4).bool()), "mask: expected None"),
        (
            lambda rule: rule(torch.zeros(2, 2), mask=torch.ones(2, 3).bool()),
            "mask: expected shape",
        ),
        (lambda rule: rule(torch.zeros(4), impl="gpu"), "impl: expected one of None, 'cpu'"),
        (lambda _: BoundaryRule(2, min_length=5, max_length=4), "min_length: expected at most"),
        (lambda _: BoundaryRule(1, min_length=3), "radius: expected at least min_length - 1 = 2"),
        (lambda _: BoundaryRule(3, min_length=4, max_length=6), "max_length: expected at least"),
        (lambda _: BoundaryRule(-1), "radius: expected an integer >= 0, got -1"),
        (lambda _: BoundaryRule(1, min_length=0), "min_length: expected an integer >= 1"),
        (lambda _: BoundaryRule(1, threshold=math.nan), "threshold: expected a number, got nan"),
        (lambda _: FixedStride(0), "stride: expected an integer >= 1"),
        (lambda _: FixedStride(4, 4), "offset: expected less than stride"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call(BoundaryRule(1))


@pytest.mark.parametrize(
    "call",
    [lambda: BoundaryRule(1.5), lambda: BoundaryRule(True), lambda: BoundaryRule(1)([0.0, 1.0])],
)
def test_wrong_types_are_named(call):
    with pytest.raises(TypeError, match=r"radius: expected an integer|scores: expected a floating"):
        call()


def test_threads_may_cut_at_once():
    """CASES: two Python threads in numba at once."""
    x = torch.rand(4, 50_000)
    rule = BoundaryRule(2)
    expected = [rule(row) for row in x]
    got = [None] * 4

    def work(i: int) -> None:
        for _ in range(5):
            got[i] = rule(x[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(a.equal(b) for a, b in zip(got, expected, strict=True))


# Streams


@given(rules(), scores(), st.data())
def test_truncate_to_any_length_then_other_tokens_is_a_fresh_run(rule, x, data):
    n = data.draw(st.integers(0, len(x)))
    other = data.draw(scores(max_tokens=40))
    stream = rule.stream()
    stream.push(x)
    stream.truncate(n)
    assert stream.chunks().equal(rule(x[:n]))
    stream.push(other)
    assert stream.chunks().equal(rule(torch.cat([x[:n], other])))


@given(rules(), st.lists(scores(), min_size=1, max_size=4), st.data())
def test_a_stream_that_forgets_goes_on_and_back_as_if_it_had_not(rule, pieces, data):
    stream, whole, earliest = rule.stream(), rule.stream(), 0
    for x in pieces:
        assert stream.push(x) == whole.push(x)
        earliest = max(earliest, data.draw(st.integers(0, len(stream))))
        stream.forget(earliest)
        if data.draw(st.booleans()):
            stream = stream.copy()
        n = data.draw(st.sampled_from([len(stream), earliest, 0]))
        stream.truncate(n)
        whole.truncate(n)
        earliest = min(n, earliest)
        kept = stream.boundaries
        assert kept == whole.boundaries[len(whole.boundaries) - len(kept) :]


def test_what_a_stream_keeps_does_not_grow_with_it():
    stream = BoundaryRule(2, max_length=8, ladder=True).stream()
    for _ in range(50):
        stream.push(torch.rand(100))
        stream.forget(len(stream) - 64)
    assert stream.nbytes < 4000
    assert len(stream.boundaries) < 64
    with pytest.raises(ValueError, match=r"at least 4936 \(the rest is forgotten\)"):
        stream.truncate(4935)
    with pytest.raises(ValueError, match="chunks: expected a stream that forgot nothing"):
        stream.chunks()
    stream.truncate(0)
    assert len(stream.chunks()) == 0


@given(rules(), scores(), st.data())
def test_a_saved_stream_goes_on_as_if_nothing_had_been(rule, x, data):
    n = data.draw(st.integers(0, len(x)))
    first, second = rule.stream(), rule.stream()
    second.push(torch.rand(7))
    first.push(x[:n])
    first.forget(data.draw(st.integers(0, n)))
    second.load_state_dict(first.state_dict())
    assert second.push(x[n:]) == first.push(x[n:])
    assert second.boundaries == first.boundaries


@given(st.integers(1, 9), st.data())
def test_a_fixed_stride_streams_too(stride, data):
    rule = FixedStride(stride, data.draw(st.integers(0, stride - 1)))
    x = torch.zeros(data.draw(st.integers(0, 40)))
    assert_streaming_equals_offline(rule, x)
    stream = rule.stream()
    stream.push(x)
    n = data.draw(st.integers(0, len(x)))
    saved = stream.state_dict()
    stream.truncate(n)
    assert stream.chunks().equal(rule(x[:n]))
    assert [
        b.position for b in stream.boundaries if b.position < n
    ] == stream.chunks().starts.tolist()
    stream.load_state_dict(saved)
    assert len(stream) == len(x)


@pytest.mark.parametrize(
    "piece",
    [
        lambda x: x,
        lambda x: x.numpy(),
        lambda x: x.tolist(),
        lambda x: x.bfloat16().double().numpy(),
    ],
    ids=["tensor", "array", "list", "float64"],
)
def test_a_stream_takes_what_holds_numbers(piece):
    x = torch.rand(30).bfloat16().float()
    stream = BoundaryRule(1).stream()
    stream.push(piece(x[:10]))
    stream.push(float(x[10]))
    stream.push(x[11:12])
    stream.push([])
    stream.push(piece(x[12:]))
    assert stream.chunks().equal(BoundaryRule(1)(x))


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (math.nan, "NaN at token 12"),
        (torch.tensor([math.nan]), "NaN at token 12"),
        (torch.tensor([0.0, 9.0, math.nan]), "NaN at token 14"),
        (torch.zeros(2, 2), "scores: expected floating numbers"),
        (torch.zeros(2, dtype=torch.int64), "scores: expected a floating tensor"),
        (np.array(["a"]), "scores: expected floating numbers"),
        (3, "scores: expected floating numbers"),
    ],
)
def test_a_push_that_raises_leaves_the_stream_as_it_was(scores, message):
    x = torch.rand(20)
    stream = BoundaryRule(1).stream()
    stream.push(x[:12])
    with pytest.raises(ValueError, match=message):
        stream.push(scores)
    stream.push(x[12:])
    assert stream.chunks().equal(BoundaryRule(1)(x))


def test_a_stream_refuses_what_it_cannot_restore():
    stream = BoundaryRule(1).stream()
    stream.push(torch.rand(9))
    state = stream.state_dict()
    for field in state:
        with pytest.raises(ValueError, match="state: expected the keys"):
            stream.load_state_dict({k: v for k, v in state.items() if k != field})
    with pytest.raises(ValueError, match="the rule of this stream"):
        BoundaryRule(2).stream().load_state_dict(state)
    with pytest.raises(ValueError, match="n: expected at most the length 9"):
        stream.truncate(10)
    with pytest.raises(ValueError, match=r"n: expected an integer >= 0"):
        stream.truncate(-1)
    with pytest.raises(ValueError, match="expected \\(stride, offset\\) = \\(4, 0\\)"):
        FixedStride(4).stream().load_state_dict(FixedStride(4, 1).stream().state_dict())
    assert len(stream) == 9
    assert isinstance(stream.chunks(), Chunks)


def test_triton_is_not_taken_on_the_cpu():
    with pytest.raises(ValueError, match="impl: expected 'cpu' or 'reference'"):
        BoundaryRule(1)(torch.zeros(4), impl="triton")
