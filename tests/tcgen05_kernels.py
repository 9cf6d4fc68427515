"""One CTA that multiplies two tiles of shared memory into tensor memory and reads them back, with any line left out.

Threads copy an image into shared memory; warp 0 allocates tensor memory; one thread issues MMAs and commits; all
wait, and warps 0 to 3 read their quarter of D, which comes out as words [128 lanes, n columns].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from canonical_layouts import byte_offset, linear, packed_offsets
from vgpu_kernels import run

from oproj_lib import vgpu

Array = npt.NDArray[Any]
TILES = 1024  # where the image begins in shared memory: the swizzles' period
DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16)}
SWIZZLE_CODES = {0: 0, 128: 2, 64: 4, 32: 6}


def shared_descriptor(address: int, leading: int, stride: int, span: int) -> int:
    """PTX ISA, "Shared memory descriptor"."""
    return address >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | SWIZZLE_CODES[span] << 61


def instruction_descriptor(
    m: int, n: int, kind: str = "bf16", a_k_major: bool = True, b_k_major: bool = True
) -> int:
    """PTX ISA, "Instruction descriptor", kind::f16 with an F32 accumulator."""
    code = {"f16": 0, "bf16": 1}[kind]
    majors = (not a_k_major) << 15 | (not b_k_major) << 16
    return 1 << 4 | code << 7 | code << 10 | majors | n >> 3 << 17 | m >> 4 << 24


@dataclass(frozen=True)
class Operand:
    """A matrix [rows, k] as it lies in shared memory."""

    matrix: Array
    span: int = 128
    k_major: bool = True

    @property
    def offsets(self) -> tuple[int, int]:
        rows, depth = self.matrix.shape
        return packed_offsets(rows, depth, self.span, self.k_major)

    def image(self) -> Array:
        """Its bytes, to be put at a multiple of 1024."""
        rows, depth = self.matrix.shape
        leading, stride = self.offsets
        image = np.zeros(-(-rows * depth * 2 // 1024) * 1024, np.uint8)
        elements = image.view(np.uint16)
        for row in range(rows):
            for k in range(depth):
                place = byte_offset(
                    row, k, span=self.span, k_major=self.k_major, leading=leading, stride=stride
                )
                elements[place // 2] = self.matrix[row, k].view(np.uint16)
        return image

    def descriptor(self, base: int, step: int) -> int:
        """Of K elements 16 * step to 16 * step + 15."""
        leading, stride = self.offsets
        start = linear(0, 16 * step, span=self.span, k_major=self.k_major, leading=leading, stride=stride)
        return shared_descriptor(base + start, leading, stride, self.span)


@dataclass(frozen=True)
class Multiply:
    """One tcgen05.mma: words, D's address relative to the allocation, accumulate."""

    a: int
    b: int
    instruction: int
    column: int = 0
    accumulate: bool = True


