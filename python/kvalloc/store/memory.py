"""How much memory a process may still take on this host."""

from pathlib import Path

__all__ = ["available_bytes"]


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
