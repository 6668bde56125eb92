"""A backend that compiles the CUDA C sources as C++ with a shim, and runs them on numpy arrays."""

import ctypes
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvalloc.kernels.cuda.backend import Launch, source

SHIM = Path(__file__).with_name("cuda_on_cpu.hpp")
COMPILER = shutil.which("g++")
VERSION = subprocess.check_output([COMPILER, "--version"], text=True) if COMPILER else ""
FLAGS = (
    "-std=c++17",
    "-O1",
    "-fPIC",
    "-shared",
    "-U_FORTIFY_SOURCE",
    "-Wall",
    "-Wno-unknown-pragmas",
    "-Wno-unused",
)


class CpuBackend:
    """Kernels on the CPU. `processors` decides into how many shares keys are cut; `change` edits a source."""

    def __init__(self, folder: Path, processors: int = 1, backwards: bool = False) -> None:
        self.processors = processors
        self.backwards = backwards
        self.launched: list[str] = []
        self.change: Any = lambda text: text
        self._folder = folder

    def address(self, array: np.ndarray) -> int:
        return array.__array_interface__["data"][0]

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        made = np.empty(shape, dtype)
        if made.dtype == np.float32:
            made.fill(np.nan)  # as good a garbage as any
        return made

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.zeros(shape, dtype)

    def to_host(self, array: np.ndarray) -> np.ndarray:
        return array

    def kernel(self, file: str, name: str, options: tuple[str, ...], threads: int) -> Launch:
        launch = getattr(self._library(file, options), f"launch_{name}")

        def run(grid: tuple[int, int, int], args: Sequence[np.generic]) -> None:
            self.launched.append(name)
            values = [np.array(a) for a in args]
            pointers = (ctypes.c_void_p * len(values))(*[v.ctypes.data for v in values])
            launch((ctypes.c_uint * 3)(*grid), ctypes.c_uint(threads), pointers, ctypes.c_int(self.backwards))

        return run

    def _library(self, file: str, options: tuple[str, ...]) -> ctypes.CDLL:
        text = self.change(source(file))
        kernels = re.findall(r'extern "C" __global__ void __launch_bounds__\([^)]*\)\s+(\w+)\(', text)
        text += "".join(f"\nLAUNCHER({kernel})" for kernel in kernels) + "\n"
        key = hashlib.sha256(
            "\0".join([VERSION, *FLAGS, SHIM.read_text(), text, *options]).encode()
        ).hexdigest()
        library = self._folder / f"{key[:32]}.so"
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=self._folder) as folder:  # another process may build it too
                written, made = Path(folder) / "kernels.cpp", Path(folder) / "kernels.so"
                written.write_text(text)
                command = [COMPILER, *FLAGS, "-include", str(SHIM), *options, "-o", str(made), str(written)]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                assert done.returncode == 0, done.stderr
                made.replace(library)
        return ctypes.CDLL(str(library))
