"""docs/private-torch.md lists what of torch's private surface the source touches, all and no more.

A release of torch may change a private name without a word; this test tells which one is gone.
"""

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "paceline"
PAGE = (ROOT / "docs" / "private-torch.md").read_text()
ROWS = re.findall(r"^\| `(torch\.[\w.]+)` \|[^|]*\|([^|]*)\|$", PAGE, flags=re.M)
LISTED = {name for name, _ in ROWS}
# Private by their names only: of Python's named tuples and of Hugging Face's datasets.
NOT_TORCH = {"_asdict", "_replace", "_formatting"}


# ---- what the source touches --------------------------------------------------------------------


def touched(sources: list[str]) -> tuple[set[str], set[str]]:
    """Private names of torch in a package of these files.

    Returns:
        dotted names that begin with torch's, and names of attributes of objects whose class the
        syntax doesn't tell.
    """
    files = [list(ast.walk(ast.parse(source))) for source in sources]
    defined = [_defined(nodes) for nodes in files]
    ours = set().union(*defined)
    dotted: set[str] = set()
    attributes: set[str] = set()
    for nodes, here in zip(files, defined, strict=True):
        homes = _homes(nodes)
        dotted |= {home for home in homes.values() if _private(home)}
        for node in nodes:
            if isinstance(node, ast.Import):
                dotted |= {each.name for each in node.names if _private(each.name)}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                dotted |= set(re.findall(r"^torch(?:\.\w+)*\._\w+$", node.value))
            elif isinstance(node, ast.ClassDef):
                dotted |= set(_overrides(node, homes))
            elif use := _use(node):
                owner, name = use
                home = _dotted(owner, homes)
                if home is not None:
                    dotted |= {f"{home}.{name}"} if home.startswith("torch") else set()
                elif name not in (ours if _is_self(owner) else here):
                    attributes.add(name)
    return dotted, attributes - NOT_TORCH


def _use(node: ast.AST) -> tuple[ast.expr, str] | None:
    """The object and the private attribute of it that an expression asks for."""
    if isinstance(node, ast.Attribute):
        owner, name = node.value, node.attr
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("getattr", "setattr", "hasattr")
        and isinstance(node.args[1], ast.Constant)
    ):
        owner, name = node.args[0], node.args[1].value
    else:
        return None
    return (owner, name) if re.match(r"_[^_]", name) else None


def _homes(nodes: list[ast.AST]) -> dict[str, str]:
    """Names that a file imports, or gives to what it imports, and what they stand for."""
    homes: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for each in node.names:
                first = each.name.partition(".")[0]
                homes |= {each.asname: each.name} if each.asname else {first: first}
        elif isinstance(node, ast.ImportFrom):
            homes |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    (tree,) = nodes[:1]
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            home = _dotted(node.value, homes)
            if home is not None:
                homes[node.targets[0].id] = home
    return homes


def _dotted(node: ast.expr, homes: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return homes.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value, homes)
        return None if owner is None else f"{owner}.{node.attr}"
    return None


def _private(dotted: str) -> bool:
    return re.match(r"torch\b.*\._[^_]", dotted) is not None


def _overrides(node: ast.ClassDef, homes: dict[str, str]) -> Iterator[str]:
    """Private methods of torch's classes that a class replaces."""
    for base in node.bases:
        home = _dotted(base, homes)
        if home is not None and home.startswith("torch"):
            for name in _defined(ast.walk(node)):
                if re.match(r"_[^_]", name) and hasattr(_found(home), name):
                    yield f"{home}.{name}"


def _defined(nodes: Iterable[ast.AST]) -> set[str]:
    found = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if _is_self(node.value) else set()
    return found


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


# ---- what torch has -----------------------------------------------------------------------------


def _found(dotted: str) -> object:
    """What a dotted name stands for; modules are imported as they are come to."""
    first, *rest = dotted.split(".")
    names = [first]

    def step(owner: object, name: str) -> object:
        names.append(name)
        if not hasattr(owner, name) and inspect.ismodule(owner):
            importlib.import_module(".".join(names))
        return getattr(owner, name)

    return functools.reduce(step, rest, importlib.import_module(first))


def _exists(dotted: str) -> bool:
    try:
        _found(dotted)
    except (ImportError, AttributeError):
        owner, _, name = dotted.rpartition(".")
        return inspect.isclass(found := _found(owner)) and _is_set_by_objects(found, name)
    return True


def _is_set_by_objects(owner: type, name: str) -> bool:
    return any(
        name in vars(base).get("__annotations__", {}) or f"self.{name}" in inspect.getsource(base)
        for base in owner.__mro__[:-1]
    )


# ---- tests --------------------------------------------------------------------------------------


def test_every_private_name_is_listed_and_every_listed_one_is_used():
    dotted, attributes = touched([path.read_text() for path in SOURCE.rglob("*.py")])
    last = {name.rpartition(".")[2] for name in LISTED}
    unlisted = {
        name for name in dotted if not any(f"{row}.".startswith(f"{name}.") for row in LISTED)
    }
    assert unlisted | (attributes - last) == set(), "list them in docs/private-torch.md"
    unused = {name for name in LISTED - dotted if name.rpartition(".")[2] not in attributes}
    spaces = {name for name in dotted if name.startswith("torch.ops.")}
    operators = {name for name in unused if name.rpartition(".")[0] in spaces}
    assert unused - operators == set(), "strike them from docs/private-torch.md"


@pytest.mark.parametrize(("name", "since"), ROWS)
def test_this_torch_has_the_name(name, since):
    if since.strip() and _release(torch.__version__) < _release(since):
        pytest.skip(f"torch has it since {since.strip()}")
    assert _exists(name)


def test_this_torch_is_one_that_the_names_were_looked_up_in():
    (stated,) = re.findall(r"^Looked up in torch (.+)\.$", PAGE, flags=re.M)
    release = ".".join(map(str, _release(torch.__version__)))
    assert release in re.split(r", | and ", stated), "look them up and run the tests, then name it"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from torch.utils._pytree import tree_map", "torch.utils._pytree.tree_map"),
        ("import torch\ntorch._foreach_add_([], 1)", "torch._foreach_add_"),
        ("import torch.distributed as dist\ndist._nothing()", "torch.distributed._nothing"),
        ("import torch\nops = torch.ops.aten\nops._mm.default()", "torch.ops.aten._mm"),
        ("import torch._dynamo", "torch._dynamo"),
        ("MODULES = ['torch._dynamo']", "torch._dynamo"),
        (
            "from torch import nn\nclass A(nn.Module):\n def _apply(self): ...",
            "torch.nn.Module._apply",
        ),
        ("def f(group):\n return group._get_backend()", "_get_backend"),
        ("def f(module):\n return getattr(module, '_buffers', None)", "_buffers"),
        ("class A(B):\n def f(self):\n  return self._buffers", "_buffers"),
    ],
)
def test_every_way_to_touch_a_private_name_is_found(source, found):
    assert found in set().union(*touched([source]))


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos._exit(0)",
        "import torch\ntorch.nn.functional.relu(torch.__version__)",
        "class A:\n def __init__(self):\n  self._own = 1\n def f(self, b):\n  return b._own",
        "from torch import nn\nclass A(nn.Module):\n def _own_alone(self): ...",
        "def f(row):\n return row._replace(x=1)",
    ],
)
def test_what_is_ours_or_public_is_not(source):
    assert touched([source]) == (set(), set())


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.strip().split(".")[:2]))
