"""Files of recall models: safetensors that say which variant they are of."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dynchunk._checks import describe
from dynchunk.lab.model import LabModel
from dynchunk.lab.variants import Variant

if TYPE_CHECKING:
    from dynchunk.lab.train import Training

_FORMAT = "dynchunk.lab"
VERSION = "1"


def save(model: LabModel, training: Training, path: Path) -> None:
    """Write the weights of a model, its variant, and how it was trained."""
    write(dict(model.state_dict()), path, model.variant, asdict(training), {})


def load(path: Path) -> tuple[LabModel, dict[str, Any]]:
    """Read a model and how it was trained.

    Raises
    ------
    ValueError
        The file is missing, truncated, of another program or version, or does not fit its variant.
    """
    tensors, variant, training, _ = read(path)
    model = LabModel(variant)
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise ValueError(f"{path}: weights that do not fit its variant: {reason}") from error
    return model, training


def write(
    tensors: dict[str, Tensor],
    path: Path,
    variant: Variant,
    training: dict[str, Any],
    state: dict[str, Any],
) -> None:
    """Write tensors with what :func:`read` returns beside them."""
    metadata = {
        "format": _FORMAT,
        "version": VERSION,
        "variant": json.dumps(variant.as_dict()),
        "training": json.dumps(training),
        "state": json.dumps(state),
    }
    save_file({name: x.detach().contiguous() for name, x in tensors.items()}, path, metadata)


def read(path: Path) -> tuple[dict[str, Tensor], Variant, dict[str, Any], dict[str, Any]]:
    """Return (tensors, variant, training, state) of a file."""
    if not path.is_file():
        raise ValueError(f"checkpoint: expected a file that exists, got {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors: dict[str, Tensor] = {
                name: file.get_tensor(name)
                for name in file.keys()  # noqa: SIM118
            }
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path}: truncated, or no safetensors file ({error}); copy it again or train anew"
        ) from error
    if metadata.get("format") != _FORMAT:
        raise ValueError(f"{path}: a safetensors file, but not of a lab model")
    version = metadata.get("version")
    if version != VERSION:
        raise ValueError(
            f"{path}: written in version {describe(version)} of the format, this dynchunk reads "
            f"{describe(VERSION)}; train it anew, or use the dynchunk that wrote it"
        )
    try:
        variant = Variant.from_dict(json.loads(metadata["variant"]))
        training, state = json.loads(metadata["training"]), json.loads(metadata["state"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: a variant that cannot be read: {error}") from error
    return tensors, variant, training, state
