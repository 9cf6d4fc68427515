"""Exercise of notebook 07: the TMEM lane that holds a row of D."""

from __future__ import annotations

from oproj_lib.layouts.tmem import ROW_COUNTS, lane_of_row
from oproj_lib.lessons.exercise import Answer, Exercise, WrongAnswer, WrongTry, call, place, whole


def check(answer: Answer) -> None:
    """Every row, for both sizes."""
    names = ("row", "m")
    for m in ROW_COUNTS:
        for row in range(m):
            where = place(names, (row, m))
            lane = whole(call(answer, row, m, names=names), where)
            expected = lane_of_row(row, m)
            if lane != expected:
                warps = (
                    f": warp {lane // 32 % 4} would read it, not warp {expected // 32}"
                    if lane // 32 != expected // 32
                    else ""
                )
                raise WrongAnswer(f"{where}: lane {lane}, expected {expected}{warps}")


TMEM_LANE = Exercise(
    name="tmem_lane",
    title="the lane of a row",
    problem="""\
Complete `tmem_lane(row, m)`: the TMEM lane (0 to 127) that holds row `row` of D, for an MMA of one CTA with
`m` = 64 or 128 rows. This is the map that an epilogue needs: warp w reads lanes 32 w to 32 w + 31.""",
    skeleton='''def tmem_lane(row: int, m: int) -> int:
    """TMEM lane of a row of D: row 0..m - 1, m = 64 or 128."""
    raise NotImplementedError''',
    hints=(
        "For m = 128 there is nothing to compute: as many rows as lanes.",
        "For m = 64 each of the four quarters gets the same number of rows. How many, and where does quarter q begin?",
        "16 rows per quarter: row 16 q + i is in lane 32 q + i.",
    ),
    solution='''def tmem_lane(row: int, m: int) -> int:
    """TMEM lane of a row of D: row 0..m - 1, m = 64 or 128."""
    if m == 128:
        return row
    return 32 * (row // 16) + row % 16''',
    check=check,
    wrong_tries=(
        WrongTry(
            "def tmem_lane(row, m): return row",
            "row 16, m 64: lane 16, expected 32: warp 0 would read it, not warp 1",
        ),
        WrongTry("def tmem_lane(row, m): return row * (128 // m)", "row 1, m 64: lane 2, expected 1"),
        WrongTry(
            "def tmem_lane(row, m): return 32 * (row // 16) + row % 16", "row 16, m 128: lane 32, expected 16"
        ),
        WrongTry(
            "def tmem_lane(row, m): return row if m == 128 else 32 * (row // 32) + row % 32",
            "row 16, m 64: lane 16",
        ),
        WrongTry(
            "def tmem_lane(row, m): return row if m == 128 else 32 * (row % 4) + row // 4",
            "row 1, m 64: lane 32, expected 1",
        ),
        WrongTry("def tmem_lane(row, m): return None", "row 0, m 64: it returned None"),
    ),
)
