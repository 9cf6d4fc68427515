"""What a committed notebook must look like, and what it declares as parameters."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import tokenize
from pathlib import Path
from typing import Any

import nbformat

KERNEL = "python3"
_TIMINGS = ("ExecuteTime", "execution", "papermill")  # cell metadata that changes with every run
_SHELL = re.compile(r"^\s*(?:[\w., ]+=\s*)?!", re.M)


def tags(cell: nbformat.NotebookNode) -> list[str]:
    """A cell's tags."""
    return list(cell.metadata.get("tags", []))


def read(path: str | os.PathLike[str]) -> nbformat.NotebookNode:
    """Read a notebook as it is.

    Raises:
        FileNotFoundError, ValueError: if it is missing, or not a notebook.
    """
    # Not nbformat.read, which mends missing and repeated cell ids as it reads.
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not a notebook (it is not JSON: {error})") from error
    if not isinstance(content, dict) or "cells" not in content or "nbformat" not in content:
        raise ValueError(f"{path}: not a notebook of format 4 (it has no cells)")
    return nbformat.from_dict(_joined(content))


def _joined(content: dict[str, Any]) -> dict[str, Any]:
    """Sources as text: on disk they may be lists of lines."""
    cells = [{**cell, "source": "".join(cell.get("source", ""))} for cell in content["cells"]]
    return {**content, "cells": cells}


def parameters_cell(notebook: nbformat.NotebookNode, path: str | os.PathLike[str]) -> nbformat.NotebookNode:
    """The one code cell tagged `parameters`.

    Raises:
        ValueError: if there is none, or more than one.
    """
    found = [cell for cell in notebook.cells if cell.cell_type == "code" and "parameters" in tags(cell)]
    if len(found) != 1:
        raise ValueError(
            f"{path}: {len(found)} code cells are tagged `parameters`; there must be exactly one"
        )
    return found[0]


def literals(source: str, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Names and values of a parameters cell, which may hold nothing but `name = literal`.

    Raises:
        ValueError: for anything else, with the line.
    """
    values: dict[str, Any] = {}
    try:
        statements = ast.parse(source).body
    except SyntaxError as error:
        raise ValueError(f"{path}: the parameters cell is not Python: {error}") from error
    for statement in statements:
        line = f"line {statement.lineno} of the parameters cell, `{ast.unparse(statement)}`,"
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                try:
                    values[name] = ast.literal_eval(value)
                except ValueError as error:
                    raise ValueError(
                        f"{path}: {line} is not a plain literal; derive values in the next cell"
                    ) from error
            case _:
                raise ValueError(f"{path}: {line} is not of the form `name = literal`")
    return values


def uncommented(source: str) -> list[str]:
    """Names assigned in a parameters cell without a comment on the line or right above it."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
    assigned = [node for node in ast.parse(source).body if isinstance(node, ast.Assign | ast.AnnAssign)]
    code = {line for node in assigned for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    missing = []
    for node in assigned:
        own = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        above = node.lineno - 1 in comments and node.lineno - 1 not in code
        if not above and not any(line in comments for line in own):
            missing.append(ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target))
    return missing


def lint_notebook(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Say everything that is wrong with a notebook as a file; nothing is run. Empty when all is well.

    Checked: nbformat 4.5 and its schema; kernelspec python3; unique cell ids; no outputs, execution counts,
    timings, widget state or interpreter version; exactly one parameters cell, of plain literals with a
    comment each; no shell escapes (`!command` goes on when the command fails); no cells that are expected to
    raise.

    Raises:
        FileNotFoundError, ValueError: if it is missing, or not a notebook.
    """
    notebook = read(path)
    if (notebook.nbformat, notebook.nbformat_minor) != (4, 5):
        return (f"nbformat is {notebook.nbformat}.{notebook.nbformat_minor}; it must be 4.5",)
    problems = _schema(notebook) + _metadata(notebook)
    for number, cell in enumerate(notebook.cells):
        problems += [f"cell {number} ({cell.get('id', 'no id')}): {text}" for text in _cell(cell)]
    try:
        source = parameters_cell(notebook, path).source
        literals(source, path)
        problems += [f"parameter {name} has no comment" for name in uncommented(source)]
    except ValueError as error:
        problems.append(str(error).removeprefix(f"{path}: "))
    return tuple(problems)


def _schema(notebook: nbformat.NotebookNode) -> list[str]:
    ids = [cell["id"] for cell in notebook.cells if "id" in cell]
    problems = [
        f"cell id {name!r} occurs {ids.count(name)} times" for name in sorted(set(ids)) if ids.count(name) > 1
    ]
    if len(ids) < len(notebook.cells):
        return [*problems, f"{len(notebook.cells) - len(ids)} cells have no id"]
    if not problems:
        try:
            nbformat.validate(notebook)
        except nbformat.ValidationError as error:
            problems.append(f"not valid nbformat 4.5: {str(error).splitlines()[0]}")
    return problems


def _metadata(notebook: nbformat.NotebookNode) -> list[str]:
    problems = []
    spec = notebook.metadata.get("kernelspec", {})
    for key, wanted in (("name", KERNEL), ("language", "python")):
        if spec.get(key) != wanted:
            problems.append(f"kernelspec {key} is {spec.get(key)!r}; it must be {wanted!r}")
    problems += [f"has {key} metadata" for key in ("papermill", "widgets") if key in notebook.metadata]
    if "version" in notebook.metadata.get("language_info", {}):
        problems.append("language_info names an interpreter version, which changes with every machine")
    return problems


def _cell(cell: nbformat.NotebookNode) -> list[str]:
    problems = [f"has timings ({key})" for key in _TIMINGS if key in cell.metadata]
    if cell.cell_type != "code":
        return problems
    if cell.outputs:
        problems.append("has outputs")
    if cell.execution_count is not None:
        problems.append(f"has an execution count ({cell.execution_count})")
    if not cell.source.strip():
        problems.append("is empty")
    if "raises-exception" in tags(cell):
        problems.append("is tagged raises-exception; catch the exception and show it instead")
    if _SHELL.search(cell.source):
        problems.append(
            "runs a shell command with `!`, whose failure goes unnoticed; use subprocess.run(..., check=True)"
        )
    return problems
