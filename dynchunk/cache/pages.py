"""Pages of entries: a pool that sequences, views, layers and forks share, and who holds what."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dynchunk.cache.closings import Integers

#: Pages of each sequence in each view.
Held = list[list[list[int]]]


class PagePool:
    """Pages of a fixed size, the same numbers in all layers of one layout.

    Every layer has named tensors [P, page_size, ...]. A page is shared by whoever holds it and
    copied when one of them writes: several sequences, or several caches. The pool grows by a
    sixteenth, and shrinks when more than an eighth is free.

    Parameters
    ----------
    page_size : int
        Entries in a page.
    layers : int
    """

    def __init__(self, page_size: int, layers: int) -> None:
        self.page_size = page_size
        self.layers: list[dict[str, Tensor]] = [{} for _ in range(layers)]
        self.references: list[int] = []
        self.free: list[int] = []
        self.tables: weakref.WeakSet[PageTable] = weakref.WeakSet()
        self.abandoned: list[Held] = []  # by tables that are gone

    def __len__(self) -> int:
        return len(self.references)

    @property
    def used(self) -> int:
        """Pages that somebody holds."""
        return len(self) - len(self.free)

    def allocate(self, count: int) -> list[int]:
        """Return ``count`` pages, each held once."""
        self.collect()
        missing = count - len(self.free)
        if missing > 0:
            self._resize(len(self) + max(missing, len(self) // 16))
        pages = [self.free.pop() for _ in range(count)]
        for page in pages:
            self.references[page] = 1
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Give up one hold of each page."""
        for page in pages:
            self.references[page] -= 1
            if self.references[page] == 0:
                self.free.append(page)

    def own(self, page: int) -> int:
        """Return a page with the same content that nobody else holds."""
        if self.references[page] == 1:
            return page
        (mine,) = self.allocate(1)
        for tensors in self.layers:
            for x in tensors.values():
                x[mine] = x[page]
        self.release([page])
        return mine

    def write(self, layer: int, name: str, rows: Tensor, entries: Tensor) -> None:
        """Put entries [N, ...] into rows of the pages, counted through all of them."""
        tensors = self.layers[layer]
        if name not in tensors:
            tensors[name] = entries.new_empty(len(self), self.page_size, *entries.shape[1:])
        tensors[name].flatten(0, 1).index_copy_(0, rows, entries)

    def shrink(self) -> None:
        """Give memory back where much is free: pages move together and get new numbers."""
        tables = list(self.tables)  # from here on none of them can go
        self.collect()
        if len(self.free) <= 2 + self.used // 8:
            return
        kept = [page for page, held in enumerate(self.references) if held]
        number = {page: i for i, page in enumerate(kept)}
        for tensors in self.layers:
            for name, x in tensors.items():
                tensors[name] = x[kept]
        for table in tables:
            table.renumber(number)
        self.references = [self.references[page] for page in kept]
        self.free = []

    def _resize(self, size: int) -> None:
        old = len(self)
        for tensors in self.layers:
            for name, x in tensors.items():
                tensors[name] = x.new_empty(size, *x.shape[1:])
                tensors[name][:old] = x
        self.references += [0] * (size - old)
        self.free += reversed(range(old, size))

    def collect(self) -> None:
        """Release the pages of tables that are gone."""
        while self.abandoned:
            for pages in (pages for of_view in self.abandoned.pop() for pages in of_view):
                self.release(pages)


class PageTable:
    """The pages of B sequences in G views, in order: entry i is in page i // page_size.

    Parameters
    ----------
    pool : PagePool
    held : lists [G][B] of page numbers
        Already counted as held.
    """

    def __init__(self, pool: PagePool, held: Held) -> None:
        self.pool, self.held = pool, held
        self._tensor: Tensor | None = None
        pool.tables.add(self)
        # A cache may be dropped in the middle of anything, so its pages are only noted here.
        weakref.finalize(self, pool.abandoned.append, held).atexit = False

    @classmethod
    def empty(cls, pool: PagePool, views: int, batch: int) -> PageTable:
        """Return a table without pages."""
        return cls(pool, [[[] for _ in range(batch)] for _ in range(views)])

    def extend(self, g: int, b: int, old: int, new: int) -> None:
        """Make the rows of entries old .. new - 1 exist, and writable by this table alone."""
        size, pages = self.pool.page_size, self.held[g][b]
        if new == old:
            return
        if old % size:
            last = old // size
            self._put(g, b, last, self.pool.own(pages[last]))
        for page in self.pool.allocate(-(-new // size) - len(pages)):
            self._put(g, b, len(pages), page)

    def truncate(self, g: int, b: int, entries: int) -> None:
        """Release the pages past the first ``entries`` of them."""
        pages, kept = self.held[g][b], -(-entries // self.pool.page_size)
        self.pool.release(pages[kept:])
        del pages[kept:]

    def rows(self, g: int, b: int, begin: int, end: int) -> Integers:
        """Return where entries begin .. end - 1 are, counted through all pages."""
        size = self.pool.page_size
        first = begin // size
        pages = np.array(self.held[g][b][first : -(-end // size)], np.int64)
        entry = np.arange(begin, end)
        return pages[entry // size - first] * size + entry % size

    def tensor(self, device: torch.device) -> Tensor:
        """Return the page numbers, int32 [G, B, n_pages]; slots past the last page hold -1."""
        if self._tensor is None or self._tensor.device != device:
            longest = max((len(pages) for of_view in self.held for pages in of_view), default=0)
            width = longest + longest // 16 + 8
            padded = torch.full((len(self.held), len(self.held[0]), width), -1, dtype=torch.int32)
            for g, of_view in enumerate(self.held):
                for b, pages in enumerate(of_view):
                    padded[g, b, : len(pages)] = torch.tensor(pages)
            self._tensor = padded.to(device)
        return self._tensor

    def fits(self, g: int, b: int, entries: int) -> bool:
        """Whether a sequence has the pages for so many entries, and no more."""
        return len(self.held[g][b]) == -(-entries // self.pool.page_size)

    def is_synced(self, device: torch.device) -> bool:
        """Whether :meth:`tensor` has the pages that are held."""
        table = self.tensor(device).tolist()
        return all(
            row[: len(pages)] == pages
            for of_view, of_held in zip(table, self.held, strict=True)
            for row, pages in zip(of_view, of_held, strict=True)
        )

    def select(self, index: Sequence[int]) -> None:
        """Keep the sequences of ``index``, in that order; pages are shared, not copied."""
        for g, of_view in enumerate(self.held):
            chosen = [list(of_view[b]) for b in index]
            for page in (page for pages in chosen for page in pages):
                self.pool.references[page] += 1
            for pages in of_view:
                self.pool.release(pages)
            self.held[g] = chosen
        self._tensor = None

    def fork(self) -> PageTable:
        """Return another table that holds the same pages."""
        held = [[list(pages) for pages in of_view] for of_view in self.held]
        for page in (page for of_view in held for pages in of_view for page in pages):
            self.pool.references[page] += 1
        return PageTable(self.pool, held)

    def renumber(self, number: dict[int, int]) -> None:
        """Follow pages to their new numbers."""
        for pages in (pages for of_view in self.held for pages in of_view):
            pages[:] = [number[page] for page in pages]
        self._tensor = None

    def _put(self, g: int, b: int, i: int, page: int) -> None:
        pages = self.held[g][b]
        pages[i : i + 1] = [page]
        if self._tensor is not None and i < self._tensor.shape[2]:
            self._tensor[g, b, i] = page
        else:
            self._tensor = None
