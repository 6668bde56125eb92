"""Argument checks of the entry points.

Shapes, dtypes and strides are looked at in every call; none of that waits for the device. Numbers that lie
on the device (lengths, block tables, slots, frames) only in debug mode, ``KVALLOC_DEBUG_KERNELS=1`` in the
environment, since reading them back does.
"""

import os
from collections.abc import Sequence

import numpy as np

from kvalloc.errors import InvalidArgument
from kvalloc.kernels.cuda.backend import Array, Backend, Layout

__all__ = ["KINDS", "batch", "debug", "integers", "keys", "kind_of", "numbers", "shape"]

# Number formats as numbers.cuh numbers them. numpy has no bfloat16 and no float8: unsigned integers of their
# bits stand for them, or the types of ml_dtypes.
KINDS = {
    "float32": 0,
    "float16": 1,
    "bfloat16": 2,
    "uint16": 2,
    "int8": 3,
    "float8_e4m3fn": 4,
    "uint8": 4,
}


def debug() -> bool:
    """Tell whether numbers on the device are to be checked."""
    return os.environ.get("KVALLOC_DEBUG_KERNELS", "0").lower() in ("1", "true", "on")


def _adjacent(name: str, array: Layout) -> None:
    if array.size and array.shape[-1] > 1 and array.strides[-1] != array.dtype.itemsize:
        raise InvalidArgument(
            f"{name}: the last axis must be adjacent; the strides are {array.strides} bytes"
        )


def kind_of(name: str, array: Layout, allowed: Sequence[str] = tuple(KINDS)) -> int:
    """Return the number of an array's format.

    Raises
    ------
    InvalidArgument
        If its dtype is none of `allowed`, or its last axis is strided.
    """
    dtype = str(array.dtype)
    if dtype not in allowed:
        raise InvalidArgument(f"{name} is {dtype}; it can be {', '.join(allowed)} (uint16, uint8: the bits)")
    _adjacent(name, array)
    return KINDS[dtype]


def shape(name: str, array: Layout, *wanted: int | None) -> None:
    """Refuse an array of another shape; None stands for any length.

    Raises
    ------
    InvalidArgument
        If the number of axes or a length differs.
    """
    given = tuple(array.shape)
    if len(given) != len(wanted) or any(n is not None and n != m for n, m in zip(wanted, given, strict=True)):
        needed = ", ".join("any" if n is None else str(n) for n in wanted)
        raise InvalidArgument(f"{name} has shape {given}; needed: ({needed})")


def keys(name: str, k: Layout, v: Layout | None, k_scale: Layout | None, v_scale: Layout | None) -> int:
    """Check one layer's arrays of a page class and return its kind.

    Raises
    ------
    InvalidArgument
        If shapes or dtypes don't fit, or scales are missing or too many.
    """
    shape(f"{name}k", k, None, None, None, None)
    kind = kind_of(f"{name}k", k)
    if v is not None:
        shape(f"{name}v", v, *k.shape[:3], None)
        if kind_of(f"{name}v", v) != kind:
            raise InvalidArgument(f"{name}k is {k.dtype} and {name}v is {v.dtype}: a page has one dtype")
    for which, values, scale in ((f"{name}k", k, k_scale), (f"{name}v", v, v_scale)):
        if (scale is None) != (kind != KINDS["int8"] or values is None):
            raise InvalidArgument(f"{which} is {k.dtype}: int8 pages need scales, and only they have them")
        if scale is not None:
            shape(f"{which}_scale", scale, *k.shape[:3])
            if str(scale.dtype) != "float16":
                raise InvalidArgument(f"{which}_scale is {scale.dtype}; it must be float16")
    return kind


def integers(name: str, array: Layout, *dtypes: str, adjacent: bool = True) -> None:
    """Refuse an array of integers of another dtype, or of elements apart where they must be neighbours.

    Raises
    ------
    InvalidArgument
        If so.
    """
    if str(array.dtype) not in dtypes:
        raise InvalidArgument(f"{name} is {array.dtype}; it must be {' or '.join(dtypes)}")
    if adjacent:
        _adjacent(name, array)


def numbers(backend: Backend, name: str, array: Array, end: int) -> None:
    """In debug mode: refuse a list with a number below -1 or from `end` on.

    Raises
    ------
    InvalidArgument
        Naming the first one.
    """
    if not debug():
        return
    values = backend.to_host(array)
    wrong = np.flatnonzero((values < -1) | (values >= end))
    if wrong.size:
        raise InvalidArgument(f"{name}[{wrong[0]}] is {values[wrong[0]]}; it can be -1 to {end - 1}")


def batch(
    backend: Backend,
    tokens: int,
    block_table: Array,
    seq_lens: Array,
    query_start_loc: Array,
    page_tokens: int,
    frames: int,
    small_frames: int,
) -> None:
    """In debug mode: refuse rows that overlap, outgrow the table or name frames that are not there.

    Raises
    ------
    InvalidArgument
        Naming the first row or entry that is wrong.
    """
    if not debug():
        return
    table, lengths, starts = (backend.to_host(x) for x in (block_table, seq_lens, query_start_loc))
    queries = np.diff(starts)
    if starts[0] < 0 or (queries < 0).any() or starts[-1] > tokens:
        raise InvalidArgument(
            f"query_start_loc must go up from 0 to at most {tokens}; it is {starts.tolist()}"
        )
    longest = table.shape[1] * page_tokens
    wrong = np.flatnonzero((lengths < 0) | (lengths > longest) | ((lengths > 0) & (lengths < queries)))
    if wrong.size:
        row = wrong[0]
        what = f"with {queries[row]} query tokens and room for {longest} in its row of the block table"
        raise InvalidArgument(f"seq_lens[{row}] is {lengths[row]}, {what}")
    used = np.arange(table.shape[1]) * page_tokens < lengths[:, None]
    bad = np.argwhere(used & ((table >= frames) | (table < -small_frames)))
    if bad.size:
        row, page = bad[0]
        least = f"{-small_frames} (compressed) to " if small_frames else "0 to "
        raise InvalidArgument(
            f"block_table[{row}, {page}] is {table[row, page]}; it can be {least}{frames - 1}"
        )
