"""Every invariant of a cache, named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from dynchunk.boundaries import FixedStride
from dynchunk.cache.closings import Closings, follow
from dynchunk.cache.layout import StreamLayout
from dynchunk.cache.pages import PagePool
from dynchunk.cache.rows import RowMap
from dynchunk.cache.segments import Segments
from dynchunk.chunks import InvariantError

if TYPE_CHECKING:
    from dynchunk.cache.cache import Cache

#: An invariant and whether it holds.
Found = Iterator[tuple[str, bool]]


def check(cache: Cache) -> None:
    """Raise ``InvariantError`` that names the first invariant that does not hold."""
    for name, holds in _of_cache(cache):
        if not holds:
            raise InvariantError(f"Cache: {name} does not hold")


def _of_cache(cache: Cache) -> Found:
    lengths, floor = np.array(cache.lengths, np.int64), np.array(cache.croppable, np.int64)
    yield "0 <= croppable <= lengths", bool(((floor >= 0) & (floor <= lengths)).all())
    if cache.rollback is not None:
        ok = bool((floor >= lengths - cache.rollback).all())
        yield "no more than rollback tokens can be cropped", ok
    yield "every layer has had all tokens", all(state.is_whole for state in cache.layers)
    for segments in cache.segments:
        yield from _of_segments(segments, lengths)
    for layout in cache.layouts:
        yield from _of_layout(layout, lengths, floor)
        for table in layout.tables:
            yield from _of_pool(table.pool)
    for state, layout in zip(
        cache.layers, map(cache.layout, range(len(cache.layers))), strict=True
    ):
        for name, buffers in state.buffers.items():
            rows = cache.batch * layout.maps[name].capacity
            yield "buffers have B * capacity rows", all(len(x) == rows for x in buffers.values())
        pages = len(layout.table.pool)
        yield "a layer has all pages", all(len(x) == pages for x in state.entries.values())
        yield from state.invariants()


def _of_segments(segments: Segments, lengths: np.ndarray) -> Found:
    yield "segments have the cache's lengths", np.array_equal(segments.lengths, lengths)
    yield from _of_map(segments.map, lengths, bool(segments.rows))
    for source, of_source in enumerate(segments.closings):
        for b, (closings, n) in enumerate(zip(of_source, lengths.tolist(), strict=True)):
            yield from _of_closings(closings, n)
            if segments.streams:
                stream = segments.streams[source][b]
                yield "a stream has its sequence's length", len(stream) == n
                last = closings.start(len(closings))
                known = [one.position for one in stream.boundaries]
                yield "a stream's last boundary is the last one", known[-1:] == [last][: min(n, 1)]
            elif isinstance(segments.rule, FixedStride):
                rule, first = segments.rule, segments.rule.offset or segments.rule.stride
                grid = np.arange(first, n + 1, rule.stride)
                yield "a grid has its lines", np.array_equal(closings.ends, grid)


def _of_closings(closings: Closings, n: int) -> Found:
    ends, known = closings.ends, closings.known
    yield "chunks end in order", bool((np.diff(ends, prepend=0) > 0).all())
    yield "chunks become known in order", bool((np.diff(known) >= 0).all())
    yield "chunks are known when they have ended", bool((known >= ends - 1).all())
    yield "chunks are known by tokens that have come", bool((known < n).all())


def _of_map(rows: RowMap, lengths: np.ndarray, is_used: bool) -> Found:
    yield "raw rows end with the sequence", np.array_equal(rows.end, lengths)
    yield (
        "raw rows begin in the sequence",
        bool(((rows.begin >= 0) & (rows.begin <= lengths)).all()),
    )
    first = np.arange(len(lengths)) * rows.capacity
    held = rows.end > rows.begin
    inside = (rows.row_of_first + rows.begin >= first) & (
        rows.row_of_first + rows.end <= first + rows.capacity
    )
    yield "raw rows lie in their sequence's part", not is_used or bool((inside | ~held).all())
    yield "raw buffers are not much larger than what they hold", not rows.is_loose


def _of_layout(layout: StreamLayout, lengths: np.ndarray, floor: np.ndarray) -> Found:
    for map in layout.maps.values():
        yield from _of_map(map, lengths, not layout.is_full)
    for b, (n, least) in enumerate(zip(lengths.tolist(), floor.tolist(), strict=True)):
        ok = layout.is_full or layout.map.begin[b] <= layout.first_needed(b, least)
        yield "all raw rows are there that a crop to the floor needs", ok
        for g, (view, source) in enumerate(zip(layout.policy.views, layout.sources, strict=True)):
            closings, base = layout.closings(g, b), layout.segments.closings[source][b]
            yield from _of_closings(closings, n)
            if closings is not base:
                again = Closings()
                follow(view, base, again, n)
                pairs = ((closings.ends, again.ends), (closings.known, again.known))
                yield "a view follows its chunks", all(np.array_equal(*pair) for pair in pairs)
            yield "pages for all entries", layout.table.fits(g, b, layout.entries(g, b))
    yield from layout.invariants()
    for table in layout.tables:
        yield "the table on the device is the one on the host", table.is_synced(layout.device)


def _of_pool(pool: PagePool) -> Found:
    pool.collect()
    holds = Counter(
        page
        for table in pool.tables
        for of_view in table.held
        for pages in of_view
        for page in pages
    )
    counted = all(pool.references[page] == holds[page] for page in range(len(pool)))
    yield "pages are counted as often as they are held", counted
    yield (
        "pages that nobody holds are free",
        sorted(pool.free) == [page for page in range(len(pool)) if not holds[page]],
    )
