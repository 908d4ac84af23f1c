"""The code of a function or class as a short name that changes when the code does.

Layout and comments don't count, since sources are compared as syntax trees. What the code refers to
in its own program does: other functions and classes, constants, what a closure holds. Installed
packages count by name only.
"""

import ast
import functools
import inspect
import sysconfig
import textwrap
from argparse import Namespace
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor, nn

from paceline.train.custom.digest import digest

_INSTALLED = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")})
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
# A table of more values is data, not a constant of the code.
_MOST_VALUES = 1_000_000


Seen = dict[int, Any]
"""What was looked at, by identity, and kept so that nothing else gets the same."""


def code_digest(value: Any) -> str:
    """Of a function, class, module or callable object, in whatever wrapping it comes."""
    return digest(list(_texts(value, {})))


def _texts(value: Any, seen: Seen) -> Iterator[str]:
    """What the code consists of, each part once."""
    if isinstance(value, _PLAIN):
        yield repr(value)
        return
    if id(value) in seen:
        return
    seen[id(value)] = value
    if isinstance(value, functools.partial):
        for part in (value.func, value.args, value.keywords):
            yield from _texts(part, seen)
    elif isinstance(value, MethodType):
        yield from _texts(value.__func__, seen)
    elif isinstance(value, FunctionType):
        yield from _texts_of_function(value, seen)
    elif isinstance(value, type):
        yield from _texts_of_class(value, seen)
    elif isinstance(value, nn.Module):
        yield repr(value)
        for kind in {type(each): None for each in value.modules()}:
            yield from _texts(kind, seen)
    elif isinstance(value, Tensor):
        if value.numel() < _MOST_VALUES:
            yield digest(value)
    elif isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else value
        for item in items:
            yield from _texts(item, seen)
    elif isinstance(value, Namespace | SimpleNamespace):
        yield from _texts(vars(value), seen)
    elif callable(value):
        yield from _texts(type(value), seen)
        yield from _texts(getattr(value, "__dict__", {}), seen)


def _texts_of_function(function: FunctionType, seen: Seen) -> Iterator[str]:
    if _is_installed(function.__code__.co_filename):
        yield f"{function.__module__}.{function.__qualname__}"
        return
    yield _source(function)
    yield from _texts([function.__defaults__, function.__kwdefaults__], seen)
    for cell in function.__closure__ or ():
        try:
            yield from _texts(cell.cell_contents, seen)
        except ValueError:  # not filled yet
            continue
    names = list(dict.fromkeys(_names(function.__code__)))
    for name in names:
        found = function.__globals__.get(name)
        if isinstance(found, ModuleType):
            if not _is_installed(getattr(found, "__file__", None) or _INSTALLED[0]):
                yield from _texts([vars(found).get(name) for name in names], seen)
        elif found is not None:
            yield from _texts(found, seen)


def _texts_of_class(kind: type, seen: Seen) -> Iterator[str]:
    try:
        is_installed = _is_installed(inspect.getfile(kind))
    except (TypeError, OSError):  # built in, or typed into a terminal
        is_installed = kind.__module__ != "__main__"
    if is_installed:
        yield f"{kind.__module__}.{kind.__qualname__}"
        return
    yield kind.__qualname__
    for base in kind.__bases__:
        yield from _texts(base, seen)
    for name, member in vars(kind).items():
        member = getattr(member, "__func__", getattr(member, "fget", None) or member)
        if isinstance(member, (FunctionType, *_PLAIN)) and name not in _INCIDENTAL:
            yield name
            yield from _texts(member, seen)


# Of a class: where it stands and what is said about it.
_INCIDENTAL = {"__module__", "__doc__", "__firstlineno__", "__qualname__"}


def _source(function: FunctionType) -> str:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # typed into a terminal, or a part of a statement
        return _bytes(function.__code__)
    return ast.dump(tree)


def _bytes(code: CodeType) -> str:
    constants = [_bytes(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_installed(file: str) -> bool:
    return file.startswith((*_INSTALLED, "<frozen")) or "site-packages" in file
