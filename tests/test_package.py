"""The package as a user finds it right after installing."""

import importlib.metadata
import subprocess
import sys

import kvalloc


def test_version_is_the_distribution_s():
    assert kvalloc.__version__ == importlib.metadata.version("kvalloc")


def test_all_names_exist():
    missing = []
    for name in kvalloc.__all__:
        try:
            getattr(kvalloc, name)
        except ModuleNotFoundError as error:  # a store whose library is an extra that is not installed
            assert (name, error.name) in {("TorchStore", "torch"), ("CupyStore", "cupy")}
        except AttributeError:
            missing.append(name)
    assert missing == []


def test_import_is_light():
    # The core's users import no plotting, no terminal library, no tensors unless they ask for them.
    code = "import sys, kvalloc; print(sorted({m.partition('.')[0] for m in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"matplotlib", "rich", "typer", "torch", "transformers"} & set(eval(loaded))
