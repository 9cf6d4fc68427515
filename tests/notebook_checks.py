"""What all notebook tests ask of a notebook file and of a run."""

from __future__ import annotations

from pathlib import Path

import nbformat

from oproj_lib.notebook_lint import lint_notebook
from oproj_lib.notebooks import NotebookRun

LONGEST_CELL = 20  # lines: the logic is in the library


def check_committed(path: Path) -> list[str]:
    """Fails unless the file is as notebooks are committed here; returns the sources of its code cells."""
    assert lint_notebook(path) == ()
    notebook = nbformat.read(path, as_version=4)
    title = notebook.cells[0].source
    assert title.startswith("# ")
    assert all(f"**{word}" in title for word in ("What you will see", "What you need", "How long"))
    assert "notebook_intro.announce(" in notebook.cells[2].source  # says where it runs and what it skips
    code = [str(cell.source) for cell in notebook.cells if cell.cell_type == "code"]
    assert "assert" in code[-1] or "lessons.check" in code[-1]
    assert all(len(source.splitlines()) <= LONGEST_CELL for source in code[1:])
    return code


def results(run: NotebookRun) -> dict[str, str]:
    """Cell id -> its output."""
    notebook = nbformat.read(run.executed, as_version=4)
    return {cell.id: str(cell.outputs) for cell in notebook.cells if cell.cell_type == "code"}
