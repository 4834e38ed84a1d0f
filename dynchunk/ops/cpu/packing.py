"""Where each chunk goes in tiles, in numba: next-fit in order, or best-fit among open tiles."""

from __future__ import annotations

import numpy as np

from dynchunk.ops.cpu import jit


@jit
def place_in_order(lengths, tile):
    """First row of each chunk int64 [N], and the number of tiles; chunks keep their order."""
    rows = np.empty(lengths.size, np.int64)
    row = 0  # next free row
    for i in range(lengths.size):
        free = -row % tile  # rows left in the tile that is open
        if lengths[i] > free:
            row += free
        rows[i] = row
        row += lengths[i]
        if lengths[i] > tile:
            row += -row % tile  # a long chunk owns its tiles whole
    return rows, (row + tile - 1) // tile


@jit
def place_best_fit(lengths, tile, window, shortest):
    """Like :func:`place_in_order`, each chunk where it leaves least in one of ``window`` tiles.

    A rest of less than ``shortest`` rows, which is likely to stay empty, is avoided: an untouched
    tile goes before it. Where no open tile takes the chunk, the fullest makes room for a new one.
    """
    rows = np.empty(lengths.size, np.int64)
    open_tile = np.empty(window, np.int64)
    free = np.full(window, tile)  # a full count means that no tile is open in this place
    tiles = 0
    for i in range(lengths.size):
        n = lengths[i]
        if n >= tile:
            rows[i] = tiles * tile
            tiles += (n + tile - 1) // tile
            continue
        best = fullest = 0
        least = 3 * tile
        for j in range(window):
            if free[j] < free[fullest]:
                fullest = j
            rest = free[j] - n
            cost = rest if rest == 0 or rest >= shortest else rest + tile
            if rest >= 0 and cost < least:
                best, least = j, cost
        if least == 3 * tile:
            best = fullest
            free[best] = tile
        if free[best] == tile:
            open_tile[best] = tiles
            tiles += 1
        rows[i] = open_tile[best] * tile + tile - free[best]
        free[best] -= n
        if free[best] == 0:
            free[best] = tile
    return rows, tiles
