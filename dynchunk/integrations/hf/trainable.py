"""Entries with weights in a wrapped model, which start as the means and are fine-tuned.

Each wrapped attention gets a module, ``entry_pooling``, and the decoder, where the policy has a
learned score, one of the name ``boundary_scores``: they train, save and load as every part of the
model does (PEFT: ``modules_to_save=["entry_pooling", "boundary_scores"]``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from dynchunk._checks import require
from dynchunk.attention.policy import Policy
from dynchunk.attention.scoring import Segmenter, score_specs
from dynchunk.attention.specs import Learned, MeanPool, Router
from dynchunk.ops.layout import Spans
from dynchunk.ops.pool import pool

POOLING, SCORES = "entry_pooling", "boundary_scores"


class EntryPooling(nn.Module):
    """A softmax over a chunk's tokens for each channel of keys and of values.

    Its logits are a linear function of the layer's hidden state and a bias per slot, as in DeepSeek
    V4's compressors; both start as zero, so that entries start as the means.

    Parameters
    ----------
    dim : int
        Size of the hidden states.
    kv_heads, head_dim : int
    slots : int
        Rows of the slot bias; the last one serves all slots past it.

    Examples
    --------
    >>> from dynchunk.chunks import Chunks
    >>> pooling, spans = EntryPooling(8, 2, 4, slots=3), Spans.of(Chunks.fixed(2, 4))
    >>> k = torch.randn(4, 2, 4)
    >>> (entry_k,), _ = pooling(torch.randn(4, 8), k, k, (spans,))
    >>> torch.allclose(entry_k[0], k[:2].mean(0))
    True
    """

    def __init__(self, dim: int, kv_heads: int, head_dim: int, slots: int) -> None:
        super().__init__()
        self.kv_heads, self.head_dim = kv_heads, head_dim
        self.k_gate = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.v_gate = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.k_slots = nn.Parameter(torch.zeros(slots, kv_heads, head_dim))
        self.v_slots = nn.Parameter(torch.zeros(slots, kv_heads, head_dim))
        nn.init.zeros_(self.k_gate.weight)
        nn.init.zeros_(self.v_gate.weight)

    def forward(
        self, x: Tensor, k: Tensor, v: Tensor, views: Sequence[Spans]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Pool keys and values.

        Parameters
        ----------
        x : floating tensor [T, dim]
            Hidden states that the layer's keys are projected from.
        k, v : floating tensors [T, H_kv, D]
            Keys after RoPE, and values.
        views : sequence of Spans

        Returns
        -------
        two lists of tensors [N_g, H_kv / G, D], one per view
        """
        return (
            self._pool(k, self.k_gate(x), self.k_slots, views),
            self._pool(v, self.v_gate(x), self.v_slots, views),
        )

    def _pool(
        self, values: Tensor, gate: Tensor, slots: Tensor, views: Sequence[Spans]
    ) -> list[Tensor]:
        gate = gate.reshape(len(gate), self.kv_heads, self.head_dim)
        heads, pooled = self.kv_heads // len(views), []
        for view, spans in enumerate(views):
            part = slice(view * heads, (view + 1) * heads)
            pooled.append(
                pool(values[:, part], spans, gate=gate[:, part], slot_bias=slots[:, part])
            )
        return pooled


def add(decoder: Any, names: Mapping[int, str], policies: Mapping[int, Policy]) -> list[Any]:
    """Add the modules to a decoder and return the handles of its new hooks.

    Parameters
    ----------
    decoder : nn.Module
    names : mapping from layer to the name of its attention
    policies : mapping from layer to Policy
        Of the wrapped layers.
    """
    pooled = {i: policy for i, policy in policies.items() if policy.boundaries is not None}
    expected = "a policy with chunks and MeanPool entries, for trainable=True"
    fits = bool(pooled) and all(isinstance(p.reduction, MeanPool) for p in pooled.values())
    require(fits, "policy", expected, next(iter(policies.values())))
    config, hooks = decoder.config, []
    segmenters = _segmenters(pooled.values(), config.hidden_size)
    for i, policy in pooled.items():
        attention = decoder.get_submodule(names[i])
        like = next(attention.parameters())
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = attention.head_dim
        module = EntryPooling(config.hidden_size, heads, width, policy.max_length)
        attention.add_module(POOLING, module.to(like.device, like.dtype))
        hooks.append(attention.register_forward_pre_hook(_pass_on, with_kwargs=True))
    if len(segmenters):
        like = next(decoder.parameters())
        decoder.add_module(SCORES, segmenters.to(like.device, like.dtype))
    return hooks


def remove(decoder: Any) -> None:
    """Take the modules out of a decoder again."""
    for module in decoder.modules():
        for name in (POOLING, SCORES):
            if name in module._modules:
                del module._modules[name]


def load_weights(model: Any, folder: str | PathLike[str]) -> None:
    """Load what was trained from a folder that ``save_pretrained`` wrote.

    ``from_pretrained`` makes the plain model, which has no place for it: wrap that model, with
    ``trainable=True``, then call this.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Wrapped with ``trainable=True``.
    folder : path

    Raises
    ------
    ValueError
        The folder lacks a weight, or has others.
    """
    own = {name for name in model.state_dict() if POOLING in name or SCORES in name}
    require(len(own) > 0, "model", "one wrapped with trainable=True", type(model).__name__)
    found: dict[str, Tensor] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        tensors = load_file(path)
        found |= {name: x for name, x in tensors.items() if POOLING in name or SCORES in name}
    if set(found) != own:
        odd = sorted(set(found) ^ own)
        raise ValueError(
            f"{folder}: expected the trained weights of the wrapped layers; it lacks or has beside "
            f"them {odd[:3]} (of {len(odd)}): was the model saved while it was wrapped, under the "
            "same policy?"
        )
    model.load_state_dict(found, strict=False)


def _segmenters(policies: Any, dim: int) -> nn.ModuleDict:
    """Return the scorers that have weights, by the key of their policy."""
    learned: dict[str, nn.Module] = {}
    for policy in dict.fromkeys(policies):
        specs = score_specs(policy)
        expected = "Learned (a Router needs a loss of its own, which no Trainer has)"
        no_router = not any(isinstance(spec, Router) for spec in specs)
        require(no_router, "policy: score", expected, policy.score)
        if any(isinstance(spec, Learned) for spec in specs):
            learned.setdefault(key(policy), Segmenter(policy, dim))
    return nn.ModuleDict(learned)


def key(policy: Policy) -> str:
    """Name the boundaries of a policy: those with equal names are the same.

    >>> key(Policy()) == key(Policy(window=3))
    True
    """
    text = repr((policy.boundaries, score_specs(policy)))
    return "".join(c if c.isalnum() else "_" for c in text)


def _pass_on(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Let a layer's hidden states reach its attention function."""
    states = args[0] if args else kwargs["hidden_states"]
    return args, kwargs | {"dynchunk_states": states}
