"""What is counted of the product, each measure a function of its syntax trees; and what nobody names."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tests.house.state import module_state
from tests.house.tree import Function, Module, Tree, importers
from tests.test_layers import BESIDE, ROOT, imports_of

ENTRIES = {"main", "torchrun_handler"}  # named by pyproject.toml or by `python -m`
CACHES = {"functools.cache", "functools.lru_cache", "functools.cached_property"}
OWN_CACHES = {"hetu_fx.base.once.once", "hetu_fx.base.once.once_per_object"}
PATCHES = {  # the last is where the table was, for commits of before
    "hetu_fx.base.patches.Patch",
    "hetu_fx.base.patches.Hook",
    "hetu_fx.integrations.patching.Patch",
}
IN_PLACE = {"append", "clear", "extend", "insert", "pop", "remove", "setdefault", "update"}
GLOBAL_HOOK = re.compile(r"torch\..*\.register_(optimizer|module)_\w*hook")


class Finding(NamedTuple):
    """One thing that is counted: the folder that it is in, its name, and what it counts for."""

    folder: str
    name: str
    amount: int = 1


@dataclass(frozen=True)
class Measure:
    """What is counted of the product.

    Attributes:
        title: what a table calls it.
        find: lists what is counted.
        by_name: findings of one name count once in all, in each folder where they are.
    """

    title: str
    find: Callable[[Tree], Iterable[Finding]]
    by_name: bool = False

    def by_folder(self, found: Iterable[Finding]) -> dict[str, int]:
        """Return what findings come to in each folder, and in all."""
        found = tuple(found)
        counts = Counter({one.folder: 0 for one in found})
        for one in found:
            counts[one.folder] += one.amount
        in_all = len({one.name for one in found}) if self.by_name else counts.total()
        return {"in all": in_all, **dict(sorted(counts.items()))}


def lines(tree: Tree) -> Iterator[Finding]:
    """List the modules with their lines, `__init__` files left out."""
    for module in tree:
        if module.stem != "__init__":
            yield Finding(module.folder, module.name, len(module.text.splitlines()))


def public_classes(tree: Tree) -> Iterator[Finding]:
    """List the classes whose names begin with no underscore."""
    for module, node in _classes(tree):
        if not node.name.startswith("_"):
            yield Finding(module.folder, f"{module.name}.{node.name}")


def classes_of_one_name(tree: Tree) -> Iterator[Finding]:
    """List the class names that several modules define."""
    return _shared((node.name, module) for module, node in _classes(tree))


def stems_used_twice(tree: Tree) -> Iterator[Finding]:
    """List the file names that several modules have."""
    return _shared((module.stem, module) for module in tree if not module.stem.startswith("__"))


def with_one_importer(tree: Tree) -> Iterator[Finding]:
    """List the modules that exactly one other module of the product imports."""
    found = importers(tree)
    for module in tree:
        if module.stem != "__init__" and len(found.get(module.name, ())) == 1:
            yield Finding(module.folder, module.name)


def caches(tree: Tree) -> Iterator[Finding]:
    """List the uses of `cache`, `lru_cache` and `cached_property`."""
    return _uses(tree, CACHES)


def own_caches(tree: Tree) -> Iterator[Finding]:
    """List the uses of `once`, which keeps answers beside objects."""
    return _uses(tree, OWN_CACHES)


def patches(tree: Tree) -> Iterator[Finding]:
    """List what is written into other libraries' modules, classes and objects, and hooks on all optimizers or modules.

    That is: `mock.patch`, `setattr` on others than `self`, an entry of the table of patches, an attribute or item of
    something imported that is assigned, deleted or changed in place, and another object's private attribute that the
    module itself gives to nothing.
    """
    for module in tree:
        own = {node.attr for node in module.nodes if isinstance(node, ast.Attribute) and _root(node) in ("self", "cls")}
        foreign = {name for name, meaning in module.imports.items() if not meaning.startswith("hetu_fx")}
        foreign |= {target for target, value in _aliases(module) if _root(value) in foreign}
        for node in filter(_may_patch, module.nodes):
            if isinstance(node, ast.Call):
                found = _is_patching_call(node, foreign, module.imports)
            else:
                found = any(_is_foreign(target, foreign, own) for target in _targets(node))
            if found:
                yield Finding(module.folder, f"{module.name}: {ast.unparse(node).splitlines()[0][:90]}")


def state(tree: Tree) -> Iterator[Finding]:
    """List the names of modules and classes that hold what changes while a program runs."""
    return (Finding(module.folder, name) for module, name in module_state(tree))


MEASURES: Mapping[str, Measure] = {
    "lines": Measure("lines of the product", lines),
    "public classes": Measure("public classes", public_classes),
    "patches": Measure("patches of foreign code", patches),
    "caches": Measure("cache, lru_cache, cached_property", caches),
    "own caches": Measure("once, once_beside", own_caches),
    "state": Measure("mutable state of modules", state),
    "one importer": Measure("modules with one importer", with_one_importer),
    "class names": Measure("class names in several modules", classes_of_one_name, by_name=True),
    "stems": Measure("module stems used twice", stems_used_twice, by_name=True),
}


def named_by_nobody(tree: Tree) -> list[str]:
    """List the public functions and classes that neither product nor what is shipped beside it names elsewhere."""
    used = {name for module in tree for name in _used(module)}
    words = {word for module in tree for word in _words(module)}
    used |= {name for path in files_of(*BESIDE) for name, _ in imports_of("", ast.parse(path.read_text()), False)}
    return [
        f"{module.name}.{node.name}"
        for module in tree
        for node in module.tree.body
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_") and node.name not in ENTRIES
        if f"{module.name}.{node.name}" not in used and node.name not in words and not node.decorator_list
    ]


def named_in_one_file(tree: Tree) -> list[str]:
    """List the public functions that no other file names: they need not be public."""
    files = files_of("tests", "benchmarks", *BESIDE)
    texts = (*(module.text for module in tree), *map(Path.read_text, files))
    uses = Counter(word for text in texts for word in set(re.findall(r"\w+", text)))
    return [
        f"{module.name}.{node.name}"
        for module in tree
        for node in module.tree.body
        if isinstance(node, Function) and not node.name.startswith("_")
        if uses[node.name] == 1 and node.name not in ENTRIES
    ]


def files_of(*folders: str) -> list[Path]:
    """Return the modules that are in some folders."""
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def function_lengths(tree: Tree) -> list[int]:
    """Return the lines of every function."""
    nodes = (node for module in tree for node in module.nodes if isinstance(node, Function))
    return [node.end_lineno - node.lineno + 1 for node in nodes if node.end_lineno is not None]


def _classes(tree: Tree) -> Iterator[tuple[Module, ast.ClassDef]]:
    return ((module, node) for module in tree for node in module.tree.body if isinstance(node, ast.ClassDef))


def _shared(named: Iterable[tuple[str, Module]]) -> Iterator[Finding]:
    places = defaultdict(list)
    for name, module in named:
        places[name].append(module)
    return (Finding(one.folder, name) for name, found in places.items() if len(found) > 1 for one in found)


def _uses(tree: Tree, wanted: set[str]) -> Iterator[Finding]:
    for module in tree:
        if wanted.isdisjoint(module.imports.values()) and "functools" not in module.imports.values():
            continue
        owners = {id(one): node.name for node in module.nodes for one in getattr(node, "decorator_list", ())}
        heads = {id(node.func): owners.get(id(node), "") for node in module.nodes if isinstance(node, ast.Call)}
        for node in module.nodes:
            if isinstance(node, ast.Name | ast.Attribute) and _meaning(node, module.imports) in wanted:
                yield Finding(module.folder, f"{module.name}.{owners.get(id(node)) or heads.get(id(node), '')}")


def _meaning(node: ast.AST, imports: Mapping[str, str]) -> str:
    """Return the full name of what a name or an attribute of a module means; "" for others."""
    if isinstance(node, ast.Name):
        return imports.get(node.id, "")
    is_plain = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute)
    return f"{_meaning(node.value, imports)}.{node.attr}" if is_plain else ""


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _aliases(module: Module) -> Iterator[tuple[str, ast.AST]]:
    """Yield (name, value) of what is assigned an attribute of something."""
    for node in filter(_may_patch, module.nodes):
        for target in _targets(node):
            value = getattr(node, "value", None)
            if isinstance(target, ast.Name) and isinstance(value, ast.Attribute):
                yield target.id, value


def _may_patch(node: ast.AST) -> bool:
    return isinstance(node, ast.Call | ast.Assign | ast.Delete | ast.AnnAssign | ast.AugAssign)


def _targets(node: ast.AST) -> Iterator[ast.AST]:
    given = node.targets if isinstance(node, ast.Assign | ast.Delete) else ()
    given = (node.target,) if isinstance(node, ast.AnnAssign | ast.AugAssign) else given
    for target in given:
        yield from target.elts if isinstance(target, ast.Tuple | ast.List) else (target,)


def _is_foreign(target: ast.AST, foreign: set[str], own: set[str]) -> bool:
    if not isinstance(target, ast.Attribute | ast.Subscript):
        return False
    is_private = isinstance(target, ast.Attribute) and re.match(r"_[^_]", target.attr) and target.attr not in own
    return _root(target) in foreign or bool(is_private)


def _is_patching_call(call: ast.Call, foreign: set[str], imports: Mapping[str, str]) -> bool:
    meaning, name = _meaning(call.func, imports), getattr(call.func, "attr", getattr(call.func, "id", ""))
    if name in ("setattr", "delattr") and isinstance(call.func, ast.Name):
        return _root(call.args[0]) != "self"
    deep = isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Attribute | ast.Subscript)
    return (
        meaning.startswith("unittest.mock.patch")
        or meaning in PATCHES
        or GLOBAL_HOOK.fullmatch(meaning) is not None
        or (deep and name in IN_PLACE and _root(call.func) in foreign)
    )


def _used(module: Module) -> Iterator[str]:
    """Yield the full names of what a module imports, and of its own what other definitions in it name."""
    yield from module.imports.values()
    for node in module.nodes:
        if isinstance(node, ast.Attribute):
            yield _meaning(node, module.imports)
    for part in module.tree.body:
        names = {node.id for node in ast.walk(part) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        yield from (f"{module.name}.{name}" for name in names - {getattr(part, "name", "")})


def _words(module: Module) -> Iterator[str]:
    """Yield names in strings that are names: what is exported, entry points, `getattr`."""
    docstrings = {
        id(node.body[0].value)
        for node in module.nodes
        if isinstance(node, Function | ast.ClassDef | ast.Module)
        if node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in module.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield from re.findall(r"\w+", node.value) if re.fullmatch(r"[\w.:]+", node.value) else ()
