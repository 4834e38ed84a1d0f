"""Operations: one file each, with its semantics and the choice of an implementation.

``impl`` selects how an operation runs, never what it computes: ``"reference"`` (plain torch, any
device), ``"cpu"`` (numba), ``"batched"`` (many short sequences), ``"triton"`` (GPU); None picks by
device. An explicit choice never falls back to another.
"""
