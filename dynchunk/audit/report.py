"""What an audit says of a model: accuracy by phase, and whether chance explains its gap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynchunk._checks import optional_import
from dynchunk.audit.statistics import GapTest, PeriodTest

#: Gap above which a significant dependence on phase is called a defect.
MAX_GAP = 0.10


@dataclass(frozen=True, slots=True)
class PhaseReport:
    """Figures of one target.

    Parameters
    ----------
    phases : GapTest
        By position mod 24, or another multiple of the strides in question.
    period : PeriodTest
    flip_rate : float
        Share of answers that a few tokens in front change.
    ratio : float
        Tokens per entry, measured.

    Examples
    --------
    >>> phases = GapTest((0, 1), (90, 50), (100, 100), null95=0.1, p=0.001)
    >>> report = PhaseReport(phases, PeriodTest(2, 0.001, 0.9), 0.2, 4.0)
    >>> report.is_defect(), report.is_defect(max_gap=0.5), report.verdict()
    (True, False, 'depends on phase')
    """

    phases: GapTest
    period: PeriodTest
    flip_rate: float
    ratio: float

    def is_defect(self, max_gap: float = MAX_GAP) -> bool:
        """Whether the gap is larger than ``max_gap`` and larger than chance makes it."""
        return self.phases.is_significant and self.phases.gap > max_gap

    def verdict(self, max_gap: float = MAX_GAP) -> str:
        """Return one of three phrases."""
        if not self.phases.is_significant:
            return "no dependence on phase"
        return "depends on phase" if self.is_defect(max_gap) else "small dependence on phase"

    def as_dict(self, max_gap: float = MAX_GAP) -> dict[str, Any]:
        """Return what ``dynchunk audit --json`` prints for a target."""
        return {
            "accuracy": self.phases.accuracy,
            "trials": list(self.phases.trials),
            "mean": self.phases.mean,
            "worst": min(self.phases.accuracy),
            "gap": self.phases.gap,
            "null95": self.phases.null95,
            "p": self.phases.p,
            "period": self.period.period,
            "period_p": self.period.p,
            "flip_rate": self.flip_rate,
            "ratio": self.ratio,
            "verdict": self.verdict(max_gap),
        }


def plot_phases(
    reports: Mapping[str, PhaseReport], path: str | Path, max_gap: float = MAX_GAP
) -> None:
    """Draw accuracy by phase with 95 % intervals, a panel per target, to a file.

    Needs matplotlib (extra ``audit``).
    """
    matplotlib = optional_import("matplotlib", extra="audit")
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(
        len(reports), 1, figsize=(7, 1.5 * len(reports) + 0.8), sharex=True, sharey=True,
        squeeze=False, layout="constrained",
    )  # fmt: skip
    for panel, (name, report) in zip(panels[:, 0], reports.items(), strict=True):
        test, color = report.phases, "#c2532f" if report.is_defect(max_gap) else "#3b6ea8"
        low, high = zip(*test.intervals, strict=True)
        panel.fill_between(test.groups, low, high, color=color, alpha=0.25, linewidth=0)
        panel.plot(test.groups, test.accuracy, "o-", color=color, markersize=3.5)
        period = f", period {report.period.period}" if report.period.period else ""
        panel.set_title(
            f"{name}: ratio {report.ratio:.2f}, gap {100 * test.gap:.1f} points "
            f"(chance {100 * test.null95:.1f}){period}",
            fontsize=9,
            loc="left",
        )
        panel.set(ylim=(-0.03, 1.03), ylabel="recall")
    panels[-1, 0].set_xlabel(f"position of the fact mod {len(test.groups)}")
    figure.savefig(path, dpi=150)
    plt.close(figure)
