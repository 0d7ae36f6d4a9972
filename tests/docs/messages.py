"""The texts of the product that a user may read: errors, warnings, lines of logs, tables and help."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("hetu_fx", "comm_ops", "transforms", "switching", "integrations", "hetu_fx_align")
_LEAST_WORDS = 3
"""Shorter literals are keys, names and formats."""


def files() -> Iterator[Path]:
    """Yield the product's modules, each once: the folders below hetu_fx may be links to their neighbours."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not any(parent.is_symlink() for parent in path.parents):
                yield path


def messages(source: str) -> list[tuple[int, str]]:
    """Return the literals of a module that have a few words, with their lines; what is filled in is left out.

    Docstrings are none: those that users read are pages of the documentation.
    """
    tree = ast.parse(source)
    apart = {*_docstrings(tree), *_parts(tree)}
    texts = [(getattr(node, "lineno", 0), _text(node)) for node in ast.walk(tree) if node not in apart]
    return sorted((line, text) for line, text in texts if len(text.split()) >= _LEAST_WORDS)


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _parts(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the literals that strings with braces are made of."""
    yield from (part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values)


def _docstrings(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield strings that are statements of their own."""
    yield from (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
