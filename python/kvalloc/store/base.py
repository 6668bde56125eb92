"""What all stores share: plans, checks, and one store per pool and rank.

A store is the tensor behind a pool's page numbers. The books say *which* frame a page lies in; the store
says where that frame's bytes are, writes K and V into them, and attends over them. A new kind of store
fills in the abstract methods of `BaseStore`, in one file.
"""

import math
import threading
import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import (
    Any,
    Final,
    Generic,
    Self,
    SupportsFloat,
    TypeVar,
)

import numpy as np
from numpy.typing import NDArray

from kvalloc._core import Batch, Plan, Pool
from kvalloc.errors import ClosedError, InUse, InvalidArgument, OutOfMemory, WrongPool
from kvalloc.layers import LayerGroup
from kvalloc.sizes import format_bytes
from kvalloc.store.geometry import ClassGeometry, Plane, class_geometry
from kvalloc.store.memory import available_bytes
from kvalloc.store.moves import DEVICE, HOST, Moves, read_copies, read_moves, runs
from kvalloc.store.protocol import KVView
from kvalloc.store.step_data import Shown, StepData
from kvalloc.store.steps import Rows, read_step
from kvalloc.store.streams import Inline, Order

__all__ = ["BaseStore"]

A = TypeVar("A")

_open: Final[weakref.WeakValueDictionary[tuple[int, int], "BaseStore[Any]"]] = weakref.WeakValueDictionary()
_opening: Final = threading.Lock()


@dataclass(frozen=True, slots=True)
class Shape:
    """What a call to `attend` was found to be."""

    tokens: int
    heads: int
    v_dim: int


