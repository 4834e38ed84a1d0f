"""What the attention kernels have in common: tiles of rows and keys, and which row reads what.

A row is a query with one of the R query heads that share a KV head: row r of a sequence is its
query r // R with head r % R of the group. So tensor cores are full with few queries, and a tile
has few queries, which read nearly the same keys.

What decides where a kernel stores is loaded in the kernel itself, not in a function: torch.compile
would take what a function loads from for something that the kernel changes.

A row reads one run of entries and one run of raw tokens, both counted from the start of its
sequence. From one query of a sequence to the next, no end of a run moves back.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
_FAR = tl.constexpr(2**31 - 1)
WAYS = tl.constexpr(128)  # values that a search compares at a time
#: The interpreter would multiply the bits of bfloat16 numbers, and does not round to them.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def first_tile(b_offset, b, R: tl.constexpr, BLOCK: tl.constexpr):
    """Return the number of the first tile of sequence b, which begins at an offset.

    A sequence has R rows for each query. The numbers leave enough to each sequence; no pass over
    the sequences before is needed, and ``offsets[-1] * R // BLOCK + B`` is an upper bound.
    """
    return (b_offset * R // BLOCK + b).to(tl.int32)


@triton.jit
def first_at_least(p_x, n, bound):
    """Return the first index of n values in ascending order whose value is at least ``bound``."""
    low, high = n * 0, n
    while low < high:
        step = tl.cdiv(high - low, WAYS)
        i = low + tl.arange(0, WAYS) * step
        b_x = tl.load(p_x + i, mask=i < high, other=bound)
        n_below = tl.sum((b_x < bound).to(tl.int32), 0)
        high = tl.minimum(high, low + n_below * step)
        low = tl.where(n_below > 0, low + (n_below - 1) * step + 1, high)
    return low


@triton.jit
def rows_from(start, R: tl.constexpr, BLOCK: tl.constexpr):
    """Return the query of a tile's first row; each row's distance to it in queries; its head."""
    o_row = start % R + tl.arange(0, BLOCK)
    return start // R, o_row // R, o_row % R


@triton.jit
def entry_runs(p_n_visible, b_query, m_row, n_entries):
    """Return how many entries each row reads; none where there is no row."""
    b_seen = tl.load(p_n_visible + b_query, mask=m_row, other=0)
    return tl.minimum(b_seen, n_entries).to(tl.int32)


@triton.jit
def raw_runs(p_raw_start, b_query, m_row, begin_k, own):
    """Return the run of raw tokens that each row reads; none where there is no row.

    ``own`` is where in its sequence the token of the query at ``p_raw_start`` lies.
    """
    b_start = tl.load(p_raw_start + b_query, mask=m_row, other=0) - begin_k
    b_low = tl.where(m_row, tl.maximum(b_start, 0), 0).to(tl.int32)
    return b_low, tl.where(m_row, own + 1 + b_query, 0)


@triton.jit
def tile_runs(b_low, b_high, m_row, BLOCK: tl.constexpr, BORDER: tl.constexpr):
    """Split the keys that rows read into tiles as :func:`split` does; also return their ends."""
    begin, end = tl.min(tl.where(m_row, b_low, _FAR), 0), tl.max(tl.where(m_row, b_high, 0), 0)
    full_begin = tl.max(tl.where(m_row, b_low, 0), 0)
    full_end = tl.min(tl.where(m_row, b_high, _FAR), 0)
    low, n_full, n_border = split(begin, end, full_begin, full_end, BLOCK, BORDER)
    return begin, end, low, n_full, n_border


@triton.jit
def split(begin, end, full_begin, full_end, BLOCK: tl.constexpr, BORDER: tl.constexpr):
    """Split a range into full tiles, which need no mask, and smaller ones at its borders.

    Return where the full tiles begin and the number of both. Tiles are counted from ``begin``; full
    ones lie in ``full_begin .. full_end``.
    """
    end = tl.maximum(begin, end)
    n_left = tl.cdiv(tl.minimum(tl.maximum(full_begin, begin), end) - begin, BORDER)
    low = begin + n_left * BORDER
    n_full = tl.maximum(tl.minimum(full_end, end) - low, 0) // BLOCK
    return low, n_full, n_left + tl.cdiv(tl.maximum(end - low - n_full * BLOCK, 0), BORDER)


@triton.jit
def border_tile(i, begin, low, n_full, BLOCK: tl.constexpr, BORDER: tl.constexpr):
    """Return where the i-th tile at the borders begins."""
    start = begin + i * BORDER
    return tl.where(start < low, start, start + n_full * BLOCK)


@triton.jit
def load_tile(p_x, b_offset, m_row, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """Return rows at some offsets, zero in channels from D on and where a mask says so."""
    o_d = tl.arange(0, BLOCK_D)
    p_x = p_x + b_offset[:, None] + o_d[None, :]
    if MASKED and D < BLOCK_D:
        b_x = tl.load(p_x, mask=m_row[:, None] & (o_d < D)[None, :], other=0.0)
    elif MASKED:
        b_x = tl.load(p_x, mask=m_row[:, None], other=0.0)
    elif D < BLOCK_D:
        b_x = tl.load(p_x, mask=(o_d < D)[None, :], other=0.0)
    else:
        b_x = tl.load(p_x)
    return b_x


@triton.jit
def store_tile(p_x, b_offset, m_row, b_x, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store rows at some offsets."""
    o_d = tl.arange(0, BLOCK_D)
    mask = m_row[:, None] & (o_d < D)[None, :]
    tl.store(p_x + b_offset[:, None] + o_d[None, :], narrow(b_x, p_x.dtype.element_ty), mask=mask)


@triton.jit
def is_bad_row(b_x):
    """Mark rows that hold a number that is not finite, which a weight of zero would not hide."""
    b_finite = tl.abs(b_x.to(tl.float32)) < float("inf")
    return tl.max(tl.where(b_finite, 0, 1), 1) > 0


@triton.jit
def dot(b_x, b_y, b_acc, PRECISION: tl.constexpr):
    """Return b_acc + b_x b_y in float32."""
    if INTERPRETED:
        b_x, b_y = b_x.to(tl.float32), b_y.to(tl.float32)
    return tl.dot(b_x, b_y, b_acc, input_precision=PRECISION)


@triton.jit
def narrow(b_x, dtype: tl.constexpr):
    """Round float32 numbers to a dtype."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = b_x.to(tl.uint32, bitcast=True)
        b_x = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return b_x.to(dtype)
