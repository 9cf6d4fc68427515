"""One function per PTX instruction (or polling loop) that reading and arming a mailbox adds.

As in ``primitives``: each carries the caller's source line, and what touches memory is volatile with a memory
clobber. Addresses are Int64, offsets compile-time bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from oproj_lib.kernels.primitives import Words4, _asm
from oproj_lib.layouts.mailbox import CHUNK_WORDS, SENTINEL

ALL_WORDS = tuple(range(CHUNK_WORDS))


@dsl_user_op
def poll_chunks(
    address: Int64,
    offsets: Sequence[int],
    tested_words: Sequence[int] = ALL_WORDS,
    *,
    loc: Any = None,
    ip: Any = None,
) -> list[Words4]:
    """Load the 16 bytes at every ``address + offset`` until none of their words is armed.

    All loads of a round are in flight together, so a round costs one latency however many chunks there are;
    later rounds load only the chunks that were still missing. Every word is tested, because a 16-byte access
    is four 4-byte accesses to the memory model (PTX ISA, "Vector Data-types"), which may arrive one by one.
    relaxed.sys: the memory is written by other GPUs at the same time (as in ``primitives.store_chunk``), and
    such a load is not served from L1.
    """
    words = [[f"${CHUNK_WORDS * i + j}" for j in ALL_WORDS] for i in range(len(offsets))]
    base = f"${CHUNK_WORDS * len(offsets)}"
    loads = [
        f"ld.relaxed.sys.global.v4.b32 {{{', '.join(words[i])}}}, [{base}+{offset}];"
        for i, offset in enumerate(offsets)
    ]
    tests, again = [], "again"
    for i in range(len(offsets)):
        for place, j in enumerate(tested_words):
            combine, last = (".or", f", p{i}") if place else ("", "")
            tests.append(f"setp.eq{combine}.u32 p{i}, {words[i][j]}, {SENTINEL:#x}{last};")
    tests.append(f"mov.pred {again}, p0;")
    tests += [f"or.pred {again}, {again}, p{i};" for i in range(1, len(offsets))]
    retry = [f"@p{i} {load}" for i, load in enumerate(loads)]
    predicates = ", ".join([again, *(f"p{i}" for i in range(len(offsets)))])
    # On one line, see umma_primitives.barrier_wait.
    text = " ".join(
        [
            f"{{ .reg .pred {predicates};",
            *loads,
            "TEST_${:uid}:",
            *tests,
            f"@!{again} bra DONE_${{:uid}};",
            *retry,
            "bra TEST_${:uid};",
            "DONE_${:uid}: }",
        ]
    )
    flat = _asm(text, [Uint32] * (CHUNK_WORDS * len(offsets)), [("l", address)], loc=loc, ip=ip)
    return [(flat[i], flat[i + 1], flat[i + 2], flat[i + 3]) for i in range(0, len(flat), CHUNK_WORDS)]


@dsl_user_op
def arm_chunk(address: Int64, offset: int, *, loc: Any = None, ip: Any = None) -> None:
    """16 bytes of sentinels to this GPU's own memory.

    A weak store would do, since nobody else touches this memory before the grid has completed; relaxed.sys
    says what the next writer, on another GPU, makes of it.
    """
    words = ", ".join(["$1"] * CHUNK_WORDS)
    text = f"st.relaxed.sys.global.v4.b32 [$0+{offset}], {{{words}}};"
    _asm(text, [], [("l", address), ("r", Uint32(SENTINEL))], loc=loc, ip=ip)


@dsl_user_op
def load_word(address: Int64, offset: int, *, loc: Any = None, ip: Any = None) -> Int32:
    """A 32-bit word of global memory that an earlier kernel wrote.

    relaxed.gpu, hence from L2: a kernel that has not executed ``griddepcontrol.wait`` has not acquired anything,
    and an ordinary load could find an old value in the L1 of its SM, left there by the call before.
    """
    text = f"ld.relaxed.gpu.global.b32 $0, [$1+{offset}];"
    return _asm(text, [Int32], [("l", address)], loc=loc, ip=ip)[0]


@dsl_user_op
def store_word(
    address: Int64, offset: int, word: Int32, valid: Boolean, *, loc: Any = None, ip: Any = None
) -> None:
    """A 32-bit word to global memory, for a later kernel; nothing happens where ``valid`` is false."""
    inputs = [("l", address), ("r", word), ("b", valid)]
    _asm(f"@$2 st.global.b32 [$0+{offset}], $1;", [], inputs, loc=loc, ip=ip)


@dsl_user_op
def load_table_entry(table: Int64, index: Int32, *, loc: Any = None, ip: Any = None) -> Int64:
    """Entry ``index`` of an int64 table in global memory."""
    address = table + Int64(index) * 8
    return _asm("ld.global.b64 $0, [$1];", [Int64], [("l", address)], loc=loc, ip=ip)[0]


@dsl_user_op
def as_float(word: Uint32, *, loc: Any = None, ip: Any = None) -> Float32:
    """The same 32 bits as an FP32."""
    return _asm("mov.b32 $0, $1;", [Float32], [("r", word)], pure=True, loc=loc, ip=ip)[0]


def widen(words: Words4) -> list[Float32]:
    """The eight BF16 of a chunk as FP32, exactly: a BF16 is the upper half of one."""
    values: list[Float32] = []
    for word in words:
        values += [as_float(word << 16), as_float(word & 0xFFFF0000)]
    return values


@dsl_user_op
def store_result(address: Int64, words: Words4, *, loc: Any = None, ip: Any = None) -> None:
    """16 bytes of a kernel's result: an ordinary store, read by kernels that wait for this one."""
    text = "st.global.v4.b32 [$0], {$1, $2, $3, $4};"
    _asm(text, [], [("l", address), *(("r", word) for word in words)], loc=loc, ip=ip)
