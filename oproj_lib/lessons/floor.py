"""Exercise of notebook 01: the least bytes, and what they cost."""

from __future__ import annotations

from oproj_lib.floor import Roofline, work
from oproj_lib.lessons.exercise import Answer, Exercise, WrongAnswer, WrongTry, call, place
from oproj_lib.problem import MAX_BATCH, RANKS, Problem

_CLOSE = 1e-9  # relative: the same arithmetic in another order


def check(answer: Answer) -> None:
    """At all ends of ranks and batch, so that a forgotten term shows."""
    names = ("ranks", "batch")
    for ranks in RANKS:
        for batch in (1, 8, MAX_BATCH):
            job = work(Problem(ranks, batch))
            where = place(names, (ranks, batch))
            got = call(lambda r, b: answer(r, b, 4.0), ranks, batch, names=names)
            if not isinstance(got, int | float) or isinstance(got, bool):
                raise WrongAnswer(f"{where}: it returned {got!r}; a number of microseconds is needed")
            expected = Roofline(4.0, 1.0).memory_us(job)
            if abs(got - expected) > _CLOSE * expected:
                raise WrongAnswer(
                    f"{where}, 4 TB/s: {got:.6g} us, expected {expected:.6g} us{_why(got, job)}"
                )


def _why(got: float, job: object) -> str:
    """The term that is missing, if one alone explains the difference."""
    parts = {"the weights": "weight_bytes", "x": "x_bytes", "the outputs": "out_bytes"}
    total = job.bytes  # type: ignore[attr-defined]
    missing = total - got * 4.0 * 1e6
    for name, attribute in parts.items():
        if abs(missing - getattr(job, attribute)) < 1:
            return f": the bytes of {name} are missing"
    for factor, reason in (
        (0.5, "a BF16 has 2 bytes"),
        (1e6, "1 TB/s is 1e6 bytes per microsecond"),
        (1e-6, "microseconds"),
    ):
        if abs(got * 4.0 * 1e6 / total - factor) < 1e-6 * factor:
            return f": {reason}"
    return ""


FLOOR = Exercise(
    name="floor_us",
    title="the floor, by hand",
    problem="""\
Complete `floor_us(ranks, batch, bandwidth_tb_s)`: the microseconds that it takes to move what one rank
must move at least once: all of W [7168, K], all of x [M, K] and all of the output [M, 7168], in BF16, at
that bandwidth. K is 12288 / ranks.""",
    skeleton='''def floor_us(ranks: int, batch: int, bandwidth_tb_s: float) -> float:
    """Microseconds to move W, x and the output once."""
    raise NotImplementedError''',
    hints=(
        "Count elements first, then bytes. There are three arrays.",
        "A BF16 has 2 bytes, so W alone has `7168 * 12288 // ranks * 2` of them.",
        "1 TB/s is 1e12 bytes per second, that is 1e6 bytes per microsecond.",
    ),
    solution='''def floor_us(ranks: int, batch: int, bandwidth_tb_s: float) -> float:
    """Microseconds to move W, x and the output once."""
    k = 12288 // ranks
    elements = 7168 * k + batch * k + batch * 7168
    return 2 * elements / (bandwidth_tb_s * 1e6)''',
    check=check,
    wrong_tries=(
        WrongTry(
            "def floor_us(r, b, t): k = 12288 // r; return 2 * (7168 * k + b * k) / (t * 1e6)",
            "the bytes of the outputs are missing",
        ),
        WrongTry(
            "def floor_us(r, b, t): k = 12288 // r; return 2 * (7168 * k + b * 7168) / (t * 1e6)",
            "the bytes of x are missing",
        ),
        WrongTry(
            "def floor_us(r, b, t): k = 12288 // r; return (7168 * k + b * k + b * 7168) / (t * 1e6)",
            "a BF16 has 2 bytes",
        ),
        WrongTry(
            "def floor_us(r, b, t): k = 12288 // r; return 2 * (7168 * k + b * k + b * 7168) / (t * 1e12)",
            "ranks 8, batch 1",
        ),
        WrongTry(
            "def floor_us(r, b, t): k = 1536; return 2 * (7168 * k + b * k + b * 7168) / (t * 1e6)",
            "ranks 16, batch 1",
        ),
        WrongTry("def floor_us(r, b, t): return None", "it returned None"),
        WrongTry("def floor_us(r, b, t): return 1 / 0", "it raised ZeroDivisionError"),
    ),
)
