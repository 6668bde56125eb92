"""What a KvallocCache does besides giving the right tokens: prefixes, padding, quota, going back, the end."""

import copy
import gc

import numpy as np
import pytest

import kvalloc
from generating import cache_name, generated
from tinymodels import prompts, tiny

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvalloc.integrations.transformers import KvallocCache  # noqa: E402 - needs both

PAGE = 16


@pytest.fixture
def llama(model_of):
    return model_of("llama")


@pytest.fixture(params=["gathered", "paged"])
def either(request, paged):
    """A model in either mode, with what plain attention computes: (model, mode)."""

    def switch(model):
        return paged(model) if request.param == "paged" else model

    return switch


def pool_for(model, device_bytes="4MiB", **kwargs):
    spec = kvalloc.KVSpec.from_hf_config(model.config.get_text_config(decoder=True), PAGE, "float32")
    return kvalloc.Pool(spec, device_bytes, **kwargs)


def forward(model, ids, cache, **kwargs):
    with torch.no_grad():
        return model(input_ids=ids, **{cache_name(model): cache}, **kwargs).logits


def poison(cache):
    """Nobody may read what nobody has written."""
    for layer in range(len(cache.pool.spec.layer_map)):
        for tensor in cache.store.views(layer)[:2]:
            if tensor is not None:
                tensor.fill_(float("nan"))


# -- prefixes ------------------------------------------------------------------------------------------------


def test_caches_of_a_pool_share_prefixes_of_one_model(llama):
    ids, mask = prompts(70)
    pool = pool_for(llama)
    pool.tenant("acme")
    first, second = (KvallocCache.for_model(llama, pool=pool, tenant="acme") for _ in range(2))
    assert first.store is second.store
    expected = generated(llama, ids, mask, first, max_new_tokens=8)
    assert torch.equal(generated(llama, ids, mask, second, max_new_tokens=8), expected)
    assert (first.cached_tokens, second.cached_tokens) == (0, 64)
    # 4 full pages of the prompt once, and what follows for each.
    assert pool.held == (4 + 2) * pool.spec.page_bytes()


def test_another_model_with_the_same_geometry_hits_nothing(llama, model_of):
    ids, mask = prompts(70)
    pool = pool_for(llama)
    pool.tenant("acme")
    other = model_of("llama", seed=3)
    generated(llama, ids, mask, KvallocCache.for_model(llama, pool=pool, tenant="acme"), max_new_tokens=8)
    cache = KvallocCache.for_model(other, pool=pool, tenant="acme")
    expected = generated(other, ids, mask, max_new_tokens=8)
    assert torch.equal(generated(other, ids, mask, cache, max_new_tokens=8), expected)
    assert cache.cached_tokens == 0


def test_the_same_weights_loaded_twice_share_under_a_name(llama):
    ids, mask = prompts(70)
    pool = pool_for(llama)
    pool.tenant("acme")
    twin = tiny("llama")
    for model, found in ((llama, 0), (twin, 64)):
        cache = KvallocCache.for_model(model, pool=pool, tenant="acme", extra_key="llama-tiny")
        generated(model, ids, mask, cache, max_new_tokens=8)
        assert cache.cached_tokens == found


def test_tenants_share_what_their_org_shares(llama):
    ids, mask = prompts(70)
    pool = pool_for(llama)
    pool.tenant("org")
    for name in ("acme", "beta", "gamma"):
        pool.tenant(name, parent="org", publish={"org": "1MiB"})
    found = {}
    for name, share in (("acme", [("org", 48)]), ("beta", [("org", 48)]), ("gamma", [])):
        cache = KvallocCache.for_model(llama, pool=pool, tenant=name, share=share)
        generated(llama, ids, mask, cache, max_new_tokens=8)
        found[name] = cache.cached_tokens
        cache.close()
    assert found == {"acme": 0, "beta": 48, "gamma": 0}


def test_an_answer_is_found_by_the_next_turn(llama, either):
    model = llama
    ids, _ = prompts(41)
    with KvallocCache.for_model(model, device_bytes="4MiB") as cache:
        first = cache.generate(ids, max_new_tokens=30)
        turn = torch.cat((first, prompts(9, seed=9)[0]), dim=1)
        expected = generated(model, turn, torch.ones_like(turn), max_new_tokens=10)
        either(model)
        assert torch.equal(cache.generate(turn, max_new_tokens=10, do_sample=False), expected)
        # 41 + 30 tokens, the last of them never went in: 70 have KV, 4 pages are full.
        assert cache.cached_tokens == 64