def multiplies(a: Operand, b: Operand, kind: str = "bf16") -> tuple[Array, list[Multiply]]:
    """The image of both operands, and the MMAs of A B^T."""
    image_a, image_b = a.image(), b.image()
    base_b = TILES + image_a.size
    word = instruction_descriptor(len(a.matrix), len(b.matrix), kind, a.k_major, b.k_major)
    steps = [
        Multiply(a.descriptor(TILES, step), b.descriptor(base_b, step), word, accumulate=step > 0)
        for step in range(a.matrix.shape[1] // 16)
    ]
    return np.concatenate([image_a, image_b]), steps


def kernel(
    steps: Sequence[Multiply], words: int, n: int, columns: int, rows: int, changes: dict[str, str]
) -> str:
    """The body. `changes` replaces lines by their name, by default with nothing."""
    mmas = "\n".join(
        f"""
        setp.ne.u32 %p5, {int(step.accumulate)}, 0;
        add.u32 %r12, %r10, {step.column};
        mov.b64 %rd10, {step.a:#x};
        mov.b64 %rd11, {step.b:#x};
        @%p4 tcgen05.mma.cta_group::1.kind::f16 [%r12], %rd10, %rd11, {step.instruction:#x}, %p5;
        """
        for step in steps
    )
    lines = {
        "alloc": f"@%p8 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], {columns};",
        "permit": "@%p8 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;",
        "init": "@%p4 mbarrier.init.shared::cta.b64 [%r0], 1;",
        "writer_fence": "fence.proxy.async.shared::cta;",
        "meet": "bar.sync 0;",
        "reader_fence": "",
        "before_mma": "",
        "mma": mmas,
        "commit": "@%p4 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r0];",
        "wait": "W:\nmbarrier.try_wait.parity.shared::cta.b64 %p1, [%r0], 0;\n@!%p1 bra W;",
        "before_ld": "",
        "wait_ld": "tcgen05.wait::ld.sync.aligned;",
        "before_free": "bar.sync 0;",
        "free": f"@%p8 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, {columns};",
        "end": "",
        "quarter": "shr.u32 %r11, %id, 5;\nand.b32 %r11, %r11, 3;\nshl.b32 %r11, %r11, 21;",
    } | changes
    loads = "\n".join(
        f"""
        add.u32 %r13, %r11, {column};
        tcgen05.ld.sync.aligned.32x32b.x8.b32 {{%r16, %r17, %r18, %r19, %r20, %r21, %r22, %r23}}, [%r13];
        {lines["wait_ld"]}
        @%p7 st.global.v4.b32 [%rd12+{4 * column}], {{%r16, %r17, %r18, %r19}};
        @%p7 st.global.v4.b32 [%rd12+{4 * column + 16}], {{%r20, %r21, %r22, %r23}};
        """
        for column in range(0, n, 8)
    )
    return f"""
        mov.u32 %r0, area;
        add.u32 %r1, %r0, 8;
        setp.eq.u32 %p4, %id, 0;
        setp.lt.u32 %p8, %id, 32;
        {lines["alloc"]}
        {lines["permit"]}
        {lines["init"]}
        mov.u32 %r2, %id;
    COPY:
        setp.ge.u32 %p2, %r2, {words};
        @%p2 bra COPIED;
        mul.wide.u32 %rd1, %r2, 4;
        add.u64 %rd2, %rd1, %in0;
        ld.global.b32 %r3, [%rd2];
        mad.lo.u32 %r4, %r2, 4, %r0;
        st.shared.b32 [%r4+{TILES}], %r3;
        add.u32 %r2, %r2, %size;
        bra COPY;
    COPIED:
        {lines["writer_fence"]}
        {lines["meet"]}
        ld.shared.b32 %r10, [%r1];
        {lines["quarter"]}
        add.u32 %r11, %r11, %r10;
        {lines["reader_fence"]}
        {lines["before_mma"]}
        {lines["mma"]}
        {lines["commit"]}
        {lines["wait"]}
        and.b32 %r14, %lane, 31;
        setp.lt.u32 %p7, %r14, {rows // 4};
        mad.wide.u32 %rd12, %id, {4 * n}, %out;
        setp.lt.u32 %p6, %id, 128;
        {lines["before_ld"]}
        @!%p6 bra READ;
        {loads}
    READ:
        {lines["before_free"]}
        {lines["free"]}
        {lines["end"]}
        ret;
    """


def multiply(
    image: Array, steps: Sequence[Multiply], n: int, *, rows: int = 128, columns: int = 0, block: int = 128,
    schedule: str | int = "program", exact: bool = False, **changes: str,
) -> tuple[Array, vgpu.Report]:  # fmt: skip
    """(D as FP32 [128 lanes, n], report). rows: M, of which a quarter is read per warp. columns: of the allocation."""
    columns = columns or max(32, 1 << (n - 1).bit_length())
    words = image.view(np.uint32)
    out, report = run(
        kernel(steps, words.size, n, columns, rows, changes), out=128 * n, block=block, inputs=[words],
        declarations=[f".shared .align 1024 .b8 area[{TILES + image.size}];"], target="sm_100a", schedule=schedule,
        exact=exact, checks=True,
    )  # fmt: skip
    return out.view(np.float32).reshape(128, n), report
