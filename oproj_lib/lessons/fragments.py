"""Exercises of notebook 02: the A fragment, and the K permutation."""

from __future__ import annotations

from oproj_lib.fragment_maps import ELEMENTS, REGISTERS, a_element
from oproj_lib.layouts.fragments import BLOCK_K, CHUNK, HALVES, MMA_K, WARP_LANES
from oproj_lib.lessons.exercise import Answer, Exercise, WrongAnswer, WrongTry, call, pair, place, whole


def check_a(answer: Answer) -> None:
    """Every lane, register and element against the PTX manual's map."""
    names = ("lane", "register", "element")
    for lane in range(WARP_LANES):
        for register in range(REGISTERS["A"]):
            for element in range(ELEMENTS["A"]):
                where = place(names, (lane, register, element))
                got = pair(call(answer, lane, register, element, names=names), where)
                expected = a_element(lane, register, element)
                if got != expected:
                    swapped = " (row and column are swapped)" if got == expected[::-1] else ""
                    raise WrongAnswer(f"{where}: {got}, expected {expected}{swapped}")


FRAGMENT_A = Exercise(
    name="fragment_a",
    title="the A fragment",
    problem="""\
Complete `fragment_a(lane, register, element)`: the (row, column) of A [16, 16] that a lane holds in one
half of one of its four 32-bit A registers. Element 0 is the lower half. Read it off the picture above,
or off the PTX manual's section on m16n8k16.""",
    skeleton='''def fragment_a(lane: int, register: int, element: int) -> tuple[int, int]:
    """(row, column) of A: lane 0..31, register 0..3, element 0..1."""
    raise NotImplementedError''',
    hints=(
        "Four neighbouring lanes share a row. So one of row and column needs `lane // 4`, the other "
        "`lane % 4`.",
        "Follow lane 0 through its registers in the picture: r0 at row 0, r1 at row 8, r2 and r3 8 "
        "columns further right.",
        "Odd registers are 8 rows down, registers 2 and 3 are 8 columns right, and each of the four "
        "lanes holds two neighbours.",
    ),
    solution='''def fragment_a(lane: int, register: int, element: int) -> tuple[int, int]:
    """(row, column) of A: lane 0..31, register 0..3, element 0..1."""
    row = lane // 4 + 8 * (register % 2)
    column = 2 * (lane % 4) + element + 8 * (register // 2)
    return row, column''',
    check=check_a,
    wrong_tries=(
        WrongTry(
            "def fragment_a(l, r, e): return l // 4 + 8 * (r // 2), 2 * (l % 4) + e + 8 * (r % 2)",
            "lane 0, register 1, element 0: (0, 8), expected (8, 0) (row and column are swapped)",
        ),
        WrongTry(
            "def fragment_a(l, r, e): return 2 * (l % 4) + e + 8 * (r // 2), l // 4 + 8 * (r % 2)",
            "lane 0, register 0, element 1: (1, 0), expected (0, 1) (row and column are swapped)",
        ),
        WrongTry(
            "def fragment_a(l, r, e): return l // 4 + 8 * (r % 2), l % 4 + 4 * e + 8 * (r // 2)",
            "lane 0, register 0, element 1: (0, 4), expected (0, 1)",
        ),
        WrongTry(
            "def fragment_a(l, r, e): return l % 8 + 8 * (r % 2), 2 * (l // 8) + e + 8 * (r // 2)",
            "lane 1, register 0, element 0: (1, 0), expected (0, 2)",
        ),
        WrongTry("def fragment_a(l, r, e): return l // 4", "it returned 0; a pair (row, column) is needed"),
        WrongTry("def fragment_a(l, r, e): return l / 4, 0", "it returned 0.0; a whole number is needed"),
        WrongTry(
            "def fragment_a(l, r, e): return [(0, 0)][r], 0",
            "lane 0, register 0, element 0: it returned (0, 0); a whole number",
        ),
    ),
)


def check_k(answer: Answer) -> None:
    """Every position: a bijection, of the right parts, in the kernel's order."""
    names = ("half", "k")
    seen: dict[int, str] = {}
    columns = {}
    for half in range(HALVES):
        for k in range(MMA_K):
            where = place(names, (half, k))
            column = whole(call(answer, half, k, names=names), where)
            if not 0 <= column < BLOCK_K:
                raise WrongAnswer(f"{where}: column {column} is outside the block's 0 to {BLOCK_K - 1}")
            if column in seen:
                raise WrongAnswer(
                    f"{where}: column {column} already stands at {seen[column]}: a product would count twice"
                )
            seen[column], columns[half, k] = where, column
    for (half, k), column in columns.items():
        part = k % 8 // 2  # lane % 4 of the lanes that hold K position k
        where = place(names, (half, k))
        if column // CHUNK != part:
            raise WrongAnswer(
                f"{where}: column {column} is read by lanes with lane % 4 = {column // CHUNK}, but the "
                "instruction takes K "
                f"position {k} from those with lane % 4 = {part}"
            )
        register = 2 * half + k // 8
        if column % CHUNK // 2 != register or column % 2 != k % 2:
            raise WrongAnswer(
                f"{where}: column {column}, expected {part * CHUNK + 2 * register + k % 2}: the kernel "
                f"gives 32-bit word {register} "
                f"of the lane's 16 bytes to this MMA, element {k % 2}"
            )


K_ORDER = Exercise(
    name="k_order",
    title="the K permutation",
    problem="""\
A lane reads columns `8 * (lane % 4)` to `8 * (lane % 4) + 7` of a K block of 32, four 32-bit words.
Words 0 and 1 go to MMA 0 as its registers for K positions 0..7 and 8..15, words 2 and 3 to MMA 1.
Complete `k_order(half, k)`: the column, 0 to 31, that stands at K position `k` of MMA `half`.""",
    skeleton='''def k_order(half: int, k: int) -> int:
    """Column within the K block at K position k (0..15) of MMA half (0..1)."""
    raise NotImplementedError''',
    hints=(
        "First ask who holds position k: in the B fragment it is the lanes with `lane % 4 == k % 8 // 2`.",
        "That lane's columns begin at `8 * (k % 8 // 2)`. Which of its four words is it? MMA 0 takes "
        "words 0 and 1.",
        "The word is `2 * half + k // 8`, and the element within the word is `k % 2`.",
    ),
    solution='''def k_order(half: int, k: int) -> int:
    """Column within the K block at K position k (0..15) of MMA half (0..1)."""
    part = k % 8 // 2
    word = 2 * half + k // 8
    return 8 * part + 2 * word + k % 2''',
    check=check_k,
    wrong_tries=(
        WrongTry(
            "def k_order(half, k): return 16 * half + k",
            "half 0, k 2: column 2 is read by lanes with lane % 4 = 0",
        ),
        WrongTry(
            "def k_order(half, k): return 8 * (k % 8 // 2) + 2 * half + k % 2",
            "half 0, k 8: column 0 already stands at half 0, k 0",
        ),
        WrongTry(
            "def k_order(half, k): return 8 * (k % 8 // 2) + 2 * (half + 2 * (k // 8)) + k % 2",
            "half 0, k 8: column 4, expected 2",
        ),
        WrongTry(
            "def k_order(half, k): return 8 * (k % 8 // 2) + 2 * (2 * half + k // 8) + 1 - k % 2",
            "half 0, k 0: column 1, expected 0",
        ),
        WrongTry("def k_order(half, k): return 32 * half + k", "half 1, k 0: column 32 is outside"),
        WrongTry("def k_order(half, k): return 'a'", "it returned 'a'; a whole number is needed"),
    ),
)
