"""The kernels as CUDA C, for cupy without torch or triton: compiled by NVRTC, once for each geometry.

The sources (``numbers.cuh`` and the ``.cu`` files) include no header, so the tests compile the same text as
C++ and run the numerics without a GPU. Importing this package imports no cupy.
"""

from kvalloc.kernels.cuda.attention import paged_attention
from kvalloc.kernels.cuda.pages import (
    copy_pages,
    dequantise_pages,
    gather_pages,
    quantise_pages,
    scatter_pages,
    write_kv,
)

__all__ = [
    "copy_pages",
    "dequantise_pages",
    "gather_pages",
    "paged_attention",
    "quantise_pages",
    "scatter_pages",
    "write_kv",
]
