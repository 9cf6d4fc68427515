"""Operand tables: boundary values crossed with each other, then random ones from a fixed seed."""

from __future__ import annotations

import zlib
from functools import cache
from itertools import product

import numpy as np
import numpy.typing as npt

from oproj_lib.vgpu.registers import DTYPES

from .case import word_bits

Array = npt.NDArray[np.unsignedinteger]
BLOCK = 128
ROWS = {1: 2048, 2: 2560, 3: 4096}  # by number of operands

# Bit patterns. Zeros, subnormals, the normal range's ends, one and its neighbours, infinities, quiet and signalling
# NaNs with payloads, ties and limits of the narrower formats, limits of the integers.
F32 = (
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x807FFFFF, 0x00800000, 0x80800000, 0x00800001,
    0x3F800000, 0xBF800000, 0x3F7FFFFF, 0x3F800001, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000,
    0xFFC00000, 0x7F800001, 0xFF812345, 0x7FFFFFFF, 0x00400000, 0x3F000000, 0xBF000000, 0x3FC00000, 0xC0200000,
    0x4B000001, 0x4B800000, 0x4EFFFFFF, 0x4F000000, 0xCF000000, 0x4F800000, 0x5F000000, 0xDF000000, 0x5F800000,
    0x477FE000, 0x477FEFFF, 0x477FF000, 0x38800000, 0x387FF000, 0x33000000, 0x33000001, 0x33800000, 0x3F801000,
    0x3F803000, 0x3F808000, 0x3F818000, 0x7F7F7FFF, 0x7F7F8000, 0x1F800000, 0x20000001, 0x427F0000, 0xC3000000,
)  # fmt: skip
F64 = (
    0x0000000000000000, 0x8000000000000000, 0x0000000000000001, 0x800FFFFFFFFFFFFF, 0x0010000000000000,
    0x3FF0000000000000, 0xBFF0000000000000, 0x3FEFFFFFFFFFFFFF, 0x3FF0000000000001, 0x7FEFFFFFFFFFFFFF,
    0xFFEFFFFFFFFFFFFF, 0x7FF0000000000000, 0xFFF0000000000000, 0x7FF8000000000000, 0xFFF8000000000000,
    0x7FF0000000000001, 0xFFF0123456789ABC, 0x7FFFFFFFFFFFFFFF, 0x3FE0000000000000, 0xC004000000000000,
    0x41DFFFFFFFC00000, 0x41E0000000000000, 0xC1E0000000000000, 0xC1E0000000200000, 0x43E0000000000000,
    0xC3E0000000000000, 0x43F0000000000000, 0x47EFFFFFE0000000, 0x47EFFFFFF0000000, 0x3810000000000000,
    0x36A0000000000000, 0x3690000000000000, 0x3FF0000010000000, 0x3FF0000030000000, 0x40EFFDFFFFFFFFFF,
    0x40EFFE0000000000, 0x3F10000000000000, 0x3E60000000000001, 0x3FF0020000000000, 0x1FF0000000000000,
)  # fmt: skip
F16 = (
    0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x83FF, 0x0400, 0x8400, 0x0401, 0x3C00, 0xBC00, 0x3BFF, 0x3C01, 0x7BFF,
    0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0xFE00, 0x7C01, 0xFD23, 0x7FFF, 0x0200, 0x3800, 0xB800, 0x4100, 0x6400, 0x1C00,
)  # fmt: skip
BF16 = (
    0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x807F, 0x0080, 0x8080, 0x0081, 0x3F80, 0xBF80, 0x3F7F, 0x3F81, 0x7F7F,
    0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0xFFC0, 0x7F81, 0xFF93, 0x7FFF, 0x0040, 0x3F00, 0xBF00, 0x4020, 0x4B00, 0x1F80,
)  # fmt: skip
SMALL = (0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256)


