"""Mutable state of modules: names at the top of a module, or of a class, whose values change while a program runs."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence, Set

from tests.house.tree import Function, Module, Tree

CHANGING = set(  # what nobody makes but to change it
    "Condition ContextVar Event Lock RLock Semaphore SimpleQueue Queue WeakKeyDictionary WeakSet WeakValueDictionary "
    "count local PerRank".split()
)
IN_PLACE = set(
    "add append appendleft clear discard extend insert move_to_end pop popitem popleft remove setdefault update".split()
)
MAKING = {"__init__", "__new__", "__post_init__", "__setstate__"}


def module_state(tree: Tree) -> Iterator[tuple[Module, str]]:
    """Yield (module, full name) of each name that holds mutable state.

    It does where a function, of any module, declares it global, assigns its items or attributes, or changes it in
    place; where one of CHANGING makes it; and where it is an object of a class of ours whose methods change it.
    """
    changed = {name for module in tree for name in _changed(module)}
    classes = {
        f"{module.name}.{node.name}"
        for module in tree
        for node in module.tree.body
        if isinstance(node, ast.ClassDef) and _is_mutable(node)
    }
    for module in tree:
        for name, value in _assigned(module.tree.body):
            maker = _maker(value)
            made = module.imports.get(maker, f"{module.name}.{maker}")
            if f"{module.name}.{name}" in changed or maker in CHANGING or made in classes:
                yield module, f"{module.name}.{name}"
        for node in module.tree.body:
            for name, value in _assigned(node.body) if isinstance(node, ast.ClassDef) else ():
                if _is_empty(value) or _maker(value) in CHANGING:
                    yield module, f"{module.name}.{node.name}.{name}"


def _assigned(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr | None]]:
    for node in body:
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        value = getattr(node, "value", None)
        yield from ((target.id, value) for target in targets if isinstance(target, ast.Name))


def _maker(value: ast.expr | None) -> str:
    """Return the name of what an expression calls: `PerRank` of `PerRank[int](list)`."""
    made = value.func if isinstance(value, ast.Call) else None
    made = made.value if isinstance(made, ast.Subscript) else made
    return getattr(made, "attr", getattr(made, "id", ""))


def _is_empty(value: ast.expr | None) -> bool:
    return ast.unparse(value) in ("[]", "{}", "set()", "dict()", "list()") if value is not None else False


def _is_mutable(node: ast.ClassDef) -> bool:
    """Tell whether a class has a method, but those that make an object, that changes the object's attributes."""
    changing = (one for one in node.body if isinstance(one, Function) and one.name not in MAKING)
    return any(_changes_self(one) for method in changing for one in ast.walk(method))


def _changes_self(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        node = node.func if isinstance(node.func, ast.Attribute) and node.func.attr in IN_PLACE else node
        return isinstance(node, ast.Attribute) and ast.unparse(node.value).startswith("self.")
    is_stored = isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)
    return is_stored and ast.unparse(node).startswith("self.")


def _changed(module: Module) -> Iterator[str]:
    """Yield the full names that functions of a module change, its own and imported ones."""
    for function in _outer_functions(module.tree):
        nodes = tuple(ast.walk(function))
        changed = {name for node in nodes for name in _changed_by(node)}
        for name in changed - _local_names(nodes) if changed else ():
            yield module.imports.get(name, f"{module.name}.{name}")


def _outer_functions(tree: ast.AST) -> Iterator[Function]:
    """Yield the functions of a module and of its classes; what is defined in them counts as theirs."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield node
        elif not isinstance(node, ast.expr):
            yield from _outer_functions(node)


def _local_names(nodes: Sequence[ast.AST]) -> Set[str]:
    """Return the names that mean something of a function's own, by its nodes."""
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    given = {node.arg for node in nodes if isinstance(node, ast.arg)}
    return (stored | given) - {name for node in nodes if isinstance(node, ast.Global) for name in node.names}


def _changed_by(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Global):
        return set(node.names)
    if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
        return _name(node.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in IN_PLACE:
        return _name(node.func.value)
    return set()


def _name(node: ast.expr) -> set[str]:
    """Return the name of the object that an expression is a part of: `table` of `table.known[0]`."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return {node.id} if isinstance(node, ast.Name) else set()
