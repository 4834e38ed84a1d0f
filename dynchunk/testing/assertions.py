"""Assertions on a user's own segmenter, stream, compressor or attention."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from dynchunk._checks import describe, require
from dynchunk.chunks import Chunks

_WORDS = (
    "a key value store holds of the in and to is it that for on with as was chunk token boundary "
    "attention model entry window where each other long short length follows content position"
).split()

#: The filler of the published probe (arXiv 2609.36322): a run of "=".
FILLER = ord("=")


def sample_text(tokens: int = 512, seed: int = 0) -> Tensor:
    """Return text as byte tokens, int64 [tokens]: words, sentences, lines and numbers.

    Examples
    --------
    >>> bytes(sample_text(24).tolist())
    b'Each value as content fo'
    """
    rng = random.Random(seed)
    text = ""
    while len(text) < tokens:
        words = [rng.choice(_WORDS) for _ in range(rng.randint(3, 12))]
        if rng.random() < 0.3:
            words.append(str(rng.randint(0, 999)))
        text += " ".join(words).capitalize() + rng.choice([". ", ". ", ", ", ".\n", ":\n\n    "])
    return torch.tensor(list(text[:tokens].encode()))


class _Stream(Protocol):
    def push(self, scores: Tensor) -> Sequence[tuple[int, int, Any]]: ...


class StreamingRule(Protocol):
    """What :func:`assert_streaming_equals_offline` tests: a rule that also runs as a stream."""

    def __call__(self, scores: Tensor) -> Chunks:
        """Cut all scores at once."""

    def stream(self) -> _Stream:
        """Return an object whose ``push(scores)`` returns (position, confirmed_at, kind)s."""


def assert_resynchronises(
    segment: Callable[[Tensor], Chunks],
    tokens: Tensor | None = None,
    *,
    prefixes: Iterable[int] = range(1, 17),
    filler: int = FILLER,
    context: int = 16,
    within: int | None = None,
) -> None:
    """Assert that a prefix of any length changes chunks only up to some boundary after it.

    For every prefix length the tokens are cut with that many filler tokens in front. From the
    first boundary that both cuts have at or after token ``context``, all chunks must agree, and be
    closed at the same tokens.

    Parameters
    ----------
    segment : callable
        Token ids [T] of one sequence -> Chunks.
    tokens : int64 tensor [T], optional
        Default: :func:`sample_text`.
    prefixes : lengths to try
    filler : token id in front
    context : int
        How far back your boundaries look (radius + receptive field for a ``BoundaryRule``).
    within : int, optional
        Where agreement must have begun. Default: half of the tokens.

    Raises
    ------
    AssertionError
        Naming the prefix length and the first chunk that differs.

    Examples
    --------
    >>> from dynchunk import BoundaryRule, HashScore
    >>> rule, score = BoundaryRule(radius=2, max_length=16), HashScore(3)
    >>> assert_resynchronises(lambda tokens: rule(score(tokens)))
    >>> assert_resynchronises(lambda tokens: Chunks.fixed(4, len(tokens)))
    Traceback (most recent call last):
    AssertionError: prefix of 1 token: no common boundary in tokens 16..256 of the text ...
    """
    tokens = sample_text() if tokens is None else tokens
    within = len(tokens) // 2 if within is None else within
    base = segment(tokens)
    for k in prefixes:
        chunks = segment(_with_prefix(tokens, k, filler))
        first = _first_common(base.starts, chunks.starts - k, context, within, k)
        ours, theirs = base.starts >= first, chunks.starts - k >= first
        moved = torch.where(chunks.is_closed, chunks.visible_from - k, chunks.visible_from)
        _assert_same("starts", k, base.starts[ours], chunks.starts[theirs] - k)
        _assert_same("ends", k, base.ends[ours], chunks.ends[theirs] - k)
        _assert_same("visible_from", k, base.visible_from[ours], moved[theirs])


def assert_phase_invariant(
    compress: Callable[[Tensor], tuple[Tensor, Tensor | Chunks]],
    tokens: Tensor | None = None,
    *,
    prefixes: Iterable[int] = range(1, 17),
    filler: int = FILLER,
    context: int = 16,
    within: int | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
) -> None:
    """Assert that entries do not depend on how many tokens stand in front of the text.

    For every prefix length the tokens are compressed with that many filler tokens in front. From
    the first boundary that both have at or after token ``context``, all entries must be equal.
    Compare entries before the rotary embedding: it turns them by their position, as it should.

    Parameters
    ----------
    compress : callable
        Token ids [T] of one sequence -> (entries [N, ...], their first tokens [N], or Chunks).
    rtol, atol : float
        Tolerance on the entries; exact by default.
    tokens, prefixes, filler, context, within
        As for :func:`assert_resynchronises`.

    Raises
    ------
    AssertionError
        Naming the prefix length and the first entry that differs.
    """
    tokens = sample_text() if tokens is None else tokens
    within = len(tokens) // 2 if within is None else within
    base, base_starts = _entries(compress(tokens))
    for k in prefixes:
        entries, starts = _entries(compress(_with_prefix(tokens, k, filler)))
        first = _first_common(base_starts, starts - k, context, within, k)
        ours, theirs = base_starts >= first, starts - k >= first
        _assert_same("starts", k, base_starts[ours], starts[theirs] - k)
        equal = torch.isclose(entries[theirs], base[ours], rtol=rtol, atol=atol, equal_nan=True)
        wrong = ~equal.flatten(1).all(1) if equal.ndim > 1 else ~equal
        if bool(wrong.any()):
            at = int(base_starts[ours][wrong][0])
            raise AssertionError(
                f"{_prefix(k)}: the entry of the chunk that starts at token {at} of the text "
                f"differs, and {int(wrong.sum())} of {len(wrong)} entries do"
            )


def assert_streaming_equals_offline(
    rule: StreamingRule,
    scores: Tensor,
    splits: Iterable[Sequence[int]] | None = None,
) -> None:
    """Assert that scores in pieces give the offline boundaries, each when its time has come.

    Parameters
    ----------
    rule : StreamingRule
        Called with all scores, and as ``rule.stream().push(piece)``.
    scores : floating tensor [T]
    splits : sizes of the pieces, several ways
        Default: one by one, all at once, and pieces of 1, 2, 3, ..

    Raises
    ------
    AssertionError
        A boundary is missing, wrong, early or late; the message names the split.
    """
    offline = rule(scores)
    closed = offline.is_closed
    expected = list(
        zip(offline.ends[closed].tolist(), offline.visible_from[closed].tolist(), strict=True)
    )
    for sizes in _default_splits(len(scores)) if splits is None else splits:
        require(sum(sizes) == len(scores), "splits", f"sizes that sum to {len(scores)}", sizes)
        stream = rule.stream()
        got = []
        arrived = 0
        for size in sizes:
            found = stream.push(scores[arrived : arrived + size])
            for position, confirmed_at, _ in found:
                if not arrived <= confirmed_at < arrived + size:
                    raise AssertionError(
                        f"split {describe(sizes)}: boundary {position}, confirmed at "
                        f"{confirmed_at}, came with tokens {arrived}..{arrived + size - 1}"
                    )
            got += [(position, confirmed_at) for position, confirmed_at, _ in found if position]
            arrived += size
        if got != expected:
            odd = sorted(set(got) ^ set(expected))
            raise AssertionError(
                f"split {describe(sizes)}: (position, confirmed at) {odd[:4]} on one side only"
            )


def assert_causal(
    function: Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    positions: Iterable[int] | None = None,
    atol: float = 0.0,
) -> None:
    """Assert that no token changes an earlier output.

    Parameters
    ----------
    function : callable
        Tokens or vectors [T, ...] of one sequence -> outputs [T, ...].
    x : tensor [T, ...]
    positions : tokens from which on to replace ``x``
        Default: all.
    atol : float
        Exact by default.

    Examples
    --------
    >>> assert_causal(lambda x: x.cumsum(0), torch.arange(5))
    >>> assert_causal(lambda x: x + x.sum(), torch.arange(5))
    Traceback (most recent call last):
    AssertionError: tokens from 1 on change the output at 0
    """
    base = function(x)
    generator = torch.Generator().manual_seed(0)
    for t in range(1, len(x)) if positions is None else positions:
        changed = x.clone()
        changed[t:] = _other(x[t:], x, generator)
        differs = ~torch.isclose(function(changed)[:t], base[:t], rtol=0, atol=atol, equal_nan=True)
        if bool(differs.any()):
            first = int(differs.nonzero()[0, 0])
            raise AssertionError(f"tokens from {t} on change the output at {first}")


def assert_padding_inert(
    function: Callable[[Tensor, Tensor], Tensor],
    rows: Sequence[Tensor],
    *,
    pads: Iterable[int] = range(6),
    atol: float = 0.0,
) -> None:
    """Assert that padding, on either side and whatever it holds, changes no row of a batch.

    Parameters
    ----------
    function : callable
        (x [B, T, ...], mask bool [B, T]) -> outputs [B, T, ...].
    rows : sequence of tensors [T_b, ...]
        Rows of unequal lengths. Floating padding is NaN and 1e9; token ids are padded with the
        largest id of the rows.
    pads : columns of padding beyond the longest row
    atol : float
        Against each row alone; exact by default.

    Examples
    --------
    >>> rows = [torch.ones(3), torch.ones(5)]
    >>> assert_padding_inert(lambda x, mask: torch.where(mask, x, 0).cumsum(1), rows)
    >>> assert_padding_inert(lambda x, mask: x.cumsum(1), rows)
    Traceback (most recent call last):
    AssertionError: row 0 with 2 tokens of left padding (nan) differs from the row alone
    """
    alone = [function(row[None], torch.ones(1, len(row), dtype=torch.bool))[0] for row in rows]
    longest = max(len(row) for row in rows)
    floating = rows[0].is_floating_point()
    poisons = [float("nan"), 1e9] if floating else [max(int(row.max()) for row in rows)]
    for extra in pads:
        for side in ("left", "right"):
            for poison in poisons:
                x, mask = _pad(rows, longest + extra, side, poison)
                out = function(x, mask)
                for b, expected in enumerate(alone):
                    same = torch.isclose(out[b][mask[b]], expected, rtol=0, atol=atol)
                    if not bool(same.all()):
                        missing = longest + extra - len(rows[b])
                        raise AssertionError(
                            f"row {b} with {missing} tokens of {side} padding ({poison}) differs "
                            "from the row alone"
                        )


def _with_prefix(tokens: Tensor, k: int, filler: int) -> Tensor:
    return torch.cat([tokens.new_full((k,), filler), tokens])


def _prefix(k: int) -> str:
    return f"prefix of {k} token{'s' * (k != 1)}"


def _first_common(a: Tensor, b: Tensor, context: int, within: int, k: int) -> int:
    common = a[torch.isin(a, b) & (a >= context)]
    if len(common) == 0 or int(common[0]) > within:
        raise AssertionError(
            f"{_prefix(k)}: no common boundary in tokens {context}..{within} of the text "
            f"({int(((a >= context) & (a <= within)).sum())} boundaries without the prefix, "
            f"{int(((b >= context) & (b <= within)).sum())} with it)"
        )
    return int(common[0])


def _assert_same(name: str, k: int, ours: Tensor, theirs: Tensor) -> None:
    if not torch.equal(ours, theirs):
        odd = sorted(set(ours.tolist()) ^ set(theirs.tolist()))
        raise AssertionError(f"{_prefix(k)}: {name} differ after a common boundary, at {odd[:4]}")


def _entries(result: tuple[Tensor, Tensor | Chunks]) -> tuple[Tensor, Tensor]:
    entries, where = result
    starts = where.starts if isinstance(where, Chunks) else where
    require(
        len(entries) == len(starts), "compress", f"one start per entry ({len(entries)})", starts
    )
    return entries, starts


def _default_splits(total: int) -> list[list[int]]:
    growing: list[int] = []
    while sum(growing) < total:
        growing.append(min(len(growing) + 1, total - sum(growing)))
    return [[1] * total, [total], growing]


def _other(x: Tensor, like: Tensor, generator: torch.Generator) -> Tensor:
    """Other values of the same kind: random numbers, or token ids that all differ."""
    if x.is_floating_point():
        return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
    low, high = int(like.min()), int(like.max())
    return torch.where(x < high, x + 1, low)


def _pad(rows: Sequence[Tensor], width: int, side: str, poison: float) -> tuple[Tensor, Tensor]:
    x = rows[0].new_full((len(rows), width, *rows[0].shape[1:]), poison)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for b, row in enumerate(rows):
        begin = width - len(row) if side == "left" else 0
        x[b, begin : begin + len(row)] = row
        mask[b, begin : begin + len(row)] = True
    return x, mask
