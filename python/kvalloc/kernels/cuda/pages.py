"""Pages in CUDA C: options, grids and argument checks of ``write.cu`` and ``copy.cu``."""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from kvalloc.errors import InvalidArgument
from kvalloc.kernels.cuda import check
from kvalloc.kernels.cuda.backend import (
    Array,
    Backend,
    Layout,
    aligned,
    default_backend,
    filled,
    look,
    rows,
    strides,
)

__all__ = ["copy_pages", "dequantise_pages", "gather_pages", "quantise_pages", "scatter_pages", "write_kv"]

WRITE_THREADS, COPY_THREADS, COPY_UNITS = 128, 256, 4
Keys = tuple[Array, Array | None, Array | None, Array | None]


def write_options(
    *, source: int, target: int, k_dim: int, v_dim: int, page_tokens: int, vector: int, index: str
) -> tuple[str, ...]:
    """Return the compiler options of ``write.cu``: kinds, dimensions, alignment, type of frame lists."""
    values = {
        "SOURCE": source,
        "TARGET": target,
        "K_DIM": k_dim,
        "V_DIM": v_dim,
        "PAGE_TOKENS": page_tokens,
        "VECTOR": vector,
        "INDEX": index,
    }
    return tuple(f"-D{name}={value}" for name, value in values.items())


