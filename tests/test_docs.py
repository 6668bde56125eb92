"""The native module documents itself: every class, method, property and argument, in numpydoc."""

import inspect
import re

import pytest

from kvalloc import _core

# `Spec` is behind `KVSpec`, which has the documentation.
CLASSES = [
    value
    for name, value in sorted(vars(_core).items())
    if inspect.isclass(value) and not name.startswith("_") and value is not _core.Spec
]
METHODS = [
    pytest.param(cls, name, id=f"{cls.__name__}.{name}")
    for cls in CLASSES
    for name, value in vars(cls).items()
    if not name.startswith("_") and callable(getattr(cls, name))
]
PROPERTIES = [
    pytest.param(cls, name, id=f"{cls.__name__}.{name}")
    for cls in CLASSES
    for name, value in vars(cls).items()
    if inspect.isgetsetdescriptor(value) or inspect.ismemberdescriptor(value)
]


def sections(text):
    return re.findall(r"^([A-Z][A-Za-z ]+)\n-{3,}$", text, re.MULTILINE)


def documented(text):
    """Names in the Parameters and Attributes sections; several may share a line."""
    names = re.findall(r"^([a-z_]+(?:, [a-z_]+)*) : ", text, re.MULTILINE)
    return {name for line in names for name in line.split(", ")}


def arguments(function):
    return [name for name in inspect.signature(function).parameters if name != "self"]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_class(cls):
    text = inspect.getdoc(cls)
    assert text.partition("\n")[0].endswith(".")
    assert cls.__module__ == "kvalloc"


def test_constructor():
    text = inspect.getdoc(_core.Pool)
    assert set(arguments(_core.Pool)) <= documented(text)
    assert {"Parameters", "Raises", "Notes", "Examples"} <= set(sections(text))


@pytest.mark.parametrize(("cls", "name"), METHODS)
def test_method(cls, name):
    method = getattr(cls, name)
    text = inspect.getdoc(method)
    assert text.partition("\n")[0].endswith((".", "?"))
    asked = arguments(method)
    assert set(asked) <= documented(text)
    assert ("Parameters" in sections(text)) == bool(asked)


@pytest.mark.parametrize(("cls", "name"), PROPERTIES)
def test_property(cls, name):
    text = inspect.getdoc(getattr(cls, name)) or ""
    # Fields of a plain record are told of by their class.
    assert re.match(
        r"[A-Za-z.]+( of .+| or .+)? : |.* \((tokens|pages|times)\)\.", text
    ) or name in documented(inspect.getdoc(cls))


def test_counters_are_attributes():
    assert set(_core.Stats.describe()) <= {name for name in dir(_core.Stats) if not name.startswith("_")}
