"""Pages in files, and sessions that come back from them."""

import errno
import os
import threading

import numpy as np
import pytest

import kvalloc
from kvalloc import KVSpec, LayerGroup, NumpyStore, Pool
from kvalloc.connector import Archive, Connector, FileConnector, PageKey

PAGE = 16


def key(number=0, group=0, parent=b"root"):
    return PageKey(group, parent, np.full(PAGE, number, dtype="<i4").tobytes())


def page(number=0, size=1000):
    return np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8)


@pytest.fixture
def files(tmp_path):
    with FileConnector(tmp_path / "pages", limit="1MiB") as connector:
        yield connector


def only_file(connector):
    (path,) = connector.directory.iterdir()
    return path


# -- files ---------------------------------------------------------------------------------------------------


def test_it_is_a_connector(files):
    assert isinstance(files, Connector)


def test_what_was_put_comes_back(files):
    out = np.zeros(1000, dtype=np.uint8)
    assert not files.get(key(), out)
    assert files.put(key(), page())
    assert key() in files
    assert files.get(key(), out)
    assert np.array_equal(out, page())
    assert (files.counts.put, files.counts.got, files.counts.missed) == (1, 1, 1)
    assert files.used == only_file(files).stat().st_size


def test_another_key_is_a_miss(files):
    files.put(key(1), page(1))
    out = np.zeros(1000, dtype=np.uint8)
    for other in (key(2), key(1, group=1), key(1, parent=b"other")):
        assert other not in files
        assert not files.get(other, out)


def test_d23_a_file_under_the_right_name_with_another_key_is_not_believed(files):
    files.put(key(1), page(1))
    path = only_file(files)
    path.rename(path.with_name(f"{key(2).name}.kv"))  # as if the digests had collided
    out = np.zeros(1000, dtype=np.uint8)
    assert not files.get(key(2), out)
    assert files.counts.damaged == 1


@pytest.mark.parametrize("at", [0, 9, 17, 30, 60, 90, 200, 1000])
def test_every_altered_byte_is_found(files, at):
    files.put(key(), page())
    path = only_file(files)
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)
    assert not files.get(key(), np.zeros(1000, dtype=np.uint8))
    assert files.counts.damaged == 1
    assert not path.exists(), "a damaged file is removed"
    assert files.used == 0
    assert files.put(key(), page())


@pytest.mark.parametrize("length", [0, 1, 20, 52, 60, 500, -1])
def test_a_truncated_or_longer_file_is_a_miss(files, length):
    files.put(key(), page())
    path = only_file(files)
    raw = path.read_bytes()
    path.write_bytes(raw[:length] if length >= 0 else raw + b"x")
    assert not files.get(key(), np.zeros(1000, dtype=np.uint8))
    assert (files.counts.damaged, files.counts.missed) == (1, 1)


def test_a_page_of_another_size_is_a_miss(files):
    files.put(key(), page(size=1000))
    assert not files.get(key(), np.zeros(999, dtype=np.uint8))


def test_the_limit_holds_and_the_least_recently_used_goes_first(tmp_path):
    one = FileConnector(tmp_path, limit=5000)
    for number in range(4):
        assert one.put(key(number), page(number))
    assert one.get(key(0), np.zeros(1000, dtype=np.uint8))
    one.put(key(4), page(4))
    assert one.used <= 5000
    assert key(0) in one
    assert key(4) in one
    assert key(1) not in one
    assert one.counts.evicted == 1
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == one.used


def test_a_page_larger_than_the_limit_is_refused_and_evicts_nothing(tmp_path):
    one = FileConnector(tmp_path, limit=2000)
    one.put(key(1), page(1))
    assert not one.put(key(2), page(2, size=3000))
    assert key(1) in one
    assert one.counts.refused == 1
    assert one.counts.evicted == 0


