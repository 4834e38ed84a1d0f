"""Caches that keep raw chunks as loops over single tokens, in float64, one sequence at a time."""

import copy

import numpy as np
import torch

from dynchunk.attention import Evict, Quest
from dynchunk.cache.rows import FEW
from dynchunk.chunks import Chunks


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def softmax_read(q, k, v, tokens, scale, sink):
    """Output [D_v] of one query head over some tokens of its KV head."""
    logits = np.array([scale * float(q @ k[t]) for t in tokens])
    top = max([*logits, *([] if sink is None else [sink])])
    weights = np.exp(logits - top)
    total = weights.sum() + (0 if sink is None else np.exp(sink - top))
    return sum(w * v[t] for w, t in zip(weights, tokens, strict=True)) / total


class Loop:
    """What a sequence reads, piece by piece."""

    def __init__(self, policy, chunks, q, k, v, sink=None):
        """``chunks``: those of the whole sequence."""
        self.policy, self.sink = policy, sink
        self.q, self.k, self.v = (x.numpy() for x in (q, k, v))
        self.scale = q.shape[2] ** -0.5
        closed = chunks.is_closed
        self.chunks = list(
            zip(
                chunks.starts[closed].tolist(),
                chunks.ends[closed].tolist(),
                chunks.visible_from[closed].tolist(),
                strict=True,
            )
        )
        self.n = self.at = self.prompt = self.raw = 0
        self.kept = [[] for _ in range(k.shape[1])]  # of each KV head [(start, end)]

    def piece(self, count):
        """Outputs [count, H, D_v] of the next tokens."""
        if isinstance(self.policy.reduction, Evict) and 0 < count <= FEW:
            self._evict()
        tokens = range(self.n, self.n + count)
        out = [[self._read(t, h, count) for h in range(self.q.shape[1])] for t in tokens]
        self.n += count
        if count > FEW:
            self.prompt = self.n
        return torch.tensor(np.array(out))

    def crop(self, n):
        self.n, self.prompt = n, min(self.prompt, n)
        if n == 0:
            self.at, self.raw, self.kept = 0, 0, [[] for _ in self.kept]

    def far(self, t, n):
        """Chunks wholly before the window of token t, closed when n tokens have come."""
        found = []
        for start, end, known in self.chunks:
            if end > t - self.policy.window + 1 or known >= n:
                break
            found.append((start, end))
        return found

    def _read(self, t, h, count):
        g = h * self.k.shape[1] // self.q.shape[1]
        if isinstance(self.policy.reduction, Evict):
            tokens = [u for a, b in self.kept[g] for u in range(a, b)]
            tokens += range(self.raw, t + 1)
        elif isinstance(self.policy.selection, Quest) and count <= FEW:
            tokens = self._selected(t, h, g)
        else:
            tokens = range(t + 1)
        sink = None if self.sink is None else float(self.sink[h])
        return softmax_read(self.q[t, h], self.k[:, g], self.v[:, g], tokens, self.scale, sink)

    def _selected(self, t, h, g):
        spec, far = self.policy.selection, self.far(t, t + 1)
        end = far[-1][1] if far else 0
        first = min(spec.first, end)
        budget = min(end - first, spec.k) if spec.k is not None else int((end - first) * spec.share)
        q, read = self.q[t, h], {*range(first), *range(end, t + 1)}
        scores = []
        for a, b in far:
            low, high = self.k[a:b, g].min(0), self.k[a:b, g].max(0)
            centre, half = q @ (low + high) / 2, np.abs(q) * (high - low) / 2
            scores.append(centre + (np.sqrt((half**2).sum()) if spec.normalise else half.sum()))
        for i in sorted(range(len(far)), key=lambda i: (-scores[i], i)):
            own = range(max(far[i][0], first), max(far[i][1], first))
            budget -= len(own)
            if budget < 0:
                break
            read |= set(own)
        return sorted(read)

    def _evict(self):
        spec, far = self.policy.reduction, self.far(self.n, self.n)
        end = far[-1][1] if far else 0
        if not (self.prompt > self.at or self.n - self.at >= spec.observe) or end <= self.raw:
            return
        first = min(spec.first, end)
        budget = first + int((end - first) / spec.ratio)
        queries = range(max(self.at, self.n - spec.observe), self.n)
        new = [(a, b) for a, b in far if a >= self.raw]
        for g in range(self.k.shape[1]):
            candidates = self.kept[g] + new
            worth = self._attention(g, candidates, queries)
            scores = []
            for a, b in candidates:
                total = sum(worth[u] for u in range(a, b))
                score = total / (b - a) if spec.per_token else total
                scores.append(np.inf if a < spec.first else score)
            left, keep = budget, []
            for i in sorted(range(len(candidates)), key=lambda i: (-scores[i], i)):
                left -= candidates[i][1] - candidates[i][0]
                if left < 0 and scores[i] < np.inf:
                    break
                keep.append(candidates[i])
            self.kept[g] = sorted(keep)
        self.at, self.raw = self.n, end

    def _attention(self, g, candidates, queries):
        """Attention that each token gets from the queries of a KV head's group."""
        held = [u for a, b in candidates for u in range(a, b)]
        held += range(held[-1] + 1, self.n)
        group = self.q.shape[1] // self.k.shape[1]
        worth = dict.fromkeys(held, 0.0)
        for p in queries:
            for h in range(g * group, (g + 1) * group):
                read = [u for u in held if u <= p]
                logits = np.array([self.scale * self.q[p, h] @ self.k[u, g] for u in read])
                weights = np.exp(logits)
                total = weights.sum() + (0 if self.sink is None else np.exp(float(self.sink[h])))
                for u, w in zip(read, weights / total, strict=True):
                    worth[u] += w
        return worth


