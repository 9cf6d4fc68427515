"""Floating-point arithmetic, against literals worked out from the PTX ISA manual and IEEE 754.

Integers of float types are bit patterns: 0x7FFFFFFF is the canonical NaN of FP32 (PTX ISA,
"Floating-Point Instructions"), 0x7FFF that of F16 and BF16.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from vgpu_kernels import bits_of, check, evaluate, refused

from oproj_lib import vgpu
from oproj_lib.vgpu.alu import MATH

INT_MIN, INT_MAX, UINT_MAX = -(2**31), 2**31 - 1, 2**32 - 1
LONG_MIN, LONG_MAX, ULONG_MAX = -(2**63), 2**63 - 1, 2**64 - 1
INF = math.inf
NAN, NAN16 = 0x7FFFFFFF, 0x7FFF
QNAN = 0x7FC00000
TINY = 0x00000001  # smallest FP32 subnormal
ULP = 2.0**-23


# -- FP32 and FP64 ----------------------------------------------------------------------------------


def test_float_sums_and_products() -> None:
    rows = [(1.5, 2.25, 3.75), (INF, -INF, NAN), (QNAN, 1.0, NAN), (0xFFC12345, 1.0, NAN), (-0.0, -0.0,
    -0.0), (1.0, -1.0, 0.0),
            (0x7F7FFFFF, 0x7F7FFFFF, INF), (1.0, 2.0**-24, 1.0), (1.0 + ULP, 2.0**-24, 1.0 + 2 * ULP),
            (TINY, TINY, 2 * 2.0**-149)]  # fmt: skip
    check("add.f32 %d, %a, %b;", "f32 f32 -> f32", rows)
    check("add.rn.f32 %d, %a, %b;", "f32 f32 -> f32", rows)
    check("sub.f32 %d, %a, %b;", "f32 f32 -> f32", [(1.0, 1.0, 0.0), (-0.0, 0.0, -0.0), (INF, INF, NAN)])
    rows = [
        (INF, 0.0, NAN),
        (-0.0, 5.0, -0.0),
        (2.0**-100, 2.0**-49, TINY),
        (2.0**-100, 2.0**-50, 0.0),
        (-2.0, 3.0, -6.0),
    ]
    check("mul.f32 %d, %a, %b;", "f32 f32 -> f32", rows)
    check("add.f64 %d, %a, %b;", "f64 f64 -> f64", [(1.0, 2.0**-53, 1.0), (0.5, 0.25, 0.75)])
    check("sub.rn.f64 %d, %a, %b;", "f64 f64 -> f64", [(1.0, 2.0**-54, 1.0), (0.5, 0.25, 0.25)])
    check(
        "mul.f64 %d, %a, %b;",
        "f64 f64 -> f64",
        [(1.0 + 2.0**-52, 1.0 + 2.0**-52, 1.0 + 2.0**-51), (-0.0, 1.0, -0.0)],
    )


def test_flush_to_zero() -> None:
    negative = 0x80000001
    check(
        "add.ftz.f32 %d, %a, %b;",
        "f32 f32 -> f32",
        [(TINY, 1.0, 1.0), (TINY, 0.0, 0.0), (negative, negative, -0.0)],
    )
    check("mul.ftz.f32 %d, %a, %b;", "f32 f32 -> f32", [(2.0**-100, 2.0**-40, 0.0), (-(2.0**-100), 2.0**-40,
    -0.0),
                                                         (TINY, 2.0**100, 0.0), (2.0**-126, 1.0,
                                                         2.0**-126)])  # fmt: skip
    check(
        "fma.rn.ftz.f32 %d, %a, %b, %c;",
        "f32 f32 f32 -> f32",
        [(TINY, 2.0**120, 1.0, 1.0), (1.0, 1.0, TINY, 1.0)],
    )
    check("max.ftz.f32 %d, %a, %b;", "f32 f32 -> f32", [(TINY, negative, 0.0)])
    check("add.ftz.f16 %d, %a, %b;", "f16 f16 -> f16", [(0x0001, 0.0, 0.0), (0x0400, 0x0400, 0x0800)])


def test_saturation_to_one() -> None:
    rows = [
        (1.5, 2.0, 1.0),
        (-3.0, 1.0, 0.0),
        (0.25, 0.5, 0.75),
        (QNAN, 1.0, 0.0),
        (-0.0, -0.0, 0.0),
        (INF, 1.0, 1.0),
    ]
    check("add.sat.f32 %d, %a, %b;", "f32 f32 -> f32", rows)
    check("mul.sat.f32 %d, %a, %b;", "f32 f32 -> f32", [(0.5, 0.5, 0.25), (-2.0, 2.0, 0.0), (2.0, 2.0, 1.0)])
    check(
        "fma.rn.sat.f32 %d, %a, %b, %c;", "f32 f32 f32 -> f32", [(0.5, 0.5, 0.25, 0.5), (2.0, 2.0, 2.0, 1.0)]
    )
    check("add.sat.f16 %d, %a, %b;", "f16 f16 -> f16", [(1.0, 1.0, 1.0), (-1.0, 0.5, 0.0), (NAN16, 1.0, 0.0)])


def test_directed_rounding_of_sums() -> None:
    tiny, above_one, below_one = 2.0**-30, 1.0 + ULP, 1.0 - ULP / 2
    check(
        "add.rp.f32 %d, %a, %b;",
        "f32 f32 -> f32",
        [
            (1.0, tiny, above_one),
            (1.0, -tiny, 1.0),
            (0x7F7FFFFF, 1.0, INF),
            (-0x800001 + 0x100000000, -1.0, 0xFF7FFFFF),
        ],
    )
    check(
        "add.rm.f32 %d, %a, %b;",
        "f32 f32 -> f32",
        [(1.0, tiny, 1.0), (1.0, -tiny, below_one), (0x7F7FFFFF, 1.0, 0x7F7FFFFF)],
    )
    check("add.rz.f32 %d, %a, %b;", "f32 f32 -> f32", [(1.0, tiny, 1.0), (1.0, -tiny, below_one), (-1.0,
    tiny, -below_one), (-1.0, -tiny, -1.0),
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
    check(
        "mul.rz.f32 %d, %a, %b;",
        "f32 f32 -> f32",
        [(x, x, 1.0 + 2 * ULP), (-x, x, -1.0 - 2 * ULP), (-0.0, 1.0, -0.0), (0.0, 1.0, 0.0)],
    )
    check(
        "mul.rp.f32 %d, %a, %b;",
        "f32 f32 -> f32",
        [(x, x, 1.0 + 3 * ULP), (-x, x, -1.0 - 2 * ULP), (2.0**-100, 2.0**-100, TINY), (-0.0, 1.0, -0.0)],
    )
    check(
        "mul.rm.f32 %d, %a, %b;",
        "f32 f32 -> f32",
        [(x, x, 1.0 + 2 * ULP), (-x, x, -1.0 - 3 * ULP), (2.0**-100, 2.0**-100, 0.0), (0.0, 1.0, 0.0)],
    )
    check(
        "fma.rz.f32 %d, %a, %b, %c;",
        "f32 f32 f32 -> f32",
        [(x, x, -1.0, 2 * ULP), (x, x, 0.0, 1.0 + 2 * ULP)],
    )
    check(
        "fma.rp.f32 %d, %a, %b, %c;",
        "f32 f32 f32 -> f32",
        [(x, x, 0.0, 1.0 + 3 * ULP), (2.0**-100, 2.0**-100, 1.0, x)],
    )
    check("fma.rm.f32 %d, %a, %b, %c;", "f32 f32 f32 -> f32", [(-(2.0**-100), 2.0**-100, 1.0, 1.0 - ULP / 2)])
    check("mad.rp.f32 %d, %a, %b, %c;", "f32 f32 f32 -> f32", [(2.0**-100, 2.0**-100, 1.0, x)])


def test_fma_rounds_once() -> None:
    x = 1.0 + 2.0**-12  # x * x = 1 + 2^-11 + 2^-24: an FP32 product loses the last term
    rows = [(x, x, -1.0 - 2.0**-11, 2.0**-24), (2.0, 3.0, 4.0, 10.0), (INF, 0.0, 1.0, NAN), (-0.0, 1.0, -0.0,
    -0.0), (-0.0, 1.0, 0.0, 0.0),
            (1.0 + ULP, 1.0 - ULP / 2, -1.0, ULP / 2 - ULP**2 / 2)]  # fmt: skip
    check("fma.rn.f32 %d, %a, %b, %c;", "f32 f32 f32 -> f32", rows)
    check("mad.rn.f32 %d, %a, %b, %c;", "f32 f32 f32 -> f32", rows)
    y = 1.0 + 2.0**-27
    check("fma.rn.f64 %d, %a, %b, %c;", "f64 f64 f64 -> f64", [(y, y, -1.0 - 2.0**-26, 2.0**-54)])
    check("mad.rn.f64 %d, %a, %b, %c;", "f64 f64 f64 -> f64", [(y, y, -1.0 - 2.0**-26, 2.0**-54)])


def test_division() -> None:
    third = 0x3EAAAAAB
    rows = [
        (1.0, 3.0, third),
        (1.0, 0.0, INF),
        (-1.0, 0.0, -INF),
        (0.0, 0.0, NAN),
        (INF, INF, NAN),
        (6.0, -2.0, -3.0),
        (1.0, INF, 0.0),
    ]
    check("div.rn.f32 %d, %a, %b;", "f32 f32 -> f32", rows)
    check("div.full.f32 %d, %a, %b;", "f32 f32 -> f32", [(6.0, -2.0, -3.0), (1.0, 0.0, INF), (0.0, 0.0, NAN)])
    check(
        "div.approx.f32 %d, %a, %b;", "f32 f32 -> f32", [(6.0, -2.0, -3.0), (1.0, 0.0, INF), (0.0, 0.0, NAN)]
    )
    check(
        "div.rz.f32 %d, %a, %b;",
        "f32 f32 -> f32",
        [(1.0, 3.0, third - 1), (-1.0, 3.0, third - 1 + 2**31), (6.0, 2.0, 3.0)],
    )
    check(
        "div.rm.f32 %d, %a, %b;",
        "f32 f32 -> f32",
        [(1.0, 3.0, third - 1), (-1.0, 3.0, third + 2**31), (1.0, -3.0, third + 2**31)],
    )
    check(
        "div.rp.f32 %d, %a, %b;",
        "f32 f32 -> f32",
        [(1.0, 3.0, third), (-1.0, 3.0, third - 1 + 2**31), (2.0, 3.0, 0x3F2AAAAB)],
    )
    check("div.rn.f64 %d, %a, %b;", "f64 f64 -> f64", [(1.0, 3.0, 1.0 / 3.0), (-1.0, 0.0, -INF)])


def test_division_overflow_and_underflow() -> None:
    large, small = 2.0**127, 2.0**-126
    check(
        "div.rn.f32 %d, %a, %b;",
        "f32 f32 -> f32",
        [(large, small, INF), (small, large, 0.0), (small, 2.0**23, TINY)],
    )
    check("div.rz.f32 %d, %a, %b;", "f32 f32 -> f32", [(large, small, 0x7F7FFFFF), (1.0, 0.0, INF)])
    check("div.rp.f32 %d, %a, %b;", "f32 f32 -> f32", [(small, large, TINY), (-small, large, -0.0)])
    check(
        "div.rn.ftz.f32 %d, %a, %b;",
        "f32 f32 -> f32",
        [(small, 2.0, 0.0), (TINY, 1.0, 0.0), (1.0, TINY, INF)],
    )


def test_reciprocal_and_roots() -> None:
    rows = [(4.0, 0.25), (-0.0, -INF), (INF, 0.0), (-INF, -0.0), (QNAN, NAN), (TINY, INF)]
    check("rcp.rn.f32 %d, %a;", "f32 -> f32", [*rows, (3.0, 0x3EAAAAAB), (2.0**127, 2.0**-127)])
    check(
        "rcp.approx.ftz.f32 %d, %a;",
        "f32 -> f32",
        [(4.0, 0.25), (TINY, INF), (0x80000001, -INF), (2.0**127, 0.0)],
    )
    check("rcp.rz.f32 %d, %a;", "f32 -> f32", [(3.0, 0x3EAAAAAA), (2.0, 0.5), (0.0, INF)])
    check("rcp.rp.f32 %d, %a;", "f32 -> f32", [(3.0, 0x3EAAAAAB), (-3.0, 0xBEAAAAAA)])
    check("rcp.rm.f32 %d, %a;", "f32 -> f32", [(3.0, 0x3EAAAAAA), (-3.0, 0xBEAAAAAB)])
    check("rcp.rn.f64 %d, %a;", "f64 -> f64", [(4.0, 0.25), (3.0, 1.0 / 3.0), (0.0, INF)])
    rows = [(4.0, 2.0), (-0.0, -0.0), (INF, INF), (-1.0, NAN), (2.0, 0x3FB504F3), (TINY, 0x1A3504F3)]
    check("sqrt.rn.f32 %d, %a;", "f32 -> f32", rows)
    check(
        "sqrt.rz.f32 %d, %a;", "f32 -> f32", [(2.0, 0x3FB504F3), (3.0, 0x3FDDB3D7), (4.0, 2.0)]
    )  # sqrt(3) = 1.73205080756.., 0x3FDDB3D7 = 1.732050776..
    check("sqrt.rp.f32 %d, %a;", "f32 -> f32", [(2.0, 0x3FB504F4), (3.0, 0x3FDDB3D8), (4.0, 2.0), (INF, INF)])
    check("sqrt.rm.f32 %d, %a;", "f32 -> f32", [(2.0, 0x3FB504F3), (-0.0, -0.0)])
    check("sqrt.approx.f32 %d, %a;", "f32 -> f32", [(4.0, 2.0), (-0.0, -0.0), (INF, INF), (-1.0, NAN)])
    check("sqrt.rn.f64 %d, %a;", "f64 -> f64", [(2.0, math.sqrt(2.0)), (-0.0, -0.0)])
    check(
        "rsqrt.approx.f32 %d, %a;",
        "f32 -> f32",
        [(4.0, 0.5), (0.0, INF), (-0.0, -INF), (INF, 0.0), (-1.0, NAN)],
    )
    check("rsqrt.approx.f64 %d, %a;", "f64 -> f64", [(4.0, 0.5), (0.0, INF), (INF, 0.0)])


def test_exponential_and_logarithm() -> None:
    rows = [
        (0.0, 1.0),
        (-0.0, 1.0),
        (10.0, 1024.0),
        (-1.0, 0.5),
        (128.0, INF),
        (-INF, 0.0),
        (INF, INF),
        (QNAN, NAN),
        (-149.0, TINY),
        (-151.0, 0.0),
        (TINY, 1.0),
    ]
    check("ex2.approx.f32 %d, %a;", "f32 -> f32", rows)
    check(
        "ex2.approx.ftz.f32 %d, %a;",
        "f32 -> f32",
        [(-126.0, 2.0**-126), (-127.0, 0.0), (TINY, 1.0), (3.0, 8.0)],
    )
    rows = [
        (1.0, 0.0),
        (8.0, 3.0),
        (0.5, -1.0),
        (0.0, -INF),
        (-0.0, -INF),
        (INF, INF),
        (-1.0, NAN),
        (QNAN, NAN),
        (TINY, -149.0),
    ]
    check("lg2.approx.f32 %d, %a;", "f32 -> f32", rows)
    check("lg2.approx.ftz.f32 %d, %a;", "f32 -> f32", [(TINY, -INF), (0x80000001, -INF), (2.0, 1.0)])
    check("ex2.approx.f16 %d, %a;", "f16 -> f16", [(3.0, 8.0), (-INF, 0.0), (NAN16, NAN16), (16.0, INF)])
    check("ex2.approx.f16x2 %d, %a;", "f16x2 -> f16x2", [(0x3C00_4000, 0x4000_4400)])  # (2, 1) -> (4, 2)
    check("ex2.approx.ftz.bf16 %d, %a;", "bf16 -> bf16", [(3.0, 8.0), (-INF, 0.0)])


def test_trigonometry_and_tanh() -> None:
    check("sin.approx.f32 %d, %a;", "f32 -> f32", [(0.0, 0.0), (-0.0, -0.0), (INF, NAN), (QNAN, NAN)])
    check("cos.approx.f32 %d, %a;", "f32 -> f32", [(0.0, 1.0), (-INF, NAN)])
    check("sin.approx.ftz.f32 %d, %a;", "f32 -> f32", [(0x80000001, -0.0)])
    check(
        "tanh.approx.f32 %d, %a;",
        "f32 -> f32",
        [(0.0, 0.0), (-0.0, -0.0), (INF, 1.0), (-INF, -1.0), (QNAN, NAN)],
    )
    check("tanh.approx.bf16x2 %d, %a;", "bf16x2 -> bf16x2", [(0x7F80_FF80, 0x3F80_BF80)])
    angles = np.linspace(-3.0, 3.0, 64, dtype=np.float32)
    for op, function in (("sin", np.sin), ("cos", np.cos), ("tanh", np.tanh)):
        (got,) = evaluate(f"{op}.approx.f32 %d, %a;", "f32 -> f32", [(float(x),) for x in angles])
        np.testing.assert_allclose(got.view(np.float32), function(angles.astype(np.float64)), atol=2.0**-20)


def test_minimum_and_maximum_of_floats() -> None:
    rows = [
        (1.0, 2.0, 1.0),
        (QNAN, 2.0, 2.0),
        (2.0, QNAN, 2.0),
        (QNAN, QNAN, NAN),
        (0.0, -0.0, -0.0),
        (-0.0, 0.0, -0.0),
        (-INF, 1.0, -INF),
    ]
    check("min.f32 %d, %a, %b;", "f32 f32 -> f32", rows)
    rows = [
        (1.0, 2.0, 2.0),
        (QNAN, 2.0, 2.0),
        (2.0, QNAN, 2.0),
        (QNAN, QNAN, NAN),
        (0.0, -0.0, 0.0),
        (-0.0, 0.0, 0.0),
    ]
    check("max.f32 %d, %a, %b;", "f32 f32 -> f32", rows)
    rows = [(1.0, 2.0, 1.0), (QNAN, 2.0, NAN), (2.0, 0xFFC12345, NAN), (-0.0, 0.0, -0.0)]
    check("min.NaN.f32 %d, %a, %b;", "f32 f32 -> f32", rows)
    check("max.NaN.f32 %d, %a, %b;", "f32 f32 -> f32", [(1.0, 2.0, 2.0), (QNAN, 2.0, NAN), (-0.0, 0.0, 0.0)])
    rows = [(-1.0, 2.0, -1.0), (-1.0, -2.0, 1.0), (3.0, -2.0, -2.0)]
    check("min.xorsign.abs.f32 %d, %a, %b;", "f32 f32 -> f32", rows)
    check("max.xorsign.abs.f32 %d, %a, %b;", "f32 f32 -> f32", [(-1.0, 2.0, -2.0), (-1.0, -2.0, 2.0)])
    check(
        "min.f64 %d, %a, %b;",
        "f64 f64 -> f64",
        [(1.0, 2.0, 1.0), (0x7FF8000000000000, 2.0, 2.0), (0.0, -0.0, -0.0)],
    )
    check(
        "max.bf16 %d, %a, %b;", "bf16 bf16 -> bf16", [(1.0, 2.0, 2.0), (NAN16, -1.0, -1.0), (-0.0, 0.0, 0.0)]
    )
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


def test_nans_where_the_manual_leaves_them_open() -> None:
    """An H200's answers."""
    quiet, signalling = 0x7FC12345, 0xFF812345
    check("neg.f32 %d, %a;", "f32 -> f32", [(quiet, NAN), (signalling, NAN)])
    check("abs.f32 %d, %a;", "f32 -> f32", [(signalling, NAN)])
    check("abs.ftz.f32 %d, %a;", "f32 -> f32", [(signalling, NAN)])
    check("neg.f16 %d, %a;", "f16 -> f16", [(0x7E01, NAN16)])
    check("abs.bf16 %d, %a;", "bf16 -> bf16", [(0xFFC1, NAN16)])
    check("add.f64 %d, %a, %b;", "f64 f64 -> f64", [(INF, -INF, 0xFFF8000000000000)])
    check(
        "min.f64 %d, %a, %b;",
        "f64 f64 -> f64",
        [(0x7FF8000000000001, 0x7FF8000000000001, 0x7FF8000000000001)],
    )


