"""`cvt`, against literals worked out from the PTX ISA manual ("Data Movement and Conversion: cvt")."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from vgpu_kernels import check, evaluate, refused

from oproj_lib import vgpu

INT_MIN, INT_MAX, UINT_MAX = -(2**31), 2**31 - 1, 2**32 - 1
LONG_MIN, LONG_MAX, ULONG_MAX = -(2**63), 2**63 - 1, 2**64 - 1
INF = math.inf
NAN, NAN16, QNAN = 0x7FFFFFFF, 0x7FFF, 0x7FC00000
TINY = 0x00000001


# -- integer to integer -----------------------------------------------------------------------------


def test_widening_extends_the_sign_of_the_source() -> None:
    check("cvt.s64.s32 %d, %a;", "s32 -> s64", [(-1, -1), (INT_MIN, INT_MIN), (7, 7)])
    check("cvt.u64.u32 %d, %a;", "u32 -> u64", [(UINT_MAX, UINT_MAX)])
    check("cvt.s64.u32 %d, %a;", "u32 -> s64", [(UINT_MAX, UINT_MAX)])
    check("cvt.u64.s32 %d, %a;", "s32 -> u64", [(-1, ULONG_MAX)])
    check("cvt.u32.u16 %d, %a;", "u16 -> u32", [(0xFFFF, 0xFFFF)])
    check("cvt.s32.s16 %d, %a;", "s16 -> s32", [(-(2**15), -(2**15))])
    check("cvt.u32.s16 %d, %a;", "s16 -> u32", [(-1, UINT_MAX)])


def test_narrowing_keeps_the_low_bits() -> None:
    check("cvt.u16.u32 %d, %a;", "u32 -> u16", [(0x12345678, 0x5678)])
    check("cvt.u32.u64 %d, %a;", "u64 -> u32", [(0x123456789ABCDEF0, 0x9ABCDEF0)])
    check("cvt.s32.s64 %d, %a;", "s64 -> s32", [(2**31, INT_MIN), (-1, -1)])
    check("cvt.s16.s64 %d, %a;", "s64 -> s16", [(0x18000, -(2**15))])


def test_eight_bit_results_fill_the_register() -> None:
    """A result narrower than its register is sign- or zero-extended to the register's width."""
    check("cvt.s8.s32 %d, %a;", "s32 -> b32", [(0x80, 0xFFFFFF80), (0x17F, 0x7F), (-1, UINT_MAX)])
    check("cvt.u8.u32 %d, %a;", "u32 -> b32", [(0x1FF, 0xFF), (0x180, 0x80)])
    check("cvt.s8.s16 %d, %a;", "s16 -> b16", [(0x80, 0xFF80)])
    check("cvt.s16.s32 %d, %a;", "s32 -> b32", [(0x8000, 0xFFFF8000)])
    check("cvt.u16.u32 %d, %a;", "u32 -> b32", [(0x18000, 0x8000)])


def test_sources_may_be_wider_than_the_type() -> None:
    check("cvt.u32.u8 %d, %a;", "b32 -> u32", [(0x12345680, 0x80)])
    check("cvt.s32.s8 %d, %a;", "b32 -> s32", [(0x12345680, -128), (0x1234567F, 127)])
    check("cvt.s64.s16 %d, %a;", "b64 -> s64", [(0x12348000, -(2**15))])
    check("cvt.s32.s8 %d, %a;", "b16 -> s32", [(0x1280, -128)])


def test_saturating_integer_conversions() -> None:
    check("cvt.sat.s8.s32 %d, %a;", "s32 -> s32", [(200, 127), (-200, -128), (5, 5)])
    check("cvt.sat.u8.s32 %d, %a;", "s32 -> u32", [(300, 255), (-1, 0), (7, 7)])
    check("cvt.sat.s32.u32 %d, %a;", "u32 -> s32", [(UINT_MAX, INT_MAX), (7, 7)])
    check("cvt.sat.u32.s32 %d, %a;", "s32 -> u32", [(-7, 0), (INT_MAX, INT_MAX)])
    check("cvt.sat.s32.s64 %d, %a;", "s64 -> s32", [(LONG_MAX, INT_MAX), (LONG_MIN, INT_MIN), (-3, -3)])
    check("cvt.sat.s64.u64 %d, %a;", "u64 -> s64", [(ULONG_MAX, LONG_MAX)])
    check("cvt.sat.u64.s64 %d, %a;", "s64 -> u64", [(-1, 0)])
    check("cvt.sat.u16.u32 %d, %a;", "u32 -> u16", [(70000, 65535)])


