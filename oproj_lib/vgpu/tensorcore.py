"""Matrix arithmetic of the tensor cores: D = A x B + C over many warps at once.

Two arithmetics, chosen per call:

*fast*
    Plain FP32.  ``acc = C``, then for k = 0, 1, .. K-1 in that order ``acc = fl(acc + fl(a[k] * b[k]))``, all
    rounded to nearest even.  (FP16, BF16 and TF32 products are exact in FP32 unless they leave its exponent
    range.)  One output never depends on other rows, columns or warps.  FP16 accumulators are widened first
    and rounded once, at the end.
*exact*
    What the silicon does, bit for bit, as modelled by the PyPI package ``mmasim`` ("truncated fused
    dot-product-add").  One hardware step takes up to ``step`` products and the addend:

    1. every factor is ``sig * 2**exp`` with 1 <= abs(sig) < 2, or less for a subnormal, whose exponent stays
       at the format's least; a product has exponent ``exp_a + exp_b`` and abs(sig) < 4 (*not* normalised);
    2. all terms are aligned to the largest exponent (a zero's is `Datapath.zero_exponent`) and truncated,
       toward zero, to `Datapath.fraction_bits` bits after the point;
    3. the aligned integers are summed exactly;
    4. the sum is rounded once: toward zero to FP32 (overflow gives Inf), or to nearest even to FP16.

    A zero result is always +0.  Any NaN, Inf x 0 and Inf - Inf give the canonical NaN (0x7fffffff, 0x7fff).
    Longer K are several steps, each one's rounded result being the addend of the next.

Everything inside works on *batch-last* matrices (`oproj_lib.vgpu.fdpa`); fragments (PTX ISA, "Matrix
Fragments for mma.m16n8k16" and its neighbours) are only a gather before and a scatter after.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numba import njit

from .fdpa import Array, Code, exact_dot, fast_dot, integer_dot

Bits = npt.NDArray[np.uint32]
WARP = 32
_BLOCK = 64  # warps handled together: 16 x 16 x 64 words of A are 64 KiB, which stays in the L2 cache


@dataclass(frozen=True)
class Format:
    """A binary floating-point format held in the low bits of a word, after dropping ``drop`` low bits."""

    name: str
    exponent_bits: int
    fraction_bits: int
    drop: int = 0  # TF32 lives in an FP32 word; the tensor core ignores the low 13 bits
    bytes_: int = 2


FORMATS = {
    "f16": Format("f16", 5, 10),
    "bf16": Format("bf16", 8, 7),
    "tf32": Format("tf32", 8, 10, drop=13, bytes_=4),
    "f32": Format("f32", 8, 23, bytes_=4),
}


@dataclass(frozen=True)
class Datapath:
    """One generation's adder: alignment width, and bytes of one operand's K consumed by one hardware step."""

    fraction_bits: int
    step_bytes: int

    def zero_exponent(self, d_type: str) -> int:
        """Exponent that a zero term takes part with: the result's least, less guard bits (mmasim)."""
        guard = self.fraction_bits - 18  # 7 on Hopper: -126 - 7 = -133, -14 - 7 = -21
        return (-14 if d_type == "f16" else -126) - guard


def datapath(arch: int) -> Datapath:
    """The adder of compute capability ``arch`` (80 for sm_80, 90 for sm_90a, 100 for sm_100a).

    Turing, Ampere and Ada (75-89) keep 24 fractional bits and add 16 bytes of K per step; Hopper and the
    Blackwells (90, 100-121) keep 25 and add 32 bytes.  mmasim's names are "Turing", "Ampere", "Ada Lovelace",
    "Hopper", "Blackwell" (sm_100) and "RTX Blackwell" (sm_120).

    Raises ValueError for any other architecture.
    """
    if 75 <= arch < 90:
        return Datapath(fraction_bits=24, step_bytes=16)
    if 90 <= arch < 130:
        return Datapath(fraction_bits=25, step_bytes=32)
    raise ValueError(
        f"no tensor-core model for sm_{arch}; modelled: sm_75 to sm_89 (24 bits), sm_90 to sm_121 (25 bits)"
    )


# ----------------------------------------------------------------------------------------------------------
# Compiled fragments: register r of every lane of every warp <-> batch-last matrices
#
# With e = elements per 32-bit word, g = lane // 4, t = lane % 4, all the m16n8 shapes have one layout:
#   A register r: row g + 8 * (r % 2), columns e * t + {0 .. e-1} + 4 * e * (r // 2)
#   B register r: rows (k) e * t + {0 .. e-1} + 4 * e * r, column (n) g
#   C, D register i (32-bit elements): row g + 8 * (i // 2), column 2 * t + i % 2
#   C, D register i (FP16 pairs):      row g + 8 * i, columns 2 * t + {0, 1}