def test_results_that_round_up_to_the_smallest_normal_number() -> None:
    """2^-126 (1 - 2^-24) rounds to 2^-126 in subnormal steps, but has 24 digits itself: an H200 flushes it.
    2^-126 (1 - 2^-25) rounds to 2^-126 with 24 digits too, and stays (IEEE 754, tininess after rounding)."""
    check("mul.f32 %d, %a, %b;", "f32 f32 -> f32", [(1.0 - 2.0**-24, 2.0**-126, 2.0**-126)])
    check(
        "mul.ftz.f32 %d, %a, %b;",
        "f32 f32 -> f32",
        [(1.0 - 2.0**-24, 2.0**-126, 0.0), (-1.0 + 2.0**-24, 2.0**-126, -0.0), (1.0, 2.0**-126, 2.0**-126)],
    )
    check(
        "fma.rn.ftz.f32 %d, %a, %b, %c;",
        "f32 f32 f32 -> f32",
        [
            (1.0 - 2.0**-24, 2.0**-126, 0.0, 0.0),
            (2.0**-100, -(2.0**-100), 2.0**-126, 2.0**-126),
            (-(2.0**-75), 2.0**-75, 2.0**-126, 0.0),
            (-(2.0**-76), 2.0**-75, 2.0**-126, 2.0**-126),
            (-(2.0**-76), 2.0**-75 + 2.0**-98, 2.0**-126, 0.0),
            (2.0**-100, 2.0**-100, 2.0**-126, 2.0**-126),
        ],
    )
    check(
        "mul.ftz.f16 %d, %a, %b;",
        "f16 f16 -> f16",
        [(1.0 - 2.0**-11, 2.0**-14, 0.0), (1.0, 2.0**-14, 2.0**-14)],
    )
    check(
        "fma.rn.ftz.f16 %d, %a, %b, %c;",
        "f16 f16 f16 -> f16",
        [
            (1.0 - 2.0**-11, 2.0**-14, 0.0, 0.0),
            (-(2.0**-13), 2.0**-13, 2.0**-14, 2.0**-14),
            (-(2.0**-13), 2.0**-12, 2.0**-14, 0.0),
        ],
    )
    check(
        "fma.rp.ftz.f32 %d, %a, %b, %c;",
        "f32 f32 f32 -> f32",
        [
            (-(2.0**-100), 2.0**-100, 2.0**-126, 2.0**-126),
            (-(2.0**-75), 2.0**-75, 2.0**-126, 0.0),
            (-(2.0**-76), 2.0**-75, 2.0**-126, 2.0**-126),
        ],
    )
    check(
        "fma.rm.ftz.f32 %d, %a, %b, %c;",
        "f32 f32 f32 -> f32",
        [(-(2.0**-100), 2.0**-100, 2.0**-126, 0.0), (2.0**-100, 2.0**-100, -(2.0**-126), -(2.0**-126))],
    )
    check(
        "mul.rp.ftz.f32 %d, %a, %b;",
        "f32 f32 -> f32",
        [(1.0 - 2.0**-23, 2.0**-126, 0.0), (1.0 - 2.0**-24, 2.0**-126, 0.0)],
    )
    check("div.rn.ftz.f32 %d, %a, %b;", "f32 f32 -> f32", [(2.0**-126, 1.0 + ULP, 0.0)])


