"""Run notebooks by papermill, so that a notebook which did not fully work never passes.

`run_notebook` is the one way to execute a notebook outside JupyterLab: the command line, the book and the
tests call it. papermill alone lets several failures through; what is added here:

* parameters that the notebook does not declare, or of another type, are refused;
* the kernel is this very interpreter, whatever kernel specs the user has installed;
* each code cell must have run and finished (`sys.exit(0)` ends papermill's run without an error);
* no error output and no traceback on stderr, also from threads and failing magics;
* a cell has a time limit, and whatever the notebook started is ended with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import nbformat
import papermill
import psutil
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import Engine, papermill_engines
from papermill.exceptions import PapermillExecutionError

from oproj_lib.notebook_html import render_html
from oproj_lib.notebook_lint import KERNEL, lint_notebook, literals, parameters_cell, read, tags

__all__ = ["NotebookFailed", "NotebookRun", "declared_parameters", "lint_notebook", "run_notebook"]

CELL_TIMEOUT = 600  # seconds
_ENGINE = "oproj"
_MARK = "OPROJ_NOTEBOOK_RUN"  # environment variable by which a run's processes are known
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


class NotebookFailed(RuntimeError):
    """A notebook did not fully work. The message says which cell and why.

    Attributes:
        executed: the notebook as far as it came, or None if it never started.
    """

    def __init__(self, message: str, executed: Path | None = None) -> None:
        super().__init__(message)
        self.executed = executed


@dataclass(frozen=True)
class NotebookRun:
    """A notebook that fully worked.

    Attributes:
        source: the notebook that was run.
        executed: its copy with outputs.
        html: the page made of it.
        parameters: what was passed; the rest has the notebook's own values.
        results: the text output of each cell tagged `result`, in order.
        seconds: wall-clock time, kernel start included.
    """

    source: Path
    executed: Path
    html: Path
    parameters: Mapping[str, Any]
    results: tuple[str, ...]
    seconds: float


def declared_parameters(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Names and default values of a notebook's parameters.

    Raises:
        FileNotFoundError, ValueError: if it is missing, or has not exactly one cell of plain literals tagged
            `parameters`.
    """
    return literals(parameters_cell(read(path), path).source, path)


def run_notebook(
    path: str | os.PathLike[str],
    parameters: Mapping[str, Any] | None = None,
    *,
    output_dir: str | os.PathLike[str],
    name: str | None = None,
    cell_timeout: float = CELL_TIMEOUT,
    progress: bool = False,
) -> NotebookRun:
    """Execute a notebook top to bottom in a fresh kernel, in its own folder, and keep it as .ipynb and .html.

    Args:
        path: the notebook.
        parameters: values for names that its `parameters` cell declares.
        output_dir: where NAME.ipynb and NAME.html go; made if missing.
        name: file name without suffix; by default the notebook's.
        cell_timeout: seconds that one cell may take.
        progress: show a progress bar.

    Raises:
        FileNotFoundError: if there is no such notebook.
        ValueError: for undeclared parameters, a value of another type than declared, or a cell_timeout <= 0.
        NotebookFailed: if anything in it did not work.
    """
    source = Path(path).resolve()
    given = dict(parameters or {})
    _check_parameters(source, given)
    if not cell_timeout > 0:
        raise ValueError(f"cell_timeout = {cell_timeout} s; it must be more than 0")
    output = Path(output_dir).resolve()
    output.mkdir(parents=True, exist_ok=True)
    executed = output / f"{name or source.stem}.ipynb"
    if executed == source:
        raise ValueError(f"output_dir = {output} is where the notebook is; its outputs would overwrite it")
    executed.unlink(missing_ok=True)  # a failed run must not leave an older success behind
    page = executed.with_suffix(".html")
    page.unlink(missing_ok=True)

    start = time.perf_counter()
    notebook = _execute(source, executed, given, cell_timeout, progress)
    if problems := _incomplete(notebook):
        raise NotebookFailed(_message(source, given, problems), executed)
    seconds = time.perf_counter() - start
    try:
        render_html(executed, page)
    except ValueError as error:
        raise NotebookFailed(str(error), executed) from error
    return NotebookRun(source, executed, page, given, _results(notebook), seconds)


def _check_parameters(source: Path, given: Mapping[str, Any]) -> None:
    declared = declared_parameters(source)
    if unknown := sorted(set(given) - set(declared)):
        raise ValueError(
            f"{source.name} has no parameter {', '.join(unknown)}; "
            f"it declares {', '.join(declared) or 'none'}"
        )
    for key, value in given.items():
        default = declared[key]
        fits = type(value) is type(default) or (isinstance(default, float) and type(value) is int)
        if default is not None and not fits:
            raise ValueError(
                f"{source.name}: {key} = {value!r} is {type(value).__name__}; the notebook declares "
                f"{key} = {default!r}, {type(default).__name__}"
            )


def _execute(
    source: Path, executed: Path, given: dict[str, Any], cell_timeout: float, progress: bool
) -> NotebookNode:
    """Run papermill and turn each of its exceptions into NotebookFailed."""
    papermill_engines.register(_ENGINE, _Engine)
    try:
        return papermill.execute_notebook(
            source,
            executed,
            given,
            engine_name=_ENGINE,
            kernel_name=KERNEL,
            language="python",
            progress_bar=progress,
            execution_timeout=cell_timeout,
            folder=str(source.parent),
        )
    except PapermillExecutionError as error:
        where = f"cell {error.cell_index}, `{error.source.strip().splitlines()[0]}`,"
        # A magic that does not exist leaves no traceback, only a line on stderr.
        trace = _ANSI.sub("", "\n".join(error.traceback)) or _failed_text(executed)
        problem = f"{where} raised {error.ename}: {error.evalue}\n{trace}"
        raise NotebookFailed(_message(source, given, [problem]), executed) from error
    except CellTimeoutError as error:
        problem = f"a cell took more than {cell_timeout:g} s: {error}"
        raise NotebookFailed(_message(source, given, [problem]), executed) from error
    except DeadKernelError as error:
        raise NotebookFailed(_message(source, given, [f"the kernel died: {error}"]), executed) from error