def _row_blocks(items: int, k_dim: int, v_dim: int) -> int:
    """Return how many blocks hold a lane group for each row; lane groups as ``lanes_for`` makes them."""
    pieces = math.ceil(max(k_dim, v_dim) / 8)
    lanes = min(32, 1 << (pieces - 1).bit_length())
    return math.ceil(items / (WRITE_THREADS // lanes))


def write_kv(
    k_new: Array,
    v_new: Array | None,
    k: Array,
    v: Array | None,
    slot_mapping: Array,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    *,
    backend: Backend | None = None,
) -> None:
    """Write the K and V of new tokens into the slots of their pages, in the pages' dtype.

    Parameters
    ----------
    k_new, v_new : array [tokens, kv_heads, k_dim or v_dim], float32, float16 or bfloat16
        What to write; ``v_new=None`` where pages have no V (a latent).
    k, v : array [frames, page_tokens, kv_heads, k_dim or v_dim]
        One layer's view of the pages, as in `paged_attention`.
    slot_mapping : array [tokens], int64
        ``frame * page_tokens + offset`` of each token; -1 skips it.
    k_scale, v_scale : array [frames, page_tokens, kv_heads], float16, optional
        Of int8 pages: written with the row's largest magnitude / 127.
    backend : Backend, optional
        What runs the kernels; cupy's current device and stream unless given.

    Raises
    ------
    InvalidArgument
        If shapes, dtypes or strides don't fit. Nothing was launched.
    """
    backend = backend or default_backend()
    layouts, addresses = look(backend, k_new, v_new, k, v, k_scale, v_scale, slot_mapping)
    plan = _plan_write(*layouts)
    check.numbers(backend, "slot_mapping", slot_mapping, int(k.shape[0] * k.shape[1]))
    plan.launch(backend, addresses)


class _Plan(NamedTuple):
    """What a call launches, its addresses apart."""

    file: str
    kernel: str
    threads: int
    options: tuple[str, ...]
    grid: tuple[int, int, int]
    args: tuple[np.generic | None, ...]

    def launch(self, backend: Backend, addresses: list[np.uint64]) -> None:
        """Launch it, unless there is nothing to do."""
        if all(self.grid):
            kernel = backend.kernel(self.file, self.kernel, self.options, self.threads)
            kernel(self.grid, filled(self.args, addresses))


@lru_cache(maxsize=1024)  # a model calls it once for each layer, with the same layouts
def _plan_write(
    k_new: Layout,
    v_new: Layout | None,
    k: Layout,
    v: Layout | None,
    k_scale: Layout | None,
    v_scale: Layout | None,
    slot_mapping: Layout,
) -> _Plan:
    """Check the arguments of `write_kv` and work out what to launch."""
    target = check.keys("", k, v, k_scale, v_scale)
    _, page_tokens, heads, k_dim = k.shape
    v_dim = k_dim if v is None else v.shape[3]
    if (v is None) != (v_new is None):
        raise InvalidArgument("v and v_new are given together, or neither is")
    check.shape("k_new", k_new, None, heads, k_dim)
    source = check.kind_of("k_new", k_new, ("float32", "float16", "bfloat16", "uint16"))
    tokens = k_new.shape[0]
    if v_new is not None:
        check.shape("v_new", v_new, tokens, heads, v_dim)
        if check.kind_of("v_new", v_new) != source:
            raise InvalidArgument(f"k_new is {k_new.dtype} and v_new is {v_new.dtype}: they must be the same")
    check.shape("slot_mapping", slot_mapping, tokens)
    check.integers("slot_mapping", slot_mapping, "int64")
    options = write_options(
        source=source,
        target=target,
        k_dim=k_dim,
        v_dim=v_dim,
        page_tokens=page_tokens,
        vector=aligned(k_new, v_new, k, v),
        index="i64",
    )
    args = (
        *(None, *strides(k_new, 2)),
        *(None, *strides(v_new, 2)),
        *rows(k, v, k_scale, v_scale),
        None,  # slot mapping
        np.int64(tokens),
        np.int32(heads),
    )
    grid = (_row_blocks(tokens * heads, k_dim, v_dim), 1 if v is None else 2, 1)
    return _Plan("write.cu", "write_kv", WRITE_THREADS, options, grid, args)


def _convert(old: Keys, src: Array, new: Keys, dst: Array, backend: Backend | None) -> None:
    backend = backend or default_backend()
    layouts, addresses = look(backend, *old, src, *new, dst)
    plan = _plan_convert(*layouts)
    check.numbers(backend, "src", src, int(old[0].shape[0]))
    check.numbers(backend, "dst", dst, int(new[0].shape[0]))
    plan.launch(backend, addresses)


@lru_cache(maxsize=1024)  # once for each layer, as the writes
def _plan_convert(
    k: Layout,
    v: Layout | None,
    k_scale: Layout | None,
    v_scale: Layout | None,
    src: Layout,
    new_k: Layout,
    new_v: Layout | None,
    new_k_scale: Layout | None,
    new_v_scale: Layout | None,
    dst: Layout,
) -> _Plan:
    """Check the arguments of a conversion and work out what to launch."""
    source = check.keys("source ", k, v, k_scale, v_scale)
    target = check.keys("target ", new_k, new_v, new_k_scale, new_v_scale)
    _, page_tokens, heads, k_dim = k.shape
    check.shape("target k", new_k, None, page_tokens, heads, k_dim)
    if (v is None) != (new_v is None):
        raise InvalidArgument("both classes of pages have V, or neither has")
    v_dim = k_dim if v is None else v.shape[3]
    if new_v is not None:
        check.shape("target v", new_v, None, page_tokens, heads, v_dim)
    index, pages = _index_type(src, dst), src.shape[0]
    options = write_options(
        source=source,
        target=target,
        k_dim=k_dim,
        v_dim=v_dim,
        page_tokens=page_tokens,
        vector=aligned(k, v, new_k, new_v),
        index=index,
    )
    args = (
        *rows(k, v, k_scale, v_scale),
        *(None, *strides(src, 1)),
        *rows(new_k, new_v, new_k_scale, new_v_scale),
        *(None, *strides(dst, 1)),
        np.int64(pages),
        np.int32(heads),
    )
    grid = (_row_blocks(pages * page_tokens * heads, k_dim, v_dim), 1 if v is None else 2, 1)
    return _Plan("write.cu", "convert_pages", WRITE_THREADS, options, grid, args)


def quantise_pages(
    k: Array, v: Array | None, src: Array, small: Keys, dst: Array, *, backend: Backend | None = None
) -> None:
    """Write one layer of pages into pages of a smaller class.

    Parameters
    ----------
    k, v : array [frames, page_tokens, kv_heads, k_dim or v_dim]
        The layer's view of the pages; no V for a latent.
    src, dst : array [n], int32 or int64
        Frames to read, frames of the small class to write. -1 in either skips the page.
    small : tuple
        ``(k, v, k_scale, v_scale)``, the layer's view of the small class: int8 with float16 scales, or
        float8 e4m3 (uint8).
    backend : Backend, optional
        What runs the kernels; cupy's current device and stream unless given.

    Raises
    ------
    InvalidArgument
        If shapes, dtypes or strides don't fit. Nothing was launched.
    """
    _convert((k, v, None, None), src, small, dst, backend)


def dequantise_pages(
    small: Keys, src: Array, k: Array, v: Array | None, dst: Array, *, backend: Backend | None = None
) -> None:
    """Write one layer of pages of a smaller class back into full ones; arguments as of `quantise_pages`."""
    _convert(small, src, (k, v, None, None), dst, backend)


def _index_type(*lists: Layout | None) -> str:
    """Check lists of frames and return the kernels' name of their type."""
    given = [x for x in lists if x is not None]
    for x in given:
        check.shape("a list of frames", x, given[0].shape[0])
        check.integers("a list of frames", x, "int32", "int64", adjacent=False)
    kinds = {str(x.dtype) for x in given}
    if len(kinds) > 1:
        raise InvalidArgument("lists of frames are of one dtype; got int32 and int64")
    return "int" if kinds == {"int32"} else "i64"


def copy_options(index: str, unit: str) -> tuple[str, ...]:
    """Return the compiler options of ``copy.cu``: types of frame lists and of what is copied at a time."""
    return (f"-DINDEX={index}", f"-DUNIT={unit}")


def _move(
    source: Array, src: Array | None, target: Array, dst: Array | None, backend: Backend | None
) -> None:
    backend = backend or default_backend()
    layouts, addresses = look(backend, source, src, target, dst)
    plan = _plan_move(*layouts)
    for name, frames, array in (("src", src, source), ("dst", dst, target)):
        if frames is not None:
            check.numbers(backend, name, frames, int(array.shape[0]))
    plan.launch(backend, addresses)


@lru_cache(maxsize=1024)
def _plan_move(source: Layout, src: Layout | None, target: Layout, dst: Layout | None) -> _Plan:
    """Check the arguments of a copy and work out what to launch."""
    for name, array in (("source", source), ("target", target)):
        check.shape(f"the {name} of a copy", array, None, source.shape[1])
        check.kind_of(f"the {name} of a copy", array, ("uint8",))
    index, page_bytes = _index_type(src, dst), source.shape[1]
    pages = next(x.shape[0] for x in (src, dst) if x is not None)
    ends = [page_bytes, *(x for a in (source, target) for x in (a.phase, a.strides[0]))]
    unit, size = ("uint4", 16) if all(x % 16 == 0 for x in ends) else ("u8", 1)
    slices = math.ceil(page_bytes / (COPY_THREADS * COPY_UNITS * size))
    args = (
        *(None, *strides(source, 1)),
        *(None, *strides(src, 1)),
        *(None, *strides(target, 1)),
        *(None, *strides(dst, 1)),
        np.int64(page_bytes),
        np.int32(slices),
    )
    return _Plan(
        "copy.cu", "move_pages", COPY_THREADS, copy_options(index, unit), (pages * slices, 1, 1), args
    )


def copy_pages(pages: Array, src: Array, dst: Array, *, backend: Backend | None = None) -> None:
    """Copy pages within an arena: ``src[i]`` to ``dst[i]``, in no order: a source is no destination.

    Parameters
    ----------
    pages : array [frames, page_bytes], uint8
        A class's view of the arena's bytes.
    src, dst : array [n], int32 or int64
        Frames; -1 in either skips the copy. Columns of a wider array will do.
    backend : Backend, optional
        What runs the kernels; cupy's current device and stream unless given.

    Raises
    ------
    InvalidArgument
        If shapes, dtypes or strides don't fit. Nothing was launched.
    """
    _move(pages, src, pages, dst, backend)


def gather_pages(pages: Array, frames: Array, out: Array, *, backend: Backend | None = None) -> None:
    """Copy pages into a staging buffer: page ``frames[i]`` to ``out[i]``.

    Parameters
    ----------
    pages, out : array [frames, page_bytes] and [n, page_bytes], uint8
        A class's view of the arena's bytes; the buffer.
    frames : array [n], int32 or int64
        Frames; -1 leaves a row of the buffer as it is.
    backend : Backend, optional
        What runs the kernels; cupy's current device and stream unless given.

    Raises
    ------
    InvalidArgument
        If shapes, dtypes or strides don't fit. Nothing was launched.
    """
    check.shape("out", out, frames.shape[0], pages.shape[1])
    _move(pages, frames, out, None, backend)


def scatter_pages(staging: Array, frames: Array, pages: Array, *, backend: Backend | None = None) -> None:
    """Copy a staging buffer into pages: ``staging[i]`` to page ``frames[i]``, as `gather_pages` reversed."""
    check.shape("staging", staging, frames.shape[0], pages.shape[1])
    _move(staging, None, pages, frames, backend)
