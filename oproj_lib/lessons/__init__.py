"""Exercises of the notebooks.

`check(name, function, solutions=...)` is what a notebook calls; `cells(name)` is what its cells are made of,
and
`python -m oproj_lib.lessons` writes them into the notebooks again after an exercise has changed.
"""

from __future__ import annotations

from oproj_lib.lessons.attnres import BEFORE_THE_POLL, ONLINE_SOFTMAX
from oproj_lib.lessons.exercise import Answer, Exercise, WrongAnswer, WrongTry
from oproj_lib.lessons.floor import FLOOR
from oproj_lib.lessons.fragments import FRAGMENT_A, K_ORDER
from oproj_lib.lessons.mailboxes import CHUNK_PLACE, TURN, WRONG_POLLS
from oproj_lib.lessons.mbarriers import PARITY
from oproj_lib.lessons.measuring import FAULT, SHARE
from oproj_lib.lessons.numbers import BF16_BITS, CONTRACT_SUM, LATENT_BITS
from oproj_lib.lessons.pdl import EXPOSED, ORDER, REGISTERS_LEFT
from oproj_lib.lessons.shared_memory import X_OFFSET
from oproj_lib.lessons.swizzle import CHUNK_OFFSET
from oproj_lib.lessons.tensor_memory import TMEM_LANE
from oproj_lib.lessons.wgmma_fragment import D_THREAD

__all__ = ["EXERCISES", "Answer", "Exercise", "WrongAnswer", "WrongTry", "cells", "check", "find"]

EXERCISES = {
    exercise.name: exercise
    for exercise in (
        FLOOR,
        FRAGMENT_A,
        K_ORDER,
        X_OFFSET,
        PARITY,
        CHUNK_OFFSET,
        TMEM_LANE,
        D_THREAD,
        BEFORE_THE_POLL,
        ONLINE_SOFTMAX,
        ORDER,
        REGISTERS_LEFT,
        EXPOSED,
        BF16_BITS,
        CONTRACT_SUM,
        LATENT_BITS,
        CHUNK_PLACE,
        TURN,
        WRONG_POLLS,
        SHARE,
        FAULT,
    )
}


def find(name: str) -> Exercise:
    """An exercise by name.

    Raises:
        ValueError: for an unknown name, with the known ones.
    """
    if name not in EXERCISES:
        raise ValueError(f"exercise {name!r} is unknown; there are {', '.join(EXERCISES)}")
    return EXERCISES[name]


def check(name: str, answer: Answer, *, solutions: bool = False) -> None:
    """Check the reader's function and print the verdict.

    solutions: check the solution in its place; CI runs every notebook that way too.

    Raises:
        WrongAnswer: if it is wrong, saying at which lane, element or chunk. An untouched skeleton is not
        wrong.
        ValueError: for an unknown exercise.
    """
    exercise = find(name)
    verdict = exercise.judge(exercise.compile(exercise.solution) if solutions else answer)
    print(verdict + (" (the solution)" if solutions else ""))


def cells(name: str) -> list[tuple[str, str, str]]:
    """An exercise as notebook cells: (id, type, source)."""
    exercise = find(name)
    stem = "exercise-" + name.replace("_", "-")
    hints = "\n".join(
        f"<details><summary>Hint {number}</summary>\n\n{hint}\n\n</details>"
        for number, hint in enumerate(exercise.hints, 1)
    )
    solution = f"<details><summary>Solution</summary>\n\n```python\n{exercise.solution}\n```\n\n</details>"
    return [
        (stem, "markdown", f"### Exercise: {exercise.title}\n\n{exercise.problem}\n\n{hints}\n{solution}"),
        (f"{stem}-answer", "code", exercise.skeleton),
        (f"{stem}-check", "code", f'lessons.check("{name}", {name}, solutions=solutions)'),
    ]
