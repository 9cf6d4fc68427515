"""FP32 arithmetic whose every rounding is fixed, one function per PTX instruction, and two functions made of them.

As in ``primitives`` each instruction carries the caller's source line. A rounding qualifier (``.rn``) also
forbids fusing and reordering, and nothing here uses an approximate instruction (``rsqrt.approx``,
``ex2.approx``: their results differ between GPUs, and from the virtual GPU). What is computed with these
functions has the same bits on every device that follows IEEE 754.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from oproj_lib.kernels.mailbox_primitives import as_float
from oproj_lib.kernels.primitives import Words4, _asm, add_float

ROUND_TO_INTEGER = 1.5 * 2.0**23
"""Added to an FP32 number below 2**22 it rounds that to an integer, which then fills the sum's lowest bits."""
LOG2_E = 1.4426950408889634
LN2_HIGH = 0.693145751953125
"""ln 2 cut to 16 significant bits: its product with an integer below 2**8 is exact."""
LN2_LOW = 1.42860682030941723e-6
"""ln 2 - LN2_HIGH."""
EXP_TERMS = tuple(1 / factorial for factorial in (5040, 720, 120, 24, 6, 2, 1, 1))
"""Taylor's coefficients, the highest power first. The first term left out is (ln 2 / 2)**8 / 8! = 5e-9."""
EXP_ZERO_BELOW = -87.0
"""Below, exp is taken as 0: the smallest normal FP32 number is exp(-87.3)."""
EXPONENT_SHIFT = 23
ONE_BITS = 0x3F800000


