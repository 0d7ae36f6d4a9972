"""What the tree looks like, in numbers: `python -m tests.house` prints them, `test_house.py` holds them.

Read from the syntax trees of the product's modules: sizes of files and folders, modules that exactly one other imports,
class names with several meanings, and public functions that nobody else names.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import statistics
import subprocess
from collections import Counter, defaultdict
from collections.abc import Mapping

from tests.test_layers import FACADE, MODULES, ROOT, edges

Function = ast.FunctionDef | ast.AsyncFunctionDef

ENTRIES = {"main"}  # named by pyproject.toml or by `python -m`


@functools.cache
def trees() -> Mapping[str, ast.Module]:
    """Return the syntax tree of every module of the product."""
    return {name: ast.parse(path.read_text(), filename=str(path)) for name, path in MODULES.items()}


def lines_per_file() -> dict[str, int]:
    """Return the lines of every module, `__init__` files left out."""
    return {name: len(path.read_text().splitlines()) for name, path in MODULES.items() if path.stem != "__init__"}


def files_per_folder() -> Counter[str]:
    """Count the modules in every folder of product, tests and benchmarks (of these, those that can be run)."""
    benchmarks = [path for path in (ROOT / "benchmarks").rglob("*.py") if path.stem != "__init__"]
    files = (*MODULES.values(), *(ROOT / "tests").rglob("*.py"), *benchmarks)
    return Counter(str(path.parent.relative_to(ROOT)) for path in files)


def with_one_importer() -> dict[str, str]:
    """Return the modules that exactly one other module of the product imports, with that one."""
    importers = defaultdict(set)
    for name, target, _ in edges():
        importers[target].add(name)
    modules = {name for name, path in MODULES.items() if path.stem != "__init__"}
    return {
        name: next(iter(by)) for name, by in sorted(importers.items()) if name in modules and len(by - {FACADE}) == 1
    }


def classes_defined_twice() -> dict[str, list[str]]:
    """Return the class names that several modules define, with the modules."""
    places = defaultdict(list)
    for module, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module)
    return {name: modules for name, modules in sorted(places.items()) if len(modules) > 1}


def named_by_nobody() -> list[str]:
    """List the public functions and classes whose names stand in no other file of product, tests and benchmarks."""
    files = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard", "*.py"], cwd=ROOT, text=True)
    words = {
        path: set(re.findall(r"\w+", path.read_text())) for path in map(ROOT.joinpath, files.split()) if path.exists()
    }
    uses = Counter(word for found in words.values() for word in found)
    return [
        f"{module}.{node.name}"
        for module, tree in trees().items()
        for node in tree.body
        if isinstance(node, Function) and not node.name.startswith("_")
        if uses[node.name] == 1 and node.name not in ENTRIES
    ]


def function_lengths() -> list[int]:
    """Return the lines of every function of the product."""
    nodes = (node for tree in trees().values() for node in ast.walk(tree) if isinstance(node, Function))
    return [node.end_lineno - node.lineno + 1 for node in nodes if node.end_lineno is not None]


def numbers() -> dict[str, float]:
    """Return what is counted, by name."""
    lines, lengths = lines_per_file(), sorted(function_lengths())
    return {
        "lines of the product": sum(lines.values()),
        "files": len(lines),
        "median lines per file": statistics.median(lines.values()),
        "files over 250 lines": sum(count > 250 for count in lines.values()),
        "most files in a folder": max(files_per_folder().values()),
        "median lines per function": statistics.median(lengths),
        "lines of nine functions in ten": lengths[int(len(lengths) * 0.9)],
        "modules with one importer": len(with_one_importer()),
        "class names defined twice": len(classes_defined_twice()),
        "public functions that nobody else names": len(named_by_nobody()),
    }


def main() -> None:
    """Print the numbers, what is behind them, and one line of JSON."""
    for count, folder in sorted(((count, folder) for folder, count in files_per_folder().items()), reverse=True)[:12]:
        print(f"{count:5}  {folder}")
    for title, found in (("one importer", with_one_importer()), ("defined twice", classes_defined_twice())):
        print(f"\n{title}:", *(f"  {name}  {where}" for name, where in found.items()), sep="\n")
    print("\nnamed by nobody else:", *(f"  {name}" for name in named_by_nobody()), sep="\n")
    print("", *(f"{value:8g}  {name}" for name, value in numbers().items()), sep="\n")
    print(json.dumps(numbers()))


if __name__ == "__main__":
    main()
