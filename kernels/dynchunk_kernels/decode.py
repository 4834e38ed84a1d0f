"""Attention of new tokens over a paged cache, split over entries, combined in a fixed order.

A part is a run of a fixed number of entries of one query and KV head, or its share of the raw rows.
What a part is depends on nothing but its own query, so neither do the bits of the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from dynchunk_kernels._attention import LN_2, LOG2_E, dot, load_tile, narrow, store_tile
from dynchunk_kernels._launch import (
    arch_of,
    head_block,
    make_case,
    precision,
    with_contiguous_rows,
)
from dynchunk_kernels.offline import ARCHS, Case

_RAW_PARTS = 4  # of each query and KV head
_COMBINED = 16  # parts that are combined at a time
_LISTED = 64  # indices of a tile of ``unique_kernel``


@triton.jit(do_not_specialize=["K"])
def unique_kernel(p_indices, p_out, K, BLOCK: tl.constexpr):
    """Put -1 in the place of an index that stands further ahead in the same list."""
    o_k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64) * K
    b_index = tl.load(p_indices + row + o_k, mask=o_k < K, other=-1)
    b_repeated = tl.zeros([BLOCK], tl.int32)
    for start in range(0, (tl.program_id(0) + 1) * BLOCK, BLOCK):
        o_other = start + tl.arange(0, BLOCK)
        b_other = tl.load(p_indices + row + o_other, mask=o_other < K, other=-1)
        m_same = (b_index[:, None] == b_other[None, :]) & (o_other[None, :] < o_k[:, None])
        b_repeated = tl.maximum(b_repeated, tl.max(m_same.to(tl.int32), 1))
    tl.store(p_out + row + o_k, tl.where(b_repeated > 0, -1, b_index), mask=o_k < K)


@triton.jit(do_not_specialize=["S", "B", "G", "H_KV", "n_pages", "n_lists", "K"])
def part_kernel(
    p_q,
    p_k,
    p_v,
    p_entry_k,
    p_entry_v,
    p_bias,
    p_out,
    p_lse,
    p_pages,
    p_sequence,
    p_n_visible,
    p_raw_begin,
    p_raw_end,
    p_indices,
    scale,
    stride_q_s,
    stride_q_h,
    stride_k_t,
    stride_k_h,
    stride_v_t,
    stride_v_h,
    stride_entry_k_p,
    stride_entry_k_n,
    stride_entry_k_h,
    stride_entry_v_p,
    stride_entry_v_n,
    stride_entry_v_h,
    stride_bias_p,
    stride_bias_n,
    stride_bias_h,
    S,
    B,
    G,
    H_KV,
    n_pages,
    n_lists,
    K,
    R: tl.constexpr,
    D: tl.constexpr,
    D_V: tl.constexpr,
    PAGE: tl.constexpr,
    PART: tl.constexpr,
    RAW_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_LISTS: tl.constexpr,
    SHARED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend to one part: write the output and the log of the sum, in powers of two.

    The first parts are the shares of the raw rows; a share takes every RAW_PARTS-th tile.
    """
    part, s = tl.program_id(0), tl.program_id(1).to(tl.int64)
    BLOCKS: tl.constexpr = (R + BLOCK_M - 1) // BLOCK_M
    head, block = (tl.program_id(2) // BLOCKS).to(tl.int64), tl.program_id(2) % BLOCKS
    per_view = H_KV // G
    view, own = head // per_view, head % per_view
    n_visible = tl.load(p_n_visible + view * S + s).to(tl.int32)
    is_entry = part >= RAW_PARTS
    if is_entry:
        begin, step = (part - RAW_PARTS) * PART, BLOCK_N
        end = tl.minimum(begin + PART, K if HAS_LISTS else n_visible)
    else:
        begin = tl.load(p_raw_begin + view * S + s).to(tl.int32) + part * BLOCK_N
        end, step = tl.load(p_raw_end + s).to(tl.int32), RAW_PARTS * BLOCK_N
    if is_entry & (begin >= end):  # nobody reads what this part would write
        return

    b_head = block * BLOCK_M + tl.arange(0, BLOCK_M)
    m_head = b_head < R
    p_q += s * stride_q_s + head * R * stride_q_h
    b_q = load_tile(p_q, b_head * stride_q_h, m_head, D, BLOCK_D, True)
    b_acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)

    p_pages += (view * B + tl.load(p_sequence + s)) * n_pages
    p_indices += (s * n_lists + tl.minimum(head, n_lists - 1)) * K
    p_key = tl.where(is_entry, p_entry_k + own * stride_entry_k_h, p_k + head * stride_k_h)
    p_value = tl.where(is_entry, p_entry_v + own * stride_entry_v_h, p_v + head * stride_v_h)
    p_bias += own * stride_bias_h
    stride_key = tl.where(is_entry, stride_entry_k_n, stride_k_t)
    stride_value = tl.where(is_entry, stride_entry_v_n, stride_v_t)
    end_entry, end_raw = tl.where(is_entry, end, 0), tl.where(is_entry, 0, end)
    for start in range(begin, end, step):
        o_n = start + tl.arange(0, BLOCK_N)
        m_entry, m_raw = o_n < end_entry, o_n < end_raw
        b_entry = o_n
        if HAS_LISTS:
            b_entry = tl.load(p_indices + o_n, mask=m_entry, other=-1).to(tl.int32)
            m_entry = (b_entry >= 0) & (b_entry < n_visible)
        m_n = m_entry | m_raw
        b_page = tl.load(p_pages + b_entry // PAGE, mask=m_entry, other=0).to(tl.int64)
        b_row = tl.where(m_entry, b_entry % PAGE, o_n).to(tl.int64)
        b_offset = b_page * stride_entry_k_p + b_row * stride_key
        b_k = load_tile(p_key, b_offset, m_n, D, BLOCK_D, True)
        b_logit = dot(b_q, tl.trans(b_k), None, PRECISION) * (scale * LOG2_E)
        if HAS_BIAS:
            p_b = p_bias + b_page * stride_bias_p + b_row * stride_bias_n
            b_bias = tl.load(p_b, mask=m_entry, other=0.0)
            b_logit += (b_bias.to(tl.float32) * LOG2_E)[None, :]
        b_logit = tl.where(m_n[None, :], b_logit, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_logit, 1))
        b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_p = tl.exp2(b_logit - b_base[:, None])
        b_decay = tl.exp2(b_max - b_base)
        b_sum = b_sum * b_decay + tl.sum(b_p, 1)
        b_max = b_new
        if SHARED:
            b_v = b_k
        else:
            b_offset = b_page * stride_entry_v_p + b_row * stride_value
            b_v = load_tile(p_value, b_offset, m_n, D_V, BLOCK_V, True)
        b_acc = dot(narrow(b_p, b_v.dtype), b_v, b_acc * b_decay[:, None], PRECISION)

    n_parts = tl.num_programs(0)
    row, b_row = (s * H_KV + head) * R * n_parts + part, b_head * n_parts
    b_out = b_acc / tl.where(b_sum == 0.0, 1.0, b_sum)[:, None]
    store_tile(p_out + row * D_V, b_row * D_V, m_head, b_out, D_V, BLOCK_V)
    tl.store(p_lse + row + b_row, b_max + tl.log2(b_sum), mask=m_head)


