"""The canonical layouts of matrices in shared memory, as the PTX manual writes them.

Source: PTX ISA, "Canonical Layouts" (wgmma and tcgen05; the comments of CUTLASS's descriptor headers have the same
table). A layout is a swizzle after an affine map of (row along M or N, k), written shape:stride in units of
elements, with T = 8 elements of 16 bits in 16 bytes, LBO and SBO in elements:

    K-major   none   Swizzle<0,4,3> o ((8,m),(T,2)):((1T,SBO),(1,LBO))
              32 B   Swizzle<1,4,3> o ((8,m),(T,2)):((2T,SBO),(1,T))
              64 B   Swizzle<2,4,3> o ((8,m),(T,2)):((4T,SBO),(1,T))
              128 B  Swizzle<3,4,3> o ((8,m),(T,2)):((8T,SBO),(1,T))
    MN-major  none   Swizzle<0,4,3> o ((T,1,m),(8,k)):((1,T,SBO),(1T,LBO))
              32 B   Swizzle<1,4,3> o ((T,2,m),(8,k)):((1,T,LBO),(2T,SBO))
              64 B   Swizzle<2,4,3> o ((T,4,m),(8,k)):((1,T,LBO),(4T,SBO))
              128 B  Swizzle<3,4,3> o ((T,8,m),(8,k)):((1,T,LBO),(8T,SBO))
"""

from __future__ import annotations

T = 8
BYTES = 2  # of an element
SWIZZLE_BITS = {0: 0, 32: 1, 64: 2, 128: 3}
MANY = 1 << 20  # an open-ended mode


def spread(index: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """The offset of an index into a nested mode: first sub-mode fastest."""
    offset = 0
    for size, step in zip(shape, stride, strict=True):
        offset += index % size * step
        index //= size
    return offset


def swizzle(byte: int, bits: int) -> int:
    """Swizzle<bits,4,3> on a byte offset: bits [7, 7 + bits) are XORed into bits [4, 4 + bits)."""
    for i in range(bits):
        if byte >> (7 + i) & 1:
            byte ^= 1 << (4 + i)
    return byte


def linear(row: int, k: int, *, span: int, k_major: bool, leading: int, stride: int) -> int:
    """Byte offset of element (row, k) before the swizzle; leading and stride in bytes."""
    lbo, sbo, chunks = leading // BYTES, stride // BYTES, max(span // 16, 1)
    if k_major:
        k_modes = ((T, MANY), (1, T if span else lbo))
        return BYTES * (spread(row, (8, MANY), (chunks * T, sbo)) + spread(k, *k_modes))
    far, near = (lbo, sbo) if span else (sbo, lbo)
    return BYTES * (spread(row, (T, chunks, MANY), (1, T, far)) + spread(k, (8, MANY), (chunks * T, near)))


def byte_offset(row: int, k: int, *, span: int, k_major: bool, leading: int, stride: int) -> int:
    """Byte offset of element (row, k) in a tile that starts at a multiple of 1024 bytes."""
    place = linear(row, k, span=span, k_major=k_major, leading=leading, stride=stride)
    return swizzle(place, SWIZZLE_BITS[span])


def packed_offsets(rows: int, k: int, span: int, k_major: bool) -> tuple[int, int]:
    """(leading, stride) in bytes of a tile without gaps."""
    if k_major:
        return (16, 8 * span) if span else (128 * (rows // 8), 128)
    if span:
        return 8 * span * (k // 8), 8 * span
    return 128 * (rows // 8), 128
