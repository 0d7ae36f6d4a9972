"""Find the repeated blocks of a model (transformer layers, residual blocks) from module stacks.

A chain is a run of two or more executed children with the same class and consecutive numbers for names,
as in a ModuleList. Only outermost chains count, and only chains of containers if there are any (so that the
layers of a transformer are blocks, and the two Linears of a head are not). Several chains (encoder, then
decoder) are concatenated in the order of execution.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ModuleStack = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Child:
    """An executed module whose name is a number."""

    path: str
    class_name: str
    has_children: bool

    @property
    def parent(self) -> str:
        """Return the FQN of the container."""
        return self.path.rpartition(".")[0]

    @property
    def number(self) -> int:
        """Return the position in the container."""
        return int(self.path.rpartition(".")[2])


def find_blocks(stacks: Iterable[ModuleStack]) -> tuple[str, ...]:
    """Return the FQNs of the repeated blocks in order of execution; empty if there are none.

    Args:
        stacks: for each op in order of execution, (FQN, class name) of the modules around it,
            outermost first.
    """
    chains = _chains(_numbered_children(stacks))
    chains = [chain for chain in chains if not _is_nested(chain, chains)]
    containers = [chain for chain in chains if any(child.has_children for child in chain)]
    return tuple(child.path for chain in containers or chains for child in chain)


def block_index(stack: ModuleStack, block_paths: Sequence[str]) -> int | None:
    """Return which of the blocks stands in the module stack, if any."""
    paths = {path for path, _ in stack}
    return next((index for index, path in enumerate(block_paths) if path in paths), None)


def _numbered_children(stacks: Iterable[ModuleStack]) -> list[Child]:
    classes: dict[str, str] = {}
    parents: set[str] = set()
    for stack in stacks:
        for index, (path, class_name) in enumerate(stack):
            classes.setdefault(path, class_name)
            if index + 1 < len(stack):
                parents.add(path)
    numbered = (path for path in classes if path.rpartition(".")[2].isdigit())
    return [Child(path, classes[path], path in parents) for path in numbered]


def _chains(children: list[Child]) -> list[list[Child]]:
    runs: list[list[Child]] = []
    continued: dict[tuple[str, str, int], list[Child]] = {}
    for child in children:
        run = continued.pop((child.parent, child.class_name, child.number), [])
        if not run:
            runs.append(run)
        run.append(child)
        continued[child.parent, child.class_name, child.number + 1] = run
    return [run for run in runs if len(run) > 1]


def _is_nested(chain: list[Child], chains: list[list[Child]]) -> bool:
    outer = [child.path + "." for other in chains if other is not chain for child in other]
    return any(chain[0].path.startswith(path) for path in outer)
