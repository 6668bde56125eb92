"""Converting whole pages between a class and its smaller one: fp8 or int8 out of 16 bits, and back."""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kvalloc.errors import InvalidArgument
from kvalloc.kernels import check
from kvalloc.kernels.decode import Pages
from kvalloc.kernels.device import card_of, current
from kvalloc.kernels.values import check_scales, raw, store_values, stored_values

if TYPE_CHECKING:
    from kvalloc.typing import Int32s

__all__ = ["convert_pages"]


@triton.jit
def _convert(
    source, target, source_scale, target_scale, sources, targets,
    s_frame, s_token, s_head, t_frame, t_token, t_head,
    ss_frame, ss_token, ss_head, ts_frame, ts_token, ts_head,
    PAGE_TOKENS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D:
    tl.constexpr,
):  # fmt: skip
    """Convert some (token, head) rows of one page."""
    at = tl.program_id(0).to(tl.int64)
    source_frame = tl.load(sources + at).to(tl.int64)
    target_frame = tl.load(targets + at).to(tl.int64)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = row // HEADS
    head = row % HEADS
    d = tl.arange(0, BLOCK_D)
    real = row < PAGE_TOKENS * HEADS
    mask = real[:, None] & (d < DIM)[None, :]
    from_at = source + source_frame * s_frame + token * s_token + head * s_head
    x = stored_values(tl.load(from_at[:, None] + d[None, :], mask=mask, other=0.0), tl.float32)
    if source_scale is not None:
        step_at = source_scale + source_frame * ss_frame + token * ss_token + head * ss_head
        x = x * tl.load(step_at, mask=real, other=0.0).to(tl.float32)[:, None]
    to_at = target + target_frame * t_frame + token * t_token + head * t_head
    scale_at = to_at
    if target_scale is not None:
        scale_at = target_scale + target_frame * ts_frame + token * ts_token + head * ts_head
    store_values(to_at[:, None] + d[None, :], x, mask, scale_at, real)


def convert_pages(
    source: Pages,
    sources: "Int32s | torch.Tensor",
    target: Pages,
    targets: "Int32s | torch.Tensor",
) -> None:
    """Convert one layer of whole pages into another class: quantise, or back.

    Parameters
    ----------
    source, target : Pages
        The layer in each class; they differ in dtype, scales and strides only.
    sources, targets : sequence of int, array or torch.Tensor
        Frame numbers ``[n]`` in each; no target twice.

    Raises
    ------
    InvalidArgument
        If the classes don't fit each other, or a frame number is out of range: always for lists and host
        arrays, in debug mode (`kvalloc.kernels.check`) for tensors on the device. Nothing was written.
    """
    card_of(source.k)
    check.shape("source.k", source.k, ["frames", "page_tokens", "kv_heads", "k_dim"])
    if (source.v is None) != (target.v is None):
        raise InvalidArgument("either both classes have v, or none")
    planes = [("k", source.k, target.k, source.k_scale, target.k_scale)]
    if source.v is not None and target.v is not None:
        planes.append(("v", source.v, target.v, source.v_scale, target.v_scale))
    for name, old, new, old_scale, new_scale in planes:
        check.shape(f"source.{name}", old, [*source.k.shape[:3], "dim"])
        check.shape(f"target.{name}", new, [target.k.shape[0], *old.shape[1:]])
        check_scales(f"source.{name}", old, old_scale)
        check_scales(f"target.{name}", new, new_scale)
        check.same_device(
            source.k,
            **{f"source.{name}": old, f"target.{name}": new},
            **{f"source.{name}_scale": old_scale, f"target.{name}_scale": new_scale},
        )
    from_rows = check.frames("sources", sources, source.k.shape[0], source.k.device)
    to_rows = check.frames("targets", targets, target.k.shape[0], source.k.device)
    if len(from_rows) != len(to_rows):
        raise InvalidArgument(f"{len(from_rows)} sources, but {len(to_rows)} targets")
    check.disjoint(targets)
    if not len(from_rows):
        return
    for _, old, new, old_scale, new_scale in planes:
        _, page_tokens, heads, dim = old.shape
        block_d = triton.next_power_of_2(dim)
        block = min(triton.next_power_of_2(page_tokens * heads), max(1, 4096 // block_d))
        with current(old):
            _convert[(len(from_rows), triton.cdiv(page_tokens * heads, block))](
                raw(old), raw(new), old_scale, new_scale, from_rows, to_rows,
                *check.strides(old), *check.strides(new),
                *check.strides(old_scale), *check.strides(new_scale),
                PAGE_TOKENS=page_tokens, HEADS=heads, DIM=dim, BLOCK=block, BLOCK_D=block_d,
            )  # fmt: skip
