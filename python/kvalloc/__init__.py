"""Multi-tenant memory manager for the KV cache of LLM serving engines."""

from kvalloc._core import __version__

__all__ = ["__version__"]
