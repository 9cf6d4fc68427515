"""Notebook 10's exercises: where the wait and the trigger go, what is left of the registers, what is exposed."""

from __future__ import annotations

from itertools import product
from typing import Any

from oproj_lib.lessons.exercise import Answer, Exercise, WrongAnswer, WrongTry, call, place, whole
from oproj_lib.overlap import Overlap
from oproj_lib.pdl_demo import BUFFERS, IN_ORDER, LOADS, STEPS, run_chain
from oproj_lib.residency import REGISTERS, Needs

NEEDS = {"multiply": ("load W", "load x"), "store y": ("multiply", "load table")}
"""Steps that need the results of others."""
WRITTEN = (("x",), ("x", "table"), ("x", "W"), ("x", "W", "table"))
"""What the predecessor may write, a case each."""


# -- the order of the steps


def check_order(answer: Answer) -> None:
    """Every set of written buffers: the right steps, run on the virtual GPU with a consumer, nothing exposed."""
    for written in WRITTEN:
        where = f"written = {written}"
        try:
            got = answer(written)
        except (NotImplementedError, KeyboardInterrupt):
            raise
        except Exception as error:
            raise WrongAnswer(f"{where}: it raised {type(error).__name__}: {error}") from error
        steps = _steps(got, where)
        _check_needs(steps, where)
        _check_findings(steps, written, where)
        _check_exposed(steps, written, where)


def _steps(got: Any, where: str) -> list[str]:
    if not isinstance(got, list | tuple) or not all(isinstance(step, str) for step in got):
        raise WrongAnswer(f"{where}: it returned {got!r}; a list of steps is needed")
    if sorted(got) != sorted(STEPS):
        missing = [step for step in STEPS if step not in got]
        odd = [step for step in got if step not in STEPS or got.count(step) > 1]
        raise WrongAnswer(
            f"{where}: each of {', '.join(STEPS)} is needed once; missing: {', '.join(missing) or 'none'}, repeated "
            f"or unknown: {', '.join(dict.fromkeys(odd)) or 'none'}"
        )
    return list(got)


def _check_needs(steps: list[str], where: str) -> None:
    for step, needed in NEEDS.items():
        for other in needed:
            if steps.index(other) > steps.index(step):
                raise WrongAnswer(
                    f"{where}: step {steps.index(step) + 1}, {step}, needs {other}, which is step "
                    f"{steps.index(other) + 1}"
                )


def _check_findings(steps: list[str], written: tuple[str, ...], where: str) -> None:
    run = run_chain(steps, writes=written, consumer=True)
    for grid, finding in run.findings:
        line = finding.source.line if finding.source else 0
        step = f"step {line}, {steps[line - 1]}: " if grid == "projection" and line else ""
        raise WrongAnswer(
            f"{where}: the virtual GPU says of the {grid}: {step}{finding.kind}: {finding.message}"
        )
    if run.wrong:
        raise WrongAnswer(f"{where}: {run.wrong} of {run.seen.size} results are wrong")


def _check_exposed(steps: list[str], written: tuple[str, ...], where: str) -> None:
    wait = steps.index("wait")
    for load in LOADS:
        if steps.index(load) > wait and load.removeprefix("load ") not in written:
            raise WrongAnswer(
                f"{where}: {load} stands behind the wait and need not: the predecessor does not write it, so its "
                "time is exposed for nothing"
            )
    late = steps[wait + 1 : steps.index("trigger")]
    if late:
        raise WrongAnswer(
            f"{where}: between wait and trigger stand {', '.join(late)}: the consumer, which could start, waits for "
            "them"
        )


