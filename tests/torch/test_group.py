"""A tensor-parallel group in which one rank keeps the books: each carries a plan out on its own shard."""

import numpy as np
import pytest

import kvalloc

torch = pytest.importorskip("torch")
ranks = pytest.importorskip("ranks")

REBALANCE, SUSPEND, RESUME, COMPRESS = 1, 2, 3, 4  # plans in the order in which they are carried out


def alone(fails_at=None):
    """Serve in this process, with all heads."""
    return ranks.Books(ranks.Link(), fails_at).serve()


@pytest.fixture(scope="module")
def want():
    return alone()


def compare(answers, want):
    (tokens, hidden, ended), (followed, copies) = answers
    assert tokens == want[0]
    assert ended == want[2]
    assert copies > 0
    for mine, his, whole in zip(hidden, followed, want[1], strict=True):
        assert torch.equal(mine, his)
        np.testing.assert_allclose(mine, whole, atol=2e-5)


def test_all_ranks_carry_plans_out_and_answer_as_one_process(want, tmp_path):
    """Rebalance, swap out and in, and compress, while a batch decodes, over gloo."""
    compare(ranks.in_processes(ranks.keep_books_or_follow, tmp_path, None, None), want)
    kinds, moves, states = zip(*want[2], strict=True)
    assert kinds == ("rebalance", "suspend", "resume", "compress")
    assert min(moves) > 0
    assert set(states) == {"committed"}


def test_a_copy_that_fails_on_one_rank_is_aborted_on_all(want, tmp_path):
    """Half of a rank's copies are made when it fails: the plan is aborted, and no token changes."""
    answers = ranks.in_processes(ranks.keep_books_or_follow, tmp_path, 1, SUSPEND)
    tokens, _, ended = answers[0]
    assert ended[1][0] == "suspend"
    assert ended[1][2] == "aborted"
    assert len(ended) == 3, "who was to stop goes on with all it had, and needs no way back"
    compare(answers, alone(SUSPEND))
    before = 9  # steps up to the plan, and while the other run had it suspended
    assert [said[:before] for said in tokens] == [said[:before] for said in want[0]]


@pytest.mark.parametrize("fails_at", [REBALANCE, SUSPEND, RESUME, COMPRESS])
def test_an_aborted_plan_changes_no_token(want, fails_at):
    tokens, _, ended = alone(fails_at)
    assert [kind for kind, _, state in ended if state == "aborted"] == [want[2][fails_at - 1][0]]
    at = 12 if fails_at == COMPRESS else 100  # from there on pages are compressed in the other run
    assert [said[:at] for said in tokens] == [said[:at] for said in want[0]]


def test_a_step_travels_as_bytes_and_is_checked():
    pool = ranks.pool_of(ranks.group_spec())
    batch = pool.batch(4, 128)
    with pytest.raises(kvalloc.InvalidArgument, match="no step yet"):
        kvalloc.StepData.of(batch)
    parent = pool.open("a", range(37))
    batch.add(parent)
    batch.step()
    batch.commit([7])
    batch.add(parent.fork())
    batch.step()
    step = kvalloc.StepData.of(batch)
    data = step.to_bytes()
    there = kvalloc.StepData.from_bytes(data)
    assert (there.num_rows, there.num_tokens, len(there.copies)) == (2, 2, len(batch.last.copies))
    assert repr(there) == "<kvalloc.StepData 2 tokens of 2 rows>"
    assert len(there.copies) > 0
    for name in ("query_start_loc", "seq_lens", "positions", "copies"):
        np.testing.assert_array_equal(getattr(there, name), getattr(step, name))
    for group in range(2):
        np.testing.assert_array_equal(there.block_table(group), batch.block_table(group)[:2, :3])
        np.testing.assert_array_equal(there.slot_mapping(group), batch.slot_mapping(group)[:2])
    for at in range(0, len(data), 3):
        altered = bytearray(data)
        altered[at] ^= 4
        with pytest.raises(kvalloc.InvalidArgument, match=r"no step|altered"):
            kvalloc.StepData.from_bytes(bytes(altered))
    for cut in (b"", data[:8], data[:-1], data[:-4], data + bytes(8), b"x" * len(data)):
        with pytest.raises(kvalloc.InvalidArgument, match=r"no step|altered"):
            kvalloc.StepData.from_bytes(cut)
    # A step without a token, and one of another spec.
    batch.commit([7, 7])
    batch.step(counts=[0, 0])
    empty = kvalloc.StepData.from_bytes(kvalloc.StepData.of(batch).to_bytes())
    assert (empty.num_rows, empty.num_tokens) == (2, 0)
    other = ranks.pool_of(ranks.spec_of("full"))
    with kvalloc.TorchStore(other) as store, pytest.raises(kvalloc.InvalidArgument, match="another spec"):
        store.attend(0, torch.zeros(2, 6, 32), None, None, there)
