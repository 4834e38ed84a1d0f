"""A laboratory: small models that learn to recall facts, and what chunks do to them."""

from dynchunk.lab.evaluate import Evaluation, evaluate
from dynchunk.lab.model import LabModel
from dynchunk.lab.task import RecallBatch, RecallTask, TokenClass
from dynchunk.lab.variants import Variant, make_variant

__all__ = [
    "Evaluation",
    "LabModel",
    "RecallBatch",
    "RecallTask",
    "TokenClass",
    "Variant",
    "evaluate",
    "make_variant",
]
