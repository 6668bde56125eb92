"""Multi-tenant memory manager for the KV cache of LLM serving engines."""

from kvalloc import models
from kvalloc._core import __version__
from kvalloc.errors import InvalidArgument, KvallocError, SpecError
from kvalloc.layers import ArenaLayout, LayerGroup, PageClass
from kvalloc.sizes import format_bytes, parse_bytes
from kvalloc.spec import KVSpec

__all__ = [
    "ArenaLayout",
    "InvalidArgument",
    "KVSpec",
    "KvallocError",
    "LayerGroup",
    "PageClass",
    "SpecError",
    "__version__",
    "format_bytes",
    "models",
    "parse_bytes",
]
