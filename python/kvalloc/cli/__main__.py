"""``python -m kvalloc.cli`` is ``kvalloc``."""

from . import main

main()
