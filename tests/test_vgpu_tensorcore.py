"""Tensor-core arithmetic against mmasim, a plain specification, and values worked out by hand."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
import torch
from mmasim.nv_ptx import MMA, WGMMA, TCGen05MMA

from oproj_lib.vgpu import tensorcore
from oproj_lib.vgpu.tensorcore import FORMATS, Datapath, datapath, dot, mma_sync, supported_mma

Bits = npt.NDArray[np.uint32]
TORCH = {"f16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32, "f32": torch.float32}
ARCHITECTURES = {80: "Ampere", 90: "Hopper", 100: "Blackwell"}
KINDS = ("normal", "spread", "random_bits", "cancellation", "subnormals", "signed_zeros")


# --- the specification --------------------------------------------------------------------------------------


def decode(bits: int, name: str) -> tuple[Fraction | float, int]:
    """Value of an element (a float if Inf or NaN) and its exponent, the format's least for subnormals."""
    fmt = FORMATS[name]
    bits >>= fmt.drop
    fraction, field = bits % 2**fmt.fraction_bits, (bits >> fmt.fraction_bits) % 2**fmt.exponent_bits
    sign = -1 if bits >> (fmt.fraction_bits + fmt.exponent_bits) else 1
    if field == 2**fmt.exponent_bits - 1:
        return (float("nan") if fraction else sign * float("inf")), 0
    exponent = max(field, 1) - (2 ** (fmt.exponent_bits - 1) - 1)
    significand = Fraction(fraction, 2**fmt.fraction_bits) + (field > 0)
    return sign * significand * Fraction(2) ** exponent, exponent


def specification(a: list[int], b: list[int], c: int, ab: str, d: str, path: Datapath) -> int:
    """The exact rule of tensorcore's docstring in rational arithmetic: bits of one output of one step."""
    one = to_bits(np.array(1.0), d).item()
    fraction_bits, least, sign_bit = (10, -14, 15) if d == "f16" else (23, -126, 31)
    infinity = (1 << sign_bit) - (1 << fraction_bits)
    special = 0.0
    terms = []  # (value, exponent that it is aligned by)
    for x, y, name in [(x, y, ab) for x, y in zip(a, b, strict=True)] + [(c, one, d)]:
        (left, left_exponent), (right, right_exponent) = decode(x, name), decode(y, name)
        if isinstance(left, float) or isinstance(right, float):
            special += float(left) * float(right)
        else:
            exponent = left_exponent + right_exponent if left * right else path.zero_exponent(d)
            terms.append((left * right, exponent))
    if special != 0.0:
        return infinity | (special < 0.0) << sign_bit if abs(special) == np.inf else (1 << sign_bit) - 1
    unit = Fraction(2) ** (max(exponent for _, exponent in terms) - path.fraction_bits)
    total = sum(int(value / unit) for value, _ in terms) * unit  # int() truncates toward zero
    exponent = least
    while abs(total) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    size = abs(total) / Fraction(2) ** (exponent - fraction_bits)
    steps = round(size) if d == "f16" else int(size)  # round() takes halves of a Fraction to even
    result = min(steps + ((exponent - least) << fraction_bits), infinity)
    return result | (total < 0 and steps > 0) << sign_bit


# --- inputs and oracles -------------------------------------------------------------------------------------


def to_bits(values: npt.NDArray[np.float64], name: str) -> Bits:
    tensor = torch.from_numpy(values).to(TORCH[name])
    if tensor.element_size() == 2:
        return tensor.view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
    return tensor.view(torch.int32).numpy().view(np.uint32)


def to_tensor(bits: Bits, name: str) -> torch.Tensor:
    if TORCH[name].itemsize == 2:
        return torch.from_numpy(bits.astype(np.uint16).view(np.int16)).view(TORCH[name])
    return torch.from_numpy(bits.view(np.int32).copy()).view(TORCH[name])


