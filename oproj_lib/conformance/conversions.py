"""cvt in every form that both the virtual GPU and ptxas accept for sm_90a."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from .case import Case
from .columns import Column, register_case
from .operands import every_half

INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
FLOATS = ("f16", "bf16", "f32", "f64")
RANK = {"f16": 0, "bf16": 0, "f32": 1, "f64": 2}
ROUNDING = ("rn", "rz", "rm", "rp")
INTEGER_ROUNDING = ("rni", "rzi", "rmi", "rpi")
FAMILY = "conversions"


def cases() -> list[Case]:
    return [*from_integers(), *from_floats(), *every_pattern(), *narrow_formats()]


def forms(modes: Iterable[str], *, ftz: bool, sat: bool) -> list[str]:
    """Every combination of a rounding mode ("" for none) with the flags that are allowed."""
    flags = product(modes, ("", "ftz") if ftz else ("",), ("", "sat") if sat else ("",))
    return [".".join(part for part in parts if part) for parts in flags]


def columns(source: str, result: str, qualifiers: Iterable[str], register: str | None = None) -> list[Column]:
    names = [f"cvt.{mods}{'.' if mods else ''}{result}.{source}" for mods in qualifiers]
    return [Column(f"{name} {{d}}, %a;", (register or result,)) for name in names]


def may_exceed(source: str, result: str) -> bool:
    """Whether `result` lacks some value of `source`; only then does cvt take .sat."""
    signs_fit = source[0] == "u" or result[0] == "s"
    wider = int(result[1:]) > int(source[1:])
    return not signs_fit or not (wider or source == result)


def from_integers() -> list[Case]:
    found = []
    for source in INTEGERS:
        between = [
            c for r in INTEGERS for c in columns(source, r, forms([""], ftz=False, sat=may_exceed(source, r)))
        ]
        found.append(register_case(f"cvt {source} to integers", FAMILY, (source,), between))
        # Directed rounding of 64-bit integers is not modelled; ptxas converts BF16 and
        # bytes only in 8-bit registers, which these kernels do not use.
        modes = ROUNDING if source[1:] != "64" else ("rn",)
        to_floats = [
            column
            for result in FLOATS if result != "bf16" or source[1:] != "8"
            for column in columns(source, result, forms(modes, ftz=result == "f32", sat=result != "bf16"))
        ]  # fmt: skip
        found.append(register_case(f"cvt {source} to floats", FAMILY, (source,), to_floats))
    return found


def from_floats() -> list[Case]:
    found = []
    for source in FLOATS:
        for mode in INTEGER_ROUNDING:
            qualifiers = forms([mode], ftz=source == "f32", sat=source != "bf16")
            to_integers = [
                column
                for result in INTEGERS if source != "bf16" or result[1:] != "8"
                for column in columns(source, result, qualifiers)
            ]  # fmt: skip
            found.append(register_case(f"cvt.{mode} {source} to integers", FAMILY, (source,), to_integers))
        for result in FLOATS:
            between = columns(source, result, qualifiers_between(source, result))
            found.append(register_case(f"cvt {source} to {result}", FAMILY, (source,), between))
    return found


def qualifiers_between(source: str, result: str) -> list[str]:
    ftz, sat = "f32" in (source, result), "bf16" not in (source, result)
    if source == result:
        modes: tuple[str, ...] = ("", *INTEGER_ROUNDING)
    elif RANK[result] > RANK[source]:
        modes = ("", *ROUNDING) if source == "bf16" else ("",)
    else:
        modes = ROUNDING
    relu = ["rn.relu", "rz.relu"] if source == "f32" and RANK[result] == 0 else []
    return [*forms(modes, ftz=ftz, sat=sat), *relu]


def every_pattern() -> list[Case]:
    """All 65,536 operands of 16 bits, with the usual conversions."""
    found = []
    for source, other in (("f16", "bf16"), ("bf16", "f16")):
        usual = [
            *columns(source, "f32", [""]), *columns(source, other, ["rn", "rz"]),
            *columns(source, "s32", ["rni", "rzi"]), *columns(source, "u16", ["rzi"]),
        ]  # fmt: skip
        found.append(register_case(f"cvt of every {source}", FAMILY, (source,), usual, operands=every_half()))
    return found


def narrow_formats() -> list[Case]:
    tf32 = columns("f32", "tf32", ("rna", "rn", "rz", "rn.relu", "rz.relu"), "b32")
    found = [register_case("cvt f32 to tf32", FAMILY, ("f32",), tf32)]
    for kind in ("f16x2", "bf16x2"):
        names = [f"cvt.{mods}.{kind}.f32" for mods in ("rn", "rz", "rn.relu", "rz.relu")]
        pairs = [Column(f"{name} {{d}}, %a, %b;", (kind,)) for name in names]
        found.append(register_case(f"cvt f32 to {kind}", FAMILY, ("f32", "f32"), pairs))
    return found
