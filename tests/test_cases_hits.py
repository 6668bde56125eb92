"""Fault cases C and D: wrong hits, and keys that are too much alike. A wrong hit is never allowed."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

import kvalloc
from tinypool import (
    PAGE,
    SPECS,
    STATELESS,
    TOKENS,
    cache,
    check,
    check_idle,
    decode,
    finish,
    hit,
    ids,
    make_pool,
    serve,
    unchanged,
)


def fill(pool, tenant, pages, group=0):
    """Take so many pages, evicting where none is free, and give them back."""
    taken = pool.pages.allocate(tenant, pages, group=group)
    pool.pages.release(taken)


@pytest.mark.parametrize("compare", [True, False])
@pytest.mark.parametrize("spec", STATELESS)
def test_c14_a_page_that_went_to_another_prefix_is_a_miss(spec, compare):
    pool = make_pool(12, SPECS[spec], compare_tokens=compare)
    pool.tenant("a")
    cache(pool, "a", ids(33, 1))
    assert hit(pool, "a", ids(33, 1)) == 32
    for seed in range(2, 8):
        for group in range(len(pool.spec.groups)):
            with contextlib.suppress(kvalloc.OutOfPages):
                fill(pool, "a", 12, group)
        cache(pool, "a", ids(33, seed))
        assert hit(pool, "a", ids(33, seed)) == 32
        assert [hit(pool, "a", ids(33, old)) for old in range(1, seed)] == [0] * (seed - 1)
        check_idle(pool)
    assert pool.stats().evictions > 0


def test_c14_in_the_lower_face():
    pool = make_pool(4)
    pool.tenant("a")
    first = pool.pages.allocate("a", 4)
    pool.pages.publish("a", first, [b"p0", b"p1", b"p2", b"p3"])
    pool.pages.release(first[::-1])
    second = pool.pages.allocate("a", 4)  # the same four pages, evicted
    assert set(pool.pages.frames(second)) == {1, 2, 3, 4}
    pool.pages.publish("a", second, [b"q0", b"q1", b"q2", b"q3"])
    assert list(pool.pages.find("a", [b"p0", b"p1", b"p2", b"p3"])) == [pool.pages.MISS] * 4
    assert len(pool.pages.lookup("a", [b"p0"])) == 0
    assert pool.pages.share(first) == [False] * 4  # stale references are an answer
    assert list(pool.pages.find("a", [b"q2"])) == [second[2]]
    pool.pages.release(second)
    check_idle(pool)


@pytest.mark.parametrize("copies", [2, 3])
@pytest.mark.parametrize("spec", ["full", "full+window", "latent"])
def test_c15_copies_of_one_prefix(spec, copies):
    """Sequences build the same prefix at the same time: any copy serves, "removed" is told for the last."""
    groups = len(SPECS[spec].groups)
    pool = make_pool(2 * copies * groups, SPECS[spec], events=1000)
    pool.tenant("a"), pool.tenant("b")
    batch = pool.batch(copies, 100)
    for _ in range(copies):
        batch.add(pool.open("a", ids(32)))
    batch.step()
    batch.commit([5] * copies)
    stored = [e for e in pool.events() if e["type"] == "stored"]
    assert len(stored) == 2 * groups  # told once for all copies
    total = 2 * copies * groups
    *others, last = batch.rows
    for seq in others:
        seq.close()
        assert hit(pool, "a", ids(33)) == 32
    # Copies that are let go become one; the running one is another, and serves alone when that is evicted.
    assert pool.cached == 2 * groups * PAGE
    fill(pool, "b", total - 2 * groups)
    assert hit(pool, "a", ids(33)) == 32
    last.close()
    removed = [e["key"] for e in pool.events() if e["type"] == "removed"]
    assert not removed
    for left in range(2 * groups, 0, -1):
        found = hit(pool, "a", ids(33))
        assert found == 32 if not removed else found < 32
        fill(pool, "b", total - left + 1)
        removed += [e["key"] for e in pool.events() if e["type"] == "removed"]
        check_idle(pool)
    assert sorted(removed) == sorted(e["key"] for e in stored)
    assert hit(pool, "a", ids(33)) == 0


@pytest.mark.parametrize("lost", range(5))
def test_c16_a_hit_ends_at_the_first_gap(lost):
    """Keys of the caller's own have no parents, so any page of a chain can go."""
    pool = make_pool(6)
    pool.tenant("a")
    keys = [b"k%d" % n for n in range(5)]
    pages = pool.pages.allocate("a", 5)
    pool.pages.publish("a", pages, keys)
    pool.pages.release([pages[lost]])  # cached, and then evicted
    taken = pool.pages.allocate("a", 2)
    found = pool.pages.lookup("a", keys)
    assert list(found) == list(pages[:lost])
    pool.pages.release(found[::-1])
    pool.pages.release([p for n, p in enumerate(pages) if n != lost][::-1])
    pool.pages.release(taken)
    check_idle(pool)