# -- float to integer -------------------------------------------------------------------------------


def test_rounding_to_integers() -> None:
    values = [0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 1.25, -1.25, 1.75, -1.75]
    expected = {
        "rni": [0, 2, 2, 0, -2, -2, 1, -1, 2, -2],
        "rzi": [0, 1, 2, 0, -1, -2, 1, -1, 1, -1],
        "rmi": [0, 1, 2, -1, -2, -3, 1, -2, 1, -2],
        "rpi": [1, 2, 3, 0, -1, -2, 2, -1, 2, -1],
    }
    for mode, integers in expected.items():
        rows = list(zip(values, integers, strict=True))
        check(f"cvt.{mode}.s32.f32 %d, %a;", "f32 -> s32", rows)
        check(f"cvt.{mode}.s64.f64 %d, %a;", "f64 -> s64", rows)
        check(f"cvt.{mode}.s16.f16 %d, %a;", "f16 -> s16", rows)
        check(f"cvt.{mode}.s32.bf16 %d, %a;", "bf16 -> s32", rows)


def test_float_to_integer_clamps() -> None:
    rows = [
        (1e10, INT_MAX),
        (-1e10, INT_MIN),
        (INF, INT_MAX),
        (-INF, INT_MIN),
        (2.0**31, INT_MAX),
        (-(2.0**31), INT_MIN),
    ]
    check("cvt.rzi.s32.f32 %d, %a;", "f32 -> s32", rows)
    check(
        "cvt.rzi.u32.f32 %d, %a;",
        "f32 -> u32",
        [(-1.0, 0), (-0.5, 0), (2.0**32, UINT_MAX), (INF, UINT_MAX), (2.0**31, 2**31), (-INF, 0)],
    )
    check(
        "cvt.rzi.s64.f32 %d, %a;",
        "f32 -> s64",
        [(2.0**63, LONG_MAX), (-(2.0**63), LONG_MIN), (2.0**62, 2**62), (INF, LONG_MAX)],
    )
    below = 2.0**64 - 2.0**11
    check(
        "cvt.rzi.u64.f64 %d, %a;",
        "f64 -> u64",
        [(2.0**64, ULONG_MAX), (below, 2**64 - 2**11), (-1.0, 0), (2.0**63, 2**63)],
    )
    check(
        "cvt.rzi.s64.f64 %d, %a;",
        "f64 -> s64",
        [(2.0**63, LONG_MAX), (2.0**63 - 1024.0, 2**63 - 1024), (-INF, LONG_MIN)],
    )
    check(
        "cvt.rni.s32.f64 %d, %a;",
        "f64 -> s32",
        [(2147483647.5, INT_MAX), (2147483646.5, 2147483646), (-2147483648.5, INT_MIN)],
    )
    check(
        "cvt.rni.u32.f64 %d, %a;",
        "f64 -> u32",
        [(4294967294.5, 4294967294), (4294967295.5, UINT_MAX), (-0.5, 0)],
    )
    check("cvt.rzi.s16.f32 %d, %a;", "f32 -> s16", [(40000.0, 32767), (-40000.0, -32768)])
    check("cvt.rzi.s8.f32 %d, %a;", "f32 -> s32", [(200.0, 127), (-200.0, -128), (5.5, 5)])
    check("cvt.rzi.u8.f32 %d, %a;", "f32 -> u32", [(300.0, 255), (-3.0, 0)])
    check("cvt.rzi.sat.u32.f32 %d, %a;", "f32 -> u32", [(-1.0, 0), (5.0, 5)])