ORDER = Exercise(
    name="order_steps",
    title="where do the wait and the trigger go?",
    problem=f"""\
Complete `order_steps(written)`: the steps of the projection in a good order. `written` says what the predecessor
writes, a tuple of names from {", ".join(f'"{name}"' for name in BUFFERS)}; x is always among them. The steps are
{", ".join(f'"{step}"' for step in STEPS)}, each exactly once. `multiply` needs W and x; `store y` needs the product,
and the table to know where to. The consumer polls y and then reads x **without a wait of its own**.

The check runs your order on the virtual GPU, in a chain of three kernels: no rule may be broken. And nothing may be
exposed that need not be: what can come before the wait must, and the consumer must be let go as soon as it may.""",
    skeleton='''def order_steps(written: tuple[str, ...]) -> list[str]:
    """The projection's steps in order; written: what the predecessor writes, for example ("x",)."""
    raise NotImplementedError''',
    hints=(
        "Sort the loads into two groups: those of what the predecessor writes, and the others.",
        "The consumer reads x, which the *predecessor* wrote, without waiting for anybody. What must the projection "
        "have done before it lets the consumer start?",
        "Loads of what is not written, wait, trigger, loads of what is written, multiply, store y.",
    ),
    solution='''def order_steps(written: tuple[str, ...]) -> list[str]:
    """The projection's steps in order; written: what the predecessor writes, for example ("x",)."""
    early = [f"load {name}" for name in ("W", "table", "x") if name not in written]
    late = [f"load {name}" for name in ("W", "table", "x") if name in written]
    return [*early, "wait", "trigger", *late, "multiply", "store y"]''',
    check=check_order,
    wrong_tries=(
        WrongTry(
            f"def order_steps(written): return {list(IN_ORDER)}",
            "written = ('x', 'table'): the virtual GPU says of the projection: step 2, load table: too early",
        ),
        WrongTry(
            "def order_steps(written):\n"
            "    return ['wait', 'trigger', 'load W', 'load table', 'load x', 'multiply', 'store y']",
            "load W stands behind the wait and need not",
        ),
        WrongTry(
            "def order_steps(written):\n"
            "    return ['load W', 'load table', 'load x', 'wait', 'trigger', 'multiply', 'store y']",
            "the projection: step 3, load x: too early: read of x",
        ),
        WrongTry(
            "def order_steps(written):\n"
            "    return ['trigger', 'load W', 'load table', 'wait', 'load x', 'multiply', 'store y']",
            "the virtual GPU says of the consumer: too early: read of x",
        ),
        WrongTry(
            "def order_steps(written):\n"
            "    return ['load W', 'load table', 'wait', 'load x', 'multiply', 'store y', 'trigger']",
            "between wait and trigger stand load x, multiply, store y",
        ),
        WrongTry(
            "def order_steps(written):\n"
            "    return ['load W', 'load table', 'wait', 'trigger', 'multiply', 'load x', 'store y']",
            "step 5, multiply, needs load x, which is step 6",
        ),
        WrongTry(
            "def order_steps(written): return ['load W', 'load W', 'wait']", "repeated or unknown: load W"
        ),
        WrongTry("def order_steps(written): return 'wait'", "a list of steps is needed"),
        WrongTry("def order_steps(written): return written[9]", "it raised IndexError"),
    ),
)


# -- registers


def check_registers(answer: Answer) -> None:
    """CTAs of 32 to 512 threads, and registers on both sides of the unit of 8."""
    names = ("threads", "registers")
    for threads, registers in product((512, 128, 96, 100), (120, 128, 127, 121, 32, 33, 80)):
        where = place(names, (threads, registers))
        got = whole(call(answer, threads, registers, names=names), where)
        one = Needs("", threads, registers)
        if got != one.registers_left:
            raise WrongAnswer(
                f"{where}: it returned {got:,}. {one.warps} warps x {one.warp_registers:,} registers = "
                f"{one.register_total:,}, so {one.registers_left:,} are left"
            )


REGISTERS_LEFT = Exercise(
    name="registers_left",
    title="what is left for the neighbour?",
    problem=f"""\
Complete `registers_left(threads, registers)`: how many of a multiprocessor's {REGISTERS:,} registers one CTA with so
many threads of so many registers leaves. Registers are given out per **warp**, in units of 256: registers per thread
are rounded up to a multiple of 8, and a warp that is not full takes as much as a full one.""",
    skeleton='''def registers_left(threads: int, registers: int) -> int:
    """Registers of the multiprocessor that one CTA of so many threads and registers per thread leaves."""
    raise NotImplementedError''',
    hints=(
        "How many warps are 100 threads? How many registers does a thread get that needs 33?",
        "Rounding up in whole numbers: `-(-a // b)` is a / b, rounded up.",
        f"{REGISTERS} minus warps x 32 x (registers, rounded up to a multiple of 8).",
    ),
    solution='''def registers_left(threads: int, registers: int) -> int:
    """Registers of the multiprocessor that one CTA of so many threads and registers per thread leaves."""
    warps = -(-threads // 32)
    return 65536 - warps * 32 * -(-registers // 8) * 8''',
    check=check_registers,
    wrong_tries=(
        WrongTry(
            "def registers_left(threads, registers): return 65536 - threads * registers",
            "threads 512, registers 127: it returned 512. 16 warps x 4,096 registers = 65,536, so 0 are left",
        ),
        WrongTry(
            "def registers_left(threads, registers): return 65536 - threads * -(-registers // 8) * 8",
            "threads 100, registers 120: it returned 53,536. 4 warps x 3,840 registers = 15,360, so 50,176",
        ),
        WrongTry(
            "def registers_left(threads, registers): return 65536 - -(-threads // 32) * 32 * (registers // 8) * 8",
            "threads 512, registers 127: it returned 4,096",
        ),
        WrongTry(
            "def registers_left(threads, registers): return 65536 // (threads * registers)",
            "threads 512, registers 120: it returned 1. 16 warps x 3,840 registers = 61,440, so 4,096 are left",
        ),
        WrongTry(
            "def registers_left(threads, registers): return 65536 - threads * registers / 1", "a whole number"
        ),
    ),
)


