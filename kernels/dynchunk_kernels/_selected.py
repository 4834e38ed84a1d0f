"""What kernels that attend by list have in common.

A program has a few queries and one KV head; the rows of its tiles are those queries times the R
query heads that share the KV head. Logits are in units of log 2. Where ``SHARED``, keys are the
values.

A row that a query does not read must not change a bit of its result, whatever it holds: a program
loads no row that none of its queries reads, and where only some of them read one, a value that is
not finite is told apart by :func:`taint`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from dynchunk_kernels import _lists
from dynchunk_kernels._attention import INTERPRETED, LN_2, LOG2_E, narrow
from dynchunk_kernels._launch import arch_of
from dynchunk_kernels.offline import Case


@triton.jit
def load_rows(p_x, b_row, m_row, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load rows of D channels as [rows, BLOCK_D], zero where ``m_row`` is not set."""
    d = tl.arange(0, BLOCK_D)
    mask = m_row[:, None]
    if D != BLOCK_D:
        mask = mask & (d < D)[None, :]
    return tl.load(p_x + b_row[:, None] * D + d[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(p_x, b_row, m_row, b_x, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store what :func:`load_rows` loads."""
    d = tl.arange(0, BLOCK_D)
    mask = m_row[:, None]
    if D != BLOCK_D:
        mask = mask & (d < D)[None, :]
    tl.store(p_x + b_row[:, None] * D + d[None, :], narrow(b_x, p_x.dtype.element_ty), mask=mask)


@triton.jit
def load_values(
    p_v, b_row, m_row, b_k, D_V: tl.constexpr, BLOCK_V: tl.constexpr, SHARED: tl.constexpr
):
    """Load values, which are the keys where ``SHARED``."""
    return b_k if SHARED else load_rows(p_v, b_row, m_row, D_V, BLOCK_V)


@triton.jit
def dot(b_a, b_b):
    """Multiply: tensor cores in half precision, exact products in single precision."""
    if INTERPRETED:  # the interpreter multiplies the bits of bfloat16
        b_a, b_b = b_a.to(tl.float32), b_b.to(tl.float32)
    return tl.dot(b_a, b_b, input_precision="ieee")


@triton.jit
def begin_softmax(p_sink, b_head, m_row, BLOCK_M: tl.constexpr, HAS_SINK: tl.constexpr):
    """Return (running maximum, running sum) of a softmax that holds the sink, or nothing."""
    if HAS_SINK:
        b_max = tl.load(p_sink + b_head, mask=m_row, other=0.0).to(tl.float32) * LOG2_E
        b_sum = tl.where(b_max == float("-inf"), 0.0, 1.0)
    else:
        b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        b_sum = tl.zeros([BLOCK_M], tl.float32)
    return b_max, b_sum


@triton.jit
def add_keys(b_s, b_v, b_taint, b_max, b_sum, b_acc):
    """Add a tile of logits, -inf = not read, and its values to a softmax."""
    b_new = tl.maximum(b_max, tl.max(b_s, 1))
    b_shift = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_p = tl.exp2(b_s - b_shift[:, None])
    b_alpha = tl.exp2(b_max - b_shift)
    b_sum = b_sum * b_alpha + tl.sum(b_p, 1)
    b_p = tl.where(b_s == float("-inf"), 0.0, b_p + b_taint[None, :])
    b_acc = b_acc * b_alpha[:, None] + dot(narrow(b_p, b_v.dtype), b_v)
    return b_new, b_sum, b_acc


@triton.jit
def finite(b_x):
    """Return rows with zero instead of what is not finite."""
    return tl.where(b_x.to(tl.float32) * 0.0 == 0.0, b_x, 0.0)


@triton.jit
def taint(b_x):
    """Return NaN for each row that holds what is not finite, and 0 for the others."""
    return tl.sum(b_x.to(tl.float32) * 0.0, 1)


@triton.jit
def end_softmax(
    p_out, p_lse, b_head, m_row, b_max, b_sum, b_acc, D_V: tl.constexpr, BLOCK_V: tl.constexpr
):
    """Store the result and its log-sum; zero and -inf where nothing was read."""
    is_empty = b_sum == 0.0
    b_sum = tl.where(is_empty, 1.0, b_sum)
    store_rows(p_out, b_head, m_row, b_acc / b_sum[:, None], D_V, BLOCK_V)
    b_lse = tl.where(is_empty, float("-inf"), (b_max + tl.log2(b_sum)) * LN_2)
    tl.store(p_lse + b_head, b_lse, mask=m_row)


@triton.jit
def begin_gradient(
    p_out,
    p_grad_out,
    p_lse,
    p_grad_lse,
    p_shift,
    b_head,
    m_row,
    D_V: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Return (gradient of the result, log-sum, shift), and store the shift.

    The gradient of a logit is its weight times (gradient of the weight + shift).
    """
    b_grad = load_rows(p_grad_out, b_head, m_row, D_V, BLOCK_V)
    b_out = load_rows(p_out, b_head, m_row, D_V, BLOCK_V)
    b_shift = tl.load(p_grad_lse + b_head, mask=m_row, other=0.0)
    b_shift -= tl.sum(b_grad.to(tl.float32) * b_out.to(tl.float32), 1)
    tl.store(p_shift + b_head, b_shift, mask=m_row)
    b_lse = tl.load(p_lse + b_head, mask=m_row, other=0.0) * LOG2_E
    return b_grad, b_lse, b_shift


@triton.jit
def add_query_gradient(b_s, m_s, b_k, b_v, b_grad, b_lse, b_shift, b_grad_q):
    """Add what a tile of keys gives to the gradient of queries, before the scale."""
    b_p = tl.exp2(b_s - b_lse[:, None])
    b_ds = b_p * (dot(b_grad, tl.trans(b_v)) + b_shift[:, None])
    return b_grad_q + dot(narrow(tl.where(m_s, b_ds, 0.0), b_k.dtype), b_k)


@triton.jit
def _add_key_gradients(
    p_q,
    p_grad_out,
    p_lse,
    p_shift,
    b_head,
    m_s,
    b_k,
    b_v,
    b_bias,
    b_grad_k,
    b_grad_v,
    b_grad_bias,
    scale_log2,
    D: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Add what rows of queries (``b_head``) give to the gradients of a tile of keys (``m_s``)."""
    m_row = tl.max(m_s.to(tl.int32), 1) > 0
    b_lse = tl.load(p_lse + b_head, mask=m_row, other=0.0)
    b_shift = tl.load(p_shift + b_head, mask=m_row, other=0.0)
    # Where q or a gradient is not finite, these are not: its keys get NaN, and no others do.
    b_taint = (b_lse - b_lse) + (b_shift - b_shift)
    m_row &= b_taint == 0.0
    b_q = load_rows(p_q, b_head, m_row, D, BLOCK_D)
    b_grad = load_rows(p_grad_out, b_head, m_row, D_V, BLOCK_V)
    b_s = dot(b_q, tl.trans(b_k)) * scale_log2 + b_bias[None, :]
    b_p = tl.where(m_s, tl.exp2(b_s - (b_lse * LOG2_E)[:, None]) + b_taint[:, None], 0.0)
    b_ds = b_p * (dot(b_grad, tl.trans(b_v)) + b_shift[:, None])
    b_ds = tl.where(m_s, b_ds, 0.0)
    b_grad_bias += tl.sum(b_ds, 0)
    b_ds *= scale_log2 * LN_2
    b_grad_k += dot(tl.trans(narrow(b_ds, b_q.dtype)), b_q)
    if SHARED:
        b_grad_k += dot(tl.trans(narrow(b_p, b_grad.dtype)), b_grad)
    else:
        b_grad_v += dot(tl.trans(narrow(b_p, b_grad.dtype)), b_grad)
    return b_grad_k, b_grad_v, b_grad_bias


@triton.jit(do_not_specialize=["N", "S", "n_records", "block"])
def key_gradients_kernel(
    p_q,
    p_k,
    p_v,
    p_bias,
    p_grad_out,
    p_lse,
    p_shift,
    p_bounds,
    p_first,
    p_last,
    p_raw_start,
    p_start_of,
    p_list,
    p_bits,
    p_offsets,
    p_queries,
    p_grad_k,
    p_grad_v,
    p_grad_bias,
    N,
    S,
    n_records,
    block,
    scale,
    H: tl.constexpr,
    H_KV: tl.constexpr,
    G: tl.constexpr,
    L: tl.constexpr,
    D: tl.constexpr,
    D_V: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ENTRIES: tl.constexpr,
    RECENT: tl.constexpr,
    LISTED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Gradients of a tile of rows of one KV head: entries, or raw tokens.

    ``RECENT``: tokens that queries read by position. ``LISTED``: rows that are in lists, one for
    ``block`` neighbouring queries; a listed token stands for its chunk, by the chunk's first token.
    """
    R: tl.constexpr = H // H_KV
    PER_VIEW: tl.constexpr = H_KV // G
    i_tile, h = tl.program_id(0), tl.program_id(1)
    g = h // PER_VIEW
    n0 = i_tile.to(tl.int64) * BLOCK_N
    b_n = n0 + tl.arange(0, BLOCK_N)
    m_n = b_n < N
    if ENTRIES:  # those of all views lie one after another
        m_n &= (b_n >= tl.load(p_bounds + 2 * g)) & (b_n < tl.load(p_bounds + 2 * g + 1))
        b_row = b_n * PER_VIEW + h % PER_VIEW
    else:
        b_row = b_n * H_KV + h
    b_k = load_rows(p_k, b_row, m_n, D, BLOCK_D)
    b_v = load_values(p_v, b_row, m_n, b_k, D_V, BLOCK_V, SHARED)
    b_bias = tl.zeros([BLOCK_N], tl.float32)
    if HAS_BIAS:
        b_bias = tl.load(p_bias + b_row, mask=m_n, other=0.0).to(tl.float32) * LOG2_E
    b_grad_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    b_grad_v = b_grad_k if SHARED else tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    b_grad_bias = tl.zeros([BLOCK_N], tl.float32)
    scale_log2 = scale * LOG2_E
    p_raw_start += g * S

    if RECENT:
        b_col = b_n.to(tl.int32)
        b_first = tl.load(p_first + b_n, mask=m_n, other=S).to(tl.int32)
        t0 = tl.min(b_first, 0)
        after = tl.max(tl.load(p_last + g * N + b_n, mask=m_n, other=0), 0).to(tl.int32)
        rows = tl.maximum(after - t0, 0) * R
        for m0 in range(0, rows, BLOCK_M):
            b_m = m0 + tl.arange(0, BLOCK_M)
            m_m = b_m < rows
            b_t = t0 + b_m // R
            b_raw = tl.load(p_raw_start + b_t, mask=m_m, other=0).to(tl.int32)
            m_s = (b_t[:, None] >= b_first[None, :]) & (b_raw[:, None] <= b_col[None, :])
            b_t = b_t.to(tl.int64)
            b_grad_k, b_grad_v, b_grad_bias = _add_key_gradients(
                p_q,
                p_grad_out,
                p_lse,
                p_shift,
                b_t * H + h * R + b_m % R,
                m_s & m_m[:, None] & m_n[None, :],
                b_k,
                b_v,
                b_bias,
                b_grad_k,
                b_grad_v,
                b_grad_bias,
                scale_log2,
                D,
                D_V,
                BLOCK_D,
                BLOCK_V,
                SHARED,
            )

    if LISTED:
        list_head = h * L // H_KV
        p_list += list_head * n_records
        p_bits += list_head * n_records
        p_offsets += list_head * (tl.cdiv(N, BLOCK_N) + 1)
        b_start = b_n
        if not ENTRIES:
            b_start = tl.load(p_start_of + g * N + b_n, mask=m_n, other=0)
        # Chunks that start in this tile; then the one that began in a tile before, if any did.
        for i in range(1 if ENTRIES else 2):
            source = n0
            if not ENTRIES:
                began = tl.load(p_start_of + g * N + n0) // BLOCK_N * BLOCK_N
                source = tl.where(i == 0, n0, began)
            b_bit = (b_start - source).to(tl.int32)
            m_bit = m_n & (b_bit >= 0) & (b_bit < BLOCK_N)
            b_bit = tl.where(m_bit, b_bit, 0)
            begin = tl.load(p_offsets + source // BLOCK_N)
            end = tl.load(p_offsets + source // BLOCK_N + 1)
            end = tl.where((i == 0) | (source < n0), end, begin)
            rows = ((end - begin) * block * R).to(tl.int32)
            for m0 in range(0, rows, BLOCK_M):
                b_m = m0 + tl.arange(0, BLOCK_M)
                m_m = b_m < rows
                b_query = b_m // R
                b_record = begin + b_query // block
                b_list = tl.load(p_list + b_record, mask=m_m, other=0).to(tl.int64)
                b_read = tl.load(p_bits + b_record, mask=m_m, other=0)
                if ENTRIES:
                    b_t = b_list
                else:
                    b_t = tl.load(p_queries + 2 * b_list, mask=m_m, other=0) + b_query % block
                    m_m &= b_t < tl.load(p_queries + 2 * b_list + 1, mask=m_m, other=0)
                m_s = ((b_read[:, None] >> b_bit[None, :]) & 1) != 0
                if RECENT:
                    b_raw = tl.load(p_raw_start + b_t, mask=m_m, other=0).to(tl.int32)
                    m_s &= b_t.to(tl.int32)[:, None] >= b_first[None, :]
                    m_s &= b_raw[:, None] > b_col[None, :]
                b_grad_k, b_grad_v, b_grad_bias = _add_key_gradients(
                    p_q,
                    p_grad_out,
                    p_lse,
                    p_shift,
                    b_t * H + h * R + b_m % R,
                    m_s & m_m[:, None] & m_bit[None, :],
                    b_k,
                    b_v,
                    b_bias,
                    b_grad_k,
                    b_grad_v,
                    b_grad_bias,
                    scale_log2,
                    D,
                    D_V,
                    BLOCK_D,
                    BLOCK_V,
                    SHARED,
                )

    store_rows(p_grad_k, b_row, m_n, b_grad_k, D, BLOCK_D)
    if not SHARED:
        store_rows(p_grad_v, b_row, m_n, b_grad_v, D_V, BLOCK_V)
    if HAS_BIAS:
        tl.store(p_grad_bias + b_row, narrow(b_grad_bias, p_grad_bias.dtype.element_ty), mask=m_n)


def sink_gradient(sink: Tensor | None, lse: Tensor, shift: Tensor) -> Tensor | None:
    """Return the gradient of the sinks [H] from [S, H]."""
    if sink is None:
        return None
    weights = (sink.float() - lse.where(lse > -torch.inf, torch.inf)).exp()
    return (weights * shift).sum(0)


class Config(NamedTuple):
    """How a kernel is compiled."""

    BLOCK_M: int  #: rows of queries times heads in a tile
    BLOCK_N: int  #: rows of keys in a tile
    num_warps: int
    num_stages: int


#: Channels up to which gradients in float32, which has no tensor cores here, fit into registers.
WIDEST_FLOAT32 = 128


class Shape(NamedTuple):
    """The sizes that kernels are compiled for."""

    H: int  #: query heads
    H_KV: int
    G: int  #: views
    L: int  #: lists for each query: one, one for each view, or one for each KV head
    D: int
    D_V: int
    SHARED: bool  #: keys are the values
    dtype: torch.dtype

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor | None, views: int, lists: int) -> Shape:
        """Read the sizes of operands."""
        width = (k if v is None else v).shape[2]
        return cls(q.shape[1], k.shape[1], views, lists, q.shape[2], width, v is None, q.dtype)

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.H // self.H_KV

    @property
    def width(self) -> int:
        """Channels of the larger tile."""
        return max(block(self.D), block(self.D_V))

    @property
    def has_gradients(self) -> bool:
        """Whether there are kernels of gradients that keep their tiles in registers."""
        return self.dtype != torch.float32 or self.width <= WIDEST_FLOAT32

    def require_gradients(self) -> None:
        """Refuse a shape without kernels of gradients."""
        if not self.has_gradients:
            raise ValueError(
                f"head dims: expected at most {WIDEST_FLOAT32} channels for gradients in float32, "
                f"got {max(self.D, self.D_V)}: take bfloat16 or float16, or another implementation"
            )

    def constants(self) -> dict[str, int]:
        """Return the constants of a kernel."""
        sizes = self._asdict()
        del sizes["dtype"]
        return sizes | {"BLOCK_D": block(self.D), "BLOCK_V": block(self.D_V)}


def dense(x: Tensor | None, spare: Tensor) -> Tensor:
    """Return what a kernel is given for an operand that may be None: then any tensor, not read."""
    return spare if x is None else x.contiguous()


def alike(q: Tensor, *others: Tensor | None) -> Any:
    """Return operands in one dtype and dense; None stays None."""
    dtype = q.dtype
    for x in others:
        dtype = dtype if x is None else torch.promote_types(dtype, x.dtype)
    return tuple(None if x is None else x.to(dtype).contiguous() for x in (q, *others))


def block(size: int) -> int:
    """Return the width of a tile that holds ``size`` channels or rows."""
    return max(16, triton.next_power_of_2(size))


def key_config(arch: int, shape: Shape, *, two_loops: bool) -> Config:
    """Choose tiles for the gradients of keys, read by position and by list or only by one."""
    if shape.dtype == torch.float32:
        return Config(16, _lists.TILE, 8, 1)
    widest = 128 if two_loops else 512 if shape.SHARED else 256  # that leaves room for 32 rows
    rows = 32 if shape.width <= widest else 16
    stages = (3 if arch >= 90 else 2) if shape.width <= 128 else 2 if shape.width <= 256 else 1
    num_warps = 4 if shape.width <= 64 and not two_loops else 8
    keys = 16 if two_loops and shape.width > 256 and not shape.SHARED else _lists.TILE
    return Config(rows, keys, num_warps, stages)


def key_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    bias: Tensor | None,
    grad_out: Tensor,
    lse: Tensor,
    shift: Tensor,
    shape: Shape,
    scale: float,
    *,
    bounds: Tensor | None = None,
    recent: _lists.Recent | None = None,
    raw_start: Tensor | None = None,
    lists: _lists.Lists | None = None,
    start_of: Tensor | None = None,
    queries: Tensor | None = None,
    block: int = 1,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of keys, values and bias; of keys alone where they are the values.

    ``recent`` and ``raw_start`` tell who reads a token by position, ``lists`` who reads a row by
    list. ``bounds`` [G, 2]: k and v are entries, and this is where each view begins and ends.
    ``start_of`` [G, T]: chunks are listed, and this is the first token of each token's chunk;
    ``queries`` [R, 2] then says which queries share a list, ``block`` of them at most.
    """
    grads = torch.empty_like(k), None if v is None else torch.empty_like(v)
    grad_bias = None if bias is None else torch.empty_like(bias)
    two_loops = recent is not None and lists is not None
    config = key_config(arch_of(q), shape, two_loops=two_loops)
    readers = None if lists is None else _lists.readers(lists, len(k), config.BLOCK_N)
    wrap_triton(key_gradients_kernel)[(triton.cdiv(len(k), config.BLOCK_N), shape.H_KV)](
        q,
        k,
        dense(v, k),
        dense(bias, q),
        grad_out,
        lse,
        shift,
        dense(bounds, lse),
        lse if recent is None else recent.first,
        lse if recent is None else recent.last,
        dense(raw_start, lse),
        dense(start_of, lse),
        lse if readers is None else readers.lists,
        lse if readers is None else readers.rows,
        lse if readers is None else readers.offsets,
        dense(queries, lse),
        grads[0],
        dense(grads[1], grads[0]),
        dense(grad_bias, grads[0]),
        len(k),
        len(q),
        0 if readers is None else readers.lists.shape[1],
        block,
        scale,
        **shape.constants(),
        HAS_BIAS=bias is not None,
        ENTRIES=bounds is not None,
        RECENT=recent is not None,
        LISTED=readers is not None,
        **config._asdict(),
    )
    return *grads, grad_bias


_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_FLOATS = ("p_lse", "p_shift", "p_grad_lse", "p_sink", "p_scores", "p_grad_scores")
_INTS = ("p_rows", "p_count", "p_before", "p_list", "p_last_row", "p_bits")
_LONGS = (
    "p_bounds p_first p_last p_raw_start p_start_of p_offsets p_queries p_own "
    "p_to_token p_run p_n_visible p_pages p_bound p_keys p_indices"
).split()


def case(
    kernel: Any,
    arch: int,
    shape: Any,
    config: Any,
    *,
    is_matmul: bool = True,
    **options: int,
) -> Case:
    """Return a kernel as its launcher compiles it for an architecture."""
    tiles = {name: n for name, n in config._asdict().items() if name in kernel.arg_names}
    constants = shape.constants() | options | tiles
    words = [f"{name}={n}" for name, n in shape._asdict().items() if name != "dtype"]
    words += [f"{name}={n}" for name, n in (options | config._asdict()).items()]
    return Case(
        kernel,
        " ".join([_NAMES[shape.dtype], *words]),
        {name: _type(name, shape.dtype, constants) for name in kernel.arg_names},
        {name: n for name, n in constants.items() if name in kernel.arg_names},
        config.num_warps,
        config.num_stages,
        (arch,),
        is_matmul=is_matmul and shape.dtype != torch.float32,
    )


def _type(name: str, dtype: torch.dtype, constants: dict[str, Any]) -> str:
    if name in constants:
        return "constexpr"
    for names, kind in ((_FLOATS, "*fp32"), (_INTS, "*i32"), (_LONGS, "*i64")):
        if name in names:
            return kind
    if name.startswith("p_"):
        return "*" + _NAMES[dtype]
    return "fp32" if name == "scale" else "i32"


def shapes() -> Iterator[Shape]:
    """Yield the shapes to compile for: grouped and multi-head attention, views, MLA's, V4's."""
    for dtype in (torch.bfloat16, torch.float32):
        for D in (64, 80, 128, 256, 512):
            yield Shape(32, 8, 1, 1, D, D, False, dtype)
    for H, H_KV, G, L in ((8, 8, 1, 1), (16, 8, 1, 8), (32, 8, 2, 2), (32, 2, 2, 1), (64, 8, 4, 8)):
        yield Shape(H, H_KV, G, L, 128, 128, False, torch.bfloat16)
    for D in (64, 128, 512):
        yield Shape(32, 8, 1, 1, D, D, False, torch.float16)
    yield Shape(128, 1, 1, 1, 192, 128, False, torch.bfloat16)
    for D in (128, 512):
        yield Shape(64, 1, 1, 1, D, D, True, torch.bfloat16)


def key_cases(arch: int, shape: Shape, **options: bool) -> Iterator[Case]:
    """Yield the gradients of keys."""
    flags = dict.fromkeys(("HAS_BIAS", "ENTRIES", "RECENT", "LISTED"), False) | options
    config = key_config(arch, shape, two_loops=flags["RECENT"] and flags["LISTED"])
    yield case(key_gradients_kernel, arch, shape, config, **flags)
