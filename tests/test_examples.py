"""Every example that a user can read runs: docstrings of the package, Python blocks of the README and docs/.

In a Markdown file the blocks marked ``python`` run one after another in one namespace, as a reader would
paste them. Blocks with ``>>>`` are checked against the output shown; others only have to run. A block that is
not meant to run is not marked ``python`` (``text``, ``console``, ``toml``, ``rust``).
"""

import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import numpy as np
import pytest

import kvalloc

ROOT = Path(__file__).parent.parent
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
OPTIONAL = {"cupy", "torch", "transformers", "triton"}
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def documented_objects():
    """Yield (name, docstring) for each public object, native ones too, which doctest does not look into."""
    found = [module.name for module in pkgutil.walk_packages(kvalloc.__path__, "kvalloc.")]
    names = ["kvalloc", *(name for name in found if not name.endswith("__main__"))]
    seen = set()
    for name in names:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if str(error.name).partition(".")[0] not in OPTIONAL:
                raise
            continue  # an extra that is not installed
        yield module.__name__, module.__doc__
        for name, value in vars(module).items():
            home = getattr(value, "__module__", None) or ""
            if name.startswith("_") or not home.startswith("kvalloc") or id(value) in seen:
                continue
            seen.add(id(value))
            yield f"{module.__name__}.{name}", inspect.getdoc(value)
            if inspect.isclass(value):
                for member, attribute in vars(value).items():
                    if not member.startswith("_"):
                        yield f"{module.__name__}.{name}.{member}", getattr(attribute, "__doc__", None)


def run(test):
    report = []
    result = doctest.DocTestRunner(optionflags=FLAGS, verbose=False).run(test, out=report.append)
    assert result.failed == 0, "".join(report)


DOCSTRINGS = [(name, text) for name, text in documented_objects() if text and ">>>" in text]


@pytest.mark.parametrize(("name", "text"), DOCSTRINGS, ids=[name for name, _ in DOCSTRINGS])
def test_docstring(name, text):
    run(doctest.DocTestParser().get_doctest(text, {"kvalloc": kvalloc, "np": np}, name, name, 0))


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_page(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    names = {"__name__": page.stem}
    for block in BLOCK.finditer(text):
        code, line = block[1], text[: block.start(1)].count("\n")
        if ">>>" in code:
            test = doctest.DocTestParser().get_doctest(code, names, page.name, str(page), line)
            test.globs = names  # the parser copies: later blocks must see what this one defines
            report = []
            result = doctest.DocTestRunner(optionflags=FLAGS, verbose=False).run(
                test, out=report.append, clear_globs=False
            )
            assert result.failed == 0, "".join(report)
        else:
            exec(compile("\n" * line + code, str(page), "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)|src=\"([^\"]+)\"", page.read_text())
    local = [a or b for a, b in links if "://" not in (a or b)]
    assert [link for link in local if not (page.parent / link).exists()] == []
