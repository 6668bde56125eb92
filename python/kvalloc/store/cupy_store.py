"""The store over cupy, on a CUDA device: works without torch, and takes its tensors by DLPack."""

import importlib
import weakref
from collections.abc import Callable
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvalloc._core import Pool
from kvalloc.errors import InvalidArgument
from kvalloc.kernels import cuda
from kvalloc.kernels.cuda.backend import Backend, default_backend
from kvalloc.store.base import BaseStore
from kvalloc.store.locked import lock, unlock
from kvalloc.store.memory import host_memory, out_of_memory
from kvalloc.store.numpy_store import DTYPES, convert
from kvalloc.store.protocol import KVView
from kvalloc.store.step_data import Shown
from kvalloc.store.steps import Rows
from kvalloc.store.streams import Order

__all__ = ["CupyStore"]

Array: TypeAlias = Any
R = TypeVar("R")

# What queries, K and V may be: bfloat16 as its bits, since cupy has no such dtype.
_GIVEN: Final = ("float32", "float16", "uint16")


class CupyStore(BaseStore[Array]):
    """The array behind a pool's pages, in cupy, on the current CUDA device.

    Parameters
    ----------
    pool : Pool
        The books. One store per pool and rank.
    rank, ranks : int, optional
        For tensor parallelism, see `BaseStore`.
    order : Order, optional
        The streams that compute and copy. Default: cupy's current one, and one of the store's own.

    Raises
    ------
    ImportError
        cupy is not installed: ``pip install kvalloc[cupy]``.
    OutOfMemory
        The device has not so much memory (``room``: what it has).
    InUse
        The pool has a store already.
    InvalidArgument, ClosedError

    Notes
    -----
    Arrays of other libraries on this device (torch's, by DLPack) are taken without a copy; answers are cupy
    arrays, which ``torch.from_dlpack`` takes without one. `views` of bfloat16 and fp8 pages show bits, in
    uint16 and uint8.
    """

    def __init__(self, pool: Pool, *, rank: int = 0, ranks: int = 1, order: Order | None = None) -> None:
        self._xp, self._backend = self._library()
        self._locked: weakref.finalize[..., Any] | None = None
        super().__init__(pool, rank=rank, ranks=ranks, order=order or self._streams())
        self._uploaded: dict[int, tuple[Rows, dict[str, Any]]] = {}

    def _library(self) -> tuple[Any, Backend]:
        """The array library, and what runs the kernels."""
        return importlib.import_module("cupy"), default_backend()

    def _streams(self) -> Order:
        return Order(Current(self._xp), Own(self._xp))

    @property
    def device(self) -> Any:
        """Where the arena lies: a CUDA device, as cupy shows it."""
        return self._xp.cuda.Device()

    # -- memory ----------------------------------------------------------------------------------------------

    def _allocate(self, size: int) -> Array:
        with out_of_memory(self._xp.cuda.memory.OutOfMemoryError):
            return self._xp.empty(size, np.uint8)

    def _available(self) -> int:
        # What cupy's pool keeps for later is available to the store too.
        pool = self._xp.get_default_memory_pool()
        return int(self._xp.cuda.runtime.memGetInfo()[0]) + int(pool.free_bytes())

    def _allocate_host(self, size: int) -> Array:
        memory = np.frombuffer(host_memory(size), np.uint8)
        runtime = self._xp.cuda.runtime

        def register(address: int, length: int, flags: int) -> int:
            try:
                runtime.hostRegister(address, length, flags)
            except runtime.CUDARuntimeError as error:
                return int(error.status)
            return 0

        pieces = lock(register, runtime.hostUnregister, memory.ctypes.data, size)
        self._locked = weakref.finalize(self, unlock, runtime.hostUnregister, pieces)
        self.host_bytes = sum(length for _, length in pieces)
        return memory

    def _strided(
        self, arena: Array, dtype: str, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> Array:
        kind = np.dtype(DTYPES[dtype])
        start, steps = offset * kind.itemsize, tuple(step * kind.itemsize for step in strides)
        if isinstance(arena, np.ndarray):
            return np.ndarray(shape, kind, arena.data, start, steps)
        return self._xp.ndarray(shape, kind, arena.data + start, steps)

    def close(self) -> None:
        """Give the memory back. Views that are still around keep it alive; take none with you."""
        if self._locked is not None and self._locked.alive:
            self._xp.cuda.runtime.deviceSynchronize()
            self._locked()
        super().close()
        self._uploaded.clear()

    def _to_host(self, pages: Array) -> NDArray[np.uint8]:
        return np.asarray(self._backend.to_host(pages))

    def _from_host(self, pages: NDArray[np.uint8]) -> Array:
        return self._xp.asarray(pages)

    # -- the step --------------------------------------------------------------------------------------------

    def _given(self, array: Any) -> Any:
        """Another library's array as cupy's, without a copy."""
        foreign = hasattr(array, "__dlpack__") and not isinstance(array, self._xp.ndarray)
        return self._xp.from_dlpack(array) if foreign else array

    def _check_kind(self, name: str, array: Any) -> None:
        if not isinstance(array, self._xp.ndarray):
            raise InvalidArgument(f"{name} must be an array on the device, not {type(array).__name__}")
        if str(array.dtype) not in _GIVEN:
            raise InvalidArgument(
                f"{name} has dtype {array.dtype}; it must be float32, float16, or uint16 for bfloat16's bits"
            )

    def _on_device(self, group: int, batch: Shown) -> dict[str, Any]:
        """What the kernels read of a step, uploaded once for all layers of a group."""
        rows = self._rows(batch, group)
        known = self._uploaded.get(group)
        if known is None or known[0] is not rows:
            slots = np.full(rows.num_tokens, -1, np.int64)
            slots[rows.tokens] = rows.frames * self.spec.page_tokens + rows.offsets
            ends = rows.first_token + rows.counts
            starts = np.concatenate([rows.first_token[:1], ends]) if len(ends) else np.zeros(1, np.int64)
            pages = int(rows.end_page.max(initial=1))
            known = (
                rows,
                {
                    "slots": self._xp.asarray(slots),
                    "table": self._xp.asarray(np.ascontiguousarray(rows.table[rows.rows, :pages])),
                    "lens": self._xp.asarray(rows.seq_lens.astype(np.int32)),
                    "starts": self._xp.asarray(starts.astype(np.int32)),
                    "most": int(rows.counts.max(initial=1)),
                },
            )
            self._uploaded[group] = known
        return known[1]

    def write(self, layer: int, k: Array | None, v: Array | None, batch: Shown) -> None:
        """Put the K and V of a step's tokens into their pages.

        Parameters
        ----------
        layer : int
            Of the model.
        k, v : array [tokens, kv_heads, dim]
            Of this rank's heads, float32, float16 or bfloat16's bits; v is None for a latent.
        batch : Batch or StepData
            After its step.

        Raises
        ------
        InvalidArgument
            Wrong shape, dtype or device. Nothing was written.
        WrongPool, ClosedError
        """
        k, v = self._given(k), self._given(v)
        view, (group, _) = self.views(layer), self.place(layer)
        step = self._on_device(group, batch)
        self._check_kv(self.classes[group].group, k, v, len(step["slots"]))
        self._order.compute(lambda: self._write(view, k, v, step))

    def _write(self, view: KVView[Array], k: Array, v: Array, step: dict[str, Any]) -> None:
        cuda.write_kv(k, v, view.k, view.v, step["slots"], view.k_scale, view.v_scale, backend=self._backend)

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
        q : array [tokens, heads, k_dim]
            Heads of one KV head side by side; float32, float16 or bfloat16's bits.
        k, v : array [tokens, kv_heads, dim] or None
            v is None for a latent. Both None: nothing is written, for a layer that shares another one's KV.
        batch : Batch or StepData
            After its step. Rows with one token and rows with many may be mixed.
        scale : float, optional
            Factor of the scores. Default: ``k_dim ** -0.5``.
        soft_cap : float, optional
            Scores become ``soft_cap * tanh(scores / soft_cap)``.
        sinks : float32 array [heads], optional
            Logits that take part in the softmax and have no value.
        v_dim : int, optional
            For a latent: how many of its values are V.

        Returns
        -------
        array [tokens, heads, v_dim]
            In q's dtype.

        Raises
        ------
        InvalidArgument
            Wrong shapes, dtypes, devices or numbers. Nothing was written.
        WrongPool, ClosedError
        """
        q, k, v, sinks = (self._given(array) for array in (q, k, v, sinks))
        view, (group, _) = self.views(layer), self.place(layer)
        geometry = self.classes[group].group
        step = self._on_device(group, batch)
        tokens = len(step["slots"])
        shape = self._check_q(geometry, q, tokens, v_dim)
        self._check_sinks(sinks, shape.heads)
        factor, cap = self._scale(scale, geometry), self._soft_cap(soft_cap)
        if k is not None or v is not None:
            self._check_kv(geometry, k, v, tokens)
        small = tuple(self.views(layer, small=True)) if self.spec.small_class(group) else None

        def work() -> Array:
            if k is not None:
                self._write(view, k, v, step)
            return cuda.paged_attention(
                q,
                view.k,
                view.v,
                step["table"],
                step["lens"],
                step["starts"],
                scale=factor,
                window=geometry.window if geometry.kind == "window" else None,
                chunk=geometry.window if geometry.kind == "chunked" else None,
                soft_cap=cap,
                sinks=sinks,
                v_dim=shape.v_dim if view.v is None else None,
                k_scale=view.k_scale,
                v_scale=view.v_scale,
                small=small,
                max_query_len=step["most"],
                backend=self._backend,
            )

        return self._order.compute(work)

    # -- copies ----------------------------------------------------------------------------------------------

    def _copy_frames(self, part: Array, sources: NDArray[np.int64], destinations: NDArray[np.int64]) -> None:
        if isinstance(part, self._xp.ndarray):
            frames = (self._xp.asarray(numbers) for numbers in (sources, destinations))
            cuda.copy_pages(part, *frames, backend=self._backend)
        else:
            part[destinations] = part[sources]

    def _copy_run(self, source: Array, target: Array) -> None:
        # Both are whole runs of bytes, on the stream that is current: that of the copies.
        if isinstance(source, self._xp.ndarray):
            source.get(out=target, blocking=False)
        else:
            target.set(source, self._xp.cuda.get_current_stream())

    def _convert(
        self,
        source: KVView[Array],
        sources: NDArray[np.int64],
        target: KVView[Array],
        targets: NDArray[np.int64],
    ) -> None:
        device = [isinstance(view.k, self._xp.ndarray) for view in (source, target)]
        if all(device):
            src, dst = self._xp.asarray(sources), self._xp.asarray(targets)
            if source.k.dtype.itemsize > target.k.dtype.itemsize:
                cuda.quantise_pages(source.k, source.v, src, tuple(target), dst, backend=self._backend)
            else:
                cuda.dequantise_pages(tuple(source), src, target.k, target.v, dst, backend=self._backend)
            return
        # Between tiers the host converts: a page is small, and this is the rarest way.
        pages = np.arange(len(sources))
        given: KVView[Any] = KVView(*(None if x is None else self._on_host(x[sources]) for x in source))
        made: KVView[Any] = KVView(
            *(None if x is None else np.empty((len(pages), *x.shape[1:]), x.dtype) for x in target)
        )
        convert(given, pages, made, pages)
        for new, ready in zip(target, made, strict=True):
            if new is not None and ready is not None:
                new[targets] = self._xp.asarray(ready) if device[1] else ready

    def _on_host(self, array: Array) -> NDArray[Any]:
        return array if isinstance(array, np.ndarray) else np.asarray(self._backend.to_host(array))


class Current:
    """The stream that is current in cupy."""

    def __init__(self, cupy: Any) -> None:
        self._cuda = cupy.cuda

    def run(self, work: Callable[[], R]) -> R:
        """Queue work."""
        return work()

    def record(self) -> Any:
        """Mark this point."""
        return self._cuda.get_current_stream().record()

    def wait(self, mark: Any) -> None:
        """Queue nothing further before a mark is reached."""
        self._cuda.get_current_stream().wait_event(mark)

    def finish(self) -> None:
        """Wait until all of it is done."""
        self._cuda.get_current_stream().synchronize()


class Own:
    """A stream beside it, for copies."""

    def __init__(self, cupy: Any) -> None:
        self._stream = cupy.cuda.Stream(non_blocking=True)

    def run(self, work: Callable[[], R]) -> R:
        """Queue work."""
        with self._stream:
            return work()

    def record(self) -> Any:
        """Mark this point."""
        return self._stream.record()

    def wait(self, mark: Any) -> None:
        """Queue nothing further before a mark is reached."""
        self._stream.wait_event(mark)

    def finish(self) -> None:
        """Wait until all of it is done."""
        self._stream.synchronize()
