"""Notebook 14's exercises: the floor and the share of bandwidth of a time, and what is wrong with a measurement."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

from oproj_lib.lessons.exercise import Answer, Exercise, WrongAnswer, WrongTry

_CLOSE = 1e-9  # relative: the same arithmetic in another order


# -- floor and share


def check_share(answer: Answer) -> None:
    """Times at, above and below the floor."""
    for values in product((22_159_360, 11_139_072), (6.3, 3.7, 2.0), (4.35, 8.0)):
        where = f"moved_bytes {values[0]:,}, us {values[1]}, bandwidth_tb_s {values[2]}"
        floor = values[0] / values[2] / 1e6
        expected = (floor, floor / values[1], values[1] >= floor)
        got = _called(answer, values, where)
        if not isinstance(got, tuple) or len(got) != len(expected):
            raise WrongAnswer(
                f"{where}: it returned {got!r}; three values are needed: floor, share, possible"
            )
        for name, mine, yours in zip(("floor", "share"), expected[:2], got[:2], strict=True):
            if isinstance(yours, bool) or not isinstance(yours, int | float):
                raise WrongAnswer(f"{where}: {name} is {yours!r}; a number is needed")
            if not abs(yours - mine) <= _CLOSE * mine:  # NaN is wrong, too
                raise WrongAnswer(
                    f"{where}: {name} {yours:.6g}, expected {mine:.6g}{_why(yours / mine, name)}"
                )
        if got[2] is not expected[2]:
            raise WrongAnswer(
                f"{where}: possible is {got[2]!r}; {values[1]} us is "
                f"{'not ' if expected[2] else ''}below the floor of {floor:.3f} us"
            )


def _why(factor: float, name: str) -> str:
    reasons = {1e-6: "1 TB/s is 1e6 bytes per microsecond", 1e6: "1 TB/s is 1e6 bytes per microsecond"}
    if name == "share":
        reasons[100.0] = "a share is at most about 1, not 100"
    for known, reason in reasons.items():
        if abs(factor - known) < 1e-6 * known:
            return f": {reason}"
    return ""


def _called(answer: Answer, values: tuple[Any, ...], where: str) -> Any:
    try:
        return answer(*values)
    except (NotImplementedError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise WrongAnswer(f"{where}: it raised {type(error).__name__}: {error}") from error


SHARE = Exercise(
    name="floor_and_share",
    title="what a time says",
    problem="""\