def test_nan_to_integer() -> None:
    """Zero from FP32 or narrower to 32 bits or fewer, otherwise the top bit alone (PTX ISA, "cvt", notes)."""
    check("cvt.rzi.s32.f32 %d, %a;", "f32 -> s32", [(QNAN, 0), (0xFFC12345, 0)])
    check("cvt.rzi.u32.f32 %d, %a;", "f32 -> u32", [(QNAN, 0)])
    check("cvt.rzi.s16.f16 %d, %a;", "f16 -> s16", [(NAN16, 0)])
    check("cvt.rzi.s64.f32 %d, %a;", "f32 -> s64", [(QNAN, LONG_MIN)])
    check("cvt.rzi.u64.f32 %d, %a;", "f32 -> u64", [(QNAN, 2**63)])
    check("cvt.rzi.s64.f64 %d, %a;", "f64 -> s64", [(0x7FF8000000000000, LONG_MIN)])
    check("cvt.rzi.u64.f64 %d, %a;", "f64 -> u64", [(0x7FF8000000000000, 2**63)])
    check("cvt.rzi.s32.f64 %d, %a;", "f64 -> s32", [(0x7FF8000000000000, INT_MIN)])
    check("cvt.rzi.u32.f64 %d, %a;", "f64 -> u32", [(0x7FF8000000000000, 2**31)])


def test_flush_before_rounding_up() -> None:
    check("cvt.rpi.s32.f32 %d, %a;", "f32 -> s32", [(TINY, 1)])
    check("cvt.rpi.ftz.s32.f32 %d, %a;", "f32 -> s32", [(TINY, 0), (0.5, 1)])


# -- integer to float -------------------------------------------------------------------------------


def test_integer_to_float_rounds_to_even() -> None:
    rows = [
        (2**24 + 1, 2.0**24),
        (2**24 + 3, 2.0**24 + 4),
        (-(2**24) - 1, -(2.0**24)),
        (INT_MIN, -(2.0**31)),
        (INT_MAX, 2.0**31),
    ]
    check("cvt.rn.f32.s32 %d, %a;", "s32 -> f32", rows)
    check("cvt.rn.f32.u32 %d, %a;", "u32 -> f32", [(UINT_MAX, 2.0**32), (7, 7.0)])
    check(
        "cvt.rn.f32.u64 %d, %a;",
        "u64 -> f32",
        [(ULONG_MAX, 2.0**64), (2**40 + 2**16, 2.0**40), (2**40 + 2**16 + 1, 2.0**40 + 2.0**17)],
    )
    check(
        "cvt.rn.f32.s64 %d, %a;",
        "s64 -> f32",
        [(LONG_MIN, -(2.0**63)), (-(2**40) - 2**16 - 1, -(2.0**40) - 2.0**17)],
    )
    check(
        "cvt.rn.f64.s64 %d, %a;",
        "s64 -> f64",
        [(2**53 + 1, 2.0**53), (2**53 + 3, 2.0**53 + 4), (LONG_MIN, -(2.0**63))],
    )
    check("cvt.rn.f64.u64 %d, %a;", "u64 -> f64", [(ULONG_MAX, 2.0**64)])
    check("cvt.rn.f64.s32 %d, %a;", "s32 -> f64", [(INT_MIN, -(2.0**31))])
    check(
        "cvt.rn.f16.s32 %d, %a;",
        "s32 -> f16",
        [(2049, 2048.0), (2051, 2052.0), (65519, 65504.0), (65520, INF), (-70000, -INF)],
    )
    check("cvt.rn.f16.u64 %d, %a;", "u64 -> f16", [(ULONG_MAX, INF), (3, 3.0)])
    check(
        "cvt.rn.bf16.s32 %d, %a;",
        "s32 -> bf16",
        [(257, 256.0), (259, 260.0), (2**24 + 2**16, 2.0**24), (2**24 + 2**16 + 1, 2.0**24 + 2.0**17)],
    )
    check("cvt.rn.f32.u8 %d, %a;", "u8 -> f32", [(255, 255.0)])
    check("cvt.rn.f32.s8 %d, %a;", "s8 -> f32", [(-128, -128.0)])


