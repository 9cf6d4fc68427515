"""Arithmetic, logic, comparison, selection and moves, against literals worked out from the PTX ISA manual.

Integers of float types are bit patterns: 0x7FFFFFFF is the canonical NaN of FP32 (PTX ISA, "Floating-Point
Instructions"), 0x7FFF that of F16 and BF16.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from vgpu_kernels import bits_of, check, evaluate, refused, run

from oproj_lib import vgpu
from oproj_lib.vgpu.alu import MATH

INT_MIN, INT_MAX, UINT_MAX = -(2**31), 2**31 - 1, 2**32 - 1
LONG_MIN, LONG_MAX, ULONG_MAX = -(2**63), 2**63 - 1, 2**64 - 1
INF = math.inf
NAN, NAN16 = 0x7FFFFFFF, 0x7FFF
QNAN = 0x7FC00000
TINY = 0x00000001  # smallest FP32 subnormal
ULP = 2.0**-23


# -- integers ---------------------------------------------------------------------------------------


def test_integer_sums_wrap() -> None:
    check("add.s32 %d, %a, %b;", "s32 s32 -> s32", [(INT_MAX, 1, INT_MIN), (INT_MIN, -1, INT_MAX), (-5, 3, -2)])
    check("sub.s32 %d, %a, %b;", "s32 s32 -> s32", [(INT_MIN, 1, INT_MAX), (0, INT_MIN, INT_MIN)])
    check("add.u32 %d, %a, %b;", "u32 u32 -> u32", [(UINT_MAX, 1, 0), (UINT_MAX, UINT_MAX, UINT_MAX - 1)])
    check("add.u16 %d, %a, %b;", "u16 u16 -> u16", [(0xFFFF, 2, 1)])
    check("sub.u64 %d, %a, %b;", "u64 u64 -> u64", [(0, 1, ULONG_MAX)])
    check("add.s64 %d, %a, %b;", "s64 s64 -> s64", [(LONG_MAX, 1, LONG_MIN)])
    check("add.s16 %d, %a, -1;", "s16 -> s16", [(-(2**15), 2**15 - 1)])


def test_saturating_sums() -> None:
    rows = [(INT_MAX, 1, INT_MAX), (INT_MIN, -1, INT_MIN), (INT_MAX, INT_MIN, -1), (5, 6, 11)]
    check("add.sat.s32 %d, %a, %b;", "s32 s32 -> s32", rows)
    check("sub.sat.s32 %d, %a, %b;", "s32 s32 -> s32", [(INT_MIN, 1, INT_MIN), (0, INT_MIN, INT_MAX), (3, 5, -2)])


def test_low_and_high_products() -> None:
    check("mul.lo.s32 %d, %a, %b;", "s32 s32 -> s32", [(INT_MIN, -1, INT_MIN), (65536, 65536, 0), (-3, 7, -21)])
    check("mul.hi.s32 %d, %a, %b;", "s32 s32 -> s32", [(INT_MIN, INT_MIN, 2**30), (-1, 1, -1), (-1, -1, 0)])
    check("mul.hi.u32 %d, %a, %b;", "u32 u32 -> u32", [(UINT_MAX, UINT_MAX, UINT_MAX - 1), (65536, 65536, 1)])
    check("mul.hi.s16 %d, %a, %b;", "s16 s16 -> s16", [(-(2**15), -(2**15), 2**14), (-1, 1, -1)])
    check("mul.hi.u16 %d, %a, %b;", "u16 u16 -> u16", [(0xFFFF, 0xFFFF, 0xFFFE)])
    check("mul.lo.u64 %d, %a, %b;", "u64 u64 -> u64", [(ULONG_MAX, ULONG_MAX, 1), (2**32, 2**32, 0)])
    rows = [(ULONG_MAX, ULONG_MAX, ULONG_MAX - 1), (2**32, 2**32, 1), (2**63, 2, 1), (0x1234567890ABCDEF, 16, 1)]
    check("mul.hi.u64 %d, %a, %b;", "u64 u64 -> u64", rows)
    rows = [(LONG_MIN, LONG_MIN, 2**62), (-1, 1, -1), (-1, -1, 0), (LONG_MIN, 1, -1), (LONG_MAX, LONG_MIN, -(2**62))]
    check("mul.hi.s64 %d, %a, %b;", "s64 s64 -> s64", rows)


def test_wide_products() -> None:
    check("mul.wide.s32 %d, %a, %b;", "s32 s32 -> s64", [(INT_MIN, INT_MIN, 2**62), (-1, UINT_MAX >> 1, -INT_MAX)])
    check("mul.wide.u32 %d, %a, %b;", "u32 u32 -> u64", [(UINT_MAX, UINT_MAX, 0xFFFFFFFE00000001)])
    check("mul.wide.s16 %d, %a, %b;", "s16 s16 -> s32", [(-(2**15), -(2**15), 2**30), (-1, 2, -2)])
    check("mul.wide.u16 %d, %a, %b;", "u16 u16 -> u32", [(0xFFFF, 0xFFFF, 0xFFFE0001)])


def test_multiply_add() -> None:
    check("mad.lo.s32 %d, %a, %b, %c;", "s32 s32 s32 -> s32", [(INT_MIN, -1, -1, INT_MAX), (3, -4, 5, -7)])
    check("mad.hi.u32 %d, %a, %b, %c;", "u32 u32 u32 -> u32", [(UINT_MAX, UINT_MAX, 3, 1)])
    check("mad.hi.s32 %d, %a, %b, %c;", "s32 s32 s32 -> s32", [(INT_MIN, INT_MIN, -1, 2**30 - 1)])
    check("mad.wide.u32 %d, %a, %b, %c;", "u32 u32 u64 -> u64", [(UINT_MAX, UINT_MAX, 2**33 - 1, 0)])
    check("mad.wide.s32 %d, %a, %b, %c;", "s32 s32 s64 -> s64", [(-2, 3, 10, 4), (INT_MIN, 1, -1, -(2**31) - 1)])
    check("mad.wide.u16 %d, %a, %b, %c;", "u16 u16 u32 -> u32", [(0xFFFF, 0xFFFF, 0x1FFFF, 0)])
    check("mad.lo.u64 %d, %a, %b, %c;", "u64 u64 u64 -> u64", [(2**63, 2, 7, 7)])


def test_division_rounds_toward_zero() -> None:
    rows = [(7, 2, 3), (-7, 2, -3), (7, -2, -3), (-7, -2, 3), (INT_MIN, 1, INT_MIN), (INT_MIN, 2, -(2**30)), (0, -5, 0)]
    check("div.s32 %d, %a, %b;", "s32 s32 -> s32", rows)
    rows = [(7, 2, 1), (-7, 2, -1), (7, -2, 1), (-7, -2, -1), (INT_MIN, 3, -2), (6, 3, 0)]
    check("rem.s32 %d, %a, %b;", "s32 s32 -> s32", rows)
    check("div.u32 %d, %a, %b;", "u32 u32 -> u32", [(UINT_MAX, 2, INT_MAX), (1, UINT_MAX, 0)])
    check("rem.u64 %d, %a, %b;", "u64 u64 -> u64", [(ULONG_MAX, 10, 5)])
    check("div.u64 %d, %a, %b;", "u64 u64 -> u64", [(ULONG_MAX, 10, 1844674407370955161)])
    check("div.s64 %d, %a, %b;", "s64 s64 -> s64", [(LONG_MIN, 3, -3074457345618258602), (-1, LONG_MAX, 0)])
    check("rem.s16 %d, %a, %b;", "s16 s16 -> s16", [(-(2**15), 7, -1)])
    check("div.u16 %d, %a, %b;", "u16 u16 -> u16", [(0xFFFF, 256, 255)])


def test_division_of_the_smallest_integer_by_minus_one_wraps() -> None:
    check("div.s32 %d, %a, %b;", "s32 s32 -> s32", [(INT_MIN, -1, INT_MIN)])
    check("rem.s32 %d, %a, %b;", "s32 s32 -> s32", [(INT_MIN, -1, 0)])
    check("div.s64 %d, %a, %b;", "s64 s64 -> s64", [(LONG_MIN, -1, LONG_MIN)])


def test_division_by_zero() -> None:
    """The manual leaves it open; these are an H200's answers."""
    check("div.u32 %d, %a, %b;", "u32 u32 -> u32", [(5, 0, UINT_MAX), (0, 0, UINT_MAX)])
    check("rem.u32 %d, %a, %b;", "u32 u32 -> u32", [(5, 0, UINT_MAX), (0, 0, UINT_MAX)])
    check("div.s32 %d, %a, %b;", "s32 s32 -> s32", [(5, 0, -1), (-5, 0, -1), (0, 0, -1)])
    check("rem.s32 %d, %a, %b;", "s32 s32 -> s32", [(5, 0, -1), (-5, 0, -1)])
    check("div.u64 %d, %a, %b;", "u64 u64 -> u64", [(5, 0, ULONG_MAX)])
    check("rem.u64 %d, %a, %b;", "u64 u64 -> u64", [(5, 0, ULONG_MAX)])
    check("div.s64 %d, %a, %b;", "s64 s64 -> s64", [(5, 0, -1), (-5, 0, -1)])
    check("div.u16 %d, %a, %b;", "u16 u16 -> u16", [(5, 0, 0xFFFF)])
    check("rem.s16 %d, %a, %b;", "s16 s16 -> s16", [(5, 0, -1)])


