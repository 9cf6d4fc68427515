"""What the residual attention kernel must compute: the formula in float64, the same in FP32 bit for bit, inputs,
and the verdict.

For one token, with delta = bf16(sum of the ranks' slots in rank order, FP32):

    P       = bf16(prefix + delta), or delta alone
    v_s     = earlier block outputs, s < NB; v_NB = P
    score_s = sum(v_s * norm_w * qk_w) / sqrt(mean(v_s^2) + eps)
    mix     = sum_s softmax(score)_s v_s                           (P where NB = 0)
    out     = bf16(mix / sqrt(mean(mix^2) + out_eps) * out_w)      (bf16(mix) without the last norm)

`reference` is written from these lines: it rounds where they round, and is float64 otherwise. `fp32_reference`
follows the order of operations that ``kernels.attnres`` states, so its bits are those of a right kernel.
Nothing here needs CuTe DSL or a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from oproj_lib.kernels.attnres_configuration import AttnResConfiguration
from oproj_lib.problem import BF16_SMALLEST, TOLERANCE, Array, N, error_measures

BF16 = ml_dtypes.bfloat16
FP32_ROUNDING = 2.0**-24
"""Largest relative error of one rounding to FP32."""
KINDS = ("random", "equal_scores", "dominant", "large_negative", "tiny", "zero_rows", "inf", "nan")
SCORE_SIZE = 2.0
"""Standard deviation of the scores of random rows."""
QK_SIZE = SCORE_SIZE * N**-0.5


@dataclass(frozen=True)
class AttnResInputs:
    """Arrays of BF16: slots [ranks, M, 7168] as published, prefix [M, 7168], blocks [M, max(NB, 1), 7168], and
    norm_weight, qk_weight, out_weight [7168]."""

    slots: Array
    prefix: Array
    blocks: Array
    norm_weight: Array
    qk_weight: Array
    out_weight: Array


@dataclass(frozen=True)
class Reference:
    """prefix: P, BF16 [M, 7168]. out: float64 [M, 7168]. error: how far FP32 arithmetic may be from it before
    the last rounding, same shape. scores: float64 [M, NB + 1]."""

    prefix: Array
    out: Array
    error: Array
    scores: Array


# ---- inputs ----


def make_inputs(config: AttnResConfiguration, seed: int, kind: str = "random") -> AttnResInputs:
    """The same arrays for the same configuration, seed and kind.

    The ranks' slots add up to N(0, 1), as the projection gives them. Blocks are N(0, 2**s) for s = 0, 1, ...
    (residual streams grow), and qk_weight makes scores N(0, SCORE_SIZE). The other kinds change that as their
    makers below say.

    Raises ValueError for an unknown kind or a negative seed.
    """
    if kind not in _MAKERS:
        raise ValueError(f"kind = {kind!r} is unknown; choose one of {', '.join(KINDS)}")
    if seed < 0:
        raise ValueError(f"seed = {seed} is negative; choose 0 or more")
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape, dtype=np.float32)

    tokens, rows = config.tokens, config.block_rows
    arrays = {
        "slots": normal(config.ranks, tokens, N) / np.float32(config.ranks**0.5),
        "prefix": normal(tokens, N),
        "blocks": normal(tokens, rows, N) * np.exp2(np.arange(rows, dtype=np.float32))[:, None],
        "norm_weight": 1 + normal(N) / 8,
        "qk_weight": normal(N) * np.float32(QK_SIZE),
        "out_weight": 1 + normal(N) / 8,
    }
    _MAKERS[kind](arrays)
    rounded = {name: array.astype(BF16) for name, array in arrays.items()}
    slots = rounded["slots"].view(np.uint16)
    slots[slots == 0x8000] = 0  # nobody publishes -0.0
    return AttnResInputs(**rounded)


def _random(arrays: dict[str, Array]) -> None:
    """Nothing special."""


def _equal_scores(arrays: dict[str, Array]) -> None:
    """Every score is 0, so the mix is the mean of all sources."""
    arrays["qk_weight"][:] = 0


def _dominant(arrays: dict[str, Array]) -> None:
    """One source is parallel to norm_w * qk_w, so its score is |norm_w qk_w| sqrt(7168) = 170, beyond what exp
    can take in FP32: P on even tokens, the last block on odd ones."""
    weight = arrays["norm_weight"] * arrays["qk_weight"] / np.float32(QK_SIZE)
    arrays["prefix"][::2] += 64 * weight
    arrays["blocks"][1::2, -1] = weight


def _large_negative(arrays: dict[str, Array]) -> None:
    """Every source is antiparallel to norm_w * qk_w but for some noise: scores around -160, exp of which is 0."""
    weight = arrays["norm_weight"] * arrays["qk_weight"] / np.float32(QK_SIZE)
    arrays["blocks"] *= 0.25
    sizes = np.exp2(np.arange(arrays["blocks"].shape[1], dtype=np.float32))
    arrays["blocks"] -= sizes[:, None] * weight
    arrays["slots"] *= 0.25
    arrays["prefix"] *= 0.25
    for name in ("prefix", "slots"):
        arrays[name] -= weight / np.float32(1 if name == "prefix" else len(arrays["slots"]))


def _tiny(arrays: dict[str, Array]) -> None:
    """Values around 1e-3 in every source: their mean square is about the usual eps, 1e-6, so where eps is added
    matters."""
    sizes = np.exp2(np.arange(arrays["blocks"].shape[1], dtype=np.float32))
    arrays["blocks"] *= np.float32(1e-3) / sizes[:, None]
    for name in ("slots", "prefix"):
        arrays[name] *= np.float32(7e-4)


def _zero_rows(arrays: dict[str, Array]) -> None:
    """Odd tokens are zero in everything, even ones in their first block."""
    arrays["blocks"][:, 0] = 0
    for array in (arrays["slots"][:, 1::2], arrays["prefix"][1::2], arrays["blocks"][1::2]):
        array[:] = 0


def _payload(value: float) -> Callable[[dict[str, Array]], None]:
    def make(arrays: dict[str, Array]) -> None:
        """The last rank publishes the value once for odd tokens."""
        slots = arrays["slots"]
        for token in range(1, slots.shape[1], 2):
            slots[-1, token, 997 * token % N] = value

    return make


_MAKERS: dict[str, Callable[[dict[str, Array]], None]] = {
    "random": _random,
    "equal_scores": _equal_scores,
    "dominant": _dominant,
    "large_negative": _large_negative,
    "tiny": _tiny,
    "zero_rows": _zero_rows,
    "inf": _payload(np.inf),
    "nan": _payload(np.nan),
}


# ---- float64 ----


def new_prefix(config: AttnResConfiguration, inputs: AttnResInputs) -> Array:
    """P, BF16 [M, 7168]: rounded to FP32 after every addition and to BF16 where the formula says so."""
    with np.errstate(invalid="ignore", over="ignore"):
        total = inputs.slots[0].astype(np.float32)
        for slot in inputs.slots[1:]:
            total = total + slot.astype(np.float32)
        delta = total.astype(BF16)
        if config.replace_prefix:
            return delta
        return (inputs.prefix.astype(np.float32) + delta.astype(np.float32)).astype(BF16)


def reference(config: AttnResConfiguration, inputs: AttnResInputs) -> Reference:
    """The formula, float64 but for P, and a bound of FP32's error.

    The bound follows the kernel's operations, u = 2**-24 each. A sum over a row is at most D additions deep,
    so its error is D u sum|terms|, half of that (relative) for the root of a mean of squares. exp passes the
    absolute error of its argument on as a relative one. What enters twice (numerator and denominator of the
    softmax) counts twice.
    """
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        prefix = new_prefix(config, inputs)
        values = prefix.astype(np.float64)[:, None]
        if config.blocks:
            values = np.concatenate([inputs.blocks.astype(np.float64), values], axis=1)
        mix, mix_error, scores = _mix(config, inputs, values) if config.blocks else _only_prefix(values)
        if not config.out_norm:
            return Reference(prefix, mix, mix_error, scores)
        depth, u = summation_depth(config), FP32_ROUNDING
        square = np.mean(mix**2, axis=1, keepdims=True)
        scale = 1 / np.sqrt(square + config.out_eps)
        weight = inputs.out_weight.astype(np.float64)
        out = mix * scale * weight
        norm_error = np.sqrt(np.mean(mix_error**2, axis=1, keepdims=True)) * scale + (depth / 2 + 4) * u
        error = mix_error * scale * np.abs(weight) + np.abs(out) * (norm_error + 2 * u)
        return Reference(prefix, out, error, scores)


def _only_prefix(values: Array) -> tuple[Array, Array, Array]:
    mix = values[:, 0]
    return mix, np.zeros_like(mix), np.zeros((len(mix), 1))


def _mix(config: AttnResConfiguration, inputs: AttnResInputs, values: Array) -> tuple[Array, Array, Array]:
    """(mix, bound of its FP32 error, scores)."""
    depth, u = summation_depth(config), FP32_ROUNDING
    weight = inputs.norm_weight.astype(np.float64) * inputs.qk_weight.astype(np.float64)
    inverse_norm = 1 / np.sqrt(np.mean(values**2, axis=2) + config.eps)
    scores = inverse_norm * np.sum(values * weight, axis=2)
    score_error = inverse_norm * depth * u * np.sum(np.abs(values * weight), axis=2)
    score_error += np.abs(scores) * (depth / 2 + 5) * u
    below = scores - scores.max(axis=1, keepdims=True)
    shares = np.exp(below)
    shares /= shares.sum(axis=1, keepdims=True)
    relative = 2 * score_error.max(axis=1, keepdims=True) + np.abs(below) * u  # of exp
    relative = relative + (shares * relative).sum(axis=1, keepdims=True) + (config.blocks + 16) * u
    mix = np.einsum("ts,tsn->tn", shares, values)
    return mix, np.einsum("ts,tsn->tn", shares * relative, np.abs(values)), scores


def summation_depth(config: AttnResConfiguration) -> int:
    """Additions on the way of one product to the sum of its row: chain, four chains, warp, warps."""
    return 2 * config.chunks + 2 + 5 + config.threads // 32


# ---- FP32, in the kernel's order ----


def fma(a: Any, b: Any, c: Any) -> Array:
    """a * b + c of FP32, rounded once.

    float64 holds the product; the sum is rounded to odd (Boldo and Melquiond, "Emulation of FMA and correctly
    rounded sums", 2008), so that rounding it again to FP32 is right.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        product = np.multiply(a, b, dtype=np.float64)
        addend = np.asarray(c, np.float64)
        total = product + addend
        part = total - product
        rest = (product - (total - part)) + (addend - part)
        odd = np.ascontiguousarray(total).view(np.uint64) & np.uint64(1) == 1
        nudged = np.nextafter(total, np.copysign(np.inf, rest))
        return np.where((rest != 0) & np.isfinite(rest) & ~odd, nudged, total).astype(np.float32)


def exponential(x: Any) -> Array:
    """exp(x), x <= 0, in FP32: n = round(x / ln 2), exp(x) = 2**n exp(x - n ln 2) by Taylor to the 7th power."""
    magic = np.float32(12582912)  # 1.5 * 2**23
    n = fma(x, np.float32(1 / np.log(2)), magic) - magic
    high = np.float32(45426 / 65536)
    r = fma(n, -high, x)
    r = fma(n, np.float32(float(high) - np.log(2)), r)
    result = np.full_like(r, 1 / 5040)
    for factorial in (720, 120, 24, 6, 2, 1, 1):
        result = fma(result, r, np.float32(1 / factorial))
    power = np.exp2(np.clip(np.nan_to_num(n), -126, 0)).astype(np.float32)
    return np.where(x < -87, np.float32(0), result * power)


def row_sum(config: AttnResConfiguration, first: Array, second: Array) -> Array:
    """Sum of first * second over the last axis, FP32, in the kernel's order."""
    shape = (*first.shape[:-1], config.chunks, config.threads, 4, 2)  # chunk, thread, chain, column of it
    a, b = (np.broadcast_to(x, first.shape).reshape(shape) for x in (first, second))
    chains: Array | None = None
    for chunk in range(config.chunks):
        for column in range(2):
            x, y = a[..., chunk, :, :, column], b[..., chunk, :, :, column]
            chains = x * y if chains is None else fma(x, y, chains)
    assert chains is not None
    lanes = (chains[..., 0] + chains[..., 1]) + (chains[..., 2] + chains[..., 3])
    lanes = lanes.reshape(*lanes.shape[:-1], -1, 32)
    for distance in (16, 8, 4, 2, 1):
        lanes = lanes[..., :distance] + lanes[..., distance : 2 * distance]
    warps = lanes[..., 0]
    total = warps[..., 0]
    for warp in range(1, warps.shape[-1]):
        total = total + warps[..., warp]
    return total


def fp32_reference(config: AttnResConfiguration, inputs: AttnResInputs) -> tuple[Array, Array]:
    """(P, out), BF16 [M, 7168]: the bits that the kernel stores (NaNs may have other bits)."""
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        prefix = new_prefix(config, inputs)
        mix = prefix.astype(np.float32)
        if config.blocks:
            mix = _fp32_mix(config, inputs, mix)
        if config.out_norm:
            scale = _inverse_norm(row_sum(config, mix, mix), config.out_eps)
            mix = mix * scale[:, None] * inputs.out_weight.astype(np.float32)
        return prefix, mix.astype(BF16)


def _inverse_norm(square: Array, eps: float) -> Array:
    return np.float32(1) / np.sqrt(fma(square, np.float32(1 / N), np.float32(eps)))


def _fp32_mix(config: AttnResConfiguration, inputs: AttnResInputs, prefix: Array) -> Array:
    weight = inputs.norm_weight.astype(np.float32) * inputs.qk_weight.astype(np.float32)

    def score(rows: Array) -> Array:
        return _inverse_norm(row_sum(config, rows, rows), config.eps) * row_sum(config, rows, weight)

    blocks = inputs.blocks.astype(np.float32)
    scores = score(blocks)
    maximum = np.fmax.reduce(scores, axis=1)
    exponentials = exponential(scores - maximum[:, None])
    values = exponentials[:, 0, None] * blocks[:, 0]
    for s in range(1, config.blocks):
        values = fma(exponentials[:, s, None], blocks[:, s], values)
    slots = 1 << (config.blocks - 1).bit_length()
    total = np.pad(exponentials, ((0, 0), (0, slots - config.blocks)))
    while slots > 1:
        slots //= 2
        total = total[:, :slots] + total[:, slots:]
    own = score(prefix)
    common = np.fmax(maximum, own)
    kept, share = exponential(maximum - common), exponential(own - common)
    scale = np.float32(1) / fma(kept, total[:, 0], share)
    return fma(share[:, None], prefix, kept[:, None] * values) * scale[:, None]


# ---- the verdict ----


def findings(
    config: AttnResConfiguration, inputs: AttnResInputs, prefix: Array, out: Array
) -> tuple[str, ...]:
    """What is wrong with a kernel's P and out (BF16 [M, 7168]), with the numbers; nothing if they are right.

    P is right bit for bit. out has Inf and NaN exactly where float64 has them; its relative Frobenius error is
    below that of one rounding to BF16 (``problem.TOLERANCE``); and every element is within half a BF16 step of
    what FP32 arithmetic may give.

    Raises ValueError for arrays of another type or shape.
    """
    expected = reference(config, inputs)
    measures = error_measures(out, expected.out)
    found = []
    wrong = (prefix.view(np.uint16) != expected.prefix.view(np.uint16)) & ~(
        np.isnan(prefix) & np.isnan(expected.prefix)
    )
    if wrong.any():
        token, column = np.argwhere(wrong)[0]
        found.append(
            f"{int(wrong.sum())} elements of the new prefix differ, first at token {token}, column {column}: "
            f"{float(prefix[token, column])!r}, expected {float(expected.prefix[token, column])!r}"
        )
    if measures.special_mismatches:
        found.append(
            f"{measures.special_mismatches} of {measures.elements} outputs are finite, Inf or NaN where the "
            f"reference is not ({measures.nan_count} unexpected NaN)"
        )
    if not measures.relative_frobenius < TOLERANCE:
        found.append(f"relative Frobenius error {measures.relative_frobenius:.2e}, limit {TOLERANCE:.2e}")
    return (*found, *_element_findings(out, expected))


def half_step(value: Array) -> Array:
    """Half the distance of neighbouring BF16 numbers at |value|: 8 significant bits."""
    fraction, exponent = np.frexp(value)
    return np.where(
        fraction == 0, BF16_SMALLEST / 2, np.maximum(np.ldexp(1.0, exponent - 9), BF16_SMALLEST / 2)
    )


def _element_findings(out: Array, expected: Reference) -> tuple[str, ...]:
    with np.errstate(invalid="ignore", over="ignore"):
        limit = expected.error + half_step(np.abs(expected.out) + expected.error)
        excess = np.abs(out.astype(np.float64) - expected.out) / limit
    excess = np.nan_to_num(excess, nan=0.0, posinf=0.0)  # special values are counted by the caller
    token, column = (int(i) for i in np.unravel_index(np.argmax(excess), excess.shape))
    if excess[token, column] <= 1:
        return ()
    return (
        f"{int((excess > 1).sum())} outputs are off by more than rounding explains, worst at token {token}, "
        f"column {column}: {float(out[token, column])!r}, reference {expected.out[token, column]:.6g}, allowed "
        f"error {limit[token, column]:.2g}",
    )