class Stream:
    """Random sequences of one length through one layer of a cache, and the loops beside it."""

    def __init__(self, cache, chunks, heads, scores=None, sink=None, seed=0, dtype=torch.float64):
        D, D_v = 6, 5
        H, H_kv = heads
        n = chunks.num_tokens // chunks.num_sequences
        self.cache, self.scores, self.sink = cache, scores, sink
        shape = (chunks.num_sequences, n)
        self.q = normal(*shape, H, D, seed=seed) * 2
        self.k = normal(*shape, H_kv, D, seed=seed + 1)
        self.v = normal(*shape, H_kv, D_v, seed=seed + 2)
        self.q, self.k, self.v = (x.to(dtype) for x in (self.q, self.k, self.v))
        policy = cache.policies[0]
        self.loops = [
            Loop(policy, _sequence(chunks, b), *(x[b].double() for x in self.qkv), sink)
            for b in range(shape[0])
        ]

    @property
    def qkv(self):
        return self.q, self.k, self.v

    def feed(self, counts):
        """Give the cache the next tokens of each sequence."""
        lengths = self.cache.lengths
        at = [(b, slice(n, n + c)) for b, (n, c) in enumerate(zip(lengths, counts, strict=True))]

        def cut(x):
            return torch.cat([x[where] for where in at])

        cu = [0, *np.cumsum(counts).tolist()]
        self.cache.append(cu, () if self.scores is None else cut(self.scores))
        return self.cache.layers[0].mix(*map(cut, self.qkv), sink=self.sink)

    def check(self, counts):
        """Give them to the loops too, and compare."""
        found = self.feed(counts)
        expected = [loop.piece(c) for loop, c in zip(self.loops, counts, strict=True) if c]
        assert_same(found, torch.cat(expected))
        self.cache.check()

    def crop(self, lengths):
        self.cache.crop(lengths)
        for loop, n in zip(self.loops, lengths, strict=True):
            loop.crop(n)

    def select(self, index):
        self.cache.select(index)
        self.loops = [copy.deepcopy(self.loops[b]) for b in index]
        self.q, self.k, self.v = (x[index] for x in (self.q, self.k, self.v))
        self.scores = None if self.scores is None else self.scores[index]


def assert_same(found, expected):
    """Equal to the last digits; 16 bits: in the mean."""
    if found.dtype in (torch.bfloat16, torch.float16):
        assert (found.double() - expected).norm() <= 5e-3 * expected.norm()
    else:
        atol = 1e-5 if found.dtype == torch.float32 else 1e-12
        torch.testing.assert_close(found.double(), expected.double(), rtol=atol, atol=atol)


def _sequence(chunks, b):
    """Chunks of one sequence alone."""
    begin, end = chunks.cu_seqlens[b : b + 2].tolist()
    own = (chunks.starts >= begin) & (chunks.starts < end)
    known = chunks.visible_from[own & chunks.is_closed] - begin
    return Chunks.from_boundaries(
        chunks.starts[own][1:] - begin, end - begin, known[: own.sum() - 1]
    )
