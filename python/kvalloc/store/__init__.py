"""Tensors for a pool: numpy, torch, cupy. ``docs/stores.md`` explains them."""

from kvalloc.store.base import BaseStore, KVView, Store

__all__ = ["BaseStore", "KVView", "Store"]
