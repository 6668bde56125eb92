"""Paged decode attention: one query token per request against the pages of its sequence.

Work is cut twice: by KV head (the query heads that share one are packed into the rows of a matrix product)
and, so that few long requests fill the card too, by stretches of the sequence (split-KV). Each program walks
its stretch in tiles of tokens, looks each token's frame up in the block table, and keeps a running maximum,
sum and output. With one stretch per request it writes the result; with more it writes its part and the
logarithm of its sum, and `_merge` weighs the parts.

Pages of a smaller class (fp8, int8) stand in the same table as ``~frame``. Each class is walked by its own
launch, which masks the pages of the other; the merge does not care where parts come from. An entry of 0 is a
page that was given up: nobody looks at its tokens.

Offsets are 64-bit: a page-major pool of an 8B model crosses 2**31 elements at page 2,048. K and V loads are
both masked: a page beyond the length, of the other class, or given up (what frame 0 holds is nobody's) may
hold anything, and NaN times zero is NaN.
"""

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvalloc.errors import InvalidArgument
from kvalloc.kernels import check
from kvalloc.kernels.device import INTERPRETED, Card, card_of, current
from kvalloc.kernels.values import check_scales, power_of_2, raw, split_dim, stored_values

__all__ = ["MAX_SPLITS", "Pages", "choose_splits", "paged_decode"]

MAX_SPLITS = 64
LOG2_E = math.log2(math.e)


class Pages(NamedTuple):
    """The pages of one class, as one layer sees them.

    Attributes
    ----------
    k : torch.Tensor
        ``[frames, page_tokens, kv_heads, k_dim]``, any strides but 1 for the last.
    v : torch.Tensor or None
        ``[frames, page_tokens, kv_heads, v_dim]``; None for a latent, whose first values are V.
    k_scale, v_scale : torch.Tensor or None
        float16 ``[frames, page_tokens, kv_heads]``, for int8 only.
    """

    k: torch.Tensor
    v: torch.Tensor | None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


# -- kernels -------------------------------------------------------------------------------------------------


