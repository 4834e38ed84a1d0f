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


def integers(*sizes):
    return [torch.zeros(*size, dtype=torch.int64) for size in sizes]


def test_attend_selected():
    import dynchunk.ops.triton.attend_selected  # noqa: F401

    ops, x = torch.ops.dynchunk, torch.zeros(11, 2, 16)
    entries, bias, sink, lse = torch.zeros(4, 2, 16), torch.zeros(4, 2), torch.zeros(2), x[..., 0]
    layout = integers((3,), (3,), (1, 3), (1, 11), (1, 11), (11, 1, 5))
    arguments = x, x.clone(), x.clone(), entries, entries.clone(), bias, sink, *layout, 0.25
    assert kernels_in(ops.attend_selected_triton, *arguments) == ["forward_kernel"]
    found = kernels_in(ops.attend_selected_triton_backward, x, lse, x, lse, *arguments)
    assert found == ["query_gradients_kernel", "key_gradients_kernel", "key_gradients_kernel"]


@pytest.mark.parametrize("block", [1, 4])
def test_attend_selected_chunks(block):
    import dynchunk.ops.triton.attend_selected_chunks  # noqa: F401

    ops, x = torch.ops.dynchunk, torch.zeros(11, 2, 16)
    layout = integers((3,), (3,), (1, 3), (4,), (1, 11), (6, 1, 5))
    arguments = x, x.clone(), None, torch.zeros(2), *layout, block, 0.25
    assert kernels_in(ops.attend_selected_chunks_triton, *arguments) == ["forward_kernel"]
    given = x, x[..., 0], x, x[..., 0], *arguments
    found = kernels_in(ops.attend_selected_chunks_triton_backward, *given)
    assert found == ["query_gradients_kernel", "key_gradients_kernel"]


def test_index_topk():
    import dynchunk.ops.triton.index_topk  # noqa: F401

    ops, q, k = torch.ops.dynchunk, torch.zeros(11, 2, 16), torch.zeros(4, 16)
    weights = torch.zeros(11, 2)
    arguments = q, k, weights, *integers((3,), (1, 3), (1, 11)), 5, 0.25
    assert kernels_in(ops.index_topk_triton, *arguments) == ["best_kernel", "merge_kernel"]
    scores, (indices,) = torch.zeros(11, 5), integers((11, 5))
    given = scores, indices, scores, indices, *arguments
    found = kernels_in(ops.index_topk_triton_backward, *given)
    assert found == ["query_gradients_kernel", "key_gradients_kernel"]


def test_decode_topk():
    import dynchunk.ops.triton.decode_topk  # noqa: F401

    tensors = torch.zeros(3, 2, 16), torch.zeros(8, 4, 16), torch.zeros(3, 2)
    layout = integers((1, 3, 6), (3,), (1, 3))
    found = kernels_in(torch.ops.dynchunk.decode_topk_triton, *tensors, *layout, 5, 0.25)
    assert found == ["best_kernel", "merge_kernel"]
