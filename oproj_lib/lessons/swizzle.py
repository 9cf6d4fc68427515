"""Exercise of notebook 05: where a 16-byte chunk of a swizzled tile lies."""

from __future__ import annotations

from oproj_lib.layouts.ring import CHUNKS_PER_ROW
from oproj_lib.layouts.swizzle import tile_offset
from oproj_lib.lessons.exercise import Answer, Exercise, WrongAnswer, WrongTry, call, place, whole

ROWS = 64


def check(answer: Answer) -> None:
    """Every chunk of a tile of 64 rows, against the kernel's own function."""
    names = ("row", "chunk")
    taken: dict[int, str] = {}
    for row in range(ROWS):
        for chunk in range(CHUNKS_PER_ROW):
            where = place(names, (row, chunk))
            offset = whole(call(answer, row, chunk, names=names), where)
            if offset in taken:
                raise WrongAnswer(f"{where}: byte {offset} already holds {taken[offset]}")
            taken[offset] = where
            expected = tile_offset(row, chunk)
            if offset != expected:
                near = (
                    " (row and atom are right, the chunk's position is not)"
                    if offset // 128 == expected // 128
                    else ""
                )
                raise WrongAnswer(f"{where}: byte {offset}, expected {expected}{near}")


CHUNK_OFFSET = Exercise(
    name="chunk_offset",
    title="the swizzled address",
    problem="""\
Complete `chunk_offset(row, chunk)`: the byte offset, from the start of a K-major tile, of 16-byte chunk
`chunk` (0 to 7) of row `row` (0 to 63), with the 128-byte swizzle. A row is 128 bytes, eight rows are an
atom of 1024 bytes, and inside an atom the chunk's position is changed by the row's number.""",
    skeleton='''def chunk_offset(row: int, chunk: int) -> int:
    """Byte offset of a 16-byte chunk in a tile with the 128-byte swizzle."""
    raise NotImplementedError''',
    hints=(
        "First without the swizzle: `row * 128 + chunk * 16`. Which factor does the swizzle change?",
        "In the picture, row 3 begins with chunk 3 and row 5 with chunk 5; the pattern starts again at row 8.",
        "The position in the row is `chunk ^ (row % 8)`.",
    ),
    solution='''def chunk_offset(row: int, chunk: int) -> int:
    """Byte offset of a 16-byte chunk in a tile with the 128-byte swizzle."""
    return row * 128 + (chunk ^ (row % 8)) * 16''',
    check=check,
    wrong_tries=(
        WrongTry(
            "def chunk_offset(r, c): return r * 128 + c * 16",
            "row 1, chunk 0: byte 128, expected 144 (row and",
        ),
        WrongTry(
            "def chunk_offset(r, c): return r * 128 + (c + r) % 8 * 16",
            "row 1, chunk 1: byte 160, expected 128",
        ),
        WrongTry(
            "def chunk_offset(r, c): return r * 128 + (c ^ r) * 16",
            "row 8, chunk 0: byte 1152, expected 1024",
        ),
        WrongTry(
            "def chunk_offset(r, c): return r * 128 + (c ^ r // 8) * 16",
            "row 1, chunk 0: byte 128, expected 144",
        ),
        WrongTry(
            "def chunk_offset(r, c): return r % 8 * 128 + (c ^ r % 8) * 16",
            "row 8, chunk 0: byte 0 already holds",
        ),
        WrongTry(
            "def chunk_offset(r, c): return r * 128 + (c ^ r % 8)", "row 0, chunk 1: byte 1, expected 16"
        ),
        WrongTry("def chunk_offset(r, c): return (r, c)", "row 0, chunk 0: it returned (0, 0)"),
    ),
)
