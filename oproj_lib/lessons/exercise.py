"""An exercise: problem, skeleton, check, three hints and a solution, all in one object.

The notebooks' exercise cells are generated from these objects (`oproj_lib.lessons.cells`), and the tests run
each check
on the solution and on wrong answers, so what a reader sees and what is checked cannot drift apart.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Answer = Callable[..., Any]


class WrongAnswer(AssertionError):
    """The reader's function is wrong. The message says where, and what was expected there."""

    def _render_traceback_(self) -> list[str]:
        """In a notebook: the message, without the traceback through the checking code."""
        return [f"Not yet: {self}"]


@dataclass(frozen=True)
class WrongTry:
    """A plausible wrong answer, and a piece of the message that the check must give. For the tests."""

    source: str
    message: str


@dataclass(frozen=True)
class Exercise:
    """See the module. Texts are Markdown, sources Python; `check` raises WrongAnswer unless a function is
    right."""

    name: str  # also the name of the reader's function
    title: str
    problem: str
    skeleton: str
    hints: tuple[str, str, str]
    solution: str
    check: Callable[[Answer], None]
    wrong_tries: tuple[WrongTry, ...]
    names: tuple[tuple[str, Any], ...] = ()  # what sources may use besides the builtins

    def compile(self, source: str) -> Answer:
        """The function that a source defines."""
        namespace: dict[str, Any] = dict(self.names)
        exec(compile(textwrap.dedent(source), f"<{self.name}>", "exec"), namespace)
        answer: Answer = namespace[self.name]
        return answer

    def judge(self, answer: Answer) -> str:
        """What to tell the reader: "right", or that the skeleton is still as it was.

        Raises:
            WrongAnswer: if the answer is wrong, raises, or gives something of another shape.
        """
        try:
            self.check(answer)
        except NotImplementedError:
            return f"{self.name}: not tried yet. Replace the `raise` line above and run both cells again."
        return f"{self.name}: right."


def call(answer: Answer, *arguments: int, names: tuple[str, ...]) -> Any:
    """The reader's function at one place; what it raises becomes a WrongAnswer that names the place."""
    try:
        return answer(*arguments)
    except (NotImplementedError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise WrongAnswer(f"{place(names, arguments)}: it raised {type(error).__name__}: {error}") from error


def place(names: tuple[str, ...], values: tuple[int, ...]) -> str:
    """ "lane 3, register 1": where a check stands."""
    return ", ".join(f"{name} {value}" for name, value in zip(names, values, strict=True))


def whole(value: Any, where: str) -> int:
    """A whole number that the reader returned.

    Raises:
        WrongAnswer: if it is something else.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise WrongAnswer(f"{where}: it returned {value!r}; a whole number is needed")
    return int(value)


def pair(value: Any, where: str) -> tuple[int, int]:
    """A pair of whole numbers that the reader returned.

    Raises:
        WrongAnswer: if it is something else.
    """
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise WrongAnswer(f"{where}: it returned {value!r}; a pair (row, column) is needed")
    return whole(value[0], where), whole(value[1], where)
