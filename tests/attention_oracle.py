"""Policies to try every module on, and ChunkedAttention as a loop over queries, heads and rows."""

import math

import numpy as np
import ops_oracle as oracle
import torch

from dynchunk.attention import (
    AsScored,
    GatedPool,
    Hash,
    Learned,
    MeanPool,
    Midpoints,
    Policy,
    Rescored,
    Rope,
    Router,
    Shifted,
    TokenClasses,
    TopK,
)
from dynchunk.boundaries import BoundaryRule, FixedStride

VOCAB = 24
LOCAL_MAXIMA = BoundaryRule(1, max_length=5)
THRESHOLD = BoundaryRule(0, threshold=0.5, max_length=6)
HALF = Rope(fraction=0.5)

#: Every kind of policy, small. A new kind joins here and so meets every test.
POLICIES = {
    "full": Policy(window=None, sink=False, rope=HALF),
    "sliding": Policy(window=4, rope=HALF),
    "fixed": Policy(FixedStride(3), window=4, rope=HALF),
    "fixed-odd-no-sink": Policy(FixedStride(5), window=5, sink=False),
    "fixed-staggered": Policy(FixedStride(4), views=(AsScored(), Shifted(2)), window=4, rope=HALF),
    "overlap": Policy(FixedStride(3), reduction=GatedPool(overlap=True), window=4, rope=HALF),
    "plain-gate": Policy(
        FixedStride(2), reduction=GatedPool(slot_bias=False, norm=False), window=3, rope=None
    ),
    "mean": Policy(FixedStride(3), reduction=MeanPool(), window=4, rope=HALF),
    "mean-own": Policy(
        FixedStride(3), reduction=MeanPool(own=True, norm=True, log_length=False), window=4
    ),
    "tail": Policy(FixedStride(4), window=2, cover="tail", rope=HALF),
    "top-2": Policy(FixedStride(2), selection=TopK(2, heads=2, dim=4), window=3, rope=HALF),
    "top-2-overlap-views": Policy(
        LOCAL_MAXIMA,
        Hash(2),
        views=(AsScored(), Midpoints()),
        reduction=GatedPool(overlap=True),
        selection=TopK(2, heads=2, dim=4),
        window=12,
        rope=HALF,
    ),
    "hash-moved": Policy(LOCAL_MAXIMA, Hash(2), views=(AsScored(), Shifted(1)), window=8),
    "hash-rescored": Policy(
        LOCAL_MAXIMA, Hash(2), views=(AsScored(), Rescored(Hash(2, seed=1))), window=8, rope=HALF
    ),
    "classes": Policy(THRESHOLD, TokenClasses((1, 2, 3, 4, 5)), window=8, rope=HALF),
    "learned": Policy(
        LOCAL_MAXIMA, Learned(1), views=(AsScored(), Midpoints()), window=10, rope=HALF
    ),
    "learned-straight-through": Policy(
        LOCAL_MAXIMA, Learned(0, credit="straight_through"), window=8, rope=HALF
    ),
    "router": Policy(THRESHOLD, Router(3.0), window=8, rope=HALF),
}

#: (heads, kv_heads, shared_kv): MQA with K = V, MQA, GQA.
HEADS = {"shared": (2, 1, True), "mqa": (2, 1, False), "gqa": (4, 2, False)}


def numpy_of(x):
    return x.detach().double().numpy()


def rms_norm(x, norm):
    if norm is None:
        return x
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * numpy_of(norm.weight)


