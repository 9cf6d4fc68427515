"""Exercise of notebook 09: the thread that holds an element of D."""

from __future__ import annotations

from oproj_lib.layouts import wgmma
from oproj_lib.lessons.exercise import Answer, Exercise, WrongAnswer, WrongTry, call, place, whole
from oproj_lib.problem import ROWS_PER_CTA

COLUMNS = 24
"""Three 8-column fragments: enough to see that the pattern repeats."""


def holders() -> dict[tuple[int, int], int]:
    """(row, column) -> thread, from the layout functions, for D [64, 24]."""
    found = {}
    for thread in range(wgmma.THREADS):
        for register in range(wgmma.register_count(COLUMNS)):
            row = wgmma.thread_row(thread) + wgmma.register_row(register)
            found[row, wgmma.thread_column(thread) + wgmma.register_column(register)] = thread
    return found


def check(answer: Answer) -> None:
    """Every element."""
    expected = holders()
    names = ("row", "column")
    for row in range(ROWS_PER_CTA):
        for column in range(COLUMNS):
            where = place(names, (row, column))
            thread = whole(call(answer, row, column, names=names), where)
            right = expected[row, column]
            if thread != right:
                warps = f": warp {right // 32} holds row {row}" if thread // 32 != right // 32 else ""
                raise WrongAnswer(f"{where}: thread {thread}, expected {right}{warps}")


D_THREAD = Exercise(
    name="d_thread",
    title="the thread of an element",
    problem="""\
Complete `d_thread(row, column)`: the thread of the warpgroup (0 to 127) that holds D[row, column] of a
`wgmma` m64nNk16, row 0 to 63. An epilogue needs the inverse; a reader of a wrong result needs this.""",
    skeleton='''def d_thread(row: int, column: int) -> int:
    """Thread of the warpgroup that holds D[row, column]."""
    raise NotImplementedError''',
    hints=(
        "Warp w of the four holds rows 16 w to 16 w + 15. Within a warp it is a fragment you know from notebook 02.",
        "Rows r and r + 8 of a warp's sixteen are in the same lane, in other registers.",
        "lane // 4 is the row modulo 8, lane % 4 the pair of columns within eight.",
    ),
    solution='''def d_thread(row: int, column: int) -> int:
    """Thread of the warpgroup that holds D[row, column]."""
    return 32 * (row // 16) + 4 * (row % 8) + column % 8 // 2''',
    check=check,
    wrong_tries=(
        WrongTry("def d_thread(row, column): return row", "row 0, column 2: thread 0, expected 1"),
        WrongTry(
            "def d_thread(row, column): return 2 * row + column % 2",
            "row 0, column 1: thread 1, expected 0",
        ),
        WrongTry(
            "def d_thread(row, column): return 32 * (row // 16) + 4 * (row % 16) + column % 8 // 2",
            "row 8, column 0: thread 32, expected 0: warp 0 holds row 8",
        ),
        WrongTry(
            "def d_thread(row, column): return 32 * (row // 16) + 4 * (row % 8) + column // 2",
            "row 0, column 8: thread 4, expected 0",
        ),
        WrongTry(
            "def d_thread(row, column): return 4 * (row % 8) + column % 8 // 2",
            "row 16, column 0: thread 0, expected 32: warp 1 holds row 16",
        ),
        WrongTry("def d_thread(row, column): return None", "row 0, column 0: it returned None"),
    ),
)
