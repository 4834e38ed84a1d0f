"""Chunks into tiles: blocks of 8, 16 or 32 rows that keep tensor cores full, and back.

Chunks differ in size, tiles do not. Whole chunks are packed into tiles; *segment ids* say which
chunk a row belongs to (-1: none), padding rows are zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dynchunk._checks import describe, require, require_choice
from dynchunk.chunks import Chunks
from dynchunk.ops.gather_rows import gather_rows

TILES = (8, 16, 32)
ORDERS = ("stream", "best_fit")
_OPEN_TILES = 8  # that best_fit chooses among
_COMMON = 64  # a length that one chunk in so many has is common


@dataclass(frozen=True, eq=False)
class TilePlan:
    """Which row of which tile each token goes to. One plan serves all tensors of the same tokens.

    A chunk's rows are consecutive. One of at most ``tile`` tokens lies in one tile; a longer one
    begins at a tile's first row and has its tiles to itself.

    Parameters
    ----------
    tile : int
        Rows of a tile.
    segment_ids : int64 tensor [P]
        Chunk of each row, -1 on padding; P = tiles * tile.
    row_of_token : int64 tensor [T]
    chunk_rows : int64 tensor [N]
        First row of each chunk.
    """

    tile: int
    segment_ids: Tensor
    row_of_token: Tensor
    chunk_rows: Tensor

    @property
    def num_rows(self) -> int:
        """Physical rows P."""
        return len(self.segment_ids)

    @property
    def num_tiles(self) -> int:
        """Tiles P / tile."""
        return self.num_rows // self.tile

    @property
    def utilisation(self) -> float:
        """Useful rows / physical rows; 1 if there are none."""
        return len(self.row_of_token) / self.num_rows if self.num_rows else 1.0

    @cached_property
    def token_of_row(self) -> Tensor:
        """Token of each row, -1 on padding, int64 [P]."""
        tokens = torch.arange(len(self.row_of_token), device=self.row_of_token.device)
        return torch.full_like(self.segment_ids, -1).index_copy(0, self.row_of_token, tokens)

    @cached_property
    def mask(self) -> Tensor:
        """Logical mask, bool [tiles, tile, tile]: rows i and j of a tile are of the same chunk."""
        ids = self.segment_ids.view(-1, self.tile)
        return (ids[:, :, None] == ids[:, None, :]) & (ids[:, :, None] >= 0)

    def pack(self, x: Tensor, *, impl: str | None = None) -> Packed:
        """Move the tokens of ``x`` [T, ...] to their rows; differentiable.

        ``impl`` is that of :func:`~dynchunk.ops.gather_rows.gather_rows`.

        Raises
        ------
        ValueError
            ``x`` has another number of tokens.
        """
        _require_rows("x", x, len(self.row_of_token))
        return Packed(gather_rows(x, self.token_of_row, self.row_of_token, impl=impl), self)

    def unpack(self, rows: Tensor, *, impl: str | None = None) -> Tensor:
        """Return the tokens [T, ...] of rows [P, ...]; padding rows are never read.

        Raises
        ------
        ValueError
            ``rows`` has another number of rows.
        """
        _require_rows("rows", rows, self.num_rows)
        return gather_rows(rows, self.row_of_token, self.token_of_row, impl=impl)


@dataclass(frozen=True, eq=False)
class Packed:
    """Tokens in tiles.

    Parameters
    ----------
    rows : tensor [P, ...]
        Zero where ``plan.segment_ids`` is -1.
    plan : TilePlan
    """

    rows: Tensor
    plan: TilePlan

    @property
    def tiles(self) -> Tensor:
        """The rows as [tiles, tile, ...]."""
        return self.rows.view(self.plan.num_tiles, self.plan.tile, *self.rows.shape[1:])

    @property
    def segment_ids(self) -> Tensor:
        """Chunk of each row, -1 on padding, int64 [P]."""
        return self.plan.segment_ids

    @property
    def mask(self) -> Tensor:
        """Logical mask, bool [tiles, tile, tile]."""
        return self.plan.mask

    @property
    def utilisation(self) -> float:
        """Useful rows / physical rows."""
        return self.plan.utilisation


def plan_tiles(chunks: Chunks, tile: int, order: str = "stream") -> TilePlan:
    """Decide where each chunk goes.

    Parameters
    ----------
    chunks : Chunks
        Chunks of all sequences share tiles; segment ids keep them apart.
    tile : {8, 16, 32}
        Rows of a tile.
    order : {"stream", "best_fit"}
        "stream" keeps the order of the tokens, a chunk that does not fit opens the next tile.
        "best_fit" keeps 8 tiles open and puts each chunk where it leaves least, but no rest that
        is too small for the chunks at hand: fuller, for work that does not need their order.

    Returns
    -------
    TilePlan
        On the device of ``chunks`` (planning itself runs on the CPU).

    Examples
    --------
    >>> plan = plan_tiles(Chunks.from_lengths([5, 4, 3]), tile=8, order="best_fit")
    >>> plan.chunk_rows, plan.utilisation
    (tensor([0, 8, 5]), 0.75)
    """
    if not isinstance(chunks, Chunks):
        raise TypeError(f"chunks: expected Chunks, got {describe(chunks)}")
    require_choice("tile", tile, TILES)
    require_choice("order", order, ORDERS)
    from dynchunk.ops.cpu.packing import place_best_fit, place_in_order

    lengths = chunks.lengths.cpu().numpy()
    if order == "stream":
        rows, tiles = place_in_order(lengths, tile)
    else:
        counts = torch.bincount(chunks.lengths.cpu().clamp(max=tile))
        common = (counts * _COMMON >= max(len(chunks), 1)).nonzero().flatten()
        shortest = int(common[0]) if len(common) else tile
        rows, tiles = place_best_fit(lengths, tile, _OPEN_TILES, shortest)
    chunk_rows = torch.from_numpy(rows).to(chunks.device)
    row_of_token = chunk_rows[chunks.ids] + chunks.slots
    segment_ids = torch.full((tiles * tile,), -1, dtype=torch.int64, device=chunks.device)
    segment_ids[row_of_token] = chunks.ids
    return TilePlan(tile, segment_ids, row_of_token, chunk_rows)


def pack(x: Tensor, chunks: Chunks, tile: int, order: str = "stream") -> Packed:
    """Pack the tokens of ``x`` [T, ...] into tiles of 8, 16 or 32 rows, chunk by chunk.

    See :func:`plan_tiles` for the parameters and :meth:`TilePlan.pack` for several tensors.

    Examples
    --------
    >>> packed = pack(torch.arange(1, 13), Chunks.from_lengths([5, 4, 3]), tile=8)
    >>> packed.tiles
    tensor([[ 1,  2,  3,  4,  5,  0,  0,  0],
            [ 6,  7,  8,  9, 10, 11, 12,  0]])
    >>> packed.segment_ids.view(2, 8)[1]
    tensor([ 1,  1,  1,  1,  2,  2,  2, -1])
    """
    return plan_tiles(chunks, tile, order).pack(x)


def unpack(packed: Packed) -> Tensor:
    """Return the tokens [T, ...] in their order: the inverse of :func:`pack`, differentiable.

    Examples
    --------
    >>> x = torch.randn(10, 3)
    >>> torch.equal(unpack(pack(x, Chunks.fixed(3, 10), tile=8)), x)
    True
    """
    return packed.plan.unpack(packed.rows)


def _require_rows(argument: str, x: object, count: int) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{argument}: expected a tensor, got {describe(x)}")
    ok = x.ndim >= 1 and len(x) == count
    require(ok, argument, f"a tensor of {count} rows", x)
