"""The command line: ``kvalloc replay``, ``demo``, ``plan``, ``models`` and ``size``."""

from .app import main

__all__ = ["main"]
