"""The jobs of ``bench/gpu/run.py`` do what they say: in the interpreter, on sizes that mean nothing."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from triton_cases import interpreted, quiet  # noqa: E402

pytestmark = quiet
SCRIPT = Path(__file__).parents[2] / "bench/gpu/run.py"


@pytest.fixture
def bench(monkeypatch):
    spec = importlib.util.spec_from_file_location("gpu_bench", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_bench", module)
    spec.loader.exec_module(module)
    return module


@interpreted
def test_every_job_runs(bench, capsys):
    calls = []

    def timer(call, graph):
        calls.append(call())
        return [1.0, 3.0, 2.0]

    tiny = bench.Bench("cpu", timer, scale=1 << 14)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.int8):
        tiny.decode(dtype, 134, rows=2)
    tiny.page_copy(1024)
    tiny.swap(1024, 1)
    tiny.swap(1024, 16)
    tiny.write(20)
    figures = {figure.job: figure for figure in tiny.figures}
    assert len(figures) == len(calls) == 12
    assert all(figure.microseconds == 2 for figure in figures.values())
    copied = figures["page copy, 1 KiB"]
    assert copied.gb_per_s == pytest.approx(2 * 32 * 1024 / 2 / 1000)
    assert copied.ratio == pytest.approx(copied.gb_per_s / tiny.copy_speed)
    shown = capsys.readouterr().out
    assert "decode int8, 134 MiB, 2 requests" in shown
    assert "95 %" in shown


@interpreted
def test_decode_reads_as_many_bytes_as_are_counted(bench):
    """A figure is only as true as its byte count: requests x tokens x (K + V), by layer."""
    tiny = bench.Bench("cpu", lambda call, graph: [call() is None or 1.0], scale=1 << 14)
    tiny.decode(torch.bfloat16, 134, rows=2)
    tokens = 134 * (1 << 20) // (1 << 14) // (2 * 8 * 128 * 2) // 2
    moved = tiny.figures[-1].gb_per_s * tiny.figures[-1].microseconds * 1000
    assert moved == pytest.approx(tiny.layers * 2 * max(1, tokens) * 2 * 8 * 128 * 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_it_says_so():
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True)
    assert done.returncode == 2
    assert "no CUDA device" in done.stderr
