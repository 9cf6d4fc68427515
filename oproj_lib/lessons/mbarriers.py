"""Notebook 06: a hand-over between two warps in PTX to play with, and the exercise on parities."""

from __future__ import annotations

from oproj_lib.layouts import ring
from oproj_lib.lessons.exercise import Answer, Exercise, WrongAnswer, WrongTry, call, place, whole
from oproj_lib.timeline import BarrierName, Legend

LANES = 32
HAND_OVER_LEGEND = Legend(
    {0: "reader", 1: "writer"}, {"mbarrier@0": BarrierName("full"), "mbarrier@8": BarrierName("empty")}
)


def hand_over(*, expected: int = LANES, arriving: int = LANES, flip: int = 0, rounds: int = 3) -> str:
    """PTX of a kernel of two warps: warp 1 writes 32 words to shared memory, warp 0 reads them, `rounds` times.

    out [rounds, 32] u32: 100 * round + lane. expected: arrivals that ``full`` is initialised with. arriving:
    lanes of the writer that arrive. flip: 1 inverts the parity that the reader waits for. The kernel is right
    with the default values only.

    Raises ValueError for numbers that PTX does not take, or no rounds.
    """
    if not 1 <= expected < 1 << 20:
        raise ValueError(f"expected = {expected}: mbarrier.init takes 1 to {(1 << 20) - 1}")
    if not 0 <= arriving <= LANES:
        raise ValueError(f"arriving = {arriving}: the writer has {LANES} lanes, choose 0 to {LANES}")
    if flip not in (0, 1) or rounds < 1:
        raise ValueError(f"flip = {flip}, rounds = {rounds}: choose flip 0 or 1 and at least 1 round")
    writer = "".join(_write(i) for i in range(rounds))
    reader = "".join(_read(i, flip) for i in range(rounds))
    return _FRAME.format(expected=expected, arriving=arriving, writer=writer, reader=reader)


def _wait(barrier: str, parity: int, label: str) -> str:
    return (
        f"{label}:\n"
        f"    mbarrier.try_wait.parity.shared::cta.b64 %p3, [{barrier}], {parity};\n"
        f"    @!%p3 bra {label};\n"
    )


def _write(number: int) -> str:
    wait = _wait("empty", (number - 1) % 2, f"EMPTY_{number}") if number else ""
    return (
        f"{wait}    add.u32 %r5, %r2, {100 * number};\n"
        "    st.shared.b32 [%r4], %r5;\n"
        "    @%p2 mbarrier.arrive.shared::cta.b64 _, [full];\n"
    )


def _read(number: int, flip: int) -> str:
    return (
        _wait("full", number % 2 ^ flip, f"FULL_{number}") + "    ld.shared.b32 %r5, [%r4];\n"
        f"    st.global.b32 [%rd2+{128 * number}], %r5;\n"
        "    mbarrier.arrive.shared::cta.b64 _, [empty];\n"
    )


_FRAME = """\
.version 8.0
.target sm_90
.address_size 64

.visible .entry hand_over(.param .u64 out)
{{
    .reg .pred %p<4>;
    .reg .b32 %r<6>;
    .reg .b64 %rd<4>;
    .shared .align 8 .b8 full[8];
    .shared .align 8 .b8 empty[8];
    .shared .align 16 .b8 words[128];

    mov.u32 %r1, %tid.x;
    and.b32 %r2, %r1, 31;                    // lane
    shl.b32 %r3, %r2, 2;
    mov.u32 %r4, words;
    add.u32 %r4, %r4, %r3;                   // the lane's word
    ld.param.u64 %rd1, [out];
    cvta.to.global.u64 %rd1, %rd1;
    cvt.u64.u32 %rd3, %r3;
    add.u64 %rd2, %rd1, %rd3;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [full], {expected};
    mbarrier.init.shared::cta.b64 [empty], 32;
READY:
    bar.sync 0;
    setp.lt.u32 %p1, %r1, 32;
    @%p1 bra READER;

    setp.lt.u32 %p2, %r2, {arriving};          // warp 1 writes
{writer}    bra DONE;

READER:                                      // warp 0 reads
{reader}DONE:
    ret;
}}
"""


def check(answer: Answer) -> None:
    """Every K block of rings of 1 to 6 stages."""
    names = ("kb", "stages")
    for stages in range(1, 7):
        for kb in range(24):
            where = place(names, (kb, stages))
            got = whole(call(answer, kb, stages, names=names), where)
            expected = ring.full_parity(kb, stages)
            if got != expected:
                slot, phase = ring.slot_of(kb, stages), kb // stages
                raise WrongAnswer(
                    f"{where}: it returned {got}. Block {kb} is in slot {slot} and completes phase {phase} of "
                    f"full[{slot}], so wait for parity {expected}{_consequence(got, phase)}"
                )


def _consequence(got: int, phase: int) -> str:
    if got not in (0, 1):
        return "; a parity is 0 or 1"
    if phase == 0:
        return ". With 1 the wait would be over before anything has arrived"
    return f". With {got} the wait would be over as soon as phase {phase - 1} is"


PARITY = Exercise(
    name="parity",
    title="which parity?",
    problem="""\
The MMA warp takes K blocks kb = 0, 1, 2, ... out of a ring with `stages` slots. Block kb arrives in slot
`kb % stages`, and each slot has its own `full` barrier. Complete `parity(kb, stages)`: the parity with which
the warp has to wait for block kb.""",
    skeleton='''def parity(kb: int, stages: int) -> int:
    """Parity, 0 or 1, of the phase of full[kb % stages] that block kb completes."""
    raise NotImplementedError''',
    hints=(
        "Phases are numbered from 0, one barrier at a time. Which phase of its barrier does the first block "
        "of a slot complete? And the second one in that slot?",
        "How many blocks have gone through the slot before block kb?",
        "`kb // stages` blocks have. That is the number of the phase; its parity is the number modulo 2.",
    ),
    solution='''def parity(kb: int, stages: int) -> int:
    """Parity, 0 or 1, of the phase of full[kb % stages] that block kb completes."""
    return kb // stages % 2  # the round in which the slot is used''',
    check=check,
    wrong_tries=(
        WrongTry(
            "def parity(kb, stages): return 1 - kb // stages % 2",
            "kb 0, stages 1: it returned 1. Block 0 is in slot 0 and completes phase 0 of full[0], so wait "
            "for parity 0. With 1 the wait would be over before anything has arrived",
        ),
        WrongTry(
            "def parity(kb, stages): return kb % 2",
            "kb 1, stages 2: it returned 1. Block 1 is in slot 1 and completes phase 0 of full[1]",
        ),
        WrongTry(
            "def parity(kb, stages): return 0",
            "kb 1, stages 1: it returned 0. Block 1 is in slot 0 and completes phase 1 of full[0], so wait "
            "for parity 1. With 0 the wait would be over as soon as phase 0 is",
        ),
        WrongTry(
            "def parity(kb, stages): return kb // stages",
            "kb 2, stages 1: it returned 2. Block 2 is in slot 0 and completes phase 2 of full[0], so wait "
            "for parity 0; a parity is 0 or 1",
        ),
        WrongTry("def parity(kb, stages): return kb % stages % 2", "kb 1, stages 1: it returned 0"),
        WrongTry("def parity(kb, stages): return kb / 0", "kb 0, stages 1: it raised ZeroDivisionError"),
    ),
)
