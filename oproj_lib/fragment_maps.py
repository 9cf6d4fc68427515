"""Which matrix element each lane holds for ``mma.sync.m16n8k16`` with BF16 operands, as the PTX manual
states it.

Source: PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type". D = A B + C, A is [16, 16] (M,
K), B is
[16, 8] (K, N), C and D are [16, 8] (M, N). A register of A or B packs two BF16; `element` 0 is its lower
half.
These are the maps of the instruction. What the kernel loads into them is in layouts.fragments.
"""

from __future__ import annotations

from oproj_lib.layouts.fragments import WARP_LANES

REGISTERS = {"A": 4, "B": 2, "C": 4}
ELEMENTS = {"A": 2, "B": 2, "C": 1}
SHAPES = {"A": (16, 16), "B": (16, 8), "C": (16, 8)}


def a_element(lane: int, register: int, element: int) -> tuple[int, int]:
    """(m, k) of one BF16 of A: registers 0..3, elements 0 and 1."""
    _check("A", lane, register, element)
    return lane // 4 + 8 * (register % 2), lane % 4 * 2 + element + 8 * (register // 2)


def b_element(lane: int, register: int, element: int) -> tuple[int, int]:
    """(k, n) of one BF16 of B: registers 0 and 1, elements 0 and 1."""
    _check("B", lane, register, element)
    return lane % 4 * 2 + element + 8 * register, lane // 4


def c_element(lane: int, register: int, element: int = 0) -> tuple[int, int]:
    """(m, n) of one FP32 of C or D: registers 0..3."""
    _check("C", lane, register, element)
    return lane // 4 + 8 * (register // 2), lane % 4 * 2 + register % 2


MAPS = {"A": a_element, "B": b_element, "C": c_element}


def _check(operand: str, lane: int, register: int, element: int) -> None:
    limits = (("lane", lane, WARP_LANES), ("register", register, REGISTERS[operand]))
    for name, value, limit in (*limits, ("element", element, ELEMENTS[operand])):
        if not 0 <= value < limit:
            raise ValueError(f"{name} = {value} of operand {operand}: choose 0 to {limit - 1}")


def holders(operand: str) -> dict[tuple[int, int], tuple[int, int, int]]:
    """(row, column) -> (lane, register, element) of an operand, "A", "B" or "C".

    Raises:
        ValueError: for another operand.
    """
    if operand not in MAPS:
        raise ValueError(f"operand = {operand!r}: choose from {', '.join(MAPS)}")
    return {
        MAPS[operand](lane, register, element): (lane, register, element)
        for lane in range(WARP_LANES)
        for register in range(REGISTERS[operand])
        for element in range(ELEMENTS[operand])
    }


def literal_load_sectors(k: int) -> tuple[int, int]:
    """(bytes, 32-byte sectors) of one warp-wide 4-byte load of an A register straight from row-major W [n,
    k].

    That is what a kernel does that takes the instruction's K order literally: 8 rows of 16 bytes.
    """
    sectors = set()
    for lane in range(WARP_LANES):
        row, column = a_element(lane, 0, 0)
        sectors.add((row * k + column) * 2 // 32)
    return 4 * WARP_LANES, len(sectors)