def test_a_restart_finds_what_was_there_and_trims_to_the_new_limit(tmp_path):
    with FileConnector(tmp_path, limit="1MiB") as one:
        for number in range(4):
            one.put(key(number), page(number))
            os.utime(tmp_path / f"{key(number).name}.kv", (number, number))
    with FileConnector(tmp_path, limit="1MiB") as again:
        assert len(again) == 4
        assert again.used == one.used
        assert again.get(key(2), np.zeros(1000, dtype=np.uint8))
    with FileConnector(tmp_path, limit=2500) as small:
        assert len(small) == 2
        assert key(2) in small
        assert key(3) in small


def test_foreign_files_are_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "abcdefgh").mkdir()
    with FileConnector(tmp_path, limit=1500) as one:
        for number in range(3):
            one.put(key(number), page(number))
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_unfinished_files_of_a_killed_writer_go(tmp_path):
    old, new = tmp_path / "abcdefgh.kv-part", tmp_path / "abcdefgi.kv-part"
    old.write_bytes(b"x")
    new.write_bytes(b"x")
    os.utime(old, (1, 1))
    FileConnector(tmp_path)
    assert not old.exists()
    assert new.exists()


@pytest.mark.parametrize(("number", "counted"), [(errno.ENOSPC, "refused"), (errno.EIO, "failed")])
def test_a_disk_that_is_full_or_broken(files, monkeypatch, number, counted):
    def broken(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "replace", broken)
    assert not files.put(key(), page())
    assert getattr(files.counts, counted) == 1
    assert files.used == 0
    assert not list(files.directory.iterdir()), "nothing half-written stays"
    monkeypatch.undo()
    assert files.put(key(), page())


def test_a_file_that_another_process_removed(files):
    files.put(key(), page())
    only_file(files).unlink()
    assert not files.get(key(), np.zeros(1000, dtype=np.uint8))
    assert files.used == 0


def test_threads(files):
    def work(seed):
        rng = np.random.default_rng(seed)
        out = np.zeros(1000, dtype=np.uint8)
        for number in rng.integers(0, 40, 150).tolist():
            files.put(key(number), page(number))
            if files.get(key(number), out):
                assert np.array_equal(out, page(number))

    files.limit = 20_000
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert files.used == sum(path.stat().st_size for path in files.directory.iterdir())
    assert files.counts.damaged == files.counts.failed == 0


