"""Fault cases G, I and J: pins, tenants, and the numbers that are shown."""

from __future__ import annotations

import math

import numpy as np
import pytest

import kvalloc
from tinypool import (
    PAGE,
    SPECS,
    TOKENS,
    cache,
    check,
    check_idle,
    decode,
    hit,
    ids,
    make_pool,
    serve,
    unchanged,
)


def test_g39_what_was_never_locked_cannot_be_unlocked():
    pool = make_pool(10)
    pool.tenant("a", pin_budget=10 * PAGE)
    assert not hasattr(pool, "unpin")
    assert not hasattr(pool.pages, "unpin")
    with pytest.raises(TypeError):
        kvalloc.Pin()
    seq = serve(pool, "a", ids(32))
    # A pin is the only key to itself: neither other pins nor closing the sequence opens it.
    one, two = (pool.pin(seq, 32, owner="a") for _ in range(2))
    one.unpin()
    with unchanged(pool), pytest.raises(kvalloc.PinError):
        one.unpin()
    seq.close()
    assert pool.pinned == 2 * PAGE
    assert len(pool.pins()) == 1
    two.unpin()
    check_idle(pool)


def test_g41_pins_have_a_budget_and_an_owner():
    """Pinning until nothing moves is not possible: the budget ends it, and names who has what."""
    pool = make_pool(100)
    pool.tenant("a", pin_budget=10 * PAGE)
    pool.tenant("b")
    pins = []
    with pytest.raises(kvalloc.PinError, match=r"budget is 40 KiB, of which 40 KiB are used") as over:  # noqa: PT012
        for n in range(100):
            with serve(pool, "a", ids(16, n)) as seq:
                pins.append(pool.pin(seq, 16, owner="a", label=f"chat {n}"))
    assert "'a'" in str(over.value) or '"a"' in str(over.value)
    assert len(pins) == 10
    assert pool.pinned == 10 * PAGE == pool.tenant("a").pinned
    assert [(pin.owner, pin.label, pin.bytes, pin.pages) for pin in pool.pins()] == [
        ("a", f"chat {n}", PAGE, 1) for n in range(10)
    ]
    assert pool.pins("b") == []
    with serve(pool, "b", ids(16, 200)) as seq, pytest.raises(kvalloc.PinError):
        pool.pin(seq, 16, owner="b")  # no budget, no pins
    # All else can still be taken.
    taken = pool.pages.allocate("b", 90)
    with pytest.raises(kvalloc.OutOfPages):
        pool.pages.allocate("b", 1)
    check(pool)
    pool.pages.release(taken)
    for pin in pins:
        pin.unpin()
    check_idle(pool)


def test_g41_pins_end_with_their_time_under_pressure():
    """Nobody has to list pins for the expired ones to give way."""
    pool = make_pool(4, clock="system")
    pool.tenant("a", pin_budget=4 * PAGE)
    with serve(pool, "a", ids(64)) as seq:
        pool.pin(seq, 64, owner="a", ttl=0)
    assert len(pool.pages.allocate("a", 4)) == 4
    check(pool)


@pytest.mark.parametrize("limit", [4 * PAGE, None])
def test_g41_an_expired_pin_frees_room_under_a_limit(limit):
    pool = make_pool(4)
    pool.tenant("a", pin_budget=4 * PAGE, limit=limit)
    with serve(pool, "a", ids(64)) as seq:
        pin = pool.pin(seq, 64, owner="a", ttl=10)
    with unchanged(pool), pytest.raises(kvalloc.OutOfPages):
        pool.pages.allocate("a", 1)
    pool.advance(9.999)
    assert pool.pinned == 4 * PAGE
    assert pin.expires == 10
    pool.advance(0.001)
    assert pool.pinned == 0
    assert len(pool.pages.allocate("a", 4)) == 4
    check(pool)


