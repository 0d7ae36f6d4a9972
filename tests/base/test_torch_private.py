"""Torch's private names stand in three modules: the installed torch has all of them, and nothing else uses any."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import fx, nn
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch.fx import graph_module
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tests.base.test_torch_private_calls import BY_THE_COMPILER, CALLS
from tests.house.tree import trees

HOME = "hetu_fx.base.torch_private"
HOMES = (HOME, "hetu_fx.base.torch_compile", "hetu_fx.base.torch_compile")  # the others: of torch's compilers
PUBLIC = {"_actions", "_current_frames", "_exit", "_fields", "_getframe", "_make", "_replace"}
# Documented of sys, os and named tuples; `_actions` is what argparse's completers read, for want of another way.
ASKED_BY_TEXT = ("getattr", "hasattr", "setattr", "delattr", "object", "attrgetter", "methodcaller")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def chain(node: ast.expr) -> list[str]:
    """Return the parts of `a.b.c`; the first is empty where it is no name."""
    if isinstance(node, ast.Attribute):
        return [*chain(node.value), node.attr]
    return [node.id] if isinstance(node, ast.Name) else [""]


def origins(tree: ast.AST) -> dict[str, str]:
    """Return the full names of what a module imports, by the names that it has there."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname: alias.name for alias in node.names if alias.asname}
            found |= {name: name for alias in node.names if (name := alias.name.split(".")[0]) and not alias.asname}
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def full_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield (full name, line) of all that a module imports of torch, and of all that it reaches from that."""
    known = origins(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.Attribute) and (parts := chain(node))[0] in known:
            yield ".".join((known[parts[0]], *parts[1:])), node.lineno


def private_of_torch(tree: ast.AST) -> set[tuple[str, int]]:
    """Return (full name, line) of private names that a module reaches by torch's modules and classes."""
    return {
        (name, line)
        for name, line in full_names(tree)
        if name.split(".")[0] in ("torch", "functorch") and not name.startswith("torch.ops.")
        if any(map(is_private, name.split(".")))
    }


def defined(tree: ast.AST) -> set[str]:
    """Return the private names that a module gives to functions, classes, fields and attributes of its own."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and chain(node)[0] in ("self", "cls"):
            found.add(node.attr)
    return set(filter(is_private, found))


def private_of_objects(tree: ast.AST) -> Iterator[tuple[str, str, int]]:
    """Yield (what it is asked of, name, line) of private attributes, ops and documented ones left out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if "aten" not in (parts := chain(node)) and parts[:2] != ["torch", "ops"]:
                yield parts[0], node.attr, node.lineno
        elif isinstance(node, ast.Call) and chain(node.func)[-1] in ASKED_BY_TEXT:
            for name in node.args[:2]:
                if isinstance(name, ast.Constant) and isinstance(name.value, str) and is_private(name.value):
                    yield "", name.value, node.lineno


def resolves(name: str) -> bool:
    """Tell whether a full name leads to something."""
    module, rest = name, []
    while True:
        try:
            found: Any = importlib.import_module(module)
            break
        except ImportError:
            module, _, last = module.rpartition(".")
            rest.insert(0, last)
    for part in rest:
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


class OwnTensor(torch.Tensor):
    """A tensor of another type, which torch marks if it is made a parameter."""


def as_described(name: str) -> SimpleNamespace:
    """Return what has the methods of a class that this build of torch may lack, by torch's own description of it."""
    text = Path(torch.__file__).with_name("_C").joinpath("_distributed_c10d.pyi").read_text()
    (kind,) = (one for one in ast.walk(ast.parse(text)) if isinstance(one, ast.ClassDef) and one.name == name)
    return SimpleNamespace(**{one.name: one for one in kind.body if isinstance(one, ast.FunctionDef)})