def test_bad_arguments_and_closed(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(kvalloc.InvalidArgument, match="not a directory"):
        FileConnector(tmp_path / "file")
    for limit in (-1, "12XB", 1.5):
        with pytest.raises(kvalloc.InvalidArgument):
            FileConnector(tmp_path, limit=limit)
    one = FileConnector(tmp_path / "there")
    assert (tmp_path / "there").stat().st_mode & 0o077 == 0
    one.close()
    with pytest.raises(kvalloc.ClosedError):
        one.put(key(), page())
    assert "closed" in repr(one)


# -- sessions ------------------------------------------------------------------------------------------------


SPECS = {
    "page-major": KVSpec.uniform(layers=2, kv_heads=2, head_dim=8, dtype="float32"),
    "layer-major": KVSpec.uniform(layers=2, kv_heads=2, head_dim=8, dtype="float32", layout="layer_major"),
    "window": KVSpec.from_groups(
        [
            LayerGroup("full", "full", layers=1, kv_heads=2, k_dim=8, dtype="float32"),
            LayerGroup("window", "window", layers=1, kv_heads=2, k_dim=8, dtype="float32", window=40),
        ]
    ),
}


class Side:
    """A pool with a store whose K and V say which token they belong to."""

    def __init__(self, spec, connector, **options):
        self.pool = Pool(spec, "1MiB")
        self.tenant = self.pool.tenant("acme")
        self.store = NumpyStore(self.pool)
        for cls in range(len(spec.groups)):
            for part in self.store.page_parts(cls):
                part[:] = 0xFF  # NaN
        self.batch = self.pool.batch(4, 512)
        self.archive = Archive(self.store, connector, weights=options.pop("weights", "tiny@1"))

    def open(self, tokens, tenant="acme", **options):
        sequence = self.pool.open(tenant, tokens, **options)
        self.batch.add(sequence)
        return sequence

    def prefill(self):
        out = self.batch.step()
        tokens = []
        for row, sequence in enumerate(self.batch.rows):
            count = int(out.counts[row])
            tokens += sequence.tokens[sequence.num_slots - count : sequence.num_slots].tolist()
        self.positions = np.asarray(self.batch.positions)[: out.num_tokens].copy()
        for layer in range(2):
            values = np.array(tokens, dtype=np.float32)[:, None, None] + np.full(
                (1, 2, 8), layer / 4, np.float32
            )
            self.store.write(layer, values, values * 2, self.batch)
        self.batch.commit()
        return out.num_tokens

    def shown(self, sequence, count, layer=0, first=0):
        group, _ = self.store.place(layer)
        view = self.store.views(layer)
        table = sequence.block_table(group)
        return np.array([view.k[table[at // PAGE], at % PAGE, 0, 0] for at in range(first, count)])


@pytest.mark.parametrize("layout", ["page-major", "layer-major"])
def test_a_session_comes_back_in_another_process(tmp_path, layout):
    tokens = np.arange(1, 121, dtype=np.int32)
    with FileConnector(tmp_path) as connector:
        side = Side(SPECS[layout], connector)
        first = side.open(tokens)
        assert side.prefill() == 120
        assert side.archive.save(first) == 7
        assert side.archive.save(first) == 7
        assert connector.counts.put == 7, "what is there is not written again"
    with FileConnector(tmp_path) as connector:
        other = Side(SPECS[layout], connector)  # another secret, another pool
        again = other.open(tokens)
        assert again.cached_tokens == 0
        assert other.archive.load(other.batch, again) == 112
        assert again.num_written == 112
        for layer in range(2):
            assert np.array_equal(other.shown(again, 112, layer), tokens[:112] + layer / 4)
        assert other.prefill() == 8, "the rest is computed"
        assert np.array_equal(other.shown(again, 120), tokens)
        # It is published like anything else.
        assert other.pool.open("acme", tokens).cached_tokens == 112
        assert other.pool.audit().ok


def test_it_continues_behind_what_the_pool_still_has(tmp_path):
    tokens = np.arange(1, 121, dtype=np.int32)
    with FileConnector(tmp_path) as connector:
        side = Side(SPECS["page-major"], connector)
        first = side.open(tokens)
        side.prefill()
        side.archive.save(first)
        other = Side(SPECS["page-major"], connector)
        begun = other.open(tokens[:50])
        other.prefill()
        again = other.open(tokens)
        assert again.cached_tokens == 48
        assert other.archive.load(other.batch, again) == 64
        assert again.num_written == 112
        assert np.array_equal(other.shown(again, 112), tokens[:112])
        assert begun.num_written == 50


def test_a_damaged_page_ends_what_is_loaded(tmp_path):
    tokens = np.arange(1, 121, dtype=np.int32)
    with FileConnector(tmp_path) as connector:
        side = Side(SPECS["page-major"], connector)
        first = side.open(tokens)
        side.prefill()
        side.archive.save(first)
        fourth = next(
            keys
            for at, keys in enumerate(side.archive._keys(first, tokens, 7, None, None, 0, None))
            if at == 3
        )
        path = tmp_path / f"{fourth[0].name}.kv"
        path.write_bytes(path.read_bytes()[:-1])
        other = Side(SPECS["page-major"], connector)
        again = other.open(tokens)
        assert other.archive.load(other.batch, again) == 48
        assert other.prefill() == 72
        assert np.array_equal(other.shown(again, 120), tokens)


def test_d24_other_scopes_weights_adapters_and_keys_get_nothing(tmp_path):
    tokens = np.arange(1, 121, dtype=np.int32)
    with FileConnector(tmp_path) as connector:
        side = Side(SPECS["page-major"], connector)
        first = side.open(tokens)
        side.prefill()
        side.archive.save(first)
        later = Side(SPECS["page-major"], connector, weights="tiny@2")
        assert later.archive.load(later.batch, later.open(tokens)) == 0
        other = Side(SPECS["page-major"], connector)
        other.pool.tenant("beta")
        loads = [
            other.archive.load(other.batch, other.open(tokens, "beta")),
            other.archive.load(other.batch, other.open(tokens, adapter="x"), adapter="x"),
            other.archive.load(other.batch, other.open(tokens, extra_key="x"), extra_key="x"),
        ]
        assert loads == [0, 0, 0]
        assert other.archive.load(other.batch, other.open(tokens)) == 112


def test_a_shared_range_comes_back_for_another_tenant_and_the_rest_does_not(tmp_path):
    tokens = np.arange(1, 121, dtype=np.int32)
    share = [("org", 64)]
    with FileConnector(tmp_path) as connector:
        sides = [Side(SPECS["page-major"], connector) for _ in range(2)]
        for side in sides:
            side.pool.tenant("org")
            for name in ("a", "b"):
                side.pool.tenant(name, parent="org", publish=["org"])
        first = sides[0].open(tokens, "a", share=share)
        sides[0].prefill()
        sides[0].archive.save(first, share=share)
        again = sides[1].open(tokens, "b", share=share)
        assert sides[1].archive.load(sides[1].batch, again, share=share) == 64
        own = sides[1].open(tokens, "a", share=share)
        assert own.cached_tokens == 64, "they are the scope's now"
        assert sides[1].archive.load(sides[1].batch, own, share=share) == 48, "the rest was a's all along"
        assert sides[1].pool.audit().ok


def test_a_window_group_comes_back_if_it_was_saved_in_time(tmp_path):
    tokens = np.arange(1, 121, dtype=np.int32)
    with FileConnector(tmp_path) as connector:
        side = Side(SPECS["window"], connector)
        first = side.open(tokens)
        for end in range(16, 121, 16):
            side.batch.step(np.array([16], dtype=np.int32))
            ids = tokens[end - 16 : end].astype(np.float32)
            for layer in range(2):
                values = np.broadcast_to(ids[:, None, None], (16, 2, 8)).copy()
                side.store.write(layer, values, values, side.batch)
            side.batch.commit()
            side.archive.save(first)
        other = Side(SPECS["window"], connector)
        again = other.open(tokens)
        assert other.archive.load(other.batch, again) == 112
        assert np.array_equal(other.shown(again, 112, 0), tokens[:112])
        assert np.array_equal(other.shown(again, 112, 1, first=80), tokens[80:112])
        late = Side(SPECS["window"], FileConnector(tmp_path / "late"))
        sequence = late.open(tokens)
        late.prefill()
        late.archive.save(sequence)
        other = Side(SPECS["window"], late.archive.connector)
        assert other.archive.load(other.batch, other.open(tokens)) == 0, "the window's first pages had gone"


def test_where_room_ends_loading_ends_and_goes_on_later(tmp_path):
    tokens = np.arange(1, 121, dtype=np.int32)
    with FileConnector(tmp_path) as connector:
        side = Side(SPECS["page-major"], connector)
        first = side.open(tokens)
        side.prefill()
        side.archive.save(first)
        other = Side(SPECS["page-major"], connector)
        again = other.open(tokens)
        for pages in (0, 3):
            other.tenant.set(limit=pages * SPECS["page-major"].page_bytes())
            assert other.archive.load(other.batch, again) == pages * PAGE
            assert again.num_written == pages * PAGE
            assert other.pool.audit().ok
        other.tenant.set(limit=None)
        assert other.archive.load(other.batch, again) == 64
        assert np.array_equal(other.shown(again, 112), tokens[:112])


def test_a_failing_write_leaves_nothing_published(tmp_path):
    tokens = np.arange(1, 121, dtype=np.int32)
    with FileConnector(tmp_path) as connector:
        side = Side(SPECS["page-major"], connector)
        first = side.open(tokens)
        side.prefill()
        side.archive.save(first)
        other = Side(SPECS["page-major"], connector)
        again = other.open(tokens)
        other.archive.store = type(
            "Broken",
            (),
            {
                "__getattr__": lambda _, name: getattr(other.store, name),
                "write_pages": lambda *_: (_ for _ in ()).throw(RuntimeError("copy failed")),
            },
        )()
        with pytest.raises(RuntimeError, match="copy failed"):
            other.archive.load(other.batch, again)
        assert other.pool.open("acme", tokens).cached_tokens == 0
        assert other.batch.outstanding == 0
        assert other.batch.rows == []
        other.batch.add(again)
        assert other.prefill() == 120
        assert np.array_equal(other.shown(again, 120), tokens)
        assert other.pool.audit().ok


def test_what_an_archive_refuses(tmp_path):
    connector = FileConnector(tmp_path)
    state = KVSpec.from_groups([LayerGroup("s", "state", layers=1, state_bytes=512)])
    with pytest.raises(kvalloc.SpecError, match="fixed state"):
        Archive(NumpyStore(Pool(state, "1MiB")), connector, weights="x")
    side, other = (Side(SPECS["page-major"], connector) for _ in range(2))
    with pytest.raises(kvalloc.InvalidArgument, match="weights"):
        Archive(side.store, connector, weights="")
    for part in (repr(side.archive.weights), repr(side.store), repr(connector)):
        assert part in repr(side.archive)
    loose = side.pool.open("acme", range(40))
    with pytest.raises(kvalloc.InvalidArgument, match="no row"):
        side.archive.load(side.batch, loose)
    with pytest.raises(kvalloc.WrongPool):
        side.archive.load(other.batch, loose)
    foreign = other.open(range(40))
    other.prefill()
    with pytest.raises(kvalloc.WrongPool):
        side.archive.save(foreign)
    side.batch.add(loose)
    side.batch.step()
    with pytest.raises(kvalloc.InvalidArgument, match="outstanding"):
        side.archive.load(side.batch, loose)


def test_only_what_is_in_place_and_known_is_saved(tmp_path, monkeypatch):
    connector = FileConnector(tmp_path)
    side = Side(SPECS["page-major"], connector)
    first = side.open(range(1, 41))
    side.prefill()
    for _ in range(60):  # nobody says which tokens these are
        side.batch.step()
        side.batch.commit()
    assert (first.num_tokens, first.num_written, first.num_told) == (100, 100, 2 * PAGE)
    assert side.archive.save(first) == 2, "pages of tokens that nobody told are not kept under token 0"
    side.batch.remove(first)
    first.close()

    second = side.open(range(101, 181))
    side.prefill()
    read = side.store.read_pages

    def meanwhile(cls, frames):
        """Somebody else takes the pages away between the look at the table and the copy."""
        side.pool.suspend(second, mode="recompute", batch=side.batch).commit()
        return read(cls, frames)

    monkeypatch.setattr(side.store, "read_pages", meanwhile)
    assert side.archive.save(second) == 0
    with pytest.raises(kvalloc.InvalidArgument, match="suspended"):
        side.archive.save(second)
    assert connector.counts.put == 2


@pytest.mark.parametrize("out", [np.zeros(500, np.uint16), np.zeros(2000, np.uint8)[::2]])
def test_a_page_comes_into_contiguous_bytes_only(files, out):
    files.put(key(), page())
    with pytest.raises(kvalloc.InvalidArgument, match="contiguous"):
        files.get(key(), out)
    assert key() in files
