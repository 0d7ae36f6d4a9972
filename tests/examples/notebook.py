"""Runs a notebook's code cells in order in one namespace, and gives what each shows, as the file has it.

Run as `python -m tests.examples.notebook NOTEBOOK`: it prints the outputs of all code cells as JSON. A kernel would do
no more for cells of plain Python, and needs sockets and three packages.
"""

from __future__ import annotations

import ast
import base64
import io
import json
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

PICTURES = {"image/png": "_repr_png_", "image/svg+xml": "_repr_svg_", "text/html": "_repr_html_"}


def run_cells(sources: list[str]) -> list[list[dict[str, Any]]]:
    """Run the cells; return the outputs of each: what it printed, and its last expression."""
    names: dict[str, Any] = {"__name__": "__main__"}
    outputs = []
    for number, source in enumerate(sources, 1):
        printed = io.StringIO()
        with redirect_stdout(printed):
            value = _run(source, names, f"cell {number}")
        text = printed.getvalue()
        streams = [{"name": "stdout", "output_type": "stream", "text": lines(text)}] if text else []
        outputs.append([*streams, *([] if value is None else [_shown(value, number)])])
    return outputs


def lines(text: str) -> list[str]:
    """Return text as notebooks keep it: lines with their ends."""
    return text.splitlines(keepends=True)


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cells of a notebook that are run."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def _run(source: str, names: dict[str, Any], name: str) -> Any:
    """Run a cell; return the value of its last statement, if that is an expression."""
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), name, "eval"), names)


def _shown(value: Any, number: int) -> dict[str, Any]:
    data: dict[str, Any] = {"text/plain": lines(repr(value) if isinstance(value, str) else str(value))}
    for kind, method in PICTURES.items():
        picture = getattr(value, method, lambda: None)()
        if picture is not None:
            data[kind] = base64.b64encode(picture).decode() if isinstance(picture, bytes) else lines(picture)
    return {"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    read = json.loads(Path(sys.argv[1]).read_text())
    print(json.dumps(run_cells(["".join(cell["source"]) for cell in code_cells(read)])))
