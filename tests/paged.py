"""Packed entries and raw tokens put into a paged cache, with NaN wherever nothing is read."""

import torch


def scatter(x, where, size):
    """Put rows ``x`` at rows ``where`` of a buffer that holds NaN elsewhere."""
    buffer = x.new_full((size, *x.shape[1:]), torch.nan)
    buffer[where] = x
    return buffer


def entry_pages(reads, counts, page_size, seed=0):
    """Draw pages for the first ``counts`` [G, B] entries of each sequence, in any order.

    Return (pages [G, B, n_pages] with -1 in unused slots, number of pages, the entries' rows in the
    packed operands, their rows in the pages).
    """
    generator = torch.Generator().manual_seed(seed)
    needed = -(-counts // page_size)
    total = int(needed.sum()) + 3
    free = torch.randperm(total, generator=generator).tolist()
    pages = torch.full((*counts.shape, int(needed.max()) + 1), -1)
    packed, paged = [], []
    for g, of_view in enumerate(counts.tolist()):
        for b, count in enumerate(of_view):
            own = [free.pop() for _ in range(int(needed[g, b]))]
            pages[g, b, : len(own)] = torch.tensor(own, dtype=torch.int64)
            for i in range(count):
                packed.append(int(reads.cu_entries[g, b]) + i)
                paged.append(own[i // page_size] * page_size + i % page_size)
    return pages, total, torch.tensor(packed).long(), torch.tensor(paged).long()


def cached(x, reads, at, page_size, seed=0):
    """Return what ``decode`` is given for the queries ``at`` of an attend.

    ``x`` holds the attend's operands: q, k, v, entry_k, entry_v, bias, sink (the views joined, v,
    entry_v, bias and sink may be None). Raw rows go to a buffer of another layout.
    """
    cu_q, cu_k = reads.cu_seqlens_q, reads.cu_seqlens_k
    sequence = torch.searchsorted(cu_q, at, right=True) - 1
    n_visible, begin = reads.n_visible[:, at], reads.raw_start[:, at]
    end = at + 1 + (cu_k - cu_q)[1:][sequence]
    B = len(cu_q) - 1
    counts = torch.stack(
        [torch.stack([_most(row[sequence == b]) for b in range(B)]) for row in n_visible]
    )
    pages, total, packed, paged = entry_pages(reads, counts, page_size, seed)

    def to_pages(rows):
        if rows is None:
            return None
        return scatter(rows[packed], paged, total * page_size).unflatten(0, (total, page_size))

    gap = 3 * (sequence + 1)  # NaN rows between sequences
    token = torch.cat(
        [torch.arange(int(a), int(b)) for a, b in zip(begin.amin(0), end, strict=True)]
    )
    shift = torch.repeat_interleave(gap, end - begin.amin(0))
    rows = len(x["k"]) + 3 * (B + 1)

    def to_rows(t):
        return None if t is None else scatter(t[token], token + shift, rows)

    return {
        "q": x["q"][at],
        "k": to_rows(x["k"]),
        "v": to_rows(x["v"]),
        "entry_k": to_pages(x["entry_k"]),
        "entry_v": to_pages(x["entry_v"]),
        "bias": to_pages(x["bias"]),
        "sink": x["sink"],
        "pages": pages,
        "sequence": sequence,
        "n_visible": n_visible,
        "raw_begin": begin + gap,
        "raw_end": end + gap,
    }


def _most(counts):
    return counts.max() if len(counts) else torch.tensor(0)
