"""Operations over chunks as loops over single rows, and random layouts to try them on."""

import math
from itertools import pairwise

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st

from dynchunk.chunks import Chunks

#: Half of the profile's examples: every example runs a loop.
few = settings(max_examples=max(settings.default.max_examples // 2, 1), deadline=None)

#: Largest absolute difference to the oracle, by dtype; 16 bits are measured by RMS ratio.
ATOL = {torch.float64: 1e-12, torch.float32: 1e-5}


@st.composite
def layouts(draw, max_tokens=12, max_sequences=3, n_views=1):
    """Views of the same sequences, some empty; boundaries anywhere, known at once or late."""
    sizes = draw(st.lists(st.integers(0, max_tokens), min_size=1, max_size=max_sequences))
    cu = np.cumsum([0, *sizes])
    views = [_layout(draw, cu.tolist()) for _ in range(n_views)]
    return views[0] if n_views == 1 else views


def _layout(draw, cu):
    at, known = [], []
    for begin, end in pairwise(cu):
        latest = begin
        for t in range(begin + 1, end):
            if draw(st.integers(0, 2)) == 0:
                latest = max(latest, t - 1 + draw(st.integers(0, 3)))
                if latest < end:
                    at.append(t)
                    known.append(latest)
    known = torch.tensor(known, dtype=torch.int64)
    return Chunks.from_boundaries(at, cu, known, close_last=draw(st.booleans())).check()


def random_layout(cu, mean=4, seed=0):
    """Chunks of 1 to 2 mean - 1 tokens."""
    generator = torch.Generator().manual_seed(seed)
    return Chunks.from_boundaries(torch.rand(cu[-1], generator=generator) < 1 / mean, cu)


def normal(*shape, dtype=torch.float64, seed=0, grad=False):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
    return x.requires_grad_(grad)


def assert_close(found, expected, dtype=None):
    """Compare with a float64 array or tensor at the tolerance of ``dtype`` (default: found's)."""
    dtype = dtype or found.dtype
    expected = torch.as_tensor(np.asarray(expected)).reshape(found.shape)
    found = found.detach().double()
    if dtype in (torch.bfloat16, torch.float16):
        assert (found - expected).norm() <= 5e-3 * expected.norm()
    else:
        torch.testing.assert_close(found, expected, rtol=ATOL[dtype], atol=ATOL[dtype])


def pool(values, chunks, gate=None, slot_bias=None, overlap=False):
    """Entries [N, H, D] from values [T, H, D or 2D] and slot_bias [S, D or 2D]."""
    c = values.double().numpy()
    z = np.zeros_like(c) if gate is None else gate.double().numpy()
    p = np.zeros((1, c.shape[-1])) if slot_bias is None else slot_bias.double().numpy()
    width = c.shape[-1] // 2 if overlap else c.shape[-1]
    entries = np.zeros((len(chunks), c.shape[1], width))
    starts, ends, cu = chunks.starts.tolist(), chunks.ends.tolist(), chunks.cu_seqlens.tolist()
    for i in range(len(chunks)):
        if not chunks.is_closed[i]:
            continue
        rows = [(t, starts[i], width if overlap else 0) for t in range(starts[i], ends[i])]
        if overlap and starts[i] not in cu:
            rows += [(t, starts[i - 1], 0) for t in range(starts[i - 1], ends[i - 1])]
        for h in range(c.shape[1]):
            for d in range(width):
                logits = [z[t, h, o + d] + p[min(t - s, len(p) - 1), o + d] for t, s, o in rows]
                weights = [math.exp(logit - max(logits)) for logit in logits]
                total = sum(w * c[t, h, o + d] for w, (t, _, o) in zip(weights, rows, strict=True))
                entries[i, h, d] = total / sum(weights)
    return entries


def entries_and_tokens(chunks, t, window, cover):
    """Return the rows of the entries and of the raw tokens that the query at token t reads."""
    begin, first, n = sequence_of(chunks, t)
    starts, ends = chunks.starts.tolist(), chunks.ends.tolist()
    seen = [i for i in range(first, first + n) if int(chunks.visible_from[i]) <= t]
    if cover == "window":
        return seen, list(range(max(begin, t - window + 1), t + 1))
    seen = [i for i in seen if ends[i] - 1 <= t - window]
    covered = {j for i in seen for j in range(starts[i], ends[i])}
    return seen, [j for j in range(begin, t + 1) if j not in covered]


def sequence_of(chunks, t):
    """Return (first token, first chunk, chunks) of the sequence of token t."""
    for b, (begin, end) in enumerate(pairwise(chunks.cu_seqlens.tolist())):
        if begin <= t < end:
            first, last = chunks.cu_chunks[b : b + 2].tolist()
            return begin, first, last - first
    raise AssertionError(t)


def softmax_of(q, rows, sink, scale):
    """Return (out, lse) of one query and head over rows (key, value, bias)."""
    logits = [scale * float(q @ key) + bias for key, _, bias in rows]
    terms = logits + ([] if sink is None else [sink])
    if not terms or max(terms) == -math.inf:
        return 0.0, -math.inf
    lse = max(terms) + math.log(sum(math.exp(x - max(terms)) for x in terms))
    out = sum(math.exp(x - lse) * value for x, (_, value, _) in zip(logits, rows, strict=True))
    return out, lse


def attend(q, k, v, entry_k, entry_v, views, rows_of, bias=None, sink=None, scale=None):
    """Attend with ``rows_of(view, t, kv_head)`` -> (entry rows of the view, raw rows).

    entry_k, entry_v and bias [N_g, H_kv / G, ..] are lists with one item for each view.
    """
    n_queries, n_heads, width = q.shape
    n_kv, per_view = k.shape[1], k.shape[1] // len(views)
    q, k = q.double().numpy(), k.double().numpy()
    entry_k = [x.double().numpy() for x in entry_k]
    bias = None if bias is None else [x.double().numpy() for x in bias]
    v = k if v is None else v.double().numpy()
    entry_v = entry_k if entry_v is None else [x.double().numpy() for x in entry_v]
    out = np.zeros((n_queries, n_heads, v.shape[2]))
    lse = np.zeros((n_queries, n_heads))
    for t in range(n_queries):
        for h in range(n_heads):
            kv = h // (n_heads // n_kv)
            g, own = kv // per_view, kv % per_view
            entries, tokens = rows_of(views[g], t, kv)
            rows = [
                (entry_k[g][i, own], entry_v[g][i, own], 0.0 if bias is None else bias[g][i, own])
                for i in entries
            ] + [(k[j, kv], v[j, kv], 0.0) for j in tokens]
            logit = None if sink is None else float(sink[h])
            out[t, h], lse[t, h] = softmax_of(
                q[t, h], rows, logit, width**-0.5 if scale is None else scale
            )
    return out, lse


def index_topk(q, k, weights, chunks, topk):
    """Return (scores, indices) as lists of lists, without padding."""
    scores, indices = [], []
    for t in range(len(q)):
        _, first, _ = sequence_of(chunks, t)
        seen, _ = entries_and_tokens(chunks, t, 0, "window")
        found = []
        for i in seen:
            dots = [float(q[t, h] @ k[i]) for h in range(q.shape[1])]
            score = sum(float(weights[t, h]) * max(dot, 0.0) for h, dot in enumerate(dots))
            found.append((-score * q.shape[2] ** -0.5, i - first))
        found = sorted(found)[:topk]
        scores.append([-score for score, _ in found])
        indices.append([i for _, i in found])
    return scores, indices