@pytest.mark.parametrize("spec", SPECS)
def test_g41_protection_is_a_bias_and_never_a_lock(spec):
    """However many pages were opened with the highest priority: all can be taken back."""
    pool = make_pool(30, SPECS[spec])
    pool.tenant("a"), pool.tenant("b")
    for n in range(8):
        cache(pool, "a", ids(48, n), priority=100, ttl=None if n % 2 else 1000)
    for g in range(len(pool.spec.groups)):
        n = pool.capacity // pool.spec.classes[g].page_bytes
        pages = pool.pages.allocate("b", n, group=g)
        assert pool.cached == 0
        pool.pages.release(pages)
    check_idle(pool)


def test_g41_protected_pages_go_after_others_and_lose_it_with_time():
    pool = make_pool(8)
    pool.tenant("a"), pool.tenant("b")
    cache(pool, "a", ids(64, 1), priority=100, ttl=60)
    cache(pool, "a", ids(64, 2))
    taken = pool.pages.allocate("b", 4)
    assert (hit(pool, "a", ids(65, 1)), hit(pool, "a", ids(65, 2))) == (64, 0)
    pool.pages.release(taken)
    check_idle(pool)


# I: tenants.


def test_i45_a_limit_above_the_capacity_is_the_capacity():
    pool = make_pool(10)
    tenant = pool.tenant("a", limit="1TiB")
    assert tenant.limit == 1 << 40 or tenant.limit >= pool.capacity
    with unchanged(pool), pytest.raises(kvalloc.OutOfPages) as refused:
        pool.pages.allocate(tenant, 11)
    assert refused.value.level is None
    assert refused.value.why == "claim"
    assert len(pool.pages.allocate(tenant, 10)) == 10


@pytest.mark.parametrize("how", ["new", "set", "again"])
def test_i45_reserves_above_the_capacity_are_refused(how):
    pool = make_pool(10)
    pool.tenant("a", reserve=6 * PAGE)
    if how != "new":
        pool.tenant("b", reserve=4 * PAGE)
    with unchanged(pool), pytest.raises(kvalloc.TenantError, match=kvalloc.format_bytes(PAGE)):  # noqa: PT012
        if how == "set":
            pool.tenant("b").set(reserve=5 * PAGE)
        else:
            pool.tenant("b", reserve=5 * PAGE)
    if how == "new":
        with pytest.raises(kvalloc.UnknownTenant):
            pool.admit("b", 1)
    else:
        assert pool.tenant("b").reserve == 4 * PAGE


def test_i45_a_reserve_does_not_fit_beside_what_is_held():
    pool = make_pool(10)
    pages = pool.pages.allocate(pool.tenant("a"), 7)
    with unchanged(pool), pytest.raises(kvalloc.TenantError, match=kvalloc.format_bytes(PAGE)):
        pool.tenant("b", reserve=4 * PAGE)
    pool.tenant("b", reserve=3 * PAGE)
    pool.pages.release(pages)
    pool.tenant("b", reserve=10 * PAGE)
    with pytest.raises(kvalloc.OutOfPages) as refused:
        pool.pages.allocate("a", 1)
    assert refused.value.why == "claim"


@pytest.mark.parametrize("cached", [0, 2])
@pytest.mark.parametrize("limit", [0, 1, 3])
def test_i45_a_limit_lowered_below_use_breaks_nobody(limit, cached):
    """What runs goes on with what it has; new pages are refused until use is below the limit."""
    pool = make_pool(20)
    tenant = pool.tenant("a", limit=10 * PAGE)
    if cached:
        cache(pool, tenant, ids(cached * TOKENS, 1))
    seq = serve(pool, tenant, ids(70))
    before = (pool.held, pool.cached)
    tenant.set(limit=limit * PAGE)
    assert tenant.limit == limit * PAGE
    assert (pool.held, pool.cached) == before
    check(pool)
    batch = pool.batch(1, 200)
    batch.add(seq)
    seq.extend([1])
    decode(batch, 10)  # within the page that it has
    for _ in range(3):
        out = batch.step()
        assert [r.why for r in out.refused] == ["limit"]
        batch.commit([-1])
    check(pool)
    assert seq.num_written == 80
    tenant.set(limit=6 * PAGE)
    out = batch.step()
    assert not out.refused  # its own cached pages go first
    batch.commit()
    seq.close()
    check_idle(pool)


