"""Variants of the controlled study: a policy, a model of it, and the task it learns."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from dynchunk._checks import require, require_choice, require_int
from dynchunk.attention import GatedPool, Learned, ModelConfig, Policy, Router
from dynchunk.boundaries import FixedStride, SharePlan
from dynchunk.lab.policies import CONTENTS, WINDOW, base_policy, second_view
from dynchunk.lab.task import TASKS, RecallTask


@dataclass(frozen=True, slots=True)
class Variant:
    """One row of the study: everything but the seed and the training.

    Parameters
    ----------
    name : str
    task : RecallTask
    config : ModelConfig
    phases : int
        Modulus of the phase: the stride, or the target ratio of content boundaries; 4 where
        nothing is compressed.
    random_offset : bool
        Train on grids whose first line is drawn anew for each batch.
    ratio_weight : float
        Weight of a router's ratio loss.
    surprisal : bool
        Tokens are scored by their surprisal under the bigrams of the task's own text.
    """

    name: str
    task: RecallTask
    config: ModelConfig
    phases: int = 4
    random_offset: bool = False
    ratio_weight: float = 0.03
    surprisal: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return the variant as JSON can hold it."""
        return {
            "name": self.name,
            "task": asdict(self.task),
            "config": self.config.as_dict(),
            "phases": self.phases,
            "random_offset": self.random_offset,
            "ratio_weight": self.ratio_weight,
            "surprisal": self.surprisal,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Variant:
        """Return the variant that :meth:`as_dict` wrote."""
        task, config = RecallTask(**data["task"]), ModelConfig.from_dict(data["config"])
        return cls(**{**data, "task": task, "config": config})


def make_variant(
    policy: str,
    *,
    stride: int = 4,
    view: str = "one",
    overlap: bool = False,
    per_layer: bool = False,
    ratio: float | None = None,
    max_length: int | None = None,
    layers: int = 2,
    task: str = "even",
) -> Variant:
    """Build a variant from the name of its policy.

    Parameters
    ----------
    policy : str
        One of :data:`~dynchunk.lab.policies.POLICIES`.
    stride : int
        Of a grid; for content boundaries the ratio to come near (told classes have their own).
    view : {"one", "second", "moved", "midpoints"}
        A second view at equal bytes: none, the same rule on another score of the same kind, every
        boundary moved by half a stride (a staggered grid), or the middles of the chunks.
    overlap : bool
        Entries pool the chunk before too.
    per_layer : bool
        Layers score boundaries of their own.
    ratio : float, optional
        To which surprisal and hash boundaries are calibrated. Default: the stride.
    max_length : int, optional
        Longest chunk of content boundaries. Default: 3 strides with a threshold, else 1.5.
    layers : int
    task : str
        One of :data:`~dynchunk.lab.task.TASKS`; its gap is raised to the raw window, if need be.

    Raises
    ------
    ValueError
        An unknown name, options that do not fit, or a ratio that the rule cannot reach.

    Examples
    --------
    >>> variant = make_variant("hash", view="midpoints", overlap=True)
    >>> variant.name, variant.config.policy(0).boundaries.max_length
    ('hash-4-midpoints-overlap', 6)
    """
    require_int("stride", stride, 1)
    require_choice("task", task, tuple(TASKS))
    asked = TASKS[task]
    base = base_policy(policy, stride, max_length, asked, ratio)
    is_content = policy in CONTENTS
    require(is_content or max_length is None, "max_length", "content boundaries", policy)
    is_calibrated = policy in ("surprisal", "hash")
    require(is_calibrated or ratio is None, "ratio", "surprisal or hash boundaries", policy)
    is_scored = isinstance(base.score, Learned | Router)
    require(is_scored or not per_layer, "per_layer", "learned boundaries", policy)
    base = replace(base, views=second_view(view, base, stride), window=None)
    if overlap:
        base = _overlapping(base)
    if policy != "full":
        base = replace(base, window=max(WINDOW, base.min_window))
    pattern: tuple[Policy, ...] = (base,)
    if policy == "staggered-layers":
        pattern += (replace(base, boundaries=FixedStride(stride, offset=stride // 2)),)
    parts = {
        policy if policy == "full" else f"{policy}-{stride}": True,
        f"ratio-{ratio}": ratio is not None,
        f"max-{max_length}": max_length is not None,
        "staggered" if view == "moved" and not is_content else view: view != "one",
        "overlap": overlap,
        "per-layer": per_layer,
        f"{layers}-layers": layers != 2,
        task: task != "even",
    }
    asked = replace(asked, gap=max(asked.gap, base.window or WINDOW))
    sharing = SharePlan.every_layer(layers) if per_layer else None
    return Variant(
        "-".join(part for part, is_wanted in parts.items() if is_wanted),
        asked,
        _config(asked, layers, pattern, sharing),
        stride if stride > 1 else 4,
        random_offset=policy == "random-offset",
        surprisal=policy == "surprisal",
    )


def _overlapping(policy: Policy) -> Policy:
    if policy.boundaries is None or not isinstance(policy.reduction, GatedPool):
        raise ValueError("overlap: expected a policy with chunks and a gated pool")
    return replace(policy, reduction=replace(policy.reduction, overlap=True))


def _config(
    task: RecallTask, layers: int, pattern: tuple[Policy, ...], sharing: SharePlan | None
) -> ModelConfig:
    """About 110k parameters at 2 layers."""
    return ModelConfig(
        vocab=task.vocabulary,
        dim=64,
        layers=layers,
        heads=4,
        kv_heads=1,
        head_dim=32,
        mlp_dim=128,
        pattern=pattern,
        sharing=sharing,
        shared_kv=True,
        slopes=True,
    )
