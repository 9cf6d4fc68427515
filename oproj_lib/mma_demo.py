"""One `mma.sync.m16n8k16`, executed: a minimal PTX kernel whose registers are packed with the maps of
fragment_maps.

The virtual GPU has its own model of the fragments. If ours were wrong, the product would be.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from oproj_lib import vgpu
from oproj_lib.fragment_maps import ELEMENTS, MAPS, REGISTERS, SHAPES, c_element
from oproj_lib.layouts.fragments import WARP_LANES
from oproj_lib.problem import Array

PTX = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry multiply(.param .u64 a, .param .u64 b, .param .u64 d)
{
    .reg .b32 %a<4>, %b<2>, %lane;
    .reg .f32 %d<4>, %zero;
    .reg .b64 %at, %offset;
    mov.u32 %lane, %tid.x;
    mov.f32 %zero, 0f00000000;
    ld.param.u64 %at, [a];
    mul.wide.u32 %offset, %lane, 16;
    add.u64 %at, %at, %offset;
    ld.global.v4.b32 {%a0, %a1, %a2, %a3}, [%at];
    ld.param.u64 %at, [b];
    mul.wide.u32 %offset, %lane, 8;
    add.u64 %at, %at, %offset;
    ld.global.v2.b32 {%b0, %b1}, [%at];
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
        {%d0, %d1, %d2, %d3}, {%a0, %a1, %a2, %a3}, {%b0, %b1}, {%zero, %zero, %zero, %zero};
    ld.param.u64 %at, [d];
    mul.wide.u32 %offset, %lane, 16;
    add.u64 %at, %at, %offset;
    st.global.v4.f32 [%at], {%d0, %d1, %d2, %d3};
    ret;
}
"""


def pack(operand: str, matrix: Array) -> Array:
    """The registers of all lanes, [32, registers, 2] BF16, that hold a matrix as operand "A" or "B".

    Raises:
        ValueError: if the matrix has not the operand's shape.
    """
    if matrix.shape != SHAPES[operand]:
        raise ValueError(f"operand {operand} has shape {SHAPES[operand]}, the matrix {matrix.shape}")
    registers = np.zeros((WARP_LANES, REGISTERS[operand], ELEMENTS[operand]), ml_dtypes.bfloat16)
    for place in np.ndindex(registers.shape):
        registers[place] = matrix[MAPS[operand](*place)]
    return registers


def multiply_registers(a: Array, b: Array) -> Array:
    """D [16, 8] FP32 of one instruction with these registers: a [32, 4, 2] and b [32, 2, 2] BF16, C = 0."""
    d = np.zeros((WARP_LANES, REGISTERS["C"]), np.float32)
    report = vgpu.run_ptx(
        PTX, block=WARP_LANES, args=[np.ascontiguousarray(a), np.ascontiguousarray(b), d], checks=True
    )
    report.raise_for_findings()
    product = np.zeros(SHAPES["C"], np.float32)
    for lane, register in np.ndindex(d.shape):
        product[c_element(lane, register)] = d[lane, register]
    return product


def multiply(a: Array, b: Array) -> Array:
    """A [16, 16] @ B [16, 8], both BF16, by one instruction on the virtual GPU."""
    return multiply_registers(pack("A", a), pack("B", b))