def test_padding_is_not_stored_and_does_not_matter_to_a_prefix(llama, either):
    ids, mask = prompts(70)
    plain = generated(llama, ids, mask, max_new_tokens=8)
    wide = torch.cat((torch.zeros(1, 13, dtype=torch.int64), ids), dim=1)
    wide_mask = torch.cat((torch.zeros(1, 13, dtype=torch.int64), mask), dim=1)
    model = either(llama)
    with KvallocCache.for_model(model, device_bytes="4MiB") as cache:
        assert torch.equal(generated(model, ids, mask, cache, max_new_tokens=8), plain)
        cache.reset()
        padded = generated(model, wide, wide_mask, cache, max_new_tokens=8)
        assert torch.equal(padded[:, 13:], plain)
        assert cache.cached_tokens == 64
        (row,) = cache._rows.rows
        assert (row.padding, row.length, cache.get_seq_length()) == (13, 77, 90)
        assert cache.pool.held == 5 * cache.pool.spec.page_bytes()


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3"])
def test_rows_of_a_batch_that_find_unlike_much(family, model_of, either):
    model = model_of(family)
    ids, mask = prompts(80, 50, 66)
    expected = generated(model, ids, mask, max_new_tokens=8)
    either(model)
    with KvallocCache.for_model(model, device_bytes="4MiB") as cache:
        poison(cache)
        # Only the first row's prompt is known in full, of the third one page, of the second nothing.
        generated(model, ids[:1], mask[:1], cache, max_new_tokens=1)
        cache.reset()
        third = ids[2:, 80 - 66 : 80 - 66 + 20]
        generated(model, third, torch.ones_like(third), cache, max_new_tokens=1)
        assert torch.equal(cache.generate(ids, mask, max_new_tokens=8, do_sample=False), expected)
        assert [row.sequence.cached_tokens for row in cache._rows.rows] == [64, 0, 16]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_all_outputs_are_computed_for_those_who_want_them(family, model_of, either):
    model = model_of(family)
    ids, _ = prompts(70)
    expected = forward(model, ids, None)
    either(model)

    def close(logits, wanted):
        return (logits - wanted).norm() < 1e-4 * wanted.norm()

    with KvallocCache.for_model(model, device_bytes="4MiB") as cache:
        assert close(forward(model, ids, cache), expected)
        cache.reset()
        assert close(forward(model, ids, cache), expected)
        assert cache.cached_tokens == 0
        cache.reset()
        assert close(forward(model, ids, cache, logits_to_keep=20), expected[:, -20:])
        # 64 were there, and 20 outputs of 70 were wanted. A window that is behind those can't be taken over.
        assert cache.cached_tokens == (50 if family == "llama" else 0)
        cache.reset()
        assert close(forward(model, ids, cache, logits_to_keep=1), expected[:, -1:])
        assert cache.cached_tokens == 64
        assert cache.begin(ids) == 64
        cache.crop(0)
        assert close(forward(model, ids, cache), expected)
        assert cache.pool.audit().ok


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v2"])
def test_chunks_of_prompts_that_are_there(family, model_of, either):
    model = model_of(family)
    ids, mask = prompts(70, 40)
    expected = generated(model, ids, mask, max_new_tokens=8)
    either(model)
    with KvallocCache.for_model(model, device_bytes="4MiB") as cache:
        poison(cache)
        for found in (0, 64 + 32):
            answer = cache.generate(ids, mask, max_new_tokens=8, do_sample=False, prefill_chunk_size=11)
            assert torch.equal(answer, expected)
            assert cache.cached_tokens == found


def test_kv_that_ids_do_not_tell_is_not_published(llama, either):
    ids, mask = prompts(70)
    embeds = llama.get_input_embeddings()(ids).detach()
    expected = generated(llama, ids, mask, max_new_tokens=8)
    model = either(llama)
    with KvallocCache.for_model(model, device_bytes="4MiB") as cache:
        answer = model.generate(
            inputs_embeds=embeds, max_new_tokens=8, do_sample=False, **{cache_name(model): cache}
        )
        assert torch.equal(answer, expected[:, 70:])
        cache.reset()
        assert cache.pool.cached == 0
        # Padding, and positions that count it: their KV is another than that of the same ids elsewhere.
        padded, padded_mask = prompts(70, 60)
        forward(model, padded, cache, attention_mask=padded_mask)
        assert [row.private for row in cache._rows.rows] == [False, True]
        cache.reset()
        assert cache.pool.cached == 4 * cache.pool.spec.page_bytes()


@pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")
def test_the_older_name_of_the_argument(llama, either):
    ids, mask = prompts(40, 30)
    expected = generated(llama, ids, mask, max_new_tokens=8)
    model = either(llama)
    with KvallocCache.for_model(model, device_bytes="4MiB") as cache:
        answer = model.generate(
            ids, attention_mask=mask, past_key_values=cache, max_new_tokens=8, do_sample=False
        )
        assert torch.equal(answer, expected)
        assert cache.get_seq_length() == 47
        cache.reset()
        with torch.no_grad():  # positions by name or not, the cache finds out what it is given
            model(ids, mask, past_key_values=cache)
        assert cache.get_seq_length() == 40


# -- begin and reserve ---------------------------------------------------------------------------------------


def test_begin_tells_what_is_there_and_holds_the_caller_to_it(llama):
    ids, mask = prompts(70, 40)
    with KvallocCache.for_model(llama, device_bytes="4MiB") as cache:
        assert cache.begin(ids, mask) == 0
        cache.generate(ids, mask, max_new_tokens=2)
        assert cache.begin(ids, mask) == 64 + 32
        other = ids.clone()
        other[1, 50] += 1
        with pytest.raises(kvalloc.InvalidArgument, match=r"row 1: token 20 is \d+, and the cache was begun"):
            generated(llama, other, mask, cache, max_new_tokens=2)
        with pytest.raises(kvalloc.InvalidArgument, match="begun with token ids"):
            llama.generate(
                inputs_embeds=llama.get_input_embeddings()(ids),
                attention_mask=mask,
                max_new_tokens=2,
                **{cache_name(llama): cache},
            )
        expected = generated(llama, ids, mask, max_new_tokens=5)
        assert torch.equal(generated(llama, ids, mask, cache, max_new_tokens=5), expected)


def test_begun_rows_become_beams(llama, either):
    ids, mask = prompts(40, 25)
    expected = generated(llama, ids, mask, max_new_tokens=8, num_beams=3)
    model = either(llama)
    with KvallocCache.for_model(model, device_bytes="4MiB") as cache:
        for found in (0, 32 + 16):
            answer = cache.generate(ids, mask, max_new_tokens=8, num_beams=3, do_sample=False)
            assert torch.equal(answer, expected)
            assert cache.cached_tokens == found


def test_reserve_answers_before_anything_runs(llama):
    ids, _ = prompts(70)
    with KvallocCache.for_model(llama, device_bytes="128KiB") as cache:  # nine pages
        with pytest.raises(kvalloc.AdmissionRefused) as caught:
            cache.generate(ids, max_new_tokens=200, reserve=True)
        assert caught.value.asked > caught.value.room
        assert cache.pool.held == 0
        assert cache.generate(ids, max_new_tokens=40, reserve=True).shape == (1, 110)
        with pytest.raises(kvalloc.InvalidArgument, match="max_new_tokens"):
            cache.generate(ids, reserve=True)
        with pytest.raises(kvalloc.InvalidArgument, match="without beams"):
            cache.generate(ids, max_new_tokens=8, num_beams=2, reserve=True)


def test_padding_without_a_mask_is_refused(llama):
    ids, _ = prompts(20, 12)
    model = tiny("llama", pad_token_id=0, eos_token_id=5)
    with (
        KvallocCache.for_model(model, device_bytes="4MiB") as cache,
        pytest.raises(kvalloc.InvalidArgument, match="padding token 0: pass attention_mask"),
    ):
        cache.generate(ids)


# -- quota ---------------------------------------------------------------------------------------------------


def test_two_caches_under_one_limit(llama, either):
    ids, mask = prompts(70)
    expected = generated(llama, ids, mask, max_new_tokens=8)
    model = either(llama)
    pool = pool_for(model)
    page = pool.spec.page_bytes()
    pool.tenant("acme", limit=7 * page)
    other = KvallocCache.for_model(model, pool=pool, tenant="acme")
    generated(model, prompts(60, seed=4)[0], None, other, max_new_tokens=4)  # four pages
    cache = KvallocCache.for_model(model, pool=pool, tenant="acme")
    held = pool.held
    assert held == 4 * page
    with pytest.raises(kvalloc.OutOfPages, match=r"no room for the 70 new tokens of 1 rows.*acme") as caught:
        generated(model, ids, mask, cache, max_new_tokens=8)
    assert caught.value.why == "limit"
    assert caught.value.tenant == "acme"
    assert caught.value.asked > caught.value.room
    assert isinstance(caught.value, MemoryError)
    assert pool.held == held
    assert pool.audit().ok
    assert len(cache._rows) == 0
    other.close()
    assert torch.equal(generated(model, ids, mask, cache, max_new_tokens=8), expected)