# -- exposed time


def check_exposed(answer: Answer) -> None:
    """Triggers from the start of the predecessor to its end, preloads that are hidden wholly, in part, not at all."""
    names = ("predecessor", "trigger", "preload", "rest", "boundary")
    for values in product((8000, 3000), (0, 1000, 3000), (0, 2600, 5200), (1300, 400), (450, 0)):
        predecessor, trigger, preload, _, _ = values
        where = place(names, values)
        got = whole(call(answer, *values, names=names), where)
        expected = round(Overlap(*values).exposed)
        if got != expected:
            lead = predecessor - trigger
            hidden = min(preload, lead)
            raise WrongAnswer(
                f"{where}: it returned {got}. The dependent is let go {lead} before the end, so {hidden} of its "
                f"{preload} of loading are hidden; {expected} are exposed"
            )


EXPOSED = Exercise(
    name="exposed_ns",
    title="what does the layer wait?",
    problem="""\
Complete `exposed_ns(predecessor, trigger, preload, rest, boundary)`, all in whole nanoseconds: the predecessor ends at
`predecessor` and lets its dependents go at `trigger`, both counted from its start. `boundary` after that, the dependent
starts, and loads for `preload`. Then it waits: it may go on `boundary` after the predecessor's end. After the wait it
has `rest` to do. Return the exposed time: from the predecessor's end to the dependent's.""",
    skeleton='''def exposed_ns(predecessor: int, trigger: int, preload: int, rest: int, boundary: int) -> int:
    """Nanoseconds from the end of the predecessor to the end of the dependent."""
    raise NotImplementedError''',
    hints=(
        "When does the dependent arrive at its wait? When may it go on at the earliest?",
        "It is past the wait at the later of the two. Then comes `rest`.",
        "`max(trigger + boundary + preload, predecessor + boundary) + rest`, counted from `predecessor`.",
    ),
    solution='''def exposed_ns(predecessor: int, trigger: int, preload: int, rest: int, boundary: int) -> int:
    """Nanoseconds from the end of the predecessor to the end of the dependent."""
    arrives = trigger + boundary + preload
    goes_on = max(arrives, predecessor + boundary)
    return goes_on + rest - predecessor''',
    check=check_exposed,
    wrong_tries=(
        WrongTry(
            "def exposed_ns(p, t, w, r, b): return b + w + r",
            "trigger 0, preload 2600, rest 1300, boundary 450: it returned 4350. The dependent is let go 8000 before "
            "the end, so 2600 of its 2600 of loading are hidden; 1750 are exposed",
        ),
        WrongTry(
            "def exposed_ns(p, t, w, r, b): return t + b + w + r - p",
            "preload 0, rest 1300, boundary 450: it",
        ),
        WrongTry(
            "def exposed_ns(p, t, w, r, b): return max(0, w - (p - t)) + r",
            "trigger 0, preload 0, rest 1300, boundary 450: it returned 1300",
        ),
        WrongTry(
            "def exposed_ns(p, t, w, r, b): return max(0, w - p) + b + r",
            "predecessor 8000, trigger 3000, preload 5200, rest 1300, boundary 450: it returned 1750",
        ),
        WrongTry(
            "def exposed_ns(p, t, w, r, b): return max(0, w - (p - t)) + b + r / 1",
            "a whole number is needed",
        ),
    ),
)
