"""Matrix operands in shared memory: descriptors bit by bit, and where each element of a tile lies.

Sources: PTX ISA, "Shared memory descriptor" and "Instruction descriptor" (tcgen05), "Matrix Descriptor
Format" (wgmma), "Canonical Layouts" and "Swizzling modes". This is the hardware's view; it shares nothing
with the kernels' layout code.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

ROWS = 8  # rows of a core matrix
CORE_BYTES = 16  # bytes of one of its rows

SWIZZLE_TCGEN05 = {0: 0, 2: 128, 4: 64, 6: 32}
TCGEN05_RESERVED = 0x3 << 14 | 0x3 << 30 | 0xFF << 53  # bits 14-15, 30-31, 53-60
SWIZZLE_WGMMA = {0: 0, 1: 128, 2: 64, 3: 32}


class DescriptorError(ValueError):
    """A descriptor field with a value that the hardware does not define."""


@dataclass(frozen=True)
class SharedDescriptor:
    """A decoded matrix descriptor; everything in bytes. `swizzle` is the span of the pattern: 0, 32, 64 or
    128."""

    address: int
    leading: int
    stride: int
    base_offset: int
    swizzle: int


def _field(value: int, low: int, high: int) -> int:
    """Bits [low, high)."""
    return value >> low & ((1 << (high - low)) - 1)


def decode_shared(value: int, *, tcgen05: bool) -> SharedDescriptor:
    """Decodes the 64-bit descriptor. Raises DescriptorError for undefined codes."""
    if tcgen05:
        version = _field(value, 46, 49)
        if version != 1:
            raise DescriptorError(
                f"shared-memory descriptor {value:#018x}: bits 46-48 are {version}, must be 1 for tcgen05"
            )
        if reserved := value & TCGEN05_RESERVED:
            raise DescriptorError(
                f"shared-memory descriptor {value:#018x}: reserved bits {reserved:#x} must be 0"
            )
        if _field(value, 52, 53):
            raise DescriptorError(
                f"shared-memory descriptor {value:#018x}: absolute leading-dimension mode (bit 52) is not modelled"
            )
        code, codes = _field(value, 61, 64), SWIZZLE_TCGEN05
    else:
        code, codes = _field(value, 62, 64), SWIZZLE_WGMMA
    if code not in codes:
        raise DescriptorError(
            f"shared-memory descriptor {value:#018x}: swizzle code {code}; modelled: {sorted(codes)}"
        )
    return SharedDescriptor(
        _field(value, 0, 14) << 4,
        _field(value, 16, 30) << 4,
        _field(value, 32, 46) << 4,
        _field(value, 49, 52),
        codes[code],
    )


@cache
def element_offsets(
    descriptor: SharedDescriptor, rows: int, columns: int, major_k: bool, element_bytes: int = 2
) -> np.ndarray:
    """Byte offsets [rows, columns] in shared memory of a tile; rows run along M or N, columns along K.

    K-major: 8 rows at a pitch of one swizzle span (16 bytes without swizzle), the next 8 rows `stride`
    further. MN-major: spans of elements along M or N at a pitch per k, 8 k to a group. Then address bits [4,
    7) are XORed with bits [7, 10), as far as the span reaches.
    """
    r, k = np.arange(rows)[:, None], np.arange(columns)[None, :]
    span = descriptor.swizzle
    if major_k:
        byte = k * element_bytes
        if span:
            linear = r % ROWS * span + r // ROWS * descriptor.stride + byte
        else:
            linear = (
                r % ROWS * CORE_BYTES
                + r // ROWS * descriptor.stride
                + byte % CORE_BYTES
                + byte // CORE_BYTES * descriptor.leading
            )
    else:
        byte = r * element_bytes
        if span:
            linear = (
                byte % span
                + byte // span * descriptor.leading
                + k % ROWS * span
                + k // ROWS * descriptor.stride
            )
        else:
            linear = (
                byte % CORE_BYTES
                + byte // CORE_BYTES * descriptor.stride
                + k % ROWS * CORE_BYTES
                + k // ROWS * descriptor.leading
            )
    return swizzled(descriptor.address + linear, span, descriptor.base_offset)


def swizzled(address: np.ndarray, span: int, base_offset: int = 0) -> np.ndarray:
    """XORs address bits [4, 4 + b) with bits [7, 7 + b), b = 1, 2, 3 for spans of 32, 64, 128 bytes."""
    mask = {0: 0, 32: 0x10, 64: 0x30, 128: 0x70}[span]
    return address ^ ((address - (base_offset << 7)) >> 3 & mask)


@dataclass(frozen=True)
class InstructionDescriptor:
    """A decoded 32-bit instruction descriptor of tcgen05.mma kind::f16."""

    m: int
    n: int
    d_type: str
    a_type: str
    b_type: str
    a_major_k: bool
    b_major_k: bool
    negate_a: bool
    negate_b: bool


def decode_instruction(value: int) -> InstructionDescriptor:
    """Decodes the instruction descriptor of kind::f16. Raises DescriptorError for undefined or unmodelled
    codes."""

    def refuse(what: str) -> DescriptorError:
        return DescriptorError(f"instruction descriptor {value:#010x}: {what}")

    if _field(value, 0, 4) or _field(value, 23, 24) or _field(value, 29, 32):
        raise refuse(
            "sparsity, saturation, max-shift and reserved bits must be 0 (sparse forms are not modelled)"
        )
    d_type = {0: "f16", 1: "f32"}.get(_field(value, 4, 6))
    types = {0: "f16", 1: "bf16"}
    a_type, b_type = types.get(_field(value, 7, 10)), types.get(_field(value, 10, 13))
    if d_type is None or a_type is None or b_type is None:
        raise refuse("types of kind::f16 are D 0 (F16) or 1 (F32), A and B 0 (F16) or 1 (BF16)")
    if d_type == "f16":
        raise refuse("an F16 accumulator is not modelled")
    n, m = _field(value, 17, 23) << 3, _field(value, 24, 29) << 4
    step = {64: 8, 128: 16}.get(m)
    if step is None:
        raise refuse(f"M = {m}; one CTA has M = 64 or 128")
    if n % step or not step <= n <= 256:
        raise refuse(f"N = {n}; M = {m} takes multiples of {step} from {step} to 256")
    return InstructionDescriptor(
        m, n, d_type, a_type, b_type, not _field(value, 15, 16), not _field(value, 16, 17),
        bool(_field(value, 13, 14)), bool(_field(value, 14, 15)),
    )  # fmt: skip


@cache
def accumulator_lanes(m: int, base: int) -> np.ndarray:
    """TMEM lane of each row of D (PTX ISA, "Data Path Layout Organization"): M = 128 uses all lanes, M = 64
    lanes 0-15 (or 16-31) of each warp's quarter."""
    row = np.arange(m)
    return base + (row if m == 128 else row % 16 + 32 * (row // 16))
