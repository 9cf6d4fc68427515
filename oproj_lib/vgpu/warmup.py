"""Compiles the virtual GPU's inner loops before anything is timed: about half a minute once per installation, then a
fraction of a second per process (numba keeps the machine code beside the sources)."""

from __future__ import annotations

import sys
import threading
from functools import cache

import numpy as np

from .machine import VirtualGPU, load

PATIENCE_SECONDS = 3.0

# One warp that touches every compiled loop of a producer: both transports, cp.async, shared memory, mma.sync.
_PTX = """.version 8.0
.target sm_90
.address_size 64
.visible .entry warm_up(.param .u64 a, .param .u64 window)
{
    .reg .b32 %r<12>, %address, %lane, %offset;
    .reg .b64 %a, %window, %at;
    .shared .align 16 .b8 tile[1024];
    ld.param.u64 %a, [a];
    ld.param.u64 %window, [window];
    mov.u32 %lane, %tid.x;
    shl.b32 %offset, %lane, 4;
    cvt.u64.u32 %at, %offset;
    add.u64 %a, %a, %at;
    add.u64 %window, %window, %at;
    mov.u32 %address, tile;
    add.u32 %address, %address, %offset;
    cp.async.cg.shared.global [%address], [%a], 16;
    cp.async.wait_all;
    bar.sync 0;
    ld.shared.v4.b32 {%r0, %r1, %r2, %r3}, [%address];
    ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%a];
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
        {%r8, %r9, %r10, %r11}, {%r0, %r1, %r2, %r3}, {%r4, %r5}, {%r4, %r5, %r6, %r7};
    st.shared.b32 [%address], %r8;
    st.global.v4.b32 [%a], {%r8, %r9, %r10, %r11};
    multimem.st.global.v4.bf16x2 [%window], {%r8, %r9, %r10, %r11};
    ret;
}
"""


@cache
def warm_up() -> None:
    """Runs every compiled loop once; says so on stderr when that takes more than a few seconds."""
    text = "compiling the inner loops of the virtual GPU (half a minute, once) ..."
    message = threading.Timer(PATIENCE_SECONDS, lambda: print(text, file=sys.stderr, flush=True))
    message.daemon = True
    message.start()
    try:
        module, gpu = load(_PTX), VirtualGPU()
        array = gpu.upload(np.zeros(512, np.uint8), "a")
        window = gpu.multicast([gpu.empty(512, np.uint8, "copy")])
        for exact in (False, True):
            gpu.launch(module, block=32, args=[array, window], exact=exact, checks=True).raise_for_findings()
    finally:
        message.cancel()