def test_sixty_four_bit_integers_to_bf16_round_once() -> None:
    tie = 2**62 + 2**54  # midway between 2^62 and 2^62 + 2^55
    rows = [
        (tie, 2.0**62),
        (tie + 1, 2.0**62 + 2.0**55),
        (tie - 1, 2.0**62),
        (-tie - 1, -(2.0**62) - 2.0**55),
        (-tie, -(2.0**62)),
        (257, 256.0),
    ]
    check("cvt.rn.bf16.s64 %d, %a;", "s64 -> bf16", rows)
    check(
        "cvt.rn.bf16.u64 %d, %a;",
        "u64 -> bf16",
        [(tie, 2.0**62), (tie + 1, 2.0**62 + 2.0**55), (ULONG_MAX, 2.0**64)],
    )


def test_integer_to_float_in_directed_modes() -> None:
    x = 2**24 + 1
    check("cvt.rz.f32.s32 %d, %a;", "s32 -> f32", [(x, 2.0**24), (-x, -(2.0**24)), (INT_MAX, 2.0**31 - 128)])
    check("cvt.rp.f32.s32 %d, %a;", "s32 -> f32", [(x, 2.0**24 + 2), (-x, -(2.0**24))])
    check("cvt.rm.f32.s32 %d, %a;", "s32 -> f32", [(x, 2.0**24), (-x, -(2.0**24) - 2)])
    check("cvt.rz.f16.u32 %d, %a;", "u32 -> f16", [(70000, 65504.0)])
    check("cvt.rn.sat.f32.s32 %d, %a;", "s32 -> f32", [(5, 1.0), (-5, 0.0), (0, 0.0)])


# -- float to float ---------------------------------------------------------------------------------


def test_narrowing_floats_rounds_to_even() -> None:
    rows = [(1.0 + 2.0**-11, 1.0), (1.0 + 3 * 2.0**-11, 1.0 + 2.0**-9), (65519.0, 65504.0), (65520.0, INF),
    (2.0**-25, 0.0), (2.0**-25 * 1.5, 2.0**-24),
            (-(2.0**-26), -0.0), (INF, INF), (QNAN, NAN16), (0xFFC12345, NAN16)]  # fmt: skip
    check("cvt.rn.f16.f32 %d, %a;", "f32 -> f16", rows)
    rows = [(1.0 + 2.0**-8, 1.0), (1.0 + 3 * 2.0**-8, 1.0 + 2.0**-6), (1.0 + 2.0**-8 + 2.0**-20,
    1.0 + 2.0**-7), (0x7F7FFFFF, INF), (QNAN, NAN16),
            (0x7F800001, NAN16), (0x00008000, 0x0000), (0x00018000, 0x0002), (0x80008001, 0x8001), (-0.0,
            -0.0), (-INF, -INF)]  # fmt: skip
    check("cvt.rn.bf16.f32 %d, %a;", "f32 -> bf16", rows)
    rows = [
        (1.0 + 2.0**-24, 1.0),
        (1.0 + 3 * 2.0**-24, 1.0 + 2.0**-22),
        (2.0**128, INF),
        (2.0**-150, 0.0),
        (-(2.0**-149), 0x80000001),
    ]
    check("cvt.rn.f32.f64 %d, %a;", "f64 -> f32", rows)
    # FP64 to 16 bits rounds once: through FP32 the last term would be lost and the tie go to even.
    check(
        "cvt.rn.bf16.f64 %d, %a;",
        "f64 -> bf16",
        [(1.0 + 2.0**-8 + 2.0**-40, 1.0 + 2.0**-7), (1.0 + 2.0**-8, 1.0)],
    )
    check(
        "cvt.rn.f16.f64 %d, %a;",
        "f64 -> f16",
        [(1.0 + 2.0**-11 + 2.0**-40, 1.0 + 2.0**-10), (1.0 + 2.0**-11, 1.0)],
    )
    check("cvt.rn.bf16.f16 %d, %a;", "f16 -> bf16", [(1.0 + 2.0**-8, 1.0), (65504.0, 65536.0)])
    check("cvt.rn.f16.bf16 %d, %a;", "bf16 -> f16", [(2.0**17, INF), (1.5, 1.5)])