@pytest.mark.parametrize("spec", STATELESS)
def test_c17_children_leave_before_parents(spec):
    """A finished chain is taken back from its end: what is left of it can always be hit."""
    groups = len(SPECS[spec].groups)
    pool = make_pool(40, SPECS[spec])
    pool.tenant("a"), pool.tenant("b")
    batch = pool.batch(1, 64)
    seq = pool.open("a", ids(48))
    batch.add(seq)
    finish(batch)
    seq.close()
    grows = [g for g, kind in enumerate(pool.spec.groups) if kind.kind in ("full", "latent")]
    last = hit(pool, "a", ids(49))
    assert last == 48
    while pool.cached:
        taken = []
        cached = pool.cached
        while pool.cached == cached:
            taken.append(pool.pages.allocate("b", 1, group=groups - 1))
        now = hit(pool, "a", ids(49))
        assert now <= last
        if grows and groups == 1:
            assert now == pool.cached // PAGE * TOKENS  # no unreachable page stays
        last = now
        check(pool)
        # What is taken stays taken, or it would be given out again before anything is evicted.
        held = taken
        del held
    assert hit(pool, "a", ids(49)) == 0


def test_c17_of_three_the_last_goes_first():
    pool = make_pool(3)
    pool.tenant("a"), pool.tenant("b")
    cache(pool, "a", ids(48))
    for left in (2, 1, 0):
        pool.pages.allocate("b", 1)
        assert hit(pool, "a", ids(49)) == left * TOKENS
        check(pool)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 24, 40, 47, 48])