def rotate(x, position, rope, sign=1.0):
    """Rotate one vector as complex numbers."""
    if rope is None:
        return x
    dims = int(len(x) * rope.fraction)
    pairs = x[len(x) - dims :].reshape(-1, 2) @ np.array([1, 1j])
    speed = np.array([rope.theta ** (-2 * i / dims) for i in range(dims // 2)])
    turned = pairs * np.exp(1j * sign * position * speed)
    return np.concatenate([x[: len(x) - dims], np.stack([turned.real, turned.imag], -1).ravel()])


def entries_of(compressor, x, views, reduction):
    """Entries of each view, before RoPE."""
    heads = compressor.heads // len(views)

    def project(linear):
        return (x @ linear.weight.detach().double().T).reshape(len(x), compressor.heads, -1)

    values, gate, bias = project(compressor.kv_proj), None, compressor.slot_bias
    if compressor.gate_proj is not None:
        gate = project(compressor.gate_proj)
    entries = []
    for g, view in enumerate(views):
        pooled = [
            oracle.pool(
                values[:, [h]],
                view,
                None if gate is None else gate[:, [h]],
                None if bias is None else bias.detach()[:, h],
                overlap=getattr(reduction, "overlap", False),
            )
            for h in range(g * heads, (g + 1) * heads)
        ]
        entries.append(rms_norm(np.concatenate(pooled, 1), compressor.norm))
    return entries


def chosen(indexer, x, views, reduction):
    """The entries that each query reads in each view, as sets counted from the sequence's first."""
    topk = indexer.topk
    q = numpy_of(indexer.q_proj(x)).reshape(len(x), topk.heads, topk.dim)
    weights = indexer.weights_proj(x).detach().double() * topk.heads**-0.5
    entries = entries_of(indexer.compressor, x, views, reduction)
    lists = []
    for g, view in enumerate(views):
        position = slots_of(view)
        q_rotated = np.stack(
            [[rotate(row, position[t], indexer.rope) for row in rows] for t, rows in enumerate(q)]
        )
        keys = [
            rotate(entries[g][i, 0], position[s], indexer.rope)
            for i, s in enumerate(view.starts.tolist())
        ]
        _, indices = oracle.index_topk(
            torch.from_numpy(q_rotated), torch.from_numpy(np.stack(keys)), weights, view, topk.k
        )
        lists.append([set(row) for row in indices])
    return lists


def slots_of(view):
    """Position of each token in its sequence."""
    return [t - oracle.sequence_of(view, t)[0] for t in range(view.num_tokens)]


def attention(layer, x, views, bias=None):
    """Return what ``layer(x, chunks)`` must, float64 [T, dim]; ``bias`` [N] for each view."""
    policy, width, position = layer.policy, layer.head_dim, slots_of(views[0])
    per_view = layer.kv_heads // len(views)

    def heads_of(linear, norm):
        rows = numpy_of(linear(x)).reshape(len(x), -1, width)
        return rms_norm(rows, norm)

    q, k = heads_of(layer.q_proj, layer.q_norm), heads_of(layer.k_proj, layer.k_norm)
    v = None if layer.v_proj is None else heads_of(layer.v_proj, None)
    entry_k, entry_v = _entries(layer, x, k, v, views)
    reads = None if layer.indexer is None else chosen(layer.indexer, x, views, policy.reduction)
    window = len(x) if policy.window is None else policy.window
    out = np.zeros_like(q)
    for t in range(len(x)):
        for h in range(layer.heads):
            kv = h // (layer.heads // layer.kv_heads)
            g, own = kv // per_view, kv % per_view
            view = views[g]
            first = oracle.sequence_of(view, t)[1]
            entries, tokens = oracle.entries_and_tokens(view, t, window, policy.cover)
            if reads is not None:
                entries = [i for i in entries if i - first in reads[g][t]]
            slope = 0.0 if layer.slopes is None else float(layer.slopes[h].detach())
            rows = []
            for i in entries:
                at = position[int(view.starts[i])]
                key = rotate(entry_k[g][i, own], at, policy.rope)
                value = key if v is None else entry_v[g][i, own]
                rows.append((key, value, 0.0 if bias is None else float(bias[g][i])))
            for j in tokens:
                key = rotate(k[j, kv], position[j], policy.rope)
                rows.append((key, key if v is None else v[j, kv], slope * (j - t)))
            sink = None if layer.sink is None else float(layer.sink[h].detach())
            query = rotate(q[t, h], position[t], policy.rope)
            mixed, _ = oracle.softmax_of(query, rows, sink, width**-0.5)
            back = policy.rope if v is None else None
            out[t, h] = rotate(mixed + np.zeros(width), position[t], back, sign=-1.0)
    return numpy_of(layer.o_proj(torch.from_numpy(out.reshape(len(x), -1))))


def _entries(layer, x, k, v, views):
    if layer.policy.boundaries is None:
        return None, None
    if layer.compress_k is not None:
        of_k, of_v = layer.compress_k, layer.compress_v
        reduction = layer.policy.reduction
        entry_v = None if of_v is None else entries_of(of_v, x, views, reduction)
        return entries_of(of_k, x, views, reduction), entry_v
    per_view = layer.kv_heads // len(views)

    def mean(raw):
        parts = enumerate(views)
        raw = torch.from_numpy(raw)
        return [oracle.pool(raw[:, g * per_view : (g + 1) * per_view], one) for g, one in parts]

    return [rms_norm(one, layer.entry_norm) for one in mean(k)], None if v is None else mean(v)


def log_lengths(views):
    return [[math.log(n) for n in view.lengths.tolist()] for view in views]


def randomise(module, seed=0):
    """Give every parameter random values, so that none hides behind its initial one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.3 * noise.to(parameter.dtype))
    return module
