"""What a rule does to a text, and what is left of it when tokens are put in front."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dynchunk._checks import optional_import, require
from dynchunk.boundaries import BoundaryRule, FixedStride, Rule, Score
from dynchunk.chunks import Chunks
from dynchunk.packing import TILES, plan_tiles

SHIFTS = range(16)
FILLER = ord("=")  # of the published probe, arXiv 2609.36322


def survival(
    segment: Callable[[Tensor], Chunks],
    tokens: Tensor,
    shifts: Iterable[int] = SHIFTS,
    filler: int = FILLER,
) -> list[float]:
    """Share of a text's chunks that are still there, whole, with filler tokens in front of it.

    Parameters
    ----------
    segment : callable
        Token ids [T] of one sequence -> Chunks.
    tokens : int64 tensor [T], T >= 1
    shifts : numbers of filler tokens
    filler : token id

    Returns
    -------
    list of float
        One per shift, in [0, 1].

    Examples
    --------
    >>> survival(lambda tokens: Chunks.fixed(4, len(tokens)), torch.arange(12), range(5))
    [1.0, 0.0, 0.0, 0.0, 1.0]
    """
    require(len(tokens) > 0, "tokens", "at least one token", tokens)
    base = segment(tokens)
    shares = []
    for k in shifts:
        moved = segment(torch.cat([tokens.new_full((k,), filler), tokens]))
        starts, ends = moved.starts - k, moved.ends - k
        at = torch.searchsorted(starts, base.starts).clamp(max=len(starts) - 1)
        same = (starts[at] == base.starts) & (ends[at] == base.ends)
        shares.append(float(same.double().mean()))
    return shares


@dataclass(frozen=True)
class SegmentationReport:
    """Figures of one text under one rule, beside the fixed stride of the nearest ratio.

    Parameters
    ----------
    chunks : Chunks
        Of the content rule.
    stride : int
        Of the fixed grid.
    rule : BoundaryRule
    utilisation, utilisation_in_order : dict
        Useful / physical rows per tile size; best-fit, and in stream order.
    survival : dict
        "content" and "fixed": see :func:`survival`, one value per shift 0..15.
    """

    chunks: Chunks
    stride: int
    rule: BoundaryRule
    utilisation: dict[int, float]
    utilisation_in_order: dict[int, float]
    survival: dict[str, list[float]]

    def as_dict(self) -> dict[str, Any]:
        """Return what ``dynchunk segment --json`` prints."""
        rule = self.rule.parameters._asdict()
        if math.isinf(rule["threshold"]):
            rule["threshold"] = None  # JSON has no infinity
        return {
            "tokens": self.chunks.num_tokens,
            "chunks": len(self.chunks),
            "ratio": self.chunks.ratio,
            "forced_share": self.chunks.forced_share,
            "stride": self.stride,
            "rule": rule,
            "lengths": torch.bincount(self.chunks.lengths).tolist(),
            "utilisation": {str(tile): share for tile, share in self.utilisation.items()},
            "utilisation_in_order": {
                str(tile): share for tile, share in self.utilisation_in_order.items()
            },
            "survival": self.survival,
        }

    def plot(self, path: str | Path) -> None:
        """Draw chunk lengths and survival to a file (needs matplotlib, extra ``audit``)."""
        matplotlib = optional_import("matplotlib", extra="audit")
        matplotlib.use("Agg")
        from matplotlib import pyplot as plt

        figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
        lengths = torch.bincount(self.chunks.lengths)
        left.bar(range(len(lengths)), lengths.tolist(), color="#3b6ea8")
        left.axvline(self.stride, color="#c2532f", linestyle="--", label=f"fixed {self.stride}")
        left.set(xlabel="tokens in a chunk", ylabel="chunks")
        left.set_title(f"lengths (ratio {self.chunks.ratio:.2f})")
        left.xaxis.get_major_locator().set_params(integer=True)
        left.legend(frameon=False)
        content, fixed = self.survival["content"], self.survival["fixed"]
        right.plot(content, "o-", color="#3b6ea8", label="content boundaries")
        right.plot(fixed, "s--", color="#c2532f", label=f"fixed stride {self.stride}")
        right.set(xlabel="tokens put in front", ylabel="share of chunks unchanged")
        right.set(ylim=(-0.03, 1.06), title="what survives a shift")
        right.legend(framealpha=1, loc="center")
        figure.savefig(path, dpi=150)
        plt.close(figure)


def report_segmentation(
    tokens: Tensor, score: Score, rule: BoundaryRule, filler: int = FILLER
) -> SegmentationReport:
    """Cut ``tokens`` int64 [T] by ``rule`` on ``score`` and by a fixed stride of the same ratio.

    Examples
    --------
    >>> from dynchunk import BoundaryRule, HashScore
    >>> text = torch.tensor(list(b"The same words, the same chunks, wherever they stand. " * 9))
    >>> report = report_segmentation(text, HashScore(3), BoundaryRule(radius=1, max_length=8))
    >>> report.survival["content"][1] > 0.9, report.survival["fixed"][1]
    (True, 0.0)
    """
    chunks = rule(score(tokens))
    require(bool(chunks.is_closed.any()), "tokens", "text of at least one closed chunk", tokens)
    stride = max(1, round(chunks.ratio))

    def share_kept(rule: Rule) -> list[float]:
        return survival(lambda x: rule(score(x)), tokens, SHIFTS, filler)

    return SegmentationReport(
        chunks,
        stride,
        rule,
        {tile: plan_tiles(chunks, tile, "best_fit").utilisation for tile in TILES},
        {tile: plan_tiles(chunks, tile, "stream").utilisation for tile in TILES},
        {"content": share_kept(rule), "fixed": share_kept(FixedStride(stride))},
    )
