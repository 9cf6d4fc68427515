"""The notebook driver lets nothing through: each guard is shown on a notebook that breaks only its rule."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from nbformat import v4

from oproj_lib import notebooks
from oproj_lib.book import build_book
from oproj_lib.notebook_html import render_html
from oproj_lib.notebooks import NotebookFailed, declared_parameters, lint_notebook, run_notebook

PARAMETERS = (
    'ranks = 8  # tensor-parallel ranks\ndevice = "auto"  # "auto", "vgpu" or "cuda"\nscale = 1.0  # a factor'
)
ROOT = Path(__file__).parent.parent
COMMITTED = sorted((ROOT / "notebooks").rglob("*.ipynb"))


def notebook(*sources: str, parameters: str | None = PARAMETERS) -> nbformat.NotebookNode:
    """A well-formed notebook: title, parameters, then the given code cells, the last one tagged `result`."""
    cells = [v4.new_markdown_cell("# A title", id="title")]
    if parameters is not None:
        cells.append(v4.new_code_cell(parameters, id="parameters", metadata={"tags": ["parameters"]}))
    cells += [v4.new_code_cell(source, id=f"code-{i}") for i, source in enumerate(sources)]
    if sources:
        cells[-1].metadata["tags"] = ["result"]
    kernelspec = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    return v4.new_notebook(cells=cells, metadata={"kernelspec": kernelspec})


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(node: nbformat.NotebookNode, name: str = "lesson.ipynb") -> Path:
        path = tmp_path / name
        path.write_text(nbformat.writes(node))
        return path

    return write


def run(path: Path, **options: Any) -> notebooks.NotebookRun:
    return run_notebook(path, options.pop("given", None), output_dir=path.parent / "out", **options)


# ---- what works ----


def test_a_good_notebook_is_run_kept_and_rendered(write: Write) -> None:
    path = write(notebook("k = 12288 // ranks", "print(k, device, scale)\nk + 1"))
    done = run(path, given={"ranks": 16, "scale": 2})
    assert done.results == ("768 auto 2\n769\n",)
    assert done.parameters == {"ranks": 16, "scale": 2}
    assert done.seconds > 0
    assert (done.source, done.executed, done.html) == (
        path,
        path.parent / "out/lesson.ipynb",
        path.parent / "out/lesson.html",
    )
    executed = nbformat.read(done.executed, as_version=4)
    assert [cell.execution_count for cell in executed.cells if cell.cell_type == "code"] == [1, 2, 3, 4]
    assert "768 auto 2" in done.html.read_text()
    assert lint_notebook(path) == ()  # the source is as it was


def test_the_kernel_is_this_interpreter_whatever_is_installed(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    impostor = tmp_path / "jupyter/kernels/python3"
    impostor.mkdir(parents=True)
    (impostor / "kernel.json").write_text(
        '{"argv": ["/bin/false"], "display_name": "no", "language": "python"}'
    )
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "0")
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    startup = tmp_path / "ipython/profile_default/startup"
    startup.mkdir(parents=True)
    (startup / "00-user.py").write_text("user_startup_ran = True")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    source = """
