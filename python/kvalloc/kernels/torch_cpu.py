"""Attention over pages with plain torch operators: what `TorchStore` runs on a CPU.

Rows of like length are worked on together. Their pages are gathered, layer by layer, into a buffer that is
used again for the next layer, and stays warm in the cache; query heads of one KV head become rows of one
small matrix (``[rows, kv_heads, group * tokens, dim]``), so K and V are never repeated. What lies behind a
row's last token is set to zero in the buffer: a page that nobody wrote may hold NaN.
"""

import threading
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

from kvalloc.store.protocol import KVView
from kvalloc.store.steps import Rows, Together, first_positions, group_rows

__all__ = ["Plan", "Staging", "View", "attend", "convert", "plan", "write"]

View = KVView[torch.Tensor]

# Tokens of KV gathered at once: bounds the buffers; more rows share out better over threads.
_TOKENS: Final = 16_384
# Query tokens of one row and pass: bounds the mask of a long prompt.
_QUERIES: Final = 256


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows worked on together, as tensors.

    Attributes
    ----------
    tokens : int64 [rows * count] or slice
        Their tokens in the step; a slice if they lie side by side.
    rows, count, pages : int
        How many of each.
    frames : int64 [rows * pages]
        Frames in the order of the buffer; those of compressed pages are 0 here.
    small : (int64 [n], int64 [n]) or None
        Places of compressed pages in the buffer, and their frames.
    seen : slice
        Tokens of the buffer that some row looks at.
    unwritten : int64 [n] or None
        Tokens among them that hold nothing in some row.
    mask : bool [rows, 1, count, seen tokens] or None
        True where a token may look.
    causal : bool
        Instead of a mask: the rows are whole prompts.
    """

    tokens: torch.Tensor | slice
    rows: int
    count: int
    pages: int
    frames: torch.Tensor
    small: tuple[torch.Tensor, torch.Tensor] | None
    seen: slice
    unwritten: torch.Tensor | None
    mask: torch.Tensor | None
    causal: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """What one step does in each layer of a group.

    Attributes
    ----------
    written : int64 [n] or None
        Tokens of the step that are written; None: all.
    frames, offsets : int64 [n]
        Where to.
    pieces : list
        Rows that are worked on together.
    """

    written: torch.Tensor | None
    frames: torch.Tensor
    offsets: torch.Tensor
    pieces: list[_Piece]


def plan(
    rows: Rows, kind: str, window: int | None, page_tokens: int, device: torch.device | str = "cpu"
) -> Plan:
    """Turn a step into tensors, once for all layers of a group.

    Parameters
    ----------
    rows : Rows
        The step.
    kind : str
        Of the layer group.
    window : int or None
        Its window or chunk.
    page_tokens : int
        Tokens of a page.
    device : torch.device, optional
        Where the tensors are wanted: `torch_cuda` has rows of several tokens attended here too.

    Returns
    -------
    Plan
    """
    every = len(rows.tokens) == rows.num_tokens
    return Plan(
        None if every else torch.from_numpy(rows.tokens).to(device),
        torch.from_numpy(rows.frames).to(device),
        torch.from_numpy(rows.offsets).to(device),
        [
            _piece(together, kind, window, page_tokens, device)
            for together in group_rows(rows, page_tokens, _TOKENS)
        ],
    )


def _piece(
    together: Together, kind: str, window: int | None, page_tokens: int, device: torch.device | str
) -> _Piece:
    rows, count = together.tokens.shape
    pages = together.pages.shape[1]
    flat = together.tokens.reshape(-1)
    side_by_side = bool((flat[1:] - flat[:-1] == 1).all())
    entries = torch.from_numpy(together.pages.reshape(-1))
    compressed = torch.nonzero(entries < 0).flatten()
    start = torch.from_numpy(together.start)
    lens = torch.from_numpy(together.seq_lens)
    positions = torch.from_numpy(together.positions)
    first = torch.from_numpy(first_positions(kind, window, together.positions))
    # From here on, positions count from the first token of the buffer. Rows that look at the same ones, as
    # rows of one length do, need no mask; nor do whole prompts, for which torch has a faster way.
    ends, first, positions = lens - start, first - start[:, None], positions - start[:, None]
    low, high = int(first.min()), int(ends.max())
    alike = bool((ends == high).all())
    causal = alike and count > 1 and count == high and not bool(first.any())
    mask = unwritten = None
    if not alike:
        unwritten = torch.nonzero((torch.arange(pages * page_tokens) >= ends[:, None]).flatten()).flatten()
    if not causal and not (alike and count == 1 and bool((first == low).all())):
        keys = torch.arange(low, high)
        mask = ((keys <= positions[..., None]) & (keys >= first[..., None]))[:, None]
    return _Piece(
        tokens=slice(int(flat[0]), int(flat[-1]) + 1) if side_by_side else torch.from_numpy(flat).to(device),
        rows=rows,
        count=count,
        pages=pages,
        frames=entries.clamp(min=0).to(device),
        small=(compressed.to(device), (~entries[compressed]).to(device)) if len(compressed) else None,
        seen=slice(low, high),
        unwritten=None if unwritten is None else unwritten.to(device),
        mask=None if mask is None else mask.to(device),
        causal=causal,
    )


class Staging(threading.local):
    """Buffers that pages are gathered into: one set per thread, grown as needed."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}

    def take(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a buffer that holds anything.

        Parameters
        ----------
        name : str
            Buffers of different names are different memory.
        shape : tuple of int
        dtype : torch.dtype
        device : torch.device

        Returns
        -------
        torch.Tensor
        """
        size = 1
        for extent in shape:
            size *= extent
        key = (name, dtype, device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size:
            # Not an inference tensor, even if this is the first call of a model in inference mode: the next
            # one may come outside of it.
            with torch.inference_mode(False):
                buffer = self._buffers[key] = torch.empty(size, dtype=dtype, device=device)
        return buffer[:size].view(shape)


def write(plan: Plan, view: View, k: torch.Tensor | None, v: torch.Tensor | None) -> None:
    """Put K and V of a step's tokens into their pages.

    Parameters
    ----------
    plan : Plan
        Where to.
    view : KVView
        The layer.
    k, v : torch.Tensor [tokens, kv_heads, dim]
        v is None for a latent.
    """
    at = (plan.frames, plan.offsets)
    for new, pages, scales in ((k, view.k, view.k_scale), (v, view.v, view.v_scale)):
        if new is None or pages is None:
            continue
        new = new if plan.written is None else new.index_select(0, plan.written)
        if scales is not None:
            new, scale = quantised(new)
            scales.index_put_(at, scale)
        _bits(pages).index_put_(at, _bits(stored(new, pages.dtype)))


def quantised(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 with a float16 scale per token and head.

    Parameters
    ----------
    values : torch.Tensor [..., dim]

    Returns
    -------
    int8 [..., dim], float16 [...]
    """
    wide = values.float()
    scale = (wide.abs().amax(-1) / 127).clamp(max=65504).to(torch.float16)
    step = scale.float()[..., None]
    return torch.where(step > 0, wide / step, 0).round().clamp(-127, 127).to(torch.int8), scale


def stored(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert to a storage dtype; fp8 saturates, since it has no infinity."""
    if dtype == torch.float8_e4m3fn:
        return values.float().clamp(-448, 448).to(dtype)
    return values.to(dtype)


def convert(view: View, sources: torch.Tensor, target: View, targets: torch.Tensor) -> None:
    """Write pages of one layer into pages of another class, in its dtype; devices may differ.

    Parameters
    ----------
    view, target : KVView
        The layer in both classes.
    sources, targets : torch.Tensor int64 [n]
        Frames, each on its class's device.
    """
    for old, new, old_scale, new_scale in (
        (view.k, target.k, view.k_scale, target.k_scale),
        (view.v, target.v, view.v_scale, target.v_scale),
    ):
        if old is None or new is None:
            continue
        wide = _bits(old).index_select(0, sources).view(old.dtype).float()
        if old_scale is not None:
            wide *= old_scale.index_select(0, sources).float()[..., None]
        if new_scale is not None:
            wide, scale = quantised(wide)
            new_scale.index_copy_(0, targets, scale.to(new_scale.device))
        _bits(new).index_copy_(0, targets, _bits(stored(wide, new.dtype)).to(new.device))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """fp8 as bytes: it is moved, not calculated with."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def attend(
    plan: Plan,
    q: torch.Tensor,
    view: View,
    small: View | None,
    staging: Staging,
    *,
    scale: float,
    v_dim: int,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of a step's tokens over the pages of their rows.

    Parameters
    ----------
    plan : Plan
        The step.
    q : torch.Tensor [tokens, heads, k_dim]
        Heads of one KV head side by side.
    view, small : KVView
        The layer; the second for compressed pages.
    staging : Staging
        Buffers.
    scale : float
        Factor of the scores.
    v_dim : int
        Values of V; of a latent, how many of its values are V.
    soft_cap : float, optional
        Scores become ``soft_cap * tanh(scores / soft_cap)``.
    sinks : torch.Tensor [heads], optional
        Logits that take part in the softmax and have no value.

    Returns
    -------
    torch.Tensor [tokens, heads, v_dim]
        In q's dtype.
    """
    kv_heads = view.k.shape[2]
    out = q.new_empty(q.shape[0], q.shape[1], v_dim)
    for piece in plan.pieces:
        k = _gathered("k", piece, view.k, view.k_scale, small and (small.k, small.k_scale), q.dtype, staging)
        if view.v is None:
            v = k[..., :v_dim]
        else:
            v = _gathered(
                "v", piece, view.v, view.v_scale, small and (small.v, small.v_scale), q.dtype, staging
            )
        shape = (piece.rows, piece.count, kv_heads, -1, q.shape[2])
        # [rows, kv_heads, heads of each, count, dim]
        query = (q[piece.tokens]).view(shape).permute(0, 2, 3, 1, 4)
        bias = None if sinks is None else sinks.float().view(1, kv_heads, -1, 1, 1)
        result = _attention(query, k.transpose(1, 2), v.transpose(1, 2), piece, scale, soft_cap, bias)
        out[piece.tokens] = result.permute(0, 3, 1, 2, 4).reshape(-1, q.shape[1], v_dim)
    return out


def _gathered(
    name: str,
    piece: _Piece,
    pages: torch.Tensor,
    scales: torch.Tensor | None,
    small: tuple[torch.Tensor | None, torch.Tensor | None] | None,
    dtype: torch.dtype,
    staging: Staging,
) -> torch.Tensor:
    """K or V of some rows, ``[rows, tokens, kv_heads, dim]``, in q's dtype."""
    shape = (len(piece.frames), *pages.shape[1:])
    buffer = staging.take(name, shape, pages.dtype, pages.device)
    torch.index_select(_bits(pages), 0, piece.frames, out=_bits(buffer))
    if buffer.dtype != dtype or scales is not None:
        buffer = staging.take(f"{name} wide", shape, dtype, pages.device).copy_(buffer)
        if scales is not None:
            buffer.mul_(scales.index_select(0, piece.frames).to(dtype)[..., None])
    if piece.small is not None and small is not None and small[0] is not None:
        places, frames = piece.small
        values = _bits(small[0]).index_select(0, frames).view(small[0].dtype).to(dtype)
        if small[1] is not None:
            values = values * small[1].index_select(0, frames).to(dtype)[..., None]
        buffer.index_copy_(0, places, values)
    if piece.unwritten is not None:
        buffer.view(-1, *buffer.shape[2:]).index_fill_(0, piece.unwritten, 0)
    return buffer.view(piece.rows, -1, *buffer.shape[2:])[:, piece.seen]


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    piece: _Piece,
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of q ``[rows, kv_heads, group, count, dim]`` over k, v ``[rows, kv_heads, tokens, dim]``."""
    rows, kv_heads, group, count, dim = q.shape
    plain = soft_cap is None and sinks is None and k.shape[-1] == v.shape[-1]
    if plain and count == 1:
        flat = q.reshape(rows, kv_heads, group, dim)
        return F.scaled_dot_product_attention(flat, k, v, attn_mask=piece.mask, scale=scale).unsqueeze(3)
    mask = piece.mask
    if mask is None and piece.causal and not plain:
        mask = torch.ones(count, count, dtype=torch.bool, device=q.device).tril()[None, None]
    out = q.new_empty(rows, kv_heads, group, count, v.shape[-1])
    for at in range(0, count, count if piece.causal and plain else _QUERIES):
        part = slice(at, at + (count if piece.causal and plain else _QUERIES))
        seen = None if mask is None else mask[:, :, part]
        if not plain:
            out[:, :, :, part] = _by_hand(q[:, :, :, part], k, v, seen, scale, soft_cap, sinks)
            continue
        for g in range(group):
            out[:, :, g, part] = F.scaled_dot_product_attention(
                q[:, :, g, part], k, v, attn_mask=seen, is_causal=piece.causal, scale=scale
            )
    return out


def _by_hand(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """What torch's fused attention has no arguments for: soft caps, sinks, V of other width than K."""
    scores = torch.matmul(q, k.transpose(-1, -2)[:, :, None]).float() * scale
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    if mask is not None:
        scores = scores.masked_fill(~mask[:, :, None], -torch.inf)
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        top = torch.maximum(scores.amax(-1, keepdim=True), sinks)
        weights = torch.exp(scores - top)
        weights = weights / (weights.sum(-1, keepdim=True) + torch.exp(sinks - top))
    return torch.matmul(weights.to(v.dtype), v[:, :, None])
