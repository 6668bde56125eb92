"""Memory: how much this host has, how a store takes it, and how a library says that it is short."""

import contextlib
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["available_bytes", "host_memory", "out_of_memory"]


def available_bytes() -> int:
    """Bytes that can be taken without swapping, within the limit of the process's control group.

    Returns
    -------
    int
        2**63 - 1 where nobody says.
    """
    free = [2**63 - 1]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free.extend(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            stat = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
            used = int(Path("/sys/fs/cgroup/memory.current").read_text())
            # Pages of files are given back when they are needed.
            free.append(int(limit) - used + int(stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        pass
    return max(min(free), 0)


def host_memory(size: int) -> mmap.mmap:
    """Take memory in one piece, of which nothing is used before it is touched; it reads as zeros.

    Parameters
    ----------
    size : int
        Bytes.

    Returns
    -------
    mmap.mmap
        Given back when the last view of it is gone. On Linux in huge pages where the system has them to give:
        a layer's bytes are spread over the whole arena, which is hard on the translation of addresses.

    Raises
    ------
    MemoryError
    """
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(str(error)) from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


@contextmanager
def out_of_memory(*kinds: type[BaseException]) -> Iterator[None]:
    """Turn a library's way of saying that memory is short into MemoryError."""
    try:
        yield
    except kinds as error:
        raise MemoryError(str(error)) from None
