"""Scores to chunks: rules (offline and streaming), scorers, calibration, sharing across layers.

A boundary is the FIRST token of a chunk.
"""

from dynchunk.boundaries.rule import BoundaryRule, FixedStride, Rule
from dynchunk.boundaries.stream import Boundary, BoundaryStream, FixedStream

__all__ = [
    "Boundary",
    "BoundaryRule",
    "BoundaryStream",
    "FixedStream",
    "FixedStride",
    "Rule",
]
