"""How values are stored: fp8 (e4m3), and int8 with a float16 scale per token and KV head.

In kernels an fp8 tensor shows either its own type, where the card converts it (9.0 and later), or its bits as
uint8, which the functions here take apart; both give the same numbers. Values beyond 448 are stored as 448
(e4m3 has no infinity), NaN stays NaN. An int8 scale is the largest magnitude of a token's head, over 127, as
float16 (at most 65,504); NaN there makes the scale NaN, so that it is not hidden.
"""

import torch
import triton
import triton.language as tl

from kvalloc.errors import InvalidArgument

__all__ = [
    "STORED",
    "check_scales",
    "from_e4m3",
    "raw",
    "split_dim",
    "store_values",
    "stored_values",
    "to_e4m3",
    "to_int8",
]

# dtypes a page can hold, and whether tokens have scales
STORED = {
    torch.float32: False,
    torch.float16: False,
    torch.bfloat16: False,
    torch.float8_e4m3fn: False,
    torch.int8: True,
}


def raw(tensor: torch.Tensor, *, native_fp8: bool = False) -> torch.Tensor:
    """Show fp8 as its bits, unless the kernel may read it as what it is; other tensors as they are."""
    if tensor.dtype == torch.float8_e4m3fn and not native_fp8:
        return tensor.view(torch.uint8)
    return tensor


def split_dim(dim: int, first: int | None = None) -> tuple[int, int, int, int]:
    """Cut a head's values in two parts that powers of two cover well: 576 into 512 + 64, not 1,024.

    Parameters
    ----------
    dim : int
        Values of a head.
    first : int, optional
        Values of the first part, where that is given (the rank of a latent).

    Returns
    -------
    tuple of int
        Values of the first and second part, and the powers of two (16 or more, or 0) that cover them.

    Examples
    --------
    >>> from kvalloc.kernels.values import split_dim
    >>> [split_dim(dim) for dim in (128, 576, 96, 8)]
    [(128, 0, 128, 0), (512, 64, 512, 64), (64, 32, 64, 32), (8, 0, 16, 0)]
    """
    if first is None:
        first = dim if dim < 16 else 1 << (dim.bit_length() - 1)
    rest = dim - first
    cover = [max(16, triton.next_power_of_2(part)) if part else 0 for part in (first, rest)]
    return first, rest, cover[0], cover[1]


def check_scales(name: str, values: torch.Tensor, scale: torch.Tensor | None) -> None:
    """Check that int8 values, and only those, come with scales of the right shape.

    Raises
    ------
    InvalidArgument
        If not.
    """
    if values.dtype not in STORED:
        raise InvalidArgument(
            f"{name}: pages of {values.dtype} are not supported; use one of "
            + ", ".join(str(d).removeprefix("torch.") for d in STORED)
        )
    if not STORED[values.dtype]:
        if scale is not None:
            raise InvalidArgument(f"{name}: pages of {values.dtype} have no scales, but some were given")
        return
    wanted = tuple(values.shape[:-1])
    if scale is None or tuple(scale.shape) != wanted or scale.dtype != torch.float16:
        given = "none" if scale is None else f"{scale.dtype} {tuple(scale.shape)}"
        raise InvalidArgument(
            f"{name}: int8 pages need scales, float16 {wanted}, one per token and KV head; got {given}"
        )


@triton.jit
def from_e4m3(bits):
    """Read e4m3 bits as float32: move them to where float32 has its own, then mend the exponent's bias."""
    wide = bits.to(tl.int32)
    moved = ((wide & 0x80) << 24) | ((wide & 0x7F) << 20)
    value = moved.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** (127 - 7)
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def to_e4m3(x):
    """Round float32 to e4m3 bits, to nearest and ties to even, saturating."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(tl.abs(x), 448.0)
    exact = magnitude.to(tl.int32, bitcast=True)
    normal = (exact - (120 << 23) + 0x7FFFF + ((exact >> 20) & 1)) >> 20
    # Below 2**-6 e4m3 counts in steps of 2**-9, and so does float32 just above 2**14: the addition rounds.
    tiny = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0.015625, tiny, normal)
    code = tl.where(x != x, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def to_int8(x, axis: tl.constexpr):
    """Quantise float32 along an axis; give the int8 values and their float16 scales."""
    scale = tl.minimum(tl.math.div_rn(tl.max(tl.abs(x), axis), tl.full([1], 127.0, tl.float32)), 65504.0).to(
        tl.float16
    )
    unknown = tl.max((x != x).to(tl.int32), axis) > 0
    scale = tl.where(unknown, float("nan"), scale.to(tl.float32)).to(tl.float16)
    step = tl.expand_dims(scale.to(tl.float32), axis)
    ratio = tl.where(step > 0.0, tl.math.div_rn(x, tl.where(step > 0.0, step, 1.0)), 0.0)
    ratio = tl.where(ratio == ratio, tl.minimum(tl.maximum(ratio, -127.0), 127.0), 0.0)
    # adding and taking away 1.5 * 2**23 rounds to nearest, ties to even
    return ((ratio + 12582912.0) - 12582912.0).to(tl.int8), scale


@triton.jit
def stored_values(x, dtype: tl.constexpr):
    """Turn loaded values into a type to reckon with; scales are the caller's business."""
    if x.dtype == tl.uint8:
        return from_e4m3(x).to(dtype)
    return x.to(dtype)


@triton.jit
def store_values(at, x, mask, scale_at, scale_mask):
    """Store float32 ``[n, dim]`` at pointers, in the type these point to; for int8 with its scales."""
    if at.dtype.element_ty == tl.uint8:
        tl.store(at, to_e4m3(x), mask=mask)
    elif at.dtype.element_ty == tl.int8:
        codes, scale = to_int8(x, 1)
        tl.store(at, codes, mask=mask)
        tl.store(scale_at, scale, mask=scale_mask)
    else:
        tl.store(at, x.to(at.dtype.element_ty), mask=mask)
