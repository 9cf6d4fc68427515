"""Floating-point arithmetic: rounding modes, flush to zero, saturation, NaNs; and the approximate functions."""

from __future__ import annotations

from itertools import product

import numpy as np

from .case import Array, Case
from .columns import register_case, simple
from .operands import cancelling, every_half, seed_of, table
from .tolerance import Tolerance

ROUNDING = (".rn", ".rz", ".rm", ".rp")
HALVES = ("f16", "f16x2", "bf16", "bf16x2")


def cases() -> list[Case]:
    return [*sums(), *fused(), *signs_and_extremes(), *exact_quotients(), *approximations()]


def modifiers(kind: str) -> list[str]:
    """What stands between opcode and type in add, sub and mul."""
    if kind == "f32":
        return ["".join(parts) for parts in product(("", *ROUNDING), ("", ".ftz"), ("", ".sat"))]
    if kind.startswith("f16"):
        return ["".join(parts) for parts in product(("", ".rn"), ("", ".ftz"), ("", ".sat"))]
    return ["", ".rn"]


def sums() -> list[Case]:
    family, found = "float add, sub, mul", []
    for kind, op in product(("f32", "f64", *HALVES), ("add", "sub", "mul")):
        # Without a rounding qualifier the compiler may fuse; only the explicit forms say what is computed.
        columns = simple([f"{op}{mod}.{kind}" for mod in modifiers(kind) if ".r" in mod], 2, kind)
        found.append(register_case(f"{op} {kind}", family, (kind, kind), columns))
    return found


def fused(family: str = "float fma") -> list[Case]:
    found = []
    for kind in ("f32", "f64", *HALVES):
        if kind == "f32":
            mods = [mod for mod in modifiers(kind) if ".r" in mod]
        elif kind.startswith("f16"):
            mods = [".rn", ".rn.ftz", ".rn.sat", ".rn.ftz.sat", ".rn.relu", ".rn.ftz.relu"]
        else:
            mods = [".rn"] if kind == "f64" else [".rn", ".rn.relu"]
        names = [f"fma{mod}.{kind}" for mod in mods] + (
            ["mad.rn.f32", "mad.rz.ftz.f32"] if kind == "f32" else []
        )
        columns = simple(names, 3, kind)
        found.append(register_case(f"fma {kind}", family, (kind,) * 3, columns))
        if kind in ("f32", "f64", "f16", "bf16"):
            triples = cancelling(kind)
            found.append(
                register_case(f"fma {kind}, cancelling", family, (kind,) * 3, columns, operands=triples)
            )
    return found


def signs_and_extremes() -> list[Case]:
    family, found = "float sign, min, max", []
    for kind in ("f32", "f64", *HALVES):
        ftz = ("", ".ftz") if kind in ("f32", "f16", "f16x2") else ("",)
        extremes = [f"{op}{f}.{kind}" for op in ("min", "max") for f in ftz]
        if kind != "f64":
            extremes = [
                f"{op}{f}{nan}{xor}.{kind}"
                for op, f, nan, xor in product(("min", "max"), ftz, ("", ".NaN"), ("", ".xorsign.abs"))
            ]
        found.append(register_case(f"min, max {kind}", family, (kind, kind), simple(extremes, 2, kind)))
        one = simple([f"{op}{f}.{kind}" for op in ("neg", "abs") for f in ftz], 1, kind)
        found.append(register_case(f"neg, abs {kind}", family, (kind,), one))
    for kind in ("f32", "f64"):
        found.append(
            register_case(f"copysign {kind}", family, (kind, kind), simple([f"copysign.{kind}"], 2, kind))
        )
        tests = ("finite", "infinite", "number", "notanumber", "normal", "subnormal")
        columns = simple([f"testp.{name}.{kind}" for name in tests], 1, "pred")
        found.append(register_case(f"testp {kind}", family, (kind,), columns))
    return found


def exact_quotients() -> list[Case]:
    family, found = "float quotients and roots", []
    ftz = ("", ".ftz")
    quotients = simple([f"div{mode}{f}.f32" for mode, f in product(ROUNDING, ftz)], 2, "f32")
    found.append(register_case("div f32", family, ("f32", "f32"), quotients))
    found.append(register_case("div f64", family, ("f64", "f64"), simple(["div.rn.f64"], 2, "f64")))
    for op in ("rcp", "sqrt"):
        columns = simple([f"{op}{mode}{f}.f32" for mode, f in product(ROUNDING, ftz)], 1, "f32")
        found.append(register_case(f"{op} f32", family, ("f32",), columns))
        found.append(register_case(f"{op} f64", family, ("f64",), simple([f"{op}.rn.f64"], 1, "f64")))
    return found


