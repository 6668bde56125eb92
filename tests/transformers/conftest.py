"""What the tests of the transformers integration share. Imports torch only when a test has."""

import pytest


@pytest.fixture(scope="session")
def model_of():
    """A tiny model of a family, built once."""
    import torch

    from tinymodels import tiny

    torch.set_num_threads(1)
    models = {}

    def get(family, seed=0):
        if (family, seed) not in models:
            models[family, seed] = tiny(family, seed)
        return models[family, seed]

    return get


@pytest.fixture
def paged():
    """Switch models to attention over pages, until the test ends."""
    switched = []

    def switch(model):
        switched.append((model, model.config._attn_implementation))
        model.set_attn_implementation("kvalloc_paged")
        return model

    yield switch
    for model, before in switched:
        model.set_attn_implementation(before)
