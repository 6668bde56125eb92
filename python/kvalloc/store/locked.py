"""Host memory that a CUDA device copies from and to by itself: locked in pieces, as much as was asked for."""

from collections.abc import Callable
from typing import Any, Final

__all__ = ["lock", "unlock"]

# Bytes of host memory locked in one call.
_CHUNK: Final = 1 << 30


def lock(
    register: Callable[[int, int, int], Any],
    unregister: Callable[[int], Any],
    address: int,
    size: int,
    chunk: int = _CHUNK,
) -> list[tuple[int, int]]:
    """Lock host memory.

    Parameters
    ----------
    register, unregister : callable
        ``cudaHostRegister`` (0, or a number that says what is wrong) and ``cudaHostUnregister``.
    address, size : int
        The memory.
    chunk : int, optional
        The most bytes of one piece.

    Returns
    -------
    list of (int, int)
        Address and length of each piece.

    Raises
    ------
    MemoryError
        The system locks no more. Nothing stays locked.
    """
    done: list[tuple[int, int]] = []
    for at in range(0, size, chunk):
        piece = (address + at, min(chunk, size - at))
        failure = int(register(*piece, 0))
        if failure:
            unlock(unregister, done)
            raise MemoryError(f"cudaHostRegister failed with error {failure} after {at} of {size} bytes")
        done.append(piece)
    return done


def unlock(unregister: Callable[[int], Any], pieces: list[tuple[int, int]]) -> None:
    """Undo `lock`."""
    for address, _ in pieces:
        unregister(address)
