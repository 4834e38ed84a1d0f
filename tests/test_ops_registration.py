"""Every operation passes opcheck and compiles without a graph break, as a first call too."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ops_oracle import normal
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

from dynchunk.chunks import Chunks
from dynchunk.ops import (
    attend,
    attend_selected,
    attend_selected_chunks,
    decode,
    decode_topk,
    index_topk,
    pool,
)
from dynchunk.ops.layout import Reads, Spans

VIEWS = [Chunks.fixed(2, [0, 5, 5, 11]), Chunks.fixed(3, [0, 5, 5, 11])]
N = len(VIEWS[0]) + len(VIEWS[1])
READS, ONE_VIEW = Reads.of(VIEWS, window=2), Reads.of(VIEWS[0], window=0)
SPANS = Spans.of(VIEWS[0])
OVERLAPPING = Spans.of(VIEWS[0], overlap=True)
LISTS = torch.tensor([[0, -1], [1, 1]]).repeat(6, 1)[:11, None]

PAGES = torch.tensor([[[0, -1], [2, 3]], [[1, -1], [3, 2]]])
#: sequence, n_visible, raw_begin, raw_end
PLACES = (
    torch.tensor([1, 0]),
    torch.tensor([[3, 2], [4, 1]]),
    torch.tensor([[0, 2], [1, 4]]),
    torch.tensor([2, 4]),
)

Q, K, V = (11, 4, 3), (11, 2, 3), (11, 2, 2)
ENTRY_K, ENTRY_V = (N, 1, 3), (N, 1, 2)

# Name: the module, a function of floating tensors only, their shapes.
CALLS = {
    "pool_mean": (pool, lambda x: pool.pool(x, SPANS), [K]),
    "pool_gated_with_overlap": (
        pool,
        lambda x, gate, bias: pool.pool(x, OVERLAPPING, gate=gate, slot_bias=bias),
        [(11, 2, 4), (11, 2, 4), (3, 4)],
    ),
    "pool_with_norm_and_rope": (
        pool,
        lambda x, norm, angle: (
            pool.pool(x, SPANS, norm=norm, rope=(angle.detach().cos(), angle.detach().sin()))
            + 0 * angle.sum()
        ),
        [(11, 2, 6), (6,), (len(VIEWS[0]), 2)],
    ),
    "attend": (
        attend,
        lambda *x: attend.attend(*x[:5], READS, bias=x[5], sink=x[6]),
        [Q, K, V, ENTRY_K, ENTRY_V, (N,), (4,)],
    ),
    "attend_batched": (
        attend,
        lambda *x: attend.attend(*x[:5], READS, bias=x[5], sink=x[6], impl="batched"),
        [Q, K, V, ENTRY_K, ENTRY_V, (N,), (4,)],
    ),
    "attend_with_keys_as_values": (
        attend,
        lambda q, k, entry_k: attend.attend(q, k, None, entry_k, None, READS),
        [Q, K, ENTRY_K],
    ),
    "attend_selected": (
        attend_selected,
        lambda *x: attend_selected.attend_selected(*x[:5], LISTS, READS, bias=x[5], sink=x[6]),
        [Q, K, V, ENTRY_K, ENTRY_V, (N, 1), (4,)],
    ),
    "attend_selected_chunks": (
        attend_selected_chunks,
        lambda q, k, v, sink: attend_selected_chunks.attend_selected_chunks(
            q, k, v, LISTS[:4], READS, block=3, sink=sink
        ),
        [Q, K, V, (4,)],
    ),
    "index_topk": (
        index_topk,
        lambda q, k, weights: index_topk.index_topk(q, k, weights, ONE_VIEW, 2),
        [(11, 2, 3), (len(VIEWS[0]), 3), (11, 2)],
    ),
}


def inputs_of(name, dtype=torch.float64):
    return [
        normal(*shape, dtype=dtype, seed=i, grad=True) for i, shape in enumerate(CALLS[name][2])
    ]


def results(function, inputs):
    """Outputs, and gradients of a function of the floating ones."""
    found = function(*inputs)
    outputs = [found] if isinstance(found, torch.Tensor) else list(found)
    loss = sum(x[x.isfinite()].square().sum() for x in outputs if x.is_floating_point())
    return outputs + list(torch.autograd.grad(loss, inputs))


def check_compiled(name, backend):
    """Compile forward and backward as one graph each, and compare with eager."""
    inputs = inputs_of(name, torch.float32)
    compiled = torch.compile(CALLS[name][1], fullgraph=True, backend=backend)
    for found, eager in zip(
        results(compiled, inputs), results(CALLS[name][1], inputs), strict=True
    ):
        assert torch.equal(found, eager)


FORWARD_CALLS = {
    "decode": (
        decode,
        lambda *x: decode.decode(*x[:5], PAGES, *PLACES, indices=LISTS[:2], bias=x[5], sink=x[6]),
        [(2, 4, 3), (5, 2, 3), (5, 2, 2), (4, 2, 1, 3), (4, 2, 1, 2), (4, 2, 1), (4,)],
    ),
    "decode_topk": (
        decode_topk,
        lambda q, k, w: decode_topk.decode_topk(q, k, w, PAGES[:1], PLACES[0], PLACES[1][:1], 2),
        [(2, 2, 3), (4, 2, 3), (2, 2)],
    ),
}


OPCHECKS = [
    (name, impl, dtype)
    for name, (module, *_) in (CALLS | FORWARD_CALLS).items()
    for impl, wide in (("reference", torch.float64), ("cpu", torch.float32))
    if impl in module.OPS
    for dtype in (wide, torch.bfloat16)
]


@pytest.mark.parametrize(("name", "impl", "dtype"), OPCHECKS)
def test_opcheck(name, impl, dtype, monkeypatch):
    module, call, shapes = (CALLS | FORWARD_CALLS)[name]
    given = []

    def record(impl, ops, *operands):
        return lambda *args: given.append(args) or ops["reference"](*args)

    monkeypatch.setattr(module, "choose", record)
    has_gradient = name in CALLS
    call(*(normal(*s, dtype=dtype, seed=i, grad=has_gradient) for i, s in enumerate(shapes)))
    torch.library.opcheck(module.OPS[impl], given[0])


@pytest.mark.parametrize("name", FORWARD_CALLS)
def test_what_has_no_gradient_compiles_as_one_graph(name):
    _, call, shapes = FORWARD_CALLS[name]
    inputs = [normal(*shape, dtype=torch.float32, seed=i) for i, shape in enumerate(shapes)]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for found, eager in zip(compiled(*inputs), call(*inputs), strict=True):
        assert torch.equal(found, eager)


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("pool_gated_with_overlap", "aot_eager"),
        ("attend", "inductor"),
        ("attend_selected", "aot_eager"),
        ("attend_selected_chunks", "aot_eager"),
        ("index_topk", "aot_eager"),
    ],
)
def test_the_first_call_of_a_process_compiles_as_one_graph(name, backend):
    script = f"import test_ops_registration as t; t.check_compiled({name!r}, {backend!r})"
    subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parent, check=True)


def test_lengths_do_not_recompile():
    torch._dynamo.reset()
    counter = CompileCounter()

    def call(q, entry_k, *reads):
        return attend.attend(q, q, None, entry_k, None, Reads(*reads)).out

    compiled = torch.compile(call, fullgraph=True, backend=counter, dynamic=True)
    for tokens in (61, 63, 64, 100):
        chunks = Chunks.fixed(4, tokens)
        q, entry_k = normal(tokens, 2, 3), normal(len(chunks), 2, 3)
        reads = Reads.of(chunks, window=3)
        assert torch.equal(compiled(q, entry_k, *reads), call(q, entry_k, *reads))
    assert counter.frame_count == 1


class Seen(TorchDispatchMode):
    """Notes the names of operations."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", FORWARD_CALLS)
def test_steps_go_through_the_dispatcher_where_something_there_would_act(name):
    module, call, shapes = FORWARD_CALLS[name]
    inputs = [normal(*shape, dtype=torch.float32, seed=i) for i, shape in enumerate(shapes)]
    op = module.OPS["cpu"]
    assert module.choose("cpu", module.OPS, *inputs) is not op
    expected = call(*inputs)
    operation = f"dynchunk::{name}_cpu"
    with Seen() as seen:
        found = call(*inputs)
    assert f"{operation.replace('::', '.')}.default" in seen.names
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        call(*inputs)
    assert operation in {event.key for event in profiler.key_averages()}
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = call(*(mode.from_tensor(x) for x in inputs))
    assert [x.shape for x in fakes] == [x.shape for x in expected]
    inputs[0].requires_grad_()
    assert module.choose("cpu", module.OPS, *inputs) is op
    with pytest.raises(RuntimeError, match="autograd"):
        call(*inputs)[0].sum().backward()
    with torch.no_grad():
        assert module.choose("cpu", module.OPS, *inputs) is not op
