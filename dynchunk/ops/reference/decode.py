"""Attention over a paged cache: query by query, as the attends over what it reads."""

from __future__ import annotations

import torch
from torch import Tensor

from dynchunk.ops._attention import Operands, fake_attended
from dynchunk.ops.reference import _softmax
from dynchunk.ops.reference._softmax import Mask, Part


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    entry_k: Tensor,
    entry_v: Tensor | None,
    bias: Tensor | None,
    sink: Tensor | None,
    pages: Tensor,
    sequence: Tensor,
    n_visible: Tensor,
    raw_begin: Tensor,
    raw_end: Tensor,
    indices: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return (out, lse)."""
    x = Operands(q, k, v, entry_k, entry_v, bias, sink)
    out, lse = fake_attended(*x)
    heads, kv_heads = q.shape[1] // len(pages), k.shape[1] // len(pages)
    for g, of_view in enumerate(pages):
        of_head, of_kv_head = (slice(g * n, (g + 1) * n) for n in (heads, kv_heads))
        for s, b in enumerate(sequence.tolist()):
            entries = entry_rows(of_view[b], n_visible[g, s], entry_k.shape[1])
            begin, end = int(raw_begin[g, s]), int(raw_end[s])
            tokens = torch.arange(begin, max(begin, end), device=q.device)
            read = _read(x, s, entries, tokens, of_head, of_kv_head)
            lists = None
            if indices is not None:
                lists = indices[s : s + 1, of_kv_head if indices.shape[1] > 1 else slice(None)]
            sizes = (1, len(tokens), len(entries[0]), heads, kv_heads)
            part = Part(0, 0, *(slice(0, size) for size in sizes))
            found = _softmax.attend(read, iter([part]), _mask(lists, q.device), scale)
            out[s, of_head], lse[s, of_head] = (t[0] for t in found)
    return out, lse


def entry_rows(pages: Tensor, count: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Return the pages of a sequence's first entries, and their rows there."""
    i = torch.arange(int(count), device=pages.device)
    return pages[i // page_size].long(), i % page_size


def _read(
    x: Operands,
    s: int,
    entries: tuple[Tensor, Tensor],
    tokens: Tensor,
    of_head: slice,
    of_kv_head: slice,
) -> Operands:
    """Return what query s reads in one view."""
    return Operands(
        x.q[s : s + 1, of_head],
        x.k[tokens, of_kv_head],
        None if x.v is None else x.v[tokens, of_kv_head],
        x.entry_k[entries],
        None if x.entry_v is None else x.entry_v[entries],
        None if x.bias is None else x.bias[entries],
        None if x.sink is None else x.sink[of_head],
    )


def _mask(lists: Tensor | None, device: torch.device) -> Mask:
    def of(part: Part) -> Tensor:
        tokens, entries = part.tokens.stop, part.entries.stop
        if lists is None:
            return torch.ones(1, 1, entries + tokens, dtype=torch.bool, device=device)
        listed = _softmax.listed_mask(part, lists, entries)
        return torch.nn.functional.pad(listed, (0, tokens), value=True)

    return of
