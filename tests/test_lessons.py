"""Exercises: each check takes the solution, rejects wrong answers where they are wrong, and is in sync."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import nbformat
import pytest

from oproj_lib import lessons
from oproj_lib.lessons.__main__ import synchronise
from oproj_lib.lessons.mutants import opcodes, without
from oproj_lib.run import launch_on_vgpu, run_producer

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
WRONG = [(name, i) for name, exercise in lessons.EXERCISES.items() for i in range(len(exercise.wrong_tries))]


@pytest.mark.parametrize("name", lessons.EXERCISES)
def test_the_solution_is_right(name: str) -> None:
    exercise = lessons.find(name)
    assert exercise.judge(exercise.compile(exercise.solution)) == f"{name}: right."


@pytest.mark.parametrize(("name", "number"), WRONG)
def test_a_wrong_answer_is_rejected_where_it_is_wrong(name: str, number: int) -> None:
    exercise = lessons.find(name)
    wrong = exercise.wrong_tries[number]
    with pytest.raises(lessons.WrongAnswer, match=re.escape(wrong.message)):
        exercise.judge(exercise.compile(wrong.source))


def test_padding_solves_the_layout_exercise_too() -> None:
    exercise = lessons.find("x_offset")
    padded = exercise.compile("def x_offset(token, chunk): return 16 * (196 * token + chunk)")
    assert exercise.judge(padded) == "x_offset: right."


@pytest.mark.parametrize("name", lessons.EXERCISES)
def test_there_are_enough_wrong_tries_and_three_hints(name: str) -> None:
    exercise = lessons.find(name)
    assert len(exercise.wrong_tries) >= 4
    assert len(exercise.hints) == 3 and len(set(exercise.hints)) == 3
    assert exercise.solution.splitlines()[0] == exercise.skeleton.splitlines()[0]  # the same function


@pytest.mark.parametrize("name", lessons.EXERCISES)
def test_an_untouched_skeleton_is_neither_right_nor_wrong(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    exercise = lessons.find(name)
    lessons.check(name, exercise.compile(exercise.skeleton))
    assert f"{name}: not tried yet" in capsys.readouterr().out


def test_check_runs_the_reader_s_function(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(lessons.WrongAnswer, match="lane 0, register 0, element 1"):
        lessons.check("fragment_a", lambda lane, register, element: (0, 0))
    lessons.check("fragment_a", lambda lane, register, element: (0, 0), solutions=True)
    assert capsys.readouterr().out == "fragment_a: right. (the solution)\n"


def test_an_interrupt_is_not_a_wrong_answer() -> None:
    def interrupted(*_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lessons.check("k_order", interrupted)


def test_a_notebook_shows_the_message_without_a_traceback() -> None:
    assert lessons.WrongAnswer("lane 3")._render_traceback_() == ["Not yet: lane 3"]


def test_unknown_exercise() -> None:
    with pytest.raises(ValueError, match="'fragment_b' is unknown; there are floor_us, fragment_a"):
        lessons.find("fragment_b")


def notebook_cells() -> dict[str, str]:
    return {
        cell.id: cell.source
        for path in sorted(NOTEBOOKS.glob("*.ipynb"))
        for cell in nbformat.read(path, as_version=4).cells
        if cell.id.startswith("exercise-")
    }


def test_notebooks_hold_exactly_the_exercises() -> None:
    expected = {identity: source for name in lessons.EXERCISES for identity, _, source in lessons.cells(name)}
    assert notebook_cells() == expected, "run `python -m oproj_lib.lessons`"


def test_synchronise_repairs_a_stale_cell(tmp_path: Path) -> None:
    copy = Path(shutil.copy(NOTEBOOKS / "02_fragments.ipynb", tmp_path))
    before = copy.read_bytes()
    copy.write_text(before.decode().replace("Hint 2", "Hint two"), encoding="utf-8")
    assert synchronise(tmp_path) == [copy]
    assert copy.read_bytes() == before
    assert synchronise(tmp_path) == []


def test_mutants_keep_line_numbers_and_lose_one_instruction() -> None:
    program = run_producer(ranks=16, batch=1, device="vgpu").program
    broken = without(program, "bar.sync")
    old, new = program.ptx.splitlines(), broken.ptx.splitlines()
    changed = [(a, b) for a, b in zip(old, new, strict=True) if a != b]
    assert len(changed) == 1
    assert changed[0][0].split()[0] == "bar.sync" and changed[0][1].strip().startswith("// removed: bar.sync")
    assert broken.key != program.key and broken.cubin == b""
    assert "bar.sync" in opcodes(program) and "bar.sync" not in opcodes(broken)


def test_a_mutant_of_nothing() -> None:
    program = run_producer(ranks=16, batch=1, device="vgpu").program
    with pytest.raises(
        ValueError, match=r"has 0 instruction\(s\) 'wgmma', so there is no number -1; its opcodes: "
    ):
        without(program, "wgmma")
    with pytest.raises(ValueError, match=r"has 1 instruction\(s\) 'bar.sync', so there is no number 1"):
        without(program, "bar.sync", occurrence=1)


@pytest.mark.parametrize(
    ("ranks", "opcode", "kind"),
    [
        (16, "bar.sync", "race"),
        (16, "griddepcontrol.wait", "too early"),
        (8, "cp.async.wait_group", "undefined data"),
    ],
)
def test_notebook_00_s_mutants_are_found(ranks: int, opcode: str, kind: str) -> None:
    result = run_producer(ranks=ranks, batch=1, device="vgpu", checks=True)
    assert result.ok  # the whole kernel is clean
    from oproj_lib.problem import Problem

    x, weight = Problem(ranks, 1).inputs(0)
    _, report, _ = launch_on_vgpu(without(result.program, opcode), x, weight, ranks=ranks, checks=True)
    assert kind in {finding.kind for finding in report.findings}
