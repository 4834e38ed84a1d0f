"""DeepSeek V4 of transformers (>= 5.24): policies and attention layers with its weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dynchunk._checks import describe, require, require_choice
from dynchunk.attention import All, GatedPool, Policy, Rope, TopK, Yarn
from dynchunk.attention.compressor import EPS, Compressor
from dynchunk.attention.deepseek_v4 import V4Attention, V4Sizes
from dynchunk.boundaries import FixedStride

_LAYER_TYPES = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)


def policy_of(config: Any, layer: int) -> Policy:
    """Return the policy of a layer of a ``DeepseekV4Config``.

    Parameters
    ----------
    config : transformers.DeepseekV4Config
    layer : int

    Returns
    -------
    Policy
        ``allow_unseen`` is set where the sliding window is shorter than the stride: between them
        such a model does not see all tokens.
    """
    kind, window = config.layer_types[layer], config.sliding_window
    require_choice(f"layer_types[{layer}]", kind, _LAYER_TYPES)
    if kind == "sliding_attention":
        return Policy(window=window, rope=_rope(config, "main"))
    stride = config.compress_rates[kind]
    sparse = kind == "compressed_sparse_attention"
    topk = TopK(config.index_topk, config.index_n_heads, config.index_head_dim)
    return Policy(
        FixedStride(stride),
        reduction=GatedPool(overlap=sparse),
        selection=topk if sparse else All(),
        window=window,
        rope=_rope(config, "compress"),
        allow_unseen=window < stride,
    )


def attention_from_transformers(attention: Any) -> V4Attention:
    """Return our layer with the weights of a ``DeepseekV4Attention``.

    At the model's fixed strides (``policy_of(config, layer).boundaries``) both return the same.

    Parameters
    ----------
    attention : transformers' DeepseekV4Attention
        A module of a loaded model: ``model.model.layers[i].self_attn``.

    Returns
    -------
    V4Attention
        Its own copy of the weights, in their dtype, on their device.

    Raises
    ------
    TypeError
        Another module.
    """
    if not all(hasattr(attention, name) for name in ("q_a_proj", "o_a_proj", "sinks", "config")):
        raise TypeError(f"attention: expected a DeepseekV4Attention, got {describe(attention)}")
    config = attention.config
    require(config.rms_norm_eps == EPS, "rms_norm_eps", f"{EPS}", config.rms_norm_eps)
    sizes = V4Sizes(
        config.hidden_size,
        config.num_attention_heads,
        config.head_dim,
        config.q_lora_rank,
        config.o_groups,
        config.o_lora_rank,
    )
    ours = V4Attention(policy_of(config, attention.layer_idx), sizes).to(attention.sinks.device)
    with torch.no_grad():
        for name in ("q_a_proj", "q_a_norm", "q_b_proj", "kv_proj", "kv_norm", "o_b_proj"):
            _copy(getattr(ours, name), "weight", getattr(attention, name).weight)
        _copy(ours, "o_a_weight", attention.o_a_proj.weight)
        _copy(ours, "sink", attention.sinks)
        if ours.compressor is not None:
            _copy_compressor(ours.compressor, attention.compressor)
        if ours.indexer is not None:
            theirs = attention.compressor.indexer
            _copy_compressor(ours.indexer.compressor, theirs)
            _copy(ours.indexer.q_proj, "weight", theirs.q_b_proj.weight)
            _copy(ours.indexer.weights_proj, "weight", theirs.scorer.weights_proj.weight)
    return ours


def _copy_compressor(ours: Compressor, theirs: Any) -> None:
    _copy(ours.kv_proj, "weight", theirs.kv_proj.weight)
    _copy(ours.gate_proj, "weight", theirs.gate_proj.weight)
    _copy(ours.norm, "weight", theirs.kv_norm.weight)
    _copy(ours, "slot_bias", theirs.position_bias)


def _copy(module: Any, name: str, weight: Tensor) -> None:
    """Set a parameter to a copy of ``weight`` in its own shape, in the dtype of ``weight``."""
    parameter = getattr(module, name)
    parameter.data = weight.detach().clone().reshape(parameter.shape)


def _rope(config: Any, kind: str) -> Rope:
    given = config.rope_parameters[kind]
    name = f"rope_parameters[{kind!r}]"
    require_choice(f"{name}: rope_type", given["rope_type"], ("default", "yarn"))
    yarn = None
    if given["rope_type"] == "yarn":
        scale = given.get("attention_factor")
        require(scale == 1.0, f"{name}: attention_factor", "1.0, as V4 has it", scale)
        require(given.get("truncate", True), f"{name}: truncate", "True", False)
        yarn = Yarn(
            given["factor"],
            given["original_max_position_embeddings"],
            given.get("beta_fast") or 32.0,
            given.get("beta_slow") or 1.0,
        )
    return Rope(given["partial_rotary_factor"], given["rope_theta"], yarn)
