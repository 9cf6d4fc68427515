"""Exercise of notebook 03: a layout of x in shared memory that is free of bank conflicts."""

from __future__ import annotations

from oproj_lib.layouts import fragments
from oproj_lib.layouts.banks import BANK_BYTES, BANKS, bank, wavefronts
from oproj_lib.layouts.fragments import BLOCK_K, CHUNK, CHUNK_BYTES, MMA_TOKENS, WARP_LANES
from oproj_lib.lessons.exercise import Answer, Exercise, WrongAnswer, WrongTry, call, place, whole

K = 1536
CHUNKS = K // CHUNK
BUDGET = MMA_TOKENS * (CHUNKS + 8) * CHUNK_BYTES
"""Bytes that a layout may use: at most 8 chunks more than x itself per row."""


def check(answer: Answer) -> None:
    """Aligned, inside the budget, no two chunks in one place, and no conflicts in any read."""
    names = ("token", "chunk")
    taken: dict[int, str] = {}
    offsets: dict[tuple[int, int], int] = {}
    for token in range(MMA_TOKENS):
        for chunk in range(CHUNKS):
            where = place(names, (token, chunk))
            offset = whole(call(answer, token, chunk, names=names), where)
            if offset % CHUNK_BYTES:
                raise WrongAnswer(
                    f"{where}: offset {offset} is no multiple of {CHUNK_BYTES}: a 16-byte access would "
                    "be misaligned"
                )
            if not 0 <= offset <= BUDGET - CHUNK_BYTES:
                raise WrongAnswer(f"{where}: offset {offset} is outside the {BUDGET} bytes of the buffer")
            if offset in taken:
                raise WrongAnswer(f"{where}: offset {offset} already holds {taken[offset]}")
            taken[offset] = where
            offsets[token, chunk] = offset
    for block in range(K // BLOCK_K):
        _check_read(offsets, block)


def _check_read(offsets: dict[tuple[int, int], int], block: int) -> None:
    """One warp reads K block `block` of 8 tokens."""
    wanted = []
    for lane in range(WARP_LANES):
        chunk = fragments.block_column(0, 1, block, fragments.lane_part(lane)) // CHUNK
        wanted.append(offsets[fragments.lane_group(lane), chunk])
    if wavefronts(wanted, CHUNK_BYTES) == WARP_LANES * CHUNK_BYTES // (BANKS * BANK_BYTES):
        return
    lanes = BANKS * BANK_BYTES // CHUNK_BYTES
    for phase in range(0, WARP_LANES, lanes):
        first: dict[int, int] = {}
        for lane in range(phase, phase + lanes):
            other = first.setdefault(bank(wanted[lane]), lane)
            if other != lane:
                raise WrongAnswer(
                    f"K block {block}: lanes {other} and {lane} are in one phase and both want bank "
                    f"{bank(wanted[lane])}, at offsets "
                    f"{wanted[other]} and {wanted[lane]}: a bank conflict"
                )


X_OFFSET = Exercise(
    name="x_offset",
    title="your own layout",
    problem="""\
The kernel pads. There are other ways. Complete `x_offset(token, chunk)`: where the 16-byte chunk `chunk`
(0 to 191) of row `token` (0 to 7) of an x tile with K = 1536 goes, as a byte offset. No two chunks may
share a place, all must fit in 8 rows of 200 chunks, and the kernel's reads (lane reads chunk `4 * block
+ lane % 4` of row `lane // 4`) must be free of conflicts. Padding is allowed; can you do it without any?""",
    skeleton='''def x_offset(token: int, chunk: int) -> int:
    """Byte offset of a 16-byte chunk: token 0..7, chunk 0..191."""
    raise NotImplementedError''',
    hints=(
        "A 16-byte read runs in four phases of 8 lanes: two tokens, four chunks each. What matters is "
        "the offset's place modulo 128 bytes, "
        "that is the chunk place modulo 8.",
        "A row of 192 chunks is a multiple of 8 chunks, so without a change all rows start at bank 0. "
        "Move every second row by 4 chunks.",
        "With padding: a stride of 192 + 4 chunks. Without: keep the stride of 192 and swap halves, "
        "`chunk ^ (4 * (token % 2))`.",
    ),
    solution='''def x_offset(token: int, chunk: int) -> int:
    """Byte offset of a 16-byte chunk: token 0..7, chunk 0..191."""
    swizzled = chunk ^ (4 * (token % 2))  # odd rows: swap the two halves of every 8 chunks; no padding
    return 16 * (192 * token + swizzled)''',
    check=check,
    wrong_tries=(
        WrongTry(
            "def x_offset(t, c): return 16 * (192 * t + c)",
            "K block 0: lanes 0 and 4 are in one phase and both want bank 0, at offsets 0 and 3072",
        ),
        WrongTry(
            "def x_offset(t, c): return 16 * (193 * t + c)",
            "K block 0: lanes 1 and 4 are in one phase and both want bank 4",
        ),
        WrongTry(
            "def x_offset(t, c): return 196 * t + 16 * c", "token 1, chunk 0: offset 196 is no multiple of 16"
        ),
        WrongTry("def x_offset(t, c): return 16 * (t + 8 * c)", "a bank conflict"),
        WrongTry("def x_offset(t, c): return 16 * (204 * t + c)", "is outside the 25600 bytes"),
        WrongTry(
            "def x_offset(t, c): return 16 * (4 * t + c)",
            "token 1, chunk 0: offset 64 already holds token 0, chunk 4",
        ),
        WrongTry("def x_offset(t, c): return 16 * (192 * t + (c ^ (2 * (t % 2))))", "a bank conflict"),
        WrongTry("def x_offset(t, c): return None", "token 0, chunk 0: it returned None"),
    ),
)
