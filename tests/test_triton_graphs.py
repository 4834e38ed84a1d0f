"""What the compiler sees of Triton operations: their kernels, in one graph, for any length.

And that it sees which tensors a kernel changes: what it cannot tell from the kernel's code, it
would copy before every call.
"""

from unittest.mock import patch

import pytest
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


class Recorder:
    """Takes the place of ``wrap_triton``: keeps what each launch would be compiled for."""

    def __init__(self):
        self.keys = set()

    def __call__(self, kernel):
        def launch(*args, num_warps, **constants):
            given = dict(zip(kernel.arg_names, args, strict=False)) | constants
            free = {p.name for p in kernel.params if p.do_not_specialize}

            def key(name):
                x = given[name]
                if isinstance(x, torch.Tensor):
                    return x.dtype
                return type(x) if name in free else x

            found = tuple((name, key(name)) for name in kernel.arg_names)
            self.keys.add((kernel.fn.__name__, num_warps, found))

        class Launches:
            def __getitem__(self, grid):
                return launch

        return Launches()


def test_case_37_one_compile_serves_all_lengths(monkeypatch):
    from dynchunk_kernels import pack, pool

    recorder = Recorder()
    monkeypatch.setattr(pool, "wrap_triton", recorder)
    monkeypatch.setattr(pack, "wrap_triton", recorder)
    for tokens, chunks in ((63, 13), (64, 16), (1000, 211)):
        x, bias = torch.zeros(tokens, 2, 32), torch.zeros(3, 2, 32)
        at, norm, angles = torch.zeros(chunks).long(), torch.zeros(16), torch.zeros(chunks, 4)
        given = (x, x, bias, norm, at, at, at, None, angles, angles, 1e-6)
        pool.pool(*given)
        pool.pool_backward(torch.zeros(chunks, 2, 16), *given)
        pool.pool_state(x, None, None, at, at, at, *[torch.zeros(chunks, 2, 32)] * 3)
        pack.gather_rows(x, torch.zeros(tokens + 9).long())
    names = sorted(name for name, *_ in recorder.keys)
    assert names == [
        "gather_rows_kernel",
        "pool_backward_kernel",
        "pool_kernel",
        "pool_state_kernel",
        "slot_bias_kernel",
    ]


def integers(*sizes):
    return [torch.zeros(*size, dtype=torch.int64) for size in sizes]


def test_attend_selected():
    import dynchunk.ops.triton.attend_selected  # noqa: F401

    ops, x = torch.ops.dynchunk, torch.zeros(11, 2, 16)
    entries, bias, sink, lse = torch.zeros(4, 2, 16), torch.zeros(4, 2), torch.zeros(2), x[..., 0]
    layout = integers((3,), (3,), (1, 3), (1, 11), (1, 11), (11, 1, 5))
    arguments = x, x.clone(), x.clone(), entries, entries.clone(), bias, sink, *layout, 0.25
    assert kernels_in(ops.attend_selected_triton, *arguments) == [
        ("forward_kernel", ["p_lse", "p_out"])
    ]
    found = kernels_in(ops.attend_selected_triton_backward, x, lse, x, lse, *arguments)
    assert found == [
        ("query_gradients_kernel", ["p_grad_q", "p_shift"]),
        ("key_gradients_kernel", ["p_grad_k", "p_grad_v"]),
        ("key_gradients_kernel", ["p_grad_bias", "p_grad_k", "p_grad_v"]),
    ]


@pytest.mark.parametrize("block", [1, 4])
def test_attend_selected_chunks(block):
    import dynchunk.ops.triton.attend_selected_chunks  # noqa: F401

    ops, x = torch.ops.dynchunk, torch.zeros(11, 2, 16)
    layout = integers((3,), (3,), (1, 3), (4,), (1, 11), (6, 1, 5))
    arguments = x, x.clone(), None, torch.zeros(2), *layout, block, 0.25
    assert kernels_in(ops.attend_selected_chunks_triton, *arguments) == [
        ("forward_kernel", ["p_lse", "p_out"])
    ]
    given = x, x[..., 0], x, x[..., 0], *arguments
    found = kernels_in(ops.attend_selected_chunks_triton_backward, *given)
    assert found == [
        ("query_gradients_kernel", ["p_grad_q", "p_shift"]),
        ("key_gradients_kernel", ["p_grad_k"]),
    ]


BEST = [("best_kernel", ["p_keys"]), ("merge_kernel", ["p_bound", "p_indices", "p_scores"])]


def test_index_topk():
    import dynchunk.ops.triton.index_topk  # noqa: F401

    ops, q, k = torch.ops.dynchunk, torch.zeros(11, 2, 16), torch.zeros(4, 16)
    weights = torch.zeros(11, 2)
    arguments = q, k, weights, *integers((3,), (1, 3), (1, 11)), 5, 0.25
    assert kernels_in(ops.index_topk_triton, *arguments) == BEST
    scores, (indices,) = torch.zeros(11, 5), integers((11, 5))
    given = scores, indices, scores, indices, *arguments
    found = kernels_in(ops.index_topk_triton_backward, *given)
    assert found == [
        ("query_gradients_kernel", ["p_grad_q", "p_grad_weights"]),
        ("key_gradients_kernel", ["p_grad_k"]),
    ]


def test_decode_topk():
    import dynchunk.ops.triton.decode_topk  # noqa: F401

    tensors = torch.zeros(3, 2, 16), torch.zeros(8, 4, 16), torch.zeros(3, 2)
    layout = integers((1, 3, 6), (3,), (1, 3))
    found = kernels_in(torch.ops.dynchunk.decode_topk_triton, *tensors, *layout, 5, 0.25)
    assert found == BEST
