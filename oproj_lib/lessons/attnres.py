"""Exercises of notebook 12: what can be done before the mailbox is full, and the online softmax that makes it so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from oproj_lib.lessons.exercise import Answer, Exercise, WrongAnswer, WrongTry
from oproj_lib.problem import Array

# ---- before or after the poll ----


@dataclass(frozen=True)
class Step:
    """One thing that the split kernel does. needs: steps whose results it takes. mailbox: it takes the ranks' sums.
    held_back: why it comes after the poll although it takes nothing from there. seen: (Python function, opcode)
    of instructions that show in a trace when it is done, "" being any."""

    name: str
    needs: tuple[str, ...] = ()
    mailbox: bool = False
    held_back: str = ""
    seen: tuple[str, str] | None = None


STEPS = {
    step.name: step
    for step in (
        Step("launch the dependents", seen=("kernel", "griddepcontrol.launch_dependents")),
        Step("re-arm the last generation", seen=("rearm", "")),
        Step("norm_w * qk_w", seen=("score_weights", "")),
        Step("scores of the blocks", needs=("norm_w * qk_w",)),
        Step("largest score of the blocks", needs=("scores of the blocks",), seen=("over_sources", "")),
        Step(
            "sum of e_s v_s over the blocks",
            needs=("largest score of the blocks",),
            seen=("keep", "st.shared"),
        ),
        Step("read the old prefix", seen=("load_written_row", "ld.relaxed.gpu")),
        Step("read out_w", seen=("load_row", "ld.global")),
        Step("delta", mailbox=True),
        Step("P", needs=("read the old prefix", "delta"), seen=("add_prefix", "")),
        Step("store P", needs=("P",), seen=("store_prefix", "st.global")),
        Step("score of P", needs=("norm_w * qk_w", "P")),
        Step("largest of all scores", needs=("largest score of the blocks", "score of P")),
        Step(
            "mix",
            needs=("sum of e_s v_s over the blocks", "largest of all scores", "P"),
            seen=("kept", "ld.shared"),
        ),
        Step("last norm", needs=("mix", "read out_w")),
        Step("store out", needs=("last norm",), seen=("store_out", "st.global")),
        Step(
            "griddepcontrol.wait",
            held_back="it returns when the producer has completed, which is later than when its last word is here",
            seen=("kernel", "griddepcontrol.wait"),
        ),
    )
}


def way_from_mailbox(name: str) -> tuple[str, ...]:
    """Steps from one that takes the ranks' sums to this one; none if it can do without."""
    step = STEPS[name]
    if step.mailbox:
        return (name,)
    for needed in step.needs:
        if way := way_from_mailbox(needed):
            return (*way, name)
    return ()


def is_before_the_poll(name: str) -> bool:
    """Whether the kernel does it before it polls."""
    return not way_from_mailbox(name) and not STEPS[name].held_back


def check_place(answer: Answer) -> None:
    """Every step, in the kernel's order."""
    for name, step in STEPS.items():
        where = f"step {name!r}"
        got = _answered(answer, (name,), where)
        if not isinstance(got, bool | np.bool_):
            raise WrongAnswer(f"{where}: it returned {got!r}; True (before the poll) or False is needed")
        if got == is_before_the_poll(name):
            continue
        if step.held_back:
            raise WrongAnswer(f"{where} does not go before the poll: {step.held_back}")
        if way := way_from_mailbox(name):
            raise WrongAnswer(
                f"{where} cannot be done before the poll: it needs {' -> '.join(('the ranks', *way))}"
            )
        needs = f"only {', '.join(step.needs)}" if step.needs else "nothing that has to arrive"
        raise WrongAnswer(f"{where} need not wait for the mailbox: it takes {needs}")


