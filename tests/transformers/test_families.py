"""Tokens in float32 equal plain attention's: families x modes x ways to generate."""

import pytest

from generating import generated
from tinymodels import FAMILIES, WINDOW, WINDOWED, prompts, tiny

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvalloc.integrations.transformers import KvallocCache  # noqa: E402 - needs both

NEW = 14
MODES = ("gathered", "paged")
# Prompts shorter and longer than a window, none at a page's edge, with padding on the left.
LENGTHS = (41, 17, 30)

KINDS = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 20, "num_return_sequences": 2},
    "beam": {"num_beams": 3, "num_return_sequences": 2},
    "beam sampled": {"num_beams": 2, "do_sample": True, "top_k": 20},
    "in chunks": {"prefill_chunk_size": 11},
}


def told_apart(tokens, columns):
    """The model says more than a word or two, so that equal answers mean something."""
    return len(set(tokens[:, columns:].flatten().tolist())) > 5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_plain_attention(family, mode, kind, model_of, paged):
    model = model_of(family)
    ids, mask = prompts(*LENGTHS)
    how = {"max_new_tokens": NEW, **KINDS[kind]}
    expected = generated(model, ids, mask, **how)
    assert told_apart(expected, ids.shape[1])
    if mode == "paged":
        paged(model)
    with KvallocCache.for_model(model, device_bytes="8MiB") as cache:
        assert torch.equal(generated(model, ids, mask, cache, **how), expected)
        assert cache.cached_tokens == 0 or kind == "in chunks"
        cache.reset()
        # Now with the prompts' pages from the first time: 2 for 41 tokens, 1 for 17, 1 for 30.
        assert torch.equal(generated(model, ids, mask, cache, **how), expected)
        rows = len(expected) if "beam" not in kind else len(ids) * how["num_beams"]
        if kind == "in chunks":
            assert cache.cached_tokens == 0  # a chunk is shorter than a page
        else:
            assert cache.cached_tokens == rows // len(ids) * (32 + 16 + 16)
        assert cache.pool.audit().ok
        cache.reset()
        assert cache.pool.tenants()[0].held == 0


@pytest.mark.parametrize("helper", ["model", "prompt lookup"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_assisted_tokens_equal_plain_attention(family, mode, helper, model_of, paged):
    model = model_of(family)
    ids, mask = prompts(37)
    ids[0, 20:30] = ids[0, 5:15]  # something to look up
    expected = generated(model, ids, mask, max_new_tokens=24)
    assert told_apart(expected, ids.shape[1])
    assistant = tiny(family, seed=0)
    with torch.no_grad():  # one that is often right, not always
        assistant.lm_head.weight += 0.15 * torch.randn(assistant.lm_head.weight.shape)
    if mode == "paged":
        paged(model)
    how = {"prompt_lookup_num_tokens": 4} if helper == "prompt lookup" else {"assistant_model": assistant}
    with KvallocCache.for_model(model, device_bytes="8MiB") as cache:
        for again in range(2):
            cropped = []
            crop = cache._rows.crop
            cache._rows.crop = lambda columns, crop=crop, cropped=cropped: (
                cropped.append(cache._rows.columns - columns),
                crop(columns),
            )
            answer = generated(model, ids, mask, cache, max_new_tokens=24, **how)
            cache._rows.crop = crop
            assert torch.equal(answer, expected)
            assert cropped
            if helper == "model":
                assert max(cropped) > 0, "no draft was rejected: the test shows nothing"
            # A second time the prompt's pages are there, and those of the drafts do no harm.
            assert cache.cached_tokens == 32 * again
            assert cache.get_seq_length() == answer.shape[1] - 1
            cache.reset()
        assert cache.pool.audit().ok


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", WINDOWED)
def test_windows_release_pages(family, mode, model_of, paged):
    model = model_of(family)
    ids, mask = prompts(60)
    expected = generated(model, ids, mask, max_new_tokens=160)
    if mode == "paged":
        paged(model)
    with KvallocCache.for_model(model, device_bytes="8MiB") as cache:
        assert torch.equal(generated(model, ids, mask, cache, max_new_tokens=160), expected)
        (row,) = cache._rows.rows
        for number, group in enumerate(cache.pool.spec.groups):
            pages = len(row.sequence.pages(number))
            if group.kind == "full":
                assert pages == -(-219 // 16)
            else:
                # The window, up to 64 tokens that a draft could take back, and a page at either end.
                assert group.window == WINDOW
                assert pages <= -(-(WINDOW + 64) // 16) + 2 < -(-219 // 16)
        assert cache.pool.audit().ok


@pytest.mark.parametrize("mode", MODES)
def test_beams_share_pages(mode, model_of, paged):
    model = model_of("llama")
    ids, mask = prompts(100)
    expected = generated(model, ids, mask, num_beams=4, max_new_tokens=NEW)
    if mode == "paged":
        paged(model)
    with KvallocCache.for_model(model, device_bytes="8MiB") as cache:
        assert torch.equal(generated(model, ids, mask, cache, num_beams=4, max_new_tokens=NEW), expected)
        pages = {int(page) for row in cache._rows.rows for page in row.sequence.pages()}
        # The prompt's 6 full pages once; what differs, for each beam at most.
        assert len(pages) <= 6 + 4 * 2 < 4 * 8
        assert cache.pool.tenants()[0].held == len(pages) * cache.pool.spec.page_bytes()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3"])
def test_a_conversation_goes_on_in_the_same_cache(family, mode, model_of, paged):
    model = model_of(family)
    ids, mask = prompts(41, 17)
    more, _ = prompts(9, 9, seed=5)

    def talk(cache):
        first = generated(model, ids, mask, cache, max_new_tokens=NEW)
        longer = torch.cat((first, more), dim=1)
        full = torch.cat((mask, torch.ones(2, NEW + 9, dtype=mask.dtype)), dim=1)
        return generated(model, longer, full, cache, max_new_tokens=NEW)

    from transformers import DynamicCache

    expected = talk(DynamicCache(config=model.config))
    assert told_apart(expected, 41 + NEW + 9)
    if mode == "paged":
        paged(model)
    with KvallocCache.for_model(model, device_bytes="8MiB") as cache:
        assert torch.equal(talk(cache), expected)
        assert cache.get_seq_length() == expected.shape[1] - 1
