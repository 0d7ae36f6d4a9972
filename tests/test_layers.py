"""The house has no stairs back up: every module imports only what stands on its floor or below.

Read from the syntax trees, so imports inside functions and under TYPE_CHECKING count too. A new file needs
its place in FLOORS.
"""

from __future__ import annotations

import ast
import functools
import tomllib
from collections.abc import Container, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Top floor first, a line per folder. A name stands for the module, or for the package with all that is in it unless
# another row names a part of it. Nobody uses a floor above, and packages use each other in one direction only.
FLOORS = (
    "__main__",
    "cli",
    "integrations",
    "launch",
    "api",
    "check",
    "handle lockstep",
    "prepare",
    "checkpoint export report",
    "switching.adapt",
    "switching.runtime",
    "switching.agreement",
    "switching.graph_execution",
    "switching.sequences switching.eager",
    "planner.api",
    "planner.measure",
    "planner.make_plan planner.captured_program",
    "planner.searches planner.left_out",
    "planner.search.hap planner.search.heteroauto planner.search.hydraulis",
    "planner.search.malleus",
    "planner.search",
    "switching.migrate switching.eviction switching.settings switching.variants switching.whole switching.members",
    "switching.step",
    "planner.dispatch planner.gathered_ops",
    "planner.simulate",
    "planner.price",
    "planner.count",
    "planner.values planner",
    "program",
    "transforms.passes",
    "transforms.show",
    "transforms.lowering",
    "transforms.specialize",
    "transforms.layouts",
    "transforms.rewrites",
    "deduction.factors transforms",
    "deduction.rules deduction",
    "graph",
    "switching.bridge",
    "switching.home switching",
    "comm_ops.resolve",
    "comm_ops.ops",
    "plans cluster",
    "comm_ops.wire",
    "comm_ops.plans comm_ops batches",
    "show",
    "annotations base",
    "errors",
)
BESIDE = ("hetu_fx_align", "hetu_fx_emulate", "examples")  # what uses the product and is not part of it
COMMANDS_BESIDE = ("hetu_fx_emulate.command.",)  # what the command line alone runs of it
FACADE = "hetu_fx"  # hetu_fx/__init__.py: gives the public names, imports nothing of the top floor
OUTSIDE = ("hetu_fx.cli", "hetu_fx.integrations")  # these may use the public names


def source_files() -> Iterator[tuple[str, Path]]:
    """Yield (import name, file) of every module: the mapped folders are read, the links to them skipped."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    mapping: Mapping[str, str] = project["tool"]["setuptools"]["package-dir"]
    for package, folder in mapping.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if not any((ROOT / folder).joinpath(*parts[:end]).is_symlink() for end in range(1, len(parts))):
                yield ".".join((package, *parts)).removesuffix(".__init__"), path


MODULES = dict(source_files())


def imports_of(name: str, tree: ast.AST, is_package: bool) -> Iterator[tuple[str, int]]:
    """Yield (imported name, line): `from a import b` as a.b, be it a module or an attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = name.split(".")[: None if is_package and node.level == 1 else -node.level or None]
            origin = ".".join((*(base if node.level else ()), *((node.module,) if node.module else ())))
            yield from ((f"{origin}.{alias.name}", node.lineno) for alias in node.names)


def module_of(imported: str, modules: Container[str] = MODULES) -> str | None:
    """Find the module of ours that an imported name is, or is an attribute of."""
    while imported not in modules:
        if "." not in imported:
            return None
        imported = imported.rpartition(".")[0]
    return imported


class WithoutTypeImports(ast.NodeTransformer):
    """Drops what stands under `if TYPE_CHECKING`."""

    def visit_If(self, node: ast.If) -> ast.AST:
        is_typing = "TYPE_CHECKING" in ast.unparse(node.test)
        return ast.Module(body=node.orelse, type_ignores=[]) if is_typing else self.generic_visit(node)


@functools.cache
def edges(*, with_types: bool = True) -> tuple[tuple[str, str, str], ...]:
    """List (importer, imported, place) between two modules of ours."""
    found = []
    for name, path in MODULES.items():
        tree: ast.AST = ast.parse(path.read_text(), filename=str(path))
        tree = tree if with_types else WithoutTypeImports().visit(tree)
        for imported, line in imports_of(name, tree, path.name == "__init__.py"):
            target = module_of(imported)
            if target is not None and target != name:
                found.append((name, target, f"{path.relative_to(ROOT)}:{line}"))
    return tuple(found)


