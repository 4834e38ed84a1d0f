"""Inputs on which operations are checked and timed: one problem for each operation and option."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynchunk.boundaries import BoundaryRule
from dynchunk.chunks import Chunks
from dynchunk.ops import (
    attend,
    attend_selected,
    attend_selected_chunks,
    boundaries,
    decode,
    decode_topk,
    gather_rows,
    index_topk,
    pool,
    pool_state,
)
from dynchunk.ops.layout import Reads, Spans

RULE = BoundaryRule(2, min_length=3, max_length=8)  # a ratio of 4.75 on random scores
PAGE = 64

Inputs = Mapping[str, Tensor]


class Problem(NamedTuple):
    """An operation and its floating inputs."""

    name: str
    options: str
    call: Callable[[Inputs, str | None], Sequence[Tensor]]  #: (inputs, impl) -> outputs
    inputs: dict[str, Tensor]
    differentiable: tuple[str, ...] = ()  #: which inputs have a gradient
    flops: tuple[int, int] = (0, 0)  #: useful ones, forward and backward, of matrix products
    bytes: tuple[int, int] = (0, 0)  #: to be read and written, where memory is the bound


class Sizes(NamedTuple):
    """How large problems are."""

    lengths: tuple[int, ...]  #: tokens of each sequence
    heads: int
    kv_heads: int
    width: int  #: of a head
    window: int
    topk: int
    index_heads: int
    contexts: tuple[int, ...]  #: entries that each decoded sequence has


class Maker:
    """Makes problems of one size, dtype and device, from random numbers.

    Parameters
    ----------
    sizes : Sizes
    dtype : torch.dtype
        Of the floating inputs.
    device : torch.device
    seed : int
    chunks : Chunks, optional
        Default: by ``RULE`` on random scores.
    """

    def __init__(
        self,
        sizes: Sizes,
        dtype: torch.dtype,
        device: torch.device,
        *,
        seed: int = 0,
        chunks: Chunks | None = None,
    ) -> None:
        self.sizes, self.dtype, self.device = sizes, dtype, device
        self.generator = torch.Generator(device).manual_seed(seed)
        cu = torch.tensor([0, *sizes.lengths], device=device).cumsum(0)
        self.tokens = sum(sizes.lengths)
        scores = torch.rand(self.tokens, generator=self.generator, device=device)
        self.scores = scores
        self.chunks = RULE(scores, cu) if chunks is None else chunks
        self.reads = Reads.of(self.chunks, window=sizes.window)

    def normal(self, *shape: int) -> Tensor:
        """Draw standard normal numbers."""
        x = torch.randn(*shape, generator=self.generator, device=self.device)
        return x.to(self.dtype)

    def whole(self, *shape: int) -> Tensor:
        """Draw small whole numbers, whose products and sums have no rounding."""
        x = torch.randint(-2, 3, shape, generator=self.generator, device=self.device)
        return x.to(self.dtype)

    def entries(self, *shape: int) -> Tensor:
        """Rows of entries, NaN where the chunk is open and nobody may look."""
        x = self.normal(len(self.chunks), *shape)
        return x.masked_fill(~self.chunks.is_closed.view(-1, *[1] * len(shape)), torch.nan)

    def spread(self, counts: Tensor, k: int) -> Tensor:
        """Return up to k different numbers below each count, -1 for the rest, [.., k]."""
        index = torch.arange(k, device=self.device)
        step = (counts[..., None] // k).clamp(min=1)
        offset = torch.rand(counts.shape, generator=self.generator, device=self.device)
        start = (offset * counts).long()[..., None]
        found = (start + index * step) % counts[..., None].clamp(min=1)
        return found.where(index < counts[..., None], -1)

    @property
    def raw_reads(self) -> int:
        """Raw tokens that all queries read together."""
        own = torch.arange(1, self.tokens + 1, device=self.device)
        return int((own - self.reads.raw_start).sum())

    def size_of(self, *tensors: Tensor) -> int:
        """Bytes of tensors."""
        return sum(x.numel() * x.element_size() for x in tensors)

    def attend(self) -> Problem:
        """All visible entries, a window and a sink."""
        s, r = self.sizes, self.reads
        inputs = {
            "q": self.normal(self.tokens, s.heads, s.width),
            "k": self.normal(self.tokens, s.kv_heads, s.width),
            "v": self.normal(self.tokens, s.kv_heads, s.width),
            "entry_k": self.entries(s.kv_heads, s.width),
            "entry_v": self.entries(s.kv_heads, s.width),
            "sink": self.normal(s.heads),
        }

        def call(x: Inputs, impl: str | None) -> Sequence[Tensor]:
            operands = (x["q"], x["k"], x["v"], x["entry_k"], x["entry_v"])
            return attend.attend(*operands, r, sink=x["sink"], impl=impl)

        flops = self._attention(int(r.n_visible.sum()) + self.raw_reads)
        return Problem("attend", f"D={s.width}", call, inputs, tuple(inputs), flops)

    def attend_selected(self) -> Problem:
        """``topk`` of the visible entries; one KV head whose keys are its values."""
        s, r = self.sizes, self.reads
        lists = self.spread(r.n_visible[0], s.topk)[:, None]
        inputs = {
            "q": self.normal(self.tokens, s.heads, s.width),
            "k": self.normal(self.tokens, 1, s.width),
            "entry_k": self.entries(1, s.width),
            "sink": self.normal(s.heads),
        }

        def call(x: Inputs, impl: str | None) -> Sequence[Tensor]:
            operands = (x["q"], x["k"], None, x["entry_k"], None)
            return attend_selected.attend_selected(*operands, lists, r, sink=x["sink"], impl=impl)

        flops = self._attention(int((lists >= 0).sum()) + self.raw_reads)
        words = f"D={s.width} keys are values"
        return Problem("attend_selected", words, call, inputs, tuple(inputs), flops)

    def attend_selected_chunks(self) -> Problem:
        """``topk`` chunks of raw tokens a query."""
        s, r = self.sizes, self.reads
        sequence = torch.repeat_interleave(r.cu_seqlens_q.diff(), output_size=self.tokens)
        own_chunk = self.chunks.ids - self.chunks.cu_chunks[sequence]
        lists = self.spread(own_chunk + 1, s.topk)[:, None]
        inputs = {
            "q": self.normal(self.tokens, s.heads, s.width),
            "k": self.normal(self.tokens, s.kv_heads, s.width),
            "v": self.normal(self.tokens, s.kv_heads, s.width),
        }

        def call(x: Inputs, impl: str | None) -> Sequence[Tensor]:
            operands = (x["q"], x["k"], x["v"])
            return attend_selected_chunks.attend_selected_chunks(*operands, lists, r, impl=impl)

        chunk = (lists + self.chunks.cu_chunks[sequence][:, None, None]).clamp(min=0)
        last = torch.minimum(self.chunks.ends[chunk], r.raw_start[0][:, None, None])
        older = (last - self.chunks.starts[chunk]).clamp(min=0).where(lists >= 0, 0)
        flops = self._attention(int(older.sum()) + self.raw_reads)
        name = "attend_selected_chunks"
        return Problem(name, f"D={s.width}", call, inputs, tuple(inputs), flops)

    def index_topk(self) -> Problem:
        """Whole numbers, so that ties and their order are exact."""
        s, r = self.sizes, self.reads
        inputs = {
            "q": self.whole(self.tokens, s.index_heads, s.width),
            "k": self.whole(len(self.chunks), s.width),
            "weights": self.whole(self.tokens, s.index_heads),
        }

        def call(x: Inputs, impl: str | None) -> Sequence[Tensor]:
            operands = (x["q"], x["k"], x["weights"])
            return index_topk.index_topk(*operands, r, s.topk, scale=1.0, impl=impl)

        per_pair = 2 * s.width * s.index_heads
        scored, kept = int(r.n_visible.sum()), int(r.n_visible.clamp(max=s.topk).sum())
        flops = (per_pair * scored, 3 * per_pair * kept)
        return Problem("index_topk", f"k={s.topk}", call, inputs, tuple(inputs), flops)

    def decode(self) -> Problem:
        """One query a sequence, entries in pages anywhere."""
        s = self.sizes
        layout = self._pages()
        rows = len(s.contexts) * s.window
        page = (layout.total, PAGE, s.kv_heads, s.width)
        inputs = {
            "q": self.normal(len(s.contexts), s.heads, s.width),
            "k": self.normal(rows, s.kv_heads, s.width),
            "v": self.normal(rows, s.kv_heads, s.width),
            "entry_k": self.normal(*page),
            "entry_v": self.normal(*page),
            "sink": self.normal(s.heads),
        }
        begin = torch.arange(0, rows, s.window, device=self.device)

        def call(x: Inputs, impl: str | None) -> Sequence[Tensor]:
            operands = (x["q"], x["k"], x["v"], x["entry_k"], x["entry_v"])
            where = (layout.pages, layout.sequence, layout.n_visible, begin[None], begin + s.window)
            return decode.decode(*operands, *where, sink=x["sink"], impl=impl)

        read = (sum(s.contexts) + rows) * 2 * s.kv_heads * s.width
        size = read * inputs["k"].element_size()
        return Problem("decode", f"D={s.width}", call, inputs, bytes=(size, 0))

    def decode_topk(self) -> Problem:
        """As ``index_topk``, in pages."""
        s = self.sizes
        layout = self._pages()
        inputs = {
            "q": self.whole(len(s.contexts), s.index_heads, s.width),
            "k": self.whole(layout.total, PAGE, s.width),
            "weights": self.whole(len(s.contexts), s.index_heads),
        }

        def call(x: Inputs, impl: str | None) -> Sequence[Tensor]:
            operands = (x["q"], x["k"], x["weights"])
            where = (layout.pages, layout.sequence, layout.n_visible)
            return decode_topk.decode_topk(*operands, *where, s.topk, scale=1.0, impl=impl)

        size = sum(s.contexts) * s.width * inputs["k"].element_size()
        return Problem("decode_topk", f"k={s.topk}", call, inputs, bytes=(size, 0))

    def pool(self, options: str) -> Problem:
        """Pool with the options that are named, such as ``"gate+bias+overlap+norm+rope"``."""
        s, chosen = self.sizes, options.split("+")
        overlap = "overlap" in chosen
        channels = s.width * (2 if overlap else 1)
        spans = Spans.of(self.chunks, overlap=overlap)
        inputs = {"values": self.normal(self.tokens, s.kv_heads, channels)}
        if "gate" in chosen:
            inputs["gate"] = self.normal(self.tokens, s.kv_heads, channels)
        if "bias" in chosen:
            inputs["slot_bias"] = self.normal(8, s.kv_heads, channels)
        if "norm" in chosen:
            inputs["norm"] = self.normal(s.width)
        rope = None
        if "rope" in chosen:
            angle = torch.rand(len(self.chunks), s.width // 4, device=self.device) * 6
            rope = (angle.cos(), angle.sin())

        def call(x: Inputs, impl: str | None) -> Sequence[Tensor]:
            others: dict[str, Any] = {name: t for name, t in x.items() if name != "values"}
            return (pool.pool(x["values"], spans, **others, rope=rope, impl=impl),)

        entries = len(self.chunks) * s.kv_heads * s.width * inputs["values"].element_size()
        read = self.size_of(*inputs.values())
        size = (read + entries, 2 * read + entries)
        return Problem("pool", options, call, inputs, tuple(inputs), bytes=size)

    def pool_state(self) -> Problem:
        """All tokens of each chunk at once, into an empty state."""
        s, chunks = self.sizes, self.chunks
        shape = (self.tokens, s.kv_heads, s.width)
        inputs = {"values": self.normal(*shape), "gate": self.normal(*shape)}

        def call(x: Inputs, impl: str | None) -> Sequence[Tensor]:
            wide = torch.promote_types(x["values"].dtype, torch.float32)
            state = pool_state.PoolState.empty(
                len(chunks), s.kv_heads, s.width, dtype=wide, device=self.device
            )
            slots = torch.zeros_like(chunks.starts)
            where = (chunks.starts, chunks.ends, slots)
            found = pool_state.pool_state(x["values"], state, *where, gate=x["gate"], impl=impl)
            return (found.entries(),)

        size = self.size_of(*inputs.values())
        return Problem("pool_state", "gate", call, inputs, bytes=(size, 0))

    def gather_rows(self) -> Problem:
        """Tokens into rows in order, every 16th row or so empty: what packing into tiles is."""
        s, count = self.sizes, self.tokens + self.tokens // 16
        order = torch.randperm(count, generator=self.generator, device=self.device)
        inverse = order[: self.tokens].sort().values
        index = torch.full((count,), -1, device=self.device)
        index[inverse] = torch.arange(self.tokens, device=self.device)
        inputs = {"x": self.normal(self.tokens, s.kv_heads, s.width)}

        def call(x: Inputs, impl: str | None) -> Sequence[Tensor]:
            return (gather_rows.gather_rows(x["x"], index, inverse, impl=impl),)

        row = s.kv_heads * s.width * inputs["x"].element_size()
        size = (self.tokens + count) * row
        return Problem("gather_rows", "with gaps", call, inputs, ("x",), bytes=(size, size))

    def boundaries(self) -> Problem:
        """Cut by the rule."""
        cu, parameters = self.chunks.cu_seqlens, RULE.parameters

        def call(x: Inputs, impl: str | None) -> Sequence[Tensor]:
            return boundaries.boundaries(x["scores"], cu, parameters, impl)

        inputs = {"scores": self.scores}
        size = self.size_of(self.scores)
        return Problem("boundaries", "radius 2", call, inputs, bytes=(size, 0))

    def moving(self) -> Iterator[Problem]:
        """Yield the operations that memory bounds: all but attention."""
        for options in ("mean", "gate+bias", "gate+bias+overlap", "gate+bias+overlap+norm+rope"):
            yield self.pool(options)
        yield from (self.pool_state(), self.gather_rows(), self.boundaries())

    def attending(self) -> Iterator[Problem]:
        """Yield the operations of attention that have a kernel."""
        modules = (
            attend,
            attend_selected,
            attend_selected_chunks,
            index_topk,
            decode,
            decode_topk,
        )
        for module in modules:
            if "triton" in module.OPS:
                make = getattr(self, module.__name__.rpartition(".")[2])
                yield make()

    def _attention(self, products: int) -> tuple[int, int]:
        """Return the FLOPs of an attention in which all queries together read so many rows."""
        one = 2 * self.sizes.width * self.sizes.heads * products
        return 2 * one, 5 * one  # q k and p v; again q k, then dp, dv, dq and dk

    def _pages(self) -> _Pages:
        needed = [-(-n // PAGE) for n in self.sizes.contexts]
        total, most = sum(needed), max(needed)
        order = torch.randperm(total, generator=self.generator, device=self.device)
        pages = torch.full((1, len(needed), most), -1, device=self.device)
        at = 0
        for b, n in enumerate(needed):
            pages[0, b, :n] = order[at : at + n]
            at += n
        n_visible = torch.tensor([self.sizes.contexts], device=self.device)
        return _Pages(total, pages, torch.arange(len(needed), device=self.device), n_visible)


class _Pages(NamedTuple):
    total: int
    pages: Tensor  # int64 [1, B, n_pages]
    sequence: Tensor  # int64 [B]
    n_visible: Tensor  # int64 [1, B]