@triton.jit(do_not_specialize=["S", "G", "H", "K", "n_parts"])
def combine_kernel(
    p_out_part,
    p_lse_part,
    p_sink,
    p_out,
    p_lse,
    p_n_visible,
    S,
    G,
    H,
    K,
    n_parts,
    D_V: tl.constexpr,
    PART: tl.constexpr,
    RAW_PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_LISTS: tl.constexpr,
    HAS_SINK: tl.constexpr,
):
    """Add up the parts of one query and head in their order."""
    s, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = K if HAS_LISTS else tl.load(p_n_visible + (head // (H // G)) * S + s).to(tl.int32)
    n_written = RAW_PARTS + tl.cdiv(tl.maximum(n, 0), PART)
    row = s * H + head
    p_lse_part += row * n_parts
    p_out_part += row * n_parts * D_V
    peak = -float("inf")
    if HAS_SINK:
        sink = tl.load(p_sink + head).to(tl.float32) * LOG2_E
        peak = sink
    for start in range(0, n_written, BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)
        b_lse = tl.load(p_lse_part + o_n, mask=o_n < n_written, other=float("-inf"))
        peak = tl.maximum(peak, tl.max(b_lse, 0))
    base = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.exp2(sink - base) if HAS_SINK else 0.0
    b_acc = tl.zeros([BLOCK_V], tl.float32)
    for start in range(0, n_written, BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)
        b_lse = tl.load(p_lse_part + o_n, mask=o_n < n_written, other=float("-inf"))
        b_weight = tl.exp2(b_lse - base)
        b_out = load_tile(p_out_part, o_n * D_V, o_n < n_written, D_V, BLOCK_V, True)
        total += tl.sum(b_weight, 0)
        b_acc += tl.sum(b_out * b_weight[:, None], 0)
    o_d = tl.arange(0, BLOCK_V)
    b_acc = b_acc / tl.where(total == 0.0, 1.0, total)
    b_acc = narrow(b_acc, p_out.dtype.element_ty)
    tl.store(p_out + row * D_V + o_d, b_acc, mask=o_d < D_V)
    tl.store(p_lse + row, (peak + tl.log2(total)) * LN_2)


def constants(
    arch: int,
    R: int,
    D: int,
    D_V: int,
    page_size: int,
    dtype: torch.dtype,
    has_bias: bool,
    has_lists: bool,
    is_shared: bool,
) -> dict[str, Any]:
    """Return all that the kernel of the parts is compiled for."""
    block_d, block_v = head_block(D), head_block(D_V)
    width = max(block_d, block_v)
    is_single = dtype == torch.float32  # multiplied without tensor cores, out of registers
    return {
        "R": R,
        "D": D,
        "D_V": D_V,
        "PAGE": page_size,
        "PART": part_size(R, D_V),
        "RAW_PARTS": _RAW_PARTS,
        "BLOCK_M": min(head_block(R), 16 if is_single else 32 if width > 256 else 64),
        "BLOCK_N": 16 if is_single else 32 if width > 256 else 64,
        "BLOCK_D": block_d,
        "BLOCK_V": block_v,
        "PRECISION": precision(dtype),
        "num_warps": 8 if is_single or width > 256 else 4,
        "num_stages": 1 if is_single else 3 if width <= 128 else 2,
        "HAS_BIAS": has_bias,
        "HAS_LISTS": has_lists,
        "SHARED": is_shared,
    }


def combine_constants(R: int, D_V: int, has_lists: bool, has_sink: bool) -> dict[str, Any]:
    """Return all that the kernel that combines the parts is compiled for."""
    return {
        "D_V": D_V,
        "PART": part_size(R, D_V),
        "RAW_PARTS": _RAW_PARTS,
        "BLOCK_N": _COMBINED,
        "BLOCK_V": head_block(D_V),
        "num_warps": 4,
        "num_stages": 2,
        "HAS_LISTS": has_lists,
        "HAS_SINK": has_sink,
    }


def part_size(R: int, D_V: int) -> int:
    """Return how many entries a part has: enough to outweigh the output that it writes."""
    return 2048 if R * D_V >= 8192 else 512


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    entry_k: Tensor,
    entry_v: Tensor | None,
    bias: Tensor | None,
    sink: Tensor | None,
    pages: Tensor,
    sequence: Tensor,
    n_visible: Tensor,
    raw_begin: Tensor,
    raw_end: Tensor,
    indices: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attend to entries in pages and to a run of raw rows.

    Parameters
    ----------
    q : floating tensor [S, H, D]
    k, v : floating tensors [R, H_kv, D] and [R, H_kv, D_v]
        v None: the keys are the values, ``entry_v`` is None too.
    entry_k, entry_v : floating tensors [P, page_size, H_kv / G, D or D_v]
    bias : floating tensor [P, page_size, H_kv / G], optional
    sink : floating tensor [H], optional
    pages : integer tensor [G, B, n_pages]
    sequence : integer tensor [S]
    n_visible, raw_begin : integer tensors [G, S]
    raw_end : integer tensor [S]
    indices : integer tensor [S, 1 or H_kv, K], optional
    scale : float

    Returns
    -------
    out [S, H, D_v] in the dtype of q, lse float32 [S, H]
    """
    (S, H, D), (H_KV, D_V) = q.shape, (k if v is None else v).shape[1:]
    out = q.new_empty((S, H, D_V))
    lse = q.new_empty((S, H), dtype=torch.float32)
    if S == 0:
        return out, lse
    R, page_size, dtype = H // H_KV, entry_k.shape[1], entry_k.dtype
    given = (q, k, k if v is None else v, entry_k, entry_k if entry_v is None else entry_v)
    operands = [with_contiguous_rows(x, dtype) for x in given]
    lists = pages.new_empty((1, 1, 0)) if indices is None else _unique(indices.contiguous())
    added = entry_k[..., 0] if bias is None else bias
    layout = tuple(x.contiguous() for x in (pages, sequence, n_visible, raw_begin, raw_end))
    (G, B, n_pages), (n_lists, K) = pages.shape, lists.shape[1:]

    has_lists, has_bias = indices is not None, bias is not None
    chosen = constants(
        *(arch_of(q), R, D, D_V, page_size, dtype, has_bias, has_lists),
        is_shared=v is None,
    )
    capacity = n_pages * page_size if indices is None else K
    n_parts = _RAW_PARTS + triton.cdiv(capacity, chosen["PART"])
    out_part = q.new_empty((S, H, n_parts, D_V), dtype=torch.float32)
    lse_part = q.new_empty((S, H, n_parts), dtype=torch.float32)
    wrap_triton(part_kernel)[(n_parts, S, H_KV * triton.cdiv(R, chosen["BLOCK_M"]))](
        *(*operands, added, out_part, lse_part, *layout, lists, scale),
        *(n for x in operands for n in x.stride()[:-1]),
        *added.stride(),
        *(S, B, G, H_KV, n_pages, n_lists, K),
        **chosen,
    )
    wrap_triton(combine_kernel)[(S, H)](
        *(out_part, lse_part, q if sink is None else sink.contiguous(), out, lse, layout[2]),
        *(S, G, H, K, n_parts),
        **combine_constants(R, D_V, has_lists, has_sink=sink is not None),
    )
    return out, lse


def _unique(indices: Tensor) -> Tensor:
    """Return lists [S, 1 or H_kv, K] as int32, with -1 for an index that stands there already."""
    S, n_lists, K = indices.shape
    found = indices.new_empty(indices.shape, dtype=torch.int32)
    if K > 0:
        grid = (triton.cdiv(K, _LISTED), S * n_lists)
        wrap_triton(unique_kernel)[grid](indices, found, K, BLOCK=_LISTED, num_warps=4)
    return found


def cases() -> Iterator[Case]:
    """Yield all tile sizes that the launcher chooses, with the options that need most registers."""
    floats = dict.fromkeys(("p_out", "p_lse", "p_out_part", "p_lse_part", "p_bias"), "*fp32")
    layout = ("p_pages", "p_sequence", "p_n_visible", "p_raw_begin", "p_raw_end")
    kinds = floats | dict.fromkeys(layout, "*i64") | {"p_indices": "*i32"}
    for arch in ARCHS:
        for D, R, dtype, shared in (
            *((D, 4, torch.bfloat16, False) for D in (64, 80, 96, 128, 192, 256, 512)),
            *((128, R, torch.bfloat16, False) for R in (1, 2, 16)),
            *((D, R, torch.float16, False) for D, R in ((64, 2), (128, 16), (256, 8), (512, 4))),
            (512, 64, torch.bfloat16, True),
            *((D, 4, torch.float32, False) for D in (64, 128, 256, 512)),
        ):
            words = f"D {D}, {str(dtype).removeprefix('torch.')}, group of {R}"
            words += ", keys are values" if shared else ""
            for has_lists in (False, True):
                chosen = constants(arch, R, D, D, 64, dtype, True, has_lists, shared)
                what = words + (", lists" if has_lists else "")
                yield make_case(part_kernel, what, chosen, dtype, kinds, arch)
            own = {name: kind for name, kind in kinds.items() if name != "p_out"}
            chosen = combine_constants(R, D, has_lists=False, has_sink=True)
            case = make_case(combine_kernel, words, chosen, dtype, own, arch)
            yield case._replace(is_matmul=False)
