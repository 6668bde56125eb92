"""Pages in plain torch and float32: what every kernel must give, within its dtype. Slow and meant to be read.

It shares no code with what is tested against it.
"""

from typing import Protocol

import torch

__all__ = ["convert_pages", "dequantise", "paged_attention", "quantise", "write_kv"]


class Pages(Protocol):
    """The tensors of one layer in one class, such as a store's views."""

    @property
    def k(self) -> torch.Tensor:
        """K, ``[frames, page_tokens, kv_heads, k_dim]``."""

    @property
    def v(self) -> torch.Tensor | None:
        """V, ``[frames, page_tokens, kv_heads, v_dim]``."""

    @property
    def k_scale(self) -> torch.Tensor | None:
        """Scales of K, float16 ``[frames, page_tokens, kv_heads]``."""

    @property
    def v_scale(self) -> torch.Tensor | None:
        """Scales of V."""


def quantise(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Values as they are stored.

    Parameters
    ----------
    values : torch.Tensor [..., dim]
    dtype : torch.dtype
        int8: the scale is the largest magnitude of a row over 127, as float16 (at most 65,504); NaN makes it
        NaN, so that it is not hidden. float8_e4m3fn saturates at 448, since it has no infinity.

    Returns
    -------
    stored : torch.Tensor [..., dim]
    scale : torch.Tensor float16 [...] or None
        For int8 only.
    """
    wide = values.to(torch.float32)
    if dtype == torch.float8_e4m3fn:
        return wide.clamp(-448, 448).to(dtype), None
    if dtype != torch.int8:
        return wide.to(dtype), None
    scale = (wide.abs().amax(-1) / 127).clamp(max=65504).to(torch.float16)
    step = scale.to(torch.float32)[..., None]
    codes = torch.where(step > 0, (wide / step).round().clamp(-127, 127), torch.zeros_like(wide))
    return codes.to(torch.int8), scale


def dequantise(stored: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Stored values as float32.

    Parameters
    ----------
    stored : torch.Tensor [..., dim]
    scale : torch.Tensor float16 [...], optional
        For int8.

    Returns
    -------
    torch.Tensor float32 [..., dim]
    """
    wide = stored.to(torch.float32)
    return wide if scale is None else wide * scale.to(torch.float32)[..., None]


def write_kv(
    k_new: torch.Tensor,
    v_new: torch.Tensor | None,
    k: torch.Tensor,
    v: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Write new tokens into pages, one by one.

    Parameters
    ----------
    k_new, v_new : torch.Tensor [tokens, kv_heads, dim]
        v_new is None for a latent.
    k, v : torch.Tensor [frames, page_tokens, kv_heads, dim]
    slot_mapping : torch.Tensor int64 [tokens]
        ``frame * page_tokens + place``; -1: not written.
    k_scale, v_scale : torch.Tensor float16 [frames, page_tokens, kv_heads], optional
        For int8.
    """
    page_tokens = k.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        at = divmod(slot, page_tokens)
        for new, pages, scales in ((k_new, k, k_scale), (v_new, v, v_scale)):
            if new is not None and pages is not None:
                pages[at], scale = quantise(new[token], pages.dtype)
                if scales is not None and scale is not None:
                    scales[at] = scale


def convert_pages(source: Pages, sources: list[int], target: Pages, targets: list[int]) -> None:
    """Write pages of one class into pages of another, in the other's dtype.

    Parameters
    ----------
    source, target : Pages
        One layer of each class.
    sources, targets : list of int
        Frames.
    """
    for old, new, old_scale, new_scale in (
        (source.k, target.k, source.k_scale, target.k_scale),
        (source.v, target.v, source.v_scale, target.v_scale),
    ):
        if old is None or new is None:
            continue
        for at, to in zip(sources, targets, strict=True):
            wide = dequantise(old[at], None if old_scale is None else old_scale[at])
            new[to], scale = quantise(wide, new.dtype)
            if new_scale is not None and scale is not None:
                new_scale[to] = scale


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor | None = None,
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
) -> torch.Tensor:
    """Attention over pages, one token and one head after the other.

    Parameters
    ----------
    q : torch.Tensor [tokens, heads, k_dim]
        Heads of one KV head side by side.
    k, v : torch.Tensor [frames, page_tokens, kv_heads, dim]
        v is None for a latent: its first `v_dim` values are V.
    block_table : torch.Tensor int32 [rows, max_pages]
        Frame of each page; below 0 it is ``~frame`` of `small`; 0: the page was given up, and nobody looks at
        its tokens. Pages that no token looks at are not read.
    seq_lens : torch.Tensor int32 [rows]
        Tokens of each sequence, those of the step included; a row of 0 gives zeros.
    query_start_loc : torch.Tensor int32 [rows + 1], optional
        Where each row's tokens begin in q. Default: one token per row.
    scale : float
        Factor of the scores.
    window : int, optional
        A token looks at the last `window`, itself among them.
    chunk : int, optional
        A token looks at those since the last multiple of `chunk`.
    soft_cap : float, optional
        Scores become ``soft_cap * tanh(scores / soft_cap)``.
    sinks : torch.Tensor [heads], optional
        Logits that take part in the softmax and have no value.
    k_scale, v_scale : torch.Tensor float16 [frames, page_tokens, kv_heads], optional
        For int8.
    small : Pages, optional
        The pages that negative entries mean.
    v_dim : int, optional
        For a latent.

    Returns
    -------
    torch.Tensor float32 [tokens, heads, v_dim]
    """
    page_tokens, kv_heads = k.shape[1:3]
    group = q.shape[1] // kv_heads
    width = v.shape[3] if v is not None else v_dim
    assert width is not None, "a latent needs v_dim"
    starts = range(len(q) + 1) if query_start_loc is None else query_start_loc.tolist()
    out = torch.zeros(len(q), q.shape[1], width)

    def read(page: int, offset: int, head: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one token."""
        if page < 0:
            assert small is not None, "a compressed page, and no small class"
            at, planes = (~page, offset, head), (small.k, small.k_scale, small.v, small.v_scale)
        else:
            at, planes = (page, offset, head), (k, k_scale, v, v_scale)
        keys, key_scale, values, value_scale = planes
        assert keys is not None
        key = dequantise(keys[at], None if key_scale is None else key_scale[at])
        if values is None:
            return key, key[:width]
        return key, dequantise(values[at], None if value_scale is None else value_scale[at])

    for row, length in enumerate(seq_lens.tolist()):
        tokens = range(starts[row], starts[row + 1])
        table = block_table[row].tolist()
        for token in tokens if length else ():
            position = length - tokens.stop + token
            first = 0
            if window is not None:
                first = max(0, position - window + 1)
            if chunk is not None:
                first = position // chunk * chunk
            for kv_head in range(kv_heads):
                read_tokens = [
                    read(table[p // page_tokens], p % page_tokens, kv_head)
                    for p in range(first, position + 1)
                    if table[p // page_tokens]
                ]
                if not read_tokens:
                    continue
                keys, values = (torch.stack(side).cpu() for side in zip(*read_tokens, strict=True))
                for head in range(kv_head * group, (kv_head + 1) * group):
                    scores = keys @ q[token, head].to(torch.float32).cpu() * scale
                    if soft_cap is not None:
                        scores = soft_cap * torch.tanh(scores / soft_cap)
                    if sinks is not None:
                        scores = torch.cat([scores, sinks[head : head + 1].to(torch.float32).cpu()])
                    weights = torch.softmax(scores, 0)[: len(keys)]
                    out[token, head] = weights @ values
    return out
