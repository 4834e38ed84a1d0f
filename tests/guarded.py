"""Outputs with guards around them, and NaN wherever nothing was written."""

from contextlib import contextmanager
from unittest import mock

import torch

_GUARD = 64  # elements on either side
_VALUE = 77.0  # exact in all dtypes


@contextmanager
def guarded():
    """Let ``Tensor.new_empty`` give poisoned memory between guards; verify them at the end."""
    buffers = []
    new_empty = torch.Tensor.new_empty

    def guarded_empty(x, size, **options):
        size = torch.Size(size if isinstance(size, (tuple, list, torch.Size)) else (size,))
        buffer = new_empty(x, (size.numel() + 2 * _GUARD,), **options).fill_(_VALUE)
        inner = buffer[_GUARD : _GUARD + size.numel()]
        inner.fill_(torch.nan if inner.is_floating_point() else -(2**30))
        buffers.append(buffer)
        return inner.view(size)

    with mock.patch.object(torch.Tensor, "new_empty", guarded_empty):
        yield
    assert buffers
    for buffer in buffers:
        assert (buffer[:_GUARD] == _VALUE).all()
        assert (buffer[-_GUARD:] == _VALUE).all()
