"""Argument checks of the kernels' entry points.

Shapes, dtypes, devices and strides are always checked, and so are page numbers in lists and other host
arrays: none of that waits for the card. Numbers in tensors on the card are looked at in debug mode only
(``KVALLOC_DEBUG_KERNELS=1`` in the environment, or ``kvalloc.kernels.check.DEBUG = True``), since reading
them back stops the pipeline.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import torch

from kvalloc.errors import InvalidArgument
from kvalloc.typing import Int32s

__all__ = ["DEBUG", "disjoint", "frames", "int_tensor", "same_device", "shape", "slots", "strides", "table"]

DEBUG = os.environ.get("KVALLOC_DEBUG_KERNELS", "0").lower() in ("1", "true", "on")


def shape(name: str, tensor: torch.Tensor, dims: Sequence[int | str]) -> None:
    """Check a tensor's shape and that its last dimension is contiguous.

    Parameters
    ----------
    name : str
        What the argument is called.
    tensor : torch.Tensor
        The argument.
    dims : sequence of int or str
        The wanted size of each dimension; a name where any will do.

    Raises
    ------
    InvalidArgument
        If it differs.
    """
    given = tuple(tensor.shape)
    if len(given) != len(dims) or any(
        isinstance(d, int) and d != g for d, g in zip(dims, given, strict=False)
    ):
        raise InvalidArgument(f"{name}: must be [{', '.join(map(str, dims))}], got {list(given)}")
    if tensor.numel() and given[-1] > 1 and tensor.stride(-1) != 1:
        raise InvalidArgument(
            f"{name}: the last dimension must be contiguous, its stride is {tensor.stride(-1)}"
        )


def strides(pages: torch.Tensor | None) -> tuple[int, int, int]:
    """Steps from one frame, token and head to the next, in elements; zeros where there is no tensor."""
    if pages is None:
        return 0, 0, 0
    frame, token, head = pages.stride()[:3]
    return frame, token, head


def int_tensor(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Check that a tensor of numbers has the dtype that the kernels read.

    Raises
    ------
    InvalidArgument
        If not.
    """
    if tensor.dtype != dtype:
        raise InvalidArgument(f"{name}: must be {dtype}, got {tensor.dtype}")


def same_device(first: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Check that all tensors lie on the device of the first.

    Raises
    ------
    InvalidArgument
        Naming the one that does not.
    """
    for name, tensor in others.items():
        if tensor is not None and tensor.device != first.device:
            raise InvalidArgument(f"{name}: is on {tensor.device}, the others are on {first.device}")


def frames(name: str, numbers: Int32s | torch.Tensor, count: int, device: torch.device) -> torch.Tensor:
    """Check frame numbers, and put them on the device if they are not there.

    Parameters
    ----------
    name : str
        What the argument is called.
    numbers : sequence, array or torch.Tensor
        Frame numbers.
    count : int
        Frames there are.
    device : torch.device
        Where the kernel reads them.

    Returns
    -------
    torch.Tensor
        int32 or int64 ``[n]`` on the device.

    Raises
    ------
    InvalidArgument
        If a number is out of range; on the device in debug mode only.
    """
    if isinstance(numbers, torch.Tensor) and not numbers.is_cpu:
        if numbers.device != device:
            raise InvalidArgument(f"{name}: are on {numbers.device}, the pages on {device}")
        if numbers.dtype not in (torch.int32, torch.int64) or numbers.dim() != 1:
            raise InvalidArgument(
                f"{name}: must be int32 or int64 [n], got {numbers.dtype} {list(numbers.shape)}"
            )
        if DEBUG:
            _in_range(name, numbers.cpu().numpy(), count)
        return numbers.contiguous()
    host = np.asarray(numbers)
    if host.ndim != 1 or (host.size and host.dtype.kind not in "iu"):
        raise InvalidArgument(
            f"{name}: must be whole numbers in one dimension, got {host.dtype} {list(host.shape)}"
        )
    host = host.astype(np.int64, copy=False)
    _in_range(name, host, count)
    return torch.tensor(host, device=device)


def _in_range(name: str, numbers: np.ndarray, count: int) -> None:
    bad = np.flatnonzero((numbers < 0) | (numbers >= count))
    if bad.size:
        error = InvalidArgument(
            f"{name}[{bad[0]}] is frame {numbers[bad[0]]}, but there are {count:,}"
            + (f" ({bad.size} such numbers)" if bad.size > 1 else "")
        )
        error.given = int(numbers[bad[0]])
        raise error


def disjoint(destinations: Int32s | torch.Tensor, sources: Int32s | torch.Tensor = ()) -> None:
    """Check that no frame is a destination twice, or a destination and a source: copies happen in no order.

    Raises
    ------
    InvalidArgument
        If one is; for tensors on the device in debug mode only.
    """
    if not DEBUG and any(isinstance(n, torch.Tensor) and not n.is_cpu for n in (destinations, sources)):
        return
    into, out = (
        n.cpu().numpy() if isinstance(n, torch.Tensor) else np.asarray(n) for n in (destinations, sources)
    )
    seen, counts = np.unique(into, return_counts=True)
    both = np.intersect1d(seen, out)
    for bad, what in [(seen[counts > 1], "a destination twice"), (both, "a source and a destination")]:
        if bad.size:
            raise InvalidArgument(
                f"frame {bad[0]} is {what}: the copies happen in no order, split them into two calls"
            )


def slots(slot_mapping: torch.Tensor, frame_count: int, page_tokens: int) -> None:
    """Check a slot mapping's numbers (debug mode).

    Raises
    ------
    InvalidArgument
        Naming the first that is out of range.
    """
    bad = torch.nonzero((slot_mapping < -1) | (slot_mapping >= frame_count * page_tokens))
    if bad.numel():
        token = int(bad[0])
        raise InvalidArgument(
            f"slot_mapping[{token}] is {int(slot_mapping[token])}: must be -1, or below "
            f"{frame_count * page_tokens:,} ({frame_count:,} frames of {page_tokens} tokens)"
        )


def table(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    page_tokens: int,
    frame_count: int,
    small_count: int,
    window: int | None,
    chunk: int | None,
) -> None:
    """Check lengths, and the page numbers that a decode step would read (debug mode).

    Raises
    ------
    InvalidArgument
        Naming the row, and the first page number that is out of range.
    """
    capacity = block_table.shape[1] * page_tokens
    bad = torch.nonzero((seq_lens < 0) | (seq_lens > capacity))
    if bad.numel():
        row = int(bad[0])
        raise InvalidArgument(
            f"seq_lens[{row}] is {int(seq_lens[row])}: a row of block_table shows 0 to {capacity:,} tokens"
        )
    first = torch.zeros_like(seq_lens)
    if window is not None:
        first = (seq_lens - window).clamp(min=0)
    if chunk is not None:
        first = (seq_lens - 1).clamp(min=0) // chunk * chunk
    page = torch.arange(block_table.shape[1], device=block_table.device)
    read = (page >= (first // page_tokens)[:, None]) & (page * page_tokens < seq_lens[:, None])
    bad = torch.nonzero(read & ((block_table >= frame_count) | (block_table < -small_count)))
    if bad.numel():
        row, column = bad[0].tolist()
        raise InvalidArgument(
            f"block_table[{row}, {column}] is {int(block_table[row, column])}: must be 0 to "
            f"{frame_count - 1:,}"
            + (
                f", or -{small_count:,} to -1 for the small class"
                if small_count
                else ", and there is no small class"
            )
        )
