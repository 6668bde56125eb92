"""Case 37: a pool of more than 2**31 elements."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from triton_cases import interpreted, quiet

pytestmark = [interpreted, *quiet]
SCRIPT = Path(__file__).with_name("huge_pool.py")


def test_f37_offsets_are_64_bit():
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "every page was where it should be" in done.stdout


def test_f37_a_32_bit_offset_is_noticed():
    done = subprocess.run([sys.executable, SCRIPT, "narrow"], capture_output=True, text=True, timeout=200)
    assert done.returncode == -signal.SIGSEGV or "not close" in done.stderr, done.stderr
