"""The package as a user finds it right after installing."""

import importlib.metadata
import subprocess
import sys
from importlib.util import find_spec

import kvalloc


def test_version_is_the_distribution_s():
    assert kvalloc.__version__ == importlib.metadata.version("kvalloc")


def test_all_names_exist():
    # A store whose library is an extra that is not installed says so when it is asked for.
    extras = {"TorchStore": "torch", "CupyStore": "cupy"}
    there = [name for name in kvalloc.__all__ if name not in extras or find_spec(extras[name])]
    assert [name for name in there if not hasattr(kvalloc, name)] == []


def test_import_is_light():
    # The core's users import no plotting, no terminal library, no tensors unless they ask for them.
    code = "import sys, kvalloc; print(sorted({m.partition('.')[0] for m in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"matplotlib", "rich", "typer", "torch", "transformers"} & set(eval(loaded))