def test_i45_a_limit_below_the_reserve_is_refused():
    pool = make_pool(10)
    pool.tenant("a", reserve=4 * PAGE)
    for change in ({"limit": 3 * PAGE}, {"reserve": 8 * PAGE, "limit": 7 * PAGE}):
        with unchanged(pool), pytest.raises(kvalloc.TenantError, match="reserve"):
            pool.tenant("a").set(**change)
    with pytest.raises(kvalloc.TenantError):
        pool.tenant("b", reserve=3 * PAGE, limit=2 * PAGE)
    pool.tenant("org", limit=5 * PAGE)
    with unchanged(pool), pytest.raises(kvalloc.TenantError):
        pool.tenant("c", parent="org", reserve=6 * PAGE)


def test_i46_a_page_that_cannot_go_does_not_hold_up_the_others():
    """Pages at the head of an order that are held or pinned again are passed over."""
    pool = make_pool(12)
    pool.tenant("a", pin_budget=4 * PAGE)
    pool.tenant("b")
    for n in range(4):
        cache(pool, "a", ids(48, n))
    assert pool.cached == 12 * PAGE
    held = pool.open("a", ids(49, 0))
    with pool.open("a", ids(49, 1)) as seq:
        pool.pin(seq, 48, owner="a")
    assert (held.cached_tokens, seq.closed) == (48, True)
    taken = pool.pages.allocate("b", 6)
    check(pool)
    assert (pool.held, pool.pinned, pool.cached) == (9 * PAGE, 3 * PAGE, 0)
    with unchanged(pool), pytest.raises(kvalloc.OutOfPages):
        pool.pages.allocate("b", 1)
    pool.pages.release(taken)
    held.close()
    check(pool)


def test_i47_naming_a_tenant_again_changes_nothing_of_it():
    """A quota manager that starts anew, with an empty table or a full one, wipes nobody."""
    pool = make_pool(10)
    tenant = pool.tenant(
        "a", reserve=2 * PAGE, limit=8 * PAGE, weight=3, priority=7, pin_budget=PAGE, lend=True
    )
    seq = serve(pool, tenant, ids(40))
    cache(pool, tenant, ids(33, 1))
    with unchanged(pool):
        again = pool.tenant("a")
        assert again == tenant
        assert hash(again) == hash(tenant)
        figures = (again.reserve, again.limit, again.weight, again.priority, again.pin_budget, again.lend)
        assert figures == (2 * PAGE, 8 * PAGE, 3, 7, PAGE, True)
    pool.tenant("a", weight=4)
    assert (tenant.weight, tenant.limit, tenant.reserve) == (4, 8 * PAGE, 2 * PAGE)
    assert hit(pool, "a", ids(33, 1)) == 32
    seq.close()
    check_idle(pool)


@pytest.mark.parametrize("name", ["nobody", "", "a" * 1000, "\ud800", "a/b", "root", "the pool"])
def test_i47_unknown_tenants_follow_the_default(name):
    pool = make_pool(10)
    for ask in (
        lambda: pool.open(name, [1]),
        lambda: pool.admit(name, 10),
        lambda: pool.pages.allocate(name, 1),
        lambda: pool.pages.lookup(name, [1]),
    ):
        with unchanged(pool), pytest.raises(kvalloc.UnknownTenant, match="default_tenant"):
            ask()
    pool = make_pool(10, default_tenant="guests")
    with pool.open(name, ids(20)) as seq:
        assert seq.tenant.name == "guests"
    assert pool.admit(name, 10).verdict == "now"
    pool.pages.release(pool.pages.allocate(name, 1))
    # Owners of pins and scopes of shared parts are never guessed.
    with unchanged(pool), pytest.raises(kvalloc.UnknownTenant):
        pool.open("guests", ids(20), share=[(name, 16)])
    check_idle(pool)