@pytest.mark.parametrize("forks", [1, 3])
def test_c18_forks_copy_a_shared_tail_before_they_write(spec, length, forks):
    pool = make_pool(120, SPECS[spec])
    pool.tenant("a")
    batch = pool.batch(8, 200)
    seq = pool.open("a", ids(length))
    batch.add(seq)
    finish(batch)
    twins = [seq, *(seq.fork() for _ in range(forks))]
    check(pool)
    for twin in twins[1:]:
        batch.add(twin)
        assert (twin.num_tokens, twin.num_written) == (length, length)
    for n, twin in enumerate(twins):
        twin.extend([n])
    sources = {g: twins[0].block_table(g) for g in range(len(pool.spec.groups))}
    out = batch.step()
    assert not out.refused
    # Whoever writes into a page that others hold does it in a copy; the last one left may keep the page.
    states = [g for g, kind in enumerate(pool.spec.groups) if kind.kind == "state"]
    partial = [g for g in range(len(pool.spec.groups)) if g not in states and length % TOKENS]
    copies = out.copies
    assert copies.dtype == np.int32
    assert copies.shape == (len(copies), 3)
    assert set(copies[:, 0]) == {*partial, *states}
    assert forks <= len(copies) / max(len({*partial, *states}), 1) <= forks + 1 or not len(copies)
    for group, source, target in copies:
        assert source in sources[group]
        assert target not in sources[group]
    # No two of them write to one place, in any group.
    for g in range(len(pool.spec.groups)):
        if g not in states:
            assert len(set(batch.slot_mapping(g)[: out.num_tokens])) == forks + 1
            places = {int(twin.block_table(g)[length // TOKENS]) for twin in twins}
            assert len(places) == forks + 1
        else:
            assert len({int(twin.block_table(g)[0]) for twin in twins}) == forks + 1
    # The sources stay until the copies are done: even if everybody who held them goes.
    held_before = pool.held
    for group, source in {(int(c[0]), int(c[1])) for c in copies}:
        assert source in sources[group]
    check(pool)
    batch.commit([9] * len(twins))
    assert pool.held <= held_before
    decode(batch, 20)
    for n, twin in enumerate(twins):
        assert list(twin.tokens[: length + 2]) == [*ids(length), n, 9]
    check(pool)
    for twin in twins:
        twin.close()
    check_idle(pool)


def test_c18_sources_are_held_until_the_commit():
    pool = make_pool(8)
    pool.tenant("a")
    batch = pool.batch(3, 64)
    seq = serve(pool, "a", ids(20))
    twin = seq.fork()
    batch.add(seq)
    seq.extend([1])
    out = batch.step()
    [(_, source, target)] = out.copies
    twin.close()
    seq.close()  # nobody but the copy in flight needs the source now
    free = pool.pages.allocate("a", (pool.free + pool.cached) // PAGE)
    assert source not in pool.pages.frames(free)
    with pytest.raises(kvalloc.OutOfPages):
        pool.pages.allocate("a", 1)
    batch.commit()
    assert source in pool.pages.frames(pool.pages.allocate("a", 1))
    del target
    check(pool)


def test_c18_a_tail_that_nobody_shares_is_not_copied():
    pool = make_pool(8)
    pool.tenant("a")
    seq = serve(pool, "a", ids(20))
    seq.fork().close()
    batch = pool.batch(1, 64)
    batch.add(seq)
    seq.extend([1])
    assert len(batch.step().copies) == 0
    batch.commit()


@pytest.mark.parametrize("spec", STATELESS)
def test_c18_a_page_published_whole_and_cut_is_not_written_under_its_key(spec):
    """Back from a full page into its middle, and on with other tokens: the old key is not theirs."""
    pool = make_pool(60, SPECS[spec])
    pool.tenant("a")
    seq = serve(pool, "a", ids(32))
    seq.truncate(24)
    seq.extend(ids(24, 5))
    batch = pool.batch(1, 100)
    batch.add(seq)
    finish(batch)
    mixed = np.concatenate([ids(24), ids(24, 5)])
    assert list(seq.tokens) == list(mixed)
    seq.close()
    again = pool.open("a", np.append(mixed, 1))
    assert again.cached_tokens == 48
    again.close()
    assert hit(pool, "a", ids(33)) <= 16 or spec != "full"
    check_idle(pool)


@pytest.mark.parametrize("spec", STATELESS)
def test_c19_other_weights_forget_everything(spec):
    pool = make_pool(30, SPECS[spec], events=100)
    pool.tenant("a", pin_budget="1MiB")
    cache(pool, "a", ids(48))
    with serve(pool, "a", ids(33, 1)) as seq:
        pages = pool.audit().device.held
        with unchanged(pool), pytest.raises(kvalloc.InUse) as in_use:
            pool.reset_prefix_cache()
        assert 0 < in_use.value.pages <= pages // PAGE
        assert hit(pool, "a", ids(49)) == 48  # nothing by half
        pin = pool.pin(seq, 32, owner="a")
    with unchanged(pool), pytest.raises(kvalloc.InUse):
        pool.reset_prefix_cache()
    pin.unpin()
    cached = pool.cached
    assert pool.reset_prefix_cache() * PAGE <= cached
    assert (pool.cached, pool.free) == (0, pool.capacity)
    assert [hit(pool, "a", p) for p in (ids(49), ids(33, 1))] == [0, 0]
    assert pool.events()[-1]["type"] == "cleared"
    check_idle(pool)
    cache(pool, "a", ids(48))
    assert hit(pool, "a", ids(49)) == 48


def test_c19_a_sequence_of_the_old_weights_finds_no_new_pages():
    """A sequence without published pages lives through the reset; what it publishes has the old key."""
    pool = make_pool(30)
    pool.tenant("a")
    old = pool.open("a", ids(40))
    assert pool.reset_prefix_cache() == 0
    batch = pool.batch(1, 100)
    batch.add(old)
    finish(batch)
    assert hit(pool, "a", ids(40)) == 0
    old.close()
    assert hit(pool, "a", ids(40)) == 0
    check_idle(pool)


@pytest.mark.parametrize("tokens", [1, 8, 15])
def test_c20_a_partial_page_has_no_key(tokens):
    """Only full pages are found, so no key of a part can outlive it."""
    pool = make_pool(30)
    pool.tenant("a")
    seq = serve(pool, "a", ids(32 + tokens))
    assert hit(pool, "a", ids(48)) == 32
    seq.extend(ids(48)[32 + tokens :])
    batch = pool.batch(1, 100)
    batch.add(seq)
    finish(batch)
    assert hit(pool, "a", ids(49)) == 48
    assert hit(pool, "a", np.append(ids(32 + tokens), 1)) == 32
    seq.close()
    check_idle(pool)


def test_c20_a_published_page_takes_no_second_key():
    pool = make_pool(4)
    pool.tenant("a")
    page = pool.pages.allocate("a", 1)
    assert pool.pages.publish("a", page, [b"old"]) == [True]
    with unchanged(pool):
        assert pool.pages.publish("a", page, [b"new"]) == [False]
    assert list(pool.pages.find("a", [b"new"])) == [pool.pages.MISS]
    pool.pages.release(page)
    fill(pool, "a", 4)
    assert list(pool.pages.find("a", [b"old"])) == [pool.pages.MISS]


# D: what makes two keys different.

CONTEXTS = [
    {},
    {"adapter": "x"},
    {"adapter": "y"},
    {"adapter": "x", "adapter_generation": 1},
    {"adapter": "x", "adapter_generation": 2},
    {"extra_key": "x"},
    {"extra_key": b"y"},
    {"adapter": "x", "extra_key": "x"},
    {"adapter": "", "extra_key": ""},
    {"adapter": ""},
    {"extra_key": ""},
    {"adapter": "xy"},
    {"adapter": "x", "extra_key": "y"},
    {"adapter": "y", "extra_key": "x"},
    {"adapter": "x" * 1000},
    {"adapter": "x\0", "extra_key": ""},
    {"adapter": "x", "extra_key": "\0"},
]


@pytest.mark.parametrize("spec", ["full", "window", "full+window", "two windows"])
@pytest.mark.parametrize("owner", CONTEXTS)
def test_d21_d22_an_adapter_a_salt_and_their_generations_are_told_apart(spec, owner):
    pool = make_pool(30, SPECS[spec])
    pool.tenant("a")
    cache(pool, "a", ids(48), **owner)
    for other in CONTEXTS:
        assert hit(pool, "a", ids(49), **other) == (48 if other == owner else 0), other
    check_idle(pool)


def test_d21_text_and_bytes_are_one():
    pool = make_pool(30)
    pool.tenant("a")
    cache(pool, "a", ids(48), adapter="modèle", extra_key=b"s")
    assert hit(pool, "a", ids(49), adapter="modèle".encode(), extra_key="s") == 48


@pytest.mark.parametrize("key", [b"k", 5, -1, 2**100])
def test_d23_one_key_for_all_groups_and_scopes_would_be_too_few(key):
    """The lower face takes the scope and the group into the key, as the upper one does."""
    pool = make_pool(10, SPECS["full+window"])
    pool.tenant("a"), pool.tenant("b")
    page = pool.pages.allocate("a", 1, group=0)
    assert pool.pages.publish("a", page, [key], group=0) == [True]
    assert list(pool.pages.find("a", [key], group=0)) == list(page)
    assert list(pool.pages.find("a", [key], group=1)) == [pool.pages.MISS]
    assert list(pool.pages.find("b", [key], group=0)) == [pool.pages.MISS]
    with pytest.raises(kvalloc.InvalidArgument, match="group 1"):
        pool.pages.publish("a", page, [key], group=1)
    with pytest.raises(kvalloc.InvalidArgument, match=r"'b'|\"b\""):
        pool.pages.publish("b", page, [key], group=0)
    pool.pages.release(page)
    check_idle(pool)


def test_d23_an_int_and_its_bytes_are_two_keys():
    pool = make_pool(10)
    pool.tenant("a")
    page = pool.pages.allocate("a", 1)
    pool.pages.publish("a", page, [1])
    others = [b"1", b"\x01", (1).to_bytes(8, "little"), (1).to_bytes(16, "little"), (1).to_bytes(16, "big")]
    assert list(pool.pages.find("a", others)) == [pool.pages.MISS] * 5
    assert list(pool.pages.find("a", [1])) == list(page)


@pytest.mark.parametrize("spec", STATELESS)
def test_d24_a_hit_in_the_same_scope_and_none_in_another(spec):
    pool = make_pool(60, SPECS[spec])
    pool.tenant("org", publish=[])
    for name in ("u", "v"):
        pool.tenant(name, parent="org", publish=["org"])
    pool.tenant("alien")
    cache(pool, "u", ids(48))
    cache(pool, "u", ids(48, 1), share=[("org", 48)])
    assert hit(pool, "u", ids(49)) == 48
    assert [hit(pool, other, ids(49)) for other in ("v", "org", "alien")] == [0, 0, 0]
    # Shared under the org: all of the org's subtree finds it, and only where it asks for the org's.
    for name in ("u", "v"):
        assert hit(pool, name, ids(49, 1), share=[("org", 48)]) == 48
        assert hit(pool, name, ids(49, 1)) == 0
    assert hit(pool, "org", ids(49, 1)) == 48
    assert hit(pool, "alien", ids(49, 1)) == 0
    with unchanged(pool), pytest.raises(kvalloc.TenantError, match="level above"):
        pool.open("alien", ids(49, 1), share=[("org", 48)])
    check_idle(pool)


@pytest.mark.parametrize("secrets", [(None, None), (b"0" * 16, b"1" * 16), (b"0" * 16, b"0" * 16)])
def test_d24_keys_of_other_pools_are_other_keys_unless_they_share_a_secret(secrets):
    keys = []
    for secret in secrets:
        pool = make_pool(10, secret=secret, events=10)
        pool.tenant("a")
        cache(pool, "a", ids(16))
        keys.append(pool.events()[0]["key"])
    assert (keys[0] == keys[1]) == (secrets[0] is not None and secrets[0] == secrets[1])


@pytest.mark.parametrize("spec", STATELESS)
def test_d25_keys_that_collide_never_serve_the_others_tokens(spec):
    """With every key the same, a hit is what its tokens, parent and scope say."""
    pool = make_pool(60, SPECS[spec], force_collisions=True)
    pool.tenant("a"), pool.tenant("b")
    cache(pool, "a", ids(48))
    cache(pool, "b", ids(48, 1))
    assert hit(pool, "a", ids(49, 1)) == 0
    assert hit(pool, "b", ids(49)) == 0
    assert hit(pool, "a", ids(49, 2)) == 0
    assert hit(pool, "a", ids(49)) in (0, 48)
    # The same tokens behind other tokens.
    assert hit(pool, "a", np.concatenate([ids(16, 3), ids(48)])) == 0
    assert hit(pool, "a", ids(49)[16:]) == 0
    mixed = np.concatenate([ids(16), ids(49, 1)[16:]])
    assert hit(pool, "a", mixed) in (0, 16)
    check_idle(pool)


def test_d25_in_the_lower_face_colliding_keys_are_told_apart_by_scope():
    pool = make_pool(20, force_collisions=True)
    pool.tenant("a"), pool.tenant("b")
    page = pool.pages.allocate("a", 1)
    pool.pages.publish("a", page, [b"k"])
    assert list(pool.pages.find("b", [b"k"])) == [pool.pages.MISS]
    assert list(pool.pages.find("a", [b"other"])) == [pool.pages.MISS]


@pytest.mark.parametrize("spec", STATELESS)
@pytest.mark.parametrize("drafts", [1, 3, 16, 20])
@pytest.mark.parametrize("late", [False, True])
def test_c_rejected_drafts_leave_no_key(spec, drafts, late):
    """Speculation: drafts get slots, the rejected ones are cut, before or after the commit."""
    pool = make_pool(80, SPECS[spec])
    pool.tenant("a")
    seq = serve(pool, "a", ids(40))
    batch = pool.batch(1, 200)
    batch.add(seq)
    seq.extend([1])
    truth = [*ids(40), 1]
    for n in range(8):
        accepted = n % (drafts + 1)
        guess = list(ids(drafts, n + 3))
        seq.extend(guess)
        out = batch.step()
        assert out.num_tokens == 1 + drafts
        keep = len(truth) + accepted
        if late:
            batch.commit()
            seq.truncate(keep)
            seq.extend([n])
        else:
            seq.truncate(keep)
            batch.commit([n])
        truth += [*guess[:accepted], n]
        assert list(seq.tokens) == truth
        assert seq.num_written == len(truth) - 1
        check(pool)
    batch.step()
    batch.commit()
    seq.close()
    assert hit(pool, "a", [*truth, 5]) == len(truth) // TOKENS * TOKENS
    check_idle(pool)


def test_c_what_was_cut_while_a_step_was_outstanding_is_not_written_by_it():
    """The commit of the old step must not count for tokens that came after the cut."""
    pool = make_pool(30)
    pool.tenant("a")
    batch = pool.batch(1, 200)
    seq = pool.open("a", ids(64))
    batch.add(seq)
    batch.step()  # 64 tokens
    seq.truncate(20)
    seq.extend(ids(44, 5))
    batch.step()  # 44 others
    batch.commit()
    assert seq.num_written == 20  # the first step wrote 20 of these; the others are still to come
    assert hit(pool, "a", seq.tokens) == 16
    batch.commit()
    assert seq.num_written == 64
    assert hit(pool, "a", np.append(seq.tokens, 1)) == 64
    seq.close()
    check_idle(pool)


@pytest.mark.parametrize("depth", [2, 3, 8])
def test_c_asynchronous_steps_publish_what_is_written(depth):
    """Step n+1 before commit n: pages are found only once their tokens are written and known."""
    pool = make_pool(30)
    pool.tenant("a")
    batch = pool.batch(1, 200)
    seq = pool.open("a", ids(16))
    batch.add(seq)
    sampled = 0
    for n in range(40):
        batch.step()
        assert seq.num_slots == 16 + n
        if batch.outstanding == depth:
            batch.commit([sampled])
            sampled += 1
            assert seq.num_written == 15 + sampled
            assert seq.num_tokens == 16 + sampled
            assert hit(pool, "a", np.append(seq.tokens, 1)) == seq.num_written // TOKENS * TOKENS
    while batch.outstanding:
        batch.commit([sampled])
        sampled += 1
    assert list(seq.tokens[16:]) == list(range(40))
    seq.close()
    check_idle(pool)
    assert hit(pool, "a", [*ids(16), *range(40)]) == 48
