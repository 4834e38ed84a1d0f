"""Measure what a segmentation, a model or an endpoint does to tokens of different phase."""

from dynchunk.audit.segmentation import SegmentationReport, report_segmentation, survival

__all__ = ["SegmentationReport", "report_segmentation", "survival"]
