"""Scorers: one real number per token, high where a chunk would like to start.

Each declares its ``receptive_field`` R: the score at t reads tokens t-R..t of the sequence and
nothing else (None: unbounded). They add up with weights: ``DelimiterScore.from_bytes() +
0.5 * HashScore(4)``.
"""

from dynchunk.boundaries.scores.base import Score, WeightedSum
from dynchunk.boundaries.scores.delimiter import DelimiterScore
from dynchunk.boundaries.scores.hash import HashScore
from dynchunk.boundaries.scores.keys import KeyChangeScore
from dynchunk.boundaries.scores.similarity import SimilarityScore
from dynchunk.boundaries.scores.surprisal import SurprisalScore

__all__ = [
    "DelimiterScore",
    "HashScore",
    "KeyChangeScore",
    "Score",
    "SimilarityScore",
    "SurprisalScore",
    "WeightedSum",
]