def test_narrowing_floats_in_directed_modes() -> None:
    x = 1.0 + 2.0**-12
    check(
        "cvt.rz.f16.f32 %d, %a;",
        "f32 -> f16",
        [(x, 1.0), (-x, -1.0), (1e5, 65504.0), (INF, INF), (2.0**-30, 0.0), (QNAN, NAN16)],
    )
    check(
        "cvt.rp.f16.f32 %d, %a;",
        "f32 -> f16",
        [(x, 1.0 + 2.0**-10), (-x, -1.0), (1e5, INF), (2.0**-30, 2.0**-24), (-1e5, -65504.0)],
    )
    check(
        "cvt.rm.f16.f32 %d, %a;",
        "f32 -> f16",
        [(x, 1.0), (-x, -1.0 - 2.0**-10), (-(2.0**-30), -(2.0**-24)), (1e5, 65504.0)],
    )
    check(
        "cvt.rz.bf16.f32 %d, %a;",
        "f32 -> bf16",
        [
            (1.0 + 2.0**-8 * 1.5, 1.0),
            (0x7F7FFFFF, 0x7F7F),
            (0xFF7FFFFF, 0xFF7F),
            (0x0000FFFF, 0),
            (QNAN, NAN16),
        ],
    )
    check(
        "cvt.rp.bf16.f32 %d, %a;", "f32 -> bf16", [(1.0 + 2.0**-20, 1.0 + 2.0**-7), (-1.0 - 2.0**-20, -1.0)]
    )
    check("cvt.rz.f32.f64 %d, %a;", "f64 -> f32", [(1.0 + 2.0**-24 * 1.5, 1.0), (2.0**128, 0x7F7FFFFF)])
    check(
        "cvt.rm.f32.f64 %d, %a;",
        "f64 -> f32",
        [(-1.0 - 2.0**-40, -1.0 - 2.0**-23), (1.0 - 2.0**-40, 1.0 - 2.0**-24)],
    )
    check("cvt.rp.f32.f64 %d, %a;", "f64 -> f32", [(2.0**-200, TINY), (-(2.0**-200), -0.0)])


def test_widening_floats_is_exact() -> None:
    check(
        "cvt.f32.f16 %d, %a;",
        "f16 -> f32",
        [(0x0001, 2.0**-24), (65504.0, 65504.0), (-0.0, -0.0), (-INF, -INF), (0x7E00, NAN)],
    )
    check(
        "cvt.f32.bf16 %d, %a;", "bf16 -> f32", [(1.5, 1.5), (0x0001, 2.0**-133), (0x8000, -0.0), (INF, INF)]
    )
    check("cvt.f64.f32 %d, %a;", "f32 -> f64", [(TINY, 2.0**-149), (1.5, 1.5), (-INF, -INF)])
    check("cvt.f64.f16 %d, %a;", "f16 -> f64", [(0x0001, 2.0**-24)])
    check("cvt.f64.bf16 %d, %a;", "bf16 -> f64", [(1.5, 1.5)])


def test_rounding_to_integral_floats() -> None:
    values = [0.5, 1.5, 2.5, -0.5, -1.5, -0.25, 2.0**30 + 128, INF]
    check(
        "cvt.rni.f32.f32 %d, %a;",
        "f32 -> f32",
        list(zip(values, [0.0, 2.0, 2.0, -0.0, -2.0, -0.0, 2.0**30 + 128, INF], strict=True)),
    )
    check("cvt.rzi.f32.f32 %d, %a;", "f32 -> f32", [(1.75, 1.0), (-1.75, -1.0), (-0.5, -0.0), (QNAN, NAN)])
    check("cvt.rmi.f32.f32 %d, %a;", "f32 -> f32", [(1.75, 1.0), (-0.25, -1.0), (-0.0, -0.0)])
    check("cvt.rpi.f32.f32 %d, %a;", "f32 -> f32", [(1.25, 2.0), (-0.75, -0.0), (TINY, 1.0)])
    check("cvt.rpi.ftz.f32.f32 %d, %a;", "f32 -> f32", [(TINY, 0.0)])
    check("cvt.rni.f64.f64 %d, %a;", "f64 -> f64", [(2.5, 2.0), (2.0**52 + 1, 2.0**52 + 1)])
    check("cvt.rni.f16.f16 %d, %a;", "f16 -> f16", [(2.5, 2.0), (3.5, 4.0)])
    check("cvt.rzi.bf16.bf16 %d, %a;", "bf16 -> bf16", [(-2.5, -2.0)])


