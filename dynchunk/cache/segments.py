"""The boundaries of a group of layers, token by token, and what scoring them needs to remember."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dynchunk._checks import require
from dynchunk.attention.policy import Policy
from dynchunk.attention.scoring import Segmenter, has_credit, log_p, reach, score_specs
from dynchunk.attention.specs import ScoreSpec
from dynchunk.boundaries import BoundaryRule, FixedStride
from dynchunk.boundaries.stream import BoundaryStream
from dynchunk.cache.closings import Closings, Integers
from dynchunk.cache.rows import Move, RowMap, Rows, ranges


class Segments:
    """The chunks that the scores of one layer make, for it and all layers that follow it.

    Parameters
    ----------
    policy : Policy
        Only its boundaries, score and views on another score matter.
    batch : int
    """

    def __init__(self, policy: Policy, batch: int) -> None:
        self.policy, self.rule = policy, policy.boundaries
        #: What scores each source of chunks; None: the caller.
        self.specs: tuple[ScoreSpec | None, ...] = score_specs(policy)
        if isinstance(self.rule, BoundaryRule) and policy.score is None:
            self.specs = (None, *self.specs)
        sources = max(1, len(self.specs))
        self.closings = [[Closings() for _ in range(batch)] for _ in range(sources)]
        self.streams: list[list[BoundaryStream]] = []
        self.credit_reach = 0  #: tokens before a chunk whose scores its entry's logit reads
        if isinstance(self.rule, BoundaryRule):
            self.credit_reach = max(1, self.rule.radius)  # 1: log_p has to see that it is no START
            self.streams = [[self.rule.stream() for _ in range(batch)] for _ in range(sources)]
        self.lengths = np.zeros(batch, np.int64)  #: tokens seen
        self.map, self.rows = RowMap(batch), Rows()
        self.reach = max(map(reach, self.specs), default=0)  #: tokens before its own that one reads
        self._move: Move | None = None  # of tokens that are scored and not appended yet

    @property
    def nbytes(self) -> int:
        """Bytes of the bookkeeping."""
        of_streams = sum(one.nbytes for of_source in self.streams for one in of_source)
        return of_streams + sum(one.nbytes for of_source in self.closings for one in of_source)

    @property
    def has_credit(self) -> bool:
        """Whether scores enter the entries' logits."""
        return any(has_credit(spec) for spec in self.specs)

    def score(
        self, segmenter: Segmenter, counts: Integers, tokens: Tensor, hidden: Tensor
    ) -> list[Tensor]:
        """Return the scores of new tokens, [S] for each source that has a scorer."""
        self._move = move = self.map.extend(counts, self.map.begin)
        before = np.minimum(self.reach, self.lengths)
        if self.reach == 0:
            return segmenter.scores(tokens, hidden, _offsets(counts, tokens.device))
        inputs = {"tokens": tokens} | ({"hidden": hidden} if segmenter.reads_hidden else {})
        self.rows.extend(move, inputs)
        first = self.map.row_of_first + self.lengths - before
        rows = torch.from_numpy(ranges(first, before + counts)).to(tokens.device)
        cu = _offsets(before + counts, tokens.device)
        context = self.rows["hidden"][rows] if segmenter.reads_hidden else hidden[:0]
        found = segmenter.scores(self.rows["tokens"][rows], context, cu)
        new = ranges(np.cumsum(before + counts) - counts, counts)
        return [scores[torch.from_numpy(new).to(tokens.device)] for scores in found]

    def append(self, counts: Integers, scores: Sequence[Tensor]) -> None:
        """Take new tokens [S] with the scores of each source."""
        self._store(counts, scores)
        old, self.lengths = self.lengths, self.lengths + counts
        if isinstance(self.rule, FixedStride):
            for b, closings in enumerate(self.closings[0]):
                lines = _lines(self.rule, int(old[b]), int(self.lengths[b]))
                closings.append(lines, lines - 1)
        offsets = np.cumsum(counts) - counts
        for source, streams in enumerate(self.streams):
            values = scores[source].detach().to("cpu", torch.float64).numpy()
            for b in counts.nonzero()[0].tolist():
                piece = values[offsets[b] : offsets[b] + counts[b]]
                found = streams[b].push(float(piece[0]) if len(piece) == 1 else piece)
                inner = [one for one in found if one.position > 0]
                at, known = [one.position for one in inner], [one.confirmed_at for one in inner]
                self.closings[source][b].append(at, known)

    def _store(self, counts: Integers, scores: Sequence[Tensor]) -> None:
        """Verify scores and keep those that a later entry's logits need."""
        expected = f"{len(self.streams)} tensors of scores [{int(counts.sum())}]"
        fits = len(scores) == len(self.streams)
        fits = fits and all(x.shape == (int(counts.sum()),) for x in scores)
        require(fits, "scores", expected, list(scores))
        for x in scores:
            require(not bool(x.isnan().any()), "scores", "numbers", "NaN")
        move = self._move or self.map.extend(counts, self.map.begin)
        named = {f"score{i}": x for i, x in enumerate(scores) if has_credit(self.specs[i])}
        self.rows.extend(move, named)
        self._move = None

    def credit(self, source: int, b: Integers, starts: Integers) -> Tensor | None:
        """Return what a source's scores add to the logits of entries [N], None for nothing.

        Parameters
        ----------
        source : int
        b : integers [N]
            Sequences of the entries.
        starts : integers [N]
            First tokens of the source's chunks in which the entries' chunks start.
        """
        spec = self.specs[source] if self.specs else None
        if not has_credit(spec) or not isinstance(self.rule, BoundaryRule):
            return None
        scores = self.rows[f"score{source}"]
        begin = np.maximum(0, starts - self.credit_reach)
        counts = np.minimum(self.lengths[b], starts + self.rule.radius + 1) - begin
        rows = ranges(self.map.row_of_first[b] + begin, counts)
        cu = _offsets(counts, scores.device)
        near = scores[torch.from_numpy(rows).to(scores.device)]
        found = log_p(spec, self.rule, near, cu)
        assert found is not None
        return found[cu[:-1] + torch.from_numpy(starts - begin).to(scores.device)]

    def start_before(self, source: int, b: int, token: int, n: int) -> int:
        """Return the first token of the source's chunk that has ``token``, as of ``n`` tokens."""
        closings = self.closings[source][b]
        ends = closings.ends[: closings.count(n)]
        return closings.start(int(np.searchsorted(ends, token, side="right")))

    def hold(self, begin: Integers, floor: Integers) -> None:
        """Keep only what tokens from ``begin`` on need, and going back to ``floor`` tokens."""
        self.map.begin = np.maximum(self.map.begin, np.minimum(begin, self.map.end))
        if self.map.is_loose:
            self.rows.repack(self.map.repack())
        for streams in self.streams:
            for stream, n in zip(streams, floor.tolist(), strict=True):
                stream.forget(n)

    def truncate(self, b: int, n: int) -> None:
        """Go back to the first ``n`` tokens of sequence b."""
        self.lengths[b] = n
        self.map.truncate(b, n)
        for streams in self.streams:
            streams[b].truncate(n)
        for closings in self.closings:
            closings[b].truncate(n)

    def select(self, index: Integers) -> None:
        """Keep the sequences of ``index``, in that order."""
        self.lengths = self.lengths[index]
        self.rows.select(index, self.map)
        self.map.select(index)
        self.streams = [[streams[b].copy() for b in index] for streams in self.streams]
        self.closings = [[closings[b].copy() for b in index] for closings in self.closings]

    def fork(self) -> Segments:
        """Return the same state on its own."""
        other = Segments(self.policy, 0)
        other.lengths = self.lengths.copy()
        other.map, other.rows = self.map.copy(), self.rows.copy()
        other.streams = [[stream.copy() for stream in streams] for streams in self.streams]
        other.closings = [[one.copy() for one in closings] for closings in self.closings]
        return other


def _offsets(counts: Integers, device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(counts)])).to(device)


def _lines(rule: FixedStride, old: int, new: int) -> Integers:
    """Return the grid lines that tokens old .. new - 1 make known."""
    first = rule.offset or rule.stride
    index = max(0, -(-(old + 1 - first) // rule.stride))
    return np.arange(first + index * rule.stride, new + 1, rule.stride)