def test_approximate_division_by_large_numbers() -> None:
    """For 2^126 < |b| < 2^128 the manual gives 0, or NaN if a is infinite."""
    large = 1.5 * 2.0**126
    check(
        "div.approx.f32 %d, %a, %b;",
        "f32 f32 -> f32",
        [
            (2.0**100, large, 0.0),
            (INF, large, NAN),
            (2.0**100, 2.0**126, 2.0**-26),
            (-(2.0**100), large, -0.0),
            (2.0**100, INF, 0.0),
        ],
    )
    check("div.approx.ftz.f32 %d, %a, %b;", "f32 f32 -> f32", [(2.0**100, large, 0.0), (INF, large, NAN)])
    check(
        "div.full.f32 %d, %a, %b;", "f32 f32 -> f32", [(1.5 * 2.0**100, large, 2.0**-26), (INF, large, INF)]
    )


# -- F16 and BF16 -----------------------------------------------------------------------------------


def test_half_precision_arithmetic() -> None:
    check(
        "add.f16 %d, %a, %b;",
        "f16 f16 -> f16",
        [
            (1.0, 2.0**-11, 1.0),
            (1.0 + 2.0**-10, 2.0**-11, 1.0 + 2.0**-9),
            (65504.0, 16.0, INF),
            (65504.0, 15.0, 65504.0),
            (INF, -INF, NAN16),
        ],
    )
    check("sub.f16 %d, %a, %b;", "f16 f16 -> f16", [(1.0, 1.0, 0.0), (2.0**-24, 2.0**-23, -(2.0**-24))])
    check(
        "mul.f16 %d, %a, %b;",
        "f16 f16 -> f16",
        [(2.0**-12, 2.0**-12, 2.0**-24), (2.0**-12, 2.0**-13, 0.0), (256.0, 256.0, INF)],
    )
    check(
        "add.bf16 %d, %a, %b;",
        "bf16 bf16 -> bf16",
        [(1.0, 2.0**-8, 1.0), (1.0 + 2.0**-7, 2.0**-8, 1.0 + 2.0**-6), (INF, -INF, NAN16)],
    )
    check("sub.rn.bf16 %d, %a, %b;", "bf16 bf16 -> bf16", [(3.0, 5.0, -2.0)])
    check(
        "mul.bf16 %d, %a, %b;",
        "bf16 bf16 -> bf16",
        [(1.5, -3.0, -4.5), (2.0**-100, 2.0**-33, 2.0**-133), (-0.0, 1.0, -0.0)],
    )
    check("add.rn.f16x2 %d, %a, %b;", "f16x2 f16x2 -> f16x2", [(0x3C00_4000, 0x4000_C000, 0x4200_0000)])
    check("mul.bf16x2 %d, %a, %b;", "bf16x2 bf16x2 -> bf16x2", [(0x4000_3F80, 0x4040_BF80, 0x40C0_BF80)])


