"""What wrapping a model does, layer by layer, and why a model cannot be wrapped."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from dynchunk._checks import describe
from dynchunk.attention.policy import Policy
from dynchunk.integrations.hf.attention import NAME

#: Model types whose logits, texts and caches the tests compare with the unwrapped model's.
TESTED = (
    "gemma",
    "gemma3_text",
    "gpt_oss",
    "granite",
    "llama",
    "mistral",
    "olmo2",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
)

_FULL = "full_attention"


@dataclass(frozen=True)
class LayerReport:
    """One layer of a model."""

    index: int
    name: str  #: of the attention module in the decoder; "" where there is none
    kind: str  #: as the config calls it: "full_attention", "sliding_attention", ..
    wrapped: bool  #: or left as it is
    why: str  #: a layer is left as it is
    policy: Policy | None = None  #: of a wrapped layer, once it is chosen


@dataclass(frozen=True)
class Report:
    """What wrapping a model does, or why it cannot be done.

    ``print(report)`` shows a line for each layer.
    """

    model: str  #: class
    model_type: str
    layers: tuple[LayerReport, ...]
    problems: tuple[str, ...] = ()  #: what stands against wrapping it
    tested: bool = True  #: whether the tests have a model of this type

    @property
    def wrapped(self) -> tuple[int, ...]:
        """Layers that follow a policy."""
        return tuple(layer.index for layer in self.layers if layer.wrapped)

    @property
    def kept(self) -> tuple[int, ...]:
        """Layers that are left as they are."""
        return tuple(layer.index for layer in self.layers if not layer.wrapped)

    def __str__(self) -> str:
        note = "" if self.tested else " (no model of this type is among the tests)"
        lines = [f"{self.model}{note}: {len(self.wrapped)} of {len(self.layers)} layers wrapped"]
        lines += [f"  cannot be wrapped: {problem}" for problem in self.problems]
        for layer in self.layers:
            what = f"left as it is: {layer.why}"
            if layer.wrapped:
                what = "can be wrapped" if layer.policy is None else _summary(layer.policy)
            lines.append(f"  {layer.index:3d}  {layer.kind:18s} {what}")
        return "\n".join(lines)


def supported(model: Any, layers: Collection[int] | None = None) -> Report:
    """Say what wrapping a decoder-only model would do, without doing it.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Or one of PEFT around it.
    layers : collection of int, optional
        Those to wrap. Default: all with full attention.

    Returns
    -------
    Report
        ``problems`` is empty for a model that can be wrapped.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaModel
    >>> config = LlamaConfig(hidden_size=8, num_attention_heads=1, num_hidden_layers=1,
    ...     intermediate_size=8, vocab_size=8)
    >>> print(supported(LlamaModel(config)))
    LlamaModel: 1 of 1 layers wrapped
        0  full_attention     can be wrapped
    """
    inner = unwrapped_class_instance(model)
    if not isinstance(inner, PreTrainedModel):
        problem = (
            f"expected a transformers model or an nn.MultiheadAttention, got {describe(model)}"
        )
        return Report(type(model).__name__, "", (), (problem,), False)
    decoder: Any = inner.get_decoder()  # type: ignore[no-untyped-call]
    config = decoder.config
    kinds = list(get_layer_types_and_kwargs(config)[0])
    names = attention_modules(decoder)
    found = tuple(_layer(i, kind, names, layers) for i, kind in enumerate(kinds))
    problems = (*_problems(inner, config, kinds), *_layer_problems(found, layers))
    kind = str(config.model_type)
    return Report(type(inner).__name__, kind, found, problems, kind in TESTED)


def attention_modules(decoder: Any) -> dict[int, str]:
    """Return the name of each layer's attention that asks transformers for its function."""
    return {
        int(module.layer_idx): name
        for name, module in decoder.named_modules()
        if hasattr(module, "layer_idx") and hasattr(module, "num_key_value_groups")
    }


def unwrapped_class_instance(model: Any) -> Any:
    """Return the transformers model inside one of PEFT."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _layer(
    index: int, kind: str, names: dict[int, str], layers: Collection[int] | None
) -> LayerReport:
    name = names.get(index, "")
    why = ""
    if kind != _FULL:
        why = f"{kind} has a memory of its own that does not grow"
    elif not name:
        why = "no attention that takes its function from transformers"
    elif layers is not None and index not in layers:
        why = "not chosen"
    return LayerReport(index, name, kind, not why, why)


def _problems(model: Any, config: Any, kinds: Sequence[str]) -> list[str]:
    problems = []
    if config._attn_implementation == NAME:
        problems.append("it is wrapped already: dynchunk.unwrap(model) first")
    if getattr(config, "is_encoder_decoder", False):
        problems.append("it has an encoder; decoder-only models can be wrapped")
    if not type(model)._can_set_attn_implementation():
        problems.append(
            "its modeling file does not take attention from transformers' "
            "ALL_ATTENTION_FUNCTIONS, so there is no place to put ours"
        )
    if "dummy" in kinds:
        problems.append("layers that share the keys of others")
    if getattr(config, "attn_logit_softcapping", None) is not None:
        problems.append("attn_logit_softcapping: attention that caps its logits is not built")
    if getattr(config, "use_bidirectional_attention", None):
        problems.append("use_bidirectional_attention: only causal attention can be wrapped")
    return problems


def _layer_problems(found: Sequence[LayerReport], layers: Collection[int] | None) -> list[str]:
    problems = []
    if not any(layer.wrapped for layer in found):
        kinds = ", ".join(sorted({layer.kind for layer in found}))
        problems.append(f"no layer of full attention among those asked for (it has {kinds})")
    for index in sorted(layers or ()):
        if not 0 <= index < len(found):
            problems.append(f"layers: expected numbers in [0, {len(found)}), got {index}")
        elif not found[index].wrapped:
            problems.append(f"layer {index}: {found[index].why}")
    return problems


def _summary(policy: Policy) -> str:
    if policy.boundaries is None:
        return "all tokens" if policy.window is None else f"the last {policy.window} tokens"
    parts = [f"{policy.boundaries}"]
    if policy.score is not None:
        parts.append(type(policy.score).__name__)
    if len(policy.views) > 1:
        parts.append("views " + ", ".join(type(view).__name__ for view in policy.views))
    parts += [type(policy.reduction).__name__, type(policy.selection).__name__]
    return " x ".join(parts) + f", window {policy.window} ({policy.cover})"