def test_saturating_and_flushing_float_conversions() -> None:
    check(
        "cvt.sat.f32.f32 %d, %a;",
        "f32 -> f32",
        [(1.5, 1.0), (-1.5, 0.0), (0.25, 0.25), (QNAN, 0.0), (-0.0, 0.0), (INF, 1.0)],
    )
    check("cvt.rn.sat.f16.f32 %d, %a;", "f32 -> f16", [(1.5, 1.0), (-1.5, 0.0), (QNAN, 0.0)])
    check("cvt.rni.sat.f32.f32 %d, %a;", "f32 -> f32", [(0.75, 1.0), (0.5, 0.0)])
    check("cvt.ftz.f32.f32 %d, %a;", "f32 -> f32", [(TINY, 0.0), (0x80000001, -0.0), (1.5, 1.5)])
    check("cvt.f32.f32 %d, %a;", "f32 -> f32", [(TINY, TINY), (1.5, 1.5)])
    check("cvt.rn.ftz.f32.f64 %d, %a;", "f64 -> f32", [(2.0**-140, 0.0), (1.0, 1.0)])
    check("cvt.ftz.f64.f32 %d, %a;", "f32 -> f64", [(TINY, 0.0)])
    check("cvt.rp.ftz.f16.f32 %d, %a;", "f32 -> f16", [(TINY, 2.0**-24), (2.0**-100, 2.0**-24)])


def test_packed_conversions_put_the_first_operand_on_top() -> None:
    check(
        "cvt.rn.bf16x2.f32 %d, %a, %b;",
        "f32 f32 -> bf16x2",
        [(1.0, 2.0, 0x3F80_4000), (QNAN, -0.0, 0x7FFF_8000), (1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8, 0x3F80_3F82)],
    )
    check(
        "cvt.rn.f16x2.f32 %d, %a, %b;",
        "f32 f32 -> f16x2",
        [(1.0, -2.0, 0x3C00_C000), (1e6, 2.0**-24, 0x7C00_0001)],
    )
    check(
        "cvt.rz.bf16x2.f32 %d, %a, %b;",
        "f32 f32 -> bf16x2",
        [(1.0 + 2.0**-8 * 1.5, -1.0 - 2.0**-8 * 1.5, 0x3F80_BF80)],
    )
    check("cvt.rz.f16x2.f32 %d, %a, %b;", "f32 f32 -> f16x2", [(1e6, -1e6, 0x7BFF_FBFF)])
    check(
        "cvt.rn.relu.bf16x2.f32 %d, %a, %b;",
        "f32 f32 -> bf16x2",
        [(-1.0, 2.0, 0x0000_4000), (QNAN, -INF, 0x7FFF_0000)],
    )
    check("cvt.rn.relu.f16x2.f32 %d, %a, %b;", "f32 f32 -> f16x2", [(3.0, -2.0, 0x4200_0000)])
    check("cvt.rn.relu.f16.f32 %d, %a;", "f32 -> f16", [(-2.0, 0.0), (2.0, 2.0), (QNAN, NAN16)])
    check("cvt.rn.relu.bf16.f32 %d, %a;", "f32 -> bf16", [(-2.0, 0.0), (2.0, 2.0)])


