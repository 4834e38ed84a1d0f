"""What the compiler sees of Triton operations: their kernels, in one graph, for any length.

And that it sees which tensors a kernel changes: what it cannot tell from the kernel's code, it
would copy before every call.
"""

from unittest.mock import patch

import torch
import triton
from torch._functorch.aot_autograd import aot_function
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from triton.backends.compiler import GPUTarget


class Driver:
    """Stands for a GPU where code is made, not run."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_active_torch_device(self):
        return torch.device("cuda", 0)


def kernels_in(op, *arguments):
    """Kernels in the graph of an operation, with the names of what they change."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    found = []

    def look(graph, _):
        for node in graph.graph.nodes:
            if "triton_kernel_wrapper" in str(node.target):
                kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
                found.append((kernel.fn.__name__, sorted(node.kwargs["tensors_to_clone"])))
        return graph

    is_tensor = [isinstance(x, torch.Tensor) for x in arguments]

    def call(*tensors):
        rest = iter(tensors)
        return op(*(next(rest) if t else x for t, x in zip(is_tensor, arguments, strict=True)))

    with (
        patch.object(triton.runtime.driver, "_active", Driver()),
        FakeTensorMode(shape_env=ShapeEnv()) as mode,
        torch.no_grad(),
    ):
        given = [mode.from_tensor(x) for x in arguments if isinstance(x, torch.Tensor)]
        aot_function(call, look)(*given)
    return found


def pool_arguments(rows=None):
    x, bias, at = torch.zeros(11, 2, 32), torch.zeros(3, 2, 32), torch.zeros(4, dtype=torch.int64)
    angles = torch.zeros(4, 4)
    return x, x.clone(), bias, torch.zeros(16), at, at, at, rows, angles, angles, 1e-6


def test_pool():
    import dynchunk.ops.triton.pool  # noqa: F401 (registers the operations)

    ops, entries = torch.ops.dynchunk, torch.zeros(4, 2, 16)
    for rows in (None, torch.zeros(11, dtype=torch.int64)):
        given = pool_arguments(rows)
        assert kernels_in(ops.pool_triton, *given) == [("pool_kernel", ["p_out"])]
        assert kernels_in(ops.pool_triton_backward, entries, entries, *given) == [
            ("pool_backward_kernel", ["p_dlogits", "p_dnorm", "p_dvalues"]),
            ("slot_bias_kernel", ["p_parts"]),
        ]


def test_pool_state():
    import dynchunk.ops.triton.pool_state  # noqa: F401

    x, at, state = torch.zeros(11, 2, 16), torch.zeros(4, dtype=torch.int64), torch.zeros(4, 2, 16)
    given = (x, None, None, at, at, at, state, state.clone(), state.clone())
    assert kernels_in(torch.ops.dynchunk.pool_state_triton, *given) == [
        ("pool_state_kernel", ["p_new_acc", "p_new_max", "p_new_sum"])
    ]


def test_gather_rows():
    import dynchunk.ops.triton.gather_rows  # noqa: F401

    at = torch.zeros(5, dtype=torch.int64)
    found = kernels_in(torch.ops.dynchunk.gather_rows_triton, torch.zeros(5, 8), at, at)
    assert found == [("gather_rows_kernel", ["p_out"])]
