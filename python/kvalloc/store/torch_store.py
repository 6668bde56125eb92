"""The store over torch tensors, on the CPU or a CUDA device."""

from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from kvalloc._core import Batch, Pool
from kvalloc.errors import InvalidArgument
from kvalloc.kernels import torch_cpu
from kvalloc.store.base import BaseStore, out_of_memory
from kvalloc.store.memory import available_bytes, host_memory
from kvalloc.store.steps import Rows

__all__ = ["TorchStore"]

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
    rank, ranks : int, optional
        For tensor parallelism, see `BaseStore`.

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
        self, pool: Pool, device: str | torch.device = "cpu", *, rank: int = 0, ranks: int = 1
    ) -> None:
        self._device = torch.device(device)
        if self._device.type != "cpu":
            raise InvalidArgument(f"device {device!s}: must be 'cpu'")
        super().__init__(pool, rank=rank, ranks=ranks)
        self._staging = torch_cpu.Staging()
        self._plans: dict[int, tuple[Rows, torch_cpu.Plan]] = {}

    @property
    def device(self) -> torch.device:
        """Where the arena lies."""
        return self._device

    # -- memory ----------------------------------------------------------------------------------------------

    def _allocate(self, size: int) -> torch.Tensor:
        with out_of_memory(RuntimeError):
            return torch.frombuffer(host_memory(size), dtype=torch.uint8)

    def _available(self) -> int:
        return available_bytes()

    def _strided(
        self, dtype: str, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> torch.Tensor:
        arena = self._live()
        wanted = DTYPES[dtype]
        whole = arena[: len(arena) // wanted.itemsize * wanted.itemsize].view(wanted)
        return torch.as_strided(whole, shape, strides, offset)

    def close(self) -> None:
        """Give the memory back. Views that are still around keep it alive; take none with you."""
        super().close()
        self._plans.clear()
        self._staging = torch_cpu.Staging()

    # -- the step --------------------------------------------------------------------------------------------

    def _plan(self, group: int, batch: Batch) -> torch_cpu.Plan:
        rows = self._rows(batch, group)
        known = self._plans.get(group)
        if known is None or known[0] is not rows:
            page = self.classes[group].group
            known = (rows, torch_cpu.plan(rows, page.kind, page.window, self.spec.page_tokens))
            self._plans[group] = known
        return known[1]

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
    def write(self, layer: int, k: torch.Tensor | None, v: torch.Tensor | None, batch: Batch) -> None:
        """Put the K and V of a step's tokens into their pages.

        Parameters
        ----------
        layer : int
            Of the model.
        k, v : torch.Tensor [tokens, kv_heads, dim]
            Of this rank's heads, in any floating-point dtype; v is None for a latent.
        batch : Batch
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
        torch_cpu.write(plan, view, k, v)

    @torch.no_grad()
    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        batch: Batch,
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
        batch : Batch
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
        if sinks is not None:
            self._check_kind("sinks", sinks)
            if sinks.shape != (shape.heads,):
                raise InvalidArgument(
                    f"sinks has shape {tuple(sinks.shape)}; it must be ({shape.heads},): one per head"
                )
        factor, cap = self._scale(scale, geometry), self._soft_cap(soft_cap)
        if k is not None or v is not None:
            self._check_kv(geometry, k, v, num_tokens)
            torch_cpu.write(plan, view, k, v)
        small = self.views(layer, small=True) if self.spec.small_class(group) else None
        return torch_cpu.attend(
            plan, q, view, small, self._staging, scale=factor, v_dim=shape.v_dim, soft_cap=cap, sinks=sinks
        )

    def _to_host(self, pages: torch.Tensor) -> NDArray[np.uint8]:
        return pages.cpu().numpy()

    def _from_host(self, pages: NDArray[np.uint8]) -> torch.Tensor:
        return torch.from_numpy(pages).to(self.device)

    @torch.no_grad()
    def copy(self, copies: NDArray[np.int32]) -> None:
        """Copy pages, as a step asks before its kernels run.

        Parameters
        ----------
        copies : int32 [n, 3]
            `Step.copies`: group, source frame, destination frame.

        Raises
        ------
        InvalidArgument, ClosedError
        """
        for group, sources, destinations in list(self._checked_copies(copies)):
            source = torch.from_numpy(np.ascontiguousarray(sources))
            destination = torch.from_numpy(np.ascontiguousarray(destinations))
            for part in self.page_parts(group):
                part.index_copy_(0, destination, part.index_select(0, source))