def test_tf32() -> None:
    """A 10-bit fraction in the upper 19 bits of an FP32 pattern."""
    rows = [
        (1.0 + 2.0**-11, 1.0 + 2.0**-10),
        (-1.0 - 2.0**-11, -1.0 - 2.0**-10),
        (1.0 + 2.0**-12, 1.0),
        (INF, INF),
        (1.0 + 3 * 2.0**-11, 1.0 + 2.0**-9),
    ]
    check("cvt.rna.tf32.f32 %d, %a;", "f32 -> tf32", rows)
    check(
        "cvt.rn.tf32.f32 %d, %a;",
        "f32 -> tf32",
        [(1.0 + 2.0**-11, 1.0), (1.0 + 3 * 2.0**-11, 1.0 + 2.0**-9), (-INF, -INF)],
    )
    check(
        "cvt.rz.tf32.f32 %d, %a;",
        "f32 -> tf32",
        [(1.0 + 3 * 2.0**-11, 1.0 + 2.0**-10), (-1.0 - 2.0**-11, -1.0)],
    )
    check("cvt.rn.relu.tf32.f32 %d, %a;", "f32 -> tf32", [(-1.0, 0.0), (1.5, 1.5)])
    for mode in ("rn", "rz"):  # NaNs: an H200's answers
        check(
            f"cvt.{mode}.tf32.f32 %d, %a;",
            "f32 -> tf32",
            [(0x7F800001, 0x7FFFE000), (0xFFC12345, 0x7FFFE000)],
        )
    rows = [(0x7F800001, 0x7F800000), (0xFFC12345, 0xFFC12000), (0x7FFFFFFF, 0x7FFFE000)]
    check("cvt.rna.tf32.f32 %d, %a;", "f32 -> tf32", rows)


def test_nans_where_the_manual_leaves_them_open() -> None:
    """An H200's answers."""
    check("cvt.f32.bf16 %d, %a;", "bf16 -> f32", [(0x7FC1, 0x7FC10000), (0xFF81, 0xFF810000)])
    check("cvt.f32.f16 %d, %a;", "f16 -> f32", [(0xFE01, NAN)])
    check("cvt.f32.f32 %d, %a;", "f32 -> f32", [(0xFFC12345, 0xFFC12345)])
    check("cvt.ftz.f32.f32 %d, %a;", "f32 -> f32", [(0xFFC12345, NAN)])
    check("cvt.rni.f32.f32 %d, %a;", "f32 -> f32", [(0xFFC12345, NAN)])
    check(
        "cvt.rn.f32.f64 %d, %a;",
        "f64 -> f32",
        [(0xFFF8000000000001, 0xFFC00000), (0x7FF8123450000000, 0x7FC091A2)],
    )
    check(
        "cvt.f64.f32 %d, %a;",
        "f32 -> f64",
        [(0xFFC12345, 0xFFF82468A0000000), (0x7F812345, 0x7FF82468A0000000)],
    )
    check("cvt.rn.f16.bf16 %d, %a;", "bf16 -> f16", [(0xFFC1, NAN16)])
    check("cvt.rni.f16.f16 %d, %a;", "f16 -> f16", [(0xFE01, NAN16)])
    check("cvt.rni.bf16.bf16 %d, %a;", "bf16 -> bf16", [(0xFFC1, NAN16)])


def test_relu_of_negative_zero() -> None:
    check("cvt.rn.relu.f16.f32 %d, %a;", "f32 -> f16", [(-0.0, 0.0), (0x80000001, 0.0)])
    check("cvt.rn.relu.bf16x2.f32 %d, %a, %b;", "f32 f32 -> bf16x2", [(-0.0, 0x80000001, 0)])
    check("cvt.rn.relu.tf32.f32 %d, %a;", "f32 -> tf32", [(-0.0, 0.0), (QNAN, 0x7FFFE000)])


# -- random patterns against the definition ---------------------------------------------------------


def bf16_value(pattern: int) -> Fraction:
    exponent, fraction = pattern >> 7 & 0xFF, pattern & 0x7F
    size = (
        Fraction(fraction, 2**133)
        if exponent == 0
        else Fraction(fraction + 128, 128) * Fraction(2) ** (exponent - 127)
    )
    return -size if pattern >> 15 else size


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_random_fp32_to_bf16(mode: str) -> None:
    """By definition: the pattern that truncation gives, or the next larger one, as the mode says."""
    random = np.random.default_rng(5)
    sources = [int(x) for x in random.integers(0, 2**32, 300, dtype=np.uint64) if x >> 23 & 0xFF < 0xFE]
    (got,) = evaluate(f"cvt.{mode}.bf16.f32 %d, %a;", "f32 -> bf16", [(x,) for x in sources])
    for source, result in zip(sources, got.tolist(), strict=True):
        low, rest, negative = source >> 16, source & 0xFFFF, source >> 31
        away = {"rz": False, "rm": bool(negative), "rp": not negative}.get(mode)
        if away is None:
            away = rest > 0x8000 or (rest == 0x8000 and low & 1 == 1)
        assert result == (low + 1 if rest and away else low)
    assert bf16_value(0x3FC0) == Fraction(3, 2)