def integer_specials(bits: int) -> tuple[int, ...]:
    """Small numbers, the ends of the signed and the unsigned range, alternating bits."""
    top, ones = 1 << (bits - 1), (1 << bits) - 1
    ends = (
        top - 1,
        top,
        top + 1,
        ones - 1,
        ones,
        ones // 3,
        ones // 3 * 2,
        1 << (bits // 2),
        (1 << (bits // 2)) - 1,
    )
    return (*SMALL, *ends, *(ones + 1 - n for n in (2, 3, 7, 128)))


def specials(type_name: str) -> tuple[int, ...]:
    """Bit patterns at the boundaries of a type (one element of a packed type)."""
    floats = {"f32": F32, "f64": F64, "f16": F16, "bf16": BF16, "f16x2": F16, "bf16x2": BF16}
    if type_name == "pred":
        return (0, 1)
    if type_name == "b1_32":  # a shift amount or a bit position
        return SMALL
    return floats.get(type_name) or integer_specials(word_bits(type_name))


def seed_of(text: str) -> int:
    return zlib.crc32(text.encode())


def element_bits(type_name: str) -> int:
    return 16 if type_name in ("f16x2", "bf16x2") else 32 if type_name == "b1_32" else word_bits(type_name)


def random_words(type_name: str, rows: int, rng: np.random.Generator) -> Array:
    """Half of them random bits; the rest floats of moderate size (so that sums round) or small integers."""
    bits = element_bits(type_name)
    words = rng.integers(0, 1 << 64, rows, np.uint64, endpoint=False) >> np.uint64(64 - bits) if bits < 64 else (
        rng.integers(0, 1 << 64, rows, np.uint64, endpoint=False)
    )  # fmt: skip
    if type_name == "pred":
        return (words & np.uint64(1)).astype(np.uint32)
    half = rows // 2
    base = type_name.removesuffix("x2")
    if base in ("f16", "bf16", "f32", "f64"):
        values = rng.standard_normal(half) * np.exp2(rng.integers(-12, 13, half))
        words[:half] = values.astype(DTYPES[base]).view(f"u{bits // 8}")
    elif type_name == "b1_32":
        words = rng.integers(0, 300, rows).astype(np.uint64)
    else:
        words[:half] = words[:half] >> rng.integers(0, bits, half).astype(np.uint64)
    return words.astype(f"u{bits // 8}")


@cache
def table(types: tuple[str, ...]) -> tuple[Array, ...]:
    """One array per operand, a row per thread: boundary values crossed, then random rows.

    Raises ValueError for more than three operands.
    """
    if not 1 <= len(types) <= 3:
        raise ValueError(f"{len(types)} operands {types}: one to three")
    rng = np.random.default_rng(seed_of(" ".join(types)))
    rows = ROWS[len(types)]
    choices = [specials(name) if len(types) < 3 else triple_specials(name) for name in types]
    crossed = list(product(*choices))
    if len(crossed) > rows - 512:
        kept = rng.permutation(len(crossed))[: rows - 512]
        crossed = [crossed[i] for i in np.sort(kept)]
    columns = []
    for i, name in enumerate(types):
        first = np.array([row[i] for row in crossed], np.uint64)
        rest = random_words(name, rows - len(crossed), rng).astype(np.uint64)
        words = np.concatenate([first, rest])
        if name.endswith("x2"):  # the upper element meets other partners than the lower one
            words = words | np.roll(words, 37 * (i + 1)) << np.uint64(16)
        columns.append(words.astype(f"u{(32 if name == 'b1_32' else word_bits(name)) // 8}"))
    return tuple(columns)


def triple_specials(type_name: str) -> tuple[int, ...]:
    items = specials(type_name)
    floats = type_name.removesuffix("x2") in ("f16", "bf16", "f32", "f64")
    wanted = (0, 1, 2, 4, 6, 9, 10, 11, 13, 15, 16, 19, 20, 21) if floats else range(0, len(items), 2)
    return tuple(items[i] for i in wanted if i < len(items))


@cache
def every_half() -> tuple[Array, ...]:
    """All 65,536 patterns of 16 bits."""
    return (np.arange(1 << 16, dtype=np.uint16),)


def cancelling(type_name: str) -> tuple[Array, Array, Array]:
    """Triples (a, b, c) in which c is nearly -a b, so that a fused multiply-add shows that it rounds once."""
    rng = np.random.default_rng(seed_of("cancelling " + type_name))
    dtype = DTYPES[type_name]
    scale = np.exp2(rng.integers(-6, 7, 1024))
    a, b = (rng.standard_normal(1024) * scale).astype(dtype), rng.standard_normal(1024).astype(dtype)
    c = (-(a.astype(np.float64) * b.astype(np.float64))).astype(dtype)
    bits = f"u{dtype.itemsize}"
    return a.view(bits), b.view(bits), c.view(bits)
