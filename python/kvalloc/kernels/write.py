"""Writing the K and V of a step's tokens into their pages."""

import torch
import triton
import triton.language as tl

from kvalloc.errors import InvalidArgument
from kvalloc.kernels import check
from kvalloc.kernels.device import card_of, current
from kvalloc.kernels.values import check_scales, raw, store_values

__all__ = ["write_kv"]


@triton.jit
def _put(
    new, pages, scale, token, frame, within, heads,
    new_token, new_head, page_frame, page_token, page_head, scale_frame, scale_token, scale_head,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Put some heads of one token where they belong."""
    d = tl.arange(0, BLOCK_D)
    real_head = heads < HEADS
    mask = real_head[:, None] & (d < DIM)[None, :]
    x = tl.load(new + token * new_token + (heads * new_head)[:, None] + d[None, :], mask=mask, other=0.0)
    at = pages + frame * page_frame + within * page_token + (heads * page_head)[:, None] + d[None, :]
    scale_at = at
    if scale is not None:
        scale_at = scale + frame * scale_frame + within * scale_token + heads * scale_head
    store_values(at, x.to(tl.float32), mask, scale_at, real_head)


@triton.jit
def _write(
    k_new, v_new, k, v, k_scale, v_scale, slots,
    kn_token, kn_head, vn_token, vn_head, k_frame, k_token, k_head, v_frame, v_token, v_head,
    ks_frame, ks_token, ks_head, vs_frame, vs_token, vs_head,
    PAGE_TOKENS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Write some heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        frame = slot // PAGE_TOKENS
        within = slot % PAGE_TOKENS
        _put(
            k_new, k, k_scale, token, frame, within, heads,
            kn_token, kn_head, k_frame, k_token, k_head, ks_frame, ks_token, ks_head, HEADS, K, BLOCK_K,
        )  # fmt: skip
        if v is not None:
            _put(
                v_new, v, v_scale, token, frame, within, heads,
                vn_token, vn_head, v_frame, v_token, v_head, vs_frame, vs_token, vs_head, HEADS, V, BLOCK_V,
            )  # fmt: skip


def write_kv(
    k_new: torch.Tensor,
    v_new: torch.Tensor | None,
    k: torch.Tensor,
    v: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Write new K and V into pages, in the pages' dtype; for int8 with their scales.

    Parameters
    ----------
    k_new, v_new : torch.Tensor
        ``[tokens, kv_heads, k_dim]`` and ``[tokens, kv_heads, v_dim]``, float16, bfloat16 or float32; `v_new`
        is None for a latent.
    k, v : torch.Tensor
        ``[frames, page_tokens, kv_heads, k_dim]`` and the same with v_dim: views of the pool, any strides but
        1 for the last dimension; `v` is None for a latent.
    slot_mapping : torch.Tensor
        int64 ``[tokens]``: frame x page_tokens + place in the page; -1: not written. No slot twice.
    k_scale, v_scale : torch.Tensor, optional
        float16 ``[frames, page_tokens, kv_heads]``; for int8, and needed there (no `v_scale` for a latent).

    Raises
    ------
    InvalidArgument
        If tensors don't fit each other; in debug mode (`kvalloc.kernels.check`) also for slots out of range.
        Nothing was written.
    """
    card_of(k_new)
    check.shape("k", k, ["frames", "page_tokens", "kv_heads", "k_dim"])
    frame_count, page_tokens, kv_heads, k_dim = k.shape
    check.shape("k_new", k_new, ["tokens", kv_heads, k_dim])
    tokens = k_new.shape[0]
    if (v is None) != (v_new is None):
        raise InvalidArgument("v_new and v go together: give both, or none for a latent")
    check_scales("k", k, k_scale)
    v_dim = 0
    if v is not None and v_new is not None:
        check.shape("v", v, [frame_count, page_tokens, kv_heads, "v_dim"])
        v_dim = v.shape[3]
        check.shape("v_new", v_new, [tokens, kv_heads, v_dim])
        check_scales("v", v, v_scale)
    elif v_scale is not None:
        raise InvalidArgument("v_scale: a latent has the scales of k only")
    for name, given in [("k_new", k_new), ("v_new", v_new)]:
        if given is not None and given.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise InvalidArgument(f"{name}: must be float16, bfloat16 or float32, got {given.dtype}")
    check.int_tensor("slot_mapping", slot_mapping, torch.int64)
    check.shape("slot_mapping", slot_mapping, [tokens])
    check.same_device(
        k_new, v_new=v_new, k=k, v=v, slot_mapping=slot_mapping, k_scale=k_scale, v_scale=v_scale
    )
    if check.DEBUG:
        check.slots(slot_mapping, frame_count, page_tokens)
    if tokens == 0:
        return

    k, v = raw(k), None if v is None else raw(v)
    block_k = triton.next_power_of_2(k_dim)
    block_h = min(triton.next_power_of_2(kv_heads), max(1, 2048 // block_k))
    new_v = (0, 0) if v_new is None else v_new.stride()[:2]
    with current(k):
        _write[(tokens, triton.cdiv(kv_heads, block_h))](
            k_new, v_new, k, v, k_scale, v_scale, slot_mapping,
            *k_new.stride()[:2], *new_v, *check.strides(k), *check.strides(v),
            *check.strides(k_scale), *check.strides(v_scale),
            PAGE_TOKENS=page_tokens, HEADS=kv_heads, K=k_dim, V=v_dim,
            BLOCK_H=block_h, BLOCK_K=block_k, BLOCK_V=triton.next_power_of_2(max(v_dim, 1)),
        )  # fmt: skip