def test_half_precision_fma_rounds_once() -> None:
    check(
        "fma.rn.f16 %d, %a, %b, %c;",
        "f16 f16 f16 -> f16",
        [(2.0, 3.0, 4.0, 10.0), (65504.0, 2.0, -65504.0, 65504.0)],
    )
    # 9 * 29 = 261 = 256 + 5 lies midway between BF16 numbers 260 (even) and 262; an addend far below decides.
    rows = [
        (9.0, 29.0, 0.0, 260.0),
        (9.0, 29.0, 2.0**-20, 262.0),
        (9.0, 29.0, 2.0**-60, 262.0),
        (9.0, 29.0, 2.0**-133, 262.0),
        (9.0, 29.0, -(2.0**-133), 260.0),
        (-9.0, 29.0, -(2.0**-60), -262.0),
    ]
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
    check(
        "fma.rn.relu.f16x2 %d, %a, %b, %c;",
        "f16x2 f16x2 f16x2 -> f16x2",
        [(0x3C00_BC00, 0x4000_4000, 0x3C00_3C00, 0x4200_0000)],
    )
    check(
        "fma.rn.bf16x2 %d, %a, %b, %c;",
        "bf16x2 bf16x2 bf16x2 -> bf16x2",
        [(0x4000_4040, 0x4000_4000, 0x3F80_BF80, 0x40A0_40A0)],
    )


