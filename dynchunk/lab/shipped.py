"""Checkpoints that come with the package: what ``dynchunk audit`` measures by default."""

from __future__ import annotations

import shutil
from pathlib import Path

from dynchunk._checks import require
from dynchunk.lab.train import LOG, MODEL

HOME = Path(__file__).parent / "checkpoints"

#: Rows of the study, with seed 0: nothing compressed, the defect, its usual remedies, and content
#: boundaries.
NAMES = (
    "fixed-1-overlap",
    "fixed-4",
    "fixed-4-overlap",
    "fixed-4-staggered",
    "surprisal-4-ratio-3.84",
)


def shipped() -> list[Path]:
    """Return the files of the shipped checkpoints.

    >>> shipped()[1].stem
    'fixed-4'
    """
    return [HOME / f"{name}.safetensors" for name in NAMES]


def ship(folder: Path) -> None:
    """Copy finished runs of ``folder`` into the package, each with its training log."""
    for name in NAMES:
        run = folder / name / "seed-0"
        require((run / MODEL).is_file(), "folder", f"a finished run of {name}", str(folder))
        shutil.copyfile(run / MODEL, HOME / f"{name}.safetensors")
        shutil.copyfile(run / LOG, HOME / f"{name}.json")
