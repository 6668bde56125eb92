"""Decoding goes on over compressed pages in the torch store, within the format's error."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import kvalloc  # noqa: E402
from compressing import BOUND, errors  # noqa: E402


@pytest.mark.parametrize("small", BOUND)
def test_decoding_goes_on_within_the_formats_error(small):
    def to_array(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values))

    before, after = errors(kvalloc.TorchStore, small, to_array, lambda out: out.numpy())
    assert before < 1e-5
    assert 1e-4 < after < BOUND[small]
