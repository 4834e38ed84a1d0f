"""lm-evaluation-harness on a wrapped model: an ``LM`` that ``simple_evaluate`` takes.

A policy that acts while a prompt is read (pooling) shows in every kind of task. One that acts when
text is generated, as evicting and selecting chunks do, does not change a single long forward: for
tasks that compare log-likelihoods, ``stepwise=True`` feeds each continuation token by token.
"""

from __future__ import annotations

from typing import Any

import torch

from dynchunk._checks import describe, optional_import

optional_import("lm_eval", "eval")

from lm_eval.models.huggingface import HFLM  # noqa: E402


class ChunkedLM(HFLM):  # type: ignore[misc]
    """A wrapped model, and its tokenizer, for lm-evaluation-harness.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        What :func:`dynchunk.wrap` returned.
    tokenizer : transformers.PreTrainedTokenizerBase
    stepwise : bool
        Score continuations as generation would meet them: the context in one piece, then token by
        token, one request at a time. Default: in one forward, batched, as the harness does.
    **options
        Of ``lm_eval.models.huggingface.HFLM``, such as ``batch_size`` and ``max_length``.

    Examples
    --------
    >>> import dynchunk
    >>> from tokenizers import Tokenizer, models
    >>> from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    >>> words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="?")
    >>> config = LlamaConfig(vocab_size=3, hidden_size=8, intermediate_size=8,
    ...     num_hidden_layers=1, num_attention_heads=1)
    >>> lm = ChunkedLM(dynchunk.wrap(LlamaForCausalLM(config).eval()), tokenizer, device="cpu")
    >>> lm.get_model_info()["dynchunk_stepwise"]
    False
    """

    def __init__(
        self, model: Any, tokenizer: Any, *, stepwise: bool = False, **options: Any
    ) -> None:
        if not hasattr(model, "dynchunk"):
            raise ValueError(
                f"model: expected one that dynchunk.wrap returned, got {describe(model)}"
            )
        super().__init__(pretrained=model, tokenizer=tokenizer, **options)
        self.stepwise = stepwise

    def get_model_info(self) -> dict[str, Any]:
        """Return what the harness records of a model, with the policy of each layer."""
        policies = [None if p is None else p.as_dict() for p in self.model.dynchunk.policies]
        info: dict[str, Any] = super().get_model_info()
        return info | {"dynchunk_policies": policies, "dynchunk_stepwise": self.stepwise}

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        if not self.stepwise:
            found: list[tuple[float, bool]] = super()._loglikelihood_tokens(
                requests, disable_tqdm, override_bs
            )
            return found
        return [self._step_through(context, wanted) for _, context, wanted in requests]

    @torch.inference_mode()
    def _step_through(self, context: list[int], wanted: list[int]) -> tuple[float, bool]:
        """Return the log-likelihood of a continuation, and whether it is the greedy one."""
        given = (context + wanted)[-(self.max_length + 1) :][: -len(wanted)]
        cache = self.model.dynchunk.cache()
        piece, total, is_greedy = given, 0.0, True
        for token in wanted:
            ids = torch.tensor([piece], device=self.device)
            logits = self.model(ids, cache=cache, use_cache=True).logits[0, -1]
            scores = logits.float().log_softmax(-1)
            total += float(scores[token])
            is_greedy &= int(scores.argmax()) == token
            piece = [token]
        return total, is_greedy
