"""The boundary rule written down once more, slowly: O(n w), one sequence, plain Python."""

from __future__ import annotations

from dynchunk import BoundaryRule, Kind


def oracle(s: list[float], rule: BoundaryRule) -> list[tuple[int, int, Kind]]:
    """(position, confirmed at, kind) of every boundary that is known after the last score."""
    m, M, lag, n = rule.min_length, rule.max_length, rule.lag, len(s)

    def maxima(w: int) -> list[int]:
        return [
            t
            for t in range(1, n - w)
            if s[t] >= rule.threshold
            and all(s[t] > s[u] for u in range(max(0, t - w), t))
            and all(s[t] >= s[u] for u in range(t + 1, t + w + 1))
        ]

    content = maxima(rule.radius)
    if rule.ladder:
        anchors = [0, *content]
        for t in set(maxima(m - 1)) - set(content):
            a = max(x for x in anchors if x < t)
            b = min((x for x in anchors if x > t), default=n + M + m)
            if t - a >= m and b - t >= m and b - a > M:
                content.append(t)
    found = [(0, 0, Kind.START)] if n else []
    for c in [t for t in sorted(content) if t + lag < n] + [None]:
        q = found[-1][0] + M if n else M
        while q < c if c is not None else q + m - 1 + lag < n:
            moves = c is not None and c - q < m
            found.append(
                (c - m, c + lag, Kind.FORCED) if moves else (q, q + m - 1 + lag, Kind.FORCED)
            )
            q += M
        if c is not None:
            found.append((c, c + lag, Kind.CONTENT))
    return found