def inputs(kind: str, rows: int, k: int, ab: str, d: str, seed: int = 0) -> tuple[Bits, Bits, Bits]:
    """Bits of a [rows, k], b [rows, k], c [rows]: ``rows`` separate dot products."""
    rng = np.random.default_rng([seed, KINDS.index(kind)])

    def make(shape: tuple[int, ...], name: str) -> Bits:
        x = rng.standard_normal(shape)
        if kind == "random_bits":
            return rng.integers(0, 1 << 8 * FORMATS[name].bytes_, shape, dtype=np.uint64).astype(np.uint32)
        if kind == "spread":
            reach = 6 if name == "f16" else 40
            x = x * np.exp2(rng.uniform(-reach, reach, shape))
        if kind == "subnormals":
            x = x * np.exp2(rng.uniform(-24, -10, shape) if name == "f16" else rng.uniform(-149, -55, shape))
        if kind == "signed_zeros":
            x = np.where(rng.random(shape) < 0.9, np.copysign(0.0, x), x)
        return to_bits(x, name)

    a, b, c = make((rows, k), ab), make((rows, k), ab), make((rows,), d)
    if (
        kind == "cancellation"
    ):  # second half of a is minus the first, with one element nudged by an ulp or two
        sign = np.uint32(1 << (8 * FORMATS[ab].bytes_ - 1))
        a[:, k // 2 :], b[:, k // 2 :] = a[:, : k // 2] ^ sign, b[:, : k // 2]
        a[:, -1] += (rng.integers(0, 3, rows) << FORMATS[ab].drop).astype(np.uint32)
        c[rng.random(rows) < 0.8] = 0
    return a, b, c


def mmasim_dot(arch: int, k: int, ab: str, d: str, a: Bits, b: Bits, c: Bits) -> Bits:
    model = MMA(ARCHITECTURES[arch], f"m16n8k{k}.{d}.{ab}.{ab}.{d}")
    result = model.dpa(to_tensor(a, ab), to_tensor(b, ab), to_tensor(c, d))
    if d == "f16":
        return result.view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
    return result.view(torch.int32).numpy().view(np.uint32)


def dot_rows(arch: int, ab: str, d: str, a: Bits, b: Bits, c: Bits, exact: bool = True) -> Bits:
    """Row i of the arguments as matrix i of a batch of [1, k] x [k, 1]."""
    return dot(a.T[None], b.T[:, None], c[None, None], ab, ab, d, exact=exact, arch=arch)[0, 0]


def fragments(a: Bits, b: Bits, c: Bits, per_word: int, pairs: bool) -> tuple[Bits, Bits, Bits]:
    """Matrices a [W, 16, K], b [W, K, 8], c [W, 16, 8] as registers, by the PTX ISA's formulas."""
    warps, _, k = a.shape
    groups, bits = k // (4 * per_word), 32 // per_word
    ra, rb = np.zeros((2 * groups, warps, 32), np.uint32), np.zeros((groups, warps, 32), np.uint32)
    rc = np.zeros((2 if pairs else 4, warps, 32), np.uint32)
    for lane in range(32):
        group, thread = divmod(lane, 4)
        for i in range(2 * groups * per_word):  # element a_i
            r, j = divmod(i, per_word)
            row = group + (8 if r % 2 else 0)
            column = thread * per_word + j + (4 * per_word if r >= 2 else 0)
            ra[r, :, lane] |= a[:, row, column] << np.uint32(bits * j)
        for i in range(groups * per_word):  # element b_i
            r, j = divmod(i, per_word)
            rb[r, :, lane] |= b[
                :, thread * per_word + j + (4 * per_word if r >= 1 else 0), group
            ] << np.uint32(bits * j)
        for i in range(4):  # element c_i
            value = c[:, group + (8 if i >= 2 else 0), thread * 2 + (i & 1)]
            rc[i // 2 if pairs else i, :, lane] |= value << np.uint32(16 * (i & 1) if pairs else 0)
    return ra, rb, rc


def run_mma(name: str, a: Bits, b: Bits, c: Bits, exact: bool, arch: int) -> Bits:
    """mma_sync on matrices a [W, 16, K], b [W, K, 8], c [W, 16, 8]; returns D's fragments."""
    shape, d, ab, bb, _ = name.split(".")
    per_word = 4 if d == "s32" else 4 // FORMATS[ab].bytes_
    return mma_sync(shape, ab, bb, d, *fragments(a, b, c, per_word, d == "f16"), exact, arch)


FLOAT_SHAPES = [name for name in supported_mma() if "s32" not in name]


# --- exact arithmetic ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FLOAT_SHAPES)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_exact_is_mmasim_bit_for_bit(arch: int, name: str, kind: str) -> None:
    shape, d, ab, _, _ = name.split(".")
    k = int(shape[6:])
    a, b, c = inputs(kind, 2048, k, ab, d)
    np.testing.assert_array_equal(dot_rows(arch, ab, d, a, b, c), mmasim_dot(arch, k, ab, d, a, b, c))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ab, d", [("bf16", "f32"), ("f16", "f32"), ("f16", "f16"), ("tf32", "f32")])
@pytest.mark.parametrize("arch", (80, 90))
def test_exact_is_the_specification(arch: int, ab: str, d: str, kind: str) -> None:
    path = datapath(arch)
    k = path.step_bytes // FORMATS[ab].bytes_
    a, b, c = inputs(kind, 64, k, ab, d, seed=1)
    rows = zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    np.testing.assert_array_equal(
        dot_rows(arch, ab, d, a, b, c), [specification(*row, ab, d, path) for row in rows]
    )


@pytest.mark.parametrize(
    "broken",
    [Datapath(24, 32), Datapath(24, 16), Datapath(25, 16)],
    ids=["24 bits", "Ampere", "two k8 steps"],
)
def test_another_datapath_is_noticed(monkeypatch: pytest.MonkeyPatch, broken: Datapath) -> None:
    monkeypatch.setattr(tensorcore, "datapath", lambda arch: broken)
    a, b, c = inputs("normal", 2048, 16, "bf16", "f32")
    assert (dot_rows(90, "bf16", "f32", a, b, c) != mmasim_dot(90, 16, "bf16", "f32", a, b, c)).any()


def test_fp32_arithmetic_is_not_the_hardware() -> None:
    a, b, c = inputs("spread", 2048, 16, "bf16", "f32")
    assert (
        dot_rows(90, "bf16", "f32", a, b, c, exact=False) != mmasim_dot(90, 16, "bf16", "f32", a, b, c)
    ).any()


def hexfloat(*values: float) -> npt.NDArray[np.float64]:
    return np.array(values, np.float64)


# Worked out by hand from the rule; arch, factors of type bf16, addend, FP32 result.
BY_HAND = [
    # 1 - 2^-25: Hopper keeps 2^-25 and truncates the sum to 1 - 2^-24; Ampere's 24 bits lose it.
    (90, [1.0], [1.0], -(2.0**-25), 0x3F7FFFFF),
    (80, [1.0], [1.0], -(2.0**-25), 0x3F800000),
    (90, [1.0], [1.0], -(2.0**-26), 0x3F800000),
    # 1.5 * 1.5 = 2.25 is aligned by exponent 0, not 1: 2.25 - 2^-25 truncates to 2.25 - 2^-22.
    (90, [1.5], [1.5], -(2.0**-25), 0x400FFFFF),
    # Terms 2^24, 1 (k = 1), 1 (k = 8): one step makes 2^24 + 2; two steps lose 1 twice.
    (90, [2.0**12, 1, 0, 0, 0, 0, 0, 0, 1], [2.0**12, 1, 0, 0, 0, 0, 0, 0, 1], 0.0, 0x4B800001),
    (80, [2.0**12, 1, 0, 0, 0, 0, 0, 0, 1], [2.0**12, 1, 0, 0, 0, 0, 0, 0, 1], 0.0, 0x4B800000),
    # Cancellation of 2^100 leaves nothing of the 1: it lies 100 bits below.
    (90, [2.0**60, 1, -(2.0**60)], [2.0**40, 1, 2.0**40], 0.0, 0x00000000),
    # Overflow rounds to Inf although the rounding is toward zero; 2^128 - 2^120 still fits.
    (90, [2.0**127, 2.0**127], [1.0, 1.0], 0.0, 0x7F800000),
    (90, [2.0**64], [2.0**64 - 2.0**56], 0.0, 0x7F7F0000),
    # Zeros of either sign sum to +0.
    (90, [-0.0], [1.0], -0.0, 0x00000000),
    # The smallest subnormal survives alone, but a product of 2^-100 * 2^-60 does not.
    (90, [0.0], [0.0], -(2.0**-149), 0x80000001),
    (90, [2.0**-100], [2.0**-60], 0.0, 0x00000000),
    # The zero addend counts as 2^-133, so Hopper sees units of 2^-158: 2^-149 - 2^-158 truncates to nothing,
    # but 2^-159 is lost and leaves the smallest subnormal. Ampere: 2^-132, 24 bits, 2^-156.
    (90, [2.0**-100, -(2.0**-100)], [2.0**-49, 2.0**-58], 0.0, 0x00000000),
    (90, [2.0**-100, -(2.0**-100)], [2.0**-49, 2.0**-59], 0.0, 0x00000001),
    (80, [2.0**-100, -(2.0**-100)], [2.0**-49, 2.0**-56], 0.0, 0x00000000),
    (80, [2.0**-100, -(2.0**-100)], [2.0**-49, 2.0**-57], 0.0, 0x00000001),
    # Inf - Inf, Inf * 0, NaN; Inf alone.
    (90, [np.inf, 1.0], [1.0, 1.0], -np.inf, 0x7FFFFFFF),
    (90, [np.inf], [0.0], 1.0, 0x7FFFFFFF),
    (90, [np.nan], [1.0], 1.0, 0x7FFFFFFF),
    (90, [-np.inf, 2.0**100], [2.0, 2.0**100], 3.0, 0xFF800000),
]


@pytest.mark.parametrize("arch, a, b, c, wanted", BY_HAND)
def test_exact_by_hand(arch: int, a: list[float], b: list[float], c: float, wanted: int) -> None:
    left, right = np.zeros((1, 16)), np.zeros((1, 16))
    left[0, : len(a)], right[0, : len(b)] = a, b
    bits = to_bits(left, "bf16"), to_bits(right, "bf16"), to_bits(hexfloat(c), "f32")
    assert hex(dot_rows(arch, "bf16", "f32", *bits)[0]) == hex(wanted)
    assert hex(mmasim_dot(arch, 16, "bf16", "f32", *bits)[0]) == hex(wanted)


@pytest.mark.parametrize(
    "a, c, wanted",
    [
        (1.0, 2048.0, 0x6800),  # 2049 is halfway between 2048 and 2050: to even
        (3.0, 2048.0, 0x6802),  # 2051: halfway between 2050 and 2052
        (16.0, 65504.0, 0x7C00),  # halfway to 65536 rounds to Inf
        (15.0, 65504.0, 0x7BFF),
        (-(2.0**-24), 2.0**-14, 0x03FF),  # down to the largest subnormal
        (-0.0, -0.0, 0x0000),
        (np.nan, 0.0, 0x7FFF),
    ],
)
def test_fp16_accumulator_by_hand(a: float, c: float, wanted: int) -> None:
    left, right = to_bits(hexfloat(a)[None], "f16"), to_bits(hexfloat(1.0)[None], "f16")
    assert hex(dot_rows(90, "f16", "f16", left, right, to_bits(hexfloat(c), "f16"))[0]) == hex(wanted)


@pytest.mark.parametrize("factor, wanted", [(2.0**-23, 0x0001), (2.0**-24, 0x0000)])
def test_fp16_zero_exponent_by_hand(factor: float, wanted: int) -> None:
    """The zero addend counts as 2^-21: units of 2^-46. 2^-25 alone is a tie, which rounds to even."""
    a, b = (
        to_bits(hexfloat(2.0**-12, 2.0**-23)[None], "f16"),
        to_bits(hexfloat(2.0**-13, factor)[None], "f16"),
    )
    assert hex(dot_rows(90, "f16", "f16", a, b, to_bits(hexfloat(0.0), "f16"))[0]) == hex(wanted)


# --- fragments ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("warps", (1, 63, 64, 65))
@pytest.mark.parametrize("exact", (False, True))
@pytest.mark.parametrize("name", FLOAT_SHAPES)
def test_fragments_hold_the_matrices(name: str, exact: bool, warps: int) -> None:
    shape, d, ab, _, _ = name.split(".")
    k = int(shape[6:])
    rng = np.random.default_rng(warps)
    # Small integers: every arithmetic gives the same, exact result.
    a, b, c = (
        rng.integers(-8, 9, s).astype(np.float64) for s in ((warps, 16, k), (warps, k, 8), (warps, 16, 8))
    )
    wanted = fragments(
        to_bits(a, ab), to_bits(b, ab), to_bits(a @ b + c, d), 4 // FORMATS[ab].bytes_, d == "f16"
    )[2]
    got = run_mma(name, to_bits(a, ab), to_bits(b, ab), to_bits(c, d), exact, 90)
    np.testing.assert_array_equal(got, wanted)


def test_whole_mma_is_mmasim() -> None:
    rng = np.random.default_rng(5)
    a, b = to_bits(rng.standard_normal((3, 16, 16)), "bf16"), to_bits(rng.standard_normal((3, 16, 8)), "bf16")
    c = to_bits(rng.standard_normal((3, 16, 8)), "f32")
    model = MMA("Hopper", "m16n8k16.f32.bf16.bf16.f32")
    tensors = zip(to_tensor(a, "bf16"), to_tensor(b, "bf16"), to_tensor(c, "f32"), strict=True)
    d = np.stack([model(*matrices).numpy().view(np.uint32) for matrices in tensors])
    wanted = fragments(a, b, d, 2, False)[2]
    np.testing.assert_array_equal(run_mma("m16n8k16.f32.bf16.bf16.f32", a, b, c, True, 90), wanted)


@pytest.mark.parametrize("name", [name for name in supported_mma() if "s32" in name])
def test_integer_mma_wraps(name: str) -> None:
    shape, _, a_type, b_type, _ = name.split(".")
    k = int(shape[6:])
    rng = np.random.default_rng(k)
    a, b = rng.integers(0, 256, (2, 16, k)), rng.integers(0, 256, (2, k, 8))
    c = rng.integers(2**31 - 9, 2**31, (2, 16, 8))

    def signed(x: npt.NDArray[np.int64], kind: str) -> npt.NDArray[np.int64]:
        return np.where((x >= 128) & (kind == "s8"), x - 256, x)

    wanted = ((signed(a, a_type) @ signed(b, b_type) + c) % 2**32).astype(np.uint32)
    left, right, addend = (x.astype(np.uint32) for x in (a, b, c))
    got = run_mma(name, left, right, addend, False, 80)
    np.testing.assert_array_equal(got, fragments(left, right, wanted, 4, False)[2])


def test_out_may_be_the_addend_and_strided() -> None:
    rng = np.random.default_rng(9)
    a = to_bits(rng.standard_normal((4, 5, 32)), "bf16")
    b = to_bits(rng.standard_normal((2, 5, 32)), "bf16")
    registers = to_bits(rng.standard_normal((8, 5, 32)), "f32")
    wanted = mma_sync("m16n8k16", "bf16", "bf16", "f32", a, b, registers[::2].copy(), True, 90)
    untouched = registers[1::2].copy()
    strided = registers[::2]
    assert mma_sync("m16n8k16", "bf16", "bf16", "f32", a, b, strided, True, 90, out=strided) is strided
    np.testing.assert_array_equal(registers[::2], wanted)
    np.testing.assert_array_equal(registers[1::2], untouched)


# --- fast arithmetic ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ab, d", [("bf16", "f32"), ("f16", "f32"), ("f16", "f16"), ("tf32", "f32")])
@pytest.mark.parametrize("kind", ("normal", "subnormals", "signed_zeros", "cancellation"))
def test_fast_is_fp32_in_k_order(kind: str, ab: str, d: str) -> None:
    a, b, c = inputs(kind, 512, 16, ab, d)
    a &= np.uint32(0xFFFFFFFF << FORMATS[ab].drop & 0xFFFFFFFF)  # TF32 ignores the low bits of its operands
    b &= np.uint32(0xFFFFFFFF << FORMATS[ab].drop & 0xFFFFFFFF)
    left, right, acc = (to_tensor(x, t).float().numpy() for x, t in ((a, ab), (b, ab), (c, d)))
    for k in range(16):
        acc = (acc + (left[:, k] * right[:, k]).astype(np.float32)).astype(np.float32)
    wanted = to_bits(acc.astype(np.float64) + 0.0, d)  # zero results are +0
    wanted[wanted == (0x8000 if d == "f16" else 0x80000000)] = 0
    np.testing.assert_array_equal(dot_rows(90, ab, d, a, b, c, exact=False), wanted)


def test_fast_handles_inf_and_nan() -> None:
    for values, addend, wanted in (
        ([np.inf, 1.0], 1.0, 0x7F800000),
        ([-np.inf, 1.0], 1.0, 0xFF800000),
        ([np.inf, -np.inf], 1.0, 0x7FFFFFFF),
        ([np.nan, 1.0], 1.0, 0x7FFFFFFF),
    ):
        for name in ("f16", "bf16", "tf32"):
            a, b = to_bits(hexfloat(*values)[None], name), to_bits(np.ones((1, 2)), name)
            got = dot_rows(90, name, "f32", a, b, to_bits(hexfloat(addend), "f32"), exact=False)
            assert hex(got[0]) == hex(wanted), (name, values)


@pytest.mark.parametrize("exact", (False, True))
def test_columns_are_independent(exact: bool) -> None:
    rng = np.random.default_rng(11)
    a, c = to_bits(rng.standard_normal((16, 16, 3)), "bf16"), to_bits(rng.standard_normal((16, 8, 3)), "f32")
    b = to_bits(rng.standard_normal((16, 8, 3)), "bf16")
    other = b.copy()
    other[:, 1:] = to_bits(np.full((16, 7, 3), np.nan), "bf16")
    first = dot(a, b, c, "bf16", "bf16", "f32", exact=exact, arch=90)
    second = dot(a, other, c, "bf16", "bf16", "f32", exact=exact, arch=90)
    np.testing.assert_array_equal(first[:, 0], second[:, 0])
    assert (second[:, 1:] == 0x7FFFFFFF).all()


# --- wrong input --------------------------------------------------------------------------------------------


def test_errors() -> None:
    a, b, c = (np.zeros((r, 1, 32), np.uint32) for r in (4, 2, 4))
    with pytest.raises(
        ValueError, match=r"m16n8k32\.f32\.bf16\.bf16\.f32 is not modelled; supported: m16n8k8\.f32\.f16"
    ):
        mma_sync("m16n8k32", "bf16", "bf16", "f32", a, b, c, True, 90)
    with pytest.raises(ValueError, match=r"m16n8k16\.f16\.bf16\.bf16\.f16 is not modelled"):
        mma_sync("m16n8k16", "bf16", "bf16", "f16", a, b, c, True, 90)
    with pytest.raises(
        ValueError, match=r"b has shape \(4, 1, 32\) of uint32, needs \(2 registers, 1 warps, 32 lanes\)"
    ):
        mma_sync("m16n8k16", "bf16", "bf16", "f32", a, c, c, True, 90)
    with pytest.raises(ValueError, match=r"a has shape \(128,\)"):
        mma_sync("m16n8k16", "bf16", "bf16", "f32", a.reshape(-1), b, c, True, 90)
    with pytest.raises(ValueError, match=r"c has shape \(4, 1, 32\) of float32"):
        mma_sync("m16n8k16", "bf16", "bf16", "f32", a, b, c.view(np.float32), True, 90)
    with pytest.raises(ValueError, match="no tensor-core model for sm_70; modelled: sm_75 to sm_89"):
        mma_sync("m16n8k16", "bf16", "bf16", "f32", a, b, c, True, 70)
    matrix = np.zeros((4, 4, 1), np.uint32)
    with pytest.raises(ValueError, match=r"dot f32 x f32 \+ f32 is not modelled"):
        dot(matrix, matrix, matrix, "f32", "f32", "f32", exact=True, arch=90)
    with pytest.raises(ValueError, match="factors of 2 and 4 bytes cannot be mixed"):
        dot(matrix, matrix, matrix, "bf16", "tf32", "f32", exact=True, arch=90)
    with pytest.raises(ValueError, match=r"A \(4, 4, 1\), B \(4, 4, 1\), C \(4, 3, 1\) do not fit"):
        dot(matrix, matrix, matrix[:, :3], "bf16", "bf16", "f32", exact=True, arch=90)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ab", ("f16", "bf16"))
@pytest.mark.parametrize("instruction", ("wgmma", "tcgen05.mma"))
def test_exact_wgmma_and_tcgen05_are_mmasim_bit_for_bit(instruction: str, ab: str, kind: str) -> None:
    """K = 16, FP32 accumulators: what `wgmma` and `tensor` ask of `dot`."""
    if instruction == "wgmma":
        arch, model = 90, WGMMA("Hopper", f"m64n8k16.f32.{ab}.{ab}")
    else:
        arch, model = 100, TCGen05MMA("Blackwell", f"m64n8k16.kind::f16.f32.{ab}.{ab}")
    a, b, c = inputs(kind, 2000, 16, ab, "f32", seed=9)
    wanted = model.dpa(to_tensor(a, ab), to_tensor(b, ab), to_tensor(c, "f32")).view(torch.int32).numpy()
    np.testing.assert_array_equal(dot_rows(arch, ab, "f32", a, b, c), wanted.view(np.uint32))
