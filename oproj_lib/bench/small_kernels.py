"""The tiny kernels of a measurement, in PTX: what runs before and after the projection, and a memory reader.

Written in PTX so that the GPU's driver compiles them (no CUDA toolkit there), and so that the virtual GPU runs the
same text in the tests.
"""

from __future__ import annotations

from oproj_lib.problem import CTAS

CHUNK_BYTES = 16
PREDECESSOR_GRID = 132
PREDECESSOR_BLOCK = 128
"""The recorded chain's predecessor: one CTA per SM of an H200, a quarter of a projection CTA's threads."""
READING_BLOCK = 512
"""Threads of a CTA of the predecessor that reads memory: enough loads in flight for nearly all bandwidth."""
READING_SHARED_BYTES = 120 * 1024
"""Of one of its CTAs. As in an attention kernel, whose tiles need it, one CTA fits on an SM; without it, all 132 of
the next predecessor start on the 20 SMs that have no CTA of the projection, and read slowly."""
CONSUMER_GRID, CONSUMER_BLOCK = CTAS, 128
EMPTY_BLOCK = 512
READER_BLOCK = 512
LOADS = 8
"""16-byte loads in flight per thread of the reader."""

_HEADER = """.version 8.0
.target sm_90
.address_size 64
"""

_THREAD = """    mov.u32 %thread, %ctaid.x;
    mov.u32 %size, %ntid.x;
    mov.u32 %lane, %tid.x;
    mad.lo.u32 %index, %thread, %size, %lane;
    mov.u32 %grid, %nctaid.x;
    mul.lo.u32 %stride, %grid, %size;
"""
_REGISTERS = """    .reg .pred %p<3>;
    .reg .b32 %thread, %size, %lane, %index, %grid, %stride, %chunks, %word<4>;
    .reg .b64 %to, %from, %offset, %a, %b;
"""
_COPY = """copy:
    setp.ge.u32 %p1, %index, %chunks;
    @%p1 bra done;
    mul.wide.u32 %offset, %index, 16;
    add.s64 %a, %from, %offset;
    add.s64 %b, %to, %offset;
    ld.global.v4.b32 {%word0, %word1, %word2, %word3}, [%a];
    st.global.v4.b32 [%b], {%word0, %word1, %word2, %word3};
    add.u32 %index, %index, %stride;
    bra copy;
done:
    ret;
}
"""

PREDECESSOR = (
    _HEADER
    + """.visible .entry predecessor(
    .param .u64 p_x, .param .u64 p_source, .param .u32 p_chunks, .param .u64 p_cycles)
{
"""
    + _REGISTERS
    + """    .reg .b64 %start, %now, %spent, %cycles;
    griddepcontrol.wait;
    griddepcontrol.launch_dependents;
    mov.u64 %start, %clock64;
    ld.param.u64 %to, [p_x];
    ld.param.u64 %from, [p_source];
    ld.param.u32 %chunks, [p_chunks];
    ld.param.u64 %cycles, [p_cycles];
spin:
    mov.u64 %now, %clock64;
    sub.s64 %spent, %now, %start;
    setp.lt.u64 %p0, %spent, %cycles;
    @%p0 bra spin;
"""
    + _THREAD
    + _COPY
)
"""Waits for what came before, lets its dependents start at once, spins for a number of cycles, then copies source to
x in 16-byte chunks."""

CONSUMER = (
    _HEADER
    + """.visible .entry consumer(.param .u64 p_seen, .param .u64 p_published, .param .u32 p_chunks)
{
"""
    + _REGISTERS
    + """    griddepcontrol.wait;
    ld.param.u64 %to, [p_seen];
    ld.param.u64 %from, [p_published];
    ld.param.u32 %chunks, [p_chunks];
"""
    + _THREAD
    + _COPY
)
"""Waits for the projection, then copies what it published: the copy is what a check looks at."""