def test_i48_a_quiet_tenants_reserve_outlives_a_noisy_neighbour():
    pool = make_pool(20)
    quiet = pool.tenant("quiet", reserve=5 * PAGE)
    pool.tenant("noisy")
    cache(pool, quiet, ids(80))
    for n in range(60):
        cache(pool, "noisy", ids(96, n + 1))
        assert quiet.cached == 5 * PAGE
    assert hit(pool, quiet, ids(81)) == 80
    assert quiet.stats()["evicted_by_others_pages"] == 0
    check_idle(pool)


def test_i48_in_a_full_pool_whoever_is_most_over_its_claim_gives_first():
    """Not the one who asks: its own cached pages lie inside its reserve."""
    pool = make_pool(20)
    quiet = pool.tenant("quiet", reserve=10 * PAGE)
    noisy = pool.tenant("noisy")
    cache(pool, quiet, ids(80))
    for n in range(5):
        cache(pool, noisy, ids(48, n + 1))
    assert (pool.free, noisy.cached) == (0, 15 * PAGE)
    pages = pool.pages.allocate(quiet, 3)
    assert (quiet.cached, noisy.cached) == (5 * PAGE, 12 * PAGE)
    pool.pages.release(pages)
    # At the asker's own limit its own go first, whatever the neighbours have; two more the pool needs.
    quiet.set(limit=10 * PAGE)
    pool.pages.allocate(quiet, 8)
    assert (quiet.cached, noisy.cached) == (2 * PAGE, 10 * PAGE)
    check(pool)


@pytest.mark.parametrize("level", ["pool", "limit", "parent"])
def test_i48_a_request_that_can_never_be_granted_evicts_nothing(level):
    pool = make_pool(20)
    pool.tenant("org", limit=15 * PAGE if level == "parent" else None)
    pool.tenant("a", parent="org", limit=15 * PAGE if level == "limit" else None)
    pool.tenant("b")
    cache(pool, "a", ids(128))
    cache(pool, "b", ids(64, 1))
    with unchanged(pool):
        for pages in (16, 21, 1000):
            if pages == 16 and level == "pool":
                continue
            with pytest.raises(kvalloc.OutOfPages):
                pool.pages.allocate("a", pages)
            with pytest.raises(kvalloc.AdmissionRefused):
                pool.open("a", ids(pages * TOKENS, 5), admit=True)
    assert pool.stats().evictions == 0


SIZES = [
    math.nan,
    math.inf,
    -math.inf,
    -1,
    "12GX",
    "",
    " ",
    "GiB",
    2**63,
    2**64,
    10**400,
    1.5,
    True,
    None,
    "nan",
]
SIZES += ["inf", "-1GiB", "1e9", "0x10", "12Gib", "12gb ", b"1GiB", [1], "1,5GiB", "١GiB", "1" * 100]


@pytest.mark.parametrize("size", SIZES, ids=lambda size: repr(size)[:20])
@pytest.mark.parametrize("what", ["reserve", "limit", "host_limit", "pin_budget", "publish"])
def test_i49_sizes_are_read_or_refused(what, size):
    if what in ("limit", "host_limit", "publish") and size is None:
        return  # no bound
    pool = make_pool(10)
    pool.tenant("org")
    tenant = pool.tenant("a", parent="org")
    value = {"org": size} if what == "publish" else size
    for attempt in (
        lambda: tenant.set(**{what: value}),
        lambda: pool.tenant("new", parent="org", **{what: value}),
    ):
        with unchanged(pool), pytest.raises(kvalloc.KvallocError) as refused:
            attempt()
        assert isinstance(refused.value, ValueError)
        assert len(str(refused.value)) < 400
    assert (tenant.reserve, tenant.limit, tenant.pin_budget, tenant.publish) == (0, None, 0, {})
    assert tenant.host_limit is None
    assert "new" not in [t.name for t in pool.tenants()]


