"""The store over torch tensors, on the CPU or a CUDA device."""

import weakref
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, Final, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from kvalloc._core import Pool
from kvalloc.errors import InvalidArgument
from kvalloc.kernels import torch_cpu
from kvalloc.store.base import BaseStore
from kvalloc.store.locked import lock, unlock
from kvalloc.store.memory import available_bytes, host_memory, out_of_memory
from kvalloc.store.protocol import KVView
from kvalloc.store.step_data import Shown
from kvalloc.store.steps import Rows
from kvalloc.store.streams import Order

__all__ = ["TorchStore"]

R = TypeVar("R")
KERNELS: Final = ("torch", "triton")

DTYPES: Final = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int8": torch.int8,
    "uint8": torch.uint8,
}


class TorchStore(BaseStore[torch.Tensor]):
    """The tensor behind a pool's pages, in torch.

    Parameters
    ----------
    pool : Pool
        The books. One store per pool and rank.
    device : str or torch.device, optional
        Where the tensor lies.
    kernels : {"torch", "triton"}, optional
        What attends and writes. Default: Triton on CUDA where it is installed, else plain torch.
    rank, ranks : int, optional
        For tensor parallelism, see `BaseStore`.
    order : Order, optional
        The streams that compute and copy; on CUDA the caller's current one, and one of the store's own.

    Raises
    ------
    OutOfMemory
        The device has not so much memory (``room``: what it has).
    InUse
        The pool has a store already.
    InvalidArgument, ClosedError

    Examples
    --------
    >>> import torch
    >>> spec = kvalloc.KVSpec.uniform(layers=2, kv_heads=2, head_dim=64, dtype="float32")
    >>> pool = kvalloc.Pool(spec, "4MiB")
    >>> batch = pool.batch(max_sequences=4, max_tokens=256)
    >>> row, step = batch.add(pool.open(pool.tenant("acme"), range(20))), batch.step()
    >>> q, k, v = (torch.ones(20, heads, 64) for heads in (6, 2, 2))
    >>> with kvalloc.TorchStore(pool) as store:
    ...     store.attend(0, q, k, v, batch).shape
    torch.Size([20, 6, 64])
    """

    def __init__(
        self,
        pool: Pool,
        device: str | torch.device = "cpu",
        *,
        kernels: str | None = None,
        rank: int = 0,
        ranks: int = 1,
        order: Order | None = None,
    ) -> None:
        self._device = _device(device)
        self._triton = _triton(kernels, self._device)
        if order is None and self._device.type == "cuda":
            order = Order(CurrentStream(self._device), OwnStream(self._device))
        self._locked: weakref.finalize[..., Any] | None = None
        super().__init__(pool, rank=rank, ranks=ranks, order=order)
        self._staging = torch_cpu.Staging()
        self._plans: dict[int, tuple[Rows, Any]] = {}

    @property
    def device(self) -> torch.device:
        """Where the arena lies."""
        return self._device

    # -- memory ----------------------------------------------------------------------------------------------

    def _allocate(self, size: int) -> torch.Tensor:
        if self._device.type == "cpu":
            return _host_tensor(size)
        with out_of_memory(torch.OutOfMemoryError), torch.inference_mode(False):
            return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _available(self) -> int:
        if self._device.type == "cpu":
            return available_bytes()
        return int(torch.cuda.mem_get_info(self._device)[0])

    def _allocate_host(self, size: int) -> torch.Tensor:
        memory = _host_tensor(size)
        if self._device.type == "cuda":
            cudart = torch.cuda.cudart()
            pieces = lock(cudart.cudaHostRegister, cudart.cudaHostUnregister, memory.data_ptr(), size)
            self._locked = weakref.finalize(self, unlock, cudart.cudaHostUnregister, pieces)
            self.host_bytes = sum(length for _, length in pieces)
        return memory

    def _strided(
        self, arena: torch.Tensor, dtype: str, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> torch.Tensor:
        wanted = DTYPES[dtype]
        with torch.inference_mode(False):  # views are kept, and outlive the caller's mode
            whole = arena[: len(arena) // wanted.itemsize * wanted.itemsize].view(wanted)
            return torch.as_strided(whole, shape, strides, offset)

    def close(self) -> None:
        """Give the memory back. Views that are still around keep it alive; take none with you."""
        if self._locked is not None and self._locked.alive:
            torch.cuda.synchronize(self._device)
            self._locked()
        super().close()
        self._plans.clear()
        self._staging = torch_cpu.Staging()

    # -- the step --------------------------------------------------------------------------------------------

    def _plan(self, group: int, batch: Shown) -> Any:
        rows = self._rows(batch, group)
        known = self._plans.get(group)
        if known is None or known[0] is not rows:
            page, tokens = self.classes[group].group, self.spec.page_tokens
            if self._triton is not None:
                made: Any = self._triton.plan(rows, page.kind, page.window, tokens, self._device)
            else:
                made = torch_cpu.plan(rows, page.kind, page.window, tokens, self._device)
            known = (rows, made)
            self._plans[group] = known
        return known[1]

    def _write(
        self, plan: Any, view: KVView[torch.Tensor], k: torch.Tensor | None, v: torch.Tensor | None
    ) -> None:
        (self._triton or torch_cpu).write(plan, view, k, v)

    def _check_kind(self, name: str, array: Any) -> None:
        if not isinstance(array, torch.Tensor):
            raise InvalidArgument(f"{name} must be a torch tensor, not {type(array).__name__}")
        if array.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            raise InvalidArgument(
                f"{name} has dtype {array.dtype}; it must be a floating-point one of 16 bits or more"
            )
        if array.device != self._device:
            raise InvalidArgument(f"{name} lies on {array.device}, the store on {self._device}")

    @torch.no_grad()
    def write(self, layer: int, k: torch.Tensor | None, v: torch.Tensor | None, batch: Shown) -> None:
        """Put the K and V of a step's tokens into their pages.

        Parameters
        ----------
        layer : int
            Of the model.
        k, v : torch.Tensor [tokens, kv_heads, dim]
            Of this rank's heads, in any floating-point dtype; v is None for a latent.
        batch : Batch or StepData
            After its step.

        Raises
        ------
        InvalidArgument
            Wrong shape, dtype or device. Nothing was written.
        WrongPool, ClosedError
        """
        view = self.views(layer)
        group, _ = self.place(layer)
        plan = self._plan(group, batch)
        self._check_kv(self.classes[group].group, k, v, self._rows(batch, group).num_tokens)
        self._order.compute(lambda: self._write(plan, view, k, v))

    @torch.no_grad()
    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        batch: Shown,
        *,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
        v_dim: int | None = None,
    ) -> torch.Tensor:
        """Write K and V of the step's tokens, and attend over each row's pages.

        Parameters
        ----------
        layer : int
            Of the model. Its group says which tokens are seen: all, a window, a chunk.
        q : torch.Tensor [tokens, heads, k_dim]
            Heads of one KV head side by side.
        k, v : torch.Tensor [tokens, kv_heads, dim] or None
            v is None for a latent. Both None: nothing is written, for a layer that shares another one's KV.
        batch : Batch or StepData
            After its step. Rows with one token and rows with many may be mixed.
        scale : float, optional
            Factor of the scores. Default: ``k_dim ** -0.5``.
        soft_cap : float, optional
            Scores become ``soft_cap * tanh(scores / soft_cap)``.
        sinks : torch.Tensor [heads], optional
            Logits that take part in the softmax and have no value.
        v_dim : int, optional
            For a latent: how many of its values are V.

        Returns
        -------
        torch.Tensor [tokens, heads, v_dim]
            In q's dtype.

        Raises
        ------
        InvalidArgument
            Wrong shapes, dtypes, devices or numbers. Nothing was written.
        WrongPool, ClosedError
        """
        view = self.views(layer)
        group, _ = self.place(layer)
        plan = self._plan(group, batch)
        geometry = self.classes[group].group
        num_tokens = self._rows(batch, group).num_tokens
        shape = self._check_q(geometry, q, num_tokens, v_dim)
        self._check_sinks(sinks, shape.heads)
        factor, cap = self._scale(scale, geometry), self._soft_cap(soft_cap)
        if k is not None or v is not None:
            self._check_kv(geometry, k, v, num_tokens)
        small = self.views(layer, small=True) if self.spec.small_class(group) else None
        how: dict[str, Any] = {"scale": factor, "v_dim": shape.v_dim, "soft_cap": cap, "sinks": sinks}
        if self._triton is not None:
            how |= {"kind": geometry.kind, "window": geometry.window}

        def work() -> torch.Tensor:
            if k is not None:
                self._write(plan, view, k, v)
            run: Callable[..., torch.Tensor] = (self._triton or torch_cpu).attend
            return run(plan, q, view, small, self._staging, **how)

        return self._order.compute(work)

    def _to_host(self, pages: torch.Tensor) -> NDArray[np.uint8]:
        return pages.cpu().numpy()

    def _from_host(self, pages: NDArray[np.uint8]) -> torch.Tensor:
        return torch.from_numpy(pages).to(self.device)

    # -- copies ----------------------------------------------------------------------------------------------

    def _copy_frames(
        self, part: torch.Tensor, sources: NDArray[np.int64], destinations: NDArray[np.int64]
    ) -> None:
        part.index_copy_(
            0, self._frames(destinations, part), part.index_select(0, self._frames(sources, part))
        )

    def _copy_run(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def _convert(
        self,
        source: KVView[torch.Tensor],
        sources: NDArray[np.int64],
        target: KVView[torch.Tensor],
        targets: NDArray[np.int64],
    ) -> None:
        torch_cpu.convert(source, self._frames(sources, source.k), target, self._frames(targets, target.k))

    @staticmethod
    def _frames(frames: NDArray[np.int64], beside: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(frames)).to(beside.device)


# -- CUDA ----------------------------------------------------------------------------------------------------


class CurrentStream:
    """The stream that the caller computes on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def run(self, work: Callable[[], R]) -> R:
        """Queue work."""
        return work()

    def record(self) -> Any:
        """Mark this point."""
        return torch.cuda.current_stream(self._device).record_event()

    def wait(self, mark: Any) -> None:
        """Queue nothing further before a mark is reached."""
        torch.cuda.current_stream(self._device).wait_event(mark)

    def finish(self) -> None:
        """Wait until all of it is done."""
        torch.cuda.current_stream(self._device).synchronize()


class OwnStream:
    """A stream beside it, for copies."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def run(self, work: Callable[[], R]) -> R:
        """Queue work."""
        with torch.cuda.stream(self._stream):
            return work()

    def record(self) -> Any:
        """Mark this point."""
        return self._stream.record_event()

    def wait(self, mark: Any) -> None:
        """Queue nothing further before a mark is reached."""
        self._stream.wait_event(mark)

    def finish(self) -> None:
        """Wait until all of it is done."""
        self._stream.synchronize()


def _host_tensor(size: int) -> torch.Tensor:
    with torch.inference_mode(False):  # it outlives the caller's mode
        return torch.frombuffer(host_memory(size), dtype=torch.uint8)


def _device(device: str | torch.device) -> torch.device:
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidArgument(f"device {device!r}: {error}") from None
    if found.type not in ("cpu", "cuda"):
        raise InvalidArgument(f"device {device!s}: must be 'cpu' or a CUDA device")
    if found.type == "cuda":
        if not torch.cuda.is_available():
            raise InvalidArgument(f"device {device!s}: torch sees no CUDA device; use device='cpu'")
        if str(found) == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
    return found


def _triton(kernels: str | None, device: torch.device) -> ModuleType | None:
    """The module with the Triton kernels, if they are to be used."""
    if kernels is not None and kernels not in KERNELS:
        raise InvalidArgument(f"kernels is {kernels!r}; it must be 'torch' or 'triton'")
    if kernels == "torch" or (kernels is None and device.type == "cpu"):
        return None
    try:
        return import_module("kvalloc.kernels.torch_cuda")
    except ModuleNotFoundError as error:
        if kernels is None and error.name == "triton":
            return None
        raise
