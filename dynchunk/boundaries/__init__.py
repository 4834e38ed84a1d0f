"""Scores to chunks: rules (offline and streaming), scorers, calibration, sharing across layers.

A boundary is the FIRST token of a chunk.
"""

from dynchunk.boundaries.calibration import calibrate
from dynchunk.boundaries.rule import BoundaryRule, FixedStride, Rule
from dynchunk.boundaries.scores import (
    DelimiterScore,
    HashScore,
    KeyChangeScore,
    Score,
    SimilarityScore,
    SurprisalScore,
    WeightedSum,
)
from dynchunk.boundaries.sharing import Agreement, SharePlan, agreement
from dynchunk.boundaries.stream import Boundary, BoundaryStream, FixedStream

__all__ = [
    "Agreement",
    "Boundary",
    "BoundaryRule",
    "BoundaryStream",
    "DelimiterScore",
    "FixedStream",
    "FixedStride",
    "HashScore",
    "KeyChangeScore",
    "Rule",
    "Score",
    "SharePlan",
    "SimilarityScore",
    "SurprisalScore",
    "WeightedSum",
    "agreement",
    "calibrate",
]