def test_integer_sign_and_extremes() -> None:
    check("neg.s32 %d, %a;", "s32 -> s32", [(5, -5), (INT_MIN, INT_MIN), (0, 0)])
    check("abs.s32 %d, %a;", "s32 -> s32", [(-5, 5), (INT_MIN, INT_MIN), (INT_MAX, INT_MAX)])
    check("abs.s64 %d, %a;", "s64 -> s64", [(LONG_MIN, LONG_MIN), (-1, 1)])
    check("neg.s16 %d, %a;", "s16 -> s16", [(-(2**15), -(2**15)), (1, -1)])
    check("min.s32 %d, %a, %b;", "s32 s32 -> s32", [(-1, 1, -1), (INT_MIN, INT_MAX, INT_MIN)])
    check("min.u32 %d, %a, %b;", "u32 u32 -> u32", [(UINT_MAX, 1, 1)])
    check("max.u64 %d, %a, %b;", "u64 u64 -> u64", [(ULONG_MAX, 1, ULONG_MAX)])
    check("max.s16 %d, %a, %b;", "s16 s16 -> s16", [(-1, 1, 1)])
    check("min.relu.s32 %d, %a, %b;", "s32 s32 -> s32", [(-1, 5, 0), (3, 5, 3), (INT_MIN, INT_MIN, 0)])
    check("max.relu.s32 %d, %a, %b;", "s32 s32 -> s32", [(-1, -5, 0), (3, 5, 5)])


def test_sum_of_absolute_difference() -> None:
    check("sad.u32 %d, %a, %b, %c;", "u32 u32 u32 -> u32", [(3, 7, 10, 14), (7, 3, 10, 14), (0, UINT_MAX, 1, 0)])
    check("sad.s32 %d, %a, %b, %c;", "s32 s32 s32 -> s32", [(-3, 7, 1, 11), (INT_MAX, INT_MIN, 1, 0)])
    check("sad.u16 %d, %a, %b, %c;", "u16 u16 u16 -> u16", [(0, 0xFFFF, 2, 1)])
    check("sad.s64 %d, %a, %b, %c;", "s64 s64 s64 -> s64", [(-1, 1, 5, 7)])


def test_dot_product_of_bytes() -> None:
    a, b = 0xFF02_0304, 0x0110_FF01  # bytes from the top: -1|255, 2, 3, 4 and 1, 16, -1|255, 1
    check("dp4a.u32.u32 %d, %a, %b, %c;", "u32 u32 u32 -> u32", [(a, b, 7, 255 + 32 + 765 + 4 + 7)])
    check("dp4a.s32.s32 %d, %a, %b, %c;", "u32 u32 s32 -> s32", [(a, b, 7, -1 + 32 - 3 + 4 + 7)])
    check("dp4a.s32.u32 %d, %a, %b, %c;", "u32 u32 s32 -> s32", [(a, b, -7, -1 + 32 + 765 + 4 - 7)])
    check("dp4a.u32.s32 %d, %a, %b, %c;", "u32 u32 s32 -> s32", [(a, b, 0, 255 + 32 - 3 + 4)])
    check("dp4a.u32.u32 %d, %a, %b, %c;", "u32 u32 u32 -> u32", [(UINT_MAX, UINT_MAX, UINT_MAX, 4 * 65025 - 1)])


# -- bits -------------------------------------------------------------------------------------------


def test_bitwise_logic() -> None:
    a, b = 0b1100, 0b1010
    check("and.b32 %d, %a, %b;", "b32 b32 -> b32", [(a, b, 0b1000)])
    check("or.b32 %d, %a, %b;", "b32 b32 -> b32", [(a, b, 0b1110)])
    check("xor.b64 %d, %a, %b;", "b64 b64 -> b64", [(a, b, 0b0110), (ULONG_MAX, 1, ULONG_MAX - 1)])
    check("not.b16 %d, %a;", "b16 -> b16", [(0x00F0, 0xFF0F)])
    check("not.b64 %d, %a;", "b64 -> b64", [(0, ULONG_MAX)])
    check("cnot.b32 %d, %a;", "b32 -> b32", [(0, 1), (5, 0), (2**31, 0)])
    check("cnot.b64 %d, %a;", "b64 -> b64", [(0, 1), (2**63, 0)])


def test_predicate_logic() -> None:
    table = [(False, False), (False, True), (True, False), (True, True)]
    check("and.pred %d, %a, %b;", "pred pred -> pred", [(a, b, a and b) for a, b in table])
    check("or.pred %d, %a, %b;", "pred pred -> pred", [(a, b, a or b) for a, b in table])
    check("xor.pred %d, %a, %b;", "pred pred -> pred", [(a, b, a != b) for a, b in table])
    check("not.pred %d, %a;", "pred -> pred", [(False, True), (True, False)])
    check("mov.pred %d, %a;", "pred -> pred", [(False, False), (True, True)])
    check("and.pred %d, !%a, %b;", "pred pred -> pred", [(a, b, b and not a) for a, b in table])


def test_shifts_beyond_the_width() -> None:
    top = 2**31
    rows = [(1, 0, 1), (1, 31, top), (1, 32, 0), (1, 33, 0), (1, 255, 0), (UINT_MAX, UINT_MAX, 0), (3, 31, top)]
    check("shl.b32 %d, %a, %b;", "b32 u32 -> b32", rows)
    check("shr.u32 %d, %a, %b;", "u32 u32 -> u32", [(top, 31, 1), (top, 32, 0), (top, 33, 0), (top, 255, 0)])
    check("shr.b32 %d, %a, %b;", "b32 u32 -> b32", [(UINT_MAX, 4, 0x0FFFFFFF), (UINT_MAX, 32, 0)])
    rows = [(INT_MIN, 31, -1), (INT_MIN, 32, -1), (INT_MIN, 255, -1), (INT_MAX, 31, 0), (-8, 1, -4), (5, 32, 0)]
    check("shr.s32 %d, %a, %b;", "s32 u32 -> s32", rows)
    check("shl.b64 %d, %a, %b;", "b64 u32 -> b64", [(1, 63, 2**63), (1, 64, 0), (1, 32, 2**32)])
    check("shr.s64 %d, %a, %b;", "s64 u32 -> s64", [(LONG_MIN, 63, -1), (LONG_MIN, 64, -1), (LONG_MAX, 62, 1)])
    check("shl.b16 %d, %a, %b;", "b16 u32 -> b16", [(1, 15, 0x8000), (1, 16, 0), (0x8001, 1, 2)])
    check("shr.s16 %d, %a, %b;", "s16 u32 -> s16", [(-(2**15), 15, -1), (-(2**15), 16, -1), (-(2**15), 31, -1)])
    check("shr.u16 %d, %a, %b;", "u16 u32 -> u16", [(0x8000, 15, 1), (0x8000, 16, 0)])


def test_funnel_shift() -> None:
    low, high = 0x89ABCDEF, 0x01234567  # b:a = 0x01234567_89ABCDEF
    rows = [(low, high, n, r) for n, r in [(0, high), (4, 0x12345678), (32, low), (33, low), (255, low)]]
    check("shf.l.clamp.b32 %d, %a, %b, %c;", "b32 b32 u32 -> b32", rows)
    rows = [(low, high, n, r) for n, r in [(0, high), (4, 0x12345678), (32, high), (36, 0x12345678), (31, 0xC4D5E6F7)]]
    check("shf.l.wrap.b32 %d, %a, %b, %c;", "b32 b32 u32 -> b32", rows)
    rows = [(low, high, n, r) for n, r in [(0, low), (4, 0x789ABCDE), (32, high), (33, high), (255, high)]]
    check("shf.r.clamp.b32 %d, %a, %b, %c;", "b32 b32 u32 -> b32", rows)
    rows = [(low, high, n, r) for n, r in [(0, low), (4, 0x789ABCDE), (32, low), (36, 0x789ABCDE)]]
    check("shf.r.wrap.b32 %d, %a, %b, %c;", "b32 b32 u32 -> b32", rows)


@pytest.mark.parametrize(
    ("table", "expected"),
    [  # a = 0xF0, b = 0xCC, c = 0xAA select every combination once: the result's low byte is the table itself
        (0x80, 0x80), (0xFE, 0xFE), (0x96, 0x96), (0xE8, 0xE8), (0xCA, 0xCA), (0x00, 0x00), (0xFF, 0xFF), (0x1A, 0x1A),
    ],
)  # fmt: skip
def test_lop3(table: int, expected: int) -> None:
    (got,) = evaluate(f"lop3.b32 %d, %a, %b, %c, {table};", "b32 b32 b32 -> b32", [(0xF0, 0xCC, 0xAA)])
    assert int(got[0]) & 0xFF == expected
    x, y, z = 0x12345678, 0x0F0F0F0F, 0xFEDCBA98
    meaning = {0x80: x & y & z, 0xFE: x | y | z, 0x96: x ^ y ^ z, 0xE8: x & y | x & z | y & z, 0xCA: x & y | ~x & z}
    if table in meaning:
        check(f"lop3.b32 %d, %a, %b, %c, {table};", "b32 b32 b32 -> b32", [(x, y, z, meaning[table] & UINT_MAX)])


def test_byte_permutation() -> None:
    a, b = 0x33221100, 0x77665544
    rows = [
        (a, b, 0x3210, a), (a, b, 0x7654, b), (a, b, 0x0123, 0x00112233), (a, b, 0x7531, 0x77553311),
        (a, b, 0x0000, 0), (a, b, 0xFFFF0000 | 0x4444, 0x44444444),
    ]  # fmt: skip
    check("prmt.b32 %d, %a, %b, %c;", "b32 b32 b32 -> b32", rows)
    rows = [(0x80FF7F01, 0x000000F0, 0xBA98, 0xFFFF0000), (0x80FF7F01, 0x000000F0, 0x4C3B, 0xF0FF80FF)]
    check("prmt.b32 %d, %a, %b, %c;", "b32 b32 b32 -> b32", rows)