def _answered(answer: Answer, arguments: tuple[Any, ...], where: str) -> Any:
    try:
        with np.errstate(all="ignore"):
            return answer(*arguments)
    except (NotImplementedError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise WrongAnswer(f"{where}: it raised {type(error).__name__}: {error}") from error


_LISTED = "\n".join(f"* `{name}`" for name in STEPS)

BEFORE_THE_POLL = Exercise(
    name="before_the_poll",
    title="before or after?",
    problem=f"""\
AttnRes starts long before the ranks' sums arrive. Complete `before_the_poll(step)`: True if the kernel does this step
before its first poll, False if it comes later. The steps, as strings:

{_LISTED}""",
    skeleton='''def before_the_poll(step: str) -> bool:
    """Whether the split kernel does a step before its first poll."""
    raise NotImplementedError''',
    hints=(
        "Only delta comes out of the mailbox. Go through the formula: what needs delta, or something that does?",
        "The old prefix and out_w were written long ago: reading them early hides the latency. The largest score "
        "*of the blocks* is known early, the largest of all is not.",
        "One step needs nothing from the mailbox and is done last all the same: `griddepcontrol.wait` returns only "
        "when the producer has completed.",
    ),
    solution='''def before_the_poll(step: str) -> bool:
    """Whether the split kernel does a step before its first poll."""
    from_the_mailbox = {"delta", "P", "store P", "score of P", "largest of all scores", "mix", "last norm", "store out"}
    return step not in from_the_mailbox | {"griddepcontrol.wait"}''',
    check=check_place,
    wrong_tries=(
        WrongTry(
            "def before_the_poll(s): return s not in LATE - {'griddepcontrol.wait'}",
            "step 'griddepcontrol.wait' does not go before the poll: it returns when the producer has completed",
        ),
        WrongTry(
            "def before_the_poll(s): return s not in LATE - {'largest of all scores'}",
            "step 'largest of all scores' cannot be done before the poll: it needs the ranks -> delta -> P -> score of "
            "P -> largest of all scores",
        ),
        WrongTry(
            "def before_the_poll(s): return s not in LATE | {'read the old prefix'}",
            "step 'read the old prefix' need not wait for the mailbox: it takes nothing that has to arrive",
        ),
        WrongTry(
            "def before_the_poll(s): return s not in LATE | {'sum of e_s v_s over the blocks'}",
            "need not wait for the mailbox: it takes only largest score of the blocks",
        ),
        WrongTry(
            "def before_the_poll(s): return s not in LATE | {'launch the dependents'}",
            "step 'launch the dependents' need not wait",
        ),
        WrongTry("def before_the_poll(s): return True", "step 'delta' cannot be done before the poll"),
        WrongTry(
            "def before_the_poll(s): return 'before'", "it returned 'before'; True (before the poll) or False"
        ),
        WrongTry("def before_the_poll(s): return LATE[s]", "it raised TypeError"),
    ),
    names=(("LATE", {name for name in STEPS if not is_before_the_poll(name)}),),
)


# ---- the online softmax ----

TOKENS: dict[str, tuple[float, ...]] = {
    "scores that fall": (2.0, 1.0, -1.0, -3.0),
    "scores that rise": (-3.0, -1.0, 1.0, 2.0),
    "equal scores": (0.5, 0.5, 0.5),
    "scores up and down": (0.0, 3.0, -2.0, 4.0, 1.0),
    "scores far above 0": (800.0, 0.0, 801.0),
    "scores far below 0": (-900.0, -899.0, -950.0),
}
"""Scores of one token's sources each. exp of the last two tokens' is beyond float64."""
COLUMNS = 5
CLOSE = 1e-12


def sources_of(token: int, count: int) -> Array:
    """Rows v_s of a token: float64 [count, COLUMNS]."""
    return np.random.default_rng(token).standard_normal((count, COLUMNS))


def states(token: int, scores: tuple[float, ...]) -> Iterator[tuple[float, float, Array]]:
    """(maximum, total, values) after each source, computed anew from all that have come: no online softmax."""
    values = sources_of(token, len(scores))
    for count in range(1, len(scores) + 1):
        maximum = max(scores[:count])
        weights = np.exp(np.array(scores[:count]) - maximum)
        yield maximum, float(weights.sum()), weights @ values[:count]


def check_online(answer: Answer) -> None:
    """Every source of every token, each starting from the right state, or from nothing."""
    for token, (kind, scores) in enumerate(TOKENS.items()):
        state: tuple[float, float, Array] = (-np.inf, 0.0, np.zeros(COLUMNS))
        rows = sources_of(token, len(scores))
        for block, expected in enumerate(states(token, scores)):
            maximum, total, values = state
            where = f"token {token} ({kind}), block {block}"
            got = _answered(answer, (maximum, total, values.copy(), scores[block], rows[block]), where)
            _compare(got, expected, state, f"{where} with score {scores[block]:g}")
            state = expected


def _compare(
    got: Any, expected: tuple[float, float, Array], before: tuple[float, float, Array], where: str
) -> None:
    if not isinstance(got, tuple | list) or len(got) != 3:
        raise WrongAnswer(f"{where}: it returned {got!r}; a triple (maximum, total, values) is needed")
    hint = f"; the largest score so far was {before[0]:g} and is now {expected[0]:g}"
    for name, mine, its in zip(("maximum", "total", "values"), got, expected, strict=True):
        array, right = np.asarray(mine), np.asarray(its)
        if array.shape != right.shape or array.dtype.kind not in "fiu":
            raise WrongAnswer(
                f"{where}: {name} is an array of {array.dtype} of shape {array.shape}; numbers of shape {right.shape} "
                "are needed"
            )
        wrong = ~(np.abs(array - right) <= CLOSE * (1 + np.abs(right)))  # NaN is wrong too
        if wrong.any():
            at = int(np.argmax(wrong))
            place = f"{name}[{at}]" if array.ndim else name
            raise WrongAnswer(
                f"{where}: {place} is {array.ravel()[at]:.6g}, expected {right.ravel()[at]:.6g}{hint}"
            )


ONLINE_SOFTMAX = Exercise(
    name="online_softmax",
    title="one more source",
    problem="""\
Complete `online_softmax(maximum, total, values, score, v)`: what is kept of the sources so far, and one more source
with its score. `maximum` is the largest score so far, `total` the sum of e_s = exp(score_s - maximum), `values` the sum
of e_s v_s, an array like `v`. Return the three after the new source. Before the first source they are `-np.inf`, 0 and
zeros. No exponential may overflow, whatever the scores are.""",
    skeleton='''def online_softmax(maximum, total, values, score, v):
    """(maximum, total, values) after one more source v with this score."""
    raise NotImplementedError''',
    hints=(
        "The new source may have the largest score. Then everything that is kept refers to an old maximum.",
        "exp(s - new) = exp(s - old) * exp(old - new): a single factor brings total and values to the new maximum.",
        "new = max(maximum, score); kept = exp(maximum - new), which is 0 before the first source; the source itself "
        "has the weight exp(score - new).",
    ),
    solution='''def online_softmax(maximum, total, values, score, v):
    """(maximum, total, values) after one more source v with this score."""
    new = max(maximum, score)
    kept, weight = np.exp(maximum - new), np.exp(score - new)
    return new, kept * total + weight, kept * values + weight * v''',
    check=check_online,
    wrong_tries=(
        WrongTry(
            "def online_softmax(m, t, a, s, v):\n"
            " new = max(m, s)\n"
            " w = np.exp(s - new)\n"
            " return new, t + w, a + w * v",
            "token 1 (scores that rise), block 1 with score -1: total is 2, expected 1.13534; the largest score so far "
            "was -3 and is now -1",
        ),
        WrongTry(
            "def online_softmax(m, t, a, s, v):\n"
            " new = max(m, s)\n"
            " k, w = np.exp(m - new), np.exp(s - new)\n"
            " return new, k * t + w, a + w * v",
            "token 1 (scores that rise), block 1 with score -1: values[0]",
        ),
        WrongTry(
            "def online_softmax(m, t, a, s, v):\n"
            " new = max(m, s)\n"
            " k, w = np.exp(new - m), np.exp(s - new)\n"
            " return new, k * t + w, k * a + w * v",
            "token 0 (scores that fall), block 0 with score 2: total is nan",
        ),
        WrongTry(
            "def online_softmax(m, t, a, s, v):\n"
            " new = max(m, s)\n"
            " k = np.exp(m) / np.exp(new)\n"
            " w = np.exp(s) / np.exp(new)\n"
            " return new, k * t + w, k * a + w * v",
            "token 4 (scores far above 0), block 0 with score 800: total is nan",
        ),
        WrongTry(
            "def online_softmax(m, t, a, s, v): return m, t + np.exp(s - m), a + np.exp(s - m) * v",
            "token 0 (scores that fall), block 0 with score 2: maximum is -inf, expected 2",
        ),
        WrongTry(
            "def online_softmax(m, t, a, s, v):\n"
            " new = max(m, s)\n"
            " k, w = np.exp(m - new), np.exp(s - new)\n"
            " total = k * t + w\n"
            " return new, total, (k * a + w * v) / total",
            "token 0 (scores that fall), block 1 with score 1: values[0]",
        ),
        WrongTry(
            "def online_softmax(m, t, a, s, v): return max(m, s), t, a.sum()",
            "total is 0, expected 1",
        ),
        WrongTry(
            "def online_softmax(m, t, a, s, v): return t + s", "a triple (maximum, total, values) is needed"
        ),
        WrongTry("def online_softmax(m, t, a, s, v): return max, t, a", "maximum is an array of object"),
        WrongTry("def online_softmax(m, t, a, s, v): return m.maximum, t, a", "it raised AttributeError"),
    ),
    names=(("np", np),),
)
