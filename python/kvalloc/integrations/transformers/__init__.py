"""Models of transformers whose KV cache lies in pages. ``docs/transformers.md`` shows how.

Importing it makes ``"kvalloc_paged"`` known as an attention implementation.
"""

from kvalloc.integrations.transformers.attention import PAGED, paged_attention
from kvalloc.integrations.transformers.cache import KvallocCache

__all__ = ["PAGED", "KvallocCache", "paged_attention"]
