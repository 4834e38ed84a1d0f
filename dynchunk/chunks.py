"""Where the chunks are: an immutable segmentation of packed sequences, and what follows from it.

A *boundary* is the FIRST token of a chunk. Sequences are packed end to end; ``cu_seqlens`` [B+1]
holds where each begins. All positions are indices into the packed tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from dynchunk._checks import require, require_int

#: ``visible_from`` of an open chunk: no query ever sees it.
NEVER = torch.iinfo(torch.int64).max

#: What ``cu_seqlens`` may be: the length of one sequence, or the offsets [B+1].
SequenceOffsets = int | Sequence[int] | Tensor


class Kind(IntEnum):
    """Why a chunk starts where it does."""

    START = 0  #: the first token of a sequence
    CONTENT = 1  #: the scores alone decided
    FORCED = 2  #: the chunk before would have passed its maximum length
    GIVEN = 3  #: the caller, a grid or a moved view decided


class InvariantError(ValueError):
    """A ``Chunks`` object contradicts itself; the message names the first invariant that fails."""


def as_cu_seqlens(
    cu_seqlens: SequenceOffsets,
    device: torch.device | None = None,
    *,
    total: int | None = None,
) -> Tensor:
    """Return the offsets of packed sequences as a checked int64 tensor [B+1].

    Offsets on a GPU are read once for that, others without waiting for one. ``total`` is the number
    of tokens that they must end at.

    >>> as_cu_seqlens(5), as_cu_seqlens([0, 2, 2, 7])
    (tensor([0, 5]), tensor([0, 2, 2, 7]))
    """
    if isinstance(cu_seqlens, int):
        cu_seqlens = [0, require_int("cu_seqlens", cu_seqlens, 0)]
    cu = torch.as_tensor(cu_seqlens)
    is_integer = not (cu.is_floating_point() or cu.is_complex() or cu.dtype == torch.bool)
    require(is_integer and cu.ndim == 1 and len(cu) >= 1, "cu_seqlens", "integers [B+1]", cu)
    offsets = cu.tolist()
    require(offsets[0] == 0, "cu_seqlens", "0 in front", offsets)
    is_monotone = all(a <= b for a, b in pairwise(offsets))
    require(is_monotone, "cu_seqlens", "offsets that never decrease", offsets)
    ok = total is None or offsets[-1] == total
    require(ok, "cu_seqlens", f"{total} (all tokens) at the end", offsets)
    return cu.to(device=device, dtype=torch.int64)


def cu_seqlens_from_mask(mask: Tensor) -> Tensor:
    """Return the offsets [B+1] of the rows of a padded batch, once packed by ``x[mask]``.

    Parameters
    ----------
    mask : bool or integer tensor [B, T]
        True (or 1) on real tokens. Padding may lie left or right of a row, not inside it.

    Returns
    -------
    int64 tensor [B+1]

    Examples
    --------
    >>> cu_seqlens_from_mask(torch.tensor([[0, 1, 1], [1, 0, 0], [0, 0, 0]]))
    tensor([0, 2, 3, 3])
    """
    require(
        isinstance(mask, Tensor) and mask.ndim == 2 and not mask.is_floating_point(),
        "mask",
        "a bool or 0/1 integer tensor [B, T]",
        mask,
    )
    real = mask.bool()
    starts_of_runs = real.clone()
    starts_of_runs[:, 1:] &= ~real[:, :-1]
    runs = starts_of_runs.sum(1)
    if bool((runs > 1).any()):
        row = int((runs > 1).nonzero()[0])
        raise ValueError(
            f"mask: expected the real tokens of a row in one run, got {int(runs[row])} runs "
            f"in row {row}"
        )
    return torch.nn.functional.pad(real.sum(1).cumsum(0), (1, 0))


@dataclass(frozen=True, eq=False, repr=False)
class Chunks:
    """Chunks of packed sequences. They partition the tokens: each begins where the last one ends.

    Build one with :meth:`from_boundaries`, :meth:`from_lengths`, :meth:`fixed` or a
    :class:`~dynchunk.boundaries.BoundaryRule`; the fields below are taken as they are
    (:meth:`check` verifies them).

    Parameters
    ----------
    cu_seqlens : int64 tensor [B+1]
        Offsets of the packed sequences; T = ``cu_seqlens[-1]``.
    starts : int64 tensor [N]
        The boundaries: first token of each chunk.
    visible_from : int64 tensor [N]
        The token at whose arrival the chunk's entry may be read, never before the chunk's last
        token and never decreasing within a sequence. An open chunk, which only the last one of a
        sequence can be, has ``NEVER``.
    kinds : int8 tensor [N]
        A :class:`Kind` per chunk.

    Examples
    --------
    >>> chunks = Chunks.fixed(4, 10)
    >>> chunks
    Chunks(sequences=1, tokens=10, chunks=3, ratio=4.00, device=cpu)
    >>> chunks.starts, chunks.ends, chunks.visible_from[:2]
    (tensor([0, 4, 8]), tensor([ 4,  8, 10]), tensor([3, 7]))
    >>> chunks.n_visible
    tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, 2])
    """

    cu_seqlens: Tensor
    starts: Tensor
    visible_from: Tensor
    kinds: Tensor

    # Constructors

    @classmethod
    def from_boundaries(
        cls,
        boundaries: Tensor | Sequence[int],
        cu_seqlens: SequenceOffsets,
        confirmed_at: Tensor | Sequence[int] | None = None,
        *,
        close_last: bool = False,
    ) -> Chunks:
        """Build from the first tokens of the chunks.

        Parameters
        ----------
        boundaries : integers [K], or bool [T]
            Increasing positions, or True on each first token. The first token of every sequence is
            a boundary, named or not.
        cu_seqlens : offsets [B+1] of the sequences, or the length of the only one
        confirmed_at : integers [K], optional
            The token at whose arrival each boundary is known. Default: the token before it.
        close_last : bool
            Whether the last chunk of a sequence is complete at the sequence's end.

        Examples
        --------
        >>> Chunks.from_boundaries([3, 5], 8, confirmed_at=[4, 7]).visible_from[:2]
        tensor([4, 7])
        """
        device = boundaries.device if isinstance(boundaries, Tensor) else None
        cu = as_cu_seqlens(cu_seqlens, device)
        at = _as_positions(boundaries, cu)
        known = at - 1 if confirmed_at is None else _as_integers(confirmed_at, cu.device)
        ok = known.shape == at.shape and not known.is_floating_point()
        require(ok, "confirmed_at", f"integers [{len(at)}]", known)
        known = torch.maximum(known.to(torch.int64), at - 1)
        inner = ~torch.isin(at, cu)
        at, known = at[inner], known[inner]
        sequence = torch.searchsorted(cu, at, right=True)
        same = sequence[1:] == sequence[:-1]
        ok = bool((known < cu[sequence]).all()) and bool((known.diff() >= 0)[same].all())
        expected = "tokens of the same sequence that never decrease"
        require(ok, "confirmed_at", expected, confirmed_at)
        if close_last:
            ends = cu[1:][cu.diff() > 0]
            at, order = torch.cat([at, ends]).sort()
            known = torch.cat([known, ends - 1])[order]
        return _from_closings(cu, at, known, torch.full_like(at, Kind.GIVEN, dtype=torch.int8))

    @classmethod
    def from_lengths(
        cls,
        lengths: Tensor | Sequence[int],
        cu_seqlens: SequenceOffsets | None = None,
        *,
        close_last: bool = True,
    ) -> Chunks:
        """Build from chunk lengths [N], each >= 1; sequences must end where a chunk ends.

        Examples
        --------
        >>> Chunks.from_lengths([2, 3, 1], [0, 5, 6]).starts
        tensor([0, 2, 5])
        """
        sizes = _as_integers(lengths)
        ok = not sizes.is_floating_point() and sizes.ndim == 1 and bool((sizes >= 1).all())
        require(ok, "lengths", "integers [N], each >= 1", lengths)
        ends = sizes.to(torch.int64).cumsum(0)
        total = int(ends[-1]) if len(ends) else 0
        cu = as_cu_seqlens(total if cu_seqlens is None else cu_seqlens, sizes.device)
        require(int(cu[-1]) == total, "lengths", f"a sum of {int(cu[-1])} tokens", total)
        bounds = torch.nn.functional.pad(ends, (1, 0))
        aligned = bool(torch.isin(cu, bounds).all())
        require(aligned, "lengths", "every sequence to end where a chunk ends", lengths)
        return cls.from_boundaries(bounds[:-1], cu, close_last=close_last)

    @classmethod
    def fixed(cls, stride: int, cu_seqlens: SequenceOffsets, offset: int = 0) -> Chunks:
        """Cut each sequence on a fixed grid: the scheme that makes a token's phase matter.

        Entry i is readable from the chunk's last token on, which is DeepSeek V4's rule
        ``i < (t + 1) // stride``.

        Parameters
        ----------
        stride : int >= 1
        cu_seqlens : offsets [B+1] of the sequences, or the length of the only one
        offset : int in [0, stride)
            Position of the first grid line of every sequence (staggered grids use stride // 2).

        Examples
        --------
        >>> Chunks.fixed(4, 11, offset=2).starts
        tensor([ 0,  2,  6, 10])
        """
        require_int("stride", stride, 1)
        require_int("offset", offset, 0)
        require(offset < stride, "offset", f"an integer in [0, {stride})", offset)
        cu = as_cu_seqlens(cu_seqlens)
        first = offset or stride
        lines = ((cu[1:] - cu[:-1]) - first).div(stride, rounding_mode="floor") + 1
        begin = torch.repeat_interleave(cu[:-1], lines)
        at = begin + first + stride * _index_within(lines)
        kinds = torch.full_like(at, Kind.GIVEN, dtype=torch.int8)
        return _from_closings(cu, at, at - 1, kinds)

    @classmethod
    def cat(cls, parts: Sequence[Chunks]) -> Chunks:
        """Concatenate batches.

        Examples
        --------
        >>> Chunks.cat([Chunks.fixed(2, 4), Chunks.fixed(3, 3)]).starts
        tensor([0, 2, 4])
        """
        require(len(parts) > 0, "parts", "at least one Chunks", parts)
        offsets = [0]
        for part in parts:
            offsets.append(offsets[-1] + part.num_tokens)
        pairs = list(zip(parts, offsets, strict=False))
        return cls(
            torch.cat([parts[0].cu_seqlens[:1], *(p.cu_seqlens[1:] + o for p, o in pairs)]),
            torch.cat([p.starts + o for p, o in pairs]),
            torch.cat([_move(p.visible_from, o) for p, o in pairs]),
            torch.cat([p.kinds for p in parts]),
        )

    # Sizes

    @cached_property
    def num_tokens(self) -> int:
        """Number T of packed tokens."""
        return int(self.cu_seqlens[-1])

    @property
    def num_sequences(self) -> int:
        """Number B of sequences."""
        return len(self.cu_seqlens) - 1

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def device(self) -> torch.device:
        """Device of all tensors."""
        return self.starts.device

    # Per chunk [N]

    @cached_property
    def ends(self) -> Tensor:
        """One past the last token of each chunk, int64 [N]."""
        after = torch.cat([self.starts[1:], self.cu_seqlens[-1:]])[: len(self)]
        return torch.minimum(after, self.cu_seqlens[self.sequence_ids + 1])

    @cached_property
    def lengths(self) -> Tensor:
        """Tokens in each chunk, int64 [N]."""
        return self.ends - self.starts

    @cached_property
    def sequence_ids(self) -> Tensor:
        """Sequence of each chunk, int64 [N]."""
        return torch.searchsorted(self.cu_seqlens, self.starts, right=True) - 1

    @cached_property
    def is_closed(self) -> Tensor:
        """Whether each chunk has an entry, bool [N]."""
        return self.visible_from != NEVER

    # Per sequence

    @cached_property
    def cu_chunks(self) -> Tensor:
        """Offsets of each sequence's chunks, int64 [B+1]."""
        return torch.searchsorted(self.starts, self.cu_seqlens)

    # Per token [T]

    @cached_property
    def ids(self) -> Tensor:
        """Chunk of each token, int64 [T]."""
        index = torch.arange(len(self), device=self.device)
        return torch.repeat_interleave(index, self.lengths, output_size=self.num_tokens)

    @cached_property
    def slots(self) -> Tensor:
        """Offset of each token from the start of its chunk, int64 [T]."""
        return torch.arange(self.num_tokens, device=self.device) - self.starts[self.ids]

    @cached_property
    def n_visible(self) -> Tensor:
        """How many entries of its own sequence each token sees, int64 [T].

        They are the first ones: token t of sequence b reads the entries
        ``cu_chunks[b] .. cu_chunks[b] + n_visible[t] - 1``.
        """
        seen_at = self.visible_from[self.is_closed]
        arrivals = torch.bincount(seen_at, minlength=self.num_tokens).cumsum(0)
        before = torch.nn.functional.pad(self.is_closed.cumsum(0), (1, 0))[self.cu_chunks[:-1]]
        return arrivals - torch.repeat_interleave(before, self.cu_seqlens.diff())

    # Figures

    @property
    def ratio(self) -> float:
        """Tokens per entry, measured on the closed chunks; NaN if there is none."""
        closed = int(self.is_closed.sum())
        return int(self.lengths[self.is_closed].sum()) / closed if closed else float("nan")

    @property
    def forced_share(self) -> float:
        """Share of forced cuts among all boundaries but the sequences' first tokens."""
        inner = int((self.kinds != Kind.START).sum())
        return int((self.kinds == Kind.FORCED).sum()) / inner if inner else 0.0

    # Views: the same tokens, cut elsewhere

    def shifted(self, k: int) -> Chunks:
        """Move every boundary by ``k`` tokens; the first token of a sequence stays one.

        For k > 0 the sequence's first token casts a boundary too, so ``fixed(r).shifted(k)`` is the
        staggered grid ``fixed(r, offset=k)``. A moved boundary is known when the original is and
        its last token has come.

        Examples
        --------
        >>> Chunks.from_boundaries([5], 9).shifted(2).starts
        tensor([0, 2, 7])
        """
        require_int("k", k)
        closed = self.is_closed
        at, known, kinds = self.ends[closed] + k, self.visible_from[closed], self._end_kinds[closed]
        sequence = self.sequence_ids[closed]
        if k > 0:
            heads = self.cu_seqlens[:-1]
            at, known = torch.cat([heads + k, at]), torch.cat([heads, known])
            kinds = torch.cat([torch.full_like(heads, Kind.GIVEN, dtype=torch.int8), kinds])
            sequence = torch.cat([torch.arange(len(heads), device=self.device), sequence])
        keep = (at > self.cu_seqlens[sequence]) & (at <= self.cu_seqlens[sequence + 1])
        at, order = at[keep].sort()
        known = torch.maximum(known[keep][order], at - 1)
        return _from_closings(self.cu_seqlens, at, known, kinds[keep][order])

    def midpoints(self) -> Chunks:
        """Cut in the middle of every chunk: an interleaved view keeps whole what this one splits.

        The midpoint ``start + length // 2`` is known when its chunk is closed.

        Examples
        --------
        >>> Chunks.from_lengths([4, 6]).midpoints().starts
        tensor([0, 2, 7])
        """
        closed = self.is_closed
        at = (self.starts + self.lengths.div(2, rounding_mode="floor"))[closed]
        kinds = torch.where(self.kinds == Kind.START, int(Kind.GIVEN), self.kinds)[closed]
        keep = at > self.cu_seqlens[self.sequence_ids[closed]]
        return _from_closings(
            self.cu_seqlens, at[keep], self.visible_from[closed][keep], kinds[keep]
        )

    @cached_property
    def _end_kinds(self) -> Tensor:
        """Kind of the boundary at each chunk's end, int8 [N]."""
        after = self.kinds.roll(-1)
        is_last = self.ends == self.cu_seqlens[self.sequence_ids + 1]
        return torch.where(is_last, int(Kind.GIVEN), after)

    # Whole objects

    def sequence(self, b: int) -> Chunks:
        """Return the chunks of sequence ``b`` alone, positions counted from its first token."""
        require_int("b", b, 0)
        require(b < self.num_sequences, "b", f"an integer in [0, {self.num_sequences})", b)
        begin, end = self.cu_seqlens[b : b + 2].tolist()
        first, last = self.cu_chunks[b : b + 2].tolist()
        return Chunks(
            torch.tensor([0, end - begin], device=self.device),
            self.starts[first:last] - begin,
            _move(self.visible_from[first:last], -begin),
            self.kinds[first:last],
        )

    def to(self, device: torch.device | str) -> Chunks:
        """Return the same chunks on ``device``."""
        fields = (self.cu_seqlens, self.starts, self.visible_from, self.kinds)
        return Chunks(*(field.to(device) for field in fields))

    def equal(self, other: Chunks) -> bool:
        """Return whether both cut the same sequences at the same places, known at the same time."""
        return (
            torch.equal(self.cu_seqlens, other.cu_seqlens)
            and torch.equal(self.starts, other.starts)
            and torch.equal(self.visible_from, other.visible_from)
            and torch.equal(self.kinds, other.kinds)
        )

    def check(self) -> Chunks:
        """Verify every invariant and return self.

        Raises
        ------
        InvariantError
            Naming the first invariant that does not hold.
        """
        for name, holds in _INVARIANTS:
            if not holds(self):
                raise InvariantError(f"Chunks: {name} does not hold")
        return self

    def __repr__(self) -> str:
        return (
            f"Chunks(sequences={self.num_sequences}, tokens={self.num_tokens}, "
            f"chunks={len(self)}, ratio={self.ratio:.2f}, device={self.device})"
        )


def _index_within(counts: Tensor) -> Tensor:
    """0, 1, .. within each group: [2, 3] gives [0, 1, 0, 1, 2]."""
    ends = counts.cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    index = torch.arange(total, device=counts.device)
    return index - torch.repeat_interleave(ends - counts, counts)


def _move(visible_from: Tensor, offset: int) -> Tensor:
    return torch.where(visible_from == NEVER, NEVER, visible_from + offset)


def _as_integers(values: Tensor | Sequence[int], device: torch.device | None = None) -> Tensor:
    """Return a tensor; an empty list, which torch takes for floating, as int64."""
    x = torch.as_tensor(values, device=device)
    return x.to(torch.int64) if x.numel() == 0 else x


def _as_positions(boundaries: Tensor | Sequence[int], cu_seqlens: Tensor) -> Tensor:
    total = int(cu_seqlens[-1])
    at = torch.as_tensor(boundaries, device=cu_seqlens.device)
    if at.dtype == torch.bool:
        require(tuple(at.shape) == (total,), "boundaries", f"bool of shape [{total}]", at)
        return at.nonzero().flatten()
    at = _as_integers(at, at.device)
    require(not at.is_floating_point() and at.ndim == 1, "boundaries", "positions [K]", at)
    at = at.to(torch.int64)
    require(bool((at.diff() > 0).all()), "boundaries", "strictly increasing positions", boundaries)
    inside = len(at) == 0 or (int(at[0]) >= 0 and int(at[-1]) < total)
    require(inside, "boundaries", f"positions in [0, {total})", boundaries)
    return at


def _from_closings(cu_seqlens: Tensor, at: Tensor, known: Tensor, kinds: Tensor) -> Chunks:
    """Build from the confirmed ends of chunks, sorted; each in (begin, end] of its sequence."""
    heads = cu_seqlens[:-1][cu_seqlens.diff() > 0]
    inner = ~torch.isin(at, cu_seqlens)
    starts, order = torch.cat([heads, at[inner]]).sort()
    head_kinds = torch.full_like(heads, Kind.START, dtype=torch.int8)
    visible_from = torch.full_like(starts, NEVER)
    visible_from[torch.searchsorted(starts, at) - 1] = known
    return Chunks(cu_seqlens, starts, visible_from, torch.cat([head_kinds, kinds[inner]])[order])


def _same_sequence(chunks: Chunks) -> Tensor:
    return chunks.sequence_ids[1:] == chunks.sequence_ids[:-1]


# Each line may rely on the ones above it.
_INVARIANTS: tuple[tuple[str, Callable[[Chunks], bool]], ...] = (
    (
        "dtypes int64, int64, int64, int8 of cu_seqlens, starts, visible_from, kinds",
        lambda c: (
            c.cu_seqlens.dtype == c.starts.dtype == c.visible_from.dtype == torch.int64
            and c.kinds.dtype == torch.int8
        ),
    ),
    (
        "one device",
        lambda c: c.cu_seqlens.device == c.starts.device == c.visible_from.device == c.kinds.device,
    ),
    (
        "shapes cu_seqlens [B+1], starts [N], visible_from [N], kinds [N]",
        lambda c: (
            c.cu_seqlens.ndim == c.starts.ndim == 1
            and len(c.cu_seqlens) >= 1
            and c.starts.shape == c.visible_from.shape == c.kinds.shape
        ),
    ),
    (
        "cu_seqlens begins at 0 and never decreases",
        lambda c: int(c.cu_seqlens[0]) == 0 and bool((c.cu_seqlens.diff() >= 0).all()),
    ),
    ("starts increases strictly", lambda c: bool((c.starts.diff() > 0).all())),
    (
        "starts lies in [0, T)",
        lambda c: bool(((c.starts >= 0) & (c.starts < c.cu_seqlens[-1])).all()),
    ),
    (
        "every sequence that is not empty starts a chunk",
        lambda c: bool(torch.isin(c.cu_seqlens[:-1][c.cu_seqlens.diff() > 0], c.starts).all()),
    ),
    (
        "only the last chunk of a sequence is open",
        lambda c: bool((c.is_closed[:-1] | ~_same_sequence(c)).all()),
    ),
    (
        "visible_from is not before the chunk's last token",
        lambda c: bool((c.visible_from >= c.ends - 1).all()),
    ),
    (
        "visible_from of a closed chunk lies in its sequence",
        lambda c: bool((~c.is_closed | (c.visible_from < c.cu_seqlens[c.sequence_ids + 1])).all()),
    ),
    (
        "visible_from never decreases within a sequence",
        lambda c: bool(((c.visible_from.diff() >= 0) | ~_same_sequence(c)).all()),
    ),
    (
        "kinds is START exactly on the first tokens of sequences",
        lambda c: bool(((c.kinds == Kind.START) == torch.isin(c.starts, c.cu_seqlens)).all()),
    ),
    ("kinds holds values of Kind", lambda c: bool(((c.kinds >= 0) & (c.kinds < len(Kind))).all())),
)
