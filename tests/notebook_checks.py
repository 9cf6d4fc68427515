"""What all notebook tests ask of a notebook file and of a run."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import nbformat
import papermill

from oproj_lib.notebook_lint import lint_notebook
from oproj_lib.notebooks import NotebookRun, declared_parameters, run_notebook

FOLDER = Path(__file__).parents[1] / "notebooks"
LONGEST_CELL = 20  # lines: the logic is in the library
SHORTEST_ALT = 80  # characters: an alternative text says what the picture shows


class Runs(Protocol):
    """Runs of notebooks, each made once; the fixture `runs` is one per test file."""

    def __call__(self, path: Path, parameters: Mapping[str, Any] = ...) -> NotebookRun: ...


def runs_in(folder: Path) -> Runs:
    """Runs that leave their files in ``folder``."""
    made: dict[str, NotebookRun] = {}

    def run(path: Path, parameters: Mapping[str, Any] = {}) -> NotebookRun:
        key = f"{path} {sorted(parameters.items())}"
        if key not in made:
            made[key] = run_notebook(path, parameters, output_dir=folder, name=f"{path.stem}-{len(made)}")
        return made[key]

    return run


def numbered(number: str) -> Path:
    """The committed notebook of this number, "00" to "14"."""
    (path,) = FOLDER.glob(f"{number}_*.ipynb")
    return path


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


def check_declared(path: Path, changed: Collection[str]) -> None:
    """A notebook declares exactly the parameters that the tests change, and the device; papermill sees the same."""
    declared = declared_parameters(path)
    assert declared.keys() == papermill.inspect_notebook(path).keys()
    assert declared.keys() == {"device", *changed}


def check_pictures(run: NotebookRun, count: int) -> None:
    """The page shows so many pictures, each with an alternative text."""
    shown = re.findall(r'<img alt="([^"]*)"', run.html.read_text(encoding="utf-8"))
    assert len(shown) == count and all(len(alt) > SHORTEST_ALT for alt in shown)


def check_shown(usual: NotebookRun, changed: NotebookRun, says: Mapping[str, tuple[str, str]]) -> None:
    """Per parameter: a cell says a text in the changed run, and not in the usual one."""
    before, after = results(usual), results(changed)
    for parameter, (cell, text) in says.items():
        assert text in after[cell] and text not in before[cell], parameter