def test_bit_field_extract() -> None:
    x = 0x89ABCDEF
    rows = [
        (x, 4, 8, 0xDE), (x, 0, 32, x), (x, 0, 0, 0), (x, 28, 8, 0x8), (x, 31, 1, 1), (x, 32, 4, 0), (x, 255, 255, 0),
        (x, 0x100 + 4, 0x100 + 8, 0xDE),  # only the low 8 bits of position and length count
        (x, 4, 255, 0x089ABCDE),
    ]  # fmt: skip
    check("bfe.u32 %d, %a, %b, %c;", "u32 u32 u32 -> u32", rows)
    rows = [
        (0x0000_00F0, 4, 4, -1), (0x0000_0070, 4, 4, 7), (x, 28, 8, 0xFFFFFFF8), (x, 31, 1, -1), (x, 32, 4, -1),
        (x, 255, 255, -1), (x, 32, 0, 0), (0x7FFFFFFF, 40, 4, 0), (x, 0, 32, x), (x, 4, 0, 0), (x, 16, 16, 0xFFFF89AB),
    ]  # fmt: skip
    check("bfe.s32 %d, %a, %b, %c;", "s32 u32 u32 -> s32", rows)
    y = 0xFEDCBA9876543210
    rows = [(y, 32, 32, 0xFEDCBA98), (y, 0, 64, y), (y, 60, 16, 0xF), (y, 64, 8, 0), (y, 4, 255, y >> 4)]
    check("bfe.u64 %d, %a, %b, %c;", "u64 u32 u32 -> u64", rows)
    rows = [(y, 60, 16, -1), (y, 64, 8, -1), (y, 0, 64, y), (y, 0, 5, -16), (y, 63, 1, -1), (y, 8, 8, 0x32)]
    check("bfe.s64 %d, %a, %b, %c;", "s64 u32 u32 -> s64", rows)


def test_bit_field_insert() -> None:
    rows = [
        (0xFF, 0, 8, 4, 0x00000F00), (0, UINT_MAX, 8, 8, 0xFFFF00FF), (UINT_MAX, 0, 28, 8, 0xF0000000),
        (UINT_MAX, 0, 32, 8, 0), (0xAB, 0x12345678, 0, 0, 0x12345678), (0xAB, 0x12345678, 0, 32, 0xAB),
        (0xAB, 0x12345678, 0, 255, 0xAB), (UINT_MAX, 5, 255, 255, 5), (1, 0, 0x100 + 3, 0x100 + 1, 8),
    ]  # fmt: skip
    check("bfi.b32 %d, %a, %b, %c, %e;", "b32 b32 u32 u32 -> b32", rows)
    rows = [
        (ULONG_MAX, 0, 60, 16, 0xF << 60), (0xAB, ULONG_MAX, 0, 64, 0xAB), (1, 0, 63, 1, 2**63),
        (ULONG_MAX, 7, 64, 1, 7), (0, ULONG_MAX, 32, 32, UINT_MAX),
    ]  # fmt: skip
    check("bfi.b64 %d, %a, %b, %c, %e;", "b64 b64 u32 u32 -> b64", rows)


def test_bit_counts() -> None:
    check("popc.b32 %d, %a;", "b32 -> u32", [(0, 0), (UINT_MAX, 32), (0x80000001, 2)])
    check("popc.b64 %d, %a;", "b64 -> u32", [(0, 0), (ULONG_MAX, 64), (2**63, 1)])
    check("clz.b32 %d, %a;", "b32 -> u32", [(0, 32), (1, 31), (2**31, 0), (0x00FF0000, 8)])
    check("clz.b64 %d, %a;", "b64 -> u32", [(0, 64), (1, 63), (2**63, 0)])
    check("brev.b32 %d, %a;", "b32 -> b32", [(1, 2**31), (0x0000000F, 0xF0000000), (0x12345678, 0x1E6A2C48)])
    check("brev.b64 %d, %a;", "b64 -> b64", [(1, 2**63), (0x3, 0xC << 60)])


def test_find_most_significant_bit() -> None:
    none = UINT_MAX
    check("bfind.u32 %d, %a;", "u32 -> u32", [(0, none), (1, 0), (UINT_MAX, 31), (0x00010000, 16)])
    check("bfind.s32 %d, %a;", "s32 -> u32", [(0, none), (-1, none), (1, 0), (INT_MAX, 30), (INT_MIN, 30), (-2, 0)])
    check("bfind.u64 %d, %a;", "u64 -> u32", [(0, none), (2**63, 63), (2**32, 32)])
    check("bfind.s64 %d, %a;", "s64 -> u32", [(-1, none), (LONG_MIN, 62), (LONG_MAX, 62)])
    check("bfind.shiftamt.u32 %d, %a;", "u32 -> u32", [(0, none), (1, 31), (UINT_MAX, 0), (0x00010000, 15)])
    check("bfind.shiftamt.s32 %d, %a;", "s32 -> u32", [(-1, none), (INT_MIN, 1), (1, 31)])
    check("bfind.shiftamt.u64 %d, %a;", "u64 -> u32", [(0, none), (1, 63), (2**63, 0)])


# -- comparison and selection -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operator", "expected"),  # for (1, 2), (2, 2), (3, 2)
    [
        ("eq", (0, 1, 0)), ("ne", (1, 0, 1)), ("lt", (1, 0, 0)), ("le", (1, 1, 0)), ("gt", (0, 0, 1)), ("ge", (0, 1, 1)),
        ("lo", (1, 0, 0)), ("ls", (1, 1, 0)), ("hi", (0, 0, 1)), ("hs", (0, 1, 1)),
    ],
)  # fmt: skip
def test_integer_comparisons(operator: str, expected: tuple[int, ...]) -> None:
    rows = [(a, 2, bool(e)) for a, e in zip((1, 2, 3), expected, strict=True)]
    check(f"setp.{operator}.u32 %d, %a, %b;", "u32 u32 -> pred", rows)
    check(f"setp.{operator}.u64 %d, %a, %b;", "u64 u64 -> pred", rows)
    if operator in ("lo", "ls", "hi", "hs"):
        refused(f"setp.{operator}.s32 %p0, %r1, %r2;", operator)
    else:
        check(f"setp.{operator}.s16 %d, %a, %b;", "s16 s16 -> pred", rows)


def test_comparisons_are_signed_or_unsigned() -> None:
    check("setp.lt.s32 %d, %a, %b;", "s32 s32 -> pred", [(-1, 1, True), (INT_MIN, INT_MAX, True)])
    check("setp.lt.u32 %d, %a, %b;", "u32 u32 -> pred", [(UINT_MAX, 1, False), (2**31, INT_MAX, False)])
    check("setp.eq.b32 %d, %a, %b;", "b32 b32 -> pred", [(2**31, 2**31, True)])
    check("setp.ne.b64 %d, %a, %b;", "b64 b64 -> pred", [(2**63, 2**63, False), (2**63, 0, True)])


FLOAT_COMPARISONS = {  # for (1, 2), (2, 2), (3, 2), (NaN, 2), (NaN, NaN), (-0, +0)
    "eq": (0, 1, 0, 0, 0, 1), "ne": (1, 0, 1, 0, 0, 0), "lt": (1, 0, 0, 0, 0, 0), "le": (1, 1, 0, 0, 0, 1),
    "gt": (0, 0, 1, 0, 0, 0), "ge": (0, 1, 1, 0, 0, 1), "equ": (0, 1, 0, 1, 1, 1), "neu": (1, 0, 1, 1, 1, 0),
    "ltu": (1, 0, 0, 1, 1, 0), "leu": (1, 1, 0, 1, 1, 1), "gtu": (0, 0, 1, 1, 1, 0), "geu": (0, 1, 1, 1, 1, 1),
    "num": (1, 1, 1, 0, 0, 1), "nan": (0, 0, 0, 1, 1, 0),
}  # fmt: skip


@pytest.mark.parametrize("operator", FLOAT_COMPARISONS)
def test_float_comparisons(operator: str) -> None:
    expected = [bool(e) for e in FLOAT_COMPARISONS[operator]]
    for type_name, nan in (("f32", QNAN), ("f64", 0x7FF8000000000000), ("f16", NAN16), ("bf16", NAN16)):
        pairs = [(1.0, 2.0), (2.0, 2.0), (3.0, 2.0), (nan, 2.0), (nan, nan), (-0.0, 0.0)]
        rows = [(*pair, e) for pair, e in zip(pairs, expected, strict=True)]
        check(f"setp.{operator}.{type_name} %d, %a, %b;", f"{type_name} {type_name} -> pred", rows)


def test_comparison_flushes_subnormals_only_with_ftz() -> None:
    rows = [(TINY, 0.0), (0x80000001, TINY)]
    check("setp.eq.f32 %d, %a, %b;", "f32 f32 -> pred", [(*row, False) for row in rows])
    check("setp.eq.ftz.f32 %d, %a, %b;", "f32 f32 -> pred", [(*row, True) for row in rows])
    check("setp.gt.ftz.f16 %d, %a, %b;", "f16 f16 -> pred", [(0x0001, 0.0, False), (0x0400, 0.0, True)])


def test_comparison_with_two_results_and_a_combining_predicate() -> None:
    # p = (a < b) BoolOp c, q = !(a < b) BoolOp c
    table = [(a, 2, c) for a in (1, 3) for c in (False, True)]
    for name, function in (("and", lambda x, y: x and y), ("or", lambda x, y: x or y), ("xor", lambda x, y: x != y)):
        rows = [(a, b, c, function(a < b, c), function(not a < b, c)) for a, b, c in table]
        check(f"setp.lt.{name}.s32 %d|%q, %a, %b, %c;", "s32 s32 pred -> pred pred", rows)
        rows = [(a, b, c, function(a < b, not c)) for a, b, c in table]
        check(f"setp.lt.{name}.s32 %d, %a, %b, !%c;", "s32 s32 pred -> pred", rows)
    check("setp.lt.f32 %d|%q, %a, %b;", "f32 f32 -> pred pred", [(1.0, 2.0, True, False), (QNAN, 2.0, False, True)])
    check("setp.eq.u32 %d|_, %a, %b;", "u32 u32 -> pred", [(4, 4, True)])
    check("setp.eq.u32 _|%d, %a, %b;", "u32 u32 -> pred", [(4, 4, False)])


