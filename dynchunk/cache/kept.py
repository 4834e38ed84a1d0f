"""What eviction has left: of each KV head of a layer the keys and values of its own chunks."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dynchunk.attention.specs import Evict
from dynchunk.cache.closings import Integers
from dynchunk.cache.pages import PagePool, PageTable
from dynchunk.reduction.evict import chunks_to_keep, observed_attention

#: First tokens and lengths of chunks, int64 [2, N].
ChunkList = Integers


class Kept:
    """The keys and values that one layer has kept, of each KV head its own chunks.

    Parameters
    ----------
    kv_heads, batch, page_size : int
    table : PageTable, optional
        Pages of single heads, the views of the table: the head's own rows.
    """

    def __init__(
        self, kv_heads: int, batch: int, page_size: int, table: PageTable | None = None
    ) -> None:
        self.table = table or PageTable.empty(PagePool(page_size, 1), kv_heads, batch)
        nothing = np.zeros((2, 0), np.int64)
        self.chunks = [[nothing] * batch for _ in range(kv_heads)]
        self._counts: Tensor | None = None

    @property
    def rows(self) -> dict[str, Tensor]:
        """Pages [P, page_size, 1, ..] of keys and values."""
        return self.table.pool.layers[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the bookkeeping."""
        pages = sum(len(pages) for of_head in self.table.held for pages in of_head)
        return 8 * pages + sum(one.nbytes for of_head in self.chunks for one in of_head)

    def count(self, g: int, b: int) -> int:
        """Return how many tokens head g has kept of sequence b."""
        return int(self.chunks[g][b][1].sum())

    def counts(self, device: torch.device) -> Tensor:
        """Return :meth:`count` of all, int64 [H_kv, B]."""
        if self._counts is None or self._counts.device != device:
            found = [[self.count(g, b) for b in range(len(of))] for g, of in enumerate(self.chunks)]
            self._counts = torch.tensor(found, dtype=torch.int64, device=device)
        return self._counts

    def where(self, g: int, b: int) -> Tensor:
        """Return the rows of what head g has kept of sequence b."""
        return torch.from_numpy(self.table.rows(g, b, 0, self.count(g, b)))

    def evict(
        self,
        b: int,
        new: ChunkList,
        raw: dict[str, Tensor],
        q: Tensor,
        budget: int,
        spec: Evict,
        sink: Tensor | None,
        scale: float | None,
    ) -> None:
        """Choose anew among what is held of a sequence.

        Parameters
        ----------
        b : int
            The sequence.
        new : int64 [2, N]
            First tokens and lengths of the chunks that may go now, the first raw tokens.
        raw : dict of tensors [R, H_kv, ..]
            Keys and values of its raw tokens.
        q : floating tensor [Q, H, D]
            The last queries.
        budget : int
            Tokens that stay of each head, of these and of those kept before.
        """
        kv_heads = len(self.chunks)
        q = q.reshape(len(q), kv_heads, -1, q.shape[2])
        sinks = None if sink is None else sink.reshape(kv_heads, -1)
        for g in range(kv_heads):
            held = {name: self._with_raw(name, g, b, x[:, g]) for name, x in raw.items()}
            chunks = np.concatenate([self.chunks[g][b], new], 1)
            total = int(chunks[1].sum())
            attention = observed_attention(
                q[:, g], held["k"], sink=None if sinks is None else sinks[g], scale=scale
            )
            starts, lengths = torch.from_numpy(chunks).to(q.device)
            keep = chunks_to_keep(
                attention[:total],
                lengths,
                budget,
                protected=starts < spec.first,
                per_token=spec.per_token,
            )
            stays = keep.repeat_interleave(lengths)
            rows = {name: x[:total][stays] for name, x in held.items()}
            self.put(g, b, chunks[:, keep.cpu().numpy()], rows)

    def put(self, g: int, b: int, chunks: ChunkList, rows: dict[str, Tensor]) -> None:
        """Hold these chunks of a sequence, and none else."""
        self.table.truncate(g, b, 0)
        self.chunks[g][b], self._counts = chunks, None
        self.table.extend(g, b, 0, self.count(g, b))
        to = self.where(g, b)
        for name, x in rows.items():
            self.table.pool.write(0, name, to.to(x.device), x[:, None])

    def clear(self, b: int) -> None:
        """Hold nothing of a sequence."""
        for g in range(len(self.chunks)):
            self.put(g, b, np.zeros((2, 0), np.int64), {})

    def select(self, index: Integers) -> None:
        """Keep the sequences of ``index``, in that order; their pages are shared."""
        self.table.select(index.tolist())
        self.chunks, self._counts = [[of[b] for b in index] for of in self.chunks], None

    def fork(self) -> Kept:
        """Return the same on its own, with the same pages."""
        other = Kept(len(self.chunks), 0, self.table.pool.page_size, self.table.fork())
        other.chunks = [list(of_head) for of_head in self.chunks]
        return other

    def all_rows(self) -> Tensor:
        """Return the rows of all that is kept, head after head, sequence after sequence."""
        pairs = [(g, b) for g, of_head in enumerate(self.chunks) for b in range(len(of_head))]
        return torch.cat([torch.zeros(0, dtype=torch.int64), *(self.where(*x) for x in pairs)])

    def state(self) -> dict[str, Tensor]:
        """Return all of it for a file, packed."""
        flat = [one for of_head in self.chunks for one in of_head]
        counts = torch.tensor([[one.shape[1] for one in of_head] for of_head in self.chunks])
        chunks = np.concatenate([np.zeros((2, 0), np.int64), *flat], 1)
        rows = self.all_rows()
        packed = {
            f"rows.{name}": x.flatten(0, 1)[rows.to(x.device), 0] for name, x in self.rows.items()
        }
        return {"counts": counts, "chunks": torch.from_numpy(chunks)} | packed

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take what :meth:`state` returned, where nothing is held yet."""
        lists = torch.split(state["chunks"].cpu(), state["counts"].flatten().tolist(), 1)
        sizes = [int(one[1].sum()) for one in lists]
        packed = {
            name.removeprefix("rows."): torch.split(x, sizes)
            for name, x in state.items()
            if name.startswith("rows.")
        }
        batch = len(self.chunks[0])
        for i, one in enumerate(lists):
            self.put(i // batch, i % batch, one.numpy(), {name: x[i] for name, x in packed.items()})

    def _with_raw(self, name: str, g: int, b: int, raw: Tensor) -> Tensor:
        if self.count(g, b) == 0:
            return raw
        kept = self.rows[name].flatten(0, 1)[self.where(g, b).to(raw.device), 0]
        return torch.cat([kept, raw])
