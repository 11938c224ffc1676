"""The host's memory."""

from pathlib import Path

import psutil


def available() -> int:
    """Bytes that a new process can have: free memory, within the control group's limit."""
    there = psutil.virtual_memory().available
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text().strip()
        return min(there, int(limit) - int(used))
    except (OSError, ValueError):  # "max", or no such group
        return there