def test_set_writes_all_ones_or_one() -> None:
    check("set.lt.u32.s32 %d, %a, %b;", "s32 s32 -> u32", [(-1, 1, UINT_MAX), (1, -1, 0)])
    check("set.lt.s32.f32 %d, %a, %b;", "f32 f32 -> s32", [(1.0, 2.0, -1), (QNAN, 2.0, 0)])
    check("set.lt.f32.u32 %d, %a, %b;", "u32 u32 -> f32", [(1, 2, 1.0), (2, 1, 0.0)])
    check("set.geu.f16.f16 %d, %a, %b;", "f16 f16 -> f16", [(1.0, 2.0, 0.0), (NAN16, 2.0, 1.0)])
    check("set.ge.bf16.bf16 %d, %a, %b;", "bf16 bf16 -> bf16", [(2.0, 2.0, 1.0)])
    check("set.eq.u16.f16 %d, %a, %b;", "f16 f16 -> u16", [(2.0, 2.0, 0xFFFF)])
    check("set.eq.and.u32.s32 %d, %a, %b, %c;", "s32 s32 pred -> u32", [(2, 2, True, UINT_MAX), (2, 2, False, 0)])


def test_select() -> None:
    check("selp.b32 %d, %a, %b, %c;", "b32 b32 pred -> b32", [(1, 2, True, 1), (1, 2, False, 2)])
    check("selp.f64 %d, %a, %b, %c;", "f64 f64 pred -> f64", [(1.5, -0.0, False, -0.0)])
    check("selp.b16 %d, %a, %b, !%c;", "b16 b16 pred -> b16", [(1, 2, True, 2)])
    check("selp.s64 %d, -1, 7, %a;", "pred -> s64", [(True, -1), (False, 7)])
    check("selp.f32 %d, %a, %b, %c;", "f32 f32 pred -> f32", [(0xFFC12345, 1.0, True, 0xFFC12345)])  # NaNs pass unchanged


def test_select_by_sign() -> None:
    check("slct.u32.s32 %d, %a, %b, %c;", "u32 u32 s32 -> u32", [(1, 2, 0, 1), (1, 2, -1, 2), (1, 2, INT_MIN, 2)])
    rows = [(1, 2, 0.0, 1), (1, 2, -0.0, 1), (1, 2, -1.0, 2), (1, 2, QNAN, 2), (1, 2, 0x80000001, 2)]
    check("slct.b64.f32 %d, %a, %b, %c;", "b64 b64 f32 -> b64", rows)
    check("slct.ftz.f32.f32 %d, %a, %b, %c;", "f32 f32 f32 -> f32", [(1.0, 2.0, 0x80000001, 1.0), (1.0, 2.0, -1.0, 2.0)])


# -- FP32 and FP64 ----------------------------------------------------------------------------------


def test_float_sums_and_products() -> None:
    rows = [(1.5, 2.25, 3.75), (INF, -INF, NAN), (QNAN, 1.0, NAN), (0xFFC12345, 1.0, NAN), (-0.0, -0.0, -0.0), (1.0, -1.0, 0.0),
            (0x7F7FFFFF, 0x7F7FFFFF, INF), (1.0, 2.0**-24, 1.0), (1.0 + ULP, 2.0**-24, 1.0 + 2 * ULP), (TINY, TINY, 2 * 2.0**-149)]  # fmt: skip
    check("add.f32 %d, %a, %b;", "f32 f32 -> f32", rows)
    check("add.rn.f32 %d, %a, %b;", "f32 f32 -> f32", rows)
    check("sub.f32 %d, %a, %b;", "f32 f32 -> f32", [(1.0, 1.0, 0.0), (-0.0, 0.0, -0.0), (INF, INF, NAN)])
    rows = [(INF, 0.0, NAN), (-0.0, 5.0, -0.0), (2.0**-100, 2.0**-49, TINY), (2.0**-100, 2.0**-50, 0.0), (-2.0, 3.0, -6.0)]
    check("mul.f32 %d, %a, %b;", "f32 f32 -> f32", rows)
    check("add.f64 %d, %a, %b;", "f64 f64 -> f64", [(1.0, 2.0**-53, 1.0), (0.5, 0.25, 0.75)])
    check("sub.rn.f64 %d, %a, %b;", "f64 f64 -> f64", [(1.0, 2.0**-54, 1.0), (0.5, 0.25, 0.25)])
    check("mul.f64 %d, %a, %b;", "f64 f64 -> f64", [(1.0 + 2.0**-52, 1.0 + 2.0**-52, 1.0 + 2.0**-51), (-0.0, 1.0, -0.0)])


def test_flush_to_zero() -> None:
    negative = 0x80000001
    check("add.ftz.f32 %d, %a, %b;", "f32 f32 -> f32", [(TINY, 1.0, 1.0), (TINY, 0.0, 0.0), (negative, negative, -0.0)])
    check("mul.ftz.f32 %d, %a, %b;", "f32 f32 -> f32", [(2.0**-100, 2.0**-40, 0.0), (-(2.0**-100), 2.0**-40, -0.0),
                                                         (TINY, 2.0**100, 0.0), (2.0**-126, 1.0, 2.0**-126)])  # fmt: skip
    check("fma.rn.ftz.f32 %d, %a, %b, %c;", "f32 f32 f32 -> f32", [(TINY, 2.0**120, 1.0, 1.0), (1.0, 1.0, TINY, 1.0)])
    check("max.ftz.f32 %d, %a, %b;", "f32 f32 -> f32", [(TINY, negative, 0.0)])
    check("add.ftz.f16 %d, %a, %b;", "f16 f16 -> f16", [(0x0001, 0.0, 0.0), (0x0400, 0x0400, 0x0800)])


def test_saturation_to_one() -> None:
    rows = [(1.5, 2.0, 1.0), (-3.0, 1.0, 0.0), (0.25, 0.5, 0.75), (QNAN, 1.0, 0.0), (-0.0, -0.0, 0.0), (INF, 1.0, 1.0)]
    check("add.sat.f32 %d, %a, %b;", "f32 f32 -> f32", rows)
    check("mul.sat.f32 %d, %a, %b;", "f32 f32 -> f32", [(0.5, 0.5, 0.25), (-2.0, 2.0, 0.0), (2.0, 2.0, 1.0)])
    check("fma.rn.sat.f32 %d, %a, %b, %c;", "f32 f32 f32 -> f32", [(0.5, 0.5, 0.25, 0.5), (2.0, 2.0, 2.0, 1.0)])
    check("add.sat.f16 %d, %a, %b;", "f16 f16 -> f16", [(1.0, 1.0, 1.0), (-1.0, 0.5, 0.0), (NAN16, 1.0, 0.0)])


def test_directed_rounding_of_sums() -> None:
    tiny, above_one, below_one = 2.0**-30, 1.0 + ULP, 1.0 - ULP / 2
    check("add.rp.f32 %d, %a, %b;", "f32 f32 -> f32", [(1.0, tiny, above_one), (1.0, -tiny, 1.0), (0x7F7FFFFF, 1.0, INF), (-0x800001 + 0x100000000, -1.0, 0xFF7FFFFF)])
    check("add.rm.f32 %d, %a, %b;", "f32 f32 -> f32", [(1.0, tiny, 1.0), (1.0, -tiny, below_one), (0x7F7FFFFF, 1.0, 0x7F7FFFFF)])
    check("add.rz.f32 %d, %a, %b;", "f32 f32 -> f32", [(1.0, tiny, 1.0), (1.0, -tiny, below_one), (-1.0, tiny, -below_one), (-1.0, -tiny, -1.0),
                                                       (0x7F7FFFFF, 0x7F7FFFFF, 0x7F7FFFFF)])  # fmt: skip
    # FP64 cannot hold 1 + 2^-100; the rounding must still know on which side of 1 it lies.
    check("add.rp.f32 %d, %a, %b;", "f32 f32 -> f32", [(1.0, 2.0**-100, above_one), (1.0, -(2.0**-100), 1.0)])
    check("add.rm.f32 %d, %a, %b;", "f32 f32 -> f32", [(1.0, -(2.0**-100), below_one)])
    check("sub.rz.f32 %d, %a, %b;", "f32 f32 -> f32", [(1.0, 2.0**-100, below_one), (1.0, -(2.0**-100), 1.0)])
    # x - x is +0, except when rounding down (IEEE 754, section 6.3).
    check("sub.rm.f32 %d, %a, %b;", "f32 f32 -> f32", [(1.0, 1.0, -0.0), (0.0, 0.0, -0.0), (0.0, -0.0, 0.0)])
    check("sub.rp.f32 %d, %a, %b;", "f32 f32 -> f32", [(1.0, 1.0, 0.0)])


def test_directed_rounding_of_products() -> None:
    x = 1.0 + ULP  # x * x = 1 + 2 ULP + ULP**2
    check("mul.rz.f32 %d, %a, %b;", "f32 f32 -> f32", [(x, x, 1.0 + 2 * ULP), (-x, x, -1.0 - 2 * ULP), (-0.0, 1.0, -0.0), (0.0, 1.0, 0.0)])
    check("mul.rp.f32 %d, %a, %b;", "f32 f32 -> f32", [(x, x, 1.0 + 3 * ULP), (-x, x, -1.0 - 2 * ULP), (2.0**-100, 2.0**-100, TINY), (-0.0, 1.0, -0.0)])
    check("mul.rm.f32 %d, %a, %b;", "f32 f32 -> f32", [(x, x, 1.0 + 2 * ULP), (-x, x, -1.0 - 3 * ULP), (2.0**-100, 2.0**-100, 0.0), (0.0, 1.0, 0.0)])
    check("fma.rz.f32 %d, %a, %b, %c;", "f32 f32 f32 -> f32", [(x, x, -1.0, 2 * ULP), (x, x, 0.0, 1.0 + 2 * ULP)])
    check("fma.rp.f32 %d, %a, %b, %c;", "f32 f32 f32 -> f32", [(x, x, 0.0, 1.0 + 3 * ULP), (2.0**-100, 2.0**-100, 1.0, x)])
    check("fma.rm.f32 %d, %a, %b, %c;", "f32 f32 f32 -> f32", [(-(2.0**-100), 2.0**-100, 1.0, 1.0 - ULP / 2)])
    check("mad.rp.f32 %d, %a, %b, %c;", "f32 f32 f32 -> f32", [(2.0**-100, 2.0**-100, 1.0, x)])