class BaseStore(ABC, Generic[A]):
    """A store over some array library.

    Parameters
    ----------
    pool : Pool
        The books.
    rank, ranks : int, optional
        This store holds the KV heads ``rank * n`` to ``(rank + 1) * n - 1`` of each group, where n is the
        spec's ``kv_heads / ranks``: the spec is that of all ranks together, and so are the books' bytes. With
        a spec that is one rank's already (``KVSpec.from_hf_config(config, tp=...)``) leave them at 0 and 1.
        Frame numbers are the same on all ranks. A rank that does not keep the books makes a pool of the same
        spec and sizes, which says how large the arenas are, and leaves its books alone: it is told each step
        (`StepData`) and each plan (`Plan.from_bytes`) as bytes.
    order : Order, optional
        The streams that compute and copy. Default: those of the library.

    Attributes
    ----------
    device_bytes, host_bytes : int
        Memory of this rank's arenas; of the host tier's what is really locked, where it is.
    copies, runs : int
        Pages that plans have moved between tiers and frames, and in how many copies.
    """

    def __init__(self, pool: Pool, *, rank: int = 0, ranks: int = 1, order: Order | None = None) -> None:
        self._arena: A | None = None
        if not isinstance(pool, Pool):
            raise InvalidArgument(f"pool must be a kvalloc.Pool, not {pool!r}")
        if pool.closed:
            raise ClosedError("the pool is closed; a store needs an open one")
        if ranks < 1 or not 0 <= rank < ranks:
            raise InvalidArgument(f"rank {rank} of {ranks}: ranks count from 0 to ranks - 1")
        self.pool = pool
        self.spec = pool.spec
        self.rank = rank
        self.ranks = ranks
        self.classes = tuple(
            class_geometry(self.spec, index, pool.device_bytes, ranks)
            for index in range(len(self.spec.classes))
        )
        self.device_bytes = pool.device_bytes // ranks
        self.host_bytes = pool.host_bytes // ranks
        self.host_classes = tuple(
            class_geometry(self.spec, index, pool.host_bytes, ranks)
            for index in range(len(self.spec.classes) if pool.host_bytes else 0)
        )
        self.copies = self.runs = 0
        self._host: A | None = None
        self._order = order or Order(Inline(), Inline())
        with _opening:
            other = _open.get((id(pool), rank))
            if other is not None and not other.closed:
                raise InUse(f"the pool has a store already: {other!r}; close it first")
            arena = self._allocated()
            if self.host_bytes:
                self._host = self._allocated_host()
            self._arena = arena
            _open[id(pool), rank] = self
        self._views: dict[tuple[int, int, int], KVView[A]] = {}
        self._step: dict[int, tuple[object, Rows]] = {}  # by layer group: of which step, and what it asks

    @classmethod
    def of(cls, pool: Pool, rank: int = 0) -> Self | None:
        """Find the store that a pool has.

        Parameters
        ----------
        pool : Pool
        rank : int, optional

        Returns
        -------
        Self or None
            None if it has none of this kind.
        """
        store = _open.get((id(pool), rank))
        return store if isinstance(store, cls) and not store.closed else None

    # -- what a library fills in -----------------------------------------------------------------------------

    @abstractmethod
    def _allocate(self, size: int) -> A:
        """Bytes (uint8 [size]), not touched yet. Raises MemoryError."""

    @abstractmethod
    def _available(self) -> int:
        """Bytes that could be allocated."""

    @abstractmethod
    def _allocate_host(self, size: int) -> A:
        """Bytes of host memory (uint8 [size]) that the device copies from and to. Raises MemoryError."""

    @abstractmethod
    def _strided(
        self, arena: A, dtype: str, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> A:
        """A view of an arena; offset and strides in elements."""

    @abstractmethod
    def _copy_frames(self, part: A, sources: NDArray[np.int64], destinations: NDArray[np.int64]) -> None:
        """Copy rows of uint8 [frames, bytes] within it; no row is a source and a destination."""

    @abstractmethod
    def _copy_run(self, source: A, target: A) -> None:
        """Copy uint8 [pages, bytes] from one tier's memory to another's."""

    @abstractmethod
    def _convert(
        self, source: KVView[A], sources: NDArray[np.int64], target: KVView[A], targets: NDArray[np.int64]
    ) -> None:
        """Write one layer of pages of a class into pages of another, in its dtype; tiers may differ."""

    # -- memory ----------------------------------------------------------------------------------------------

    def _allocated(self) -> A:
        fits = self._available()
        if self.device_bytes <= fits:
            try:
                return self._allocate(self.device_bytes)
            except MemoryError:
                fits = min(self._available(), self.device_bytes - 1)
        each = f" on each of {self.ranks} ranks" if self.ranks > 1 else ""
        error = OutOfMemory(
            f"the pool has {format_bytes(self.device_bytes)}{each}, and "
            f"{self.device} has {format_bytes(fits)} available; make a pool with a smaller device_bytes"
        )
        error.asked, error.room = self.device_bytes, fits
        raise error

    def _allocated_host(self) -> A:
        fits = available_bytes()
        if self.host_bytes <= fits:
            try:
                return self._allocate_host(self.host_bytes)
            except MemoryError:
                fits = min(available_bytes(), self.host_bytes - 1)
        error = OutOfMemory(
            f"the pool has a host tier of {format_bytes(self.host_bytes)}, and the host has "
            f"{format_bytes(fits)} available; make a pool with a smaller host_bytes"
        )
        error.asked, error.room = self.host_bytes, fits
        raise error

    @property
    @abstractmethod
    def device(self) -> Any:
        """Where the arena lies."""

    @property
    def closed(self) -> bool:
        """Whether the store, or its pool, was closed."""
        return self._arena is None or self.pool.closed

    def _live(self) -> A:
        if self._arena is None:
            raise ClosedError("the store is closed; its tensor is gone")
        if self.pool.closed:
            raise ClosedError("the store's pool is closed")
        return self._arena

    def close(self) -> None:
        """Give the memory back. Views that are still around keep it alive; take none with you."""
        self._arena = self._host = None
        self._views.clear()
        self._step.clear()
        with _opening:
            if _open.get((id(self.pool), self.rank)) is self:
                del _open[id(self.pool), self.rank]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        rank = f" rank {self.rank} of {self.ranks}" if self.ranks > 1 else ""
        state = ", closed" if self.closed else ""
        return (
            f"<kvalloc.{type(self).__name__}{rank} {format_bytes(self.device_bytes)} on {self.device}{state}>"
        )

    # -- views -----------------------------------------------------------------------------------------------

    def place(self, layer: int) -> tuple[int, int]:
        """Group of a layer, and its number there.

        Parameters
        ----------
        layer : int
            Of the model.

        Returns
        -------
        group, layer_in_group : int

        Raises
        ------
        InvalidArgument
            There is no such layer, or it keeps no KV.
        """
        layers = self.spec.layer_map
        if not 0 <= layer < len(layers):
            raise InvalidArgument(f"layer {layer}: the spec has layers 0 to {len(layers) - 1}")
        at = layers[layer]
        if at is None:
            raise InvalidArgument(f"layer {layer} keeps no K and V (it has a fixed state, or no attention)")
        return at

    def _class(self, group: int, small: bool) -> ClassGeometry:
        if not small:
            return self.classes[group]
        cls = self.spec.small_class(group)
        if cls is None:
            raise InvalidArgument(
                f"group {self.spec.groups[group].name!r} has no small class; give the spec a small_dtype"
            )
        return self.classes[self.spec.classes.index(cls)]

    def views(self, layer: int, *, small: bool = False) -> KVView[A]:
        """K and V of a layer, as strided views of the arena; nothing is copied.

        Parameters
        ----------
        layer : int
            Of the model.
        small : bool, optional
            The pages of the small class, rather than those of the group's own.

        Returns
        -------
        KVView
            ``k`` and ``v`` [frames, page_tokens, kv_heads, dim]. Layers that share KV have the same.

        Raises
        ------
        InvalidArgument, ClosedError
        """
        group, at = self.place(layer)
        return self._view(self._class(group, small), at, DEVICE)

    def _view(self, page: ClassGeometry, layer: int, tier: int) -> KVView[A]:
        """One layer of a class in a tier, with the layer's number in its group."""
        arena = self._tier(tier)
        key = (page.index, layer, tier)
        view = self._views.get(key)
        if view is None:
            planes = (page.k, page.v, page.k_scale, page.v_scale)
            view = KVView(*(self._plane(arena, page, plane, layer) for plane in planes))
            self._views[key] = view
        return view

    def _plane(self, arena: A, page: ClassGeometry, plane: Plane | None, layer: int) -> Any:
        return None if plane is None else self._strided(arena, plane.dtype, *page.strided(plane, layer))

    def _tier(self, tier: int) -> A:
        arena = self._live()
        if tier == DEVICE:
            return arena
        if self._host is None:
            raise InvalidArgument("the pool has no host tier; give it host_bytes")
        return self._host

    def page_parts(self, cls: int, *, host: bool = False) -> list[A]:
        """Bytes of all pages of a class, in as many pieces as the layout cuts them.

        Parameters
        ----------
        cls : int
            Index in ``spec.classes``.
        host : bool, optional
            Those of the host tier.

        Returns
        -------
        list of uint8 [frames, bytes]
            One for page-major, one per layer for layer-major.
        """
        tier = HOST if host else DEVICE
        arena = self._tier(tier)
        if not 0 <= cls < len(self.classes):
            raise InvalidArgument(f"class {cls}: the spec has classes 0 to {len(self.classes) - 1}")
        page = (self.classes, self.host_classes)[tier][cls]
        return [self._strided(arena, "uint8", *page.part(part)) for part in range(page.parts)]

    def page_bytes_view(self, cls: int) -> A:
        """Bytes of all pages of a class, no copy.

        Parameters
        ----------
        cls : int
            Index in ``spec.classes``.

        Returns
        -------
        uint8 [frames, page_bytes]

        Raises
        ------
        InvalidArgument
            The layout is layer-major: a page is not one run of bytes. See `page_parts`.
        """
        parts = self.page_parts(cls)
        if self.spec.layout != "page_major":
            raise InvalidArgument("with layout='layer_major' a page is not one run of bytes; use page_parts")
        return parts[0]

    # -- pages from and to ordinary memory -------------------------------------------------------------------

    @abstractmethod
    def _to_host(self, pages: A) -> NDArray[np.uint8]:
        """The same bytes in ordinary memory."""

    @abstractmethod
    def _from_host(self, pages: NDArray[np.uint8]) -> A:
        """The same bytes where the arena lies."""

    def read_pages(self, cls: int, frames: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Copy pages to ordinary memory.

        Parameters
        ----------
        cls : int
            Index in ``spec.classes``.
        frames : int32 [n]
            Frames of the class.

        Returns
        -------
        uint8 [n, page_bytes]
            Whatever the layout, layer by layer: a page of one store is a page of another with this spec.

        Raises
        ------
        InvalidArgument
            No such class or frame.
        ClosedError
        """
        parts = self.page_parts(cls)
        at = self._checked_frames(cls, frames)
        return self._order.compute(
            lambda: np.concatenate([self._to_host(part[at]) for part in parts], axis=1)  # type: ignore[index]
        )

    def write_pages(self, cls: int, frames: NDArray[np.int32], content: NDArray[np.uint8]) -> None:
        """Copy pages from ordinary memory.

        Parameters
        ----------
        cls : int
            Index in ``spec.classes``.
        frames : int32 [n]
            Frames of the class.
        content : uint8 [n, page_bytes]
            What `read_pages` returned, of this store or another with its spec.

        Raises
        ------
        InvalidArgument
            No such class or frame, or content of another shape or dtype.
        ClosedError
        """
        parts = self.page_parts(cls)
        at, size = self._checked_frames(cls, frames), self.classes[cls].page_bytes
        if content.shape != (len(at), size) or content.dtype != np.uint8:
            raise InvalidArgument(
                f"content is {content.dtype} {content.shape}; "
                f"it must be uint8 {(len(at), size)}: frames, page bytes"
            )
        step = size // len(parts)

        def work() -> None:
            for n, part in enumerate(parts):
                piece = np.ascontiguousarray(content[:, n * step : (n + 1) * step])
                part[at] = self._from_host(piece)  # type: ignore[index]

        self._order.compute(work)

    def _checked_frames(self, cls: int, frames: NDArray[np.int32]) -> NDArray[np.int64]:
        at, count = np.asarray(frames), self.classes[cls].frames
        if at.ndim != 1 or not np.issubdtype(at.dtype, np.integer):
            raise InvalidArgument(f"frames must be int32 [n], not {at.dtype} {at.shape}")
        if len(at) and not (at.min() > 0 and at.max() < count):
            raise InvalidArgument(
                f"frames {at.min()} to {at.max()}: class {cls} has frames 1 to {count - 1} (0 is padding)"
            )
        return at.astype(np.int64)

    # -- copies ----------------------------------------------------------------------------------------------

    def copy(self, batch: Shown) -> None:
        """Copy the pages that the newest step asks for (`Step.copies`), before anything of it is written.

        Parameters
        ----------
        batch : Batch or StepData
            After its step.

        Raises
        ------
        InvalidArgument
            No step was taken, or it is of another spec or names frames that are not there. Nothing was
            copied.
        WrongPool, ClosedError
        """
        self._live()
        self._step_of(batch)
        copies = batch.last.copies
        for group, sources, destinations in read_copies(copies, self.classes[: len(self.spec.groups)]):
            for part in self.page_parts(group):
                self._order.compute(partial(self._copy_frames, part, sources, destinations))

    def execute(self, plan: Any) -> None:
        """Carry out the moves of a plan. Commit it afterwards; it can be aborted if this raises.

        Parameters
        ----------
        plan : Plan
            Anything with ``moves``, int64 [n, 6]: tier (0 device, 1 host), class and frame of the source,
            then of the destination. Of a `Plan` only those that were not committed yet.

        Raises
        ------
        InvalidArgument
            A move names what is not there, two moves meet, or the plan was read from bytes and is of another
            spec. Nothing was copied.
        PlanError
            The plan has ended, or was a dry run: its places may be others' by now. Nothing was copied.
        WrongPool, ClosedError

        Notes
        -----
        Between tiers, adjacent frames are copied in one go. A move to another class of the same layer group
        is quantised or dequantised, layer by layer. On a device copies have a stream of their own: they wait
        for what this store computed before, on the stream that calls, and what it computes afterwards waits
        for them. So the frames of the sources can be given away as soon as this returns.
        """
        self._live()
        if not isinstance(plan, Plan) and not hasattr(plan, "moves"):
            raise InvalidArgument(f"plan must be a kvalloc.Plan, or have moves, not {plan!r}")
        moves = plan.to_copy(self.pool) if isinstance(plan, Plan) else plan.moves
        todo = read_moves(moves, (self.classes, self.host_classes))
        if todo:
            self._order.copy(lambda: self._move(todo))

    def _move(self, todo: list[Moves]) -> None:
        tiers = (self.classes, self.host_classes)
        for moves in todo:
            self.copies += len(moves.sources)
            (tier, to_tier), (cls, to_cls) = moves.tiers, moves.classes
            if HOST in moves.tiers and (tier == to_tier or cls != to_cls):
                self._order.finish_copies()
            if cls != to_cls:
                source, target = tiers[tier][cls], tiers[to_tier][to_cls]
                for layer in range(source.group.layers):
                    views = self._view(source, layer, tier), self._view(target, layer, to_tier)
                    self._convert(views[0], moves.sources, views[1], moves.destinations)
                self.runs += 1
                continue
            sources = self.page_parts(cls, host=tier == HOST)
            if tier == to_tier:
                for part in sources:
                    self._copy_frames(part, moves.sources, moves.destinations)
                self.runs += 1
                continue
            targets = self.page_parts(cls, host=to_tier == HOST)
            for at, to, pages in runs(moves.sources, moves.destinations):
                for part, target_part in zip(sources, targets, strict=True):
                    self._copy_run(part[at : at + pages], target_part[to : to + pages])  # type: ignore[index]
                self.runs += 1

    # -- checks ----------------------------------------------------------------------------------------------

    def _step_of(self, batch: Shown) -> object:
        """What tells the batch's newest step from others, if the step is one for this store."""
        if isinstance(batch, StepData):
            if batch.spec_digest != self.spec.digest or len(batch.block_tables) != len(self.spec.groups):
                raise InvalidArgument(
                    f"the step is of another spec than the store's {self.spec!r}: make the pools of all "
                    "ranks with the same one"
                )
            return batch
        if not isinstance(batch, Batch):
            raise InvalidArgument(f"batch must be a kvalloc.Batch, or a StepData, not {batch!r}")
        if batch.pool is not self.pool:
            raise WrongPool("the batch belongs to another pool than the store")
        if not (step := batch.step_id):
            raise InvalidArgument("the batch has taken no step yet; call batch.step() first")
        return step

    def _rows(self, batch: Shown, group: int) -> Rows:
        """What the batch's newest step asks of a group; worked out once a step."""
        step = self._step_of(batch)
        known = self._step.get(group)
        if known is not None and known[0] == step:
            return known[1]
        cls = self.spec.small_class(group)
        small = None if cls is None else self.classes[self.spec.classes.index(cls)]
        rows = read_step(batch, group, self.classes[group], small, self.spec.page_tokens)
        self._step[group] = (step, rows)
        return rows

    def _check_kv(self, group: LayerGroup, k: Any, v: Any, num_tokens: int) -> None:
        for name, array, dim in (("k", k, group.k_dim), ("v", v, group.v_dim)):
            if name == "v" and not dim:
                if array is not None:
                    raise InvalidArgument("a latent has no V of its own: pass v=None, and v_dim")
                continue
            self._check_array(name, array, (num_tokens, group.kv_heads, dim))

    def _check_array(self, name: str, array: Any, shape: tuple[int, ...]) -> None:
        self._check_kind(name, array)
        if tuple(array.shape) != shape:
            meaning = ("tokens of the step", "KV heads of this rank", "values of a head")
            told = ", ".join(f"{n} {word}" for n, word in zip(shape, meaning, strict=True))
            raise InvalidArgument(f"{name} has shape {tuple(array.shape)}; it must be {shape}: {told}")

    @abstractmethod
    def _check_kind(self, name: str, array: Any) -> None:
        """Refuse what is not a floating-point array on the store's device."""

    def _check_q(self, group: LayerGroup, q: Any, num_tokens: int, v_dim: int | None) -> Shape:
        self._check_kind("q", q)
        shape = tuple(q.shape)
        if (
            len(shape) != 3
            or shape[0] != num_tokens
            or shape[2] != group.k_dim
            or shape[1] % group.kv_heads
            or not shape[1]
        ):
            raise InvalidArgument(
                f"q has shape {shape}; it must be ({num_tokens}, heads, {group.k_dim}): tokens of the "
                f"step, heads of this rank (a multiple of its {group.kv_heads} KV heads), values of a head"
            )
        own = group.v_dim or group.k_dim
        if v_dim is not None and ((group.v_dim and v_dim != own) or not 0 < v_dim <= own):
            raise InvalidArgument(f"v_dim is {v_dim}; group {group.name!r} has V of {own} values")
        if v_dim is None and not group.v_dim:
            raise InvalidArgument(
                f"group {group.name!r} is a latent: say with v_dim how many of its values are V"
            )
        return Shape(num_tokens, shape[1], v_dim or own)

    def _check_sinks(self, sinks: Any, heads: int) -> None:
        if sinks is None:
            return
        self._check_kind("sinks", sinks)
        if tuple(sinks.shape) != (heads,):
            raise InvalidArgument(
                f"sinks has shape {tuple(sinks.shape)}; it must be ({heads},): one per head of this rank"
            )

    @staticmethod
    def _scale(scale: SupportsFloat | None, group: LayerGroup) -> float:
        if scale is None:
            return 1.0 / math.sqrt(group.k_dim)
        value = float(scale)
        if not math.isfinite(value):
            raise InvalidArgument(f"scale is {scale!r}; it must be a finite number")
        return value

    @staticmethod
    def _soft_cap(soft_cap: SupportsFloat | None) -> float | None:
        if soft_cap is None:
            return None
        value = float(soft_cap)
        if not (math.isfinite(value) and value > 0):
            raise InvalidArgument(f"soft_cap is {soft_cap!r}; it must be above 0, or None")
        return value
