"""Number formats and page views in numpy, written from their definitions: what kernels are compared with."""

from dataclasses import dataclass

import numpy as np

DTYPES = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "int8": np.int8,
    "float8": np.uint8,
}


def float8_values() -> np.ndarray:
    """The value of each of the 256 codes of e4m3fn."""
    values = []
    for code in range(256):
        exponent, mantissa = code >> 3 & 15, code & 7
        size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        values.append((-1 if code & 128 else 1) * (np.nan if code & 127 == 127 else size))
    return np.array(values)


FLOAT8 = float8_values()


def encode(values: np.ndarray, kind: str) -> np.ndarray:
    """Round to a format; ties go to even."""
    values = np.asarray(values, np.float32)
    if kind == "bfloat16":
        bits = values.view(np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return np.where(np.isnan(values), bits >> 16 | 0x40, rounded).astype(np.uint16)
    if kind == "float8":
        size = np.abs(values)[..., None]
        apart = np.abs(size - FLOAT8[:127])
        nearest = np.argmin(apart, axis=-1)
        even = np.minimum(
            nearest + 1, 126
        )  # argmin takes the lower of a tie; the upper one may be the even one
        tie = np.take_along_axis(apart, even[..., None], -1) == np.take_along_axis(
            apart, nearest[..., None], -1
        )
        code = np.where(tie[..., 0] & (nearest % 2 == 1), even, nearest)
        return np.where(np.isnan(values), 127, code + np.where(np.signbit(values), 128, 0)).astype(np.uint8)
    with np.errstate(over="ignore"):
        return values.astype(DTYPES[kind])


def decode(stored: np.ndarray, kind: str) -> np.ndarray:
    """The values, float64."""
    if kind == "bfloat16":
        return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if kind == "float8":
        return FLOAT8[stored]
    return stored.astype(np.float64)


@dataclass
class Pages:
    """One layer of a page class in an arena of bytes, page-major; all 0xff at first, NaN in every format."""

    kind: str
    k: np.ndarray
    v: np.ndarray | None
    k_scale: np.ndarray | None
    v_scale: np.ndarray | None
    arena: np.ndarray
    places: list

    @property
    def keys(self):
        return self.k, self.v, self.k_scale, self.v_scale

    @classmethod
    def make(cls, kind, frames, page_tokens, heads, k_dim, v_dim=None, layers=3, layer=1, arena=None):
        size = np.dtype(DTYPES[kind]).itemsize
        parts = [(k_dim, size), (v_dim or 0, size)] + (
            [(1, 2), (1 if v_dim else 0, 2)] if kind == "int8" else []
        )
        sizes = [page_tokens * heads * dim * each for dim, each in parts]
        layer_bytes = sum(sizes)
        page_bytes = -(-layers * layer_bytes // 256) * 256
        if arena is None:
            arena = np.full(frames * page_bytes + 64, 0xFF, np.uint8)
            start = -arena.ctypes.data % 64
            arena = arena[start : start + frames * page_bytes]
        arena = arena.reshape(frames, page_bytes)
        views, places, offset = [], [], layer * layer_bytes
        for number, ((dim, each), part) in enumerate(zip(parts, sizes, strict=True)):
            dtype = np.float16 if number >= 2 else DTYPES[kind]
            shape = (frames, page_tokens, heads) + ((dim,) if number < 2 else ())
            inner = (heads * dim * each, dim * each) + ((each,) if number < 2 else ())
            place = (shape, dtype, offset, (page_bytes, *inner)) if part else None
            places.append(place)
            views.append(place and np.ndarray(*place[:2], arena.data, *place[2:]))
            offset += part
        return cls(kind, *views, *[None] * (4 - len(views)), arena, places)

    def on_device(self):
        """The same views of a copy of the arena on cupy's device."""
        import cupy

        start = cupy.asarray(self.arena).data
        made = [p and cupy.ndarray(p[0], p[1], start + p[2], p[3]) for p in self.places]
        return (*made, *[None] * (4 - len(made)))

    def put(self, frame, offset, k, v):
        """Store one token's rows [heads, dim]; return what they read back as."""
        back = []
        for values, rows, scales in ((k, self.k, self.k_scale), (v, self.v, self.v_scale)):
            if rows is None:
                back.append(None)
            elif scales is None:
                rows[frame, offset] = encode(values, self.kind)
                back.append(decode(rows[frame, offset], self.kind))
            else:
                scale = (np.abs(values).max(-1) / 127).astype(np.float16)
                rows[frame, offset] = np.rint(values / scale.astype(np.float32)[:, None]).astype(np.int8)
                scales[frame, offset] = scale
                back.append(rows[frame, offset] * scale.astype(np.float64)[:, None])
        return back


def attend(q, k, v, position, *, scale=None, window=None, chunk=None, soft_cap=None, sinks=None, gone=None):
    """One query [heads, k_dim] at a position over its sequence's keys [tokens, kv_heads, k_dim]; float64.

    `gone` is true for keys that it does not see though they are in reach.
    """
    first = max(0, position - window + 1 if window else 0, position // chunk * chunk if chunk else 0)
    seen = np.arange(first, position + 1)
    if gone is not None:
        seen = seen[~gone[seen]]
    k, v = k[seen], v[seen]
    out = np.zeros((q.shape[0], v.shape[-1]))
    group = q.shape[0] // k.shape[1]
    for head in range(q.shape[0]):
        scores = k[:, head // group] @ q[head] * (scale or q.shape[1] ** -0.5)
        if soft_cap:
            scores = soft_cap * np.tanh(scores / soft_cap)
        everything = scores if sinks is None else np.append(scores, sinks[head])
        if len(everything):
            weights = np.exp(scores - everything.max())
            out[head] = weights @ v[:, head // group] / np.exp(everything - everything.max()).sum()
    return out
