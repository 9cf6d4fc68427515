"""Swizzles of shared memory: which 16-byte chunk of a tile lies where.

A K-major tile is stored in rows of 32, 64 or 128 bytes. Read down a column of chunks, eight rows would start
at the same banks; a swizzle XORs the chunk's number with the row's, so that the same column of eight rows
spreads over all banks, while a row stays one contiguous piece. The hardware applies it to *byte addresses*
(PTX ISA, "Shared Memory Layout and Swizzling"): address bits 4.. are XORed with bits 7.., one, two or three
of them.

Addresses here are relative to a multiple of the swizzle's period, or absolute ones: both give the same
answer. The functions work on ``int``, NumPy integers and traced integers; besides ``+ * // %`` they need ``^
& >>``.
"""

from __future__ import annotations

from oproj_lib.layouts.fragments import CHUNK_BYTES, Whole

WIDTHS = (32, 64, 128)
"""Bytes per row of a swizzled tile: 2, 4 or 8 chunks."""
SWIZZLE_ROWS = 8
"""Rows of 128 bytes after which a pattern has been through all chunk positions."""
ROW_BYTES = 128
"""Bytes that the 32 banks deliver at once; also the row of the 128-byte swizzle."""
ATOM_BYTES = SWIZZLE_ROWS * ROW_BYTES
"""8 rows of the 128-byte swizzle: the period of its pattern, and the alignment that a tile needs."""


def swizzle_mask(width: int) -> int:
    """The address bits that a swizzle flips: bit 4, bits 4 and 5, or bits 4 to 6.

    Raises ValueError for a width that is not 32, 64 or 128 bytes.
    """
    if width not in WIDTHS:
        raise ValueError(f"swizzle width = {width} bytes: choose from {WIDTHS}")
    return width - CHUNK_BYTES


def swizzle_period(width: int) -> int:
    """Bytes after which the pattern repeats: 256, 512 or 1024. A swizzled tile starts at a multiple of it."""
    swizzle_mask(width)
    return SWIZZLE_ROWS * width


def swizzle_address(address: Whole, width: int = 128) -> Whole:
    """Where the byte lies that an unswizzled tile has at ``address``. Its own inverse: the bits that are read
    (7 and up) are not the bits that change (4 to 6)."""
    return address ^ ((address >> 3) & swizzle_mask(width))


def tile_offset(row: Whole, chunk: Whole) -> Whole:
    """Byte offset of 16-byte chunk ``chunk`` (0..7) of row ``row`` in a K-major tile with 128-byte rows.

    Eight rows make an atom of 1024 bytes; within it row r's chunk c sits at chunk position c ^ r. It equals
    ``swizzle_address(row * 128 + chunk * 16)``.
    """
    in_atom = row % SWIZZLE_ROWS
    atom = row // SWIZZLE_ROWS * ATOM_BYTES
    return atom + in_atom * ROW_BYTES + (chunk ^ in_atom) * CHUNK_BYTES
