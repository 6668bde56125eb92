"""``python -m kvalloc`` is ``kvalloc``."""

from kvalloc.cli import main

if __name__ == "__main__":
    main()