def _message(source: Path, given: Mapping[str, Any], problems: list[str]) -> str:
    shown = ", ".join(f"{key}={value!r}" for key, value in given.items())
    return f"{source.name}({shown}) failed: " + "\n".join(problems)


def _incomplete(notebook: NotebookNode) -> list[str]:
    """Each sign that a notebook which papermill accepts did not fully work."""
    problems = []
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type != "code" or not cell.source.strip():
            continue
        where = f"cell {number}, `{cell.source.strip().splitlines()[0]}`,"
        record = cell.metadata.get("papermill", {})
        if cell.execution_count is None:
            problems.append(f"{where} did not run")
        elif record.get("exception") or record.get("status") != "completed":
            problems.append(f"{where} did not complete: {_text(cell).strip() or record.get('status')}")
        for output in cell.outputs:
            if output.output_type == "error":
                problems.append(f"{where} raised {output.ename}: {output.evalue}")
            elif output.output_type == "stream" and "Traceback (most recent call last)" in output.text:
                problems.append(f"{where} printed a traceback:\n{_ANSI.sub('', output.text)}")
    return problems


def _text(cell: NotebookNode) -> str:
    """What a cell printed or showed, as plain text."""
    parts = []
    for output in cell.outputs:
        if output.output_type == "stream":
            parts.append(output.text)
        elif output.output_type in ("execute_result", "display_data"):
            parts.append(output.data.get("text/plain", "") + "\n")
    return _ANSI.sub("", "".join(parts))


def _failed_text(executed: Path) -> str:
    cells = [
        cell
        for cell in nbformat.read(executed, as_version=4).cells
        if cell.metadata.get("papermill", {}).get("exception")
    ]
    return "".join(_text(cell) for cell in cells if cell.cell_type == "code")


def _results(notebook: NotebookNode) -> tuple[str, ...]:
    return tuple(
        _text(cell) for cell in notebook.cells if cell.cell_type == "code" and "result" in tags(cell)
    )


# ---- the kernel: this interpreter, started alone, ended with everything that it started ----


class _ThisInterpreter(KernelSpecManager):
    """Knows one kernel spec, made here: nothing installed under the same name can take its place."""

    environment: dict[str, str]

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        return KernelSpec(
            argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            display_name="Python 3 (ipykernel)",
            language="python",
            env=self.environment,
        )


class _Client(PapermillNotebookClient):
    log_path: Path  # what the kernel process itself prints, outside of any cell

    @contextlib.contextmanager
    def setup_kernel(self, **kwargs: Any) -> Iterator[None]:
        """As in the base class, but kernels start one at a time, over all processes of this user."""
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(self.log_path.open("wb"))
            with _start_lock():
                kernel = super().setup_kernel(cleanup_kc=True, stdout=log, stderr=log, **kwargs)
                stack.enter_context(kernel)
            yield


@contextlib.contextmanager
def _start_lock() -> Iterator[None]:
    path = Path(tempfile.gettempdir()) / f"oproj-workbook-kernel-start-{os.getuid()}.lock"
    with path.open("w") as file:  # closing it gives the lock back
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class _Engine(Engine):
    """papermill's engine interface over `_Client`."""

    @classmethod
    def execute_managed_notebook(
        cls, nb_man: Any, kernel_name: str, *, execution_timeout: float, folder: str, **_: Any
    ) -> NotebookNode:
        mark = uuid.uuid4().hex
        with tempfile.TemporaryDirectory(prefix="oproj-kernel-") as home:
            specs = _ThisInterpreter()
            specs.environment = {
                _MARK: mark,
                "IPYTHONDIR": home,  # no start-up files of the user, no shared history database
                "MPLBACKEND": "module://matplotlib_inline.backend_inline",  # figures become outputs
                "PYTHONUNBUFFERED": "1",  # printf of a kernel on a device arrives in its cell
            }
            manager = AsyncKernelManager(
                kernel_name=kernel_name,
                kernel_spec_manager=specs,
                transport="ipc",  # sockets in a folder of its own: nothing listens on a port
                connection_file=str(Path(home) / "kernel.json"),
            )
            client = _Client(
                nb_man,
                km=manager,
                timeout=execution_timeout,
                startup_timeout=120,
                kernel_name=kernel_name,
                resources={"metadata": {"path": folder}},
            )
            client.log_path = Path(home) / "kernel.log"
            try:
                return cast(NotebookNode, client.execute())
            except RuntimeError as error:  # it died while starting, or later (DeadKernelError)
                log = client.log_path.read_text(errors="replace").strip()
                raise DeadKernelError(f"{error}\n{log}".strip()) from error
            finally:
                end_marked_processes(mark)


def end_marked_processes(mark: str) -> None:
    """Kill the processes whose environment carries the mark of a run, and no others.

    Children inherit the mark, also those that moved to a session of their own, as torchrun's workers do. So
    this reaches further than the kernel's process group, and cannot hit a process that reused a number.
    """
    deadline = time.monotonic() + 10
    while marked := [process for process in psutil.process_iter() if _is_marked(process, mark)]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {[process.pid for process in marked]} do not end")
        for process in marked:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(marked, timeout=1)


def _is_marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_MARK) == mark
    except (psutil.NoSuchProcess, psutil.AccessDenied):  # it ended, or is another user's
        return False
