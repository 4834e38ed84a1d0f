"""Memory that shows what a kernel must not do: fresh tensors full of NaN, with guards around."""

from contextlib import contextmanager
from unittest.mock import patch

import torch

GUARD = 256  # elements on either side


@contextmanager
def guarded_memory():
    """Poison every tensor that ``empty`` makes, and verify that nobody wrote around it."""
    buffers = []
    plain = torch.empty

    def empty(*size, dtype=None, device=None, **options):
        shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
        buffer = plain(shape.numel() + 2 * GUARD, dtype=dtype, device=device)
        poison = torch.nan if buffer.is_floating_point() else 77
        buffer.fill_(poison)
        buffers.append((buffer, shape.numel()))
        return buffer[GUARD : GUARD + shape.numel()].view(shape)

    def new_empty(self, *size, dtype=None, device=None, **options):
        return empty(*size, dtype=dtype or self.dtype, device=device or self.device)

    def empty_like(x, *, dtype=None, device=None, **options):
        return new_empty(x, x.shape, dtype=dtype, device=device)

    with (
        patch.object(torch, "empty", empty),
        patch.object(torch, "empty_like", empty_like),
        patch.object(torch.Tensor, "new_empty", new_empty),
    ):
        yield
    assert buffers, "the kernel allocated nothing through torch"
    for buffer, size in buffers:
        for guard in (buffer[:GUARD], buffer[GUARD + size :]):
            poison = torch.tensor(77).to(guard.dtype)
            is_intact = guard.isnan() if guard.is_floating_point() else guard == poison
            assert bool(is_intact.all()), "a kernel wrote outside of its output"
