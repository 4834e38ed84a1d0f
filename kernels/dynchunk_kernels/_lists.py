"""Lists of rows to read, sorted and inverted on the device, for kernels that read by list.

Everything here is a few torch operations on integers, of static shapes: no host ever waits for a
length. Lists of K rows for S queries cost one sort of S * K integers, their inverse another.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

#: In lists of rows: no row. Larger than any row, so that it sorts last.
NONE = 2**31 - 1

#: Rows of keys in a tile of the gradients, at most: as many as a record has bits.
TILE = 32


def ids(offsets: Tensor, n: int) -> Tensor:
    """Return which part each of ``n`` rows lies in, int64 [n]; ``offsets`` [parts + 1] ascend."""
    row = torch.arange(n, device=offsets.device)
    return torch.searchsorted(offsets[1:], row, right=True).clamp(max=max(len(offsets) - 2, 0))


def own_rows(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, sequence: Tensor) -> Tensor:
    """Return each query's own row of k, int64 [S]: the queries are the last of their sequence."""
    shift = (cu_seqlens_k - cu_seqlens_q)[1:]
    return torch.arange(len(sequence), device=sequence.device) + shift[sequence]


class Lists(NamedTuple):
    """Lists of rows as sets, for R queries (or blocks of them) and L groups of KV heads."""

    rows: Tensor  #: int32 [R, L, K], ascending, each once; then NONE

    @property
    def is_row(self) -> Tensor:
        """Where there is a row, bool [R, L, K]."""
        return self.rows < NONE

    @property
    def lengths(self) -> Tensor:
        """How many rows there are, int32 [R, L]."""
        return self.is_row.sum(-1, dtype=torch.int32)


def as_sets(rows: Tensor, is_row: Tensor) -> Lists:
    """Make sets of lists [R, L, K] of rows, without those that ``is_row`` leaves out.

    Rows move up into the places of repetitions, as sums over a tile depend on who stands where.
    """
    if rows.shape[-1] == 0:  # scans want at least one column
        rows, is_row = (torch.nn.functional.pad(x, (0, 1)) for x in (rows, is_row))
    rows = rows.where(is_row, NONE).int().contiguous().sort(-1).values
    is_first = rows < NONE
    is_first[..., 1:] &= rows[..., 1:] != rows[..., :-1]
    spare = rows.shape[-1]  # a column for what is left out
    place = (is_first.cumsum(-1) - 1).where(is_first, spare)
    moved = rows.new_full((*rows.shape[:-1], spare + 1), NONE).scatter_(-1, place, rows)
    return Lists(moved[..., :spare].contiguous())


class Readers(NamedTuple):
    """Who reads each tile of rows: records, for each of L groups of KV heads.

    The records of tile i are numbers ``offsets[l, i] .. offsets[l, i + 1] - 1``. Each stands for
    one list and the rows of the tile in it, by ascending number of the list.
    """

    lists: Tensor  #: int32 [L, R * K], the number of the list
    last: Tensor  #: int32 [L, R * K], where in the list the last of these rows is
    rows: Tensor  #: int32 [L, R * K], bit j stands for row j of the tile
    offsets: Tensor  #: int64 [L, tiles + 1]


def readers(lists: Lists, n_rows: int, size: int) -> Readers:
    """Invert lists: find the readers of each tile of ``size`` rows, of ``n_rows`` in all."""
    tile = lists.rows // size
    bits = (1 << (lists.rows % size).long()).where(lists.is_row, 0)
    is_last = lists.is_row
    is_last[..., :-1] &= tile[..., :-1] != tile[..., 1:]
    # Rows of one tile are neighbours in a sorted list: their bits are a difference of two sums.
    total = bits.cumsum(-1)
    before = torch.zeros_like(total)
    before[..., 1:] = total[..., :-1]
    starts = torch.ones_like(is_last)
    starts[..., 1:] = tile[..., 1:] != tile[..., :-1]
    before = before.where(starts, 0).cummax(-1).values
    key = tile.where(is_last, NONE).transpose(0, 1).flatten(1)
    key, at = key.sort(dim=-1, stable=True)
    of_rows = (total - before).transpose(0, 1).flatten(1).gather(-1, at)
    tiles = torch.arange(-(-n_rows // size) + 1, device=key.device, dtype=key.dtype)
    offsets = torch.searchsorted(key, tiles.expand(len(key), -1).contiguous())
    length = lists.rows.shape[-1]
    return Readers((at // length).int(), (at % length).int(), of_rows.int(), offsets)


class Recent(NamedTuple):
    """Which queries may read each of T raw tokens by position."""

    first: Tensor  #: int64 [T], the first query that is not before the token
    last: Tensor  #: int64 [G, T], one past the last query whose ``raw_start`` is not after it


def recent(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, raw_start: Tensor, n_tokens: int) -> Recent:
    """Find the queries that may read each token as a recent one."""
    sequence = ids(cu_seqlens_k, n_tokens)
    token = torch.arange(n_tokens, device=sequence.device)
    own = token + (cu_seqlens_q - cu_seqlens_k)[1:][sequence]
    first = torch.maximum(own, cu_seqlens_q[:-1][sequence])
    last = token.new_zeros(len(raw_start), n_tokens)
    if raw_start.shape[1]:
        earliest = raw_start.long().flip(-1).cummin(-1).values.flip(-1)
        last = torch.searchsorted(
            earliest.contiguous(), token.expand_as(last).contiguous(), right=True
        )
    return Recent(first, last)
