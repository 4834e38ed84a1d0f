"""Putting a policy into a transformers model, and taking it out again."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache

from dynchunk._checks import require
from dynchunk.attention.policy import Policy
from dynchunk.attention.scoring import Segmenter
from dynchunk.boundaries.scores.base import Score
from dynchunk.cache.cache import ROLLBACK
from dynchunk.integrations.hf import record, trainable
from dynchunk.integrations.hf.attention import NAME, Forward
from dynchunk.integrations.hf.cache import ChunkedCache
from dynchunk.integrations.hf.ragged import Ragged
from dynchunk.integrations.hf.report import Report, unwrapped_class_instance


class Wrapping:
    """What was done to a model: its report, its caches, and how to undo it.

    A family of models that needs more than another attention function subclasses this and
    overrides :meth:`install` and :meth:`remove`.

    Attributes
    ----------
    report : Report
    policies : tuple of Policy or None
        One per layer. None: the layer is left as it is.
    """

    def __init__(
        self,
        model: Any,
        report: Report,
        policies: Sequence[Policy | None],
        *,
        score: Score | None = None,
        rollback: int | None = ROLLBACK,
        page_size: int = 64,
        impl: str | None = None,
        trainable: bool = False,
    ) -> None:
        self.model, self.inner = model, unwrapped_class_instance(model)
        self.decoder = self.inner.get_decoder()
        self.policies, self.score, self.impl = tuple(policies), score, impl
        self.sizes: dict[str, Any] = {"rollback": rollback, "page_size": page_size}
        layers = (
            replace(layer, policy=policy)
            for layer, policy in zip(report.layers, self.policies, strict=True)
        )
        self.report = replace(report, layers=tuple(layers))
        self._by_layer = {i: p for i, p in enumerate(self.policies) if p is not None}
        self.trainable = trainable
        self._signature = inspect.signature(self.decoder.forward)

    def cache(self, **options: Any) -> ChunkedCache:
        """Return an empty cache for the model; options as in :class:`ChunkedCache`."""
        options = self.sizes | {"score": self.score, "segmenters": self._leading()} | options
        return ChunkedCache(self.policies, config=self.decoder.config, **options)

    def attach(self) -> None:
        """Put the policies into the model."""
        self.install()
        for owner in self._owners():
            owner.__dict__["_dynchunk"] = self
            owner.__class__ = _wrapped_class(type(owner))

    def detach(self) -> None:
        """Leave the model as it was."""
        for owner in self._owners():
            if type(owner).__bases__[0] is not WrappedModel:
                raise RuntimeError(
                    f"dynchunk: something has changed the class of the model to "
                    f"{type(owner).__name__} since it was wrapped; undo that first"
                )
        for owner in self._owners():
            owner.__class__ = type(owner).__bases__[1]
            del owner.__dict__["_dynchunk"]
        self.remove()

    def _owners(self) -> list[Any]:
        """Return the model, and the one inside it if it is of PEFT."""
        return [self.model] if self.model is self.inner else [self.model, self.inner]

    def install(self) -> None:
        """Change the decoder."""
        config = self.decoder.config
        self._before = config.__dict__.get(record.KEY), config._attn_implementation
        found = record.write(self.policies)
        found["attn_implementation"] = config._attn_implementation
        kept = [layer for layer in self.report.layers if not layer.wrapped]
        found["needs_mask"] = any(layer.kind == "full_attention" for layer in kept)
        found["needs_window_mask"] = any(layer.kind != "full_attention" for layer in kept)
        found["trainable"] = self.trainable
        names = {layer.index: layer.name for layer in self.report.layers}
        added = trainable.add(self.decoder, names, self._by_layer) if self.trainable else []
        setattr(config, record.KEY, found)
        config._attn_implementation = NAME
        self._hooks = [
            *added,
            self.decoder.register_forward_pre_hook(self._begin, with_kwargs=True),
            self.decoder.register_forward_hook(_end, with_kwargs=True),
        ]

    def remove(self) -> None:
        """Undo :meth:`install`."""
        config, (found, implementation) = self.decoder.config, self._before
        for hook in self._hooks:
            hook.remove()
        trainable.remove(self.decoder)
        config._attn_implementation = implementation
        if found is None:
            delattr(config, record.KEY)
        else:
            setattr(config, record.KEY, found)

    def check(self, ragged: Ragged, position_ids: Tensor | None) -> None:
        """Raise where a batch cannot be read as ``ragged``; here the model's own RoPE reads all."""

    @torch.compiler.disable
    def _begin(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Read the batch, cut it into chunks, and hand that to the layers."""
        bound = self._signature.bind_partial(*args, **kwargs).arguments
        options = bound.pop("kwargs", {}) | bound
        _check_options(options)
        ids, embeds = options.get("input_ids"), options.get("inputs_embeds")
        x = ids if ids is not None else embeds
        if x is None:
            return (), options  # the model says what is missing
        cache = self._check_cache(options.pop("past_key_values", None) or options.get("cache"))
        given = options.get("attention_mask")
        ragged = Ragged.of(
            (x.shape[0], x.shape[1]),
            given,
            options.get("position_ids") if cache is None else None,
            past=None if cache is None else cache.real,
            device=x.device,
        )
        self.check(ragged, options.get("position_ids"))
        if cache is None and self._wants_cache(options, ragged):
            cache = self.cache()
        options["cache"], options["use_cache"] = cache, cache is not None
        tokens = None if ids is None else ragged.pack(ids)
        segmenters, hidden = self._segmenters(), None
        if segmenters:
            embeds = self.decoder.get_input_embeddings()(ids) if embeds is None else embeds
            hidden = ragged.pack(embeds)
        if cache is None and not torch.is_grad_enabled():
            cache = self.cache(rollback=0)  # for this forward
        if cache is not None:
            cache.begin(ragged, tokens, x.device, hidden)
        forward = Forward(
            ragged, self._by_layer, cache, tokens, self.score, self.impl, segmenters, hidden
        )
        if segmenters and cache is None:  # here, for a layer may run twice (checkpointing)
            for layer in segmenters:
                forward.layout(self._by_layer[layer], x.device)
        options["dynchunk"] = forward
        return (), options

    def _segmenters(self) -> dict[int, Segmenter]:
        """Return the scorers with weights, by layer."""
        found = getattr(self.decoder, trainable.SCORES, None)
        if found is None:
            return {}
        return {
            i: found[trainable.key(policy)]
            for i, policy in self._by_layer.items()
            if trainable.key(policy) in found
        }

    def _leading(self) -> dict[int, Segmenter]:
        """Return the same, by the number of the layer among those that are wrapped."""
        numbers = {layer: n for n, layer in enumerate(self._by_layer)}
        return {numbers[layer]: one for layer, one in self._segmenters().items()}

    def _wants_cache(self, options: dict[str, Any], ragged: Ragged) -> bool:
        wanted = options.get("use_cache")
        if wanted and ragged.is_packed:
            raise ValueError(
                "use_cache: expected False or None with documents packed into a row, which a cache "
                "cannot continue, got True"
            )
        if wanted is None:
            wanted = getattr(self.decoder.config, "use_cache", True)
        is_training = self.decoder.training and torch.is_grad_enabled()
        return bool(wanted) and not is_training and not ragged.is_packed

    def _check_cache(self, cache: Any) -> ChunkedCache | None:
        """Return a cache that is for this model as it is wrapped now."""
        if cache is None:
            return None
        if not isinstance(cache, ChunkedCache):
            raise ValueError(
                "cache: a wrapped model fills caches of its own kind: pass none, and it makes one, "
                f"or model.dynchunk.cache(); got {type(cache).__name__}"
            )
        if cache.policies != self.policies or cache.score is not self.score:
            raise ValueError(
                "cache: it was filled under another policy than the model has now; entries cannot "
                "be converted: start a new cache, or wrap the model as it was before"
            )
        return cache


class WrappedModel:
    """What a wrapped model is beside what it was: ``with dynchunk.wrap(model) as model``."""

    @property
    def dynchunk(self) -> Wrapping:
        """The report, the policies and new caches."""
        found: Wrapping = self.__dict__["_dynchunk"]
        return found

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.dynchunk.detach()

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Let ``generate`` start with a cache of ours where it would make one."""
        kind = generation_config.cache_implementation
        expected = "None: the policy decides what is kept"
        require(kind in (None, "dynamic"), "cache_implementation", expected, kind)
        given = model_kwargs.get("cache")
        parent: Any = super()
        result = parent._prepare_cache_for_generation(
            generation_config, model_kwargs, *args, **kwargs
        )
        if given is None and isinstance(model_kwargs.get("cache"), TransformersCache):
            model_kwargs["cache"] = self.dynchunk.cache()
            if generation_config.is_assistant:
                model_kwargs["cache"].activate_past_recording()
        return result


@torch.compiler.disable
def _end(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Count the tokens that all layers have had."""
    if kwargs.get("cache") is not None:
        kwargs["cache"].end()


def _check_options(options: dict[str, Any]) -> None:
    if options.get("output_attentions"):
        raise ValueError(
            "output_attentions: entries stand for several tokens, so there are no weights of "
            "tokens; leave it False"
        )
    expected = "True or None: only causal attention can be wrapped"
    require(options.get("is_causal") is not False, "is_causal", expected, False)


def _wrapped_class(cls: type) -> type:
    """Return a class like ``cls`` that is a :class:`WrappedModel` too.

    It keeps the name, which transformers writes into configs, and the module, whose source it
    reads.
    """
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (WrappedModel, cls), names)
