"""Each kernel, compiled for cards that are not here: what the compiler made of it is what speed depends on.

Nothing runs, so this says nothing about results, and nothing about time.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

import triton_cases
from ahead_of_time import CARDS, LAUNCHES, compiled

pytestmark = [triton_cases.compiled, *triton_cases.quiet]

# The most registers a thread may have. 168: three programs of 128 threads on a multiprocessor.
REGISTERS = {
    "decode": 168,
    "decode int8": 232,
    "decode fp8": 232,
    "decode bf16 latent": 232,
    "decode fp8 latent": 240,
    "merge": 64,
    "write": 64,
    "quantise": 128,
    "dequantise": 128,
    "copy": 40,
    "gather": 40,
}


@pytest.fixture(scope="module")
def made():
    """Compile all of them, in as many processes as there are cores, to about a minute with two."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(mp_context=spawn) as workers:
        jobs = {(name, arch): workers.submit(compiled, name, arch) for name in LAUNCHES for arch in CARDS}
        yield jobs
        for job in jobs.values():
            job.cancel()


def cap(name, kernel):
    if kernel == "_merge":
        return REGISTERS["merge"]
    return REGISTERS[max((known for known in REGISTERS if name.startswith(known)), key=len)]


@pytest.mark.parametrize("arch", CARDS)
@pytest.mark.parametrize("name", LAUNCHES)
def test_what_the_compiler_makes(made, name, arch, record_property):
    kernels = made[name, arch].result(timeout=280)
    for kernel in kernels:
        record_property(kernel.kernel, str(kernel))
        print(f"{name}, sm_{arch}: {kernel}")
        assert kernel.spills == 0
        assert kernel.registers <= cap(name, kernel.kernel)
        assert kernel.shared <= CARDS[arch].shared
        if kernel.kernel != "_attend":  # a logarithm there flushes; reading fp8 must not
            assert kernel.flushes == 0
        if kernel.kernel == "_attend":
            assert kernel.wide_copies > 0
            assert kernel.tensor_cores > 0 or "fp32" in name
            if "latent" not in name:  # two programs of 128 threads on a multiprocessor
                assert kernel.shared <= CARDS[arch].shared // 2
        if name in ("copy", "gather"):
            assert kernel.wide_loads >= 4
            assert kernel.wide_stores >= 4
        if kernel.kernel in ("_write", "_convert"):
            assert kernel.wide_loads > 0