def test_pairs_of_fp32() -> None:
    one, two, three = (bits_of(x, "f32") for x in (1.0, 2.0, 3.0))
    pair = lambda high, low: high << 32 | low  # noqa: E731
    options = {"target": "sm_100a"}
    check(
        "add.rn.f32x2 %d, %a, %b;",
        "b64 b64 -> b64",
        [(pair(one, two), pair(two, one), pair(three, three))],
        **options,
    )
    row = (pair(two, one), pair(one, one), pair(one, two), pair(three, three))
    check("fma.rn.f32x2 %d, %a, %b, %c;", "b64 b64 b64 -> b64", [row], **options)
    tiny = bits_of(2.0**-30, "f32")
    toward_zero = (pair(one, one), pair(tiny, one), pair(one, two))
    check("add.rz.f32x2 %d, %a, %b;", "b64 b64 -> b64", [toward_zero], **options)


# -- random patterns against exact arithmetic ---------------------------------------------------

RANDOM = np.random.default_rng(1)


def words(count: int = 200) -> list[int]:
    return [int(x) for x in RANDOM.integers(0, 2**32, count, dtype=np.uint64)]


def fp32(pattern: int) -> Fraction | None:
    """The value of a finite FP32 pattern."""
    exponent, fraction = pattern >> 23 & 0xFF, pattern & 0x7FFFFF
    if exponent == 0xFF:
        return None
    size = (
        Fraction(fraction, 2**149)
        if exponent == 0
        else Fraction(fraction + 2**23, 2**23) * Fraction(2) ** (exponent - 127)
    )
    return -size if pattern >> 31 else size


