"""The streaming state of a model, or of single layers, for a batch of sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from os import PathLike

import numpy as np
import torch
from torch import Tensor

from dynchunk._checks import require, require_int
from dynchunk.attention.config import ModelConfig
from dynchunk.attention.policy import Policy
from dynchunk.attention.scoring import Segmenter, given_scores, score_specs
from dynchunk.attention.specs import Evict, Quest
from dynchunk.boundaries import SharePlan
from dynchunk.cache.closings import Integers
from dynchunk.cache.evicting import EvictingLayout
from dynchunk.cache.evicting_layer import EvictingLayer
from dynchunk.cache.layer import LayerCache, row_nbytes
from dynchunk.cache.layout import StreamLayout
from dynchunk.cache.segments import Segments
from dynchunk.cache.selecting import SelectingLayout
from dynchunk.cache.selecting_layer import SelectingLayer
from dynchunk.chunks import Chunks, Kind, SequenceOffsets, _from_closings, as_cu_seqlens

#: Tokens that a crop can take back, unless said otherwise.
ROLLBACK = 64


class Cache:
    """What attention layers remember of B sequences: entries of closed chunks, and a raw rest.

    A model fills it: ``model(tokens, cu_seqlens, cache=cache)`` takes the next tokens of every
    sequence, for some perhaps none, and returns their logits. The same holds for any split of the
    sequences, and after any of the methods below.

    Of the latest tokens the raw rows are kept that queries, open chunks and a rollback of up to
    ``rollback`` tokens read; of all others only the entries. A closed chunk opens again where a
    crop takes back the tokens that closed it. (A running state of its pooling would be smaller than
    the raw rows of an open chunk, but could not go back.)

    Parameters
    ----------
    policies : Policy or sequence of Policy
        One per layer. :meth:`of` takes those of a model.
    batch : int
        Sequences.
    sharing : SharePlan, optional
        Whose boundaries each layer uses. Default: as in :class:`~dynchunk.attention.ModelConfig`.
    rollback : int >= 0 or None
        How many tokens :meth:`crop` can take back at any time, exactly. None: all of them, for
        which the raw rows of all tokens are kept.
    page_size : int
        Entries in a page: the unit in which memory is taken, shared and copied.
    device : torch.device or str

    Attributes
    ----------
    layers : tuple of LayerCache
        What each layer's module takes as ``cache``.

    Examples
    --------
    >>> from dynchunk.attention import ChunkedTransformer, hca
    >>> model = ChunkedTransformer(ModelConfig(10, 8, layers=2, heads=2, kv_heads=1))
    >>> cache = Cache.of(model.config, batch=2)
    >>> prompt = model(torch.tensor([1, 2, 3, 4, 5]), [0, 2, 5], cache=cache)  # 2 and 3 tokens
    >>> one_more = model(torch.tensor([[6], [7]]), cache=cache)
    >>> cache.lengths
    (3, 4)
    """

    layouts: list[StreamLayout]
    _lengths: Integers
    _floor: Integers

    def __init__(
        self,
        policies: Policy | Sequence[Policy],
        batch: int = 1,
        *,
        sharing: SharePlan | None = None,
        rollback: int | None = ROLLBACK,
        page_size: int = 64,
        device: torch.device | str = "cpu",
    ) -> None:
        self.policies = (policies,) if isinstance(policies, Policy) else tuple(policies)
        ok = len(self.policies) > 0 and all(isinstance(p, Policy) for p in self.policies)
        require(ok, "policies", "at least one Policy", policies)
        self.config: ModelConfig | None = None
        self.leaders = sharing.leaders if sharing is not None else _leaders(self.policies)
        n = len(self.leaders)
        require(n == len(self.policies), "sharing", f"{len(self.policies)} layers", sharing)
        self.rollback = rollback if rollback is None else require_int("rollback", rollback, 0)
        evicting = any(isinstance(p.reduction, Evict) for p in self.policies)
        expected = "a number of tokens: what is evicted cannot come back"
        require(rollback is not None or not evicting, "rollback", expected, rollback)
        self.page_size = require_int("page_size", page_size, 1)
        self.device = torch.device(device)
        self._build(require_int("batch", batch, 0))

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        batch: int = 1,
        *,
        rollback: int | None = ROLLBACK,
        page_size: int = 64,
        device: torch.device | str = "cpu",
    ) -> Cache:
        """Return an empty cache for a model of this config."""
        policies = [config.policy(layer) for layer in range(config.layers)]
        cache = cls(
            policies,
            batch,
            sharing=config.plan,
            rollback=rollback,
            page_size=page_size,
            device=device,
        )
        cache.config = config
        return cache

    # Sizes

    @property
    def batch(self) -> int:
        """Number B of sequences."""
        return len(self._floor)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Logical length of each sequence: tokens seen, the position of its next one."""
        return tuple(self._lengths.tolist())

    def physical_lengths(self, layer: int) -> tuple[int, ...]:
        """Return for each sequence how many entries of all views and raw rows a layer holds.

        Where KV heads keep chunks of their own, those of the head that holds most are counted.
        """
        return tuple(self.layers[layer].physical_length(b) for b in range(self.batch))

    @property
    def croppable(self) -> tuple[int, ...]:
        """The least length to which each sequence can be cropped, beside 0."""
        return tuple(self._floor.tolist())

    @property
    def nbytes(self) -> int:
        """Bytes really held: every storage once, whole, and the bookkeeping's arrays."""
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in self._tensors()}
        return sum(storage.nbytes() for storage in storages.values()) + self._bookkeeping()

    @property
    def logical_nbytes(self) -> int:
        """Bytes of the entries and raw rows that are in use, those of a shared page each time."""
        total = sum(state.logical_nbytes for state in self.layers)
        for segments in self._segments.values():
            raw = int((segments.map.end - segments.map.begin).sum())
            total += raw * sum(map(row_nbytes, segments.rows.values()))
        return total

    @property
    def read_nbytes(self) -> int:
        """Bytes that the last step of a few tokens read, of all layers: each row once per KV head.

        Keys, values, biases and the bounds that a selection scores; index keys are not counted.
        """
        return sum(state.read_nbytes for state in self.layers)

    def chunks(self, layer: int = 0) -> tuple[Chunks, ...]:
        """Return the chunks so far in each of a layer's views; kinds are not kept."""
        layout = self.layout(layer)
        require(layout.policy.boundaries is not None, "layer", "one with boundaries", layer)
        return tuple(
            Chunks.cat([_chunks(layout, g, b) for b in range(self.batch)])
            if self.batch
            else Chunks.fixed(1, [0])
            for g in range(len(layout.policy.views))
        )

    # Parts, for :mod:`dynchunk.cache.check` and :mod:`dynchunk.cache.file`

    @property
    def segments(self) -> tuple[Segments, ...]:
        """The chunks of each group of layers."""
        return tuple(self._segments.values())

    def layout(self, layer: int) -> StreamLayout:
        """Return what a layer shares with others of its policy."""
        return self.layouts[self._layout_of[layer]]

    # New tokens

    def append(
        self,
        cu_seqlens: SequenceOffsets,
        scores: Tensor | Sequence[Tensor] = (),
    ) -> None:
        """Announce new tokens to layers that are used without a model and share their boundaries.

        Each layer then has to take them: ``layer(x, cache=cache.layers[i])``.

        Parameters
        ----------
        cu_seqlens : offsets [B+1] of the new tokens, or the number for a batch of 1
        scores : floating tensor [S], or one for each source of chunks
            For a ``BoundaryRule``: of the new tokens, packed; then those of views on another score.

        Examples
        --------
        >>> from dynchunk.attention import ChunkedAttention, Policy
        >>> from dynchunk.boundaries import FixedStride
        >>> policy = Policy(FixedStride(4), window=8)
        >>> layer, cache = ChunkedAttention(policy, 16, heads=2, kv_heads=1), Cache(policy)
        >>> for tokens in (7, 1, 1):
        ...     cache.append(tokens)
        ...     out = layer(torch.randn(tokens, 16), cache=cache.layers[0]).out
        >>> cache.lengths, cache.physical_lengths(0)
        ((9,), (11,))
        """
        shared = len(self._segments) == 1
        require(shared, "cache", "layers that share their boundaries", self.leaders)
        self.begin(as_cu_seqlens(cu_seqlens))
        given = (scores,) if isinstance(scores, Tensor) else tuple(scores)
        self._advance(0, given)

    def begin(self, cu_seqlens: Tensor) -> None:
        """Announce new tokens, which every leading layer then has to :meth:`segment`."""
        self._require_whole()
        expected = f"offsets of {self.batch} sequences"
        require(len(cu_seqlens) == self.batch + 1, "cu_seqlens", expected, cu_seqlens.tolist())
        self._counts = cu_seqlens.diff().cpu().numpy()
        self._least = np.max([layout.plan(self._counts) for layout in self.layouts], 0)

    def segment(
        self,
        leader: int,
        segmenter: Segmenter,
        tokens: Tensor,
        hidden: Tensor,
        scores: Tensor | None = None,
    ) -> None:
        """Score the new tokens and cut them into chunks, for a layer and those that follow it.

        Parameters
        ----------
        leader : int
        segmenter : Segmenter
        tokens : integer tensor [S]
        hidden : floating tensor [S, dim]
            What learned scores read.
        scores : floating tensor [S], optional
            For a policy with a rule and no score.
        """
        segments, found = self._segments[leader], []
        if segments.streams and segments.policy.score is None:
            found = [given_scores(scores, tokens)]
        if segments.streams and len(found) < len(segments.streams):
            found += segments.score(segmenter, self._counts, tokens.to(torch.int64), hidden)
        self._advance(leader, found)

    def _advance(self, leader: int, scores: Sequence[Tensor]) -> None:
        segments = self._segments[leader]
        segments.append(self._counts, scores)
        floor = np.maximum(self._floor, self._least)
        if self.rollback is not None:
            floor = np.maximum(floor, segments.lengths - self.rollback)
        layouts = [self.layouts[i] for i in self._followers[leader]]
        for layout in layouts:
            layout.append(self._counts, floor)
        segments.hold(self._scores_needed(segments, layouts, floor), floor)
        if leader == max(self._segments):
            self._floor, self._lengths = floor, segments.lengths.copy()

    def _scores_needed(
        self, segments: Segments, layouts: Sequence[StreamLayout], floor: Integers
    ) -> Integers:
        first = floor - segments.reach
        if segments.has_credit:
            for b, n in enumerate(floor.tolist()):
                starts = [layout.scores_needed(b, n) for layout in layouts]
                first[b] = min([first[b], *(start - segments.credit_reach for start in starts)])
        return np.maximum(0, first)

    # Going back, and which sequences there are

    def crop(self, n: int | Sequence[int]) -> None:
        """Go back to the first ``n`` tokens, as if the others had never come.

        Parameters
        ----------
        n : int, or one for each sequence
            Tokens to keep; a sequence that has no more stays as it is. Negative: tokens to drop.

        Raises
        ------
        ValueError
            Some sequence would go back more than ``rollback`` tokens behind its longest length (it
            may always go back to 0). Nothing is changed then.
        """
        self._require_whole()
        lengths = self._lengths
        one_for_each = [n] * self.batch if isinstance(n, int) else list(n)
        require(len(one_for_each) == self.batch, "n", f"{self.batch} lengths", n)
        wanted = np.array([require_int("n", m) for m in one_for_each], np.int64)
        wanted = np.minimum(lengths, np.where(wanted < 0, np.maximum(0, lengths + wanted), wanted))
        for b, (to, floor) in enumerate(zip(wanted.tolist(), self._floor.tolist(), strict=True)):
            if 0 < to < floor:
                self._refuse(b, to, floor)
        for b in np.flatnonzero(wanted < lengths).tolist():
            self._truncate(b, int(wanted[b]))
        self._give_back()

    def _refuse(self, b: int, to: int, floor: int) -> None:
        why = f"(rollback={self.rollback})"
        advice = "build the cache with a larger rollback, or None for any length"
        if any(isinstance(x, EvictingLayout) and x.at[b] == floor for x in self.layouts):
            why = "(chunks were evicted then)"
            advice = "keep a fork() from before, or crop to 0 and append its tokens again"
        raise ValueError(
            f"n: sequence {b} has lost the raw tokens to go back from {self._lengths[b]} to {to}; "
            f"it can go back to {floor} {why}, or to 0: {advice}"
        )

    def reset(self, rows: int | Sequence[int] | None = None) -> None:
        """Forget all tokens, of all sequences or of some of them, and give their memory back.

        After a forward that failed half-way this is what makes a cache usable again.
        """
        if rows is None:
            self._build(self.batch)
            return
        self._require_whole()
        for b in self._rows("rows", [rows] if isinstance(rows, int) else rows).tolist():
            self._truncate(b, 0)
        self._give_back()

    def select(self, rows: Tensor | Sequence[int]) -> None:
        """Keep the sequences ``rows``, in that order; one may come several times, or never.

        Their pages are shared from then on, until one of them writes.
        """
        self._require_whole()
        index = self._rows("rows", rows)
        self._lengths, self._floor = self._lengths[index], self._floor[index]
        for segments in self._segments.values():
            segments.select(index)
        for state in self.layers:
            state.select(index)
        for layout in self.layouts:
            layout.select(index)
        self._give_back()

    def reorder(self, rows: Tensor | Sequence[int]) -> None:
        """Give every place of the batch the sequence that was at ``rows``: beam search."""
        require(len(rows) == self.batch, "rows", f"{self.batch} sequences", rows)
        self.select(rows)

    def repeat(self, n: int) -> None:
        """Repeat every sequence ``n`` times, copies side by side."""
        require_int("n", n, 1)
        self.select(np.repeat(np.arange(self.batch), n).tolist())

    def fork(self) -> Cache:
        """Return another cache with the same past, which goes on by itself.

        Pages are shared, also with the forks of a fork, and copied when one of them writes: the
        entries of a common prefix are held once. Raw rows are copied. Crop the fork to reuse a
        shorter prefix.

        Examples
        --------
        >>> from dynchunk.attention import full
        >>> cache = Cache(full())
        >>> cache.fork().lengths
        (0,)
        """
        self._require_whole()
        other = object.__new__(Cache)
        other.__dict__.update(self.__dict__)
        other._lengths, other._floor = self._lengths.copy(), self._floor.copy()
        other._segments = {leader: one.fork() for leader, one in self._segments.items()}
        leader_of = {i: leader for leader, found in self._followers.items() for i in found}
        other.layouts = [
            layout.fork(other._segments[leader_of[i]]) for i, layout in enumerate(self.layouts)
        ]
        other.layers = tuple(
            state.fork(other.layouts[self._layout_of[layer]])
            for layer, state in enumerate(self.layers)
        )
        return other

    # Files

    def save(self, path: str | PathLike[str]) -> None:
        """Write the state to a safetensors file; see :func:`load`.

        The file appears at ``path`` when it is whole and on the disk: whatever was there before
        stays as it was if that does not come to pass.
        """
        from dynchunk.cache.file import save

        save(self, path)

    @classmethod
    def load(
        cls,
        path: str | PathLike[str],
        of: ModelConfig | Policy | Sequence[Policy],
        *,
        device: torch.device | str = "cpu",
    ) -> Cache:
        """Read a cache that :meth:`save` wrote.

        Parameters
        ----------
        path : path of the file
        of : ModelConfig, Policy or sequence of Policy
            What the cache is for: that of the one that was saved.
        device : torch.device or str

        Raises
        ------
        FileNotFoundError
        ValueError
            A file that is truncated, of another program or version, lacks something, or is of
            another policy or model.
        """
        from dynchunk.cache.file import load

        return load(path, of, device)

    def check(self) -> Cache:
        """Verify every invariant and return self; an error names the first that does not hold."""
        from dynchunk.cache.check import check

        check(self)
        return self

    def __repr__(self) -> str:
        return (
            f"Cache(layers={len(self.layers)}, lengths={list(self.lengths)}, "
            f"rollback={self.rollback}, nbytes={self.nbytes})"
        )

    def _build(self, batch: int) -> None:
        self.set_lengths(np.zeros(batch, np.int64), np.zeros(batch, np.int64))
        self._counts, self._least = np.zeros((2, batch), np.int64)
        self._segments = {
            leader: Segments(self.policies[leader], batch) for leader in sorted(set(self.leaders))
        }
        keys = list(zip(self.leaders, self.policies, strict=True))
        distinct = list(dict.fromkeys(keys))
        self._layout_of = [distinct.index(key) for key in keys]
        self._followers = {
            leader: [i for i, (other, _) in enumerate(distinct) if other == leader]
            for leader in self._segments
        }
        self.layouts = [
            _parts(policy)[0](
                policy,
                self._segments[leader],
                self._layout_of.count(i),
                self.page_size,
                self.device,
            )
            for i, (leader, policy) in enumerate(distinct)
        ]
        slots = [self._layout_of[:layer].count(i) for layer, i in enumerate(self._layout_of)]
        self.layers = tuple(
            _parts(self.layouts[i].policy)[1](self.layouts[i], slot)
            for i, slot in zip(self._layout_of, slots, strict=True)
        )

    def set_lengths(self, lengths: Integers, floor: Integers) -> None:
        """Say how many tokens each sequence has, and to how many it can be cropped."""
        self._lengths, self._floor = lengths, floor

    def _truncate(self, b: int, n: int) -> None:
        self._lengths[b] = n
        self._floor[b] = min(self._floor[b], n)
        for segments in self._segments.values():
            segments.truncate(b, n)
        for layout in self.layouts:
            layout.truncate(b, n)
        for state in self.layers:
            state.truncate(b, n)

    def _give_back(self) -> None:
        """Return memory that a crop or a choice of sequences has left unused."""
        for i, layout in enumerate(self.layouts):
            states = [self.layers[layer] for layer, j in enumerate(self._layout_of) if i == j]
            for table in layout.tables:
                table.pool.shrink()
            for name, map in layout.maps.items():
                if map.is_loose:
                    move = map.repack()
                    for state in states:
                        state.buffers[name].repack(move)
            for state in states:
                state.give_back()
        for segments in self._segments.values():
            segments.hold(segments.map.begin, self._floor)

    def _require_whole(self) -> None:
        """Refuse to go on where a forward failed half-way or a layer was left out."""
        late = [layer for layer, state in enumerate(self.layers) if not state.is_whole]
        same = all(
            np.array_equal(n, self._lengths)
            for segments in self._segments.values()
            for n in (segments.lengths, segments.map.end)
        )
        if late or not same:
            raise RuntimeError(
                f"cache: layers {late or list(self.leaders)} have not had the tokens appended "
                "last (a forward that failed, or a layer left out); reset() makes it usable again"
            )

    def _rows(self, argument: str, rows: Tensor | Sequence[int]) -> Integers:
        index = np.asarray(rows.tolist() if isinstance(rows, Tensor) else list(rows))
        ok = index.ndim == 1 and (index.size == 0 or np.issubdtype(index.dtype, np.integer))
        ok = ok and bool(((index >= 0) & (index < self.batch)).all())
        require(ok, argument, f"sequences in [0, {self.batch})", rows)
        return index.astype(np.int64)

    def _tensors(self) -> Iterator[Tensor]:
        for state in self.layers:
            yield from state.tensors()
        for segments in self._segments.values():
            yield from segments.rows.values()
        for layout in self.layouts:
            for table in layout.tables:
                yield table.tensor(self.device)

    def _bookkeeping(self) -> int:
        segments = sum(one.nbytes for one in self._segments.values())
        layers = sum(state.bookkeeping for state in self.layers)
        return segments + layers + sum(layout.nbytes for layout in self.layouts)


def _parts(policy: Policy) -> tuple[type[StreamLayout], type[LayerCache]]:
    """Return what keeps track of a policy's sequences, and what holds their rows."""
    if isinstance(policy.reduction, Evict):
        return EvictingLayout, EvictingLayer
    if isinstance(policy.selection, Quest):
        return SelectingLayout, SelectingLayer
    return StreamLayout, LayerCache


def _leaders(policies: Sequence[Policy]) -> tuple[int, ...]:
    keys = [(policy.boundaries, score_specs(policy)) for policy in policies]
    return tuple(keys.index(key) for key in keys)


def _chunks(layout: StreamLayout, g: int, b: int) -> Chunks:
    closings = layout.closings(g, b)
    cu = torch.tensor([0, int(layout.segments.lengths[b])])
    at, known = (torch.from_numpy(x.copy()) for x in (closings.ends, closings.known))
    return _from_closings(cu, at, known, torch.full_like(at, Kind.GIVEN, dtype=torch.int8))
