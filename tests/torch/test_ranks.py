"""Two processes over gloo, each with the heads of its rank: side by side their answers are that of one."""

import numpy as np
import pytest

import kvalloc
from store_contract import pool_of, spec_of

pytest.importorskip("torch")
ranks = pytest.importorskip("ranks")


@pytest.mark.parametrize("whole", [True, False], ids=["spec of all ranks", "spec of one rank"])
def test_two_processes_over_gloo(whole, tmp_path):
    answers = ranks.in_processes(ranks.attend_in_part, tmp_path, whole)
    pool = pool_of(spec_of("full", "window"))
    with kvalloc.TorchStore(pool) as store:
        want, _ = ranks.serve(pool, store.attend)
    for got, same_frames in answers:
        assert same_frames
        for mine, whole_answer in zip(got, want, strict=True):
            np.testing.assert_allclose(mine, whole_answer, atol=1e-6)