def test_random_fma_in_every_rounding_mode() -> None:
    """The result is a neighbour of the exact value, on the side that the mode names."""
    rows = [(a, b, c) for a, b, c in zip(words(400), words(400), words(400), strict=True)]
    results = {
        mode: evaluate(f"fma.{mode}.f32 %d, %a, %b, %c;", "f32 f32 f32 -> f32", rows)[0].tolist()
        for mode in ("rn", "rz", "rm", "rp")
    }
    checked = 0
    for i, row in enumerate(rows):
        a, b, c = (fp32(x) for x in row)
        down, up, near, zero = (fp32(results[mode][i]) for mode in ("rm", "rp", "rn", "rz"))
        if None in (a, b, c, down, up):
            continue
        assert a is not None and b is not None and c is not None and down is not None and up is not None
        exact = Fraction(a * b + c)
        assert down <= exact <= up
        assert near in (down, up) and zero == (down if exact > 0 else up)
        assert near is not None and abs(near - exact) == min(exact - down, up - exact)
        if down != up:
            low, high = (results[mode][i] for mode in ("rm", "rp"))
            assert abs((low & 0x7FFFFFFF) - (high & 0x7FFFFFFF)) == 1 or {
                low & 0x7FFFFFFF,
                high & 0x7FFFFFFF,
            } <= {0, 1}
        checked += 1
    assert checked > 200


