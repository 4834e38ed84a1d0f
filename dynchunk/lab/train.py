"""Training of recall models: seeded, logged, and resumed bit for bit after an interruption."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dynchunk._checks import require, require_choice, require_int
from dynchunk.lab import checkpoint
from dynchunk.lab.model import LabModel
from dynchunk.lab.variants import Variant

OPTIMIZERS = ("adamw", "muon")
MODEL, RESUME, LOG = "model.safetensors", "resume.safetensors", "training.json"


@dataclass(frozen=True, slots=True)
class Training:
    """How a model is trained.

    Parameters
    ----------
    steps, batch : int
    lr : float
        At its highest: it rises over ``warmup`` steps and falls to zero along a cosine.
    optimizer : {"adamw", "muon"}
        Muon is for the matrices of the blocks, the rest keeps AdamW.
    weight_decay, clip : float
    warmup : int
    seed : int
        Of weights and data.

    Examples
    --------
    >>> training = Training(steps=100, warmup=10)
    >>> [round(training.rate(step), 4) for step in (0, 9, 10, 55, 99)]
    [0.0004, 0.004, 0.004, 0.002, 0.0]
    """

    steps: int = 700
    batch: int = 32
    lr: float = 4e-3
    optimizer: str = "adamw"
    weight_decay: float = 0.01
    clip: float = 1.0
    warmup: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        require_int("steps", self.steps, 1)
        require_int("batch", self.batch, 1)
        require_int("seed", self.seed, 0)
        require(self.lr > 0, "lr", "a number > 0", self.lr)
        require_choice("optimizer", self.optimizer, OPTIMIZERS)

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (1 + math.cos(math.pi * done)) / 2


class Progress(NamedTuple):
    """Where a training stands."""

    step: int
    loss: float
    accuracy: float


def train(
    variant: Variant,
    training: Training,
    folder: Path,
    tell: Callable[[Progress], None] | None = None,
    *,
    keep_every: int = 50,
) -> LabModel:
    """Train a model in a folder, or go on where an interruption left it.

    The folder gets the weights (``model.safetensors``) and the log (``training.json``). A folder
    that holds the finished model returns it at once.

    Parameters
    ----------
    variant : Variant
    training : Training
    folder : path
    tell : callable, optional
        Told the progress after each step.
    keep_every : int
        Steps that an interruption loses at most.

    Raises
    ------
    ValueError
        The folder holds a run of another variant or training.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / MODEL).exists():
        model, found = checkpoint.load(folder / MODEL)
        _require_same(folder, (model.variant, found), (variant, training))
        return model
    run = _Run(variant, training)
    if (folder / RESUME).exists():
        run.load(folder / RESUME)
    started = time.perf_counter()
    while run.step < training.steps:
        progress = run.advance()
        if tell is not None:
            tell(progress)
        if run.step % keep_every == 0 and run.step < training.steps:
            run.seconds += time.perf_counter() - started
            started = time.perf_counter()
            run.save(folder / RESUME)
    run.seconds += time.perf_counter() - started
    with _whole(folder / LOG) as path:
        path.write_text(json.dumps(run.log(), indent=1))
    with _whole(folder / MODEL) as path:
        checkpoint.save(run.model, training, path)
    (folder / RESUME).unlink(missing_ok=True)
    return run.model


class _Run:
    """A training and all of its state."""

    def __init__(self, variant: Variant, training: Training) -> None:
        self.variant, self.training = variant, training
        self.model = LabModel(variant, training.seed)
        self.optimizers = _optimizers(self.model, training)
        self.step, self.seconds = 0, 0.0
        self.history: list[list[float]] = []

    def advance(self) -> Progress:
        seed, step = self.training.seed, self.step
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.training.rate(step)
            optimizer.zero_grad(set_to_none=True)
        batch = self.variant.task.draw(self.training.batch, seed=seed, step=step)
        losses = self.model.losses(batch, seed=seed, step=step)
        losses.total.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), self.training.clip)
        for optimizer in self.optimizers:
            optimizer.step()
        self.step += 1
        recall, accuracy = losses.recall.item(), losses.accuracy.item()
        self.history.append([round(recall, 4), round(accuracy, 4)])
        return Progress(self.step, recall, accuracy)

    def log(self) -> dict[str, Any]:
        return {
            "variant": self.variant.as_dict(),
            "training": asdict(self.training),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "torch": torch.__version__,
            "seconds": round(self.seconds, 1),
            "columns": ["loss", "accuracy"],
            "steps": self.history,
        }

    def save(self, path: Path) -> None:
        tensors = {f"model.{name}": x for name, x in self.model.state_dict().items()}
        for i, optimizer in enumerate(self.optimizers):
            for number, state in optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer.{i}.{number}.{name}": x for name, x in state.items()}
        meta = {"seconds": self.seconds, "history": self.history}
        with _whole(path) as partial:
            checkpoint.write(tensors, partial, self.variant, asdict(self.training), meta)

    def load(self, path: Path) -> None:
        tensors, variant, training, meta = checkpoint.read(path)
        _require_same(path.parent, (variant, training), (self.variant, self.training))
        weights = {k.removeprefix("model."): x for k, x in tensors.items() if k[:6] == "model."}
        self.model.load_state_dict(weights)
        for i, optimizer in enumerate(self.optimizers):
            state = optimizer.state_dict()
            state["state"] = _nested(tensors, f"optimizer.{i}.")
            optimizer.load_state_dict(state)
        self.seconds, self.history = meta["seconds"], meta["history"]
        self.step = len(self.history)


def _optimizers(model: LabModel, training: Training) -> list[torch.optim.Optimizer]:
    named = list(model.named_parameters())
    matrices = [p for name, p in named if training.optimizer == "muon" and _is_hidden(name, p)]
    others = [p for _, p in named if not any(p is matrix for matrix in matrices)]
    decay = training.weight_decay
    found: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(others, training.lr, weight_decay=decay, betas=(0.9, 0.98))
    ]
    if matrices:
        found.append(
            torch.optim.Muon(
                matrices, training.lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw"
            )
        )
    return found


def _is_hidden(name: str, parameter: Tensor) -> bool:
    return parameter.ndim == 2 and ".blocks." in f".{name}"


def _nested(tensors: dict[str, Tensor], prefix: str) -> dict[int, dict[str, Tensor]]:
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith(prefix):
            number, name = key.removeprefix(prefix).split(".")
            state.setdefault(int(number), {})[name] = value
    return state


def _require_same(
    folder: Path, found: tuple[Variant, dict[str, Any]], wanted: tuple[Variant, Training]
) -> None:
    """Refuse a folder of another run, and say what differs."""
    before = {**found[0].as_dict(), **found[1]}
    now = {**wanted[0].as_dict(), **asdict(wanted[1])}
    differing = sorted(key for key in now if before.get(key) != now[key])
    if differing:
        raise ValueError(
            f"{folder}: holds a run of another {', '.join(differing)}; choose another folder, or "
            "remove this one"
        )


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """Write beside the path, then move: an interruption leaves the old file or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    yield partial
    os.replace(partial, path)
