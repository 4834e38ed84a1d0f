"""Measure what a segmentation, a model or an endpoint does to tokens of different phase."""

from dynchunk.audit.report import PhaseReport, plot_phases
from dynchunk.audit.segmentation import SegmentationReport, report_segmentation, survival
from dynchunk.audit.statistics import (
    GapTest,
    PeriodTest,
    fold,
    gap_test,
    period_test,
    spread_beyond_noise,
    wilson,
)

__all__ = [
    "GapTest",
    "PeriodTest",
    "PhaseReport",
    "SegmentationReport",
    "fold",
    "gap_test",
    "period_test",
    "plot_phases",
    "report_segmentation",
    "spread_beyond_noise",
    "survival",
    "wilson",
]
