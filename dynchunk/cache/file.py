"""Caches as safetensors files, which appear whole or not at all and say what they are for."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dynchunk._checks import describe
from dynchunk.attention.config import ModelConfig
from dynchunk.attention.policy import Policy
from dynchunk.boundaries import BoundaryRule, SharePlan
from dynchunk.cache.closings import Closings, Integers
from dynchunk.cache.layout import StreamLayout
from dynchunk.cache.segments import Segments

if TYPE_CHECKING:
    from dynchunk.cache.cache import Cache

#: Version of the files.
VERSION = 1

_FORMAT = "dynchunk.Cache"
_KEYS = ("format", "version", "of", "batch", "rollback", "page_size", "tensors")


def save(cache: Cache, path: str | PathLike[str]) -> None:
    """Write a cache."""
    tensors = dict(_state(cache))
    metadata = {
        "format": _FORMAT,
        "version": str(VERSION),
        "of": json.dumps(_purpose(cache.policies, cache.leaders, cache.config)),
        "batch": str(cache.batch),
        "rollback": json.dumps(cache.rollback),
        "page_size": str(cache.page_size),
        "tensors": json.dumps(sorted(tensors)),
    }
    whole = Path(path)
    part = whole.with_name(f".{whole.name}.{secrets.token_hex(4)}.part")
    try:
        save_file({name: x.contiguous() for name, x in tensors.items()}, part, metadata)
        _sync(part)
        part.replace(whole)
        _sync(whole.parent)
    finally:
        part.unlink(missing_ok=True)


def load(
    path: str | PathLike[str],
    of: ModelConfig | Policy | Sequence[Policy],
    device: torch.device | str,
) -> Cache:
    """Read a cache."""
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(
            f"{path}: not a whole safetensors file ({error}); the cache has to be built again"
        ) from error
    _check_metadata(path, metadata, tensors)
    options = {name: json.loads(metadata[name]) for name in ("batch", "rollback", "page_size")}
    cache = _empty(path, json.loads(metadata["of"]), of, options | {"device": device})
    try:
        _restore(cache, tensors)
        return cache.check()
    except (KeyError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: its contents do not fit together: {error}") from error


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _check_metadata(path: object, metadata: dict[str, str], tensors: dict[str, Tensor]) -> None:
    if metadata.get("format") != _FORMAT:
        raise ValueError(f"{path}: a safetensors file, but not of a Cache")
    version = metadata.get("version")
    if version != str(VERSION):
        raise ValueError(
            f"{path}: written in version {version} of the format, this dynchunk reads {VERSION}; "
            "the cache has to be built again"
        )
    missing = [key for key in _KEYS if key not in metadata]
    if not missing:
        missing = sorted(set(json.loads(metadata["tensors"])) ^ set(tensors))
    if missing:
        raise ValueError(f"{path}: lacks, or has too much, {', '.join(missing)}")


def _empty(
    path: object,
    saved: dict[str, Any],
    of: ModelConfig | Policy | Sequence[Policy],
    options: dict[str, Any],
) -> Cache:
    """Return an empty cache, once it is clear that the file is for the same."""
    from dynchunk.cache.cache import Cache

    config = of if isinstance(of, ModelConfig) else None
    if isinstance(of, ModelConfig):
        policies, leaders = [of.policy(layer) for layer in range(of.layers)], of.plan.leaders
    else:
        policies, leaders = [of] if isinstance(of, Policy) else list(of), saved["leaders"]
    found = _difference("", saved, _purpose(policies, leaders, config))
    if found:
        raise ValueError(f"{path}: a cache of another model or policy: {found}")
    if config is not None:
        return Cache.of(config, **options)
    return Cache(policies, sharing=SharePlan(tuple(leaders)), **options)


def _purpose(
    policies: Sequence[Policy], leaders: Sequence[int], config: ModelConfig | None
) -> dict[str, Any]:
    return {
        "policies": [policy.as_dict() for policy in policies],
        "leaders": list(leaders),
        "config": None if config is None else config.as_dict(),
    }


def _difference(name: str, file: Any, here: Any) -> str | None:
    """Say where two JSON values differ first; a config that only one has does not matter."""
    if name == "config" and (file is None or here is None):
        return None
    if isinstance(file, dict) and isinstance(here, dict) and set(file) == set(here):
        pairs = [(f"{name}.{key}" if name else key, file[key], here[key]) for key in file]
    elif isinstance(file, list) and isinstance(here, list) and len(file) == len(here):
        items = enumerate(zip(file, here, strict=True))
        pairs = [(f"{name}[{i}]", one, other) for i, (one, other) in items]
    else:
        same = json.dumps(file) == json.dumps(here)
        return None if same else f"{name} is {describe(file)} there and {describe(here)} here"
    return next((found for pair in pairs if (found := _difference(*pair))), None)


# What is in a file: sequences one after another, so that buffers may be laid out anew


def _state(cache: Cache) -> list[tuple[str, Tensor]]:
    state = [("lengths", _tensor(cache.lengths)), ("floor", _tensor(cache.croppable))]
    for i, segments in enumerate(cache.segments):
        state += [(f"segments.{i}.{name}", x) for name, x in _of_segments(segments)]
    for i, layout in enumerate(cache.layouts):
        state.append((f"layout.{i}.begin", _tensor(layout.map.begin)))
        for g in range(len(layout.policy.views)):
            moved = [layout.moved[g][b] for b in range(cache.batch)]
            state += [(f"layout.{i}.{g}.{name}", x) for name, x in _of_closings(moved)]
        state += [(f"layout.{i}.own.{name}", _tensor(x)) for name, x in layout.state().items()]
    for i, layer in enumerate(cache.layers):
        layout = cache.layout(i)
        raw, entries = _tensor(layout.map.rows()), _tensor(_entry_rows(layout))
        for name, x in layer.rows.items():
            state.append((f"layer.{i}.rows.{name}", x[raw.to(x.device)]))
        for name, x in layer.entries.items():
            state.append((f"layer.{i}.entries.{name}", x.flatten(0, 1)[entries.to(x.device)]))
        state += [(f"layer.{i}.own.{name}", x) for name, x in layer.state().items()]
    return state


def _of_segments(segments: Segments) -> list[tuple[str, Tensor]]:
    state = [("begin", _tensor(segments.map.begin))]
    rows = _tensor(segments.map.rows())
    state += [(f"rows.{name}", x[rows.to(x.device)]) for name, x in segments.rows.items()]
    for source, of_source in enumerate(segments.closings):
        state += [(f"{source}.{name}", x) for name, x in _of_closings(of_source)]
    for source, streams in enumerate(segments.streams):
        saved = [stream.state_dict() for stream in streams]
        for name in ("scores", "boundaries"):
            empty = torch.zeros(0, dtype=torch.float64 if name == "scores" else torch.int64)
            values = [one[name] for one in saved]
            joined = torch.cat(values) if values else empty
            state.append((f"{source}.stream.{name}", joined))
            state.append((f"{source}.stream.{name}.counts", _tensor([len(x) for x in values])))
        for name in ("first", "earliest"):
            state.append((f"{source}.stream.{name}", _tensor([one[name] for one in saved])))
    return state


def _of_closings(closings: Sequence[Closings]) -> list[tuple[str, Tensor]]:
    of_all = [np.stack([one.ends, one.known]) for one in closings]
    joined = np.concatenate([np.zeros((2, 0), np.int64), *of_all], 1)
    counts = [len(one) for one in closings]
    return [("closings", torch.from_numpy(joined)), ("closings.counts", _tensor(counts))]


def _restore(cache: Cache, tensors: dict[str, Tensor]) -> None:
    """Fill an empty cache with what :func:`_state` returned."""
    lengths = _integers(tensors["lengths"])
    cache.set_lengths(lengths, _integers(tensors["floor"]))
    for i, segments in enumerate(cache.segments):
        own = _below(f"segments.{i}.", tensors)
        segments.lengths = lengths.copy()
        segments.map.place(_integers(own["begin"]), lengths)
        segments.rows.place(segments.map, _below("rows.", own))
        for source, of_source in enumerate(segments.closings):
            _restore_closings(of_source, _below(f"{source}.", own))
        for source, streams in enumerate(segments.streams):
            _restore_streams(segments, streams, _below(f"{source}.stream.", own))
    for i, layout in enumerate(cache.layouts):
        own = _below(f"layout.{i}.", tensors)
        layout.map.place(_integers(own["begin"]), lengths)
        for g, moved in enumerate(layout.moved):
            _restore_closings(moved, _below(f"{g}.", own))
            for b in range(cache.batch):
                layout.table.extend(g, b, 0, layout.entries(g, b))
        layout.restore({name: _integers(x) for name, x in _below("own.", own).items()})
    for i, layer in enumerate(cache.layers):
        own, layout = _below(f"layer.{i}.", tensors), cache.layout(i)
        layer.rows.place(layout.map, _below("rows.", own))
        for name, x in _below("entries.", own).items():
            layer.write(name, _tensor(_entry_rows(layout)).to(x.device), x)
        layer.restore(_below("own.", own))


def _restore_closings(closings: Sequence[Closings], state: dict[str, Tensor]) -> None:
    joined, counts = state["closings"].cpu().numpy(), _integers(state["closings.counts"])
    pieces = np.split(joined, np.cumsum(counts)[:-1], 1) if len(counts) else []
    for one, piece in zip(closings, pieces, strict=True):
        one.append(piece[0], piece[1])


def _restore_streams(segments: Segments, streams: Sequence[Any], state: dict[str, Tensor]) -> None:
    pieces = {
        name: torch.split(state[name].cpu(), state[f"{name}.counts"].tolist())
        for name in ("scores", "boundaries")
    }
    assert isinstance(segments.rule, BoundaryRule)
    rule = segments.rule.parameters._asdict()
    for b, stream in enumerate(streams):
        own = {name: of_all[b] for name, of_all in pieces.items()}
        counts = {name: int(state[name][b]) for name in ("first", "earliest")}
        stream.load_state_dict({"rule": rule, **own, **counts})


def _entry_rows(layout: StreamLayout) -> Integers:
    rows = [
        layout.table.rows(g, b, 0, layout.entries(g, b))
        for g in range(len(layout.policy.views))
        for b in range(layout.batch)
    ]
    return np.concatenate([np.zeros(0, np.int64), *rows])


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}


def _tensor(integers: Sequence[int] | Integers) -> Tensor:
    return torch.from_numpy(np.array(integers, np.int64))


def _integers(x: Tensor) -> Integers:
    return x.cpu().numpy().copy()
