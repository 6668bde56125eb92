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

# The most registers a thread may have. 168 lets three programs of 128 threads onto a multiprocessor, 240 two
# of them, or one of 256.
REGISTERS = {
    "decode": 168,
    "decode int8": 240,
    "decode fp8": 240,
    "decode bf16 + int8": 240,
    "decode bf16 latent": 240,
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
def test_what_the_compiler_makes(made, name, arch):
    card = CARDS[arch]
    for kernel in made[name, arch].result(timeout=280):
        print(f"{name}, sm_{arch}: {kernel}")  # pytest -s shows all figures
        assert kernel.spills == 0
        assert kernel.registers <= cap(name, kernel.kernel)
        assert kernel.shared <= card.shared
        if kernel.kernel == "_attend":
            assert kernel.wide_copies > 0
            assert kernel.tensor_cores > 0 or "fp32" in name
            if "latent" not in name:  # two programs of 128 threads on a multiprocessor
                assert kernel.shared <= card.shared // 2
        else:  # a logarithm flushes in `_attend`; reading and writing fp8 must not
            assert kernel.flushes == 0
        if kernel.kernel in ("_write", "_convert"):
            assert kernel.wide_loads > 0
        if kernel.kernel == "_copy_rows":
            assert kernel.wide_loads >= 4
            assert kernel.wide_stores >= 4