@njit(cache=True, nogil=True)
def _gather_a(a: Array, first: int, per_word: int, out: Array) -> None:
    bits = 32 // per_word
    mask = np.uint32((1 << bits) - 1)
    width = out.shape[2]
    for r in range(a.shape[0]):
        for lane in range(32):
            row = lane // 4 + 8 * (r % 2)
            column = per_word * (lane % 4) + 4 * per_word * (r // 2)
            for j in range(per_word):
                target = out[row, column + j]
                for w in range(width):
                    target[w] = (a[r, first + w, lane] >> np.uint32(j * bits)) & mask


@njit(cache=True, nogil=True)
def _gather_b(b: Array, first: int, per_word: int, out: Array) -> None:
    bits = 32 // per_word
    mask = np.uint32((1 << bits) - 1)
    width = out.shape[2]
    for r in range(b.shape[0]):
        for lane in range(32):
            row = per_word * (lane % 4) + 4 * per_word * r
            for j in range(per_word):
                target = out[row + j, lane // 4]
                for w in range(width):
                    target[w] = (b[r, first + w, lane] >> np.uint32(j * bits)) & mask


@njit(cache=True, nogil=True)
def _gather_c(c: Array, first: int, out: Array) -> None:
    width = out.shape[2]
    for m in range(16):
        for n in range(8):
            lane = (m % 8) * 4 + n // 2
            for w in range(width):
                if c.shape[0] == 4:
                    out[m, n, w] = c[2 * (m // 8) + n % 2, first + w, lane]
                else:
                    out[m, n, w] = (c[m // 8, first + w, lane] >> np.uint32(16 * (n % 2))) & np.uint32(0xFFFF)


@njit(cache=True, nogil=True)
def _scatter_d(matrix: Array, first: int, d: Array) -> None:
    width = matrix.shape[2]
    for m in range(16):
        for n in range(8):
            lane = (m % 8) * 4 + n // 2
            for w in range(width):
                if d.shape[0] == 4:
                    d[2 * (m // 8) + n % 2, first + w, lane] = matrix[m, n, w]
                elif n % 2 == 0:
                    d[m // 8, first + w, lane] = matrix[m, n, w] | (matrix[m, n + 1, w] << np.uint32(16))


@njit(cache=True, nogil=True)
def _mma_m16n8(
    a: Array,
    b: Array,
    c: Array,
    d: Array,
    depth: int,
    a_fmt: Code,
    b_fmt: Code,
    c_fmt: Code,
    mode: int,
    step: int,
    fraction_bits: int,
    zero_exp: int,
) -> None:
    """Fragments to fragments, ``_BLOCK`` warps at a time (the block's matrices stay in the cache).

    mode: 0 FP32, 1 exact, 2 integer (a_fmt[0], b_fmt[0] then say whether the operand is signed).
    """
    warps = a.shape[1]
    per_word = depth * 2 // (4 * a.shape[0])
    for first in range(0, warps, _BLOCK):
        width = min(_BLOCK, warps - first)
        left = np.empty((16, depth, width), np.uint32)
        right = np.empty((depth, 8, width), np.uint32)
        acc = np.empty((16, 8, width), np.uint32)
        _gather_a(a, first, per_word, left)
        _gather_b(b, first, per_word, right)
        _gather_c(c, first, acc)
        if mode == 0:
            fast_dot(left, right, acc, acc, a_fmt, b_fmt, c_fmt)
        elif mode == 1:
            exact_dot(left, right, acc, acc, a_fmt, b_fmt, c_fmt, step, fraction_bits, zero_exp)
        else:
            integer_dot(left, right, acc, acc, a_fmt[0] != 0, b_fmt[0] != 0)
        _scatter_d(acc, first, d)


# ----------------------------------------------------------------------------------------------------------
# Public functions

_FLOAT_SHAPES = {  # element types of A and B -> K of the shapes that exist, types of C and D
    "f16": ((8, 16), ("f32", "f16")),
    "bf16": ((8, 16), ("f32",)),
    "tf32": ((4, 8), ("f32",)),
}
_INTEGER_SHAPES = (16, 32)


def supported_mma() -> tuple[str, ...]:
    """Every ``mma.sync`` this module computes, as ``shape.d.a.b.c`` of the PTX opcode."""
    floats = [
        f"m16n8k{k}.{d}.{ab}.{ab}.{d}"
        for ab, (depths, results) in _FLOAT_SHAPES.items()
        for k in depths
        for d in results
    ]
    integers = [
        f"m16n8k{k}.s32.{a}.{b}.s32" for k in _INTEGER_SHAPES for a in ("s8", "u8") for b in ("s8", "u8")
    ]
    return tuple(floats + integers)


def _codes(name: str) -> Code:
    fmt = FORMATS[name]
    return fmt.exponent_bits, fmt.fraction_bits, fmt.drop


def _element_bytes(name: str) -> int:
    return FORMATS[name].bytes_


def mma_sync(
    shape: str,
    a_type: str,
    b_type: str,
    c_type: str,
    a: Bits,
    b: Bits,
    c: Bits,
    exact: bool,
    arch: int,
    out: Bits | None = None,
) -> Bits:
    """``mma.sync.aligned.<shape>.row.col`` for many warps at once.

    a, b, c: uint32 [registers, warps, 32], register r of every lane, in the fragment layouts of the PTX ISA
    ("Matrix Fragments for mma.m16n8k8" and the following sections).  c_type is the type of C and of D.
    Returns D, uint32 [registers of C, warps, 32] (``out``, when it is given; it may be ``c`` itself).
    ``exact`` and ``arch`` choose the arithmetic (see the module's docstring; ``arch`` matters to exact only).

    Raises ValueError for a combination outside `supported_mma()`, or arrays whose shapes do not fit it.
    """
    name = f"{shape}.{c_type}.{a_type}.{b_type}.{c_type}"
    if name not in supported_mma():
        raise ValueError(f"mma.sync {name} is not modelled; supported: {', '.join(supported_mma())}")
    depth = int(shape.partition("k")[2])
    integer = c_type == "s32"
    per_word = 4 if integer else 4 // _element_bytes(a_type)
    groups = depth // (4 * per_word)
    warps = a.shape[1] if a.ndim == 3 else 0
    d = np.empty(c.shape, np.uint32) if out is None else out
    wanted = {
        "a": (a, 2 * groups),
        "b": (b, groups),
        "c": (c, 2 if c_type == "f16" else 4),
        "out": (d, c.shape[0]),
    }
    for label, (array, registers) in wanted.items():
        if array.shape != (registers, warps, WARP) or array.dtype != np.uint32:
            raise ValueError(
                f"mma.sync {name}: {label} has shape {array.shape} of {array.dtype}, "
                f"needs ({registers} registers, {warps} warps, {WARP} lanes) of uint32"
            )
    if integer:
        signs = ((int(a_type == "s8"), 0, 0), (int(b_type == "s8"), 0, 0))
        settings = (*signs, (0, 0, 0), 2, depth, 0, 0)
    else:
        path = datapath(arch)
        codes = (_codes(a_type), _codes(b_type), _codes(c_type))
        step = path.step_bytes // _element_bytes(a_type)
        settings = (*codes, int(exact), step, path.fraction_bits, path.zero_exponent(c_type))
    # One compiled version serves all: contiguous arrays only.
    result = d if d.flags.c_contiguous else np.empty(d.shape, np.uint32)
    _mma_m16n8(*(np.ascontiguousarray(x) for x in (a, b, c)), result, depth, *settings)
    if result is not d:
        d[...] = result
    return d


def dot(a: Bits, b: Bits, c: Bits, a_type: str, b_type: str, c_type: str, *, exact: bool, arch: int) -> Bits:
    """D[m, n, batch] = A[m, k, batch] x B[k, n, batch] + C[m, n, batch] on bits, one element per word.

    The arithmetic of `mma_sync` without its fragments, for instructions that find their operands elsewhere
    (wgmma, tcgen05.mma).  Any m, n, k and batch; K longer than one hardware step is added step by step.
    a_type, b_type: "f16", "bf16" or "tf32"; c_type (of C and D): "f32" or "f16".

    Raises ValueError for other types, or shapes that do not fit each other.
    """
    if a_type not in _FLOAT_SHAPES or b_type not in _FLOAT_SHAPES or c_type not in ("f32", "f16"):
        raise ValueError(
            f"dot {a_type} x {b_type} + {c_type} is not modelled; factors: f16, bf16, tf32; addend: f32, f16"
        )
    if _element_bytes(a_type) != _element_bytes(b_type):
        raise ValueError(
            f"dot: factors of {_element_bytes(a_type)} and {_element_bytes(b_type)} bytes cannot be mixed"
        )
    m, k, batch = a.shape
    n = b.shape[1]
    if b.shape != (k, n, batch) or c.shape != (m, n, batch):
        raise ValueError(
            f"dot: A {a.shape}, B {b.shape}, C {c.shape} do not fit [m,k,batch], [k,n,batch], [m,n,batch]"
        )
    a, b, c = (np.ascontiguousarray(x, dtype=np.uint32) for x in (a, b, c))
    d = np.empty_like(c)
    codes = (_codes(a_type), _codes(b_type), _codes(c_type))
    if not exact:
        fast_dot(a, b, c, d, *codes)
        return d
    path = datapath(arch)
    step = path.step_bytes // _element_bytes(a_type)
    exact_dot(a, b, c, d, *codes, step, path.fraction_bits, path.zero_exponent(c_type))
    return d
