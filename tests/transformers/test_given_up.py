"""A KvallocCache goes on when pages in the middle of its rows were given up: tables show 0 for them."""

import pytest

import kvalloc
from generating import cache_name
from tinymodels import WINDOW, prompts

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvalloc.integrations.transformers import KvallocCache  # noqa: E402 - needs both

PAGE, PROMPT, ALL = 16, 70, 84
# Of a prompt of 70 tokens, and of one of 40 behind 30 columns of padding.
GIVEN_UP = {0: (0, 2), 1: (1,)}


def give_up(cache):
    """Show 0 in every group that keeps all its pages; what lies there, and in frame 0, becomes NaN."""
    spec, batch = cache.pool.spec, cache._rows.batch
    for layer, (group, _) in enumerate(spec.layer_map):
        if not spec.groups[group].grows:
            continue
        table = batch.block_table(group)
        for view in cache.store.views(layer)[:2]:
            if view is not None:
                view[0] = float("nan")
                for row, pages in GIVEN_UP.items():
                    view[table[row, list(pages)]] = float("nan")

    take = cache._rows._step

    def step(counts):  # it shows whole rows again where a sequence learnt of new tokens
        take(counts)
        for group, kept in enumerate(spec.groups):
            if kept.grows:
                for row, pages in GIVEN_UP.items():
                    batch.block_table(group)[row, list(pages)] = 0

    cache._rows._step = step


def masks(padding):
    """What each column may look at, with and without a window, for attention over no pages."""
    q, k = torch.arange(ALL)[:, None], torch.arange(ALL)
    seen = ((k <= q) & padding[:, None].bool())[:, None]
    full = seen.clone()
    for row, pages in GIVEN_UP.items():
        first = int((padding[row] == 0).sum())
        for page in pages:
            columns = slice(first + page * PAGE, first + (page + 1) * PAGE)
            full[row, 0, PROMPT:, columns] = False
    low = torch.finfo(torch.float32).min
    return [torch.where(x, 0.0, low) for x in (full, seen & (k > q - WINDOW))]


@pytest.mark.parametrize("mode", ["gathered", "paged"])
@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gemma3"])
def test_a_chunk_and_tokens_behind_them(family, mode, model_of, paged):
    model = model_of(family)
    ids, mask = prompts(PROMPT, 40)
    ids = torch.cat((ids, prompts(ALL - PROMPT, ALL - PROMPT, seed=5)[0]), dim=1)
    mask = torch.cat((mask, torch.ones_like(ids[:, PROMPT:])), dim=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    full, window = masks(mask)
    given = {"full_attention": full, "sliding_attention": window} if family == "gemma3" else full
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=given, position_ids=positions).logits
    if mode == "paged":
        paged(model)

    def forward(cache, first, end, mask=mask):
        with torch.no_grad():
            return model(
                input_ids=ids[:, first:end],
                attention_mask=None if mask is None else mask[..., :end],
                position_ids=positions[:, first:end],
                **{cache_name(model): cache},
            ).logits

    with KvallocCache.for_model(model, device_bytes="4MiB") as cache:
        torch.testing.assert_close(forward(cache, 0, PROMPT)[0], expected[0, :PROMPT], rtol=1e-4, atol=1e-4)
        give_up(cache)
        if (family, mode) == ("gemma3", "gathered"):
            with pytest.raises(kvalloc.InvalidArgument, match=r"have windows.*kvalloc_paged"):
                forward(cache, PROMPT, PROMPT + 1)
            assert cache.get_seq_length() == PROMPT
            return
        for first, end in ((PROMPT, ALL - 2), (ALL - 2, ALL - 1), (ALL - 1, ALL)):
            got = forward(cache, first, end)
            torch.testing.assert_close(got, expected[:, first:end], rtol=1e-4, atol=1e-4)


def test_a_mask_of_the_forwards_own_does_not_know_them(model_of):
    model = model_of("llama")
    ids, _ = prompts(PROMPT, PROMPT)
    own = torch.zeros(2, 1, 1, PROMPT + 1)
    with KvallocCache.for_model(model, device_bytes="4MiB") as cache, torch.no_grad():
        given = {cache_name(model): cache}
        model(input_ids=ids, **given)
        give_up(cache)
        with pytest.raises(kvalloc.InvalidArgument, match=r"a mask of the forward's own.*\[rows, columns\]"):
            model(input_ids=ids[:, :1], attention_mask=own, **given)
        assert cache.get_seq_length() == PROMPT
        # Going on without a mask is fine: they are hidden all the same.
        assert model(input_ids=ids[:, :1], **given).logits.isfinite().all()
        assert cache.get_seq_length() == PROMPT + 1


@pytest.mark.parametrize("mode", ["gathered", "paged"])
def test_a_context_that_the_pool_cuts(mode, model_of, paged):
    model = model_of("llama")
    ids, _ = prompts(100)
    seen = torch.ones(100, 100).tril().bool()
    seen[90:, PAGE : 3 * PAGE] = False  # all but the first page and those of the last 32 tokens
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask).logits[:, 90:]
    if mode == "paged":
        paged(model)
    pool = kvalloc.Pool(kvalloc.KVSpec.from_hf_config(model.config, PAGE, "float32"), "4MiB")
    tenant = pool.tenant("acme", cut=32)
    with KvallocCache.for_model(model, pool=pool, tenant=tenant) as cache, torch.no_grad():
        given = {cache_name(model): cache}
        model(input_ids=ids[:, :90], **given)
        with pool.cut(tenant, "4MiB", batch=cache._rows.batch) as plan:
            assert [victim.tokens for victim in plan.victims] == [32]
        got = model(input_ids=ids[:, 90:], **given).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert pool.audit().ok