import os, sys
print(sys.executable, os.environ["PYTHONUNBUFFERED"], "user_startup_ran" in globals())
"""
    assert run(write(notebook(source))).results == (f"{sys.executable} 1 False\n",)


def test_it_runs_in_the_notebooks_folder(write: Write) -> None:
    path = write(notebook("import os\nprint(os.getcwd())"))
    before = os.getcwd()
    assert run(path).results == (f"{path.parent}\n",)
    assert os.getcwd() == before


def test_names_of_the_outputs_can_be_chosen(write: Write) -> None:
    done = run(write(notebook("1")), name="lesson-ranks8")
    assert (done.executed.name, done.html.name) == ("lesson-ranks8.ipynb", "lesson-ranks8.html")


def test_no_progress_bar_unless_asked(write: Write, capfd: pytest.CaptureFixture[str]) -> None:
    path = write(notebook("1"))
    run(path)
    assert "Executing" not in capfd.readouterr().err
    run(path, progress=True)
    assert "Executing" in capfd.readouterr().err


# ---- parameters ----


def test_parameters_are_those_declared(write: Write) -> None:
    assert declared_parameters(write(notebook())) == {"ranks": 8, "device": "auto", "scale": 1.0}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rank": 8}, r"lesson\.ipynb has no parameter rank; it declares ranks, device, scale"),
        ({"b": 1, "a": 1}, r"has no parameter a, b; it declares"),
        ({"ranks": "8"}, r"ranks = '8' is str; the notebook declares ranks = 8, int"),
        ({"ranks": True}, r"ranks = True is bool; the notebook declares ranks = 8, int"),
        ({"ranks": 8.0}, r"ranks = 8\.0 is float"),
        ({"device": 1}, r"device = 1 is int; the notebook declares device = 'auto', str"),
    ],
)
def test_undeclared_or_mistyped_parameters_are_refused(
    write: Write, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(write(notebook("1")), given=given)


def test_there_must_be_one_parameters_cell(write: Write) -> None:
    with pytest.raises(ValueError, match=r"0 code cells are tagged `parameters`; there must be exactly one"):
        run(write(notebook("1", parameters=None)))
    twice = notebook("1")
    twice.cells[-1].metadata["tags"] = ["parameters"]
    with pytest.raises(ValueError, match=r"2 code cells are tagged `parameters`"):
        run(write(twice))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "k = 12288 // 8  # derived",
            r"line 1 .* `k = 12288 // 8`, is not a plain literal; derive values in the next",
        ),
        ("a = 1  # one\nimport os  # no", r"line 2 .* `import os`, is not of the form `name = literal`"),
        ("a = b = 1  # two", r"is not of the form"),
        ("a: int  # nothing", r"is not of the form"),
        ("a = ", r"the parameters cell is not Python"),
    ],
)
def test_parameters_must_be_plain_literals(write: Write, source: str, message: str) -> None:
    path = write(notebook("1", parameters=source))
    with pytest.raises(ValueError, match=message):
        declared_parameters(path)
    assert lint_notebook(path)


def test_other_arguments_are_checked(write: Write) -> None:
    path = write(notebook("1"))
    with pytest.raises(ValueError, match=r"cell_timeout = 0 s; it must be more than 0"):
        run(path, cell_timeout=0)
    with pytest.raises(ValueError, match=r"its outputs would overwrite it"):
        run_notebook(path, output_dir=path.parent)
    with pytest.raises(FileNotFoundError):
        run(path.with_name("missing.ipynb"))
    path.write_text("not json")
    with pytest.raises(ValueError, match=r"not a notebook \(it is not JSON: "):
        run(path)


# ---- failures that must not pass: the failing cell is the last one, or one with a good cell after it ----

FAILURES = {
    "exception": ("1 / 0", r"ZeroDivisionError: division by zero"),
    "assertion": ("assert ranks == 9, 'ranks is wrong'", r"AssertionError: ranks is wrong"),
    "sys.exit(0)": ("import sys\nsys.exit(0)", r"did not complete|SystemExit"),
    "sys.exit(1)": ("import sys\nsys.exit(1)", r"SystemExit"),
    "SystemExit": ("raise SystemExit", r"did not complete|SystemExit"),
    "unknown magic": ("%no_such_magic", r"no_such_magic"),
    "unknown cell magic": ("%%no_such_magic\n1", r"no_such_magic"),
    "failing cell magic": ("%%bash\nexit 3", r"exit status 3"),
    "failing line magic": ("%run no_such_file.py", r"no_such_file\.py"),
    "syntax": ("def f(:", r"SyntaxError"),
    "thread": (
        "import threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start()\nt.join()",
        r"printed a traceback",
    ),
    "display": (
        "class Bad:\n    def _repr_html_(self):\n        raise RuntimeError('no picture')\nBad()",
        r"no picture",
    ),
    "crash": ("import ctypes\nctypes.string_at(0)", r"the kernel died"),
    "kernel death": ("import os\nos._exit(0)", r"the kernel died"),
}


@pytest.mark.parametrize("after", [(), ("2",)], ids=["last", "not-last"])
@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_of_any_kind_fails(write: Write, failure: str, after: tuple[str, ...]) -> None:
    source, message = FAILURES[failure]
    path = write(notebook("1", source, *after))
    with pytest.raises(NotebookFailed, match=r"(?s)lesson\.ipynb\(\) failed: .*" + message) as caught:
        run(path)
    assert caught.value.executed == path.parent / "out/lesson.ipynb"
    assert not (path.parent / "out/lesson.html").exists()


def test_a_failure_keeps_what_was_reached_and_no_older_success(write: Write) -> None:
    path = write(notebook("print('reached')", "assert ranks == 8"))
    assert run(path).html.exists()
    with pytest.raises(
        NotebookFailed, match=r"lesson\.ipynb\(ranks=16\) failed: cell .* AssertionError"
    ) as caught:
        run(path, given={"ranks": 16})
    assert caught.value.executed is not None and "reached" in caught.value.executed.read_text()
    assert not (path.parent / "out/lesson.html").exists()


def test_a_kernel_that_does_not_start_says_why(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such module: ipykernel >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(NotebookFailed, match=r"(?s)the kernel died: .*no such module: ipykernel"):
        run(write(notebook("1")))


def test_an_exception_that_is_allowed_by_a_tag_still_fails(write: Write) -> None:
    node = notebook("1 / 0", "2")
    node.cells[-2].metadata["tags"] = ["raises-exception"]
    with pytest.raises(NotebookFailed, match=r"ZeroDivisionError"):
        run(write(node))


# ---- what a notebook starts ends with it ----

STARTS_CHILDREN = """
import subprocess, sys
sleep = [sys.executable, "-c", "import time; time.sleep(300)"]
children = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]
print(*(child.pid for child in children), flush=True)
open("pids", "w").write(" ".join(str(child.pid) for child in children))
"""


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("ending", "message"),
    [
        ("import time\ntime.sleep(300)", r"a cell took more than 3 s"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", r"the kernel died"),
        ("1 / 0", r"ZeroDivisionError"),
        ("1", None),
    ],
    ids=["timeout", "killed", "exception", "success"],
)
def test_no_process_of_a_notebook_outlives_it(write: Write, ending: str, message: str | None) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    try:
        path = write(notebook(STARTS_CHILDREN, ending))
        start = time.monotonic()
        if message is None:
            run(path)
        else:
            with pytest.raises(NotebookFailed, match=message):
                run(path, cell_timeout=3)
        assert time.monotonic() - start < 60
        pids = [int(pid) for pid in (path.parent / "pids").read_text().split()]
        assert len(pids) == 2 and not any(alive(pid) for pid in pids)
        assert bystander.poll() is None  # nothing else was ended
    finally:
        bystander.kill()
        bystander.wait()


def test_without_the_driver_those_processes_would_go_on(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notebooks, "end_marked_processes", lambda mark: None)
    path = write(notebook(STARTS_CHILDREN, FAILURES["kernel death"][0]))
    with pytest.raises(NotebookFailed):
        run(path)
    survivors = [int(pid) for pid in (path.parent / "pids").read_text().split()]
    try:
        assert all(alive(pid) for pid in survivors)
    finally:
        for pid in survivors:
            os.kill(pid, signal.SIGKILL)


def test_kernels_start_one_at_a_time(write: Write) -> None:
    """While someone holds the lock no kernel starts; then it does."""
    path = write(notebook("open('started', 'w').close()"))
    outcome: list[notebooks.NotebookRun] = []
    holder = """
