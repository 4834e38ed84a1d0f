"""Sizes and policies of a model, as a frozen object that JSON can hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dynchunk._checks import require, require_int
from dynchunk.attention import specs
from dynchunk.attention.policy import KINDS, VERSION, Policy, full
from dynchunk.attention.scoring import score_specs
from dynchunk.boundaries import SharePlan


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and policies of a :class:`ChunkedTransformer`.

    Parameters
    ----------
    vocab, dim, layers, heads : int
    kv_heads : int
    head_dim : int, optional
        Default: dim / heads.
    mlp_dim : int, optional
        Hidden size of the SwiGLU. Default: 3 dim.
    pattern : tuple of Policy
        Of the layers in turn, again from the front when it is used up: ``(sliding(), csa(),
        hca())`` interleaves three kinds.
    sharing : SharePlan, optional
        Whose boundaries each layer uses. Default: each kind of boundaries is made once, by the
        first layer that has it.
    shared_kv, qk_norm, slopes : bool
        As in :class:`~dynchunk.attention.ChunkedAttention`.
    tied : bool
        The embedding is also the head.

    Examples
    --------
    >>> config = ModelConfig(vocab=10, dim=8, layers=2, heads=2, kv_heads=1)
    >>> ModelConfig.from_dict(config.as_dict()) == config
    True
    """

    vocab: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int | None = None
    mlp_dim: int | None = None
    pattern: tuple[Policy, ...] = (full(),)
    sharing: SharePlan | None = None
    shared_kv: bool = False
    qk_norm: bool = True
    slopes: bool = False
    tied: bool = True

    def __post_init__(self) -> None:
        for name in ("vocab", "dim", "layers", "heads", "kv_heads"):
            require_int(name, getattr(self, name), 1)
        ok = len(self.pattern) > 0 and all(isinstance(p, Policy) for p in self.pattern)
        require(ok, "pattern", "at least one Policy", self.pattern)
        if self.sharing is not None:
            leaders = self.sharing.leaders
            require(len(leaders) == self.layers, "sharing", f"{self.layers} layers", leaders)
            for layer, leader in enumerate(leaders):
                same = _scored_by(self.policy(layer)) == _scored_by(self.policy(leader))
                expected = f"one with the boundaries and score of layer {leader}"
                require(same, f"policy of layer {layer}", expected, self.policy(layer))

    def policy(self, layer: int) -> Policy:
        """Return the policy of a layer."""
        return self.pattern[layer % len(self.pattern)]

    @property
    def plan(self) -> SharePlan:
        """Whose boundaries each layer uses."""
        if self.sharing is not None:
            return self.sharing
        keys = [_scored_by(self.policy(layer)) for layer in range(self.layers)]
        return SharePlan(tuple(keys.index(key) for key in keys))

    def as_dict(self) -> dict[str, Any]:
        """Return the config as JSON can hold it."""
        return {"version": VERSION, **specs.encode(self)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ModelConfig:
        """Return the config that :meth:`as_dict` wrote."""
        require(isinstance(data, dict), "config", "a dict", data)
        version = data.get("version")
        require(version == VERSION, "config version", str(VERSION), version)
        given = {key: value for key, value in data.items() if key != "version"}
        kinds = KINDS | {"ModelConfig": cls, "SharePlan": SharePlan}
        config = specs.decode("config", given, kinds)
        require(isinstance(config, cls), "config: kind", "'ModelConfig'", data.get("kind"))
        return config  # type: ignore[no-any-return]


def _scored_by(policy: Policy) -> tuple[Any, ...]:
    """Return what two layers must have in common to use the same boundaries."""
    return policy.boundaries, score_specs(policy)