def test_fma_rounds_once() -> None:
    x = 1.0 + 2.0**-12  # x * x = 1 + 2^-11 + 2^-24: an FP32 product loses the last term
    rows = [(x, x, -1.0 - 2.0**-11, 2.0**-24), (2.0, 3.0, 4.0, 10.0), (INF, 0.0, 1.0, NAN), (-0.0, 1.0, -0.0, -0.0), (-0.0, 1.0, 0.0, 0.0),
            (1.0 + ULP, 1.0 - ULP / 2, -1.0, ULP / 2 - ULP**2 / 2)]  # fmt: skip
    check("fma.rn.f32 %d, %a, %b, %c;", "f32 f32 f32 -> f32", rows)
    check("mad.rn.f32 %d, %a, %b, %c;", "f32 f32 f32 -> f32", rows)
    y = 1.0 + 2.0**-27
    check("fma.rn.f64 %d, %a, %b, %c;", "f64 f64 f64 -> f64", [(y, y, -1.0 - 2.0**-26, 2.0**-54)])
    check("mad.rn.f64 %d, %a, %b, %c;", "f64 f64 f64 -> f64", [(y, y, -1.0 - 2.0**-26, 2.0**-54)])


def test_division() -> None:
    third = 0x3EAAAAAB
    rows = [(1.0, 3.0, third), (1.0, 0.0, INF), (-1.0, 0.0, -INF), (0.0, 0.0, NAN), (INF, INF, NAN), (6.0, -2.0, -3.0), (1.0, INF, 0.0)]
    check("div.rn.f32 %d, %a, %b;", "f32 f32 -> f32", rows)
    check("div.full.f32 %d, %a, %b;", "f32 f32 -> f32", [(6.0, -2.0, -3.0), (1.0, 0.0, INF), (0.0, 0.0, NAN)])
    check("div.approx.f32 %d, %a, %b;", "f32 f32 -> f32", [(6.0, -2.0, -3.0), (1.0, 0.0, INF), (0.0, 0.0, NAN)])
    check("div.rz.f32 %d, %a, %b;", "f32 f32 -> f32", [(1.0, 3.0, third - 1), (-1.0, 3.0, third - 1 + 2**31), (6.0, 2.0, 3.0)])
    check("div.rm.f32 %d, %a, %b;", "f32 f32 -> f32", [(1.0, 3.0, third - 1), (-1.0, 3.0, third + 2**31), (1.0, -3.0, third + 2**31)])
    check("div.rp.f32 %d, %a, %b;", "f32 f32 -> f32", [(1.0, 3.0, third), (-1.0, 3.0, third - 1 + 2**31), (2.0, 3.0, 0x3F2AAAAB)])
    check("div.rn.f64 %d, %a, %b;", "f64 f64 -> f64", [(1.0, 3.0, 1.0 / 3.0), (-1.0, 0.0, -INF)])


def test_division_overflow_and_underflow() -> None:
    large, small = 2.0**127, 2.0**-126
    check("div.rn.f32 %d, %a, %b;", "f32 f32 -> f32", [(large, small, INF), (small, large, 0.0), (small, 2.0**23, TINY)])
    check("div.rz.f32 %d, %a, %b;", "f32 f32 -> f32", [(large, small, 0x7F7FFFFF), (1.0, 0.0, INF)])
    check("div.rp.f32 %d, %a, %b;", "f32 f32 -> f32", [(small, large, TINY), (-small, large, -0.0)])
    check("div.rn.ftz.f32 %d, %a, %b;", "f32 f32 -> f32", [(small, 2.0, 0.0), (TINY, 1.0, 0.0), (1.0, TINY, INF)])


def test_reciprocal_and_roots() -> None:
    rows = [(4.0, 0.25), (-0.0, -INF), (INF, 0.0), (-INF, -0.0), (QNAN, NAN), (TINY, INF)]
    check("rcp.rn.f32 %d, %a;", "f32 -> f32", [*rows, (3.0, 0x3EAAAAAB), (2.0**127, 2.0**-127)])
    check("rcp.approx.ftz.f32 %d, %a;", "f32 -> f32", [(4.0, 0.25), (TINY, INF), (0x80000001, -INF), (2.0**127, 0.0)])
    check("rcp.rz.f32 %d, %a;", "f32 -> f32", [(3.0, 0x3EAAAAAA), (2.0, 0.5), (0.0, INF)])
    check("rcp.rp.f32 %d, %a;", "f32 -> f32", [(3.0, 0x3EAAAAAB), (-3.0, 0xBEAAAAAA)])
    check("rcp.rm.f32 %d, %a;", "f32 -> f32", [(3.0, 0x3EAAAAAA), (-3.0, 0xBEAAAAAB)])
    check("rcp.rn.f64 %d, %a;", "f64 -> f64", [(4.0, 0.25), (3.0, 1.0 / 3.0), (0.0, INF)])
    rows = [(4.0, 2.0), (-0.0, -0.0), (INF, INF), (-1.0, NAN), (2.0, 0x3FB504F3), (TINY, 0x1A3504F3)]
    check("sqrt.rn.f32 %d, %a;", "f32 -> f32", rows)
    check("sqrt.rz.f32 %d, %a;", "f32 -> f32", [(2.0, 0x3FB504F3), (3.0, 0x3FDDB3D7), (4.0, 2.0)])  # sqrt(3) = 1.73205080756.., 0x3FDDB3D7 = 1.732050776..
    check("sqrt.rp.f32 %d, %a;", "f32 -> f32", [(2.0, 0x3FB504F4), (3.0, 0x3FDDB3D8), (4.0, 2.0), (INF, INF)])
    check("sqrt.rm.f32 %d, %a;", "f32 -> f32", [(2.0, 0x3FB504F3), (-0.0, -0.0)])
    check("sqrt.approx.f32 %d, %a;", "f32 -> f32", [(4.0, 2.0), (-0.0, -0.0), (INF, INF), (-1.0, NAN)])
    check("sqrt.rn.f64 %d, %a;", "f64 -> f64", [(2.0, math.sqrt(2.0)), (-0.0, -0.0)])
    check("rsqrt.approx.f32 %d, %a;", "f32 -> f32", [(4.0, 0.5), (0.0, INF), (-0.0, -INF), (INF, 0.0), (-1.0, NAN)])
    check("rsqrt.approx.f64 %d, %a;", "f64 -> f64", [(4.0, 0.5), (0.0, INF), (INF, 0.0)])


def test_exponential_and_logarithm() -> None:
    rows = [(0.0, 1.0), (-0.0, 1.0), (10.0, 1024.0), (-1.0, 0.5), (128.0, INF), (-INF, 0.0), (INF, INF), (QNAN, NAN), (-149.0, TINY), (-151.0, 0.0), (TINY, 1.0)]
    check("ex2.approx.f32 %d, %a;", "f32 -> f32", rows)
    check("ex2.approx.ftz.f32 %d, %a;", "f32 -> f32", [(-126.0, 2.0**-126), (-127.0, 0.0), (TINY, 1.0), (3.0, 8.0)])
    rows = [(1.0, 0.0), (8.0, 3.0), (0.5, -1.0), (0.0, -INF), (-0.0, -INF), (INF, INF), (-1.0, NAN), (QNAN, NAN), (TINY, -149.0)]
    check("lg2.approx.f32 %d, %a;", "f32 -> f32", rows)
    check("lg2.approx.ftz.f32 %d, %a;", "f32 -> f32", [(TINY, -INF), (0x80000001, -INF), (2.0, 1.0)])
    check("ex2.approx.f16 %d, %a;", "f16 -> f16", [(3.0, 8.0), (-INF, 0.0), (NAN16, NAN16), (16.0, INF)])
    check("ex2.approx.f16x2 %d, %a;", "f16x2 -> f16x2", [(0x3C00_4000, 0x4000_4400)])  # (2, 1) -> (4, 2)
    check("ex2.approx.ftz.bf16 %d, %a;", "bf16 -> bf16", [(3.0, 8.0), (-INF, 0.0)])


def test_trigonometry_and_tanh() -> None:
    check("sin.approx.f32 %d, %a;", "f32 -> f32", [(0.0, 0.0), (-0.0, -0.0), (INF, NAN), (QNAN, NAN)])
    check("cos.approx.f32 %d, %a;", "f32 -> f32", [(0.0, 1.0), (-INF, NAN)])
    check("sin.approx.ftz.f32 %d, %a;", "f32 -> f32", [(0x80000001, -0.0)])
    check("tanh.approx.f32 %d, %a;", "f32 -> f32", [(0.0, 0.0), (-0.0, -0.0), (INF, 1.0), (-INF, -1.0), (QNAN, NAN)])
    check("tanh.approx.bf16x2 %d, %a;", "bf16x2 -> bf16x2", [(0x7F80_FF80, 0x3F80_BF80)])
    angles = np.linspace(-3.0, 3.0, 64, dtype=np.float32)
    for op, function in (("sin", np.sin), ("cos", np.cos), ("tanh", np.tanh)):
        (got,) = evaluate(f"{op}.approx.f32 %d, %a;", "f32 -> f32", [(float(x),) for x in angles])
        np.testing.assert_allclose(got.view(np.float32), function(angles.astype(np.float64)), atol=2.0**-20)


