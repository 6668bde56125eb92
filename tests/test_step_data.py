"""Steps as plain data: what is refused before a rank that keeps no books writes or reads a page."""

import dataclasses
import pickle
import struct
import zlib

import numpy as np
import pytest

import kvalloc

TOKENS = 40


def spec_of(page_tokens=8, dtype="float32", layout="page_major"):
    return kvalloc.KVSpec.uniform(
        layers=1, kv_heads=1, head_dim=16, dtype=dtype, page_tokens=page_tokens, layout=layout
    )


@pytest.fixture
def batch():
    pool = kvalloc.Pool(spec_of(), "1MiB")
    batch, acme = pool.batch(2, 64), pool.tenant("acme")
    for size in (TOKENS - 3, 3):
        batch.add(pool.open(acme, range(size)))
    batch.step()
    return batch


def told(step, **other):
    """As another rank has it, with other arrays."""
    return kvalloc.StepData.from_bytes(dataclasses.replace(step, **other).to_bytes())


def attend(store, step):
    q = np.ones((TOKENS, 1, 16), np.float32)
    return store.attend(0, q, q, q, step)


@pytest.mark.parametrize(
    "other", [{"page_tokens": 16}, {"page_tokens": 4}, {"dtype": "float16"}, {"layout": "layer_major"}]
)
def test_a_step_of_another_spec_is_refused(batch, other):
    """Pages that are larger than the sender's would take every slot without a word."""
    step = told(kvalloc.StepData.of(batch), copies=np.array([[0, 1, 2]], np.int32))
    with kvalloc.NumpyStore(kvalloc.Pool(spec_of(**other), "1MiB")) as store:
        with pytest.raises(kvalloc.InvalidArgument, match=r"another spec than the store's <KVSpec"):
            attend(store, step)
        assert not any(part.any() for part in store.page_parts(0))
        for part in store.page_parts(0):
            part[1] = 1
        with pytest.raises(kvalloc.InvalidArgument, match=r"another spec than the store's <KVSpec"):
            store.copy(step)
        assert not any(part[2].any() for part in store.page_parts(0))
    with kvalloc.NumpyStore(kvalloc.Pool(spec_of(), "1MiB")) as store:
        assert attend(store, step).shape == (TOKENS, 1, 16)


def test_equal_specs_have_one_digest_and_others_another():
    spec = spec_of()
    assert pickle.loads(pickle.dumps(spec)).digest == spec.digest == spec_of().digest
    assert len(spec.digest) == 16
    others = [
        spec_of(4),
        spec_of(dtype="float16"),
        spec_of(layout="layer_major"),
        spec.replace(small_dtype="int8"),
    ]
    assert len({each.digest for each in (spec, *others)}) == 5


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("seq_lens", [0, 0]),
        ("seq_lens", [TOKENS - 3, 2]),
        ("seq_lens", [-1, 3]),
        ("query_start_loc", [1, TOKENS - 3, TOKENS]),
        ("query_start_loc", [0, TOKENS + 1, TOKENS]),
        ("query_start_loc", [0, TOKENS - 3, TOKENS - 1]),
        ("query_start_loc", [0, -(2**31), TOKENS]),
        ("query_start_loc", [0, 2**31 - 1, -(2**31)]),
    ],
)
def test_numbers_that_no_step_has_are_refused_as_bytes_and_in_a_batch(batch, name, values):
    step = kvalloc.StepData.of(batch)
    with pytest.raises(kvalloc.InvalidArgument, match=r"no step of 40 tokens in 2 rows"):
        told(step, **{name: np.array(values, np.int32)})
    with kvalloc.NumpyStore(batch.pool) as store:
        getattr(batch, name)[: len(values)] = values
        with pytest.raises(kvalloc.InvalidArgument, match="don't show its step of 40 tokens"):
            attend(store, batch)


def test_a_table_that_is_too_narrow_and_pages_that_are_not_there_are_refused(batch):
    step = kvalloc.StepData.of(batch)
    table = step.block_table()
    with kvalloc.NumpyStore(kvalloc.Pool(spec_of(), "1MiB")) as store:
        with pytest.raises(kvalloc.InvalidArgument, match=r"2 pages a row.*5 of 8 tokens"):
            attend(store, told(step, block_tables=(table[:, :2].copy(),)))
        with pytest.raises(kvalloc.InvalidArgument, match="no frame that can be read"):
            attend(store, told(step, block_tables=(table + 2**20,)))
        with pytest.raises(kvalloc.InvalidArgument, match="slot_mapping of group 0 names frame"):
            attend(store, told(step, slot_mappings=(step.slot_mapping() + 2**40,)))
        copies = np.array([[0, 1, 2**20]], np.int32)
        with pytest.raises(kvalloc.InvalidArgument):
            store.copy(told(step, copies=copies))


@pytest.mark.parametrize("groups", [0, 33, 2**31])
def test_layer_groups_that_no_spec_has_are_refused(groups):
    body = struct.pack("<16s6I", b"", 0, 0, 0, groups, 0, 0)
    with pytest.raises(kvalloc.InvalidArgument, match="1 to 32 are possible"):
        kvalloc.StepData.from_bytes(b"KVSTEP01" + struct.pack("<I", zlib.crc32(body)) + body)


@pytest.mark.parametrize("wrong", [None, 7, "KVSTEP01", bytearray(64), np.zeros(64, np.uint8)])
def test_what_is_no_batch_and_no_bytes_is_refused(wrong):
    with pytest.raises(kvalloc.InvalidArgument, match=r"batch must be a kvalloc\.Batch, not"):
        kvalloc.StepData.of(wrong)
    with pytest.raises(kvalloc.InvalidArgument, match=r"read from bytes, not \w+"):
        kvalloc.StepData.from_bytes(wrong)
