"""The kernels around a projection whose steps are recorded, in PTX: they note when the previous kernel has ended
and when the projection has.

    gate -> predecessor -> projection -> after, single launches behind a gate, or a graph without it

Times are %globaltimer. As in ``small_kernels``, PTX: the GPU's driver compiles it, and the virtual GPU runs it in
the tests.
"""

from __future__ import annotations

HEADER = ".version 8.0\n.target sm_90\n.address_size 64\n"

_SPIN = """spin:
    mov.u64 %now, %clock64;
    sub.s64 %spent, %now, %start;
    setp.lt.u64 %p0, %spent, %cycles;
    @%p0 bra spin;
"""

GATE = (
    HEADER
    + """.visible .entry gate(.param .u64 p_cycles)
{
    .reg .pred %p0;
    .reg .b64 %cycles, %start, %now, %spent;
    ld.param.u64 %cycles, [p_cycles];
    mov.u64 %start, %clock64;
"""
    + _SPIN
    + "    ret;\n}\n"
)
"""Holds the stream for a number of cycles, so that the host can queue what follows."""

PREDECESSOR = (
    HEADER
    + """.visible .entry predecessor(
    .param .u64 p_x, .param .u64 p_source, .param .u32 p_chunks, .param .u64 p_cycles, .param .u64 p_stamp)
{
    .reg .pred %p<3>;
    .reg .b32 %thread, %size, %cta, %index, %stride, %chunks, %word<4>;
    .reg .b64 %to, %from, %offset, %a, %b, %start, %now, %spent, %cycles, %stamp, %old;
    griddepcontrol.launch_dependents;
    mov.u64 %start, %clock64;
    ld.param.u64 %to, [p_x];
    ld.param.u64 %from, [p_source];
    ld.param.u32 %chunks, [p_chunks];
    ld.param.u64 %cycles, [p_cycles];
    ld.param.u64 %stamp, [p_stamp];
"""
    + _SPIN
    + """    mov.u32 %cta, %ctaid.x;
    mov.u32 %size, %ntid.x;
    mov.u32 %thread, %tid.x;
    mad.lo.u32 %index, %cta, %size, %thread;
    mov.u32 %stride, %nctaid.x;
    mul.lo.u32 %stride, %stride, %size;
copy:
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
    setp.ne.u32 %p2, %thread, 0;
    @%p2 bra end;
    mov.u64 %now, %globaltimer;
    atom.global.max.u64 %old, [%stamp], %now;
end:
    ret;
}
"""
)
"""Lets its dependents start at once, spins, copies source to x in 16-byte chunks; stamp: the latest end of a CTA."""

AFTER = (
    HEADER
    + """.visible .entry after(.param .u64 p_stamp)
{
    .reg .pred %p0;
    .reg .b32 %thread;
    .reg .b64 %stamp, %now;
    ld.param.u64 %stamp, [p_stamp];
    mov.u32 %thread, %tid.x;
    griddepcontrol.wait;
    setp.ne.u32 %p0, %thread, 0;
    @%p0 bra end;
    mov.u64 %now, %globaltimer;
    st.global.u64 [%stamp], %now;
end:
    ret;
}
"""
)
"""Once the kernel before it has ended: the time to stamp."""