# -- approximations --------------------------------------------------------------------------------

MANUAL = 'PTX ISA, "Floating Point Instructions: {}"'
HALF_MANUAL = 'PTX ISA, "Half Precision Floating Point Instructions: {}"'


def approximations() -> list[Case]:
    """Only where the manual's bound holds; infinities, zeros and NaNs among the operands are exact."""
    family, found = "approximate functions", []
    general, angles, exponents = table(("f32",)), (angle_operands(),), (exponent_operands(),)
    bounds: dict[str, tuple[tuple[Array, ...], Tolerance]] = {
        "rcp": (general, Tolerance("f32", MANUAL.format("rcp"), ulps=1)),
        "sqrt": (general, Tolerance("f32", MANUAL.format("sqrt"), relative=2.0**-23)),
        "rsqrt": (general, Tolerance("f32", MANUAL.format("rsqrt"), relative=2.0**-22.9)),
        "ex2": (exponents, Tolerance("f32", MANUAL.format("ex2"), ulps=2)),
        "lg2": (general, Tolerance("f32", MANUAL.format("lg2"), absolute=2.0**-22, relative=2.0**-22)),
        "sin": (angles, Tolerance("f32", MANUAL.format("sin"), absolute=2.0**-20.5)),
        "cos": (angles, Tolerance("f32", MANUAL.format("cos"), absolute=2.0**-20.5)),
        "tanh": (general, Tolerance("f32", MANUAL.format("tanh"), relative=2.0**-11)),
    }
    for op, (operands, tolerance) in bounds.items():
        for ftz in ("",) if op == "tanh" else ("", ".ftz"):
            columns = simple([f"{op}.approx{ftz}.f32"], 1, "f32")
            name = f"{op}.approx{ftz} f32"
            found.append(
                register_case(name, family, ("f32",), columns, operands=operands, tolerance=tolerance)
            )
    found += half_approximations(family)
    quotient = Tolerance("f32", MANUAL.format("div"), ulps=2)
    for name in ("div.approx.f32", "div.approx.ftz.f32", "div.full.f32", "div.full.ftz.f32"):
        columns = simple([name], 2, "f32")
        found.append(register_case(name, family, ("f32", "f32"), columns, tolerance=quotient))
    return found


def half_approximations(family: str) -> list[Case]:
    found = []
    for op, kind, ftz, bound in (
        ("ex2", "f16", "", {"relative": 2.0**-9.9}), ("ex2", "bf16", ".ftz", {"relative": 2.0**-7}),
        ("tanh", "f16", "", {"absolute": 2.0**-10.987}), ("tanh", "bf16", "", {"absolute": 2.0**-8}),
    ):  # fmt: skip
        tolerance = Tolerance(kind, HALF_MANUAL.format(op), **bound)
        one = simple([f"{op}.approx{ftz}.{kind}"], 1, kind)
        two = simple([f"{op}.approx{ftz}.{kind}x2"], 1, f"{kind}x2")
        every = every_half()
        found.append(
            register_case(f"{op}.approx {kind}", family, (kind,), one, operands=every, tolerance=tolerance)
        )
        found.append(register_case(f"{op}.approx {kind}x2", family, (f"{kind}x2",), two, tolerance=tolerance))
    return found


def angle_operands() -> Array:
    """-2 pi to 2 pi, where the manual bounds the error of sin and cos, and values without an angle."""
    rng = np.random.default_rng(seed_of("angles"))
    values = np.concatenate(
        [
            np.array(
                [0.0, -0.0, np.inf, -np.inf, np.nan, np.pi, -np.pi, np.pi / 2, 2.0**-126, 2.0**-149, 2.0**-20]
            ),
            rng.uniform(-2 * np.pi, 2 * np.pi, 1013),
        ]
    )
    return values.astype(np.float32).view(np.uint32)


def exponent_operands() -> Array:
    """-151 to 129: from below the least subnormal result to overflow."""
    rng = np.random.default_rng(seed_of("exponents"))
    whole = np.arange(-151.0, 130.0)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e30, -1e30, 2.0**-126, 2.0**-149, 2.0**-24])
    rest = rng.uniform(-151, 129, 2048 - whole.size - special.size)
    return np.concatenate([whole, special, rest]).astype(np.float32).view(np.uint32)
