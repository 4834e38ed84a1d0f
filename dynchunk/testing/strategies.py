"""Hypothesis strategies: scores, token streams, edits, padded batches, rules."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dynchunk._checks import optional_import
from dynchunk.boundaries import BoundaryRule

optional_import("hypothesis", extra="test")

from hypothesis import strategies as st  # noqa: E402 (after the check that names the extra)

#: What scores can look like; "mixed" glues pieces of the others together.
FAMILIES = ("iid", "binary", "constant", "periodic", "ramps", "plateaus", "mixed")


class Edit(NamedTuple):
    """Two token streams that agree to the end from ``p`` in ``before`` and ``q`` in ``after``."""

    kind: str  #: "prefix", "insert", "delete" or "replace"
    before: Tensor
    after: Tensor
    p: int
    q: int


def rules(max_radius: int = 5, ladder: bool | None = None) -> st.SearchStrategy[BoundaryRule]:
    """Rules of all shapes, small enough that a hundred tokens show everything.

    Parameters
    ----------
    max_radius : int
    ladder : bool or None
        None: both.
    """

    @st.composite
    def build(draw: st.DrawFn) -> BoundaryRule:
        radius = draw(st.integers(0, max_radius))
        m = draw(st.integers(1, radius + 1))
        return BoundaryRule(
            radius,
            draw(st.sampled_from([-math.inf, -math.inf, 0.0, 0.4, 1.0])),
            m,
            draw(st.integers(2 * m - 1, 2 * m + 12)),
            draw(st.booleans()) if ladder is None else ladder,
        )

    return build()


def scores(
    min_tokens: int = 0, max_tokens: int = 96, families: tuple[str, ...] = FAMILIES
) -> st.SearchStrategy[Tensor]:
    """Scores [T], float32: distinct, tied, constant, periodic, rising, in steps, infinite.

    Parameters
    ----------
    min_tokens, max_tokens : int
    families : names from ``FAMILIES``
    """

    @st.composite
    def build(draw: st.DrawFn) -> Tensor:
        data = draw(st.binary(min_size=min_tokens, max_size=max_tokens))
        family = draw(st.sampled_from(families))
        return torch.from_numpy(_family(family, np.frombuffer(data, np.uint8), draw))

    return build()


def _family(family: str, data: np.ndarray, draw: st.DrawFn) -> np.ndarray:
    size = len(data)
    unit = data.astype(np.float32) / 255
    if family == "iid":
        return unit + np.linspace(0, 1e-4, size, dtype=np.float32)[np.argsort(data, kind="stable")]
    if family == "binary":
        return (data & 1).astype(np.float32)
    if family == "constant":
        return np.full(size, draw(st.sampled_from([0.0, 1.0, -np.inf, np.inf])), np.float32)
    if family == "periodic":
        period = draw(st.integers(1, 7))
        return np.resize(unit[:period] if size else unit, size).astype(np.float32)
    if family == "ramps":
        slope = np.where(data & 64, 1, -1) * (data & 3)
        return np.cumsum(slope).astype(np.float32) / 8
    if family == "plateaus":
        return np.repeat(unit, 1 + (data & 7))[:size].astype(np.float32)
    pieces = np.array_split(data, draw(st.integers(1, 4)))
    names = st.sampled_from([name for name in FAMILIES if name != "mixed"])
    return np.concatenate([_family(draw(names), piece, draw) for piece in pieces])


def token_streams(
    min_tokens: int = 0, max_tokens: int = 96, vocab: int = 256
) -> st.SearchStrategy[Tensor]:
    """Token ids int64 [T]: arbitrary, from a small alphabet, in runs, repeating."""

    @st.composite
    def build(draw: st.DrawFn) -> Tensor:
        data = draw(st.binary(min_size=min_tokens, max_size=max_tokens))
        ids = np.frombuffer(data, np.uint8).astype(np.int64)
        shape = draw(st.sampled_from(["any", "small", "runs", "repeat"]))
        if shape == "small":
            ids = ids % 3
        elif shape == "runs":
            ids = np.repeat(ids, 1 + ids % 9)[: len(ids)]
        elif shape == "repeat" and len(ids):
            ids = np.resize(ids[: draw(st.integers(1, 9))], len(ids))
        return torch.from_numpy(ids % vocab)

    return build()


def edits(max_tokens: int = 96, vocab: int = 256) -> st.SearchStrategy[Edit]:
    """Pairs of token streams, one an edit of the other."""

    @st.composite
    def build(draw: st.DrawFn) -> Edit:
        tokens = draw(token_streams(max_tokens=max_tokens, vocab=vocab))
        new = draw(token_streams(max_tokens=24, vocab=vocab))
        kind = draw(st.sampled_from(["prefix", "insert", "delete", "replace"]))
        at = 0 if kind == "prefix" else draw(st.integers(0, len(tokens)))
        p = draw(st.integers(at, len(tokens))) if kind in ("delete", "replace") else at
        middle = new[:0] if kind == "delete" else new
        after = torch.cat([tokens[:at], middle, tokens[p:]])
        return Edit(kind, tokens, after, p, at + len(middle))

    return build()


def padded_batches(
    max_rows: int = 4, max_tokens: int = 24, max_pad: int = 5
) -> st.SearchStrategy[tuple[Tensor, Tensor]]:
    """Batches (scores float32 [B, T], mask bool [B, T]), padded with NaN left or right."""

    @st.composite
    def build(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
        rows = draw(st.lists(scores(max_tokens=max_tokens), min_size=1, max_size=max_rows))
        width = max(len(row) for row in rows) + draw(st.integers(0, max_pad))
        x = torch.full((len(rows), width), torch.nan)
        mask = torch.zeros(len(rows), width, dtype=torch.bool)
        for b, row in enumerate(rows):
            begin = draw(st.integers(0, 1)) * (width - len(row))
            x[b, begin : begin + len(row)] = row
            mask[b, begin : begin + len(row)] = True
        return x, mask

    return build()
