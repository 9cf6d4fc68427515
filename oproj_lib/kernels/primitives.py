"""One function per PTX instruction that the kernels issue.

Each is a ``dsl_user_op``: CuTe DSL gives the instruction the source line of the *caller*, so the PTX ``.loc``
lines, and with them every finding of the virtual GPU and every line of a profiler, name the kernel and not
this file.

Values are 32-bit words (``Uint32``, two packed BF16), ``Float32`` accumulators, ``Int32`` shared-memory
addresses and ``Int64`` global addresses. ``offset`` arguments are compile-time bytes that go into the
instruction's immediate field. Instructions that touch memory are volatile with a memory clobber: neither LLVM
nor ptxas may drop or reorder them among themselves; the streaming load in particular has to stay above
``griddepcontrol.wait``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

Words4 = tuple[Uint32, Uint32, Uint32, Uint32]
Floats4 = tuple[Float32, Float32, Float32, Float32]


def _asm(
    text: str,
    outputs: Sequence[type],
    inputs: Sequence[tuple[str, Any]],
    *,
    pure: bool = False,
    loc: ir.Location | None,
    ip: ir.InsertionPoint | None,
) -> list[Any]:
    """Emit ``text`` with ``$0..`` = outputs then inputs; inputs are (register class, value): r, l, f or b.

    Outputs are early-clobber (&): a text of several instructions may write them before it has read its
    inputs. pure: no memory is touched, so the compiler may drop the instruction when nobody uses the result.
    """
    classes = {Uint32: "=&r", Int32: "=&r", Int64: "=&l", Float32: "=&f"}
    constraints = [classes[output] for output in outputs] + [register for register, _ in inputs]
    if not pure:
        constraints.append("~{memory}")
    types = [output.mlir_type for output in outputs]  # type: ignore[attr-defined]
    result_type = None if not types else types[0] if len(types) == 1 else llvm.StructType.get_literal(types)
    result = llvm.inline_asm(
        result_type,
        [value.ir_value(loc=loc, ip=ip) for _, value in inputs],
        text,
        ",".join(constraints),
        has_side_effects=not pure,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    if len(types) <= 1:
        return [outputs[0](result)] if types else []
    return [
        output(llvm.extractvalue(kind, result, [i], loc=loc, ip=ip))
        for i, (output, kind) in enumerate(zip(outputs, types, strict=True))
    ]


def _load4(text: str, address: tuple[str, Any], valid: Boolean | None, loc: Any, ip: Any) -> Words4:
    """Four words from ``[$4]``; with ``valid`` the load is predicated and an invalid lane gets zeros."""
    inputs = [address]
    if valid is not None:
        text = " ".join(f"mov.b32 ${i}, 0;" for i in range(4)) + f" @$5 {text}"
        inputs.append(("b", valid))
    first, second, third, fourth = _asm(text, [Uint32] * 4, inputs, loc=loc, ip=ip)
    return first, second, third, fourth


@dsl_user_op
def thread_index(*, loc: Any = None, ip: Any = None) -> Int32:
    """``%tid.x``, read anew: volatile, so that values derived from it are not kept in registers from one
    stage to the next."""
    return _asm("mov.u32 $0, %tid.x;", [Int32], [], loc=loc, ip=ip)[0]


@dsl_user_op
def load_weight_chunk(address: Int64, offset: int, *, loc: Any = None, ip: Any = None) -> Words4:
    """16 bytes of streamed weights: ``ld.global`` without L1 allocation.

    Never the non-coherent form: ptxas moves ``ld.global.nc`` below the PDL wait, and the preload is gone. The
    evict-first L2 qualifier exists only for 32-byte loads of sm_100 and later (PTX ISA, ``ld``), a lane reads
    16.
    """
    text = f"ld.global.L1::no_allocate.v4.b32 {{$0, $1, $2, $3}}, [$4+{offset}];"
    return _load4(text, ("l", address), None, loc, ip)


@dsl_user_op
def load_global_chunk(
    address: Int64, offset: int, valid: Boolean | None = None, *, loc: Any = None, ip: Any = None
) -> Words4:
    """16 bytes of global memory; zeros where ``valid`` is false."""
    return _load4(f"ld.global.v4.b32 {{$0, $1, $2, $3}}, [$4+{offset}];", ("l", address), valid, loc, ip)


@dsl_user_op
def load_shared_chunk(
    address: Int32, offset: int, valid: Boolean | None = None, *, loc: Any = None, ip: Any = None
) -> Words4:
    """16 bytes of shared memory; zeros where ``valid`` is false."""
    return _load4(f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4+{offset}];", ("r", address), valid, loc, ip)


@dsl_user_op
def load_shared_floats(address: Int32, offset: int, *, loc: Any = None, ip: Any = None) -> Floats4:
    """Four FP32 of shared memory."""
    text = f"ld.shared.v4.f32 {{$0, $1, $2, $3}}, [$4+{offset}];"
    first, second, third, fourth = _asm(text, [Float32] * 4, [("r", address)], loc=loc, ip=ip)
    return first, second, third, fourth


@dsl_user_op
def load_shared_pair(
    address: Int32, offset: int, *, loc: Any = None, ip: Any = None
) -> tuple[Float32, Float32]:
    """Two FP32 of shared memory."""
    text = f"ld.shared.v2.f32 {{$0, $1}}, [$2+{offset}];"
    first, second = _asm(text, [Float32] * 2, [("r", address)], loc=loc, ip=ip)
    return first, second


@dsl_user_op
def prefetch_l2(address: Int64, *, loc: Any = None, ip: Any = None) -> None:
    """Brings the line of an address into L2, and its translation with it. Reads no value."""
    _asm("prefetch.global.L2 [$0];", [], [("l", address)], loc=loc, ip=ip)


@dsl_user_op
def store_shared_float(
    address: Int32, offset: int, value: Float32, *, loc: Any = None, ip: Any = None
) -> None:
    """One FP32 to shared memory."""
    _asm(f"st.shared.f32 [$0+{offset}], $1;", [], [("r", address), ("f", value)], loc=loc, ip=ip)


@dsl_user_op
def copy_chunk_async(
    shared: Int32,
    shared_offset: int,
    address: Int64,
    offset: int,
    valid: Boolean | None = None,
    *,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """``cp.async`` of 16 bytes, global to shared, past L1 (.cg); nothing happens where ``valid`` is false."""
    text = f"cp.async.cg.shared.global [$0+{shared_offset}], [$1+{offset}], 16;"
    inputs: list[tuple[str, Any]] = [("r", shared), ("l", address)]
    if valid is not None:
        text = f"@$2 {text}"
        inputs.append(("b", valid))
    _asm(text, [], inputs, loc=loc, ip=ip)


@dsl_user_op
def copy_chunk_async_or_zero(
    shared: Int32,
    shared_offset: int,
    address: Int64,
    offset: int,
    source_bytes: Int32,
    valid: Boolean | None = None,
    *,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """``cp.async`` of 16 bytes of which ``source_bytes`` (16 or 0) are read and the rest is zero-filled.

    Nothing happens where ``valid`` is false.
    """
    text = f"cp.async.cg.shared.global [$0+{shared_offset}], [$1+{offset}], 16, $2;"
    inputs: list[tuple[str, Any]] = [("r", shared), ("l", address), ("r", source_bytes)]
    if valid is not None:
        text = f"@$3 {text}"
        inputs.append(("b", valid))
    _asm(text, [], inputs, loc=loc, ip=ip)


@dsl_user_op
def mma_bf16(
    accumulator: Floats4, a: Sequence[Uint32], b: Sequence[Uint32], *, loc: Any = None, ip: Any = None
) -> Floats4:
    """accumulator + A @ B: one m16n8k16 product, BF16 in, FP32 accumulate.

    a: four words, b: two words, in the register order of layouts.fragments.
    """
    text = (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    inputs = [("r", word) for word in (*a, *b)] + [("f", value) for value in accumulator]
    d0, d1, d2, d3 = _asm(text, [Float32] * 4, inputs, pure=True, loc=loc, ip=ip)
    return d0, d1, d2, d3


@dsl_user_op
def add_float(first: Float32, second: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """``add.rn.f32``: round to nearest even; a rounding modifier also forbids fusing into an fma."""
    inputs = [("f", first), ("f", second)]
    return _asm("add.rn.f32 $0, $1, $2;", [Float32], inputs, pure=True, loc=loc, ip=ip)[0]


@dsl_user_op
def pack_bf16x2(low: Float32, high: Float32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Two FP32 rounded to BF16 (nearest even); ``low`` goes to bits 0..15, the lower address."""
    inputs = [("f", high), ("f", low)]
    return _asm("cvt.rn.bf16x2.f32 $0, $1, $2;", [Uint32], inputs, pure=True, loc=loc, ip=ip)[0]


