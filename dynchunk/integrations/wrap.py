"""``dynchunk.wrap``: one line around the model that one has."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from dynchunk._checks import describe, optional_import
from dynchunk.attention.policy import Policy
from dynchunk.boundaries.scores.base import Score
from dynchunk.cache.cache import ROLLBACK
from dynchunk.integrations import torch_attention

#: Modules with ``supported`` and ``attach`` for models that need more than another attention
#: function, by ``config.model_type``.
FAMILIES = {"deepseek_v4": "dynchunk.integrations.hf.deepseek_v4"}

_STANDARD = "dynchunk.integrations.hf.decoder"


def wrap(
    model: Any,
    policy: Policy | Sequence[Policy | None] | Mapping[str, Policy] | None = None,
    *,
    score: Score | None = None,
    layers: Sequence[int] | None = None,
    rollback: int | None = ROLLBACK,
    page_size: int = 64,
    impl: str | None = None,
    trainable: bool = False,
) -> Any:
    """Let the attention of a transformers model follow a policy.

    The model is changed in place and returned; :func:`unwrap`, or leaving a ``with`` block, makes
    it what it was. Layers with a sliding window and others whose memory does not grow are left as
    they are; ``model.dynchunk.report`` says what was done.

    ``model.generate`` works as before, with a cache of entries. The policy is written into the
    model's config, and so survives ``save_pretrained`` and ``from_pretrained``, after which
    ``wrap(model)`` reads it there.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A decoder-only model, or one of PEFT around it. Or an ``nn.MultiheadAttention``, which then
        is :class:`~dynchunk.integrations.torch_attention.ChunkedMultiheadAttention`: it takes a
        policy, a score of its inputs and ``impl``.
    policy : Policy, or a sequence of Policy or None, optional
        For all layers with full attention, or one for each layer, None for a layer to leave as it
        is. Its ``rope`` and ``sink`` are ignored: positions and sinks are the model's own. Default:
        what the config of the model says, or else to keep every token. For DeepSeek V4, which
        compresses by itself: a mapping from types of layers to policies, by default the model's
        own; see :func:`~dynchunk.integrations.hf.deepseek_v4.v4_policies`.
    score : Score, optional
        What scores the ids of the tokens, for a policy with a ``BoundaryRule`` and no score of its
        own: ``DelimiterScore.from_tokenizer(tokenizer)`` puts boundaries where text begins
        something. It is not written into the config.
    layers : sequence of int, optional
        Those to wrap. Default: all with full attention.
    rollback : int >= 0 or None
        How many tokens a cache can take back (``crop``, assisted generation). None: all.
    page_size : int
        Entries in a page of the cache.
    impl : str, optional
        Of the operations.
    trainable : bool
        Give entries weights, which start as the means of ``MeanPool``, and a ``Learned`` score its
        own: :mod:`dynchunk.integrations.hf.trainable`. What the config says of that stays.

    Returns
    -------
    The model, which is a context manager now and has ``model.dynchunk``.

    Raises
    ------
    ValueError
        The model, or the policy with it, is not supported; the message says why.
    ImportError
        The extra ``hf`` is not installed.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(hidden_size=8, num_attention_heads=1, num_hidden_layers=1,
    ...     intermediate_size=8, vocab_size=8)
    >>> model, tokens = LlamaForCausalLM(config).eval(), torch.tensor([[1, 2, 3]])
    >>> with torch.no_grad(), wrap(model) as wrapped:
    ...     logits = wrapped(tokens).logits
    >>> torch.allclose(logits, model(tokens).logits, atol=1e-5)
    True
    """
    if isinstance(model, nn.MultiheadAttention):
        if policy is None or not isinstance(policy, Policy):
            raise TypeError(f"policy: expected a Policy for this module, got {describe(policy)}")
        torch_attention.attach(model, policy, score=score, impl=impl)
        return model
    attach = _family(model).attach
    options = {"score": score, "rollback": rollback, "page_size": page_size, "impl": impl}
    options |= {"trainable": True} if trainable else {}
    attach(model, policy, layers=layers, **options)
    return model


def unwrap(model: Any) -> Any:
    """Undo :func:`wrap`, bit for bit, and return the model.

    Raises
    ------
    ValueError
        The model is not wrapped.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # of PEFT
    states = (getattr(one, "__dict__", {}).get("_dynchunk") for one in (model, inner))
    found = next((state for state in states if state is not None), None)
    if found is None:
        raise ValueError(f"model: expected one that dynchunk.wrap returned, got {describe(model)}")
    found.detach()
    return model


def supported(model: Any, layers: Sequence[int] | None = None) -> Any:
    """Say what :func:`wrap` would do, layer by layer, or why it would refuse.

    Returns
    -------
    dynchunk.integrations.hf.report.Report
    """
    return _family(model).supported(model, layers)


def _family(model: Any) -> Any:
    optional_import("transformers", "hf")
    kind = getattr(getattr(model, "config", None), "model_type", None)
    return importlib.import_module(FAMILIES.get(str(kind), _STANDARD))
