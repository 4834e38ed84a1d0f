"""Index scores and exact top-k: forward and backward, over packed and over paged keys.

A program has one query. It scores as many entries as are to be kept, sorts them, merges them with
the best so far and goes on: no matrix of queries times entries. Entries are ordered by one integer
of 64 bits, the score's bits above the index's, no two of which are equal: so neither the batch, nor
how the entries are split over programs, nor where pages lie decides between equal scores.

The score of an entry is a sum over heads in the order that the shape of the tile gives. A tile has
one query, and where an entry is in it depends on its number in the sequence alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from dynchunk_kernels import _lists, _selected
from dynchunk_kernels._attention import narrow
from dynchunk_kernels._launch import arch_of
from dynchunk_kernels._selected import dot, finite, load_rows, store_rows
from dynchunk_kernels.offline import ARCHS, Case

NOTHING = tl.constexpr(-(2**63 - 1))  # below the key of any entry
FIRST = tl.constexpr(2**63 - 1)  # above
_LOW = tl.constexpr(2**31 - 1)

_MAX_KEPT = 1024  # more than that are found in several passes
_MAX_SPLITS = 128


@triton.jit
def _key(b_score, b_index):
    """Return integers in the order of (score, -index); NaN is above all, -0 is 0."""
    b_score = tl.where(b_score == 0.0, 0.0, b_score)
    b_score = tl.where(b_score != b_score, float("nan"), b_score)
    b_bits = b_score.to(tl.int32, bitcast=True)
    b_bits = tl.where(b_bits < 0, b_bits ^ _LOW, b_bits)
    return (b_bits.to(tl.int64) << 32) + (_LOW - b_index)


@triton.jit
def _score_and_index(b_key):
    """Undo :func:`_key`; -inf and -1 for nothing."""
    b_bits = (b_key >> 32).to(tl.int32)
    b_bits = tl.where(b_bits < 0, b_bits ^ _LOW, b_bits)
    is_none = b_key == NOTHING
    b_score = tl.where(is_none, float("-inf"), b_bits.to(tl.float32, bitcast=True))
    return b_score, tl.where(is_none, -1, _LOW - (b_key & _LOW))


@triton.jit
def _dots(b_q, b_k, m_h):
    """Return the dot products of query heads and entries; zero for heads that are padding."""
    return tl.where(m_h[:, None], dot(b_q, tl.trans(b_k)), 0.0)


@triton.jit(do_not_specialize=["n_pages", "span", "pass_"])
def best_kernel(
    p_q,
    p_k,
    p_weights,
    p_first,
    p_n_visible,
    p_pages,
    p_bound,
    p_keys,
    n_pages,
    span,
    pass_,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Find the best of a query's entries in one span, below what the passes before have found.

    Keys are rows from ``first`` on, or lie in pages of ``PAGE`` rows; ``first`` is the sequence
    then.
    """
    t, i_span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b_h = tl.arange(0, BLOCK_H)
    m_h = b_h < H
    b_q = load_rows(p_q, t * H + b_h, m_h, D, BLOCK_D)
    b_weights = tl.load(p_weights + t * H + b_h, mask=m_h, other=0.0).to(tl.float32)
    first = tl.load(p_first + t).to(tl.int64)
    bound = tl.load(p_bound + t, mask=pass_ > 0, other=FIRST)
    begin = i_span * span
    end = tl.minimum(tl.load(p_n_visible + t), begin + span).to(tl.int32)
    b_best = tl.full([BLOCK_K], NOTHING, tl.int64)
    for k0 in range(begin, end, BLOCK_K):
        b_new = tl.full([BLOCK_K // BLOCK_N, BLOCK_N], NOTHING, tl.int64)
        for n0 in range(k0, tl.minimum(k0 + BLOCK_K, end), BLOCK_N):
            b_n = n0 + tl.arange(0, BLOCK_N)
            m_n = b_n < end
            if PAGE:
                p_page = p_pages + first * n_pages + b_n // PAGE
                b_row = tl.load(p_page, mask=m_n, other=0).to(tl.int64) * PAGE + b_n % PAGE
            else:
                b_row = first + b_n
            b_dots = _dots(b_q, load_rows(p_k, b_row, m_n, D, BLOCK_D), m_h)
            b_relu = tl.maximum(b_dots, 0.0, propagate_nan=tl.PropagateNan.ALL)
            b_key = _key(tl.sum(b_relu * b_weights[:, None], 0) * scale, b_n)
            b_key = tl.where(m_n & (b_key < bound), b_key, NOTHING)
            m_tile = tl.arange(0, BLOCK_K // BLOCK_N) == (n0 - k0) // BLOCK_N
            b_new = tl.where(m_tile[:, None], b_key[None, :], b_new)
        # One falls, the other rises: the larger ones of each pair are the best of both.
        b_best = tl.maximum(b_best, tl.sort(tl.reshape(b_new, [BLOCK_K])))
        b_best = tl.bitonic_merge(b_best, descending=True)
    p_keys += (t * tl.num_programs(1) + i_span) * BLOCK_K
    tl.store(p_keys + tl.arange(0, BLOCK_K), b_best)


@triton.jit(do_not_specialize=["spans", "pass_", "K"])
def merge_kernel(p_keys, p_bound, p_scores, p_indices, spans, pass_, K, BLOCK_K: tl.constexpr):
    """Merge the best of all spans of a query and store them, and the last one as a bound."""
    t = tl.program_id(0).to(tl.int64)
    b_i = tl.arange(0, BLOCK_K)
    p_keys += t * spans * BLOCK_K
    b_best = tl.load(p_keys + b_i)
    for i_span in range(1, spans):
        b_new = tl.load(p_keys + i_span * BLOCK_K + (BLOCK_K - 1 - b_i))
        b_best = tl.bitonic_merge(tl.maximum(b_best, b_new), descending=True)
    b_score, b_index = _score_and_index(b_best)
    b_k = pass_ * BLOCK_K + b_i
    tl.store(p_scores + t * K + b_k, b_score, mask=b_k < K)
    tl.store(p_indices + t * K + b_k, b_index, mask=b_k < K)
    tl.store(p_bound + t, tl.min(b_best, 0))


@triton.jit(do_not_specialize=["K"])
def query_gradients_kernel(
    p_q,
    p_k,
    p_weights,
    p_first,
    p_n_visible,
    p_grad_scores,
    p_indices,
    p_grad_q,
    p_grad_weights,
    K,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Gradients of a tile of the heads of a query and of their weights."""
    t = tl.program_id(0).to(tl.int64)
    b_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    m_h = b_h < H
    b_q = load_rows(p_q, t * H + b_h, m_h, D, BLOCK_D)
    b_weights = tl.load(p_weights + t * H + b_h, mask=m_h, other=0.0).to(tl.float32)
    first = tl.load(p_first + t).to(tl.int64)
    b_grad_q = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    b_grad_weights = tl.zeros([BLOCK_H], tl.float32)
    n = tl.minimum(tl.load(p_n_visible + t), K).to(tl.int32)
    for n0 in range(0, n, BLOCK_N):
        b_i = n0 + tl.arange(0, BLOCK_N)
        m_n = b_i < n
        b_row = first + tl.load(p_indices + t * K + b_i, mask=m_n, other=0)
        b_grad = tl.load(p_grad_scores + t * K + b_i, mask=m_n, other=0.0) * scale
        b_k = load_rows(p_k, b_row, m_n, D, BLOCK_D)
        b_dots = _dots(b_q, b_k, m_h)
        b_ds = tl.where(b_dots > 0, b_weights[:, None] * b_grad[None, :], 0.0)
        b_grad_q += dot(narrow(b_ds, b_k.dtype), b_k)
        b_grad_weights += tl.sum(tl.where(b_dots > 0, b_dots, 0.0) * b_grad[None, :], 1)
    store_rows(p_grad_q, t * H + b_h, m_h, b_grad_q, D, BLOCK_D)
    b_grad_weights = narrow(b_grad_weights, p_grad_weights.dtype.element_ty)
    tl.store(p_grad_weights + t * H + b_h, b_grad_weights, mask=m_h)


@triton.jit(do_not_specialize=["N", "K"])
def key_gradients_kernel(
    p_q,
    p_k,
    p_weights,
    p_list,
    p_last_row,
    p_offsets,
    p_rows,
    p_grad_scores,
    p_grad_k,
    N,
    K,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Gradient of a tile of entries: its readers come by one, in order."""
    i_tile = tl.program_id(0).to(tl.int64)
    b_n = i_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = b_n < N
    b_k = load_rows(p_k, b_n, m_n, D, BLOCK_D)
    b_grad_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for i in range(tl.load(p_offsets + i_tile), tl.load(p_offsets + i_tile + 1)):
        t = tl.load(p_list + i).to(tl.int64)
        # The query's entries in this tile are neighbours in its sorted list, up to this one.
        b_at = tl.load(p_last_row + i) + 1 - BLOCK_N + tl.arange(0, BLOCK_N)
        b_row = tl.load(p_rows + t * K + b_at, mask=b_at >= 0, other=-1)
        b_score = tl.load(p_grad_scores + t * K + b_at, mask=b_at >= 0, other=0.0) * scale
        m_same = b_row[:, None] == b_n[None, :]
        b_grad = tl.sum(tl.where(m_same, b_score[:, None], 0.0), 0)
        m_read = tl.max(m_same.to(tl.int32), 0) > 0
        for h0 in range(0, H, BLOCK_H):
            b_h = h0 + tl.arange(0, BLOCK_H)
            m_h = b_h < H
            b_q = load_rows(p_q, t * H + b_h, m_h, D, BLOCK_D)
            b_weights = tl.load(p_weights + t * H + b_h, mask=m_h, other=0.0).to(tl.float32)
            m_s = (dot(b_q, tl.trans(b_k)) > 0) & m_read[None, :]
            b_ds = tl.where(m_s, b_weights[:, None] * b_grad[None, :], 0.0)
            b_grad_k += dot(tl.trans(narrow(b_ds, b_q.dtype)), finite(b_q))
    store_rows(p_grad_k, b_n, m_n, b_grad_k, D, BLOCK_D)


class Shape(NamedTuple):
    """The sizes that kernels are compiled for."""

    H: int
    D: int
    dtype: torch.dtype

    def constants(self) -> dict[str, int]:
        """Return the constants of a kernel."""
        blocks = {"BLOCK_H": _selected.block(self.H), "BLOCK_D": _selected.block(self.D)}
        return {"H": self.H, "D": self.D} | blocks


class TopKConfig(NamedTuple):
    """How the search is compiled."""

    BLOCK_K: int  #: entries that are sorted at a time, and kept
    BLOCK_N: int  #: entries that are scored at a time
    num_warps: int
    num_stages: int


class GradientConfig(NamedTuple):
    """How the gradients are compiled."""

    BLOCK_H: int  #: heads in a tile
    BLOCK_N: int  #: entries in a tile
    num_warps: int
    num_stages: int


def topk_config(arch: int, shape: Shape, topk: int) -> TopKConfig:
    """Choose tiles for the search."""
    least = 16 if triton.knobs.runtime.interpret else 64  # the interpreter is slow at sorting
    kept = min(max(triton.next_power_of_2(topk), least), _MAX_KEPT)
    if shape.dtype == torch.float32:
        return TopKConfig(kept, 16, 8, 1)
    return TopKConfig(kept, min(kept, 64), 8, 2)


def merge_config(config: TopKConfig) -> TopKConfig:
    """Choose how the search's results are merged."""
    return config._replace(num_warps=4, num_stages=1)


def gradient_config(arch: int, shape: Shape) -> GradientConfig:
    """Choose tiles for the gradients."""
    if shape.dtype == torch.float32:
        return GradientConfig(16, _lists.TILE, 8, 1)
    return GradientConfig(min(_selected.block(shape.H), 64), _lists.TILE, 4, 2)


def index_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    cu_seqlens_q: Tensor,
    cu_entries: Tensor,
    n_visible: Tensor,
    topk: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return (scores, indices), both [S, topk].

    Parameters
    ----------
    q, k, weights : tensors [S, H, D], [N, D], [S, H]
    cu_seqlens_q, cu_entries, n_visible : integer tensors [B+1], [1, B+1], [1, S]
    topk : int
    scale : float
    """
    q, k = _selected.alike(q, k)
    first = cu_entries[0][_lists.ids(cu_seqlens_q, len(q))]
    return _topk(q, k, weights, first, n_visible, None, topk, scale)


def decode_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    pages: Tensor,
    sequence: Tensor,
    n_visible: Tensor,
    topk: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return (scores, indices), both [S, topk].

    Parameters
    ----------
    q, k, weights : tensors [S, H, D], [P, page_size, D], [S, H]
    pages, sequence, n_visible : integer tensors [1, B, n_pages], [S], [1, S]
    topk : int
    scale : float
    """
    q, k = _selected.alike(q, k)
    return _topk(q, k, weights, sequence.contiguous(), n_visible, pages, topk, scale)


def _topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    first: Tensor,
    n_visible: Tensor,
    pages: Tensor | None,
    topk: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    n = len(q)
    indices = torch.empty(n, topk, dtype=torch.int64, device=q.device)
    scores = torch.empty(n, topk, dtype=torch.float32, device=q.device)
    shape = Shape(q.shape[1], q.shape[2], q.dtype)
    config = topk_config(arch_of(q), shape, topk)
    page, spans, span = 0, 1, 2**31 - 1
    if pages is not None:
        page = k.shape[1]
        blocks = triton.cdiv(pages.shape[2] * page, config.BLOCK_K)
        span = config.BLOCK_K * max(triton.cdiv(blocks, _MAX_SPLITS), 1)
        spans = max(triton.cdiv(pages.shape[2] * page, span), 1)
    merging = merge_config(config)._asdict()
    del merging["BLOCK_N"]
    keys = torch.empty(n, spans, config.BLOCK_K, dtype=torch.int64, device=q.device)
    bound = torch.empty(n, dtype=torch.int64, device=q.device)
    for i in range(triton.cdiv(topk, config.BLOCK_K)):
        wrap_triton(best_kernel)[(n, spans)](
            q,
            k,
            weights.contiguous(),
            first,
            n_visible.contiguous(),
            first if pages is None else pages.contiguous(),
            bound,
            keys,
            0 if pages is None else pages.shape[2],
            span,
            i,
            scale,
            PAGE=page,
            **shape.constants(),
            **config._asdict(),
        )
        wrap_triton(merge_kernel)[(n,)](keys, bound, scores, indices, spans, i, topk, **merging)
    return scores, indices


def index_topk_backward(
    grad_scores: Tensor,
    grad_indices: Tensor,
    scores: Tensor,
    indices: Tensor,
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    cu_seqlens_q: Tensor,
    cu_entries: Tensor,
    n_visible: Tensor,
    topk: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and weights; integers have none."""
    if topk == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(weights)
    dtypes = q.dtype, k.dtype
    q, k = _selected.alike(q, k)
    weights, grad_scores = weights.contiguous(), grad_scores.float().contiguous()
    first = cu_entries[0][_lists.ids(cu_seqlens_q, len(q))]
    shape = Shape(q.shape[1], q.shape[2], q.dtype)
    config = gradient_config(arch_of(q), shape)
    options = shape.constants() | config._asdict()
    grad_q, grad_k, grad_weights = (torch.empty_like(x) for x in (q, k, weights))
    wrap_triton(query_gradients_kernel)[(len(q), triton.cdiv(shape.H, config.BLOCK_H))](
        q,
        k,
        weights,
        first,
        n_visible.contiguous(),
        grad_scores,
        indices,
        grad_q,
        grad_weights,
        topk,
        scale,
        **options,
    )
    rows = (indices + first[:, None]).where(indices >= 0, _lists.NONE).int()
    rows, order = rows.contiguous().sort(-1)
    readers = _lists.readers(_lists.Lists(rows[:, None]), len(k), config.BLOCK_N)
    wrap_triton(key_gradients_kernel)[(triton.cdiv(len(k), config.BLOCK_N),)](
        q,
        k,
        weights,
        readers.lists,
        readers.last,
        readers.offsets,
        rows,
        grad_scores.gather(-1, order),
        grad_k,
        len(k),
        topk,
        scale,
        **options,
    )
    return grad_q.to(dtypes[0]), grad_k.to(dtypes[1]), grad_weights


def cases() -> Iterator[Case]:
    """Yield the configurations of the kernels, for the check of their machine code."""
    v4 = Shape(64, 128, torch.bfloat16)
    for arch in ARCHS:
        for shape in (v4, v4._replace(dtype=torch.float32), Shape(4, 64, torch.bfloat16)):
            for page in (0, 64):
                config = topk_config(arch, shape, 512)
                yield _selected.case(best_kernel, arch, shape, config, PAGE=page)
            tiles = gradient_config(arch, shape)
            yield _selected.case(query_gradients_kernel, arch, shape, tiles)
            yield _selected.case(key_gradients_kernel, arch, shape, tiles)
        for topk in (16, 1024):
            yield _selected.case(best_kernel, arch, v4, topk_config(arch, v4, topk), PAGE=0)
            config = merge_config(topk_config(arch, v4, topk))
            yield _selected.case(merge_kernel, arch, v4, config, is_matmul=False)
