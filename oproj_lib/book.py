"""The book: every notebook executed, one HTML page each, and an index. It needs no network and no server."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from oproj_lib.notebook_html import heading, index_page
from oproj_lib.notebooks import NotebookFailed, NotebookRun, run_notebook

TITLE = "Attention output projection on Hopper and Blackwell: a workbook"


def build_book(
    notebooks: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    *,
    title: str = TITLE,
    on_page: Callable[[NotebookRun], None] = lambda run: None,
) -> Path:
    """Run all notebooks of a folder in name order and write OUTPUT_DIR/index.html, whose path is returned.

    Args:
        notebooks: the folder; its *.ipynb are the chapters.
        output_dir: where the pages and the executed notebooks go.
        title: heading of the index.
        on_page: called after each notebook, for progress.

    Raises:
        FileNotFoundError: if the folder holds no notebooks.
        NotebookFailed: after all notebooks ran, if any failed, naming each. No index is written then.
    """
    chapters = sorted(Path(notebooks).glob("*.ipynb"))
    if not chapters:
        raise FileNotFoundError(f"there are no notebooks (*.ipynb) in {notebooks}")
    index = Path(output_dir) / "index.html"
    index.unlink(missing_ok=True)
    runs: list[NotebookRun] = []
    failures: list[NotebookFailed] = []
    for chapter in chapters:
        try:
            runs.append(run_notebook(chapter, output_dir=output_dir))
            on_page(runs[-1])
        except NotebookFailed as failure:
            failures.append(failure)
    if failures:
        raise NotebookFailed(
            f"{len(failures)} of {len(chapters)} notebooks failed:\n" + "\n".join(map(str, failures))
        )
    index.write_text(index_page(title, _entries(runs)), encoding="utf-8")
    return index


def _entries(runs: Sequence[NotebookRun]) -> list[tuple[str, str, str]]:
    return [(run.html.name, heading(run.source), f"ran in {run.seconds:.0f} s") for run in runs]
