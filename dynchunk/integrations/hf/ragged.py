"""Batches as transformers has them, padded, and as dynchunk wants them: packed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynchunk._checks import describe, require

Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Ragged:
    """Which of the new tokens [B, T] of a batch are real, and where they go when packed.

    Build one with :meth:`of`.

    Attributes
    ----------
    real : bool array [B, T]
        On the host.
    cu_seqlens : int64 tensor [N+1]
        Offsets of the packed sequences, on the host: one for each row of the batch, or, where
        ``position_ids`` restart, one for each document.
    index : int64 tensor [S] or None
        Places of the real tokens in the flattened batch, on the device. None: all are real.
    """

    real: Mask
    cu_seqlens: Tensor
    index: Tensor | None

    @classmethod
    def of(
        cls,
        shape: tuple[int, int],
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        past: Mask | None = None,
        device: torch.device | str = "cpu",
    ) -> Ragged:
        """Read a batch.

        Parameters
        ----------
        shape : (B, T)
        attention_mask : tensor [B, P + T], optional
            Nonzero: a real token. The first P columns are those of the past, and have to be what
            they were.
        position_ids : integer tensor [B or 1, T], optional
            Documents are packed into a row where they do not go up by one. As in transformers that
            counts only without a mask and without a past.
        past : bool array [B, P], optional
            Which tokens of the past were real.
        device : torch.device or str
            Of the tensors to pack.

        Examples
        --------
        >>> ragged = Ragged.of((2, 3), torch.tensor([[0, 1, 1], [1, 1, 1]]))
        >>> ragged.cu_seqlens, ragged.pack(torch.tensor([[9, 1, 2], [3, 4, 5]]))
        (tensor([0, 2, 5]), tensor([1, 2, 3, 4, 5]))
        >>> Ragged.of((1, 5), position_ids=torch.tensor([[0, 1, 2, 0, 1]])).cu_seqlens
        tensor([0, 3, 5])
        """
        batch, length = shape
        before = np.zeros((batch, 0), np.bool_) if past is None else past
        if attention_mask is None:
            real = np.ones(shape, np.bool_)
            starts = None
            if position_ids is not None and before.shape[1] == 0:
                starts = _document_starts(position_ids, shape)
            counts = np.full(batch, length) if starts is None else starts
            return cls(real, _offsets(counts), None)
        real = _read(attention_mask, shape, before)
        index = None
        if not real.all():
            index = torch.from_numpy(np.flatnonzero(real)).to(device)
        return cls(real, _offsets(real.sum(1)), index)

    @property
    def batch(self) -> int:
        """Number B of rows."""
        return len(self.real)

    @property
    def is_packed(self) -> bool:
        """Whether a row has several documents."""
        return len(self.cu_seqlens) - 1 != self.batch

    def pack(self, x: Tensor) -> Tensor:
        """Return the real tokens [S, ...] of x [B, T, ...], sequence after sequence."""
        require(x.shape[:2] == self.real.shape, "x", f"[B, T, ...] of {self.real.shape}", x)
        flat = x.flatten(0, 1)
        return flat if self.index is None else flat[self.index]

    def unpack(self, x: Tensor) -> Tensor:
        """Return x [S, ...] as a batch [B, T, ...], zero where no token is real."""
        if self.index is not None:
            padded = x.new_zeros(self.real.size, *x.shape[1:])
            x = padded.index_copy(0, self.index, x)
        return x.reshape(*self.real.shape, *x.shape[1:])


def _read(attention_mask: Tensor, shape: tuple[int, int], past: Mask) -> Mask:
    """Return which of the new tokens a mask calls real."""
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim != 2:
        raise ValueError(
            "attention_mask: expected a mask of padding [B, T]: other masks (4-D, one per layer "
            f"type) say what a query may read, which the policy decides; got "
            f"{describe(attention_mask)}"
        )
    seen = past.shape[1]
    expected = f"shape {[shape[0], seen + shape[1]]}: {seen} columns of the past and the new ones"
    fits = tuple(attention_mask.shape) == (shape[0], seen + shape[1])
    require(fits, "attention_mask", expected, attention_mask)
    mask: Mask = attention_mask.detach().cpu().numpy() != 0
    if not np.array_equal(mask[:, :seen], past):
        raise ValueError(
            "attention_mask: it says other tokens of the past were padding than when they came; "
            "a cache of entries cannot forget single tokens: start a new one"
        )
    return mask[:, seen:]


def _document_starts(position_ids: Tensor, shape: tuple[int, int]) -> NDArray[np.int64] | None:
    """Return the lengths of packed documents, row after row; None where each row has one."""
    position = position_ids.detach().expand(shape).cpu().numpy()
    restart = np.ones(shape, np.bool_)
    restart[:, 1:] = np.diff(position, axis=1) != 1
    if restart[:, 1:].any():
        return np.diff(np.append(np.flatnonzero(restart), position.size))
    return None


def _offsets(counts: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))
