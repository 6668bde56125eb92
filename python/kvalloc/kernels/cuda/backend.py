"""What runs the CUDA C sources: cupy, compiling them through NVRTC; in tests, a C++ compiler and a shim."""

import importlib
import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from kvalloc.errors import InvalidArgument

__all__ = [
    "Array",
    "Backend",
    "CupyBackend",
    "Layout",
    "aligned",
    "default_backend",
    "filled",
    "look",
    "rows",
    "source",
    "strides",
]

# Arrays are numpy's or cupy's, by backend; what both share is what is used of them.
Array: TypeAlias = Any
Launch: TypeAlias = Callable[[tuple[int, int, int], Sequence[np.generic]], None]


class Backend(Protocol):
    """A device that runs the kernels."""

    processors: int

    def address(self, array: Array) -> int:
        """Where the first element of an array lies."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Make an array without setting its elements."""

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Make an array of zeros."""

    def to_host(self, array: Array) -> Any:
        """Copy an array to a numpy array, waiting for the device."""

    def kernel(self, file: str, name: str, options: tuple[str, ...], threads: int) -> Launch:
        """Compile a source file and return what launches one of its kernels with a grid and arguments."""


def source(file: str) -> str:
    """Return a kernel source with the number formats in front: one text that includes nothing.

    Parameters
    ----------
    file : str
        ``"attention.cu"``, ``"write.cu"`` or ``"copy.cu"``.
    """
    folder = files(__name__.rpartition(".")[0])
    parts = [f'#line 1 "{name}"\n{(folder / name).read_text()}' for name in ("numbers.cuh", file)]
    return "\n".join(parts)


class CupyBackend:
    """The current CUDA device, by cupy, on cupy's current stream. Of the CUDA toolkit it needs NVRTC only."""

    def __init__(self) -> None:
        self._cupy = importlib.import_module("cupy")
        self.processors = int(self._cupy.cuda.Device().attributes["MultiProcessorCount"])

    def address(self, array: Array) -> int:
        """Where the first element of an array lies on the device."""
        if not isinstance(array, self._cupy.ndarray):
            raise InvalidArgument(f"the CUDA kernels take cupy arrays; got a {type(array).__name__}")
        return int(array.data.ptr)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Make an array without setting its elements."""
        return self._cupy.empty(shape, dtype)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Make an array of zeros."""
        return self._cupy.zeros(shape, dtype)

    def to_host(self, array: Array) -> Any:
        """Copy an array to a numpy array, waiting for the device."""
        return self._cupy.asnumpy(array)

    def kernel(self, file: str, name: str, options: tuple[str, ...], threads: int) -> Launch:
        """Compile a source file for the device, once; cupy keeps the binary on disk as well."""
        function = _cupy_kernel(file, name, options)

        def launch(grid: tuple[int, int, int], args: Sequence[np.generic]) -> None:
            function(grid, (threads,), tuple(args))

        return launch


@cache
def _cupy_module(file: str, options: tuple[str, ...]) -> Any:
    return importlib.import_module("cupy").RawModule(code=source(file), options=("--std=c++17", *options))


@cache
def _cupy_kernel(file: str, name: str, options: tuple[str, ...]) -> Any:
    return _cupy_module(file, options).get_function(name)


@cache
def _cupy_backend(device: int) -> CupyBackend:
    return CupyBackend()


def default_backend() -> Backend:
    """Return cupy's current device.

    Raises
    ------
    ImportError
        If cupy is not installed: ``pip install kvalloc[cupy]``.
    """
    cupy = importlib.import_module("cupy")
    return _cupy_backend(int(cupy.cuda.runtime.getDevice()))


class Layout(NamedTuple):
    """What checks and launches depend on of an array: all but where it lies. Plans are kept by it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any
    phase: int  # its address modulo 16

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def look(backend: Backend, *arrays: Array | None) -> tuple[list[Layout | None], list[np.uint64]]:
    """Return the layouts and the addresses of arrays; of None, None and null."""
    layouts: list[Layout | None] = []
    addresses = []
    for array in arrays:
        if array is None:
            layouts.append(None)
            addresses.append(np.uint64(0))
            continue
        address = backend.address(array)
        layouts.append(Layout(array.shape, array.strides, array.dtype, address % 16))
        addresses.append(np.uint64(address))
    return layouts, addresses


def strides(array: Layout | None, axes: int) -> tuple[np.int64, ...]:
    """Return the strides of an array's first axes in elements, as a kernel's arguments."""
    if array is None:
        return (np.int64(0),) * axes
    return tuple(np.int64(s // array.dtype.itemsize) for s in array.strides[:axes])


def rows(*arrays: Layout | None) -> tuple[np.generic | None, ...]:
    """Return arrays [frames, page_tokens, kv_heads, ...] as the kernels' ROWS_ARGS; None for the address."""
    return tuple(x for array in arrays for x in (None, *strides(array, 3)))


def filled(template: Sequence[np.generic | None], addresses: Iterable[np.uint64]) -> list[np.generic]:
    """Return a kernel's arguments with the addresses in the places that are None, in order."""
    following = iter(addresses)
    return [next(following) if x is None else x for x in template]


def aligned(*arrays: Layout | None) -> int:
    """Return 1 if pieces of eight values can be loaded as vectors from all of the arrays, else 0."""
    for array in arrays:
        if array is None:
            continue
        unit = min(16, 8 * array.dtype.itemsize)
        if array.shape[-1] % 8 or array.phase % unit or any(s % unit for s in array.strides[:-1]):
            return 0
    return 1
