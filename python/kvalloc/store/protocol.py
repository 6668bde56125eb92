"""What a store is to those who use one, whatever its library."""

from typing import Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvalloc._core import Pool
from kvalloc.spec import KVSpec
from kvalloc.store.step_data import Shown

__all__ = ["KVView", "Store"]

A = TypeVar("A")


class KVView(NamedTuple, Generic[A]):
    """The tensors of one layer, as strided views of the store's arena.

    Attributes
    ----------
    k : array [frames, page_tokens, kv_heads, k_dim]
        K; of a latent (MLA) the latent.
    v : array [frames, page_tokens, kv_heads, v_dim] or None
        V; None for a latent, whose first values are V.
    k_scale, v_scale : array float16 [frames, page_tokens, kv_heads] or None
        Scales, for int8.
    """

    k: A
    v: A | None
    k_scale: A | None
    v_scale: A | None


@runtime_checkable
class Store(Protocol):
    """What every store does. Arrays are those of its library: numpy, torch, cupy."""

    pool: Pool
    spec: KVSpec
    rank: int
    ranks: int

    @property
    def closed(self) -> bool:
        """Whether the store, or its pool, was closed."""

    @property
    def device(self) -> Any:
        """Where the arena lies."""

    def views(self, layer: int, *, small: bool = False) -> KVView[Any]:
        """K and V of a layer, no copy."""

    def page_bytes_view(self, cls: int) -> Any:
        """Bytes of all pages of a class, no copy."""

    def write(self, layer: int, k: Any, v: Any, batch: Shown) -> None:
        """Put the K and V of a step's tokens into their pages."""

    def attend(
        self,
        layer: int,
        q: Any,
        k: Any,
        v: Any,
        batch: Shown,
        *,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: Any = None,
        v_dim: int | None = None,
    ) -> Any:
        """Write K and V, and attend over each row's pages."""

    def copy(self, batch: Shown) -> None:
        """Copy the pages that a step asks for: `Step.copies`."""

    def execute(self, plan: Any) -> None:
        """Carry out the moves of a plan."""

    def read_pages(self, cls: int, frames: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Copy pages to ordinary memory."""

    def write_pages(self, cls: int, frames: NDArray[np.int32], content: NDArray[np.uint8]) -> None:
        """Copy pages from ordinary memory."""

    def close(self) -> None:
        """Give the memory back."""