@dsl_user_op
def zero_if(condition: Boolean, word: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """0 where ``condition`` holds, else ``word``."""
    return _asm(
        "selp.b32 $0, 0, $1, $2;", [Uint32], [("r", word), ("b", condition)], pure=True, loc=loc, ip=ip
    )[0]


def clear_negative_zeros(word: Uint32) -> Uint32:
    """Each BF16 half 0x8000 (-0.0) becomes 0x0000; every other bit pattern, NaN and Inf included, stays."""
    low, high = word & 0xFFFF, word & 0xFFFF0000
    return zero_if(low == 0x8000, low) | zero_if(high == 0x80000000, high)


@dsl_user_op
def load_address(table: Int64, index: int, *, loc: Any = None, ip: Any = None) -> Int64:
    """Entry ``index`` of an int64 table in global memory."""
    return _asm(f"ld.global.b64 $0, [$1+{8 * index}];", [Int64], [("l", table)], loc=loc, ip=ip)[0]


@dsl_user_op
def pack8(values: Sequence[Float32], policy: str, *, loc: Any = None, ip: Any = None) -> Words4:
    """Eight FP32 rounded to four BF16x2 words, first value at the lowest address.

    policy "latent": -0.0 halves become +0.0 *after* rounding (a tiny negative sum can round to -0.0), because
    an armed mailbox word is made of them; "plain" sends what rounding gave.
    """
    words = [pack2(values[i], values[i + 1], policy, loc=loc, ip=ip) for i in range(0, 8, 2)]
    return words[0], words[1], words[2], words[3]


@dsl_user_op
def pack2(low: Float32, high: Float32, policy: str, *, loc: Any = None, ip: Any = None) -> Uint32:
    """One word of ``pack8``."""
    word = pack_bf16x2(low, high, loc=loc, ip=ip)
    return clear_negative_zeros(word) if policy == "latent" else word


@dsl_user_op
def store_chunk_multicast(address: Int64, words: Words4, *, loc: Any = None, ip: Any = None) -> None:
    """16 bytes to every copy behind a multicast address (sm_90 and later).

    relaxed.sys: readers on other GPUs poll this memory while it is written, which a weak store would make a
    data race.
    """
    text = "multimem.st.relaxed.sys.global.v4.bf16x2 [$0], {$1, $2, $3, $4};"
    _asm(text, [], [("l", address), *(("r", word) for word in words)], loc=loc, ip=ip)


@dsl_user_op
def store_chunk(address: Int64, words: Words4, *, loc: Any = None, ip: Any = None) -> None:
    """16 bytes to one rank's memory, visible to pollers on any GPU (relaxed.sys, as above)."""
    text = "st.relaxed.sys.global.v4.b32 [$0], {$1, $2, $3, $4};"
    _asm(text, [], [("l", address), *(("r", word) for word in words)], loc=loc, ip=ip)
