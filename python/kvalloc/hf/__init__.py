"""Reading the KV geometry out of a Hugging Face ``config.json``, without transformers.

`read` turns a config into one `Layer` per decoder layer: what KV it stores, what fixed state, or whose KV it
uses. What a config leaves out has the default of its model class (`classes.DEFAULTS`), since files are often
saved without fields that equal the default. A config that could mean two things is refused, naming the field:
a wrong number of bytes is worse than none.

To teach it a model: add its class to ``classes.py`` and a row to the table in ``tests/test_spec.py``. A model
with names of its own for heads or states also gets a branch in ``stores.py``.
"""

from kvalloc.hf.fields import ConfigLike
from kvalloc.hf.model import Layer, Model, read
from kvalloc.hf.stores import Attention, State

__all__ = ["Attention", "ConfigLike", "Layer", "Model", "State", "read"]
