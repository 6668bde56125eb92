"""Attention over pages in CUDA C: options, grids and argument checks of ``attention.cu``."""

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

__all__ = ["attention_options", "paged_attention"]

THREADS = 128
MOST_K_DIM, MOST_V_DIM = 576, 512
MOST_SPLITS, SPLIT_TOKENS = 64, 256  # shares of a row's keys, and how many keys make a share worth while
BLOCKS_PER_PROCESSOR = 4
QUERY_KINDS = ("float32", "float16", "bfloat16", "uint16")
F32 = check.KINDS["float32"]


def head_tile(k_dim: int, v_dim: int, group: int) -> int:
    """Return how many query heads of a group a block works on: what registers hold, equally shared out."""
    most = 8 if max(k_dim, v_dim) <= 256 else 4
    return math.ceil(group / math.ceil(group / most))


def row_tile(k_dim: int, v_dim: int) -> int:
    """Return the rows per thread of prefill: as many as 48 KiB of shared memory and 64 accumulators allow."""
    widest = max(k_dim, v_dim)
    return 4 if widest <= 64 else 2 if widest <= 256 else 1


def attention_options(
    *,
    q: int,
    kv: int,
    small: int,
    k_dim: int,
    v_dim: int,
    shared: bool,
    page_tokens: int,
    group: int,
    vector: int,
) -> tuple[str, ...]:
    """Return the compiler options of ``attention.cu`` for one geometry.

    Parameters
    ----------
    q, kv, small : int
        Kinds of the queries, the pages and the compressed pages (-1: none), as ``check.KINDS`` numbers them.
    k_dim, v_dim : int
        Values of a head of K, of V.
    shared : bool
        Whether V is the first `v_dim` values of K.
    page_tokens : int
        Tokens of a page.
    group : int
        Query heads per KV head.
    vector : int
        Whether rows are aligned for vector loads.
    """
    heads = head_tile(k_dim, v_dim, group)
    unroll = 2 if heads > 4 or kv == F32 or max(k_dim, v_dim) > 256 else 4
    values = {
        "Q": q,
        "KV": kv,
        "SMALL": small,
        "K_DIM": k_dim,
        "V_DIM": v_dim,
        "SHARED_KV": int(shared),
        "PAGE_TOKENS": page_tokens,
        "GROUP": group,
        "HEAD_TILE": heads,
        "VECTOR": vector,
        "UNROLL": unroll,
        "ROW_TILE": row_tile(k_dim, v_dim),
    }
    return tuple(f"-D{name}={value}" for name, value in values.items())


def _count(name: str, value: int | None) -> int:
    if value is not None and value < 1:
        raise InvalidArgument(f"{name} is {value}; it must be at least 1, or None")
    return value or 0