def test_running_out_on_the_way_leaves_the_cache_usable(llama, either):
    ids, mask = prompts(40, 40)
    expected = generated(llama, ids, mask, max_new_tokens=40)
    model = either(llama)
    pool = pool_for(model)
    tenant = pool.tenant("acme", limit=8 * pool.spec.page_bytes())
    cache = KvallocCache.for_model(model, pool=pool, tenant="acme")
    with pytest.raises(kvalloc.OutOfPages, match="The cache is as it was before this forward"):
        generated(model, ids, mask, cache, max_new_tokens=40)
    columns = cache.get_seq_length()
    assert columns == 64
    assert pool.held == 8 * pool.spec.page_bytes()
    assert pool.audit().ok
    tenant.set(limit=None)
    rest = generated(
        model, expected[:, : columns + 1], None, cache, max_new_tokens=expected.shape[1] - columns - 1
    )
    assert torch.equal(rest, expected)


def test_a_forward_that_fails_is_undone(llama, either):
    ids, mask = prompts(40, 25)
    expected = generated(llama, ids, mask, max_new_tokens=8)
    model = either(llama)

    class BrokenError(Exception):
        pass

    def fail(*_):
        raise BrokenError

    def breaks(layer, *args, **kwargs):
        hook = model.model.layers[layer].mlp.register_forward_hook(fail)
        with pytest.raises(BrokenError):
            generated(model, *args, cache, max_new_tokens=4)
        hook.remove()

    with KvallocCache.for_model(model, device_bytes="4MiB") as cache:
        for layer in (0, 2):
            breaks(layer, ids, mask)
            assert cache.get_seq_length() == cache.pool.held == cache.pool.cached == 0
        generated(model, ids, mask, cache, max_new_tokens=4)
        held = cache.pool.held
        breaks(1, expected[:, :44], torch.cat((mask, torch.ones(2, 4, dtype=mask.dtype)), dim=1))
        assert (cache.get_seq_length(), cache.pool.held) == (43, held)
        full = torch.cat((mask, torch.ones(2, 4, dtype=mask.dtype)), dim=1)
        assert torch.equal(generated(model, expected[:, :44], full, cache, max_new_tokens=4), expected)
        assert cache.pool.audit().ok


# -- going back, and rows ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "deepseek_v2"])
def test_crop_and_go_on(family, model_of, either):
    model = model_of(family)
    ids, mask = prompts(38, 23)
    expected = generated(model, ids, mask, max_new_tokens=42)
    full = torch.cat((mask, torch.ones(2, 42, dtype=mask.dtype)), dim=1)
    either(model)

    def go_on():
        columns = max(cache.get_seq_length() + 1, 38)
        shown, left = full[:, :columns], 80 - columns
        assert torch.equal(
            generated(model, expected[:, :columns], shown, cache, max_new_tokens=left), expected
        )

    with KvallocCache.for_model(model, device_bytes="4MiB") as cache:
        generated(model, ids, mask, cache, max_new_tokens=42)
        assert cache.get_seq_length() == 79
        for back in (-1, -16, 40, -20):  # above 0: what stays
            cache.crop(back)
            assert cache.get_seq_length() == (79 + back if back < 0 else back)
            go_on()
        cache.crop(0)
        assert cache.get_seq_length() == 79
        with pytest.raises(kvalloc.InvalidArgument, match="the cache has 79"):
            cache.crop(-80)
        assert cache.get_seq_length() == 79
        cache.crop(12)  # within the padding of the second row
        assert [row.sequence is None for row in cache._rows.rows] == [False, True]
        go_on()
        cache.crop(-79)
        assert cache.pool.held == 0
        assert cache.pool.audit().ok


