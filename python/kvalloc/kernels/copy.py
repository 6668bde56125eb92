"""Copies of whole pages: within the pool, and between the pool and a contiguous buffer for swapping.

A page is a run of bytes here, whatever it holds. Runs of adjacent frames go faster by the card's copy engines
over the host link; these kernels serve lists of frames that lie anywhere, at the speed of device memory.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kvalloc.errors import InvalidArgument
from kvalloc.kernels import check
from kvalloc.kernels.device import card_of, current

if TYPE_CHECKING:
    from kvalloc.typing import Int32s

__all__ = ["copy_pages", "gather_pages", "scatter_pages"]

_BLOCK = 2048  # words of four bytes a program copies


@triton.jit
def _copy_rows(
    source, target, source_rows, target_rows, source_stride, target_stride, words, BLOCK: tl.constexpr
):  # fmt: skip
    """Copy a piece of one row. Rows are counted off, or named by a list."""
    at = tl.program_id(0).to(tl.int64)
    from_row = at
    to_row = at
    if source_rows is not None:
        from_row = tl.load(source_rows + at).to(tl.int64)
    if target_rows is not None:
        to_row = tl.load(target_rows + at).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    piece = tl.load(source + from_row * source_stride + word, mask=word < words)
    tl.store(target + to_row * target_stride + word, piece, mask=word < words)


def _words(name: str, rows: torch.Tensor) -> torch.Tensor:
    """Rows of bytes as rows of words, which are moved by four; refuse what does not lie on 16 bytes."""
    check.shape(name, rows, ["frames", "page_bytes"])
    if rows.dtype != torch.uint8:
        raise InvalidArgument(f"{name}: must be uint8, got {rows.dtype}")
    for what, number in [
        ("page_bytes", rows.shape[1]),
        ("stride", rows.stride(0)),
        ("address", rows.data_ptr()),
    ]:
        if number % 16:
            raise InvalidArgument(f"{name}: its {what}, {number}, must be a multiple of 16")
    return rows.view(torch.int32)


def _copy(
    source: torch.Tensor,
    target: torch.Tensor,
    source_rows: torch.Tensor | None,
    target_rows: torch.Tensor | None,
    count: int,
) -> None:
    words = source.shape[1]
    if count and words:
        with current(source):
            _copy_rows[(count, triton.cdiv(words, _BLOCK))](
                source,
                target,
                source_rows,
                target_rows,
                source.stride(0),
                target.stride(0),
                words,
                BLOCK=_BLOCK,
            )


def copy_pages(
    pages: torch.Tensor, sources: "Int32s | torch.Tensor", destinations: "Int32s | torch.Tensor"
) -> None:
    """Copy pages within a pool.

    Parameters
    ----------
    pages : torch.Tensor
        uint8 ``[frames, page_bytes]``: all pages of a class, or one layer's part of them. Rows begin at
        multiples of 16 bytes.
    sources, destinations : sequence of int, array or torch.Tensor
        Frame numbers ``[n]``. All copies happen at once, so a destination must not be named twice, nor be a
        source.

    Raises
    ------
    InvalidArgument
        If a number is out of range or a destination stands for two things: always for lists and host arrays,
        in debug mode (`kvalloc.kernels.check`) for tensors on the device. Nothing was copied.
    """
    card_of(pages)
    words = _words("pages", pages)
    source_rows = check.frames("sources", sources, pages.shape[0], pages.device)
    target_rows = check.frames("destinations", destinations, pages.shape[0], pages.device)
    if len(source_rows) != len(target_rows):
        raise InvalidArgument(f"{len(source_rows)} sources, but {len(target_rows)} destinations")
    check.disjoint(destinations, sources)
    _copy(words, words, source_rows, target_rows, len(source_rows))


def gather_pages(
    pages: torch.Tensor, frames: "Int32s | torch.Tensor", out: torch.Tensor | None = None
) -> torch.Tensor:
    """Copy pages from anywhere in a pool into a contiguous buffer, for a swap out in one piece.

    Parameters
    ----------
    pages : torch.Tensor
        uint8 ``[frames, page_bytes]``, as for `copy_pages`.
    frames : sequence of int, array or torch.Tensor
        Frame numbers ``[n]``.
    out : torch.Tensor, optional
        uint8 ``[n, page_bytes]`` or longer, on the same device; its first n rows are written.

    Returns
    -------
    torch.Tensor
        uint8 ``[n, page_bytes]``: the first rows of `out`, or a new buffer.

    Raises
    ------
    InvalidArgument
        As for `copy_pages`.
    """
    card_of(pages)
    words = _words("pages", pages)
    rows = check.frames("frames", frames, pages.shape[0], pages.device)
    if out is None:
        out = pages.new_empty(len(rows), pages.shape[1])
    staging = _staging("out", out, len(rows), pages)
    _copy(words, staging, rows, None, len(rows))
    return out[: len(rows)]


def scatter_pages(staging: torch.Tensor, frames: "Int32s | torch.Tensor", pages: torch.Tensor) -> None:
    """Copy a contiguous buffer's rows to pages anywhere in a pool, for a swap in.

    Parameters
    ----------
    staging : torch.Tensor
        uint8 ``[n, page_bytes]`` or longer, on the pool's device.
    frames : sequence of int, array or torch.Tensor
        Frame numbers ``[n]``; none twice.
    pages : torch.Tensor
        uint8 ``[frames, page_bytes]``, as for `copy_pages`.

    Raises
    ------
    InvalidArgument
        As for `copy_pages`.
    """
    card_of(pages)
    words = _words("pages", pages)
    rows = check.frames("frames", frames, pages.shape[0], pages.device)
    check.disjoint(frames)
    _copy(_staging("staging", staging, len(rows), pages), words, None, rows, len(rows))


def _staging(name: str, buffer: torch.Tensor, count: int, pages: torch.Tensor) -> torch.Tensor:
    check.same_device(pages, **{name: buffer})
    check.shape(name, buffer, ["n", pages.shape[1]])
    if buffer.shape[0] < count:
        raise InvalidArgument(f"{name}: has {buffer.shape[0]:,} rows, {count:,} are needed")
    return _words(name, buffer)
