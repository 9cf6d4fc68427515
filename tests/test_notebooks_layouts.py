"""Notebooks 05 and 07 by papermill: a few parameter sets, and every own parameter does something."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import papermill
import pytest
from notebook_checks import check_committed, results

from oproj_lib.notebooks import NotebookFailed, NotebookRun, declared_parameters, run_notebook

pytestmark = pytest.mark.xdist_group("notebooks_layouts")  # one worker runs each notebook once for all tests
FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = {name: next(FOLDER.glob(f"{name}_*.ipynb")) for name in ("05", "07")}
COMMON = {"device", "ranks", "batch"}

# Per notebook: another value of every parameter, and a cell that must show it and depends on no other one here.
CHANGES: dict[str, dict[str, tuple[Any, str]]] = {
    "05": {
        "ranks": (16, "setup"),
        "width": (64, "atom-picture"),
        "chunk": (1, "atom-check"),
        "slot": (3, "tiles-check"),
        "start": (640, "alignment-check"),
        "wrong_stride": (2048, "wrong-picture"),
        "seed": (1, "run-check"),
        "solutions": (True, "exercise-chunk-offset-check"),
    },
    "07": {
        "ranks": (8, "kernel-run"),
        "m": (128, "map-run-check"),
        "row": (11, "map-check"),
        "warp": (3, "reach-check"),
        "remove": ("tcgen05.commit", "allocate-run"),
        "solutions": (True, "exercise-tmem-lane-check"),
    },
}
# The others would hide behind the first ones, or hide them.
MORE: dict[str, dict[str, tuple[Any, str]]] = {
    "05": {"stored_width": (32, "wrong-picture"), "batch": (33, "instruction-picture")},
    "07": {"quarter": (1, "reach-check"), "seed": (1, "map-run-check"), "batch": (40, "map-picture")},
}
OTHER: dict[str, dict[str, Any]] = {
    "05": {
        "ranks": 16, "batch": 64, "width": 32, "chunk": 1, "slot": 0, "start": 16, "wrong_stride": 1024,
        "stored_width": 32,
    },
    "07": {"batch": 1, "m": 128, "row": 63, "warp": 1, "quarter": 1, "remove": "tcgen05.fence::after_thread_sync"},
}  # fmt: skip
PICTURES = {"05": 4, "07": 3}


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, NotebookRun]:
    """Both notebooks with their own values."""
    folder = tmp_path_factory.mktemp("usual")
    return {name: run_notebook(path, output_dir=folder) for name, path in NOTEBOOKS.items()}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_committed_as_it_should_be(name: str) -> None:
    code = check_committed(NOTEBOOKS[name])
    assert "lessons.check" in code[-1] and sum("assert" in source for source in code) >= 7


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_with_its_own_values(name: str, usual: Mapping[str, NotebookRun]) -> None:
    run = usual[name]
    assert run.seconds < 60
    shown = re.findall(r'<img alt="([^"]*)"', run.html.read_text(encoding="utf-8"))
    assert len(shown) == PICTURES[name] and all(len(alt) > 80 for alt in shown)
    if name == "07":
        wrong = "lane quarter: warp 2 reaches tensor memory lanes 64..95, not 0..31"
        assert wrong in results(run)["reach-check"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_other_values(name: str, tmp_path: Path) -> None:
    assert run_notebook(NOTEBOOKS[name], OTHER[name], output_dir=tmp_path).html.exists()


def test_every_parameter_is_changed() -> None:
    for name, path in NOTEBOOKS.items():
        declared = set(declared_parameters(path))
        assert declared == papermill.inspect_notebook(path).keys()  # its parser reads the cell too
        assert declared - {"device"} == CHANGES[name].keys() | MORE[name].keys()
        assert declared >= COMMON


@pytest.mark.parametrize("changes", [CHANGES, MORE], ids=["most", "more"])
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_parameters_change_something(
    name: str, changes: dict[str, dict[str, tuple[Any, str]]], usual: Mapping[str, NotebookRun], tmp_path: Path
) -> None:  # fmt: skip
    values = {key: value for key, (value, _) in changes[name].items()}
    changed, before = (
        results(run_notebook(NOTEBOOKS[name], values, output_dir=tmp_path)),
        results(usual[name]),
    )
    same = [key for key, (_, cell) in changes[name].items() if changed[cell] == before[cell]]
    assert not same, f"changed nothing: {same}"


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("05", {"width": 16}, "swizzle width = 16 bytes: choose from (32, 64, 128)"),
        ("05", {"slot": 18}, "slot = 18: the ring has slots 0 to 17"),
        ("07", {"row": 64}, "row = 64: D has rows 0 to 63"),
    ],
)
def test_a_nonsensical_parameter_fails_the_notebook(
    name: str, parameters: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(NotebookFailed, match=re.escape(message)):
        run_notebook(NOTEBOOKS[name], parameters, output_dir=tmp_path)
