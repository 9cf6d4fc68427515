"""Small tcgen05 kernels for the virtual GPU: multiply two tiles of shared memory, and read tensor memory.

`multiply_tiles` is given an image of shared memory, descriptors as plain words, and nothing else: what the MMA reads
is decided by the virtual GPU's own decoder, which knows nothing of `oproj_lib.layouts`. So a product that is right
proves image and descriptors, and a wrong descriptor shows what the hardware would read instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from oproj_lib import vgpu
from oproj_lib.layouts import ring, tmem
from oproj_lib.layouts.descriptors import InstructionDescriptor, SharedDescriptor, SwizzleMode
from oproj_lib.layouts.fragments import BF16_BYTES
from oproj_lib.layouts.swizzle import ATOM_BYTES, SWIZZLE_ROWS, swizzle_address, swizzle_mask
from oproj_lib.problem import Array

TILES_AT = ATOM_BYTES
"""Where the image begins in shared memory; the barrier and the TMEM address lie before it."""
MODES = {32: SwizzleMode.BYTES_32, 64: SwizzleMode.BYTES_64, 128: SwizzleMode.BYTES_128}
WARPS = 4


@dataclass(frozen=True)
class TileRun:
    """What came out: tensor memory as FP32 [128 lanes, n] (NaN where it was not read), and the report."""

    lanes: Array
    report: vgpu.Report

    def rows(self, m: int) -> Array:
        """D [m, n]."""
        return self.lanes[[tmem.lane_of_row(row, m) for row in range(m)]]


def tile_image(matrix: Array, width: int = 128, swizzled_width: int | None = None) -> Array:
    """A BF16 matrix [rows, columns] as bytes: a K-major tile with rows of `width` bytes, 16-byte chunks swizzled.

    swizzled_width: the swizzle to store with, if it is to differ from the rows' width (a mistake to look at).

    Raises:
        ValueError: for a width that no swizzle has, or a matrix whose rows are not `width` bytes.
    """
    swizzle_mask(width)
    rows, columns = matrix.shape
    if columns * BF16_BYTES != width:
        raise ValueError(
            f"a row of {columns} BF16 is {columns * BF16_BYTES} bytes; this tile has rows of {width}"
        )
    image = np.zeros(-(-rows * width // ATOM_BYTES) * ATOM_BYTES, np.uint8)
    offsets = np.arange(rows)[:, None] * width + np.arange(columns) * BF16_BYTES
    places = swizzle_address(offsets, swizzled_width or width)
    image.view(np.uint16)[places // BF16_BYTES] = matrix.view(np.uint16)
    return image


def tile_descriptor(
    address: int, width: int = 128, *, stride: int | None = None, base_offset: int = 0
) -> SharedDescriptor:
    """Of a K-major tile as `tile_image` stores it. stride: another stride byte offset than the right one."""
    stride = SWIZZLE_ROWS * width if stride is None else stride
    return SharedDescriptor(address, stride, MODES[width], base_offset=base_offset)


def kernel(
    words: int, a: Sequence[int], b: Sequence[int], instruction: int, n: int, quarter_of_warp: str
) -> str:
    """The PTX. a, b: descriptors of the MMAs, in order; quarter_of_warp: code that puts the TMEM lane that a warp
    reads from, shifted left by 16, into %lane0 (it finds the warp's number there)."""
    columns = tmem.allocation_columns(n)
    mmas = "\n".join(
        f"""    mov.b64 %a, {left:#x};
    mov.b64 %b, {right:#x};
    setp.ne.u32 %more, {i}, 0;
    @%first tcgen05.mma.cta_group::1.kind::f16 [%d], %a, %b, {instruction:#x}, %more;"""
        for i, (left, right) in enumerate(zip(a, b, strict=True))
    )
    loads = "\n".join(
        f"""    add.u32 %at, %lane0, {column};
    tcgen05.ld.sync.aligned.32x32b.x8.b32 {{%v0, %v1, %v2, %v3, %v4, %v5, %v6, %v7}}, [%at];
    tcgen05.wait::ld.sync.aligned;
    @%mine st.global.v4.b32 [%to+{4 * column}], {{%v0, %v1, %v2, %v3}};
    @%mine st.global.v4.b32 [%to+{4 * column + 16}], {{%v4, %v5, %v6, %v7}};"""
        for column in range(0, n, 8)
    )
    return f""".version 8.8
.target sm_100a
.address_size 64
.visible .entry tiles(.param .u64 image, .param .u64 out, .param .u32 read_lanes)
{{
    .shared .align 1024 .b8 area[{TILES_AT + 4 * words}];
    .reg .pred %first, %warp0, %more, %mine, %done;
    .reg .b32 %bar, %slot, %tid, %i, %x, %to32, %d, %lane0, %at, %lane, %limit, %v<8>;
    .reg .b64 %from, %offset, %a, %b, %to;
    mov.u32 %bar, area;
    add.u32 %slot, %bar, 8;
    mov.u32 %tid, %tid.x;
    mov.u32 %lane, %laneid;
    setp.eq.u32 %first, %tid, 0;
    setp.lt.u32 %warp0, %tid, 32;
    @%warp0 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%slot], {columns};
    @%warp0 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
    @%first mbarrier.init.shared::cta.b64 [%bar], 1;
    ld.param.u64 %from, [image];
    mov.u32 %i, %tid;
COPY:
    setp.ge.u32 %done, %i, {words};
    @%done bra COPIED;
    mul.wide.u32 %offset, %i, 4;
    add.u64 %offset, %offset, %from;
    ld.global.b32 %x, [%offset];
    mad.lo.u32 %to32, %i, 4, %bar;
    st.shared.b32 [%to32+{TILES_AT}], %x;
    add.u32 %i, %i, {32 * WARPS};
    bra COPY;
COPIED:
    fence.proxy.async.shared::cta;
    bar.sync 0;
    ld.shared.b32 %d, [%slot];
{mmas}
    @%first tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%bar];
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %done, [%bar], 0;
    @!%done bra WAIT;
    tcgen05.fence::after_thread_sync;
    shr.u32 %lane0, %tid, 5;
{quarter_of_warp}
    add.u32 %lane0, %lane0, %d;
    ld.param.u32 %limit, [read_lanes];
    setp.lt.u32 %mine, %lane, %limit;
    ld.param.u64 %to, [out];
    mul.wide.u32 %offset, %tid, {4 * n};
    add.u64 %to, %to, %offset;
{loads}
    bar.sync 0;
    @%warp0 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %d, {columns};
    ret;
}}
"""


OWN_QUARTER = "    shl.b32 %lane0, %lane0, 21;  // 32 * warp, in bits 16 and up"


def multiply_tiles(
    image: Array,
    a: Sequence[int],
    b: Sequence[int],
    instruction: int,
    *,
    quarter_of_warp: str = OWN_QUARTER,
    remove: str = "",
) -> TileRun:
    """Runs the MMAs with these descriptors (words) on the virtual GPU, all checks on, and reads D.

    image: bytes, which stand at `TILES_AT` in shared memory; a multiple of 4. remove: an opcode whose lines are left
    out.

    Raises:
        ValueError: if `instruction` is no instruction descriptor, or no line has the opcode to remove.
    """
    shape = InstructionDescriptor.decode(instruction)
    words = np.ascontiguousarray(image).view(np.uint32)
    out = np.full((32 * WARPS, shape.n), np.nan, np.float32)
    read = tmem.LANES // WARPS if shape.m == tmem.LANES else tmem.ROWS_PER_QUARTER
    ptx = kernel(words.size, a, b, instruction, shape.n, quarter_of_warp)
    if remove:
        if remove not in ptx:
            raise ValueError(f"remove = {remove!r}: no line of this kernel has it")
        ptx = "\n".join("" if remove in line else line for line in ptx.splitlines())
    report = vgpu.run_ptx(ptx, block=32 * WARPS, args=[words, out, read], checks=True)
    return TileRun(out, report)


def multiply(
    weights: Array,
    tokens: Array,
    width: int = 128,
    *,
    stride: int | None = None,
    stored: int | None = None,
    start: int = 0,
    base_offset: int = 0,
) -> TileRun:
    """weights [m, k] times tokens [n, k] transposed, k = width / 2, as K-major tiles with one swizzle.

    stride: what both descriptors say there, right or wrong. stored: the swizzle that the tiles are stored with, if it
    is to differ from the one that the descriptors name. start: the tile of weights begins this many bytes, a multiple
    of 16, behind a multiple of 1024; base_offset: what its descriptor says about that.
    """
    image_a, image_b = (tile_image(matrix, width, stored) for matrix in (weights, tokens))
    words = InstructionDescriptor(len(weights), len(tokens)).encode()
    steps = range(0, width, ring.MMA_STEP_BYTES)
    gap = -start % ATOM_BYTES
    at_b = TILES_AT + start + image_a.size + gap
    a = [
        tile_descriptor(TILES_AT + start + step, width, stride=stride, base_offset=base_offset).encode()
        for step in steps
    ]
    b = [tile_descriptor(at_b + step, width, stride=stride).encode() for step in steps]
    before, between = np.zeros(start, np.uint8), np.zeros(gap, np.uint8)
    # Room behind the tiles, so that a wrong descriptor reads zeros there and not past the end.
    behind = np.zeros(8 * (image_a.size + image_b.size), np.uint8)
    return multiply_tiles(np.concatenate([before, image_a, between, image_b, behind]), a, b, words)


def slot_address(slot: int, stages: int, stage_bytes: int) -> int:
    """Byte, from the start of the ring, of the W tile in a slot.

    Raises:
        ValueError: if there is no such slot.
    """
    if not 0 <= slot < stages:
        raise ValueError(f"slot = {slot}: the ring has slots 0 to {stages - 1}")
    return slot * stage_bytes


def pair_of(warp: int, quarter: int) -> tuple[int, int]:
    """(warp, quarter), checked.

    Raises:
        ValueError: if either is not 0 to 3.
    """
    if warp not in range(WARPS) or quarter not in range(tmem.QUARTERS):
        raise ValueError(f"warp = {warp}, quarter = {quarter}: both are 0 to 3")
    return warp, quarter


def whole_numbers(rows: int, columns: int, seed: int) -> Array:
    """A BF16 matrix of small whole numbers: FP32 sums are exact, in any order."""
    return np.random.default_rng(seed).integers(-8, 9, (rows, columns)).astype(ml_dtypes.bfloat16)


def read_quarters(
    m: int, warps_read: Sequence[int] = (0, 1, 2, 3), *, seed: int = 0, n: int = 16, remove: str = ""
) -> TileRun:
    """A product [m, n] of whole numbers, where warp w reads the lane quarter warps_read[w]: right for 0, 1, 2, 3.

    Raises:
        ValueError: unless four quarters 0 to 3 are named.
    """
    if len(warps_read) != WARPS or not all(0 <= quarter < tmem.QUARTERS for quarter in warps_read):
        raise ValueError(f"warps_read = {list(warps_read)}: four warps each read one of the quarters 0 to 3")
    choose = "\n".join(
        f"    setp.eq.u32 %done, %lane0, {warp};\n    @%done mov.u32 %at, {tmem.tmem_address(0, 32 * quarter, 0)};"
        for warp, quarter in enumerate(warps_read)
    )
    weights, tokens = factors(m, n, seed)
    image_a, image_b = tile_image(weights), tile_image(tokens)
    steps = range(0, ring.TILE_K * BF16_BYTES, ring.MMA_STEP_BYTES)
    a, b = (
        [tile_descriptor(base + step).encode() for step in steps]
        for base in (TILES_AT, TILES_AT + image_a.size)
    )
    word = InstructionDescriptor(m, n).encode()
    choose += "\n    mov.u32 %lane0, %at;"
    return multiply_tiles(
        np.concatenate([image_a, image_b]), a, b, word, quarter_of_warp=choose, remove=remove
    )


def factors(m: int, n: int, seed: int) -> tuple[Array, Array]:
    """Whole numbers [m, 64] and [n, 64], as BF16."""
    return whole_numbers(m, ring.TILE_K, seed), whole_numbers(n, ring.TILE_K, seed + 1)
