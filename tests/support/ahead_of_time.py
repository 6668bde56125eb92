"""Compile the launches of kernels for cards that are not here, and read what the compiler made of them.

`compiled` runs a Python entry point on small CPU tensors with a given card in place of a real one, and
catches what it would have launched: the same arguments, alignments and constants that a card would get.
"""

import re
import subprocess
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvalloc.kernels import copy, decode, quantise, write
from kvalloc.kernels.device import Card
from triton_cases import page_major

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
    wide_stores: int
    flushes: int  # sums and products that take numbers below 2**-126 for zero


class _Recorder:
    def __init__(self, kernel, caught):
        self.kernel, self.caught = kernel, caught

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.caught.append((self.kernel, grid, args, kwargs))


@contextmanager
def _on(module, arch, caught):
    """Let a module's entry points launch into a list, as on a card of this architecture."""
    kernels = {n: k for n, k in vars(module).items() if isinstance(k, triton.runtime.JITFunction)}
    recorders = {name: _Recorder(kernel, caught) for name, kernel in kernels.items()}
    with mock.patch.multiple(module, card_of=lambda _: CARDS[arch], **recorders):
        yield


def _compile(launch, arch):
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
        wide_stores=len(re.findall(r"st\.global\S*\.v4\.b32|st\.global\S*\.v2\.b64", ptx)),
        flushes=len(re.findall(r"\b(?:mul|add|fma)\S*\.ftz", ptx)),
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


# -- what is launched ----------------------------------------------------------------------------------------


def _decode(q, kv, heads, kv_heads, k_dim, v_dim, *, latent=None, small=None, sinks=False, **options):
    """A decode step of two requests, whose table shows 1,024 tokens each."""
    shape = (4, 16, kv_heads, k_dim, 0 if latent else v_dim)
    pages, _ = page_major(kv, *shape)
    decode.paged_decode(
        torch.zeros(2, heads, k_dim, dtype=q),
        pages.k,
        pages.v,
        torch.zeros(2, 64, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
        scale=k_dim**-0.5,
        k_scale=pages.k_scale,
        v_scale=pages.v_scale,
        v_dim=latent,
        small=page_major(small, *shape)[0] if small else None,
        sinks=torch.zeros(heads) if sinks else None,
        **options,
    )


def _write(new, stored, kv_heads, k_dim, v_dim):
    pages, _ = page_major(stored, 4, 16, kv_heads, k_dim, v_dim)
    k, v = (torch.zeros(2, kv_heads, dim, dtype=new) for dim in (k_dim, v_dim))
    slots = torch.zeros(2, dtype=torch.int64)
    write.write_kv(k, v if v_dim else None, pages.k, pages.v, slots, pages.k_scale, pages.v_scale)


def _convert(source, target):
    shape = (4, 16, 8, 128, 128)
    quantise.convert_pages(page_major(source, *shape)[0], [1, 2], page_major(target, *shape)[0], [1, 2])


F32, F16, BF16, FP8, INT8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8
LAUNCHES = {
    "decode bf16, 32/8 x 128": (decode, lambda: _decode(BF16, BF16, 32, 8, 128, 128)),
    "decode bf16, 32/8 x 128, not split": (
        decode,
        lambda: _decode(BF16, BF16, 32, 8, 128, 128, num_splits=1),
    ),
    "decode fp8, 32/8 x 128": (decode, lambda: _decode(BF16, FP8, 32, 8, 128, 128)),
    "decode int8, 32/8 x 128": (decode, lambda: _decode(F16, INT8, 32, 8, 128, 128)),
    "decode bf16 + int8, 32/8 x 128": (decode, lambda: _decode(BF16, BF16, 32, 8, 128, 128, small=INT8)),
    "decode bf16, 64/8 x 64, window, sinks": (
        decode,
        lambda: _decode(BF16, BF16, 64, 8, 64, 64, window=128, sinks=True, num_splits=1),
    ),
    "decode bf16, 16/8 x 256, window, cap": (
        decode,
        lambda: _decode(BF16, BF16, 16, 8, 256, 256, window=4096, soft_cap=50.0),
    ),
    "decode bf16, 64/4 x 192 and 128": (decode, lambda: _decode(BF16, BF16, 64, 4, 192, 128)),
    "decode fp32, 9/3 x 64": (decode, lambda: _decode(F32, F32, 9, 3, 64, 64)),
    "decode bf16 latent, 128 x 512 + 64": (decode, lambda: _decode(BF16, BF16, 128, 1, 576, 512, latent=512)),
    "decode fp8 latent, 16 x 512 + 64": (decode, lambda: _decode(BF16, FP8, 16, 1, 576, 512, latent=512)),
    "write bf16, 8 x 128": (write, lambda: _write(BF16, BF16, 8, 128, 128)),
    "write fp8, 8 x 128": (write, lambda: _write(BF16, FP8, 8, 128, 128)),
    "write int8, 8 x 128": (write, lambda: _write(F16, INT8, 8, 128, 128)),
    "write bf16 latent, 576": (write, lambda: _write(BF16, BF16, 1, 576, 0)),
    "quantise bf16 to fp8": (quantise, lambda: _convert(BF16, FP8)),
    "quantise fp16 to int8": (quantise, lambda: _convert(F16, INT8)),
    "dequantise fp8 to bf16": (quantise, lambda: _convert(FP8, BF16)),
    "dequantise int8 to fp16": (quantise, lambda: _convert(INT8, F16)),
    "copy": (copy, lambda: copy.copy_pages(torch.zeros(4, 4096, dtype=torch.uint8), [1], [2])),
    "gather": (copy, lambda: copy.gather_pages(torch.zeros(4, 4096, dtype=torch.uint8), [1, 3])),
}


def compiled(name, arch):
    """Compile all kernels that one entry of `LAUNCHES` launches; each once."""
    module, call = LAUNCHES[name]
    caught = []
    with _on(module, arch, caught):
        call()
    made = [_compile(launch, arch) for launch in caught]
    return [one for index, one in enumerate(made) if one not in made[:index]]