EMPTY = (
    _HEADER
    + """.visible .entry empty()
{
    griddepcontrol.wait;
    griddepcontrol.launch_dependents;
    ret;
}
"""
)
"""In the projection's place: what a chain of three kernels costs by itself."""


def reading_predecessor() -> str:
    """`PREDECESSOR` that reads memory instead of spinning, LOADS 16-byte loads of each thread in flight.

    Parameters: x, source, chunks of x, address to read from, number of rounds, address of a word that is never
    written (see `reader`). A round of a grid reads grid * block * LOADS * 16 bytes.
    """
    return (
        _HEADER
        + """.visible .entry reading_predecessor(
    .param .u64 p_x, .param .u64 p_source, .param .u32 p_chunks,
    .param .u64 p_from, .param .u32 p_rounds, .param .u64 p_never)
{
"""
        + _REGISTERS
        + f"    .reg .b32 %fold, %round, %rounds, %w<{4 * LOADS}>;\n    .reg .b64 %step, %never;\n"
        + """    griddepcontrol.wait;
    griddepcontrol.launch_dependents;
    ld.param.u64 %b, [p_from];
    ld.param.u32 %rounds, [p_rounds];
    ld.param.u64 %never, [p_never];
"""
        + _THREAD
        + """    mul.wide.u32 %offset, %index, 16;
    add.s64 %a, %b, %offset;
    mul.wide.u32 %step, %stride, 16;
    mov.b32 %fold, 0;
    mov.b32 %round, 0;
next:
    setp.ge.u32 %p0, %round, %rounds;
    @%p0 bra publish;
"""
        + _loads_and_folds()
        + """    add.u32 %round, %round, 1;
    bra next;
publish:
    ld.param.u64 %to, [p_x];
    ld.param.u64 %from, [p_source];
    ld.param.u32 %chunks, [p_chunks];
    setp.ne.b32 %p1, %fold, 0x5EED5EED;
    @%p1 bra copy;
    st.global.b32 [%never], %fold;
"""
        + _COPY
    )


def _loads_and_folds() -> str:
    """LOADS loads from %a on, %step bytes apart, and their words XORed into %fold."""
    words = [f"{{{', '.join(f'%w{4 * load + i}' for i in range(4))}}}" for load in range(LOADS)]
    loads = "".join(
        f"    ld.global.L1::no_allocate.v4.b32 {words[load]}, [%a];\n    add.s64 %a, %a, %step;\n"
        for load in range(LOADS)
    )
    return loads + "".join(f"    xor.b32 %fold, %fold, %w{word};\n" for word in range(4 * LOADS))


def reader() -> str:
    """Reads memory in 16-byte loads, LOADS of them in flight per thread, and keeps nothing.

    Parameters: address, address of one word that is written only if all data XORs to a value that it does not
    have, number of chunks.
    """
    return (
        _HEADER
        + """.visible .entry reader(.param .u64 p_from, .param .u64 p_never, .param .u32 p_chunks)
{
"""
        + _REGISTERS
        + f"    .reg .b32 %fold, %ahead, %last, %w<{4 * LOADS}>;\n    .reg .b64 %step;\n"
        + """    ld.param.u64 %from, [p_from];
    ld.param.u64 %to, [p_never];
    ld.param.u32 %chunks, [p_chunks];
"""
        + _THREAD
        + f"""    mov.b32 %fold, 0;
    mul.wide.u32 %step, %stride, 16;
    mul.lo.u32 %ahead, %stride, {LOADS - 1};
    mul.lo.u32 %stride, %stride, {LOADS};
next:
    add.u32 %last, %index, %ahead;
    setp.ge.u32 %p0, %last, %chunks;
    @%p0 bra done;
    mul.wide.u32 %offset, %index, 16;
    add.s64 %a, %from, %offset;
"""
        + _loads_and_folds()
        + """    add.u32 %index, %index, %stride;
    bra next;
done:
    setp.ne.b32 %p1, %fold, 0x5EED5EED;
    @%p1 bra end;
    st.global.b32 [%to], %fold;
end:
    ret;
}
"""
    )
