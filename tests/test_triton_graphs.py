"""What the compiler sees of Triton operations: their kernels, in one graph, for any length."""

import pytest
import torch
from torch._functorch.aot_autograd import aot_function
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

pytest.importorskip("triton", reason="triton is not made for this platform")


def kernels_in(op, *arguments):
    """Names of the kernels in the graph of an operation on tensors that hold nothing."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    found = []

    def look(graph, _):
        for node in graph.graph.nodes:
            if "triton_kernel_wrapper" in str(node.target):
                kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
                found.append(kernel.fn.__name__)
        return graph

    is_tensor = [isinstance(x, torch.Tensor) for x in arguments]

    def call(*tensors):
        rest = iter(tensors)
        return op(*(next(rest) if t else x for t, x in zip(is_tensor, arguments, strict=True)))

    with FakeTensorMode(shape_env=ShapeEnv()) as mode, torch.no_grad():
        given = [mode.from_tensor(x) for x in arguments if isinstance(x, torch.Tensor)]
        aot_function(call, look)(*given)
    return found


def pool_arguments():
    x, bias, at = torch.zeros(11, 2, 32), torch.zeros(3, 2, 32), torch.zeros(4, dtype=torch.int64)
    angles = torch.zeros(4, 4)
    return x, x.clone(), bias, torch.zeros(16), at, at, at, None, angles, angles, 1e-6


def test_pool():
    import dynchunk.ops.triton.pool  # noqa: F401 (registers the operations)

    ops, entries = torch.ops.dynchunk, torch.zeros(4, 2, 16)
    assert kernels_in(ops.pool_triton, *pool_arguments()) == ["pool_kernel"]
    found = kernels_in(ops.pool_triton_backward, entries, entries, *pool_arguments())
    assert found == ["pool_backward_kernel", "slot_bias_kernel"]


def test_pool_state():
    import dynchunk.ops.triton.pool_state  # noqa: F401

    x, at, state = torch.zeros(11, 2, 16), torch.zeros(4, dtype=torch.int64), torch.zeros(4, 2, 16)
    found = kernels_in(
        torch.ops.dynchunk.pool_state_triton, x, None, None, at, at, at, *[state] * 3
    )
    assert found == ["pool_state_kernel"]


def test_gather_rows():
    import dynchunk.ops.triton.gather_rows  # noqa: F401

    at = torch.zeros(5, dtype=torch.int64)
    found = kernels_in(torch.ops.dynchunk.gather_rows_triton, torch.zeros(5, 8), at, at)
    assert found == ["gather_rows_kernel"]
