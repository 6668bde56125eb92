"""The command line: ``kvalloc replay``, ``kvalloc models``, ``kvalloc size``."""

from .app import main

__all__ = ["main"]