def test_minimum_and_maximum_of_floats() -> None:
    rows = [(1.0, 2.0, 1.0), (QNAN, 2.0, 2.0), (2.0, QNAN, 2.0), (QNAN, QNAN, NAN), (0.0, -0.0, -0.0), (-0.0, 0.0, -0.0), (-INF, 1.0, -INF)]
    check("min.f32 %d, %a, %b;", "f32 f32 -> f32", rows)
    rows = [(1.0, 2.0, 2.0), (QNAN, 2.0, 2.0), (2.0, QNAN, 2.0), (QNAN, QNAN, NAN), (0.0, -0.0, 0.0), (-0.0, 0.0, 0.0)]
    check("max.f32 %d, %a, %b;", "f32 f32 -> f32", rows)
    rows = [(1.0, 2.0, 1.0), (QNAN, 2.0, NAN), (2.0, 0xFFC12345, NAN), (-0.0, 0.0, -0.0)]
    check("min.NaN.f32 %d, %a, %b;", "f32 f32 -> f32", rows)
    check("max.NaN.f32 %d, %a, %b;", "f32 f32 -> f32", [(1.0, 2.0, 2.0), (QNAN, 2.0, NAN), (-0.0, 0.0, 0.0)])
    rows = [(-1.0, 2.0, -1.0), (-1.0, -2.0, 1.0), (3.0, -2.0, -2.0)]
    check("min.xorsign.abs.f32 %d, %a, %b;", "f32 f32 -> f32", rows)
    check("max.xorsign.abs.f32 %d, %a, %b;", "f32 f32 -> f32", [(-1.0, 2.0, -2.0), (-1.0, -2.0, 2.0)])
    check("min.f64 %d, %a, %b;", "f64 f64 -> f64", [(1.0, 2.0, 1.0), (0x7FF8000000000000, 2.0, 2.0), (0.0, -0.0, -0.0)])
    check("max.bf16 %d, %a, %b;", "bf16 bf16 -> bf16", [(1.0, 2.0, 2.0), (NAN16, -1.0, -1.0), (-0.0, 0.0, 0.0)])
    check("min.NaN.f16 %d, %a, %b;", "f16 f16 -> f16", [(NAN16, 1.0, NAN16), (3.0, 1.0, 1.0)])
    check("max.f16x2 %d, %a, %b;", "f16x2 f16x2 -> f16x2", [(0x3C00_C000, 0x4000_BC00, 0x4000_BC00)])
    check("min.NaN.bf16x2 %d, %a, %b;", "bf16x2 bf16x2 -> bf16x2", [(0x7FC0_3F80, 0x4000_4000, 0x7FFF_3F80)])


def test_sign_of_floats() -> None:
    check("neg.f32 %d, %a;", "f32 -> f32", [(1.0, -1.0), (0.0, -0.0), (-INF, INF), (0x80000001, TINY)])
    check("abs.f32 %d, %a;", "f32 -> f32", [(-1.0, 1.0), (-0.0, 0.0), (-INF, INF)])
    check("abs.ftz.f32 %d, %a;", "f32 -> f32", [(0x80000001, 0.0), (-2.0, 2.0)])
    check("neg.ftz.f32 %d, %a;", "f32 -> f32", [(TINY, -0.0)])
    check("neg.f64 %d, %a;", "f64 -> f64", [(0.0, -0.0)])
    check("neg.f16x2 %d, %a;", "f16x2 -> f16x2", [(0x3C00_8000, 0xBC00_0000)])
    check("abs.bf16x2 %d, %a;", "bf16x2 -> bf16x2", [(0xBF80_8000, 0x3F80_0000)])
    check("neg.bf16 %d, %a;", "bf16 -> bf16", [(1.0, -1.0)])


def test_copysign_and_testp() -> None:
    check("copysign.f32 %d, %a, %b;", "f32 f32 -> f32", [(-1.0, 5.0, -5.0), (0.0, -5.0, 5.0), (-0.0, 0x7FC12345, 0xFFC12345)])
    check("copysign.f64 %d, %a, %b;", "f64 f64 -> f64", [(-0.0, 2.5, -2.5)])
    values = [1.0, -0.0, INF, QNAN, TINY, 2.0**-126]
    truth = {
        "finite": (1, 1, 0, 0, 1, 1), "infinite": (0, 0, 1, 0, 0, 0), "number": (1, 1, 1, 0, 1, 1),
        "notanumber": (0, 0, 0, 1, 0, 0), "normal": (1, 1, 0, 0, 0, 1), "subnormal": (0, 0, 0, 0, 1, 0),
    }  # fmt: skip
    for name, expected in truth.items():
        rows = [(value, bool(e)) for value, e in zip(values, expected, strict=True)]
        check(f"testp.{name}.f32 %d, %a;", "f32 -> pred", rows)
    check("testp.subnormal.f64 %d, %a;", "f64 -> pred", [(2.0**-1074, True), (2.0**-1022, False), (0.0, False)])


def test_nans_where_the_manual_leaves_them_open() -> None:
    """An H200's answers."""
    quiet, signalling = 0x7FC12345, 0xFF812345
    check("neg.f32 %d, %a;", "f32 -> f32", [(quiet, 0xFFC12345), (signalling, 0x7F812345)])
    check("abs.f32 %d, %a;", "f32 -> f32", [(signalling, 0x7F812345)])
    check("abs.ftz.f32 %d, %a;", "f32 -> f32", [(signalling, 0x7F812345)])
    check("neg.f16 %d, %a;", "f16 -> f16", [(0x7E01, 0xFE01)])
    check("abs.bf16 %d, %a;", "bf16 -> bf16", [(0xFFC1, 0x7FC1)])
    check("add.f64 %d, %a, %b;", "f64 f64 -> f64", [(INF, -INF, 0xFFF8000000000000)])
    check("min.f64 %d, %a, %b;", "f64 f64 -> f64", [(0x7FF8000000000001, 0x7FF8000000000001, 0x7FF8000000000001)])


def test_results_that_round_up_to_the_smallest_normal_number() -> None:
    """2^-126 (1 - 2^-24) rounds to 2^-126. An H200 flushes by the result after rounding."""
    check("mul.f32 %d, %a, %b;", "f32 f32 -> f32", [(1.0 - 2.0**-24, 2.0**-126, 2.0**-126)])
    check("mul.ftz.f32 %d, %a, %b;", "f32 f32 -> f32", [(1.0 - 2.0**-24, 2.0**-126, 2.0**-126)])
    check("fma.rn.ftz.f32 %d, %a, %b, %c;", "f32 f32 f32 -> f32", [(1.0 - 2.0**-24, 2.0**-126, 0.0, 2.0**-126)])
    check("div.rn.ftz.f32 %d, %a, %b;", "f32 f32 -> f32", [(2.0**-126, 1.0 + ULP, 0.0)])


def test_approximate_division_by_large_numbers() -> None:
    """For 2^126 < |b| < 2^128 the manual gives 0, or NaN if a is infinite."""
    large = 1.5 * 2.0**126
    check("div.approx.f32 %d, %a, %b;", "f32 f32 -> f32", [(2.0**100, large, 0.0), (INF, large, NAN), (2.0**100, 2.0**126, 2.0**-26)])
    check("div.approx.ftz.f32 %d, %a, %b;", "f32 f32 -> f32", [(2.0**100, large, 0.0), (INF, large, NAN)])
    check("div.full.f32 %d, %a, %b;", "f32 f32 -> f32", [(1.5 * 2.0**100, large, 2.0**-26), (INF, large, INF)])


# -- F16 and BF16 -----------------------------------------------------------------------------------


def test_half_precision_arithmetic() -> None:
    check("add.f16 %d, %a, %b;", "f16 f16 -> f16", [(1.0, 2.0**-11, 1.0), (1.0 + 2.0**-10, 2.0**-11, 1.0 + 2.0**-9), (65504.0, 16.0, INF), (65504.0, 15.0, 65504.0), (INF, -INF, NAN16)])
    check("sub.f16 %d, %a, %b;", "f16 f16 -> f16", [(1.0, 1.0, 0.0), (2.0**-24, 2.0**-23, -(2.0**-24))])
    check("mul.f16 %d, %a, %b;", "f16 f16 -> f16", [(2.0**-12, 2.0**-12, 2.0**-24), (2.0**-12, 2.0**-13, 0.0), (256.0, 256.0, INF)])
    check("add.bf16 %d, %a, %b;", "bf16 bf16 -> bf16", [(1.0, 2.0**-8, 1.0), (1.0 + 2.0**-7, 2.0**-8, 1.0 + 2.0**-6), (INF, -INF, NAN16)])
    check("sub.rn.bf16 %d, %a, %b;", "bf16 bf16 -> bf16", [(3.0, 5.0, -2.0)])
    check("mul.bf16 %d, %a, %b;", "bf16 bf16 -> bf16", [(1.5, -3.0, -4.5), (2.0**-100, 2.0**-33, 2.0**-133), (-0.0, 1.0, -0.0)])
    check("add.rn.f16x2 %d, %a, %b;", "f16x2 f16x2 -> f16x2", [(0x3C00_4000, 0x4000_C000, 0x4200_0000)])
    check("mul.bf16x2 %d, %a, %b;", "bf16x2 bf16x2 -> bf16x2", [(0x4000_3F80, 0x4040_BF80, 0x40C0_BF80)])


def test_half_precision_fma_rounds_once() -> None:
    check("fma.rn.f16 %d, %a, %b, %c;", "f16 f16 f16 -> f16", [(2.0, 3.0, 4.0, 10.0), (65504.0, 2.0, -65504.0, 65504.0)])
    # 9 * 29 = 261 = 256 + 5 lies midway between BF16 numbers 260 (even) and 262; an addend far below decides.
    rows = [(9.0, 29.0, 0.0, 260.0), (9.0, 29.0, 2.0**-20, 262.0), (9.0, 29.0, 2.0**-60, 262.0), (9.0, 29.0, 2.0**-133, 262.0), (9.0, 29.0, -(2.0**-133), 260.0), (-9.0, 29.0, -(2.0**-60), -262.0)]
    check("fma.rn.bf16 %d, %a, %b, %c;", "bf16 bf16 bf16 -> bf16", rows)
    # 33 * 65 = 2145: between F16 numbers 2144 (even) and 2146.
    rows = [(33.0, 65.0, 0.0, 2144.0), (33.0, 65.0, 2.0**-24, 2146.0), (33.0, 65.0, -(2.0**-24), 2144.0)]
    check("fma.rn.f16 %d, %a, %b, %c;", "f16 f16 f16 -> f16", rows)
    rows = [(-1.0, 1.0, 0.5, 0.0), (1.0, 1.0, 0.5, 1.5), (NAN16, 1.0, 1.0, NAN16)]
    check("fma.rn.relu.bf16 %d, %a, %b, %c;", "bf16 bf16 bf16 -> bf16", rows)
    check("fma.rn.relu.f16 %d, %a, %b, %c;", "f16 f16 f16 -> f16", rows)
    negative_zero = [(-1.0, 0.0, -0.0, 0.0), (2.0**-24, -(2.0**-24), 0.0, 0.0)]
    check("fma.rn.relu.f16 %d, %a, %b, %c;", "f16 f16 f16 -> f16", negative_zero)
    check("fma.rn.relu.bf16 %d, %a, %b, %c;", "bf16 bf16 bf16 -> bf16", [(-1.0, 0.0, -0.0, 0.0)])
    check("fma.rn.relu.f16x2 %d, %a, %b, %c;", "f16x2 f16x2 f16x2 -> f16x2", [(0x3C00_BC00, 0x4000_4000, 0x3C00_3C00, 0x4200_0000)])
    check("fma.rn.bf16x2 %d, %a, %b, %c;", "bf16x2 bf16x2 bf16x2 -> bf16x2", [(0x4000_4040, 0x4000_4000, 0x3F80_BF80, 0x40A0_40A0)])