def floor(module: str) -> int | None:
    """Give the floor's row (0 is the top) by the longest name that places the module."""
    return max(places(module))[1] if places(module) else None


def places(module: str) -> list[tuple[int, int, str]]:
    """List (length of the name, row, name) of all names in FLOORS that the module or a package around it has."""
    rows = [(name, row) for row, line in enumerate(FLOORS) for name in line.split()]
    return [(len(name), row, name) for name, row in rows if f"{module}.".startswith(f"hetu_fx.{name}.")]


def package(module: str) -> str:
    """Name the folder of a module; a file beside folders counts for itself where FLOORS names it."""
    return max(places(module))[2]


def test_every_module_has_a_floor() -> None:
    homeless = [name for name in MODULES if name != FACADE and floor(name) is None]
    assert not homeless, "give it a place in FLOORS"


def test_nothing_imports_from_a_floor_above() -> None:
    upward = [
        f"{place}: {name} (floor '{FLOORS[here]}') imports {target} (floor '{FLOORS[there]}')"
        for name, target, place in edges()
        if FACADE not in (name, target)
        and (here := floor(name)) is not None
        and (there := floor(target)) is not None
        and there < here
    ]
    assert not upward, "\n".join(upward)


def test_every_name_in_the_table_exists() -> None:
    names = {name for line in FLOORS for name in line.split()}
    assert not {name for name in names if f"hetu_fx.{name}" not in MODULES}


def test_packages_use_each_other_in_one_direction() -> None:
    graph: dict[str, set[str]] = {}
    for name, target, _ in edges():
        if FACADE not in (name, target) and package(name) != package(target):
            graph.setdefault(package(name), set()).add(package(target))
    check_no_circle(graph)


def check_no_circle(graph: Mapping[str, set[str]]) -> None:
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"import cycle: {' <- '.join(error.args[1])}")


def test_there_are_no_import_cycles() -> None:
    # Two modules of one room may name each other's types; what runs may not go in a circle.
    graph: dict[str, set[str]] = {name: set() for name in MODULES}
    for name, target, _ in edges(with_types=False):
        if target != FACADE:
            graph[name].add(target)
    check_no_circle(graph)


def test_the_inside_never_imports_the_public_names() -> None:
    inner = [(place, name) for name, target, place in edges() if target == FACADE]
    users = [f"{place}: {name}" for place, name in inner if not name.startswith(OUTSIDE)]
    assert not users, "import from the defining module:\n" + "\n".join(users)


def test_the_core_never_imports_an_integration() -> None:
    users = [
        f"{place}: {name} imports {target}"
        for name, target, place in edges()
        if target.startswith("hetu_fx.integrations") and not name.startswith(OUTSIDE)
    ]
    assert not users, "\n".join(users)


def test_the_product_imports_nothing_that_is_beside_it_but_its_commands() -> None:
    users = [
        f"{path.relative_to(ROOT)}:{line}: {name} imports {imported}"
        for name, path in MODULES.items()
        for imported, line in imports_of(name, ast.parse(path.read_text()), path.name == "__init__.py")
        if imported.startswith(BESIDE)
        and not (name.startswith("hetu_fx.cli.") and imported.startswith(COMMANDS_BESIDE))
    ]
    assert not users, "\n".join(users)


def test_the_facade_does_not_import_the_command_line() -> None:
    assert not [place for name, target, place in edges() if name == FACADE and target.startswith("hetu_fx.cli")]


def test_integrations_use_only_public_names_and_errors() -> None:
    allowed = ("hetu_fx.errors", "hetu_fx.integrations", "hetu_fx.base.patches")  # one table of what is replaced
    users = [
        f"{place}: {name} imports {target}"
        for name, target, place in edges()
        if name.startswith("hetu_fx.integrations") and target != FACADE and not target.startswith(allowed)
    ]
    assert not users, "\n".join(users)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from hetu_fx import plans", ["hetu_fx.plans"]),
        ("import hetu_fx.graph.meta as m", ["hetu_fx.graph.meta"]),
        ("def f():\n    from .bridge import Bridge", ["hetu_fx.switching.bridge.Bridge"]),
    ],
)
def test_imports_are_read_in_every_spelling(source: str, expected: list[str]) -> None:
    assert [name for name, _ in imports_of("hetu_fx.switching.runtime", ast.parse(source), False)] == expected
