"""How much of what tensor cores are given is work: exact counts for a segmentation, on any machine.

A tensor core multiplies whole tiles. *Useful* are the multiplications that a loop over chunks,
queries and entries would do; *issued* are those of the tiles that the kernels take. See
docs/pages/tensor-cores.md for the formulas.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynchunk.boundaries import BoundaryRule, DelimiterScore, HashScore, calibrate
from dynchunk.chunks import Chunks
from dynchunk.ops.layout import Reads
from dynchunk.packing import TILES, plan_tiles

RATIO = 4.8  #: tokens per entry that content boundaries are calibrated to
WINDOW = 128  #: raw tokens that a query reads beside the entries
TOKENS = 16_384  #: of the attention


class Share(NamedTuple):
    """Useful over issued work of one product."""

    policy: str  #: how chunks are cut
    ratio: float  #: tokens per entry, measured
    work: str  #: what is multiplied
    layout: str  #: how rows come to tiles
    tile: str  #: rows, or rows x columns
    useful_share: float


class AttendTile(NamedTuple):
    """Tile of the attend kernel."""

    rows: int  #: queries times query heads of a KV head
    columns: int  #: keys where all rows read all of them
    border: int  #: keys where some rows do not


def policies(text: bytes) -> dict[str, Chunks]:
    """Cut a text, bytes as tokens: by content, and on the fixed grid of the nearest ratio.

    Content boundaries are those of ``dynchunk segment``: delimiters, calibrated to ``RATIO``.
    """
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    scores = (DelimiterScore.from_bytes() + 0.5 * HashScore(4))(tokens)
    rule = calibrate(BoundaryRule(1, max_length=16), scores, RATIO, tolerance=0.5)
    content = rule(scores)
    stride = max(round(content.ratio), 1)
    return {"content": content, f"fixed {stride}": Chunks.fixed(stride, len(tokens))}


def account(text: bytes, attend_tiles: dict[str, tuple[int, AttendTile]]) -> list[Share]:
    """Count for both policies of a text.

    Parameters
    ----------
    text : bytes
        At least one.
    attend_tiles : dict
        Query heads per KV head and tile of attend kernels, by a description.

    Returns
    -------
    list of Share
        Rows of tiles of 8, 16 and 32 by layout, then the attention over the first ``TOKENS`` tokens
        for each of ``attend_tiles``.

    Examples
    --------
    >>> shares = account(b"one two three four " * 50, {"R=8": (8, AttendTile(64, 32, 16))})
    >>> sorted({share.work for share in shares})
    ['entries', 'entries and window', 'rows of chunks']
    """
    shares = []
    for name, chunks in policies(text).items():
        for tile in TILES:
            for layout, share in row_shares(chunks, tile).items():
                shares.append(Share(name, chunks.ratio, "rows of chunks", layout, str(tile), share))
        reads = Reads.of(_first(chunks, TOKENS), window=WINDOW)
        for words, (heads, block) in attend_tiles.items():
            size = f"{block.rows} x {block.columns}, {block.border} at borders"
            for product, share in attention_shares(reads, heads, block).items():
                shares.append(Share(name, chunks.ratio, product, words, size, share))
    return shares


def row_shares(chunks: Chunks, tile: int) -> dict[str, float]:
    """Return tokens over rows of tiles: chunk by chunk, whole chunks in order, best-fit.

    Examples
    --------
    >>> row_shares(Chunks.from_lengths([5, 4, 3]), 8)
    {'chunk by chunk': 0.5, 'in order': 0.75, 'best-fit': 0.75}
    """
    own = int(chunks.lengths.add(tile - 1).div(tile, rounding_mode="floor").sum()) * tile
    return {
        "chunk by chunk": chunks.num_tokens / own if own else 1.0,
        "in order": plan_tiles(chunks, tile, "stream").utilisation,
        "best-fit": plan_tiles(chunks, tile, "best_fit").utilisation,
    }


def attention_shares(reads: Reads, heads: int, tile: AttendTile) -> dict[str, float]:
    """Return the useful share of an attention over entries, and over entries and window.

    ``reads`` is that of one sequence and view, ``heads`` the query heads of a KV head.
    """
    n_visible, start = reads.n_visible[0], reads.raw_start[0]
    own = torch.arange(1, len(start) + 1, device=start.device)
    entries = work(torch.zeros_like(n_visible), n_visible, heads, tile)
    raw = work(start, own, heads, tile)
    both = [a + b for a, b in zip(entries, raw, strict=True)]
    return {
        "entries": entries[0] / entries[1] if entries[1] else 1.0,
        "entries and window": both[0] / both[1] if both[1] else 1.0,
    }


def work(low: Tensor, high: Tensor, heads: int, tile: AttendTile) -> tuple[int, int]:
    """Count products of one KV head's rows with keys, useful and issued.

    Query i reads the keys ``low[i] .. high[i] - 1``. A tile has ``tile.rows`` rows, which are
    queries times heads; keys that all of them read come in tiles of ``tile.columns``, others, from
    the first to the last that some row reads, in tiles of ``tile.border``. Others are skipped.

    Examples
    --------
    >>> high = torch.arange(1, 5)
    >>> work(0 * high, high, 1, AttendTile(2, 2, 1))
    (10, 12)
    """
    useful = int((high - low).sum()) * heads
    low, high = (x.repeat_interleave(heads) for x in (low, high))
    missing = -len(low) % tile.rows  # rows of the last tile
    begin, full_begin = (_by_tile(low, missing, tile.rows, last) for last in ("amin", "amax"))
    full_end, end = (_by_tile(high, missing, tile.rows, last) for last in ("amin", "amax"))
    left = _tiles(torch.minimum(full_begin, end) - begin, tile.border)
    first = begin + left * tile.border
    full = (torch.minimum(full_end, end) - first).clamp(min=0) // tile.columns
    right = _tiles((end - first - full * tile.columns).clamp(min=0), tile.border)
    issued = (full * tile.columns + (left + right) * tile.border).sum()
    return useful, int(issued) * tile.rows


def _by_tile(x: Tensor, missing: int, rows: int, reduce: str) -> Tensor:
    """Reduce over the real rows of each tile."""
    padded = torch.cat([x, x[-1:].expand(missing)]) if len(x) else x
    of_tiles = padded.view(-1, rows)
    return of_tiles.amin(1) if reduce == "amin" else of_tiles.amax(1)


def _tiles(n: Tensor, size: int) -> Tensor:
    return (n + size - 1).div(size, rounding_mode="floor")


def _first(chunks: Chunks, tokens: int) -> Chunks:
    """Return the chunks of the first tokens of one sequence, the last of them open."""
    tokens = min(tokens, chunks.num_tokens)
    keep = chunks.starts < tokens
    known = chunks.visible_from[:-1][keep[1:]]
    is_known = known < tokens
    return Chunks.from_boundaries(chunks.starts[keep][1:][is_known], tokens, known[is_known])


def as_rows(shares: list[Share]) -> list[dict[str, Any]]:
    """Return them as JSON has them."""
    return [share._asdict() for share in shares]