def test_a_window_that_moved_on_can_not_go_back(model_of):
    model = model_of("mistral")
    ids, mask = prompts(200)
    expected = generated(model, ids, mask, max_new_tokens=12)
    with KvallocCache.for_model(model, device_bytes="4MiB") as cache:
        generated(model, ids, mask, cache, max_new_tokens=2)
        pages = cache._rows.rows[0].sequence.block_table().tolist()
        with pytest.raises(
            kvalloc.InvalidArgument, match=r"can't go back from 201 tokens to 101; the window of 24"
        ):
            cache.crop(-100)
        assert cache.get_seq_length() == 201
        assert cache._rows.rows[0].sequence.block_table().tolist() == pages
        cache.crop(-1)
        assert torch.equal(generated(model, expected[:, :201], None, cache, max_new_tokens=11), expected)


def test_rows_are_selected_repeated_and_reordered(llama, either):
    ids, mask = prompts(40, 25, 33)
    answers = generated(llama, ids, mask, max_new_tokens=20)
    full = torch.cat((mask, torch.ones(3, 20, dtype=mask.dtype)), dim=1)
    model = either(llama)

    def go_on(rows):
        longer, shown = answers[rows, :51], full[rows, :51]
        assert torch.equal(generated(model, longer, shown, cache, max_new_tokens=9), answers[rows])

    with KvallocCache.for_model(model, device_bytes="4MiB") as cache:
        generated(model, ids, mask, cache, max_new_tokens=11)
        cache.reorder_cache(torch.tensor([2, 0, 0]))
        assert cache.batch_size == 3
        go_on([2, 0, 0])
        cache.crop(-9)
        cache.batch_select_indices(torch.tensor([0, 2]))
        go_on([2, 0])
        cache.crop(-9)
        cache.batch_select_indices(torch.tensor([False, True]))
        go_on([0])
        cache.crop(-9)
        cache.batch_repeat_interleave(3)
        pages = {int(page) for row in cache._rows.rows for page in row.sequence.pages()}
        assert len(pages) == 4  # 50 tokens, once for all three
        go_on([0, 0, 0])
        with pytest.raises(kvalloc.InvalidArgument, match="the cache has rows 0 to 2"):
            cache.reorder_cache(torch.tensor([0, 3, 1]))
        with pytest.raises(kvalloc.InvalidArgument, match="the forward has 2 rows, the cache 3"):
            forward(model, ids[:2, :1], cache)
        assert cache.pool.audit().ok
        cache.reset()
        assert cache.pool.held == 0


def test_a_copy_goes_on_by_itself(llama, either):
    ids, mask = prompts(40, 25)
    expected = generated(llama, ids, mask, max_new_tokens=20)
    model = either(llama)
    with KvallocCache.for_model(model, device_bytes="4MiB") as cache:
        generated(model, ids, mask, cache, max_new_tokens=11)
        held = cache.pool.held
        other = copy.deepcopy(cache)
        assert cache.pool.held == held
        full = torch.cat((mask, torch.ones(2, 11, dtype=mask.dtype)), dim=1)
        strange = expected[:, :51].clone()
        strange[:, 50] = (strange[:, 50] + 1) % 97
        generated(model, strange, full, other, max_new_tokens=9)
        assert torch.equal(generated(model, expected[:, :51], full, cache, max_new_tokens=9), expected)
        other.close()
        assert torch.equal(
            cache.generate(expected[:, :51], full, max_new_tokens=9, do_sample=False), expected
        )


def test_another_batch_size_after_reset(llama):
    with KvallocCache.for_model(llama, device_bytes="4MiB") as cache:
        for lengths in ((20,), (30, 21, 9, 40, 12, 5, 33, 17, 8, 26), (40, 18)):
            ids, mask = prompts(*lengths)
            expected = generated(llama, ids, mask, max_new_tokens=6)
            assert torch.equal(cache.generate(ids, mask, max_new_tokens=6, do_sample=False), expected)
            assert cache.batch_size == len(lengths)


def test_sequences_longer_than_the_first_arrays(llama):
    """The arrays of a step grow with what they have to show."""
    model = tiny("llama", max_position_embeddings=4096)
    ids, mask = prompts(1500)
    expected = generated(model, ids, mask, max_new_tokens=3)
    with KvallocCache.for_model(model, device_bytes="4MiB") as cache:
        small, small_mask = prompts(30)
        cache.generate(small, small_mask, max_new_tokens=2)
        assert torch.equal(cache.generate(ids, mask, max_new_tokens=3, do_sample=False), expected)


# -- the end -------------------------------------------------------------------------------------------------


