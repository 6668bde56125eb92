"""The store over numpy: the plainest one, for tests and for people who read the code.

Every row and every head is attended for itself, in float32, or in float64 if the queries are. numpy has no
bfloat16 and no fp8, so pages of these hold bits, and `encode` and `decode` turn them into numbers.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvalloc.errors import InvalidArgument
from kvalloc.store.base import BaseStore
from kvalloc.store.memory import available_bytes, host_memory
from kvalloc.store.protocol import KVView
from kvalloc.store.step_data import Shown
from kvalloc.store.steps import Rows, first_positions

__all__ = ["NumpyStore", "convert", "decode", "encode"]

Array = NDArray[Any]
Floats = NDArray[np.float32]

# What lies in memory; the last three are bits.
DTYPES: Final[dict[str, type[np.generic]]] = {
    "float32": np.float32,
    "float16": np.float16,
    "int8": np.int8,
    "bfloat16": np.uint16,
    "float8_e4m3fn": np.uint8,
    "uint8": np.uint8,
}

DTYPE_OF: Final = {np.dtype(memory).name: dtype for dtype, memory in DTYPES.items() if dtype != "uint8"}


def _fp8_values() -> Floats:
    """The number that each of the 256 patterns of float8_e4m3fn means."""
    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    sizes = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    sizes[bits & 127 == 127] = np.nan
    return np.where(bits & 128, -sizes, sizes).astype(np.float32)


_FP8: Final = _fp8_values()


def encode(values: Floats, dtype: str) -> Array:
    """Numbers as they are stored: rounded to the nearest, ties to even; fp8 saturates at 448.

    Parameters
    ----------
    values : float32 [...]
    dtype : str
        "float32", "float16", "bfloat16" or "float8_e4m3fn".

    Returns
    -------
    array [...]
        For the last two their bits, uint16 and uint8.
    """
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        rounded = (bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1)) >> 16
        return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
    if dtype == "float8_e4m3fn":
        size = np.minimum(np.abs(np.nan_to_num(values, nan=0.0, posinf=448, neginf=-448)), np.float32(448))
        # Positive patterns ascend, so the nearest is one of two neighbours.
        above = np.clip(np.searchsorted(_FP8[:127], size), 1, 126)
        below = above - 1
        low, high = size - _FP8[below], _FP8[above] - size
        nearest = np.where((low < high) | ((low == high) & (below % 2 == 0)), below, above)
        bits = np.where(np.signbit(values), 128, 0) + nearest
        return np.where(np.isnan(values), 127, bits).astype(np.uint8)
    with np.errstate(over="ignore"):
        return values.astype(DTYPES[dtype])


def decode(stored: Array, dtype: str) -> Floats:
    """What `encode` made, as float32."""
    if dtype == "bfloat16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    if dtype == "float8_e4m3fn":
        return _FP8[stored]
    return stored.astype(np.float32)


def quantised(values: Floats) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """int8 [..., dim] with a float16 scale [...] per token and head."""
    with np.errstate(over="ignore"):
        scale = np.minimum(np.abs(values).max(-1) / np.float32(127), np.float32(65504)).astype(np.float16)
    step = scale.astype(np.float32)[..., None]
    with np.errstate(invalid="ignore"):
        values = np.divide(values, step, out=np.zeros_like(values), where=step > 0)
    return np.clip(np.rint(values), -127, 127).astype(np.int8), scale


def convert(
    source: KVView[Array], sources: NDArray[np.int64], target: KVView[Array], targets: NDArray[np.int64]
) -> None:
    """Write pages of one layer into pages of another class, in its dtype.

    Parameters
    ----------
    source, target : KVView
        The layer in both classes.
    sources, targets : int64 [n]
        Frames.
    """
    for old, new, old_scale, new_scale in (
        (source.k, target.k, source.k_scale, target.k_scale),
        (source.v, target.v, source.v_scale, target.v_scale),
    ):
        if old is None or new is None:
            continue
        wide = decode(old[sources], DTYPE_OF[old.dtype.name])
        if old_scale is not None:
            wide = wide * old_scale[sources].astype(np.float32)[..., None]
        if new_scale is None:
            new[targets] = encode(np.ascontiguousarray(wide), DTYPE_OF[new.dtype.name])
        else:
            new[targets], new_scale[targets] = quantised(wide)


class NumpyStore(BaseStore[Array]):
    """The array behind a pool's pages, in numpy.

    Parameters
    ----------
    pool : Pool
        The books. One store per pool and rank.
    rank, ranks : int, optional
        For tensor parallelism, see `BaseStore`.

    Raises
    ------
    OutOfMemory
        There is not so much memory (``room``: what there is).
    InUse
        The pool has a store already.
    InvalidArgument, ClosedError

    Notes
    -----
    `views` of bfloat16 and fp8 pages show bits (uint16, uint8).

    Examples
    --------
    >>> spec = kvalloc.KVSpec.uniform(layers=2, kv_heads=2, head_dim=64, dtype="float32")
    >>> pool = kvalloc.Pool(spec, "4MiB")
    >>> batch = pool.batch(max_sequences=4, max_tokens=256)
    >>> row, step = batch.add(pool.open(pool.tenant("acme"), range(20))), batch.step()
    >>> q, k, v = (np.ones((20, heads, 64), np.float32) for heads in (6, 2, 2))
    >>> with kvalloc.NumpyStore(pool) as store:
    ...     store.attend(0, q, k, v, batch).shape
    (20, 6, 64)
    """

    @property
    def device(self) -> str:
        """Where the arena lies: "cpu"."""
        return "cpu"

    def _allocate(self, size: int) -> Array:
        return np.frombuffer(host_memory(size), np.uint8)

    def _available(self) -> int:
        return available_bytes()

    def _allocate_host(self, size: int) -> Array:
        return self._allocate(size)

    def _strided(
        self, arena: Array, dtype: str, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> Array:
        size = np.dtype(DTYPES[dtype]).itemsize
        return np.ndarray(
            shape, DTYPES[dtype], arena.data, offset * size, tuple(step * size for step in strides)
        )

    def _check_kind(self, name: str, array: Any) -> None:
        if not isinstance(array, np.ndarray):
            raise InvalidArgument(f"{name} must be a numpy array, not {type(array).__name__}")
        if array.dtype not in (np.float32, np.float16, np.float64):
            raise InvalidArgument(f"{name} has dtype {array.dtype}; it must be float32, float16 or float64")

    def write(self, layer: int, k: Array | None, v: Array | None, batch: Shown) -> None:
        """Put the K and V of a step's tokens into their pages.

        Parameters
        ----------
        layer : int
            Of the model.
        k, v : float array [tokens, kv_heads, dim]
            Of this rank's heads; v is None for a latent.
        batch : Batch or StepData
            After its step.

        Raises
        ------
        InvalidArgument
            Wrong shape or dtype. Nothing was written.
        WrongPool, ClosedError
        """
        group, _ = self.place(layer)
        rows = self._rows(batch, group)
        self._check_kv(self.classes[group].group, k, v, rows.num_tokens)
        view, dtype = self.views(layer), self.classes[group].dtype
        for new, pages, scales in ((k, view.k, view.k_scale), (v, view.v, view.v_scale)):
            if new is None or pages is None:
                continue
            values = np.ascontiguousarray(new[rows.tokens], np.float32)
            if scales is None:
                pages[rows.frames, rows.offsets] = encode(values, dtype)
            else:
                pages[rows.frames, rows.offsets], scales[rows.frames, rows.offsets] = quantised(values)

    def attend(
        self,
        layer: int,
        q: Array,
        k: Array | None,
        v: Array | None,
        batch: Shown,
        *,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: Array | None = None,
        v_dim: int | None = None,
    ) -> Array:
        """Write K and V of the step's tokens, and attend over each row's pages.

        Parameters
        ----------
        layer : int
            Of the model. Its group says which tokens are seen: all, a window, a chunk.
        q : float array [tokens, heads, k_dim]
            Heads of one KV head side by side.
        k, v : float array [tokens, kv_heads, dim] or None
            v is None for a latent. Both None: nothing is written, for a layer that shares another one's KV.
        batch : Batch or StepData
            After its step. Rows with one token and rows with many may be mixed.
        scale : float, optional
            Factor of the scores. Default: ``k_dim ** -0.5``.
        soft_cap : float, optional
            Scores become ``soft_cap * tanh(scores / soft_cap)``.
        sinks : float array [heads], optional
            Logits that take part in the softmax and have no value.
        v_dim : int, optional
            For a latent: how many of its values are V.

        Returns
        -------
        float array [tokens, heads, v_dim]
            In q's dtype.

        Raises
        ------
        InvalidArgument
            Wrong shapes, dtypes or numbers. Nothing was written.
        WrongPool, ClosedError
        """
        group, _ = self.place(layer)
        rows = self._rows(batch, group)
        geometry = self.classes[group].group
        shape = self._check_q(geometry, q, rows.num_tokens, v_dim)
        self._check_sinks(sinks, shape.heads)
        factor, cap = self._scale(scale, geometry), self._soft_cap(soft_cap)
        if k is not None or v is not None:
            self.write(layer, k, v, batch)
        out = np.empty((rows.num_tokens, shape.heads, shape.v_dim), q.dtype)
        wide = np.promote_types(q.dtype, np.float32)
        per_head = shape.heads // geometry.kv_heads
        for row in range(len(rows.rows)):
            keys, values = self._read(layer, rows, row, shape.v_dim)
            first, count = int(rows.first_token[row]), int(rows.counts[row])
            position = np.arange(int(rows.seq_lens[row]) - count, int(rows.seq_lens[row]))
            place = int(rows.first_page[row]) * self.spec.page_tokens + np.arange(len(keys))
            start = first_positions(geometry.kind, geometry.window, position)
            seen = (place <= position[:, None]) & (place >= start[:, None])
            for head in range(shape.heads):
                query = q[first : first + count, head].astype(wide)
                scores = query @ keys[:, head // per_head].T * wide.type(factor)
                if cap is not None:
                    scores = np.tanh(scores / cap) * cap
                scores = np.where(seen, scores, -np.inf)
                top = scores.max(-1, keepdims=True)
                sink = None if sinks is None else wide.type(sinks[head])
                if sink is not None:
                    top = np.maximum(top, sink)
                weights = np.exp(scores - top)
                total = weights.sum(-1, keepdims=True) + (0 if sink is None else np.exp(sink - top))
                out[first : first + count, head] = weights / total @ values[:, head // per_head]
        return out

    def _read(self, layer: int, rows: Rows, row: int, v_dim: int) -> tuple[Floats, Floats]:
        """K and V of one row, ``[tokens, kv_heads, dim]``, from its first page to its last token."""
        group, _ = self.place(layer)
        small = self.spec.small_class(group)
        view = self.views(layer)
        other = None if small is None else self.views(layer, small=True)
        pages = rows.pages(row)
        length = int(rows.seq_lens[row]) - int(rows.first_page[row]) * self.spec.page_tokens

        def numbers(view: KVView[Array], frame: int, dtype: str) -> list[Floats]:
            found = []
            for values, scales in ((view.k, view.k_scale), (view.v, view.v_scale)):
                if values is not None:
                    wide = decode(values[frame], dtype)
                    found.append(
                        wide if scales is None else wide * scales[frame].astype(np.float32)[..., None]
                    )
            return found

        read = []
        for frame in pages:
            if frame >= 0 or small is None or other is None:
                read.append(numbers(view, frame, self.classes[group].dtype))
            else:
                read.append(numbers(other, ~frame, small.dtype))
        # What lies behind the last token may be anything, NaN too.
        keys, *values = (np.concatenate(parts)[:length] for parts in zip(*read, strict=True))
        return keys, values[0] if values else keys[..., :v_dim]

    def _to_host(self, pages: Array) -> NDArray[np.uint8]:
        return pages

    def _from_host(self, pages: NDArray[np.uint8]) -> Array:
        return pages

    def _copy_frames(self, part: Array, sources: NDArray[np.int64], destinations: NDArray[np.int64]) -> None:
        part[destinations] = part[sources]

    def _copy_run(self, source: Array, target: Array) -> None:
        target[:] = source

    def _convert(
        self,
        source: KVView[Array],
        sources: NDArray[np.int64],
        target: KVView[Array],
        targets: NDArray[np.int64],
    ) -> None:
        convert(source, sources, target, targets)
