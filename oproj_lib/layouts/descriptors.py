"""The descriptors of ``tcgen05.mma`` and ``wgmma.mma_async``, field by field.

Where a matrix lies in shared memory is a 64-bit *shared-memory descriptor*. What is multiplied is, for
tcgen05, a 32-bit *instruction descriptor*; a wgmma has it in its name. Sources: PTX ISA, "tcgen05 Shared
memory descriptor", "tcgen05 Instruction descriptor" (.kind::f16) and "Asynchronous Warpgroup Level Matrix
Shared Memory Layout" (matrix descriptor of wgmma). Bit ranges are [low, high), as in the tables below.

Shared-memory descriptor of tcgen05

    bits      field                  stored as     here
    [0, 14)   address                bytes >> 4    of the first row of the tile
    [16, 30)  leading_byte_offset    bytes >> 4    unused by swizzled K-major tiles, which assume 16 bytes
    [32, 46)  stride_byte_offset     bytes >> 4    from 8 rows to the next 8: 1024 with the 128-byte swizzle
    [46, 49)  version                as is         1 on sm_100
    [49, 52)  base_offset            as is         0 for tiles that start where the swizzle's pattern starts
    [52, 53)  leading_is_absolute    as is         0
    [61, 64)  swizzle                SwizzleMode

Shared-memory descriptor of wgmma: no version, and a swizzle field of two bits with codes of its own

    [0, 14)   address                bytes >> 4    as above
    [16, 30)  leading_byte_offset    bytes >> 4    as above
    [32, 46)  stride_byte_offset     bytes >> 4    as above
    [49, 52)  base_offset            as is         as above
    [62, 64)  swizzle                WgmmaSwizzle

Instruction descriptor, kind::f16

    [0, 2) sparsity selector, [2, 3) sparse, [3, 4) saturate: 0 here
    [4, 6)    d_type                 AccumulatorType
    [7, 10)   a_type                 OperandType
    [10, 13)  b_type                 OperandType
    [13, 14)  negate_a               as is
    [14, 15)  negate_b               as is
    [15, 16)  a_major                Major
    [16, 17)  b_major                Major
    [17, 23)  n                      n >> 3
    [24, 29)  m                      m >> 4
    [30, 32)  maximum shift of .ws: 0 here
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any

from oproj_lib.layouts.ring import MAX_N


class SwizzleMode(IntEnum):
    """Codes of the swizzle field. 3, 5 and 7 do not exist."""

    NONE = 0
    BYTES_128_ATOM_32 = 1
    BYTES_128 = 2
    BYTES_64 = 4
    BYTES_32 = 6


class WgmmaSwizzle(IntEnum):
    """Codes of the swizzle field of a wgmma descriptor: all four exist."""

    NONE = 0
    BYTES_128 = 1
    BYTES_64 = 2
    BYTES_32 = 3


class AccumulatorType(IntEnum):
    """Element type of D, kind::f16."""

    F16 = 0
    F32 = 1


class OperandType(IntEnum):
    """Element type of A and B, kind::f16."""

    F16 = 0
    BF16 = 1


class Major(IntEnum):
    """Which index of an operand is contiguous in shared memory: K, or M of A and N of B ("transposed")."""

    K = 0
    MN = 1


@dataclass(frozen=True)
class Bits:
    """Bits [low, high) of a descriptor; they hold value >> shift. choices: the codes that exist, if not all
    do."""

    low: int
    high: int
    shift: int = 0
    choices: type[IntEnum] | None = None

    @property
    def limit(self) -> int:
        """Values are below this."""
        return 1 << (self.high - self.low + self.shift)

    def encode(self, name: str, value: int) -> int:
        """``value`` in place. Raises ValueError where it does not fit."""
        if self.choices is not None and value not in tuple(self.choices):
            known = ", ".join(f"{choice.name} = {choice.value}" for choice in self.choices)
            raise ValueError(f"{name} = {value} does not exist: choose {known}")
        step = 1 << self.shift
        if not 0 <= value < self.limit or value % step:
            multiple = f", a multiple of {step}" if self.shift else ""
            raise ValueError(
                f"{name} = {value}: bits [{self.low}, {self.high}) hold 0 to {self.limit - step}{multiple}"
            )
        return value >> self.shift << self.low

    def decode(self, word: int) -> int:
        """The value of this field in ``word``."""
        return (word >> self.low) % (1 << (self.high - self.low)) << self.shift


SHARED_FIELDS = {
    "address": Bits(0, 14, 4),
    "leading_byte_offset": Bits(16, 30, 4),
    "stride_byte_offset": Bits(32, 46, 4),
    "version": Bits(46, 49),
    "base_offset": Bits(49, 52),
    "leading_is_absolute": Bits(52, 53),
    "swizzle": Bits(61, 64, 0, SwizzleMode),
}
WGMMA_FIELDS = {
    "address": Bits(0, 14, 4),
    "leading_byte_offset": Bits(16, 30, 4),
    "stride_byte_offset": Bits(32, 46, 4),
    "base_offset": Bits(49, 52),
    "swizzle": Bits(62, 64, 0, WgmmaSwizzle),
}
INSTRUCTION_FIELDS = {
    "d_type": Bits(4, 6, 0, AccumulatorType),
    "a_type": Bits(7, 10, 0, OperandType),
    "b_type": Bits(10, 13, 0, OperandType),
    "negate_a": Bits(13, 14),
    "negate_b": Bits(14, 15),
    "a_major": Bits(15, 16, 0, Major),
    "b_major": Bits(16, 17, 0, Major),
    "n": Bits(17, 23, 3),
    "m": Bits(24, 29, 4),
}
SHARED_BITS, INSTRUCTION_BITS = 64, 32
VERSION = 1
N_STEPS = {64: 8, 128: 16}
"""N is a multiple of this, by M (one CTA, kind::f16)."""
ADDRESS_UNIT_SHIFT = 4
"""The address field counts 16 bytes: advancing a descriptor by b bytes adds b >> 4."""


@dataclass(frozen=True)
class SharedDescriptor:
    """Where a matrix lies in shared memory. Addresses and offsets in bytes.

    Raises ValueError for a field out of range, with the range, and for a version other than 1.
    """

    address: int
    stride_byte_offset: int
    swizzle: SwizzleMode
    leading_byte_offset: int = 16
    version: int = VERSION
    base_offset: int = 0
    leading_is_absolute: int = 0

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ValueError(f"version = {self.version}: sm_100 descriptors have version {VERSION}")
        self.encode()

    def encode(self) -> int:
        """The 64-bit descriptor."""
        return _encode(self, SHARED_FIELDS)

    @staticmethod
    def decode(word: int) -> SharedDescriptor:
        """The descriptor in a 64-bit word. Raises ValueError for what no descriptor has."""
        values = _decode(word, SHARED_FIELDS, SHARED_BITS)
        return SharedDescriptor(**{**values, "swizzle": SwizzleMode(values["swizzle"])})


@dataclass(frozen=True)
class WgmmaDescriptor:
    """Where an operand of ``wgmma.mma_async`` lies in shared memory. Addresses and offsets in bytes.

    Raises ValueError for a field out of range, with the range.
    """

    address: int
    stride_byte_offset: int
    swizzle: WgmmaSwizzle
    leading_byte_offset: int = 16
    base_offset: int = 0

    def __post_init__(self) -> None:
        self.encode()

    def encode(self) -> int:
        """The 64-bit descriptor."""
        return _encode(self, WGMMA_FIELDS)

    @staticmethod
    def decode(word: int) -> WgmmaDescriptor:
        """The descriptor in a 64-bit word. Raises ValueError for what no descriptor has."""
        values = _decode(word, WGMMA_FIELDS, SHARED_BITS)
        return WgmmaDescriptor(**{**values, "swizzle": WgmmaSwizzle(values["swizzle"])})


@dataclass(frozen=True)
class InstructionDescriptor:
    """What one MMA multiplies: D [m, n] of d_type, A [m, 16] and B [n, 16].

    Raises ValueError for a field out of range, with the range, and for a shape that one CTA cannot multiply.
    """

    m: int
    n: int
    d_type: AccumulatorType = AccumulatorType.F32
    a_type: OperandType = OperandType.BF16
    b_type: OperandType = OperandType.BF16
    a_major: Major = Major.K
    b_major: Major = Major.K
    negate_a: int = 0
    negate_b: int = 0

    def __post_init__(self) -> None:
        if self.m not in N_STEPS:
            raise ValueError(f"m = {self.m}: one CTA multiplies {' or '.join(map(str, N_STEPS))} rows")
        step = N_STEPS[self.m]
        if self.n % step or not step <= self.n <= MAX_N:
            raise ValueError(
                f"n = {self.n}: with m = {self.m} it is a multiple of {step} from {step} to {MAX_N}"
            )
        self.encode()

    def encode(self) -> int:
        """The 32-bit descriptor."""
        return _encode(self, INSTRUCTION_FIELDS)

    @staticmethod
    def decode(word: int) -> InstructionDescriptor:
        """The descriptor in a 32-bit word. Raises ValueError for what no descriptor of kind::f16 has."""
        values = _decode(word, INSTRUCTION_FIELDS, INSTRUCTION_BITS)
        kinds = {name: bits.choices for name, bits in INSTRUCTION_FIELDS.items() if bits.choices}
        return InstructionDescriptor(**{**values, **{name: kinds[name](values[name]) for name in kinds}})


def _encode(descriptor: Any, table: dict[str, Bits]) -> int:
    return sum(table[f.name].encode(f.name, getattr(descriptor, f.name)) for f in fields(descriptor))


def _decode(word: int, table: dict[str, Bits], size: int) -> dict[str, Any]:
    """Field values of ``word``, checked by encoding them again."""
    if not 0 <= word < 1 << size:
        raise ValueError(f"descriptor {word:#x} does not fit {size} bits")
    values = {name: bits.decode(word) for name, bits in table.items()}
    stray = word - sum(table[name].encode(name, value) for name, value in values.items())
    if stray:
        raise ValueError(f"descriptor {word:#x} has bits {stray:#x} that belong to no field")
    return values
