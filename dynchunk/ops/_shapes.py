"""Shape checks of operations: one line an argument."""

from __future__ import annotations

import torch
from torch import Tensor

from dynchunk._checks import describe, require

_INTEGERS = (torch.int32, torch.int64)


def check(
    argument: str, x: object, dims: str, sizes: dict[str, int], kind: str = "floating"
) -> None:
    """Raise unless ``x`` is a tensor of the shape ``dims``, such as ``"T H 1"``.

    A name that is not in ``sizes`` stands for any size and is put there. ``kind`` is
    ``"floating"`` or ``"integer"``.
    """
    expected = "a floating tensor" if kind == "floating" else "an int32 or int64 tensor"
    if not isinstance(x, Tensor):
        raise TypeError(f"{argument}: expected {expected}, got {describe(x)}")
    names = dims.split()
    fits = x.ndim == len(names) and all(
        size == (int(name) if name.isdigit() else sizes.setdefault(name, size))
        for name, size in zip(names, x.shape, strict=True)
    )
    if not (fits and (x.is_floating_point() if kind == "floating" else x.dtype in _INTEGERS)):
        known = ", ".join(f"{n} = {sizes[n]}" for n in dict.fromkeys(names) if n in sizes)
        shape = f"[{', '.join(names)}]" + (f" with {known}" if known else "")
        require(False, argument, f"{expected} of shape {shape}", x)


def expand(argument: str, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return ``x`` broadcast to ``shape``, or say that it cannot be."""
    sizes = zip(reversed(x.shape), reversed(shape), strict=False)
    fits = x.is_floating_point() and x.ndim <= len(shape) and all(a in (1, b) for a, b in sizes)
    require(fits, argument, f"a floating tensor that broadcasts to {list(shape)}", x)
    return x.expand(shape)