def test_a_dropped_cache_gives_its_pages_back_at_once(llama):
    ids, mask = prompts(40, 25)
    pool = pool_for(llama)
    pool.tenant("acme")
    gc.collect()
    gc.disable()
    try:
        cache = KvallocCache.for_model(llama, pool=pool, tenant="acme")
        generated(llama, ids, mask, cache, max_new_tokens=6)
        assert pool.held > 0
        hooks = len(llama._forward_pre_hooks)
        other = KvallocCache.for_model(llama, pool=pool, tenant="acme")
        assert len(llama._forward_pre_hooks) == hooks == 1  # one for all caches, which stays
        del cache, other
        assert pool.held == 0
    finally:
        gc.enable()
    assert pool.audit().ok


def test_closing(llama):
    ids, mask = prompts(40)
    with KvallocCache.for_model(llama, device_bytes="4MiB") as cache:
        pool = cache.pool
        generated(llama, ids, mask, cache, max_new_tokens=6)
        assert "1 rows of 45 columns" in repr(cache)
    assert (pool.held, cache.closed, repr(cache)) == (0, True, "<KvallocCache, closed>")
    cache.close()
    for call in (cache.reset, lambda: cache.begin(ids), lambda: cache.crop(-1), cache.fork):
        with pytest.raises(kvalloc.ClosedError):
            call()
    with pytest.raises(kvalloc.ClosedError):
        generated(llama, ids, mask, cache, max_new_tokens=2)


def test_the_tensor_goes_with_the_last_who_has_it(llama):
    from kvalloc.store.torch_store import TorchStore

    pool = pool_for(llama)
    pool.tenant("acme")
    first = KvallocCache.for_model(llama, pool=pool, tenant="acme")
    second = KvallocCache.for_model(llama, pool=pool, tenant="acme")
    first.close()
    assert TorchStore.of(pool) is second.store
    del first, second
    assert TorchStore.of(pool) is None
    KvallocCache.for_model(llama, pool=pool, tenant="acme").close()


def test_a_pool_that_is_closed_first(llama):
    ids, mask = prompts(40)
    cache = KvallocCache.for_model(llama, device_bytes="4MiB")
    generated(llama, ids, mask, cache, max_new_tokens=2)
    cache.pool.close()
    assert cache.closed
    with pytest.raises(kvalloc.ClosedError):
        generated(llama, ids, mask, cache, max_new_tokens=2)
    cache.close()


# -- storage -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "error"), [("bfloat16", 0.02), ("float16", 0.003), ("int8", 0.06), ("fp8", 0.3)]
)
def test_other_storage(dtype, error, llama, either):
    ids, _ = prompts(70)
    expected = forward(llama, ids, None)
    model = either(llama)
    with KvallocCache.for_model(model, device_bytes="4MiB", dtype=dtype) as cache:
        logits = torch.cat([forward(model, ids[:, :40], cache), forward(model, ids[:, 40:], cache)], dim=1)
        assert cache.store.views(0).k.dtype == getattr(torch, {"fp8": "float8_e4m3fn"}.get(dtype, dtype))
        distance = (logits - expected).norm() / expected.norm()
        assert 0 < distance < error


@pytest.mark.parametrize("family", ["gemma3", "llama4", "deepseek_v2"])
def test_what_lies_in_free_pages_reaches_no_answer(family, model_of, either):
    model = model_of(family)
    ids, mask = prompts(41, 17)
    expected = generated(model, ids, mask, max_new_tokens=60)
    either(model)
    with KvallocCache.for_model(model, device_bytes="4MiB") as cache:
        poison(cache)
        assert torch.equal(generated(model, ids, mask, cache, max_new_tokens=60), expected)
        cache.reset()
        cache.pool.reset_prefix_cache()
        chunks = generated(model, ids, mask, cache, max_new_tokens=60, prefill_chunk_size=8)
        assert torch.equal(chunks, expected)  # the first chunks of the second row are all padding


def test_seeded_sampling_gives_different_answers_to_one_prompt(llama):
    """Rows that are opened with the same prompt don't get in each other's way."""
    ids, mask = prompts(33)
    with KvallocCache.for_model(llama, device_bytes="4MiB") as cache:
        answers = generated(
            llama,
            ids,
            mask,
            cache,
            do_sample=True,
            num_return_sequences=4,
            max_new_tokens=12,
            temperature=3.0,
        )
        assert len({tuple(row) for row in answers.tolist()}) == 4
        lengths = [len(np.unique(row.sequence.pages())) for row in cache._rows.rows]
        assert lengths == [3, 3, 3, 3]
