"""Validation at the edge of the API: errors name the argument, what was expected, what came."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def describe(value: object) -> str:
    """Name a value as an error message should: tensors by dtype and shape, the rest by repr."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def require(condition: bool, argument: str, expected: str, got: object) -> None:
    """Raise ``ValueError`` unless ``condition`` holds."""
    if not condition:
        raise ValueError(f"{argument}: expected {expected}, got {describe(got)}")


def require_int(argument: str, value: object, minimum: int | None = None) -> int:
    """Return ``value`` if it is an integer, of at least ``minimum`` where one is given."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{argument}: expected an integer, got {describe(value)}")
    if minimum is not None:
        require(value >= minimum, argument, f"an integer >= {minimum}", value)
    return value


def require_choice(argument: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise ``ValueError`` unless ``value`` is one of ``choices``."""
    require(value in choices, argument, f"one of {', '.join(map(repr, choices))}", value)


def require_tokens(argument: str, value: object) -> Tensor:
    """Return ``value`` if it is a one-dimensional tensor of token ids."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{argument}: expected a tensor of token ids [T], got {describe(value)}")
    is_integer = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    require(is_integer and value.ndim == 1, argument, "integer token ids [T]", value)
    return value


def require_vectors(argument: str, value: object, ndims: tuple[int, ...] = (2,)) -> Tensor:
    """Return ``value`` if it is a floating tensor of one vector (or several) per token."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{argument}: expected a floating tensor, got {describe(value)}")
    shape = " or ".join(["[T, D]", "[T, H, D]"][n - 2] for n in ndims)
    is_ok = value.is_floating_point() and value.ndim in ndims
    require(is_ok, argument, f"a floating tensor of shape {shape}", value)
    return value


def optional_import(module: str, extra: str) -> ModuleType:
    """Import an optional dependency or say which extra brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{module} is needed here and not installed: pip install 'dynchunk[{extra}]'"
        ) from error


def require_state(state: Any, keys: set[str]) -> dict[str, Any]:
    """Return ``state`` if it is a dict of exactly ``keys``: one that lost a field is refused."""
    if not isinstance(state, dict):
        raise TypeError(f"state: expected a dict, got {describe(state)}")
    require(set(state) == keys, "state", f"the keys {sorted(keys)}", sorted(map(str, state)))
    return state