def examples() -> Mapping[str, Any]:
    """Return something that has each private attribute of objects."""
    add = torch.ops.aten.add.Tensor
    group, gloo = torch.distributed.ProcessGroup, torch.distributed.ProcessGroupGloo
    return {
        "_schema": add,
        "_opname": add,
        "_overloadname": add,
        "_name": add,
        "_rename": fx.Graph().placeholder("x"),
        "_version": torch.zeros(2),
        "_backward_hooks": torch.zeros(2),
        "_post_accumulate_grad_hooks": torch.zeros(2),
        "_cdata": torch.zeros(2).untyped_storage(),
        "_parameters": nn.Linear(2, 2),
        "_buffers": nn.Linear(2, 2),
        "_non_persistent_buffers_set": nn.Linear(2, 2),
        "_flat_weight_refs": nn.GRU(2, 2),
        "_flat_weights": nn.GRU(2, 2),
        "_boxed_call": make_boxed_func(print),
        "_set_replacement": ShapeEnv,
        "_update_version_counter": ShapeEnv,
        "_version_counter": ShapeEnv(),
        "_expr": (size := ShapeEnv().create_unbacked_symint().node),
        "_hint": size,
        "_loader": graph_module,
        "_underlying_non_prefix_store": torch._C._distributed_c10d.PrefixStore,
        "_get_backend": group,
        "_get_sequence_number_for_group": group,
        "_group_start": as_described("ProcessGroupNCCL"),
        "_group_end": as_described("ProcessGroupNCCL"),
        "_device_types": group,
        "_timeout": torch._C._distributed_c10d.Backend.Options,
        "_Options": gloo,
        "_devices": gloo._Options,
        "_threads": gloo._Options,
        "_load_library_inner": CppPythonBindingsCodeCache,
        "_can_decompose": torch.ops.aten.linear.default,
        "_check_input_dim": nn.BatchNorm1d(2),
        "_flat_weights_names": nn.LSTM(2, 2),
        "_is_param": nn.Parameter(torch.zeros(2).as_subclass(OwnTensor)),
    }


IN_THE_MODULES = sorted({name for home in HOMES for name, _ in private_of_torch(trees()[home])})
OF_OBJECTS = sorted(
    {
        name
        for home in HOMES
        for owner, name, _ in private_of_objects(trees()[home])
        if owner not in ("torch", "Tensor") and name not in defined(trees()[home])
    }
)


@pytest.mark.parametrize("name", IN_THE_MODULES)
def test_the_installed_torch_has(name: str) -> None:
    assert resolves(name), f"torch {torch.__version__} has no {name}: {HOME} needs another way"


@pytest.mark.parametrize("name", OF_OBJECTS)
def test_objects_of_the_installed_torch_have(name: str) -> None:
    assert hasattr(examples()[name], name), f"torch {torch.__version__} has no {name}: {HOME} needs another way"


@pytest.mark.parametrize("name", [*IN_THE_MODULES, *OF_OBJECTS])
def test_there_is_a_call_for(name: str) -> None:
    called = " ".join((*CALLS, BY_THE_COMPILER)).split()
    assert any(f"{one}.".startswith(f"{name}.") for one in called), f"add a line for {name} to CALLS"


def test_calls_are_of_names_that_are_used() -> None:
    used = {*IN_THE_MODULES, *OF_OBJECTS}
    assert set(" ".join((*CALLS, BY_THE_COMPILER)).split()) <= used


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("from torch._guards import x", ["torch._guards.x"]),
        (
            "from torch import distributed as d\nd.distributed_c10d._world.count",
            ["torch.distributed.distributed_c10d._world"],
        ),
        (
            "import torch.distributed as dist\ndist._functional_collectives",
            ["torch.distributed._functional_collectives"],
        ),
        ("import torch\naten = torch.ops.aten\naten._softmax, torch.ops.aten._softmax", []),
    ],
)
def test_private_names_are_seen_in_every_spelling(source: str, names: list[str]) -> None:
    assert {name for name, _ in private_of_torch(ast.parse(source))} >= set(names)
    assert bool(private_of_torch(ast.parse(source))) == bool(names)


def test_no_other_module_uses_private_names_of_torch() -> None:
    found = {
        f"{module}:{line}: {name}"
        for module, tree in trees().items()
        if module not in HOMES
        for name, line in private_of_torch(tree)
    }
    assert not found, f"these belong into {HOME}:\n" + "\n".join(sorted(found))


def test_private_attributes_are_used_where_they_are_defined() -> None:
    everywhere = set().union(*map(defined, trees().values()))
    found = [
        f"{module}:{line}: {name}"
        for module, tree in trees().items()
        if module not in HOMES
        for owner, name, line in private_of_objects(tree)
        if name not in PUBLIC | (everywhere if owner in ("self", "cls") else defined(tree))
    ]
    assert not found, f"ask the owner by a public name; torch's belong into {HOME}:\n" + "\n".join(sorted(found))