Complete `floor_and_share(moved_bytes, us, bandwidth_tb_s)`: a kernel that must move so many bytes was timed at `us`
microseconds, on a GPU whose memory reached `bandwidth_tb_s` in the same session. Return three values: the floor in
microseconds; the share of the bandwidth that the kernel reached, 1.0 for all of it; and whether the time is possible
with cold weights, True or False.""",
    skeleton='''def floor_and_share(moved_bytes: int, us: float, bandwidth_tb_s: float) -> tuple[float, float, bool]:
    """(floor in microseconds, share of the bandwidth, whether the time is possible)."""
    raise NotImplementedError''',
    hints=(
        "The floor is a time: bytes over bandwidth. In which unit?",
        "1 TB/s is 1e12 bytes per second: 1e6 bytes per microsecond.",
        "The share is floor over time, and a time below the floor (a share above 1) is impossible.",
    ),
    solution='''def floor_and_share(moved_bytes: int, us: float, bandwidth_tb_s: float) -> tuple[float, float, bool]:
    """(floor in microseconds, share of the bandwidth, whether the time is possible)."""
    floor = moved_bytes / (bandwidth_tb_s * 1e6)
    return floor, floor / us, us >= floor''',
    check=check_share,
    wrong_tries=(
        WrongTry(
            "def floor_and_share(b, us, t): f = b / (t * 1e12); return f, f / us, us >= f",
            "1 TB/s is 1e6 bytes per microsecond",
        ),
        WrongTry(
            "def floor_and_share(b, us, t): f = b / t / 1e6; return f, us / f, us >= f",
            "moved_bytes 22,159,360, us 6.3, bandwidth_tb_s 4.35: share 1.23672, expected 0.808588",
        ),
        WrongTry(
            "def floor_and_share(b, us, t): f = b / t / 1e6; return f, 100 * f / us, us >= f",
            "a share is at most about 1, not 100",
        ),
        WrongTry(
            "def floor_and_share(b, us, t): f = b / t / 1e6; return f, f / us, True",
            "possible is True; 3.7 us is below the floor of 5.094 us",
        ),
        WrongTry(
            "def floor_and_share(b, us, t): f = b / t / 1e6; return f, min(1.0, f / us), us >= f",
            "us 3.7, bandwidth_tb_s 4.35: share 1, expected 1.37679",
        ),
        WrongTry("def floor_and_share(b, us, t): return b / t / 1e6", "three values are needed"),
        WrongTry(
            "def floor_and_share(b, us, t): return float('nan'), 1.0, True", "floor nan, expected 5.0941"
        ),
        WrongTry("def floor_and_share(b, us, t): return b / 0", "it raised ZeroDivisionError"),
    ),
)


# -- what is wrong with a measurement

FAULTS = ("not waited for", "warm weights", "unchecked output", "wrong average", "none")


@dataclass(frozen=True)
class Report:
    """A measurement as a colleague might report it.

    synchronised: whether the end of the work, not of the launch, stopped the clock. copies: of W in turn, of
    weight_bytes each. out_bytes_seen: bytes of the output compared after poisoning it, of out_bytes. samples:
    microseconds; us: what was reported.
    """

    title: str
    synchronised: bool
    copies: int
    weight_bytes: int
    l2_bytes: int
    out_bytes: int
    out_bytes_seen: int
    samples: tuple[float, ...]
    us: float


_W = 2 * 7168 * 1536
_L2 = 60 * 2**20
_OUT = 8 * 7168 * 2
_CALM = (6.3, 6.3, 6.4, 6.3, 6.2, 6.3, 6.4)
_SPIKE = (6.3, 6.3, 6.4, 6.3, 48.0, 6.3, 6.4)
MEASUREMENTS: tuple[tuple[Report, str], ...] = (
    (Report("A", False, 46, _W, _L2, _OUT, _OUT, (2.1, 2.2, 2.1, 2.1, 2.0, 2.1, 2.1), 2.1), "not waited for"),
    (Report("B", True, 2, _W, _L2, _OUT, _OUT, (3.9, 3.8, 3.9, 3.9, 3.9, 4.0, 3.9), 3.9), "warm weights"),
    (Report("C", True, 46, _W, _L2, _OUT, 0, (5.7, 5.8, 5.7, 5.7, 5.6, 5.7, 5.8), 5.7), "unchecked output"),
    (Report("D", True, 46, _W, _L2, _OUT, _OUT, _SPIKE, sum(_SPIKE) / len(_SPIKE)), "wrong average"),
    (Report("E", True, 46, _W, _L2, _OUT, _OUT, _SPIKE, 6.3), "none"),
    (Report("F", True, 46, _W, _L2, _OUT, _OUT - 2, _CALM, 6.3), "unchecked output"),
    (Report("G", True, 1, _W // 2, _L2, _OUT, _OUT, _CALM, 6.3), "warm weights"),
    (Report("H", True, 43, _W, _L2, _OUT, _OUT, _CALM, 6.3), "warm weights"),
    (Report("I", True, 44, _W, _L2, _OUT, _OUT, _CALM, 6.3), "none"),
    (Report("J", True, 46, _W, _L2, _OUT, _OUT, (6.2, 6.3, 6.3, 6.4, 6.4), 6.2), "wrong average"),
)
"""Invented, each with its one fault. H and I stand on both sides of 15 x the L2 between two uses of a copy."""


def check_fault(answer: Answer) -> None:
    """Every invented measurement is judged right."""
    for report, expected in MEASUREMENTS:
        where = f"measurement {report.title}"
        got = _called(answer, (report,), where)
        if got not in FAULTS:
            raise WrongAnswer(
                f"{where}: it returned {got!r}; one of {', '.join(map(repr, FAULTS))} is needed"
            )
        if got != expected:
            raise WrongAnswer(f"{where}: it returned {got!r}. {_explained(report, expected)}")


def _explained(report: Report, expected: str) -> str:
    between = (report.copies - 1) * report.weight_bytes
    return {
        "not waited for": "The clock stopped when the launch returned, and the kernel was still running",
        "warm weights": f"{report.copies} copies: {between:,} bytes between two uses of the same one, "
        f"{between / report.l2_bytes:.1f} times the L2",
        "unchecked output": f"{report.out_bytes_seen:,} of {report.out_bytes:,} bytes of the output were compared",
        "wrong average": f"{report.us:.2f} us was reported, and the samples' median is another",
        "none": f"Nothing is wrong with it: {between / report.l2_bytes:.1f} times the L2 between two uses, the "
        "whole output compared, the median reported",
    }[expected]


FAULT = Exercise(
    name="fault",
    title="what is wrong with this measurement?",
    problem="""\
