"""The product's modules, as they are now or were at a commit: texts, syntax trees, and who imports whom."""

from __future__ import annotations

import ast
import functools
import io
import subprocess
import tarfile
import tomllib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath

from tests.test_layers import FACADE, MODULES, ROOT, imports_of, module_of

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One module of the product, by the name that it is imported by and the folder that it is in."""

    name: str
    folder: str
    stem: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of the tree, but those that say how a name is used, which are the most."""
        return tuple(node for node in ast.walk(self.tree) if not isinstance(node, ast.expr_context))

    @cached_property
    def imports(self) -> Mapping[str, str]:
        """What each name that is imported means: a module, or an attribute of one."""
        found = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found |= {one.asname or one.name.partition(".")[0]: one.name for one in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
                found |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
        return found


Tree = tuple[Module, ...]


@functools.cache
def now() -> Tree:
    """Return the modules as they are in the working tree."""
    return tuple(_module(name, str(path.relative_to(ROOT)), path.read_text()) for name, path in MODULES.items())


def at(commit: str) -> Tree:
    """Return the modules as they were at a commit.

    Raises:
        subprocess.CalledProcessError: there is no git here, or no such commit.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {folder: name for name, folder in project["tool"]["setuptools"]["package-dir"].items()}
    command = ["git", "archive", "--format=tar", commit, "--", *packages]
    archive = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        texts = {one.name: files.extractfile(one) for one in files if one.name.endswith(".py")}
        return tuple(
            _module(_import_name(packages, path), path, file.read().decode())
            for path, file in texts.items()
            if file is not None
        )


def _module(name: str, path: str, text: str) -> Module:
    return Module(name, str(PurePosixPath(path).parent), PurePosixPath(path).stem, text)


def _import_name(packages: Mapping[str, str], path: str) -> str:
    folder, *parts = PurePosixPath(path).with_suffix("").parts
    return ".".join((packages[folder], *parts)).removesuffix(".__init__")


def trees() -> Mapping[str, ast.Module]:
    """Return the syntax tree of every module of the product."""
    return {module.name: module.tree for module in now()}


def importers(tree: Tree) -> Mapping[str, set[str]]:
    """Return the modules that import each one, the one that gives the public names left out."""
    names, found = {module.name for module in tree}, defaultdict(set)
    for module in tree:
        body = [node for node in module.nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        for imported, _ in imports_of(module.name, ast.Module(body, []), module.stem == "__init__"):
            target = module_of(imported, names)
            if target not in (None, module.name) and module.name != FACADE:
                found[target].add(module.name)
    return found
