"""Models as safetensors files that hold their config, and say so when they cannot be read."""

from __future__ import annotations

import json
from os import PathLike

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dynchunk.attention.config import ModelConfig
from dynchunk.attention.policy import VERSION
from dynchunk.attention.transformer import ChunkedTransformer

_FORMAT = "dynchunk.ChunkedTransformer"


def save(
    model: ChunkedTransformer,
    path: str | PathLike[str],
    metadata: dict[str, str] | None = None,
) -> None:
    """Write the weights and the config of a model.

    Parameters
    ----------
    model : ChunkedTransformer
    path : path of the file
    metadata : dict of str, optional
        Kept in the file beside the config; how the model was trained, say.

    Examples
    --------
    >>> import tempfile
    >>> model = ChunkedTransformer(ModelConfig(vocab=10, dim=8, layers=1, heads=2, kv_heads=1))
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     save(model, file.name, {"seed": "0"})
    ...     again, metadata = load(file.name)
    >>> again.config == model.config, metadata
    (True, {'seed': '0'})
    """
    own = {
        "format": _FORMAT,
        "version": str(VERSION),
        "config": json.dumps(model.config.as_dict()),
    }
    clash = sorted(set(own) & set(metadata or {}))
    if clash:
        raise ValueError(f"metadata: expected other keys than {sorted(own)}, got {clash}")
    tensors = {name: x.detach().contiguous() for name, x in model.state_dict().items()}
    save_file(tensors, path, own | (metadata or {}))


def load(
    path: str | PathLike[str], device: torch.device | str = "cpu"
) -> tuple[ChunkedTransformer, dict[str, str]]:
    """Read a model and the metadata that :func:`save` was given.

    Raises
    ------
    FileNotFoundError
    ValueError
        A file that is truncated, of another program or version, or lacks weights.
    """
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(
            f"{path}: not a whole safetensors file ({error}); copy or download it again"
        ) from error
    if metadata.pop("format", None) != _FORMAT:
        raise ValueError(f"{path}: a safetensors file, but not of a ChunkedTransformer")
    version = metadata.pop("version", None)
    if version != str(VERSION):
        raise ValueError(
            f"{path}: written in version {version} of the format, this dynchunk reads {VERSION}; "
            "write it again with the same version of dynchunk"
        )
    try:
        model = ChunkedTransformer(ModelConfig.from_dict(json.loads(metadata.pop("config"))))
        model.to(tensors["embedding.weight"].dtype).load_state_dict(tensors)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: config and weights do not fit: {error}") from error
    return model.to(device), metadata