# -- what must be refused ---------------------------------------------------------------------------

REFUSED = """
cvt.f16.f32 %h0, %f1;
cvt.rna.f16.f32 %h0, %f1;
cvt.rni.f16.f32 %h0, %f1;
cvt.rni.f32.f16 %f0, %h1;
cvt.rn.f32.f32 %f0, %f1;
cvt.rn.f64.f32 %fd0, %f1;
cvt.f32.f64 %f0, %fd1;
cvt.rn.relu.f32.f64 %f0, %fd1;
cvt.rn.sat.bf16.f32 %h0, %f1;
cvt.sat.f32.bf16 %f0, %h1;
cvt.rn.satfinite.f16.f32 %h0, %f1;
cvt.rs.f16x2.f32 %r0, %f1, %f2, %r3;
cvt.f16x2.f32 %r0, %f1, %f2;
cvt.rm.f16x2.f32 %r0, %f1, %f2;
cvt.rn.sat.f16x2.f32 %r0, %f1, %f2;
cvt.rn.ftz.f16x2.f32 %r0, %f1, %f2;
cvt.rn.bf16x2.f32 %r0, %f1;
cvt.rn.bf16x2.f64 %r0, %fd1, %fd2;
cvt.rn.f16x2.e4m3x2 %r0, %h1;
cvt.rn.e4m3x2.f32 %h0, %f1, %f2;
cvt.u32.f32 %r0, %f1;
cvt.rn.u32.f32 %r0, %f1;
cvt.rzi.relu.s32.f32 %r0, %f1;
cvt.rzi.ftz.u32.f64 %r0, %fd1;
cvt.f32.s32 %f0, %r1;
cvt.rni.f32.s32 %f0, %r1;
cvt.rz.f32.s64 %f0, %rd1;
cvt.rn.s32.s64 %r0, %rd1;
cvt.rzi.s32.s64 %r0, %rd1;
cvt.ftz.s32.s64 %r0, %rd1;
cvt.relu.s32.s64 %r0, %rd1;
cvt.b32.b64 %r0, %rd1;
cvt.pred.u32 %p0, %r1;
cvt.u64.u32 %r0, %r1;
cvt.u32.u64 %r0, %r1;
cvt.tf32.f32 %r0, %f1;
cvt.rna.relu.tf32.f32 %r0, %f1;
cvt.rna.ftz.tf32.f32 %r0, %f1;
cvt.rna.tf32.f64 %r0, %fd1;
cvt.rm.tf32.f32 %r0, %f1;
cvt.s32 %r0, %r1;
cvt.pack.sat.s16.s32 %r0, %r1, %r2;
cvt.wide.s64.s32 %rd0, %r1;
cvt.sat.s64.s32 %rd0, %r1;
cvt.sat.s32.u16 %r0, %h1;
cvt.sat.u32.u32 %r0, %r1;
cvt.rn.ftz.relu.f16.f32 %h0, %f1;
cvt.rn.relu.sat.f16.f32 %h0, %f1;
cvt.rz.ftz.relu.bf16.f32 %h0, %f1;
""".strip().splitlines()


@pytest.mark.parametrize("line", REFUSED)
def test_what_is_not_modelled_or_not_ptx_is_refused(line: str) -> None:
    refused(line)


@pytest.mark.parametrize(
    "line", ["cvt.s64.s32 %rd0;", "cvt.s64.s32 %rd0, %r1, %r2;", "cvt.rn.f16x2.f32 %r0, %f1, %f2, %f3;"]
)
def test_wrong_operand_counts_are_refused(line: str) -> None:
    refused(line, kind=vgpu.MalformedPTX)