# -- what must be refused ---------------------------------------------------------------------------

REFUSED = """
add.ftz.f64 %fd0, %fd1, %fd2;
add.sat.f64 %fd0, %fd1, %fd2;
add.rz.f64 %fd0, %fd1, %fd2;
add.rz.f16 %h0, %h1, %h2;
add.ftz.bf16 %h0, %h1, %h2;
add.sat.bf16 %h0, %h1, %h2;
add.s32.f32 %r0, %r1, %r2;
mul.lo.f32 %f0, %f1, %f2;
mad.f32 %f0, %f1, %f2, %f3;
mad.rn.f16 %h0, %h1, %h2, %h3;
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
abs.ftz.f64 %fd0, %fd1;
neg.ftz.bf16 %h0, %h1;
min.NaN.f64 %fd0, %fd1, %fd2;
min.NaN.f32 %f0, %f1, %f2, %f3;
max.xorsign.f32 %f0, %f1, %f2;
max.ftz.bf16 %h0, %h1, %h2;
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
sad.f32 %f0, %f1, %f2, %f3;
""".strip().splitlines()


@pytest.mark.parametrize("line", REFUSED)
def test_what_is_not_modelled_or_not_ptx_is_refused(line: str) -> None:
    refused(line)


@pytest.mark.parametrize(
    "line",
    [
        "neg.f32 %f0;",
        "fma.rn.f32 %f0, %f1, %f2;",
        "div.rn.f32 %f0, %f1;",
        "min.f32 %f0, %f1;",
        "ex2.approx.f32 %f0;",
    ],
)
def test_wrong_operand_counts_are_refused(line: str) -> None:
    refused(line, kind=vgpu.MalformedPTX)


def test_every_elementary_function_is_covered() -> None:
    assert set(MATH) == {"ex2", "lg2", "sqrt", "rsqrt", "rcp", "sin", "cos", "tanh"}
