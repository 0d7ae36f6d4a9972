"""The product gets smaller, or says why not; and none of its public functions and classes is there for nobody."""

from __future__ import annotations

from dataclasses import replace
from subprocess import CalledProcessError

import pytest

from tests.house.__main__ import lines_beside, main
from tests.house.budget import FILE, Limit, above, below, complaints, counts, moved, new_names, read, written
from tests.house.measures import MEASURES, named_by_nobody, named_in_one_file
from tests.house.state import module_state
from tests.house.tree import Module, at, now
from tests.test_layers import ROOT

DOCS = ROOT / "docs"

# What programs of users call and nothing of the product: the page that tells them.
FOR_USERS = {
    "hetu_fx.batches.packing.pack_batch": "sequences.md",
    "hetu_fx.comm_ops.resolve.explain.explain": "concepts.md",
    "hetu_fx.deduction.rules.registry.unregister_rule": "concepts.md",
    "hetu_fx.export.load.load_exported": "export.md",
    "hetu_fx.export.load.load_single": "export.md",
}


def module(text: str, name: str = "hetu_fx.part", folder: str = "hetu_fx") -> Module:
    return Module(name, folder, name.rpartition(".")[2], text)


def names_of(measure: str, *modules: Module) -> list[str]:
    return [one.name for one in MEASURES[measure].find(modules)]


def test_each_number_is_the_one_of_the_budget() -> None:
    found = complaints(now(), read(FILE.read_text()))
    assert not found, "\n".join(found)


def test_public_functions_and_classes_are_named_by_the_product_itself() -> None:
    assert sorted(named_by_nobody(now())) == sorted(FOR_USERS)
    assert [name for name, page in FOR_USERS.items() if name.rpartition(".")[2] not in (DOCS / page).read_text()] == []


def test_functions_that_only_their_own_file_names_are_private() -> None:
    assert named_in_one_file(now()) == []


def test_the_tree_at_a_commit_is_read_as_the_working_tree_is() -> None:
    try:
        tree = at("HEAD")
    except (OSError, CalledProcessError):
        pytest.skip("not in a clone of the repository")
    assert {one.name for one in tree} & {one.name for one in now()} >= {"hetu_fx", "hetu_fx.comm_ops.wire.groups"}


def test_a_number_above_its_limit_is_told_with_what_is_new() -> None:
    before, after = (module("class A: ..."),), (module("class A: ...\nclass B: ..."),)
    limits = moved(counts(before), {})
    assert ("public classes", "hetu_fx", Limit(1, 1)) in above(counts(after), limits)
    assert new_names(after, before, "public classes", "in all") == ["hetu_fx.part.B"]
    assert new_names(after, before, "lines", "hetu_fx") == ["hetu_fx.part"]


def test_a_number_below_its_limit_is_told_too() -> None:
    limits = moved(counts((module("class A: ..."),)), {})
    assert ("public classes", "in all", Limit(1, 1)) in below(counts((module("x = 1"),)), limits)


def test_a_folder_without_a_row_may_have_nothing() -> None:
    limits = moved(counts((module("x = 1"),)), {})
    found = counts((module("x = 1"), module("class A: ...", "hetu_fx.new.one", "hetu_fx/new")))
    assert ("public classes", "hetu_fx/new", Limit(0, 0)) in above(found, limits)


def test_what_rises_needs_a_reason_which_stays_until_it_has_fallen() -> None:
    small, large = {"caches": {"in all": 2}}, {"caches": {"in all": 5}}
    limits = moved(small, {})
    with pytest.raises(ValueError, match="caches, in all: 5"):
        moved(large, limits)
    raised = moved(large, limits, "the speed of searches")
    assert raised["caches"]["in all"] == Limit(5, 2, "the speed of searches")
    assert moved({"caches": {"in all": 4}}, raised)["caches"]["in all"] == Limit(4, 2, "the speed of searches")
    assert moved(small, raised)["caches"]["in all"] == Limit(2, 2)


def test_limits_are_written_as_they_are_read() -> None:
    limits = {"caches": {"in all": Limit(5, 2, 'why "so"'), "hetu_fx": Limit(3, 3)}}
    assert read(written(limits)) == limits