def test_pairs_of_fp32() -> None:
    one, two, three = (bits_of(x, "f32") for x in (1.0, 2.0, 3.0))
    pair = lambda high, low: high << 32 | low  # noqa: E731
    options = {"target": "sm_100a"}
    check("add.rn.f32x2 %d, %a, %b;", "b64 b64 -> b64", [(pair(one, two), pair(two, one), pair(three, three))], **options)
    row = (pair(two, one), pair(one, one), pair(one, two), pair(three, three))
    check("fma.rn.f32x2 %d, %a, %b, %c;", "b64 b64 b64 -> b64", [row], **options)
    tiny = bits_of(2.0**-30, "f32")
    row = (pair(one, one), pair(tiny, one), pair(one, two))
    check("add.rz.f32x2 %d, %a, %b;", "b64 b64 -> b64", [row], **options)


# -- moves and addresses ----------------------------------------------------------------------------


def test_moves_of_literals() -> None:
    check("mov.u32 %d, 0xFFFFFFFF;", "u32 -> u32", [(0, UINT_MAX)])
    check("mov.s32 %d, -1;", "u32 -> s32", [(0, -1)])
    check("mov.b32 %d, 0b101;", "u32 -> b32", [(0, 5)])
    check("mov.b32 %d, 0777;", "u32 -> b32", [(0, 511)])
    check("mov.u64 %d, 0x8000000000000000U;", "u32 -> u64", [(0, 2**63)])
    check("mov.f32 %d, 0fBF800000;", "u32 -> f32", [(0, -1.0)])
    check("mov.f32 %d, 0f7FC12345;", "u32 -> f32", [(0, 0x7FC12345)])
    check("mov.f32 %d, 2.5;", "u32 -> f32", [(0, 2.5)])
    check("mov.f32 %d, -1.5e1;", "u32 -> f32", [(0, -15.0)])
    check("mov.f64 %d, 0d3FF8000000000000;", "u32 -> f64", [(0, 1.5)])
    check("mov.f64 %d, -0d3FF8000000000000;", "u32 -> f64", [(0, -1.5)])
    check("mov.b32 %d, 0f3F800000;", "u32 -> b32", [(0, 0x3F800000)])
    check("mov.u32 %d, WARP_SZ;", "u32 -> u32", [(0, 32)])


def test_packing_moves() -> None:
    check("mov.b32 %d, {%a, %b};", "b16 b16 -> b32", [(0x1234, 0xABCD, 0xABCD1234)])
    check("mov.b64 %d, {%a, %b};", "b32 b32 -> b64", [(1, 2, 0x0000000200000001)])
    check("mov.b64 %d, {%a, %b, %c, %e};", "b16 b16 b16 b16 -> b64", [(1, 2, 3, 4, 0x0004000300020001)])
    check("mov.b32 {%d, %q}, %a;", "b32 -> b16 b16", [(0xABCD1234, 0x1234, 0xABCD)])
    check("mov.b64 {%d, %q}, %a;", "b64 -> b32 b32", [(0x0000000200000001, 1, 2)])
    check("mov.b64 {_, %d}, %a;", "b64 -> b32", [(0x0000000200000001, 2)])
    check("mov.b64 %d, {%a, 7};", "b32 -> b64", [(1, 0x0000000700000001)])


def test_special_registers_of_a_grid() -> None:
    names = ["tid.x", "tid.y", "tid.z", "ntid.x", "ntid.y", "ntid.z", "ctaid.x", "ctaid.y", "ctaid.z", "nctaid.x", "nctaid.y",
             "nctaid.z", "laneid", "warpid", "lanemask_eq", "lanemask_lt", "lanemask_le", "lanemask_gt", "lanemask_ge"]  # fmt: skip
    grid, block = (3, 2, 2), (5, 4, 3)
    threads = 60
    body = ["mov.u32 %r1, %tid.z;", "mad.lo.u32 %r1, %r1, 4, %tid.y;", "mad.lo.u32 %r1, %r1, 5, %tid.x;", "mov.u32 %r2, %ctaid.z;",
            "mad.lo.u32 %r2, %r2, 2, %ctaid.y;", "mad.lo.u32 %r2, %r2, 3, %ctaid.x;", f"mad.lo.u32 %r3, %r2, {threads}, %r1;",
            f"mad.wide.u32 %rd1, %r3, {4 * len(names)}, %out;"]  # fmt: skip
    for i, name in enumerate(names):
        body += [f"mov.u32 %r4, %{name};", f"st.global.u32 [%rd1+{4 * i}], %r4;"]
    words, report = run("\n".join([*body, "ret;"]), out=12 * threads * len(names), grid=grid, block=block)
    report.raise_for_findings()
    got = words.reshape(12, threads, len(names))
    for cta in range(12):
        for thread in range(threads):
            lane = thread % 32
            expected = [
                thread % 5, thread // 5 % 4, thread // 20, 5, 4, 3, cta % 3, cta // 3 % 2, cta // 6, 3, 2, 2, lane, thread // 32,
                1 << lane, (1 << lane) - 1, (2 << lane) - 1, UINT_MAX - ((2 << lane) - 1), UINT_MAX - ((1 << lane) - 1),
            ]  # fmt: skip
            assert got[cta, thread].tolist() == expected


def test_address_spaces() -> None:
    body = """
        mov.u64 %rd1, buffer;
        cvta.shared.u64 %rd2, %rd1;
        cvta.to.shared.u64 %rd3, %rd2;
        isspacep.shared %p1, %rd2;
        isspacep.global %p2, %rd2;
        isspacep.global %p3, %out;
        isspacep.local %p4, %rd2;
        setp.eq.u64 %p5, %rd1, %rd3;
        selp.u32 %r1, 1, 0, %p1;
        selp.u32 %r2, 1, 0, %p2;
        selp.u32 %r3, 1, 0, %p3;
        selp.u32 %r4, 1, 0, %p4;
        selp.u32 %r5, 1, 0, %p5;
        cvta.global.u64 %rd4, %out;
        cvta.to.global.u64 %rd5, %rd4;
        st.global.v4.u32 [%rd5], {%r1, %r2, %r3, %r4};
        st.u32 [%rd4+16], %r5;
        st.u32 [%rd2+4], 77;
        ld.shared.u32 %r6, [buffer+4];
        st.global.u32 [%out+20], %r6;
        ret;
    """
    words, report = run(body, out=8, block=1, declarations=[".shared .align 16 .b8 buffer[64];"])
    report.raise_for_findings()
    assert words[:6].tolist() == [1, 0, 1, 0, 1, 77]


# -- random bits against the manual's pseudo-code ---------------------------------------------------

RANDOM = np.random.default_rng(1)


def words(count: int = 200) -> list[int]:
    return [int(x) for x in RANDOM.integers(0, 2**32, count, dtype=np.uint64)]


def test_random_bit_fields() -> None:
    rows, expected = [], []
    for x, p, n in zip(words(), words(), words(), strict=True):
        position, length = p % 40, n % 40
        sign = 0 if length == 0 else x >> min(position + length - 1, 31) & 1
        value = sum((x >> position + i & 1 if i < length and position + i <= 31 else sign) << i for i in range(32))
        rows.append((x, position, length))
        expected.append(value)
    (got,) = evaluate("bfe.s32 %d, %a, %b, %c;", "b32 u32 u32 -> b32", rows)
    assert got.tolist() == expected


def test_random_permutations() -> None:
    rows = list(zip(words(), words(), words(), strict=True))
    expected = []
    for a, b, c in rows:
        bytes_ = [(b << 32 | a) >> 8 * i & 0xFF for i in range(8)]
        value = 0
        for i in range(4):
            selector = c >> 4 * i & 15
            picked = bytes_[selector & 7]
            value |= (picked if selector < 8 else 0xFF * (picked >> 7)) << 8 * i
        expected.append(value)
    (got,) = evaluate("prmt.b32 %d, %a, %b, %c;", "b32 b32 b32 -> b32", rows)
    assert got.tolist() == expected


def fp32(pattern: int) -> Fraction | None:
    """The value of a finite FP32 pattern."""
    exponent, fraction = pattern >> 23 & 0xFF, pattern & 0x7FFFFF
    if exponent == 0xFF:
        return None
    size = Fraction(fraction, 2**149) if exponent == 0 else Fraction(fraction + 2**23, 2**23) * Fraction(2) ** (exponent - 127)
    return -size if pattern >> 31 else size