Complete `fault(m)`: the name of what is wrong with a measurement `m`, or "none". Each has one fault at most:

* "not waited for": the clock stopped when the launch returned (`m.synchronised` is False)
* "warm weights": between two uses of the same copy of W (`m.copies` of `m.weight_bytes` each, in turn) fewer bytes of
  other copies were read than 15 times the L2 cache (`m.l2_bytes`)
* "unchecked output": not all `m.out_bytes` were compared after the output had been poisoned (`m.out_bytes_seen` were)
* "wrong average": the time reported (`m.us`) is not the median of `m.samples`, an odd number of microseconds""",
    skeleton='''def fault(m) -> str:
    """ "not waited for", "warm weights", "unchecked output", "wrong average" or "none"."""
    raise NotImplementedError''',
    hints=(
        "One `if` per fault. Which fields does each need?",
        "If copies are taken in turn, how many *other* copies are read between two uses of the same one?",
        "`(m.copies - 1) * m.weight_bytes < 15 * m.l2_bytes`; the median is `sorted(m.samples)[len(m.samples) // 2]`.",
    ),
    solution='''def fault(m) -> str:
    """ "not waited for", "warm weights", "unchecked output", "wrong average" or "none"."""
    if not m.synchronised:
        return "not waited for"
    if (m.copies - 1) * m.weight_bytes < 15 * m.l2_bytes:
        return "warm weights"
    if m.out_bytes_seen < m.out_bytes:
        return "unchecked output"
    if m.us != sorted(m.samples)[len(m.samples) // 2]:
        return "wrong average"
    return "none"''',
    check=check_fault,
    wrong_tries=(
        WrongTry("def fault(m): return 'none'", "measurement A: it returned 'none'. The clock stopped"),
        WrongTry(
            "def fault(m):\n if not m.synchronised: return 'not waited for'\n"
            " if m.copies * m.weight_bytes < 15 * m.l2_bytes: return 'warm weights'\n"
            " if m.out_bytes_seen < m.out_bytes: return 'unchecked output'\n"
            " return 'none' if m.us == sorted(m.samples)[len(m.samples) // 2] else 'wrong average'",
            "measurement H: it returned 'none'. 43 copies: 924,844,032 bytes between two uses of the same one, 14.7 "
            "times the L2",
        ),
        WrongTry(
            "def fault(m):\n if not m.synchronised: return 'not waited for'\n"
            " if (m.copies - 1) * m.weight_bytes < 15 * m.l2_bytes: return 'warm weights'\n"
            " if not m.out_bytes_seen: return 'unchecked output'\n"
            " return 'none' if m.us == sorted(m.samples)[len(m.samples) // 2] else 'wrong average'",
            "measurement F: it returned 'none'. 114,686 of 114,688 bytes of the output were compared",
        ),
        WrongTry(
            "def fault(m):\n if not m.synchronised: return 'not waited for'\n"
            " if (m.copies - 1) * m.weight_bytes < 15 * m.l2_bytes: return 'warm weights'\n"
            " if m.out_bytes_seen < m.out_bytes: return 'unchecked output'\n"
            " return 'wrong average' if max(m.samples) > 2 * min(m.samples) else 'none'",
            "measurement E: it returned 'wrong average'. Nothing is wrong with it",
        ),
        WrongTry(
            "def fault(m):\n if not m.synchronised: return 'not waited for'\n"
            " if (m.copies - 1) * m.weight_bytes < 15 * m.l2_bytes: return 'warm weights'\n"
            " if m.out_bytes_seen < m.out_bytes: return 'unchecked output'\n"
            " return 'none' if m.us in m.samples else 'wrong average'",
            "measurement J: it returned 'none'. 6.20 us was reported",
        ),
        WrongTry("def fault(m): return 'cold weights'", "one of 'not waited for', 'warm weights'"),
        WrongTry("def fault(m): return m.median", "measurement A: it raised AttributeError"),
    ),
)
