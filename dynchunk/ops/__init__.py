"""Operations: one file each, with its semantics and the choice of an implementation.

``impl`` selects how an operation runs, never what it computes: ``"cpu"`` (numba),
``"reference"`` (plain torch, any device), ``"triton"`` (GPU) or None, which picks by device. An
explicit choice never falls back to another.
"""
