"""A further tier behind device and host: pages of idle sessions on disk, or wherever a connector puts them.

`Archive` decides what goes out and what may come in; a `Connector` keeps bytes under keys. `FileConnector` is
the default one.
"""

from .archive import Archive
from .base import Connector, PageKey
from .files import FileConnector, FileCounts

__all__ = ["Archive", "Connector", "FileConnector", "FileCounts", "PageKey"]