import sys
from oproj_lib.notebooks import _start_lock
with _start_lock():
    print(flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()  # the lock is held, by another process
        thread = threading.Thread(target=lambda: outcome.append(run(path)))
        thread.start()
        thread.join(timeout=6)
        assert thread.is_alive() and not (path.parent / "started").exists()
    thread.join(timeout=60)
    assert outcome and (path.parent / "started").exists()


# ---- HTML ----

PICTURE = """
import matplotlib.pyplot as plt
from IPython.display import display
figure, axes = plt.subplots()
axes.plot([1, 2])
plt.close(figure)
display(figure{metadata})
"""


def test_pages_hold_pictures_alt_text_and_formulas_and_fetch_nothing(write: Write) -> None:
    node = notebook(PICTURE.format(metadata=', metadata={"image/png": {"alt": "a rising line"}}'))
    node.cells.insert(
        1, v4.new_markdown_cell(r"The sum $\sum_k x_k w_k$ and $$K = \frac{12288}{R}$$", id="formula")
    )
    page = run(write(node)).html.read_text()
    assert 'alt="a rising line"' in page and "data:image/png;base64," in page
    assert page.count("<math") == 2 and "<mfrac>" in page and "<mo>∑</mo>" in page
    for remote in ("cdnjs", "unpkg", "jsdelivr", 'src="http', "src='http", "MathJax", "require.min.js"):
        assert remote not in page


def test_pictures_without_alt_text_fail(write: Write) -> None:
    with pytest.raises(NotebookFailed, match=r"1 picture\(s\) without alternative text"):
        run(write(notebook(PICTURE.format(metadata=""))))


def test_pages_that_would_fetch_something_fail(write: Write, tmp_path: Path) -> None:
    node = notebook("1")
    node.cells.append(
        v4.new_markdown_cell('<img alt="a logo" src="https://example.org/logo.png">', id="logo")
    )
    with pytest.raises(ValueError, match=r"would fetch from a network: <img .*example\.org"):
        render_html(write(node), tmp_path / "page.html")


# ---- the book ----


def test_the_book_is_an_index_over_its_pages(write: Write, tmp_path: Path) -> None:
    second, first = notebook("1"), notebook("1")
    first.cells[0].source = "# Zeros & ones"
    write(second, "01_b.ipynb")
    write(first, "00_a.ipynb")
    seen: list[str] = []
    index = build_book(
        tmp_path, tmp_path / "book", title="All of it", on_page=lambda run: seen.append(run.source.name)
    )
    page = index.read_text()
    assert seen == ["00_a.ipynb", "01_b.ipynb"]
    assert page.index('<a href="00_a.html">Zeros &amp; ones</a>') < page.index(
        '<a href="01_b.html">A title</a>'
    )
    assert (tmp_path / "book/00_a.html").exists() and (tmp_path / "book/01_b.html").exists()


def test_a_book_with_a_failing_chapter_is_none(write: Write, tmp_path: Path) -> None:
    write(notebook("1 / 0"), "00_a.ipynb")
    write(notebook("1"), "01_b.ipynb")
    with pytest.raises(NotebookFailed, match=r"1 of 2 notebooks failed:\n00_a\.ipynb\(\) failed"):
        build_book(tmp_path, tmp_path / "book")
    assert (tmp_path / "book/01_b.html").exists() and not (tmp_path / "book/index.html").exists()


def test_an_empty_book_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there are no notebooks"):
        build_book(tmp_path, tmp_path / "book")


# ---- lint ----


def break_ids(node: nbformat.NotebookNode) -> None:
    node.cells[-1]["id"] = node.cells[-2]["id"]


def drop_id(node: nbformat.NotebookNode) -> None:
    del node.cells[-1]["id"]


def older_format(node: nbformat.NotebookNode) -> None:
    node.nbformat_minor = 4


def give_output(node: nbformat.NotebookNode) -> None:
    node.cells[-1].outputs = [v4.new_output("stream", text="1")]


def second_parameters(node: nbformat.NotebookNode) -> None:
    node.cells[-1].metadata["tags"] = ["parameters"]


def put(
    *path: str, value: Any, where: Callable[[Any], Any] = lambda node: node.metadata
) -> Callable[[Any], None]:
    def change(node: nbformat.NotebookNode) -> None:
        target = where(node)
        for key in path[:-1]:
            target = target.setdefault(key, {})
        target[path[-1]] = value

    return change


def last(node: Any) -> Any:
    return node.cells[-1]


BROKEN = {
    "nbformat is 4.4; it must be 4.5": older_format,
    "kernelspec name is 'venv'; it must be 'python3'": put("kernelspec", "name", value="venv"),
    "kernelspec language is 'julia'; it must be 'python'": put("kernelspec", "language", value="julia"),
    "cell id 'code-0' occurs 2 times": break_ids,
    "1 cells have no id": drop_id,
    "not valid nbformat 4.5": put("cell_type", value="picture", where=last),
    "cell 3 (code-1): has outputs": give_output,
    "cell 3 (code-1): has an execution count (7)": put("execution_count", value=7, where=last),
    "cell 3 (code-1): has timings (ExecuteTime)": put("metadata", "ExecuteTime", value={}, where=last),
    "cell 3 (code-1): has timings (execution)": put("metadata", "execution", value={}, where=last),
    "cell 3 (code-1): has timings (papermill)": put("metadata", "papermill", value={}, where=last),
    "cell 3 (code-1): is empty": put("source", value=" \n", where=last),
    "cell 3 (code-1): is tagged raises-exception": put(
        "metadata", "tags", value=["raises-exception"], where=last
    ),
    "cell 3 (code-1): runs a shell command with `!`": put("source", value="a = 1\nfiles = !ls", where=last),
    "has papermill metadata": put("papermill", value={}),
    "has widgets metadata": put("widgets", value={}),
    "language_info names an interpreter version": put(
        "language_info", value={"name": "python", "version": "3.11"}
    ),
    "2 code cells are tagged `parameters`": second_parameters,
    "0 code cells are tagged `parameters`": put("metadata", value={}, where=lambda node: node.cells[1]),
    "parameter ranks has no comment": put(
        "source", value="# why\na = 1\nranks = 8", where=lambda node: node.cells[1]
    ),
    "line 1 of the parameters cell": put("source", value="a = 2 * 3  # no", where=lambda node: node.cells[1]),
}


@pytest.mark.parametrize("problem", BROKEN)
def test_lint_names_what_is_wrong_and_nothing_else(tmp_path: Path, problem: str) -> None:
    node = notebook("1", "2")
    BROKEN[problem](node)
    path = tmp_path / "broken.ipynb"
    path.write_text(json.dumps(node))  # nbformat.writes would mend some of it
    found = lint_notebook(path)
    assert len(found) == 1 and found[0].startswith(problem), found


def test_lint_accepts_comments_beside_and_above(write: Write) -> None:
    source = '# how many\nranks = 8\nshape = (\n    1,  # rows\n    2,\n)\nname: str = "x"  # a name'
    assert lint_notebook(write(notebook("1", parameters=source))) == ()
    assert lint_notebook(write(notebook("print('a != b')\nx = 3\nassert x != 4"))) == ()


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_the_committed_notebooks_are_clean(path: Path) -> None:
    assert lint_notebook(path) == ()
