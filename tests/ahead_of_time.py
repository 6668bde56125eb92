"""Compile the launches of kernels for cards that are not here, and read what the compiler made of them.

`launches` runs a Python entry point on small CPU tensors with a given card in place of a real one, and
catches what it would have launched: the same arguments, alignments and constants that a card would get.
"""

import re
import subprocess
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvalloc.kernels.device import Card

CARDS = {80: Card(80, 108, 163 << 10), 90: Card(90, 132, 227 << 10), 100: Card(100, 148, 227 << 10)}
POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
OPTIONS = ("num_warps", "num_stages")


@dataclass
class Compiled:
    """What was made of one launch."""

    kernel: str
    registers: int
    spills: int
    shared: int
    wide_copies: int  # 16-byte asynchronous copies from global to shared memory
    narrow_copies: int
    wide_loads: int
    tensor_cores: int
    ptx: str


class _Recorder:
    def __init__(self, kernel, caught):
        self.kernel, self.caught = kernel, caught

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.caught.append((self.kernel, grid, args, kwargs))


@contextmanager
def launches(module, arch, monkeypatch):
    """Catch what a module's entry points launch on a card of this architecture."""
    caught = []
    with monkeypatch.context() as patch:
        patch.setattr(module, "card_of", lambda _: CARDS[arch])
        for name, value in list(vars(module).items()):
            if isinstance(value, triton.runtime.JITFunction):
                patch.setattr(module, name, _Recorder(value, caught))
        yield caught


def compile_launch(launch, arch):
    """Compile one caught launch, specialised on its arguments as Triton does."""
    kernel, _, args, kwargs = launch
    options = {name: kwargs[name] for name in OPTIONS if name in kwargs}
    given = dict(zip(kernel.arg_names, args, strict=False))
    given |= {name: value for name, value in kwargs.items() if name not in OPTIONS}
    signature, constants, attrs = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = given[parameter.name]
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
            if value.data_ptr() % 16 == 0:
                attrs[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                attrs[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32"
    source = ASTSource(kernel, signature, constants, attrs)
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    ptx = made.asm["ptx"]
    registers, spills = _resources(made.asm["cubin"])
    return Compiled(
        kernel=kernel.__name__,
        registers=registers,
        spills=spills,
        shared=made.metadata.shared,
        wide_copies=len(re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*0x10, ", ptx)),
        narrow_copies=len(re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*0x[48], ", ptx)),
        wide_loads=len(re.findall(r"ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.b64", ptx)),
        tensor_cores=len(re.findall(r"mma\.sync|wgmma\.mma_async|tcgen05\.mma", ptx)),
        ptx=ptx,
    )


def _resources(cubin):
    """Registers and bytes of local memory (spills) a thread, from the compiled code itself."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    return int(found[1]), int(found[2]) + int(found[3])
