"""BF16: the bits that rounding drops, where the neighbours are, and how large the error is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from oproj_lib import bf16
from oproj_lib.figures.style import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    ORANGE,
    PALE,
    PAPER,
    PURPLE,
    SKY,
    VERMILLION,
    Picture,
    bare,
    plain,
)
from oproj_lib.problem import TOLERANCE, Array
from oproj_lib.rank_sums import SchemeError

BINS_PER_BINADE = 16
FEWEST = 100  # outputs in a bin of which an average is shown


def bf16_rounding(value: float) -> Picture:
    """A number as FP32, the half that BF16 keeps, and the two BF16 between which it lies.

    Raises:
        ValueError: if it is not finite as FP32, or rounds to infinity.
    """
    number = np.array([value]).astype(np.float32)
    bits = int(bf16.round_to_bits(number)[0])
    if not np.isfinite(bf16.value_of(bits)):
        raise ValueError(f"value = {value}: it has no BF16 neighbours on both sides")
    word = int(number.view(np.uint32)[0])
    picture = Picture(11.0, 4.0)
    upper, lower = picture.subplots(2, 1, gridspec_kw={"height_ratios": [3, 2]})
    bare(upper, title=f"{float(number[0]):.9g} in FP32, and what BF16 keeps")
    for row, (name, source, width) in enumerate((("FP32", word, 32), ("BF16", bits, 16))):
        upper.text(-0.4, row * 1.7 + 0.5, name, ha="right", va="center", fontsize=10, color=INK)
        for i in range(width):
            kept = source >> (width - 1 - i) & 1
            colour = ORANGE if i == 0 else SKY if i < 9 else GREEN if i < 16 else PALE
            _bit(upper, i, row * 1.7, kept, colour)
    for at, text in ((0.5, "sign"), (5.0, "exponent"), (12.5, "fraction"), (24.0, "dropped by BF16")):
        upper.text(at, -0.35, text, ha="center", fontsize=8.5, color=INK)
    upper.set(xlim=(-2.5, 32.2), ylim=(2.9, -0.8))
    down = bf16.value_of(word >> 16)
    up = bf16.value_of((word >> 16) + 1)
    _neighbours(lower, float(number[0]), sorted((down, up)), bf16.value_of(bits))
    picture.alt = (
        f"The 32 bits of {float(number[0]):.9g}, {word:032b}: sign, 8 exponent bits, 7 fraction bits that BF16 "
        f"keeps, 16 that it drops. Below, the 16 bits after rounding, {bits:016b}. A number line from "
        f"{min(down, up):.9g} to {max(down, up):.9g}, the BF16 neighbours, with the middle marked: the number lies "
        f"{_share(float(number[0]), down, up):.0%} of the way from the one nearer to zero, and goes to "
        f"{bf16.value_of(bits):.9g}."
    )
    return picture


def _share(value: float, down: float, up: float) -> float:
    return abs(value - down) / abs(up - down)


def _bit(axes: Axes, x: float, y: float, bit: int, colour: str, size: float = 9) -> None:
    axes.add_patch(Rectangle((x, y), 1, 1, facecolor=colour, edgecolor=PAPER, lw=1.5))
    axes.text(x + 0.5, y + 0.52, str(bit), ha="center", va="center", fontsize=size, color=INK)


def _neighbours(axes: Axes, value: float, ends: list[float], chosen: float) -> None:
    bare(axes)
    low, high = ends
    place = (value - low) / (high - low)
    axes.plot([0, 1], [0, 0], color=MUTED, lw=1.5)
    axes.plot([0.5, 0.5], [-0.22, 0.22], color=MUTED, lw=1.2, ls=":")
    axes.text(0.5, 0.35, "the middle", ha="center", fontsize=8.5, color=MUTED)
    for at, end in zip((0, 1), ends, strict=True):
        axes.plot([at, at], [-0.3, 0.3], color=INK, lw=2)
        mark = "  (the result)" if end == chosen else ""
        axes.text(at, -0.75, f"{end:.9g}{mark}", ha="center", fontsize=9.5, color=INK)
    axes.plot([place], [0], "o", ms=8, color=VERMILLION)
    axes.annotate(
        "",
        (0 if chosen == low else 1, 0.18),
        (place, 0.18),
        arrowprops={"arrowstyle": "->", "color": VERMILLION, "lw": 1.8},
    )
    axes.set(xlim=(-0.18, 1.18), ylim=(-1.0, 0.7))


def rounding_by_size(out: Array, reference: Array) -> Picture:
    """Relative RMS error against where in its binade a value lies: a sawtooth, measured and derived.

    Args:
        out: [M, N] bfloat16, what a kernel made of `reference` [M, N] float64.

    Raises:
        ValueError: if shapes differ, or a reference is 0 or not finite.
    """
    if out.shape != reference.shape:
        raise ValueError(f"out has shape {out.shape} and the reference {reference.shape}; they must be equal")
    size = np.abs(reference.ravel())
    if not (np.isfinite(size).all() and size.all()):
        raise ValueError("a reference value is 0 or not finite: it has no relative error")
    error = np.abs(out.astype(np.float64).ravel() - reference.ravel())
    places = np.floor(np.log2(size) * BINS_PER_BINADE).astype(int)
    shown = [
        place
        for place in range(-3 * BINS_PER_BINADE, 2 * BINS_PER_BINADE)
        if (places == place).sum() >= FEWEST
    ]
    centres = np.exp2((np.array(shown) + 0.5) / BINS_PER_BINADE)
    measured = np.array(  # empty for a very small batch
        [np.sqrt((error[places == p] ** 2).sum() / (size[places == p] ** 2).sum()) for p in shown]
    )
    curve = np.geomspace(2.0**-3, 4.0, 4000)
    derived = bf16.spacing(curve) / np.sqrt(12) / curve
    picture = Picture(10.5, 4.2)
    axes = plain(
        picture.subplots(),
        title="relative error of one rounding to BF16",
        x="|value|",
        y="RMS error / value",
        grid="y",
    )
    axes.plot(curve, 2 * derived, color=PURPLE, lw=1.3, ls="--", label="derived, if bits were cut off")
    axes.plot(curve, derived, color=BLUE, lw=1.8, label="derived: step / (√12 value)")
    axes.plot(centres, measured, "o", ms=3.5, color=VERMILLION, label="measured in the run")
    axes.axhline(TOLERANCE, color=INK, lw=1.5)
    axes.text(0.127, TOLERANCE * 1.02, f"the tolerance, {TOLERANCE:g}", fontsize=9, color=INK)
    axes.set_xscale("log", base=2)
    axes.set(xlim=(2.0**-3, 4.0), ylim=(0, 4.8e-3))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value * 1e3:g}e-3" if value else "0")
    axes.legend(fontsize=8.5, frameon=False, loc="lower center", ncol=3, labelcolor=INK)
    picture.alt = (
        "Relative error of rounding to BF16 against the size of the value. The derived curve is a sawtooth: 2.26e-3 at "
        "every power of two, falling to half of it before the next. Dots measured in the run lie on it, between "
        f"{measured.min() * 1e3:.2f}e-3 and {measured.max() * 1e3:.2f}e-3, below the tolerance of {TOLERANCE:g}. A "
        "dashed sawtooth of twice the height shows cutting off, mostly above the tolerance."
        if shown
        else "No size occurs often enough to show an average; only the derived sawtooth is drawn, between 1.13e-3 and "
        f"2.26e-3, below the tolerance of {TOLERANCE:g}."
    )
    return picture


def rank_errors(rows: Sequence[SchemeError]) -> Picture:
    """Error of the sum over the ranks for every scheme, against the number of ranks: measured dots, derived lines.

    Raises:
        ValueError: if there is nothing to show.
    """
    if not rows:
        raise ValueError("no measurements: there is nothing to show")
    picture = Picture(10.0, 4.0)
    axes = plain(
        picture.subplots(),
        title="error of the sum over all ranks",
        x="ranks R",
        y="|sum - exact| / |exact|",
        grid="y",
    )
    texts = []
    for (scheme, colour), marker in zip(_colours(rows), "o s ^ D v".split(), strict=False):
        mine = [row for row in rows if row.scheme == scheme]
        ranks = [row.ranks for row in mine]
        axes.plot(ranks, [row.expected for row in mine], color=colour, lw=1.6)
        axes.plot(ranks, [row.measured for row in mine], marker, ms=6, color=colour, label=scheme)
        texts.append(
            f"{scheme}: " + ", ".join(f"{row.ranks} ranks {row.measured * 1e3:.2f}e-3" for row in mine)
        )
    counts = sorted({row.ranks for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, map(str, counts))
    axes.minorticks_off()
    axes.set_ylim(0, 1.15 * max(row.measured for row in rows))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value * 1e3:g}e-3" if value else "0")
    axes.legend(
        fontsize=9, frameon=False, loc="upper left", labelcolor=INK, title="lines: derived; marks: measured"
    )
    axes.get_legend().get_title().set(fontsize=8.5, color=MUTED)  # type: ignore[union-attr]
    picture.alt = (
        "Relative error of the sum over the ranks against their number, marks measured in numpy, lines derived. "
        + "; ".join(texts)
        + ". Only the running sum grows with the number of ranks."
    )
    return picture


def _colours(rows: Sequence[SchemeError]) -> list[tuple[str, str]]:
    names = list(dict.fromkeys(row.scheme for row in rows))
    return list(zip(names, (BLUE, GREEN, VERMILLION, PURPLE, ORANGE), strict=False))
