"""The kernels of ``attend`` and ``decode`` without a GPU and without the interpreter."""

import pytest
import torch
from functorch.compile import aot_function, make_boxed_func
from torch._subclasses.fake_tensor import FakeTensorMode

from dynchunk.chunks import Chunks
from dynchunk.ops.layout import Reads

triton = pytest.importorskip("triton", reason="triton is not made for this platform")

from dynchunk_kernels import attend, decode  # noqa: E402
from dynchunk_kernels.offline import compile_case  # noqa: E402


class Driver:
    """Stands for a GPU's driver where code is generated and not run."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())


def attend_inputs(tokens, dtype=torch.bfloat16):
    """Inputs of the operation: floating tensors, then integers."""
    chunks = Chunks.fixed(4, tokens)
    reads = Reads.of(chunks, window=5)
    n = len(chunks)
    shapes = [
        (tokens, 4, 16),
        (tokens, 2, 16),
        (tokens, 2, 32),
        (n, 2, 16),
        (n, 2, 32),
        (n, 2),
        (4,),
    ]
    floating = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    return floating, [x for name, x in reads._asdict().items() if name != "starts"]


def decode_inputs(entries, page_size=8):
    """Arguments of the operation, of one query."""
    n_pages = -(-entries // page_size)
    pools = [torch.randn(n_pages, page_size, 2, D) for D in (16, 32)]
    raw = [torch.randn(9, 2, D) for D in (16, 32)]
    integers = [torch.arange(n_pages).reshape(1, 1, -1), torch.tensor([0])]
    integers += [torch.tensor([[entries]]), torch.tensor([[2]]), torch.tensor([9])]
    return [torch.randn(1, 4, 16), *raw, *pools, None, None, *integers, None, 0.25]


def kernels_of(graph):
    """Names of the tensors that each kernel of a graph changes."""
    nodes = graph.graph.find_nodes(
        op="call_function", target=torch.ops.higher_order.triton_kernel_wrapper_functional
    )
    return [set(node.kwargs["tensors_to_clone"]) for node in nodes]


@pytest.mark.usefixtures("driver")
def test_the_compiler_sees_the_kernels_of_attend_and_what_they_change():
    from dynchunk.ops.triton.attend import OP

    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    floating, integers = attend_inputs(20)
    with FakeTensorMode() as mode:
        floating, integers = (
            [mode.from_tensor(x) for x in given] for given in (floating, integers)
        )
        traced = aot_function(lambda *x: OP(*x, 0.25), fw_compiler=keep, bw_compiler=keep)
        out, lse = traced(*floating, *integers)
        (out.sum() + lse.sum()).backward()
    assert out.shape == (20, 4, 32)
    assert [x.grad.shape for x in floating] == [x.shape for x in floating]
    forward, backward = map(kernels_of, graphs)
    assert forward == [{"p_out", "p_lse"}]
    keys = {"p_dk", "p_dv"}
    assert backward == [{"p_shift"}, keys | {"p_dbias"}, keys, {"p_dq"}]
    assert not any("copy_" in str(node.target) for graph in graphs for node in graph.graph.nodes)


@pytest.mark.usefixtures("driver")
def test_the_compiler_sees_the_kernels_of_decode_and_what_they_change():
    from dynchunk.ops.triton.decode import OP

    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    given = decode_inputs(20)
    given[-2] = torch.zeros(1, 1, 7, dtype=torch.int64)
    tensors = [x for x in given if isinstance(x, torch.Tensor)]

    def call(*tensors):
        values = iter(tensors)
        return OP(*(next(values) if isinstance(x, torch.Tensor) else x for x in given))

    traced = aot_function(call, fw_compiler=keep)
    with FakeTensorMode() as mode:
        traced(*map(mode.from_tensor, tensors))
    assert kernels_of(graphs[0]) == [{"p_out"}, {"p_out", "p_lse"}, {"p_out", "p_lse"}]


class Recorder:
    """Stands for a kernel and keeps what decides whether a launch compiles it again."""

    def __init__(self):
        self.keys = []

    def __call__(self, kernel):
        def launch(*args, **constants):
            given = dict(zip(kernel.arg_names, args, strict=False))
            special = {
                p.name: (given[p.name] == 1, given[p.name] % 16 == 0)
                for p in kernel.params
                if isinstance(given.get(p.name), int) and not p.do_not_specialize
            }
            types = [x.dtype for x in args if isinstance(x, torch.Tensor)]
            self.keys.append((kernel.__name__, special, types, constants))

        class AnyGrid:
            def __getitem__(self, grid):
                return launch

        return AnyGrid()


@pytest.mark.parametrize("entries", [1, 63])
def test_case_37_lengths_compile_no_kernel_again(entries, monkeypatch):
    found = []
    for length in (63, 64, 1000):
        recorder = Recorder()
        monkeypatch.setattr(attend, "wrap_triton", recorder)
        monkeypatch.setattr(decode, "wrap_triton", recorder)
        floating, integers = attend_inputs(length)
        out, lse = attend.attend(*floating, *integers, 0.25)
        attend.attend_backward(out, lse, out, lse, *floating, *integers, 0.25)
        decode.decode(*decode_inputs(length * entries))
        found.append(recorder.keys)
    assert len(found[0]) == 7
    assert found[0] == found[1] == found[2]


ON_EVERY_RUN = ("D 128, bfloat16, group of 4", "D 128, bfloat16, group of 4, entries")


@pytest.mark.parametrize("module", [attend, decode])
def test_kernels_use_tensor_cores_and_spill_nothing(module):
    some = [c for c in module.cases() if c.config in ON_EVERY_RUN and c.archs == (90,)]
    found = [compile_case(case, 90) for case in some]
    assert found
    assert not [(x.kernel, x.config, x.why) for x in found if not x.ok]
    assert all(x.wide_loads > 0 for x in found)