@pytest.mark.parametrize(
    ("text", "size"), [("12GB", 12 * 10**9), ("12GiB", 12 << 30), ("12 gib".replace("b", "B"), 12 << 30)]
)
def test_i49_decimal_and_binary_units_are_taken_at_their_word(text, size):
    pool = kvalloc.Pool(SPECS["full"], text)
    assert pool.capacity == size // PAGE * PAGE - PAGE
    assert pool.tenant("a", limit=text).limit == size // PAGE * PAGE


# J: the numbers shown.


def test_j51_figures_are_derived_and_never_clamped():
    pool = make_pool(24)
    pool.tenant("a", limit=16 * PAGE), pool.tenant("b")
    batch = pool.batch(4, 200)
    for n in range(40):
        seqs = [pool.open("ab"[n % 2], ids(30 + 7 * (n % 5), n % 7), 8, admit=n % 3 == 0) for _ in range(2)]
        for seq in seqs:
            batch.add(seq)
        batch.step()
        report = check(pool)
        assert report.device.held == pool.held == sum(t.held for t in pool.tenants())
        assert report.device.cached == pool.cached == sum(t.cached for t in pool.tenants())
        assert report.device.free == pool.free
        for tenant in pool.tenants():
            usage = tenant.usage()
            assert usage.held + usage.cached + usage.pinned + usage.promised + usage.stock == usage.charged
            assert 0 <= usage.charged <= min(usage.limit or pool.capacity, pool.capacity)
            assert usage == tenant.usage(subtree=True) or tenant.usage(subtree=True).charged >= usage.charged
        stats = pool.stats()
        assert stats["hit_tokens"] <= stats["query_tokens"]
        assert stats.hit_rate is None or 0 <= stats.hit_rate <= 1
        batch.commit([1] * len(batch))
        for seq in seqs:
            seq.close()
    stats = pool.stats()
    in_use = sum(t.held + t.cached for t in pool.tenants()) // PAGE
    assert stats["allocated_pages"] - stats["released_pages"] - stats.evictions == in_use
    check_idle(pool)


@pytest.mark.parametrize("failures", [1, 100])
def test_j52_hits_are_counted_once_at_the_commit(failures):
    pool = make_pool(10)
    pool.tenant("a"), pool.tenant("b")
    cache(pool, "a", ids(64))
    before = pool.stats()
    taken = pool.pages.allocate("b", 6)
    for _ in range(failures):
        with pytest.raises(kvalloc.AdmissionRefused):
            pool.open("a", ids(100), admit=True)
        with pool.open("a", ids(100)) as seq:
            assert seq.cached_tokens == 64
    assert pool.stats()["query_tokens"] == before["query_tokens"]
    seq = pool.open("a", ids(100))
    batch = pool.batch(1, 200)
    batch.add(seq)
    for _ in range(failures):
        assert len(batch.step().refused) == 1
        batch.commit([-1])
    pool.pages.release(taken)
    while seq.num_written < 100:
        assert not batch.step(token_budget=10).refused
        batch.commit()
    after = pool.stats()
    assert after["query_tokens"] - before["query_tokens"] == 100
    assert after["hit_tokens"] - before["hit_tokens"] == 64
    assert pool.tenant("a").stats()["hit_tokens"] == 64
    seq.close()
    check_idle(pool)


def test_j52_a_sequence_that_leaves_and_comes_back_counts_once():
    pool = make_pool(20)
    pool.tenant("a")
    cache(pool, "a", ids(64))
    before = pool.stats()["query_tokens"]
    seq = pool.open("a", ids(100))
    batch = pool.batch(1, 200)
    for _ in range(5):
        batch.add(seq)
        batch.step([5])
        batch.commit()
        batch.remove(seq)
    assert pool.stats()["query_tokens"] - before == 100
    twin = seq.fork()
    batch.add(twin)
    batch.step([5])
    batch.commit()
    assert pool.stats()["query_tokens"] - before == 100  # a fork looks nothing up
    assert np.array_equal(twin.tokens, seq.tokens)