def test_random_fma_in_every_rounding_mode() -> None:
    """fma of random patterns: the result is a neighbour of the exact value, on the side that the mode names."""
    rows = [(a, b, c) for a, b, c in zip(words(400), words(400), words(400), strict=True)]
    results = {mode: evaluate(f"fma.{mode}.f32 %d, %a, %b, %c;", "f32 f32 f32 -> f32", rows)[0].tolist() for mode in ("rn", "rz", "rm", "rp")}
    checked = 0
    for i, row in enumerate(rows):
        a, b, c = (fp32(x) for x in row)
        down, up, near, zero = (fp32(results[mode][i]) for mode in ("rm", "rp", "rn", "rz"))
        if None in (a, b, c, down, up):
            continue
        assert a is not None and b is not None and c is not None and down is not None and up is not None
        exact = a * b + c
        assert down <= exact <= up
        assert near in (down, up) and zero == (down if exact > 0 else up)
        assert near is not None and abs(near - exact) == min(exact - down, up - exact)
        if down != up:
            low, high = (results[mode][i] for mode in ("rm", "rp"))
            assert abs((low & 0x7FFFFFFF) - (high & 0x7FFFFFFF)) == 1 or {low & 0x7FFFFFFF, high & 0x7FFFFFFF} <= {0, 1}
        checked += 1
    assert checked > 200


# -- what must be refused ---------------------------------------------------------------------------

REFUSED = """
add.cc.u32 %r0, %r1, %r2;
addc.u32 %r0, %r1, %r2;
add.b32 %r0, %r1, %r2;
add.u8 %h0, %h1, %h2;
add.sat.u32 %r0, %r1, %r2;
add.sat.s64 %rd0, %rd1, %rd2;
add.ftz.s32 %r0, %r1, %r2;
add.ftz.f64 %fd0, %fd1, %fd2;
add.sat.f64 %fd0, %fd1, %fd2;
add.rz.f64 %fd0, %fd1, %fd2;
add.rz.f16 %h0, %h1, %h2;
add.ftz.bf16 %h0, %h1, %h2;
add.sat.bf16 %h0, %h1, %h2;
add.s32.f32 %r0, %r1, %r2;
add %r0, %r1, %r2;
mul.s32 %r0, %r1, %r2;
mul.lo.sat.s32 %r0, %r1, %r2;
mul.wide.u64 %rd0, %rd1, %rd2;
mul.lo.f32 %f0, %f1, %f2;
mul.hi.b32 %r0, %r1, %r2;
mad.hi.sat.s32 %r0, %r1, %r2, %r3;
mad.lo.cc.u32 %r0, %r1, %r2, %r3;
mad.f32 %f0, %f1, %f2, %f3;
mad.rn.f16 %h0, %h1, %h2, %h3;
mul24.lo.u32 %r0, %r1, %r2;
fma.f32 %f0, %f1, %f2, %f3;
fma.rn.relu.f32 %f0, %f1, %f2, %f3;
fma.rn.sat.f64 %fd0, %fd1, %fd2, %fd3;
fma.rn.ftz.bf16 %h0, %h1, %h2, %h3;
fma.rn.oob.f16 %h0, %h1, %h2, %h3;
fma.rz.f16 %h0, %h1, %h2, %h3;
div.f32 %f0, %f1, %f2;
div.approx.f64 %fd0, %fd1, %fd2;
div.full.sat.f32 %f0, %f1, %f2;
div.approx.rn.full.f32 %f0, %f1, %f2;
div.rn.f16 %h0, %h1, %h2;
rem.f32 %f0, %f1, %f2;
neg.u32 %r0, %r1;
abs.u64 %rd0, %rd1;
abs.ftz.f64 %fd0, %fd1;
neg.ftz.bf16 %h0, %h1;
min.b32 %r0, %r1, %r2;
min.relu.u32 %r0, %r1, %r2;
min.NaN.f64 %fd0, %fd1, %fd2;
min.NaN.s32 %r0, %r1, %r2;
min.NaN.f32 %f0, %f1, %f2, %f3;
max.xorsign.f32 %f0, %f1, %f2;
max.ftz.bf16 %h0, %h1, %h2;
and.u32 %r0, %r1, %r2;
not.s32 %r0, %r1;
cnot.u32 %r0, %r1;
shl.u32 %r0, %r1, %r2;
shl.wrap.b32 %r0, %r1, %r2;
shf.l.b32 %r0, %r1, %r2, %r3;
shf.wrap.b32 %r0, %r1, %r2, %r3;
shf.l.wrap.u32 %r0, %r1, %r2, %r3;
lop3.b32 %r0, %r1, %r2, %r3, %r4;
lop3.b32 %r0, %r1, %r2, %r3, 256;
lop3.b64 %rd0, %rd1, %rd2, %rd3, 0x80;
lop3.or.b32 %r0|%p1, %r1, %r2, %r3, 0x80, %p2;
prmt.b32.f4e %r0, %r1, %r2, %r3;
prmt.b64 %rd0, %rd1, %rd2, %r3;
bfe.b32 %r0, %r1, %r2, %r3;
bfi.u32 %r0, %r1, %r2, %r3, %r4;
popc.u32 %r0, %r1;
popc.shiftamt.b32 %r0, %r1;
clz.s32 %r0, %r1;
brev.u32 %r0, %r1;
bfind.b32 %r0, %r1;
ffs.b32 %r0, %r1;
fns.b32 %r0, %r1, %r2, %r3;
setp.lt.b32 %p0, %r1, %r2;
setp.equ.s32 %p0, %r1, %r2;
setp.s32 %p0, %r1, %r2;
setp.lt.ftz.f64 %p0, %fd1, %fd2;
setp.lt.ftz.s32 %p0, %r1, %r2;
setp.lt.ftz.bf16 %p0, %h1, %h2;
setp.lt.f16x2 %p0|%p1, %r1, %r2;
setp.lt.s32 %p0, %r1, %r2, %p1;
setp.lt.and.s32 %p0, %r1, %r2;
set.lt.b32.s32 %r0, %r1, %r2;
set.lt.u64.s32 %rd0, %r1, %r2;
set.lt.s32 %r0, %r1, %r2;
set.lt.u32.s32 %r0|%p1, %r1, %r2;
selp.pred %p0, %p1, %p2, %p3;
selp.u8 %h0, %h1, %h2, %p3;
slct.ftz.f32.s32 %f0, %f1, %f2, %r3;
slct.f32.f64 %f0, %f1, %f2, %fd3;
mov.u8 %h0, %h1;
mov.v2.b32 %r0, %r1;
mov.b32 {%h0, %h1}, {%h2, %h3};
mov.u32 %r0, {%h0, %h1};
mov.b32 %r0, {%r1, %r2};
mov.b64 %rd0, {%h0, %h1, %h2};
mov.sat.f32 %f0, %f1;
ex2.f32 %f0, %f1;
ex2.rn.f32 %f0, %f1;
ex2.approx.bf16 %h0, %h1;
ex2.approx.f64 %fd0, %fd1;
sin.rn.f32 %f0, %f1;
tanh.approx.ftz.f32 %f0, %f1;
lg2.approx.f64 %fd0, %fd1;
rcp.f32 %f0, %f1;
rcp.approx.ftz.f64 %fd0, %fd1;
rcp.rz.f64 %fd0, %fd1;
rsqrt.rn.f32 %f0, %f1;
sqrt.approx.f64 %fd0, %fd1;
sqrt.rn.sat.f32 %f0, %f1;
copysign.ftz.f32 %f0, %f1, %f2;
testp.f32 %p0, %f1;
testp.normal.f16 %p0, %h1;
sad.f32 %f0, %f1, %f2, %f3;
dp4a.u32 %r0, %r1, %r2, %r3;
dp2a.lo.u32.u32 %r0, %r1, %r2, %r3;
cvta.u64 %rd0, %rd1;
cvta.to.global.u32 %r0, %r1;
cvta.to.shared::cluster.u64 %rd0, %rd1;
isspacep.const %p0, %rd1;
createpolicy.range.L2::evict_last.b64 %rd0, [%rd1], 4096, 8192;
createpolicy.fractional.bogus.L2::evict_last.b64 %rd0, 1.0;
createpolicy.fractional.b64 %rd0, 1.0;
nanosleep.s32 %r1;
""".strip().splitlines()


@pytest.mark.parametrize("line", REFUSED)
def test_what_is_not_modelled_or_not_ptx_is_refused(line: str) -> None:
    refused(line)


@pytest.mark.parametrize(
    "line",
    [
        "add.s32 %r0, %r1;", "add.s32 %r0, %r1, %r2, %r3;", "mul.lo.s32 %r0, %r1;", "mad.lo.s32 %r0, %r1, %r2;", "neg.f32 %f0;",
        "fma.rn.f32 %f0, %f1, %f2;", "div.rn.f32 %f0, %f1;", "min.f32 %f0, %f1;", "and.b32 %r0, %r1;", "not.b32 %r0;",
        "shl.b32 %r0, %r1;", "shf.l.wrap.b32 %r0, %r1, %r2;", "lop3.b32 %r0, %r1, %r2, 0x80;", "prmt.b32 %r0, %r1, %r2;",
        "bfe.u32 %r0, %r1, %r2;", "bfi.b32 %r0, %r1, %r2, %r3;", "popc.b32 %r0;", "setp.lt.s32 %p0, %r1;", "set.lt.u32.s32 %r0, %r1;",
        "selp.b32 %r0, %r1, %r2;", "slct.b32.s32 %r0, %r1, %r2;", "mov.b32 %r0;", "mov.b32 %r0, %r1, %r2;", "ex2.approx.f32 %f0;",
        "copysign.f32 %f0, %f1;", "testp.normal.f32 %p0;", "sad.u32 %r0, %r1, %r2;", "dp4a.u32.u32 %r0, %r1, %r2;", "cvta.global.u64 %rd0;",
        "isspacep.global %p0;", "createpolicy.fractional.L2::evict_last.b64;", "nanosleep.u32;",
    ],
)  # fmt: skip
def test_wrong_operand_counts_are_refused(line: str) -> None:
    refused(line, kind=vgpu.MalformedPTX)


def test_every_elementary_function_is_covered() -> None:
    assert set(MATH) == {"ex2", "lg2", "sqrt", "rsqrt", "rcp", "sin", "cos", "tanh"}
