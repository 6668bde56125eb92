"""The CUDA C sources through NVRTC for three generations of cards: registers, spills, wide loads."""

import ctypes
import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

from kvalloc.kernels.cuda.attention import attention_options
from kvalloc.kernels.cuda.backend import source
from kvalloc.kernels.cuda.pages import copy_options, write_options

F32, F16, BF16, I8, F8 = range(5)
ARCHITECTURES = ("80", "90", "100")


def nvrtc_path() -> Path | None:
    """NVRTC of an installed wheel, found without importing anything."""
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or []) if spec else []
    found = (f for folder in folders for f in Path(folder).glob("cu*/lib/libnvrtc.so.*"))
    return min(found, default=None)


NVRTC = nvrtc_path()
if NVRTC is None:
    pytest.skip("needs the wheel nvidia-cuda-nvrtc-cu12 or nvidia-cuda-nvrtc", allow_module_level=True)


@cache
def nvrtc() -> ctypes.CDLL:
    for builtins in NVRTC.parent.glob("libnvrtc-builtins.so.*"):  # found by name once it is loaded
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(NVRTC))


def build(file: str, options: tuple[str, ...], architecture: str) -> tuple[str, str]:
    """Compile to machine code: what the assembler says of it, and the PTX on the way there."""
    library, program, size = nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()

    def text(what: str) -> str:
        getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(library, f"nvrtcGet{what}")(program, buffer)
        return buffer.value.decode()

    code = source(file).encode()
    assert library.nvrtcCreateProgram(ctypes.byref(program), code, file.encode(), 0, None, None) == 0
    flags = [f"--gpu-architecture=sm_{architecture}", "--std=c++17", "--ptxas-options=-v", *options]
    array = (ctypes.c_char_p * len(flags))(*[f.encode() for f in flags])
    try:
        status = library.nvrtcCompileProgram(program, len(flags), array)
        log = text("ProgramLog")
        assert status == 0, log
        assert "warning" not in log, log
        return log, text("PTX")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def resources(log: str) -> dict[str, dict[str, int]]:
    """Registers, bytes of spills and of shared memory per kernel."""
    patterns = {
        "registers": r"Used (\d+) registers",
        "stores": r"(\d+) bytes spill stores",
        "loads": r"(\d+) bytes spill loads",
        "shared": r"(\d+) bytes smem",
    }
    found: dict[str, dict[str, int]] = {}
    for part in log.split("Compiling entry function ")[1:]:
        name = re.match(r"'(\w+)'", part).group(1)
        found[name] = {
            key: int(m.group(1)) if (m := re.search(p, part)) else 0 for key, p in patterns.items()
        }
    return found


def attention(q, kv, k_dim, group, v_dim=None, small=-1, shared=False, vector=1, page_tokens=16):
    return attention_options(
        q=q,
        kv=kv,
        small=small,
        k_dim=k_dim,
        v_dim=v_dim or k_dim,
        shared=shared,
        page_tokens=page_tokens,
        group=group,
        vector=vector,
    )


def write(source_kind, target, k_dim, v_dim=None, vector=1):
    return write_options(
        source=source_kind,
        target=target,
        k_dim=k_dim,
        v_dim=v_dim or k_dim,
        page_tokens=16,
        vector=vector,
        index="int",
    )


CASES = {
    "llama-8b-bf16": ("attention.cu", attention(BF16, BF16, 128, 4)),
    "qwen-fp16-group7": ("attention.cu", attention(F16, F16, 128, 7)),
    "group16-bf16": ("attention.cu", attention(BF16, BF16, 128, 16)),
    "smollm-fp32": ("attention.cu", attention(F32, F32, 64, 3)),
    "gemma-bf16-256": ("attention.cu", attention(BF16, BF16, 256, 2)),
    "int8": ("attention.cu", attention(F16, I8, 128, 4)),
    "fp8": ("attention.cu", attention(BF16, F8, 128, 8)),
    "bf16-and-fp8": ("attention.cu", attention(BF16, BF16, 128, 4, small=F8)),
    "fp16-and-int8": ("attention.cu", attention(F16, F16, 128, 4, small=I8)),
    "mla": ("attention.cu", attention(BF16, BF16, 576, 128, v_dim=512, shared=True)),
    "mla-fp8": ("attention.cu", attention(BF16, F8, 576, 16, v_dim=512, shared=True)),
    "dims-192-128": ("attention.cu", attention(BF16, BF16, 192, 8, v_dim=128)),
    "unaligned": ("attention.cu", attention(F16, F16, 20, 3, vector=0)),
    "write-bf16": ("write.cu", write(BF16, BF16, 128)),
    "write-int8": ("write.cu", write(BF16, I8, 128)),
    "write-fp8": ("write.cu", write(F32, F8, 576)),
    "dequantise-int8": ("write.cu", write(I8, F16, 128)),
    "copy": ("copy.cu", copy_options("int", "uint4")),
    "copy-bytes": ("copy.cu", copy_options("i64", "u8")),
}

# Two blocks of 128 threads fit into a processor's 65,536 registers at 255 each, four at 128.
MOST_REGISTERS = {
    "paged_decode": 255,
    "paged_prefill": 168,
    "merge_splits": 64,
    "write_kv": 64,
    "convert_pages": 64,
    "move_pages": 32,
}
# Pages of one-byte kinds are read in pieces of eight bytes.
WIDE = set(CASES) - {"int8", "fp8", "mla-fp8", "dequantise-int8", "unaligned", "copy-bytes"}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("case", CASES)
def test_compiles_without_spills(case, architecture):
    file, options = CASES[case]
    log, ptx = build(file, options, architecture)
    used = resources(log)
    assert len(used) == {"attention.cu": 3, "write.cu": 2, "copy.cu": 1}[file]
    for kernel, numbers in used.items():
        assert numbers["stores"] == numbers["loads"] == 0, kernel
        assert numbers["shared"] <= 48 * 1024, kernel
        assert numbers["registers"] <= MOST_REGISTERS[kernel], kernel
    wide = len(re.findall(r"ld\.global\S*\.v4", ptx)), len(re.findall(r"ld\.global\S*\.v2", ptx))
    assert (wide[0] > 0) == (case in WIDE), wide
    assert wide[0] > 0 or wide[1] > 0 or case in ("unaligned", "copy-bytes"), wide
