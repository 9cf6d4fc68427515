"""How far an output is from float64: one rounding to BF16 and nothing else."""

from __future__ import annotations

import numpy as np

from oproj_lib.figures.style import BLUE, INK, VERMILLION, Picture, plain
from oproj_lib.problem import BF16_HALF_ULP, Array

SHOWN = 6000  # dots in the left panel


def half_step(reference: Array) -> Array:
    """Half the distance of neighbouring BF16 values around each value: the error that rounding may make."""
    return BF16_HALF_ULP * np.exp2(np.floor(np.log2(np.abs(reference))))


def rounding_staircase(out: Array, reference: Array) -> Picture:
    """Left: error against size, under the staircase of half a BF16 step. Right: the errors in BF16 steps.

    Args:
        out: [M, N] bfloat16.
        reference: [M, N] float64, finite and not 0.

    Raises:
        ValueError: if shapes differ, or a reference is 0 or not finite.
    """
    if out.shape != reference.shape:
        raise ValueError(f"out has shape {out.shape} and the reference {reference.shape}; they must be equal")
    size = np.abs(reference.ravel())
    if not (np.isfinite(size).all() and size.all()):
        raise ValueError("a reference value is 0 or not finite: it has no BF16 step")
    error = out.astype(np.float64).ravel() - reference.ravel()
    steps = error / (2 * half_step(size))
    picture = Picture(10.5, 3.7)
    left, right = picture.subplots(1, 2, gridspec_kw={"width_ratios": [3, 2]})
    plain(left, title="error of each output (a sample)", x="|reference|", y="|error|", grid="both")
    every = max(1, size.size // SHOWN)
    left.loglog(size[::every], np.abs(error[::every]), ".", ms=2, color=BLUE, alpha=0.5, rasterized=True)
    curve = np.geomspace(2.0**-7, max(4.0, float(size.max())), 2000)
    left.loglog(curve, half_step(curve), color=VERMILLION, lw=1.8)
    left.text(2.0**-6.6, 2.0**-12.6, "half a BF16 step", color=VERMILLION, fontsize=9)
    left.set(xlim=(2.0**-7, curve[-1]), ylim=(1e-7, 0.03))
    plain(right, title="error in BF16 steps", x="(output - reference) / step", y="outputs", grid="y")
    right.hist(steps, bins=np.linspace(-0.75, 0.75, 61).tolist(), color=BLUE)
    for edge in (-0.5, 0.5):
        right.axvline(edge, color=VERMILLION, lw=1.5)
    right.yaxis.set_major_formatter(lambda value, _: f"{value / 1000:g} k")
    right.tick_params(colors=INK)
    inside = float((np.abs(steps) <= 0.5).mean())
    picture.alt = (
        "Left: the absolute error of each output against its size on logarithmic axes; the dots fill "
        "the area under a "
        "staircase that doubles at every power of two, half a BF16 step. Right: a histogram of the "
        "errors in BF16 steps, "
        f"flat between minus one half and one half, where {inside:.2%} of the {size.size} outputs lie."
    )
    return picture
