"""`python -m oproj_lib.lessons [FOLDER]`: write the exercises into the cells of the notebooks that hold
them."""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat

from oproj_lib.lessons import EXERCISES, cells


def synchronise(folder: Path) -> list[Path]:
    """Bring the exercise cells of all notebooks of a folder up to date; the ones that changed."""
    sources = {identity: source for name in EXERCISES for identity, _, source in cells(name)}
    changed = []
    for path in sorted(folder.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        stale = [cell for cell in notebook.cells if sources.get(cell.id, cell.source) != cell.source]
        for cell in stale:
            cell.source = sources[cell.id]
        if stale:
            nbformat.write(notebook, path)
            changed.append(path)
    return changed


if __name__ == "__main__":
    for written in synchronise(Path(sys.argv[1] if len(sys.argv) > 1 else "notebooks")):
        print(written)