def paged_attention(
    q: Array,
    k: Array,
    v: Array | None,
    block_table: Array,
    seq_lens: Array,
    query_start_loc: Array,
    *,
    scale: float | None = None,
    window: int | None = None,
    chunk: int | None = None,
    soft_cap: float | None = None,
    sinks: Array | None = None,
    v_dim: int | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    small: tuple[Array, Array | None, Array | None, Array | None] | None = None,
    max_query_len: int | None = None,
    out: Array | None = None,
    backend: Backend | None = None,
) -> Array:
    """Attend to the keys and values in pages: decode rows and prefill chunks, mixed in one batch.

    The KV of the queries' own tokens is in the pages already. The last query token of a row has the position
    ``seq_lens - 1`` and sees itself and what lies before it. Only positions that some query sees are read.

    Parameters
    ----------
    q : array [tokens, heads, k_dim], float32, float16 or bfloat16
        Queries. `heads` is a multiple of `kv_heads`: heads of a group are neighbours.
    k, v : array [frames, page_tokens, kv_heads, k_dim or v_dim]
        One layer's view of the pages: float32, float16, bfloat16, int8 or float8 e4m3. Strided, values of a
        row adjacent. numpy has no bfloat16 and no float8: uint16 and uint8 stand for their bits. ``v=None``:
        V is the first `v_dim` values of K (a latent).
    block_table : array [rows, max_pages], int32
        Frame of each page of a row. An entry ``~frame`` (negative) names a frame of `small`; 0 is a page that
        was given up, whose tokens nobody sees.
    seq_lens : array [rows], int32
        Length of each row with the queries' tokens; 0 gives zeros.
    query_start_loc : array [rows + 1], int32
        The first query token of each row, and the end of the last.
    scale : float, optional
        Factor of the products; 1 / sqrt(k_dim) unless given.
    window, chunk : int, optional
        A token sees the last `window` tokens with itself; those from the last multiple of `chunk` on.
    soft_cap : float, optional
        Scores s become ``soft_cap * tanh(s / soft_cap)``.
    sinks : array [heads], float32, optional
        A score per head that takes part in the softmax and has no value.
    v_dim : int, optional
        Values of a V head where `v` is None.
    k_scale, v_scale : array [frames, page_tokens, kv_heads], float16, optional
        Of int8 pages: what their values are multiples of.
    small : tuple, optional
        ``(k, v, k_scale, v_scale)`` of the compressed class, with the same page tokens and dimensions.
    max_query_len : int, optional
        The most query tokens of a row, if known. 1 saves a launch: rows with more are then left at zero.
    out : array [tokens, heads, v_dim], optional
        Where to write, in q's dtype; made if not given. Rows of tokens beyond the last row are left as they
        are.
    backend : Backend, optional
        What runs the kernels; cupy's current device and stream unless given.

    Returns
    -------
    array [tokens, heads, v_dim], q's dtype

    Raises
    ------
    InvalidArgument
        If shapes, dtypes or strides don't fit. Nothing was launched.
    """
    backend = backend or default_backend()
    arrays = (
        q,
        k,
        v,
        k_scale,
        v_scale,
        *(small or _NO_SMALL),
        block_table,
        seq_lens,
        query_start_loc,
        sinks,
        out,
    )
    layouts, addresses = look(backend, *arrays)
    plan = _plan(backend.processors, *layouts, scale, window, chunk, soft_cap, v_dim)
    small_frames = 0 if small is None else small[0].shape[0]
    check.batch(
        backend,
        q.shape[0],
        block_table,
        seq_lens,
        query_start_loc,
        k.shape[1],
        k.shape[0],
        small_frames,
    )
    if out is None:
        out = backend.zeros(plan.out_shape, q.dtype)
        addresses[-1] = np.uint64(backend.address(out))
    if not plan.options:
        return out
    args = filled(plan.args, addresses)
    rows_start, sink = addresses[-3:-1]
    count, tiles, splits = plan.grid
    shares = [np.uint64(0), np.uint64(0)]
    if splits > 1:
        partial = backend.empty((count, q.shape[1], splits, plan.out_shape[2]), np.float32)
        tops = backend.empty((count, q.shape[1], splits), np.float32)
        shares = [np.uint64(backend.address(x)) for x in (partial, tops)]
    decode = backend.kernel("attention.cu", "paged_decode", plan.options, THREADS)
    decode(plan.grid, [*args, *shares, np.int32(splits)])
    if splits > 1:
        merge = backend.kernel("attention.cu", "merge_splits", plan.options, THREADS)
        merge((count, q.shape[1], 1), [*shares, np.int32(splits), rows_start, sink, *args[-3:]])
    if max_query_len is None or max_query_len > 1:
        prefill = backend.kernel("attention.cu", "paged_prefill", plan.options, THREADS)
        prefill((q.shape[0] // plan.tile_tokens + count, tiles, 1), [*args, np.int32(count)])
    return out


_NO_SMALL = (None, None, None, None)


class _Plan(NamedTuple):
    """What a call launches, its addresses apart; no options: nothing."""

    options: tuple[str, ...]
    args: tuple[np.generic | None, ...]
    grid: tuple[int, int, int]
    tile_tokens: int
    out_shape: tuple[int, int, int]


@lru_cache(maxsize=1024)  # a model calls it once for each layer, with the same layouts
def _plan(
    processors: int,
    q: Layout,
    k: Layout,
    v: Layout | None,
    k_scale: Layout | None,
    v_scale: Layout | None,
    small_k: Layout | None,
    small_v: Layout | None,
    small_k_scale: Layout | None,
    small_v_scale: Layout | None,
    block_table: Layout,
    seq_lens: Layout,
    query_start_loc: Layout,
    sinks: Layout | None,
    out: Layout | None,
    scale: float | None,
    window: int | None,
    chunk: int | None,
    soft_cap: float | None,
    v_dim: int | None,
) -> _Plan:
    """Check the arguments of `paged_attention` and work out what to launch."""
    check.shape("q", q, None, None, None)
    q_kind, kv_kind = check.kind_of("q", q, QUERY_KINDS), check.keys("", k, v, k_scale, v_scale)
    tokens, heads, k_dim = q.shape
    _, page_tokens, kv_heads, _ = k.shape
    check.shape("k", k, None, None, None, k_dim)
    if v is not None:
        if v_dim not in (None, v.shape[3]):
            raise InvalidArgument(f"v_dim is {v_dim}, and rows of v have {v.shape[3]} values")
        v_dim = int(v.shape[3])
    elif v_dim is None or not 1 <= v_dim <= k_dim:
        raise InvalidArgument(
            f"v_dim is {v_dim}: without v it says how many of the {k_dim} values of K are V"
        )
    if k_dim > MOST_K_DIM or v_dim > MOST_V_DIM:
        most = f"at most {MOST_K_DIM} and {MOST_V_DIM}"
        raise InvalidArgument(f"heads of K and V have {k_dim} and {v_dim} values; these kernels take {most}")
    if not kv_heads or heads % kv_heads:
        raise InvalidArgument(f"{heads} query heads can't be shared out over {kv_heads} KV heads")
    small_kind = -1
    if small_k is not None:
        small_kind = check.keys("small ", small_k, small_v, small_k_scale, small_v_scale)
        check.shape("small k", small_k, None, page_tokens, kv_heads, k_dim)
        if (small_v is None) != (v is None):
            raise InvalidArgument("both classes of pages have V, or neither has")
        if small_v is not None:
            check.shape("small v", small_v, None, page_tokens, kv_heads, v_dim)
    check.shape("block_table", block_table, None, None)
    count = int(block_table.shape[0])
    check.shape("seq_lens", seq_lens, count)
    check.shape("query_start_loc", query_start_loc, count + 1)
    for name, array in (
        ("block_table", block_table),
        ("seq_lens", seq_lens),
        ("query_start_loc", query_start_loc),
    ):
        check.integers(name, array, "int32")
    if sinks is not None:
        check.shape("sinks", sinks, heads)
        check.kind_of("sinks", sinks, ("float32",))
    if soft_cap is not None and not soft_cap > 0:
        raise InvalidArgument(f"soft_cap is {soft_cap}; it must be positive, or None")
    if out is not None:
        check.shape("out", out, tokens, heads, v_dim)
        if check.kind_of("out", out, QUERY_KINDS) != q_kind:
            raise InvalidArgument(f"out is {out.dtype} and q is {q.dtype}: they must be the same")
    numbers = (
        np.float32(k_dim**-0.5 if scale is None else scale),
        np.int32(_count("window", window)),
        np.int32(_count("chunk", chunk)),
        np.float32(soft_cap or 0.0),
    )
    out_shape = (tokens, heads, v_dim)
    if not tokens or not count:
        return _Plan((), (), (0, 0, 0), 1, out_shape)

    group = heads // kv_heads
    options = attention_options(
        q=q_kind,
        kv=kv_kind,
        small=small_kind,
        k_dim=k_dim,
        v_dim=v_dim,
        shared=v is None,
        page_tokens=page_tokens,
        group=group,
        vector=aligned(k, v, small_k, small_v),
    )
    heads_at_once = head_tile(k_dim, v_dim, group)
    tiles = kv_heads * math.ceil(group / heads_at_once)
    span = min([n for n in (window, chunk) if n] + [block_table.shape[1] * page_tokens])
    out_strides = (np.int64(heads * v_dim), np.int64(v_dim)) if out is None else strides(out, 2)
    args = (
        *(None, *strides(q, 2)),
        *rows(k, v, k_scale, v_scale),
        *rows(small_k, small_v, small_k_scale, small_v_scale),
        *(None, *strides(block_table, 1)),
        *(None, None),  # lengths, first tokens
        *numbers,
        None,  # sinks
        *(None, *out_strides),
    )
    grid = (count, tiles, _splits(processors, count * tiles, span))
    return _Plan(options, args, grid, THREADS // 8 * row_tile(k_dim, v_dim) // heads_at_once, out_shape)


def _splits(processors: int, blocks: int, span: int) -> int:
    """Return into how many shares a row's keys are cut, so that every processor has work."""
    wanted = math.ceil(processors * BLOCKS_PER_PROCESSOR / max(blocks, 1))
    return max(1, min(wanted, math.ceil(span / SPLIT_TOKENS), MOST_SPLITS))