# Numbers that change from step to step are not specialised on: no step stops for the compiler.
@triton.jit(do_not_specialize=["table_row", "slot0", "slots"])
def _attend(
    q, k, v, k_scale, v_scale, table, lens, sinks, out, parts, logs,
    q_row, q_head, k_frame, k_token, k_head, v_frame, v_token, v_head,
    ks_frame, ks_token, ks_head, vs_frame, vs_token, vs_head, table_row, out_row, out_head,
    scale, slot0, slots,
    PAGE_TOKENS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    K1: tl.constexpr, K2: tl.constexpr, V: tl.constexpr,
    BLOCK_K1: tl.constexpr, BLOCK_K2: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, MIN_TILES: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFT_CAP: tl.constexpr,
    SMALL: tl.constexpr, DIRECT: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """Attend from one request's heads of one KV head to one stretch of its tokens.

    SMALL: walk the pages with negative entries rather than those with positive ones.
    """
    head_blocks: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    block = tl.program_id(0) % head_blocks
    kv_head = tl.program_id(0) // head_blocks % KV_HEADS
    row = (tl.program_id(0) // (head_blocks * KV_HEADS)).to(tl.int64)
    split = tl.program_id(1)

    length = tl.load(lens + row)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    if CHUNK > 0:
        first = tl.maximum(length - 1, 0) // CHUNK * CHUNK
    tiles = tl.cdiv(tl.cdiv(length - first, BLOCK_N), tl.num_programs(1))
    stretch = tl.maximum(tiles, MIN_TILES) * BLOCK_N
    start = first + split * stretch
    end = tl.minimum(start + stretch, length)

    in_group = block * BLOCK_H + tl.arange(0, BLOCK_H)
    heads = kv_head * GROUP + in_group
    real_head = in_group < GROUP
    d1 = tl.arange(0, BLOCK_K1)
    dv = tl.arange(0, BLOCK_V)
    q_at = q + row * q_row + heads * q_head
    q1 = tl.load(q_at[:, None] + d1[None, :], mask=real_head[:, None] & (d1 < K1)[None, :], other=0.0).to(
        MATH
    )
    if BLOCK_K2 > 0:
        d2 = tl.arange(0, BLOCK_K2)
        q2 = tl.load(
            q_at[:, None] + K1 + d2[None, :], mask=real_head[:, None] & (d2 < K2)[None, :], other=0.0
        ).to(MATH)

    # The maximum starts at a finite number far below any score: no tile, however masked, makes inf - inf.
    top = tl.full([BLOCK_H], -1e30, tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_V], tl.float32)
    for at in tl.range(start, end, BLOCK_N, num_stages=STAGES):
        tokens = at + tl.arange(0, BLOCK_N)
        inside = tokens < end
        entry_at = table + row * table_row + tokens // PAGE_TOKENS
        entry = tl.load(entry_at, mask=inside, other=0)
        if SMALL:
            valid = entry < 0
            entry = -1 - entry
        else:
            valid = entry > 0
        frame = entry.to(tl.int64)
        within = tokens % PAGE_TOKENS

        k_at = k + frame * k_frame + within * k_token + kv_head * k_head
        k1 = tl.load(k_at[:, None] + d1[None, :], mask=valid[:, None] & (d1 < K1)[None, :], other=0.0)
        k1 = stored_values(k1, MATH)
        scores = tl.dot(q1, tl.trans(k1), input_precision="ieee")
        if BLOCK_K2 > 0:
            k2 = tl.load(
                k_at[:, None] + K1 + d2[None, :], mask=valid[:, None] & (d2 < K2)[None, :], other=0.0
            )
            scores = tl.dot(q2, tl.trans(stored_values(k2, MATH)), scores, input_precision="ieee")
        scores = scores * scale
        if k_scale is not None:
            k_step = tl.load(
                k_scale + frame * ks_frame + within * ks_token + kv_head * ks_head, mask=valid, other=0.0
            )
            scores = scores * k_step.to(tl.float32)[None, :]
        if SOFT_CAP > 0:
            # tanh; the factor of log2(e) in `scale` is taken out and put back
            scores = (
                SOFT_CAP
                * 1.4426950408889634
                * (2.0 * tl.sigmoid(scores * (1.3862943611198906 / SOFT_CAP)) - 1.0)
            )
        # Read a second time, marked so that the compiler does not make one read of both: with one it does not
        # copy the table ahead, and takes twice the shared memory where a tile has 128 tokens.
        again = tl.load(entry_at, mask=inside, other=0, eviction_policy="evict_last")
        seen = again < 0 if SMALL else again > 0
        scores = tl.where(seen[None, :], scores, float("-inf"))

        higher = tl.maximum(top, tl.max(scores, 1))
        fade = tl.exp2(top - higher)
        p = tl.exp2(scores - higher[:, None])
        total = total * fade + tl.sum(p, 1)
        top = higher
        if v is not None:
            v_at = v + frame * v_frame + within * v_token + kv_head * v_head
            values = tl.load(v_at[:, None] + dv[None, :], mask=valid[:, None] & (dv < V)[None, :], other=0.0)
            values = stored_values(values, MATH)
            if v_scale is not None:
                v_step = tl.load(
                    v_scale + frame * vs_frame + within * vs_token + kv_head * vs_head, mask=valid, other=0.0
                )
                p = p * v_step.to(tl.float32)[None, :]
        else:
            values = k1
            if k_scale is not None:
                p = p * k_step.to(tl.float32)[None, :]
        acc = tl.dot(p.to(MATH), values, acc * fade[:, None], input_precision="ieee")

    if DIRECT:
        if sinks is not None:
            sink = tl.load(sinks + heads, mask=real_head, other=0.0).to(tl.float32) * 1.4426950408889634
            higher = tl.maximum(top, sink)
            acc = acc * tl.exp2(top - higher)[:, None]
            total = total * tl.exp2(top - higher) + tl.exp2(sink - higher)
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        out_at = out + row * out_row + heads * out_head
        tl.store(
            out_at[:, None] + dv[None, :],
            acc.to(out.dtype.element_ty),
            mask=real_head[:, None] & (dv < V)[None, :],
        )
    else:
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        slot = (row * (KV_HEADS * GROUP) + heads) * slots + slot0 + split
        log = tl.where(total == 0.0, float("-inf"), top + tl.log2(tl.where(total == 0.0, 1.0, total)))
        tl.store(logs + slot, log, mask=real_head)
        written = in_group < tl.where(start < end, GROUP, 0)
        tl.store(parts + (slot * V)[:, None] + dv[None, :], acc, mask=written[:, None] & (dv < V)[None, :])


@triton.jit(do_not_specialize=["slots"])
def _merge(
    parts, logs, sinks, out, slots, out_row, out_head,
    HEADS: tl.constexpr, V: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Weigh the parts of one request's head by their sums. A part that saw no token is not read."""
    at = tl.program_id(0).to(tl.int64)
    head = at % HEADS
    slot = tl.arange(0, BLOCK_S)
    dv = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    log = tl.load(logs + at * slots + slot, mask=slot < slots, other=float("-inf"))
    top = tl.max(log, 0)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(log - top)
    total = tl.sum(weight, 0)
    if sinks is not None:
        total += tl.exp2(sink - top)
    part = tl.load(
        parts + (at * slots + slot)[:, None] * V + dv[None, :],
        mask=(weight != 0.0)[:, None] & (dv < V)[None, :],
        other=0.0,
    )
    merged = tl.sum(part * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + at // HEADS * out_row + head * out_head + dv, merged.to(out.dtype.element_ty), mask=dv < V)


# -- the shape of a launch -----------------------------------------------------------------------------------


class Tiles(NamedTuple):
    """How one class is walked."""

    heads: int
    tokens: int
    stages: int
    warps: int


@functools.cache
def choose_tiles(card: Card, group: int, k_dim: int, v_dim: int, itemsize: int) -> Tiles:
    """Choose the tile of a program: up to 36 KiB of K and V a stage, two programs a multiprocessor.

    Parameters
    ----------
    card : Card
        The device.
    group : int
        Query heads per KV head.
    k_dim, v_dim : int
        Stored values of a token's head; `v_dim` is 0 where K and V share them.
    itemsize : int
        Bytes of a stored value.

    Returns
    -------
    Tiles
    """
    wide = k_dim > 256  # a latent: its accumulator leaves registers for one program a multiprocessor
    heads = min(max(16, power_of_2(group)), 32)
    row = (k_dim + v_dim) * itemsize
    # In registers 8-bit values are 16 bits wide.
    tokens = (36 << 10) // (row if wide else max(row, 2 * (k_dim + v_dim)))
    tokens = min(128, max(16, 1 << tokens.bit_length() - 1))
    # q, and what the products and reductions exchange
    room = (card.shared if wide else card.shared // 2) - heads * k_dim * 4 - (4 << 10)
    buffers = min(3, max(1, room // (tokens * row)))
    # The compiler shares stages between the two loads that wait for each other, the block table's and K's.
    return Tiles(heads, tokens, 2 * buffers + 1, 8 if wide else 4)


def choose_splits(programs: int, max_len: int, mean_len: float, tokens: int, sms: int) -> int:
    """Choose into how many stretches the longest request is cut.

    Enough that the whole step makes about four programs per multiprocessor (two run at a time, and the second
    wave evens out what differs in length), of two tiles or more each.

    Parameters
    ----------
    programs : int
        Programs of an uncut step: requests x KV heads x blocks of query heads.
    max_len : int
        Tokens that the longest request attends to.
    mean_len : float
        Their mean over the requests.
    tokens : int
        Tokens of a tile.
    sms : int
        Multiprocessors.

    Returns
    -------
    int
        1 to `MAX_SPLITS`.

    Examples
    --------
    >>> from kvalloc.kernels.decode import choose_splits
    >>> [choose_splits(n * 8, 32_768, 32_768, 64, sms=132) for n in (1, 16, 128)]
    [64, 5, 1]
    """
    stretch = max(2 * tokens, math.ceil(programs * mean_len / (4 * sms)))
    return min(MAX_SPLITS, max(1, math.ceil(max_len / stretch)))


# -- the call ------------------------------------------------------------------------------------------------


def paged_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    small: Pages | None = None,
    v_dim: int | None = None,
    num_splits: int | None = None,
    max_len: int | None = None,
    mean_len: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from one new token per request to the pages of its sequence.

    Parameters
    ----------
    q : torch.Tensor
        ``[rows, heads, k_dim]``, float16, bfloat16 or float32. Query heads that share a KV head are
        neighbours.
    k : torch.Tensor
        ``[frames, page_tokens, kv_heads, k_dim]``, a strided view of the pool; float16, bfloat16, float32,
        float8_e4m3fn or int8.
    v : torch.Tensor or None
        ``[frames, page_tokens, kv_heads, v_dim]``, of K's dtype; None for a latent, where the first `v_dim`
        values of K are V.
    block_table : torch.Tensor
        int32 ``[rows, max_pages]``: the frame of each page of each sequence, or ``~frame`` of the small
        class, or 0 where a page was given up: nobody attends to its tokens. What lies beyond the length or
        before the window is not read.
    seq_lens : torch.Tensor
        int32 ``[rows]``: tokens of each sequence, the new one included. 0 gives zeros.
    scale : float
        Factor of the scores.
    window : int, optional
        Attend to the last `window` tokens only, the new one among them.
    chunk : int, optional
        Attend to tokens since the last multiple of `chunk` only.
    soft_cap : float, optional
        Scores s become ``soft_cap * tanh(s / soft_cap)``.
    sinks : torch.Tensor, optional
        ``[heads]``: a logit per head that takes part in the softmax and has no value.
    k_scale, v_scale : torch.Tensor, optional
        float16 ``[frames, page_tokens, kv_heads]``; for int8, and needed there (no `v_scale` for a latent).
    small : Pages, optional
        The pages that negative entries of `block_table` mean.
    v_dim : int, optional
        For a latent: how many of K's values are V.
    num_splits : int, optional
        Into how many stretches a request is cut, 1 to `MAX_SPLITS`. Chosen by default; give it where the grid
        must not change (CUDA graphs).
    max_len, mean_len : optional
        The largest and the mean of `seq_lens`, where the host knows them: a better choice of `num_splits`. By
        default as long as the table is wide.
    out : torch.Tensor, optional
        ``[rows, heads, v_dim]`` of q's dtype, written in place.

    Returns
    -------
    torch.Tensor
        ``[rows, heads, v_dim]``, of q's dtype.

    Raises
    ------
    InvalidArgument
        If tensors don't fit each other; in debug mode (`kvalloc.kernels.check`) also for page numbers out of
        range.
    """
    card = card_of(q)
    main = Pages(k, v, k_scale, v_scale)
    rows, heads, page_tokens, kv_heads, v_dim = _check(
        q, main, block_table, seq_lens, small, v_dim, sinks, out
    )
    if window is not None and chunk is not None:
        raise InvalidArgument("window and chunk exclude each other")
    for name, given in [("window", window), ("chunk", chunk), ("soft_cap", soft_cap)]:
        if given is not None and not given > 0:
            raise InvalidArgument(f"{name} must be above 0, or None; got {given!r}")
    capacity = block_table.shape[1] * page_tokens
    if max_len is not None and max_len > capacity:
        raise InvalidArgument(
            f"max_len {max_len:,} is more than the block table shows: {block_table.shape[1]} pages of "
            f"{page_tokens} tokens"
        )
    if check.DEBUG:
        check.table(
            block_table, seq_lens, page_tokens, k.shape[0], small.k.shape[0] if small else 0, window, chunk
        )
    if out is None:
        out = q.new_empty(rows, heads, v_dim)
    if rows == 0:
        return out

    group = heads // kv_heads
    tiles = choose_tiles(card, group, k.shape[3], 0 if v is None else v_dim, k.element_size())
    programs = rows * kv_heads * -(-group // tiles.heads)
    if num_splits is None:
        seen = min(capacity if max_len is None else max_len, window or chunk or capacity)
        mean = min(seen if mean_len is None else mean_len, seen)
        num_splits = choose_splits(programs, seen, mean, tiles.tokens, card.sms)
    elif not 1 <= num_splits <= MAX_SPLITS:
        raise InvalidArgument(f"num_splits must be 1 to {MAX_SPLITS}, got {num_splits}")

    classes = [main] if small is None else [main, small]
    slots = num_splits * len(classes)
    direct = slots == 1
    parts = None if direct else q.new_empty(rows, heads, slots, v_dim, dtype=torch.float32)
    logs = None if direct else q.new_empty(rows, heads, slots, dtype=torch.float32)
    with current(q):
        for index, pages in enumerate(classes):
            _launch(
                card, q, pages, block_table, seq_lens, sinks, out, parts, logs, v_dim, num_splits,
                scale=scale, slot0=index * num_splits, slots=slots, window=window or 0, chunk=chunk or 0,
                soft_cap=soft_cap or 0.0, negative=index == 1,
            )  # fmt: skip
        if not direct:
            block_v = min(64, power_of_2(v_dim))
            _merge[(rows * heads, -(-v_dim // block_v))](
                parts, logs, sinks, out, slots, out.stride(0), out.stride(1),
                HEADS=heads, V=v_dim, BLOCK_S=MAX_SPLITS * len(classes), BLOCK_V=block_v,
            )  # fmt: skip
    return out


def _check(
    q: torch.Tensor,
    main: Pages,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    small: Pages | None,
    v_dim: int | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None,
) -> tuple[int, int, int, int, int]:
    """Check that everything fits; give rows, heads, page_tokens, kv_heads and v_dim."""
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise InvalidArgument(f"q: must be float16, bfloat16 or float32, got {q.dtype}")
    check.shape("k", main.k, ["frames", "page_tokens", "kv_heads", "k_dim"])
    _, page_tokens, kv_heads, k_dim = main.k.shape
    check.shape("q", q, ["rows", "heads", k_dim])
    rows, heads, _ = q.shape
    if heads == 0 or heads % kv_heads:
        raise InvalidArgument(f"q: {heads} heads are not a multiple of the {kv_heads} KV heads")
    if main.v is not None:
        if v_dim is not None and v_dim != main.v.shape[-1]:
            raise InvalidArgument(f"v_dim {v_dim} is for a latent; V has {main.v.shape[-1]} values")
        v_dim = main.v.shape[-1]
    elif v_dim is None or not 0 < v_dim <= k_dim:
        raise InvalidArgument(f"without v, v_dim must say how many of K's {k_dim} values are V; got {v_dim}")
    for name, pages in [("", main)] if small is None else [("", main), ("small.", small)]:
        check.shape(f"{name}k", pages.k, ["frames", page_tokens, kv_heads, k_dim])
        check_scales(f"{name}k", pages.k, pages.k_scale)
        if (pages.v is None) != (main.v is None):
            raise InvalidArgument("either both classes have v, or none")
        if pages.v is not None:
            check.shape(f"{name}v", pages.v, [pages.k.shape[0], page_tokens, kv_heads, v_dim])
            check_scales(f"{name}v", pages.v, pages.v_scale)
            if pages.v.dtype != pages.k.dtype:
                raise InvalidArgument(f"{name}v: is {pages.v.dtype}, but {name}k is {pages.k.dtype}")
        elif pages.v_scale is not None:
            raise InvalidArgument(f"{name}v_scale: a latent has the scales of k only")
        check.same_device(
            q, **{f"{name}{field}": tensor for field, tensor in zip(pages._fields, pages, strict=True)}
        )
    check.int_tensor("block_table", block_table, torch.int32)
    check.shape("block_table", block_table, [rows, "max_pages"])
    check.int_tensor("seq_lens", seq_lens, torch.int32)
    check.shape("seq_lens", seq_lens, [rows])
    if sinks is not None:
        check.shape("sinks", sinks, [heads])
    if out is not None:
        check.shape("out", out, [rows, heads, v_dim])
        if out.dtype != q.dtype:
            raise InvalidArgument(f"out: must be {q.dtype} as q is, got {out.dtype}")
    check.same_device(q, block_table=block_table, seq_lens=seq_lens, sinks=sinks, out=out)
    return rows, heads, page_tokens, kv_heads, v_dim


def _launch(
    card: Card,
    q: torch.Tensor,
    pages: Pages,
    table: torch.Tensor,
    lens: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    parts: torch.Tensor | None,
    logs: torch.Tensor | None,
    v_dim: int,
    num_splits: int,
    *,
    scale: float,
    slot0: int,
    slots: int,
    window: int,
    chunk: int,
    soft_cap: float,
    negative: bool,
) -> None:
    """Walk the pages of one class."""
    k, v = raw(pages.k, native_fp8=card.fp8), None if pages.v is None else raw(pages.v, native_fp8=card.fp8)
    _, page_tokens, kv_heads, k_dim = k.shape
    group = q.shape[1] // kv_heads
    k1, k2, block_k1, block_k2 = split_dim(k_dim, v_dim if v is None else None)
    tiles = choose_tiles(card, group, k_dim, 0 if v is None else v_dim, k.element_size())
    _attend[(q.shape[0] * kv_heads * -(-group // tiles.heads), num_splits)](
        q, k, v, pages.k_scale, pages.v_scale, table, lens, sinks, out, parts, logs,
        *q.stride()[:2], *check.strides(k), *check.strides(v), *check.strides(pages.k_scale),
        *check.strides(pages.v_scale), table.stride(0), *out.stride()[:2], scale * LOG2_E, slot0, slots,
        PAGE_TOKENS=page_tokens, KV_HEADS=kv_heads, GROUP=group, K1=k1, K2=k2, V=v_dim, BLOCK_K1=block_k1,
        BLOCK_K2=block_k2, BLOCK_V=block_k1 if v is None else max(16, power_of_2(v_dim)),
        BLOCK_H=tiles.heads, BLOCK_N=tiles.tokens, STAGES=tiles.stages, MIN_TILES=2, WINDOW=window,
        CHUNK=chunk, SOFT_CAP=soft_cap, SMALL=negative, DIRECT=parts is None, MATH=_math(q.dtype, k.dtype),
        num_warps=tiles.warps,
    )  # fmt: skip


def _math(q: torch.dtype, stored: torch.dtype) -> tl.dtype:
    """The type of the matrix products: q's, if the stored values fit into it, else float32."""
    narrow = stored in (q, torch.int8, torch.uint8, torch.float8_e4m3fn)
    if not narrow or (INTERPRETED and q == torch.bfloat16):  # the interpreter's bfloat16 products are wrong
        return tl.float32
    return {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}[q]