@dsl_user_op
def multiply(first: Float32, second: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """``mul.rn.f32``."""
    inputs = [("f", first), ("f", second)]
    return _asm("mul.rn.f32 $0, $1, $2;", [Float32], inputs, pure=True, loc=loc, ip=ip)[0]


@dsl_user_op
def multiply_add(
    first: Float32, second: Float32, addend: Float32, *, loc: Any = None, ip: Any = None
) -> Float32:
    """``fma.rn.f32``: first * second + addend, rounded once."""
    inputs = [("f", first), ("f", second), ("f", addend)]
    return _asm("fma.rn.f32 $0, $1, $2, $3;", [Float32], inputs, pure=True, loc=loc, ip=ip)[0]


@dsl_user_op
def larger(first: Float32, second: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """``max.f32``: a NaN loses against a number."""
    inputs = [("f", first), ("f", second)]
    return _asm("max.f32 $0, $1, $2;", [Float32], inputs, pure=True, loc=loc, ip=ip)[0]


@dsl_user_op
def square_root(value: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """``sqrt.rn.f32``."""
    return _asm("sqrt.rn.f32 $0, $1;", [Float32], [("f", value)], pure=True, loc=loc, ip=ip)[0]


@dsl_user_op
def reciprocal(value: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """``rcp.rn.f32``."""
    return _asm("rcp.rn.f32 $0, $1;", [Float32], [("f", value)], pure=True, loc=loc, ip=ip)[0]


@dsl_user_op
def load_written_chunk(address: Int64, offset: int, *, loc: Any = None, ip: Any = None) -> Words4:
    """16 bytes of global memory that an earlier kernel wrote, read without an acquire in between.

    relaxed.gpu, hence from L2: a kernel that has not executed ``griddepcontrol.wait`` has not acquired anything,
    and an ordinary load could find in the L1 of its SM what this address held a call ago.
    """
    text = f"ld.relaxed.gpu.global.v4.b32 {{$0, $1, $2, $3}}, [$4+{offset}];"
    first, second, third, fourth = _asm(text, [Uint32] * 4, [("l", address)], loc=loc, ip=ip)
    return first, second, third, fourth


@dsl_user_op
def permute_bytes(word: Uint32, selector: int, *, loc: Any = None, ip: Any = None) -> Float32:
    """``prmt.b32`` of a word and 0: hex digit i of ``selector`` names byte i, 0 to 3 of ``word``, 4 for zero."""
    text = f"{{ .reg .b32 t; prmt.b32 t, $1, 0, {selector:#06x}; mov.b32 $0, t; }}"
    return _asm(text, [Float32], [("r", word)], pure=True, loc=loc, ip=ip)[0]


def widen_again(words: Words4) -> list[Float32]:
    """``widen`` by other instructions, so that the compiler does not keep the results of the first one: they
    need twice the registers of the words."""
    values: list[Float32] = []
    for word in words:
        values += [permute_bytes(word, 0x1044), permute_bytes(word, 0x3244)]
    return values


@dsl_user_op
def as_bits(value: Float32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """The bits of an FP32 number."""
    return _asm("mov.b32 $0, $1;", [Uint32], [("f", value)], pure=True, loc=loc, ip=ip)[0]


@dsl_user_op
def float_if(
    condition: Boolean, first: Float32, second: Float32, *, loc: Any = None, ip: Any = None
) -> Float32:
    """``first`` where ``condition`` holds, else ``second``."""
    inputs: list[tuple[str, Any]] = [("f", first), ("f", second), ("b", condition)]
    return _asm("selp.f32 $0, $1, $2, $3;", [Float32], inputs, pure=True, loc=loc, ip=ip)[0]


@dsl_user_op
def from_lane(value: Float32, distance: int, *, loc: Any = None, ip: Any = None) -> Float32:
    """The value of lane ``lane ^ distance`` (``shfl.sync.bfly``); all 32 lanes of the warp take part."""
    text = f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, 0xffffffff;"
    return _asm(text, [Float32], [("f", value)], loc=loc, ip=ip)[0]


@dsl_user_op
def of_lane(value: Float32, lane: int, *, loc: Any = None, ip: Any = None) -> Float32:
    """The value of lane ``lane`` (``shfl.sync.idx``); all 32 lanes of the warp take part."""
    text = f"shfl.sync.idx.b32 $0, $1, {lane}, 31, 0xffffffff;"
    return _asm(text, [Float32], [("f", value)], loc=loc, ip=ip)[0]


@dsl_user_op
def store_shared_floats(
    address: Int32, offset: int, values: Sequence[Float32], *, loc: Any = None, ip: Any = None
) -> None:
    """Four FP32 to shared memory."""
    inputs: list[tuple[str, Any]] = [("r", address), *(("f", value) for value in values)]
    _asm(f"st.shared.v4.f32 [$0+{offset}], {{$1, $2, $3, $4}};", [], inputs, loc=loc, ip=ip)


@dsl_user_op
def store_shared_float_if(
    address: Int32, offset: int, value: Float32, condition: Boolean, *, loc: Any = None, ip: Any = None
) -> None:
    """One FP32 to shared memory where ``condition`` holds."""
    inputs: list[tuple[str, Any]] = [("r", address), ("f", value), ("b", condition)]
    _asm(f"@$2 st.shared.f32 [$0+{offset}], $1;", [], inputs, loc=loc, ip=ip)


def reciprocal_root(value: Float32) -> Float32:
    """1 / sqrt(value), two roundings. 0 for +Inf, +Inf for 0."""
    return reciprocal(square_root(value))


def exponential(x: Float32) -> Float32:
    """exp(x) for x <= 0 or NaN, off by at most 2 units in the last place; 0 below -87.

    x = n ln 2 + r with an integer n and |r| <= ln 2 / 2; then exp(x) = 2**n exp(r), and a polynomial gives
    exp(r). A dozen dependent instructions of 4 cycles, as fast as ``ex2.approx`` and its multiplication
    within 10 ns.
    """
    shifted = multiply_add(x, Float32(LOG2_E), Float32(ROUND_TO_INTEGER))
    n = add_float(shifted, Float32(-ROUND_TO_INTEGER))
    r = multiply_add(n, Float32(-LN2_HIGH), x)
    r = multiply_add(n, Float32(-LN2_LOW), r)
    result = Float32(EXP_TERMS[0])
    for term in EXP_TERMS[1:]:
        result = multiply_add(result, r, Float32(term))
    # The shift leaves n of the integer that ``shifted`` holds; it becomes the exponent of 2**n.
    power = as_float((as_bits(shifted) << EXPONENT_SHIFT) + ONE_BITS)
    return float_if(x < Float32(EXP_ZERO_BELOW), Float32(0.0), multiply(result, power))