def test_a_raised_number_without_its_reason_is_refused() -> None:
    with pytest.raises(ValueError, match="reason"):
        read('["caches"]\n"in all" = [5, 2, ""]')


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from functools import cache\n@cache\ndef f(): ...", ["hetu_fx.part.f"]),
        ("import functools\n@functools.lru_cache(maxsize=3)\ndef f(): ...", ["hetu_fx.part.f"]),
        (
            "from functools import cached_property\nclass A:\n    @cached_property\n    def f(self): ...",
            ["hetu_fx.part.f"],
        ),
        ("from functools import cache\ng = cache(len)", ["hetu_fx.part."]),
        ("def cache(f): return f\n@cache\ndef f(): ...", []),
    ],
)
def test_caches_are_found_however_they_are_put_on(text: str, expected: list[str]) -> None:
    assert names_of("caches", module(text)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.nn.Linear.forward = len",
        "import torch\ndef f():\n    kind = torch.optim.Optimizer\n    kind.step = len",
        "import sys\nsys.meta_path.insert(0, object())",
        "from torch.optim.optimizer import register_optimizer_step_post_hook\nregister_optimizer_step_post_hook(len)",
        "from unittest import mock\nimport torch\nmock.patch.object(torch, 'add', len)",
        "def f(layer):\n    layer._weights = []",
        "def f(owner, name):\n    setattr(owner, name, len)",
        "from torch.distributed.distributed_c10d import _world\n_world.pg_group_ranks[1] = {}",
    ],
)
def test_what_is_written_into_other_libraries_is_a_patch(text: str) -> None:
    assert len(names_of("patches", module(text))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "import numpy as np\nnp.append([1], 2)",
        "class A:\n    def f(self, other):\n        self._x = 1\n        other._x = 2",
        "import torch\nx = torch.zeros(3)\nx[0] = 1",
        "def f(self, name):\n    setattr(self, name, 1)",
    ],
)
def test_what_is_ones_own_is_no_patch(text: str) -> None:
    assert names_of("patches", module(text)) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("known = {}\ndef f(x): known[x] = 1", ["hetu_fx.part.known"]),
        ("known = []\ndef f(x): known.append(x)", ["hetu_fx.part.known"]),
        ("current = None\ndef f(x):\n    global current\n    current = x", ["hetu_fx.part.current"]),
        ("from threading import Lock\nlock = Lock()", ["hetu_fx.part.lock"]),
        ("class A:\n    def f(self): self.x = 1\nthe = A()", ["hetu_fx.part.the"]),
        ("class A: ...\nthe = A()\ndef f(): the.x = 1", ["hetu_fx.part.the"]),
        ("class A:\n    known = {}", ["hetu_fx.part.A.known"]),
        ("TABLE = {1: 2}\ndef f(x):\n    TABLE = {}\n    TABLE[x] = 1", []),
        ("TABLE = {1: 2}\ndef f(x): return TABLE[x]", []),
        ("class A:\n    def __init__(self): self.x = 1\n    def f(self): return self.x\nthe = A()", []),
    ],
)
def test_what_changes_while_a_program_runs_is_state(text: str, expected: list[str]) -> None:
    assert [name for _, name in module_state((module(text),))] == expected


def test_state_that_another_module_changes_is_found() -> None:
    owner = module("OPS = {}", "hetu_fx.ops")
    user = module("from hetu_fx.ops import OPS\ndef f(x): OPS[x] = 1", "hetu_fx.user")
    assert [name for _, name in module_state((owner, user))] == ["hetu_fx.ops.OPS"]


def test_names_that_several_modules_have_count_once_in_all() -> None:
    one = module("class A: ...", "hetu_fx.base.part", "hetu_fx/base")
    tree = (one, replace(one, name="hetu_fx.graph.part", folder="hetu_fx/graph"))
    for measure in ("class names", "stems"):
        assert counts(tree)[measure] == {"in all": 1, "hetu_fx/base": 1, "hetu_fx/graph": 1}


def test_a_module_that_one_other_imports_is_found() -> None:
    tree = (module("", "hetu_fx.low"), module("import hetu_fx.low", "hetu_fx.high"))
    assert names_of("one importer", *tree) == ["hetu_fx.low"]


def test_a_name_that_only_its_definition_has_is_told() -> None:
    tree = (module("def used(): ...\ndef unused():\n    '''unused'''\nused()\nclass Alone: ..."),)
    assert named_by_nobody(tree) == ["hetu_fx.part.unused", "hetu_fx.part.Alone"]


def test_what_is_exported_by_name_is_named() -> None:
    assert named_by_nobody((module("def load(): ...\nLAZY = {'load': 'hetu_fx.part:load'}"),)) == []


def test_a_measure_can_be_listed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--list", "class names"])
    assert "hetu_fx" in capsys.readouterr().out


def test_packages_beside_are_counted_apart() -> None:
    folders = {module.folder for module in now()}
    assert all(count and name not in folders for name, count in lines_beside().items())
