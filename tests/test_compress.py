"""Pages of live sequences go on in a smaller class: decoding goes on, within the format's error."""

from __future__ import annotations

import numpy as np
import pytest

import kvalloc
from compressing import BOUND, TOKENS, Side, errors, spec_of


def side(small: str = "int8") -> Side:
    here = Side(kvalloc.NumpyStore, small, 4 * TOKENS + 1)
    here.batch.step()
    here.batch.commit([1])
    return here


@pytest.mark.parametrize("small", BOUND)
def test_decoding_goes_on_within_the_formats_error(small):
    before, after = errors(kvalloc.NumpyStore, small, np.asarray, np.asarray)
    assert before < 1e-5
    assert 1e-4 < after < BOUND[small]


def test_the_tenant_has_to_allow_it():
    here = side()
    assert here.tenant.compress
    here.tenant.set(compress=False)
    with pytest.raises(kvalloc.InvalidArgument, match="compress=True"):
        here.pool.compress(here.tenant, "1MiB", batch=here.batch)
    assert not here.pool.tenant("b").compress
    with pytest.raises(kvalloc.InvalidArgument):
        here.pool.tenant("c", compress="yes")
    with pytest.raises(kvalloc.InvalidArgument):
        here.tenant.set(compress=1)
    here.store.close()


def test_a_spec_without_a_smaller_class_says_so():
    spec = spec_of("int8").replace(small_dtype=None)
    pool = kvalloc.Pool(spec, "8MiB")
    with pytest.raises(kvalloc.InvalidArgument, match="small_dtype"):
        pool.compress(pool.tenant("a", compress=True), 1)


def test_what_means_nothing_is_refused():
    here = side()
    other = side()
    for name, wrong in (
        *(("bytes", wrong) for wrong in (-1, "some")),
        *(("ttl", -1), ("dry_run", 1), ("sessions", [1]), ("batch", 7)),
    ):
        with pytest.raises(kvalloc.InvalidArgument):
            here.pool.compress(**{"tenant": here.tenant, "bytes": 1, name: wrong})
    with pytest.raises(kvalloc.UnknownTenant):
        here.pool.compress("nobody", 1)
    with pytest.raises(kvalloc.WrongPool):
        here.pool.compress(here.tenant, 1, batch=other.batch)
    for each in (here, other):
        each.store.close()


def test_a_dry_run_and_an_abort_change_nothing():
    here = side()
    held, table = here.tenant.held, here.seq.block_table()
    dry = here.pool.compress(here.tenant, "1MiB", batch=here.batch, dry_run=True)
    assert dry.rungs["compress"] > 0
    assert len(dry.moves) == 0
    plan = here.pool.compress(here.tenant, "1MiB", batch=here.batch)
    assert (plan.kind, plan.rungs) == ("compress", dry.rungs)
    here.store.execute(plan)
    plan.abort()
    assert (here.tenant.held, here.seq.block_table().tolist()) == (held, table.tolist())
    assert here.pool.audit().ok
    here.store.close()


def test_what_is_compressed_is_not_found_and_not_written_on():
    here = side()
    with here.pool.open(here.tenant, range(90)) as twin:
        assert twin.cached_tokens == 4 * TOKENS
    with here.pool.compress(here.tenant, 1, batch=here.batch) as plan:
        here.store.execute(plan)
    assert len(plan.moves) == 1
    assert here.seq.block_table()[0] < 0
    with here.pool.open(here.tenant, range(90)) as twin:
        assert twin.cached_tokens == 0
    with pytest.raises(kvalloc.InvalidArgument, match="compressed"):
        here.seq.truncate(3)
    with pytest.raises(kvalloc.InvalidArgument, match="block table"):
        here.batch.csr()
    here.seq.truncate(TOKENS)
    here.store.close()


def test_reclaim_compresses_before_it_stops_anybody_where_the_host_tier_is_full():
    here = side()
    plan = here.pool.reclaim(here.tenant, 1, live="preempt", batch=here.batch)
    with plan:
        here.store.execute(plan)
    assert plan.rungs["compress"] > 0
    assert (len(plan.victims), plan.shortfall) == (0, 0)
    here.store.close()


def test_pages_that_would_take_as_much_are_left_as_they_are():
    # 128 bytes as float32 and 48 as int8: 256 both, for page bytes are rounded up.
    spec = kvalloc.KVSpec.uniform(
        layers=1, kv_heads=1, head_dim=4, dtype="float32", page_tokens=4, small_dtype="int8"
    )
    assert [cls.page_bytes for cls in spec.classes] == [256, 256]
    with kvalloc.Pool(spec, "64KiB") as pool:
        tenant, batch = pool.tenant("a", compress=True), pool.batch(max_sequences=1, max_tokens=64)
        batch.add(pool.open(tenant, range(40)))
        batch.step()
        batch.commit([1])
        with pytest.raises(kvalloc.InvalidArgument, match="fewer bytes"):
            pool.compress(tenant, "1MiB", batch=batch)
        plan = pool.reclaim(tenant, "1KiB", live="preempt", batch=batch, dry_run=True)
        assert plan.copied == (0, 0)
        plan = pool.reclaim(tenant, "1KiB", live="preempt", batch=batch)
        assert len(plan.moves) == 0
        plan.abort()
