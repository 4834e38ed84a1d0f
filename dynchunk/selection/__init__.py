"""What a query reads of raw chunks: scores of chunks, one file each."""

from dynchunk.selection.quest import chunk_bounds, quest_scores

__all__ = ["chunk_bounds", "quest_scores"]
