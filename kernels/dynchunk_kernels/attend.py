"""Attention over entries, raw tokens and a sink: tile sizes, launches, and all configurations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.library import wrap_triton

from dynchunk_kernels._launch import (
    arch_of,
    head_block,
    make_case,
    precision,
    programs_to_fill,
    with_contiguous_rows,
)
from dynchunk_kernels.attend_backward import keys_kernel, queries_kernel, shift_kernel
from dynchunk_kernels.attend_forward import forward_kernel
from dynchunk_kernels.offline import ARCHS, Case

_MAX_SHARES = 64  # of a tile of keys, in fp32 each


class Tiles(NamedTuple):
    """How a kernel is compiled."""

    block_m: int  #: rows of a tile: queries times the query heads of a KV head
    block_n: int  #: keys of a tile
    border: int  #: keys, in "keys" rows, of a tile that needs a mask
    num_warps: int
    num_stages: int


#: By kernel, bytes of a number and head dim: the tiles of sm_80, sm_90 and sm_100. Of those tried,
#: the largest that spill in no loop.
_TILES = {
    ("forward", 2, 64): [Tiles(128, 64, 32, 8, 3)] * 3,
    ("forward", 2, 128): [Tiles(128, 64, 16, 8, 2), *[Tiles(128, 64, 32, 8, 3)] * 2],
    ("forward", 2, 256): [
        Tiles(64, 64, 32, 8, 2),
        Tiles(64, 32, 16, 8, 2),
        Tiles(128, 32, 16, 8, 2),
    ],
    ("forward", 2, 512): [*[Tiles(32, 32, 16, 8, 2)] * 2, Tiles(64, 32, 16, 8, 2)],
    ("queries", 2, 64): [*[Tiles(128, 64, 32, 8, 2)] * 2, Tiles(64, 64, 32, 4, 2)],
    ("queries", 2, 128): [Tiles(128, 32, 16, 8, 2), *[Tiles(128, 64, 32, 8, 2)] * 2],
    ("queries", 2, 256): [Tiles(32, 32, 16, 8, 1), *[Tiles(32, 32, 16, 8, 2)] * 2],
    ("queries", 2, 512): [Tiles(32, 32, 16, 8, 1)] * 3,
    ("keys", 2, 64): [Tiles(64, 128, 32, 8, 2), *[Tiles(32, 128, 16, 8, 2)] * 2],
    ("keys", 2, 128): [
        Tiles(64, 64, 32, 8, 2),
        Tiles(32, 64, 16, 8, 2),
        Tiles(64, 128, 32, 8, 2),
    ],
    ("keys", 2, 256): [Tiles(32, 32, 16, 8, 2)] * 3,
    ("keys", 2, 512): [Tiles(16, 16, 16, 8, 1)] * 3,
    ("forward", 4, 64): [Tiles(32, 32, 16, 8, 1)] * 3,
    ("forward", 4, 128): [Tiles(32, 16, 16, 8, 1)] * 3,
    ("forward", 4, 256): [Tiles(16, 16, 16, 8, 1)] * 3,
    ("forward", 4, 512): [Tiles(16, 16, 16, 8, 1)] * 3,
    ("queries", 4, 64): [Tiles(32, 32, 16, 8, 1)] * 3,
    ("queries", 4, 128): [Tiles(32, 16, 16, 8, 1)] * 3,
    ("queries", 4, 256): [Tiles(16, 16, 16, 8, 2)] * 3,
    ("queries", 4, 512): [Tiles(16, 16, 16, 8, 1)] * 3,
    ("keys", 4, 64): [Tiles(32, 32, 16, 8, 1)] * 3,
    ("keys", 4, 128): [Tiles(16, 16, 16, 8, 1)] * 3,
    ("keys", 4, 256): [Tiles(16, 16, 16, 8, 1)] * 3,
    ("keys", 4, 512): [Tiles(16, 8, 16, 16, 1)] * 3,
}


def tiles(kernel: str, arch: int, width: int, dtype: torch.dtype) -> Tiles:
    """Return the tile sizes of the kernel "forward", "queries" or "keys".

    ``width`` is the larger one of the head dims, rounded up to a power of two.
    """
    if width > 512:
        raise ValueError(f"head dims: expected at most 512 channels, got {width}")
    by_arch = _TILES[kernel, dtype.itemsize, max(width, 64)]
    return by_arch[0 if arch < 90 else 1 if arch < 100 else 2]


def constants(
    kernel: str, arch: int, sizes: tuple[int, int, int], dtype: torch.dtype, **options: bool
) -> dict[str, Any]:
    """Return all that a kernel is compiled for; sizes are R, D and D_v."""
    R, D, D_V = sizes
    block_d, block_v = head_block(D), head_block(D_V)
    chosen = tiles(kernel, arch, max(block_d, block_v), dtype)
    return {
        "R": R,
        "D": D,
        "D_V": D_V,
        "BLOCK_M": chosen.block_m,
        "BLOCK_N": chosen.block_n,
        "BORDER": chosen.border,
        "BLOCK_D": block_d,
        "BLOCK_V": block_v,
        "PRECISION": precision(dtype),
        "num_warps": chosen.num_warps,
        "num_stages": chosen.num_stages,
        **options,
    }


def shift_constants(H: int, D_V: int) -> dict[str, Any]:
    """Return all that the kernel of the shift is compiled for."""
    block_v = head_block(D_V)
    sizes = {"BLOCK_M": 4096 // block_v, "BLOCK_V": block_v, "num_warps": 4, "num_stages": 2}
    return {"H": H, "D_V": D_V, **sizes}


class _Operands(NamedTuple):
    """The inputs of an attend as kernels take them: in one dtype, none of them None.

    Keys stand for values that are None, and any tensor for a bias or sink: never read.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    entry_k: Tensor
    entry_v: Tensor
    bias: Tensor
    sink: Tensor
    integers: tuple[Tensor, ...]  #: cu_seqlens_q, cu_seqlens_k, cu_entries, n_visible, raw_start
    scale: float
    is_shared: bool
    has_bias: bool
    has_sink: bool

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        entry_k: Tensor,
        entry_v: Tensor | None,
        bias: Tensor | None,
        sink: Tensor | None,
        *others: Any,
    ) -> _Operands:
        given = [x for x in (q, k, v, entry_k, entry_v) if x is not None]
        dtype = given[0].dtype
        for x in given[1:]:
            dtype = torch.promote_types(dtype, x.dtype)
        q, k, entry_k = (with_contiguous_rows(x, dtype) for x in (q, k, entry_k))
        return cls(
            q,
            k,
            k if v is None else with_contiguous_rows(v, dtype),
            entry_k,
            entry_k if entry_v is None else with_contiguous_rows(entry_v, dtype),
            entry_k[..., 0] if bias is None else bias,
            q if sink is None else sink.contiguous(),
            tuple(x.contiguous() for x in others[:-1]),
            others[-1],
            v is None,
            bias is not None,
            sink is not None,
        )

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """S, B, G and H_kv."""
        return len(self.q), len(self.integers[0]) - 1, len(self.integers[2]), self.k.shape[1]

    def constants(self, kernel: str, **options: bool) -> dict[str, Any]:
        """Return all that a kernel is compiled for."""
        sizes = (self.q.shape[1] // self.k.shape[1], self.k.shape[2], self.v.shape[2])
        options["SHARED"] = self.is_shared
        return constants(kernel, arch_of(self.q), sizes, self.q.dtype, **options)


def attend(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Attend to the first entries of each sequence and to a run of raw tokens.

    Parameters
    ----------
    *inputs
        q [S, H, D], k [T, H_kv, D], v [T, H_kv, D_v] or None, entry_k [N, H_kv / G, D], entry_v
        [N, H_kv / G, D_v] or None, bias [N, H_kv / G] or None, sink [H] or None; int32 or int64
        cu_seqlens_q and cu_seqlens_k [B+1], cu_entries [G, B+1], n_visible and raw_start [G, S],
        which do not decrease within a sequence; scale.

    Returns
    -------
    out [S, H, D_v] in the dtype of q, lse float32 [S, H]
    """
    x, q = _Operands.of(*inputs), inputs[0]
    S, B, _, H_KV = x.sizes
    out = q.new_empty((*q.shape[:2], x.v.shape[2]))
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    if S > 0:
        chosen = x.constants("forward", HAS_BIAS=x.has_bias, HAS_SINK=x.has_sink)
        grid = (triton.cdiv(S * chosen["R"], chosen["BLOCK_M"]) + B, H_KV)
        floating = (x.q, x.k, x.v, x.entry_k, x.entry_v, x.bias)
        wrap_triton(forward_kernel)[grid](
            *(*floating, x.sink, out, lse, *x.integers, x.scale, *_strides(*floating), *x.sizes),
            **chosen,
        )
    return out, lse


def attend_backward(
    grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, *inputs: Any
) -> tuple[Tensor, ...]:
    """Return the gradients of the seven operands of :func:`attend`, empty for one that is None."""
    x = _Operands.of(*inputs)
    grad = with_contiguous_rows(grad_out, x.q.dtype)
    shift = _shift(grad, grad_lse, out.contiguous())
    d_entries = _of_keys(x, grad, lse, shift, entries=True)
    d_raw = _of_keys(x, grad, lse, shift, entries=False)
    d_sink = shift
    if x.has_sink:
        weights = (x.sink.float() - lse.masked_fill(lse == -torch.inf, 0)).exp()
        d_sink = (weights * shift).sum(0)
    dq = _of_queries(x, grad, lse, shift)
    found = (dq, d_raw[0], d_raw[1], d_entries[0], d_entries[1], d_entries[2], d_sink)
    return tuple(
        out.new_empty(0) if given is None else gradient.to(given.dtype)
        for gradient, given in zip(found, inputs[:7], strict=True)
    )


def _shift(grad: Tensor, grad_lse: Tensor, out: Tensor) -> Tensor:
    """Return grad_lse - grad . out, float32 [S, H]."""
    S, H, D_V = out.shape
    shift = out.new_empty((S, H), dtype=torch.float32)
    if S > 0:
        chosen = shift_constants(H, D_V)
        wrap_triton(shift_kernel)[(triton.cdiv(S * H, chosen["BLOCK_M"]),)](
            *(grad, grad_lse, out, shift, *_strides(grad, grad_lse), S), **chosen
        )
    return shift


def _of_queries(x: _Operands, grad: Tensor, lse: Tensor, shift: Tensor) -> Tensor:
    """Return the gradient of the queries."""
    S, B, _, H_KV = x.sizes
    dq = x.q.new_empty(x.q.shape)
    if S > 0:
        chosen = x.constants("queries", HAS_BIAS=x.has_bias)
        grid = (triton.cdiv(S * chosen["R"], chosen["BLOCK_M"]) + B, H_KV)
        floating = (x.q, x.k, x.v, x.entry_k, x.entry_v, x.bias)
        wrap_triton(queries_kernel)[grid](
            *(*floating, grad, lse, shift, dq, *x.integers, x.scale),
            *(*_strides(*floating, grad), *x.sizes),
            **chosen,
        )
    return dq


def _of_keys(
    x: _Operands, grad: Tensor, lse: Tensor, shift: Tensor, *, entries: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the entries, or of the raw tokens: keys, values, bias."""
    cu_q, cu_k, cu_entries, n_visible, raw_start = x.integers
    k, v = (x.entry_k, x.entry_v) if entries else (x.k, x.v)
    cu, runs = (cu_entries, n_visible) if entries else (cu_k, raw_start)
    has_bias = x.has_bias and entries
    S, B, G, H_KV = x.sizes
    N = len(k)
    chosen = x.constants("keys", HAS_BIAS=has_bias, ENTRIES=entries)
    n_tiles = triton.cdiv(N, chosen["BLOCK_N"]) + B
    shares = max(min(programs_to_fill(x.q) // (n_tiles * H_KV), _MAX_SHARES), 1)
    shapes = (k.shape, v.shape, k.shape[:2])
    dk, dv, d_bias = (k.new_empty((shares, *shape), dtype=torch.float32) for shape in shapes)
    if N > 0:
        wrap_triton(keys_kernel)[(n_tiles, H_KV, shares)](
            *(x.q, k, v, x.bias, grad, lse, shift, dk, dv, d_bias, cu_q, cu, runs, x.scale),
            *(*_strides(x.q, k, v, x.bias, grad), N, S, B, G, H_KV),
            **chosen,
        )
    dk, dv, d_bias = (t[0] if shares == 1 else t.sum(0) for t in (dk, dv, d_bias))
    return dk, dv, d_bias


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    """Return the strides of row and head."""
    return tuple(stride for x in tensors for stride in x.stride()[:2])


#: Head dims, query heads of a KV head, dtype, whether keys are values: what is compiled offline.
_OFFLINE = [
    *((D, 4, torch.bfloat16, False) for D in (64, 80, 96, 128, 192, 256, 512)),
    (128, 8, torch.bfloat16, True),
    (512, 64, torch.bfloat16, True),
    *((128, R, torch.bfloat16, False) for R in (1, 2, 16)),
    *((D, R, torch.float16, False) for D, R in ((64, 2), (128, 1), (256, 8), (512, 4))),
    *((D, 4, torch.float32, False) for D in (64, 128, 256, 512)),
]


def cases() -> Iterator[Case]:
    """Yield all tile sizes that launchers choose, with the options that need most registers."""
    floats = dict.fromkeys(
        ("p_lse", "p_grad_lse", "p_shift", "p_dbias", "p_bias", "p_sink"), "*fp32"
    )
    integers = ("p_cu_q", "p_cu_k", "p_cu_entries", "p_n_visible", "p_raw_start", "p_run")
    kinds = floats | dict.fromkeys(integers, "*i64")
    for arch in ARCHS:
        for D, R, dtype, shared in _OFFLINE:
            words = f"D {D}, {str(dtype).removeprefix('torch.')}, group of {R}"
            words += ", keys are values" if shared else ""
            for kernel, name, options in (
                (forward_kernel, "forward", {"HAS_BIAS": True, "HAS_SINK": True}),
                (queries_kernel, "queries", {"HAS_BIAS": True}),
                (keys_kernel, "keys", {"HAS_BIAS": True, "ENTRIES": True}),
                (keys_kernel, "keys", {"HAS_BIAS": False, "ENTRIES": False}),
            ):
                chosen = constants(name, arch, (R, D, D), dtype, SHARED=shared, **options)
                what = ", entries" if options.get("ENTRIES") else ""
                yield make_case(kernel, words + what, chosen, dtype, kinds, arch)
        chosen = shift_constants(32, 128)
        case = make_case(shift_kernel, "D 128, bfloat16", chosen, torch.bfloat16, kinds, arch)
        yield case._replace(is_matmul=False)
