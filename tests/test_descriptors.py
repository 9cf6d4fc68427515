"""Descriptors of tcgen05.mma and wgmma: literal words, every field in its bits, errors."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oproj_lib.layouts import descriptors
from oproj_lib.layouts.descriptors import (
    INSTRUCTION_FIELDS,
    SHARED_FIELDS,
    WGMMA_FIELDS,
    AccumulatorType,
    InstructionDescriptor,
    Major,
    OperandType,
    SharedDescriptor,
    SwizzleMode,
    WgmmaDescriptor,
    WgmmaSwizzle,
)

BASE: dict[str, Any] = {"address": 0, "stride_byte_offset": 1024, "swizzle": SwizzleMode.BYTES_128}


def shared(**changes: Any) -> SharedDescriptor:
    return SharedDescriptor(**{**BASE, **changes})


def test_shared_literals() -> None:
    # 2 << 61 | 1 << 46 | (1024 >> 4) << 32. The same word, but for the address, stands in the PTX that Triton
    # generates for sm_100 (K-major BF16 tiles with rows of 128 bytes).
    assert shared(leading_byte_offset=0).encode() == 0x4000_4040_0000_0000 == 4611756662049472512
    assert shared().encode() == 0x4000_4040_0001_0000
    assert shared(address=0x2400).encode() == 0x4000_4040_0001_0240
    # Triton's 64-byte swizzle: 512 bytes from 8 rows to the next.
    small = SharedDescriptor(0, 512, SwizzleMode.BYTES_64, leading_byte_offset=0)
    assert small.encode() == -9223301530671644672 % 2**64


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"address": 0x3FFF0}, 0x3FFF),
        ({"leading_byte_offset": 0x3FFF0}, 0x3FFF << 16),
        ({"stride_byte_offset": 0x3FFF0}, 0x3FFF << 32),
        ({"base_offset": 7}, 7 << 49),
        ({"leading_is_absolute": 1}, 1 << 52),
        ({"swizzle": SwizzleMode.BYTES_32}, 6 << 61),
        ({"swizzle": SwizzleMode.BYTES_64}, 4 << 61),
        ({"swizzle": SwizzleMode.BYTES_128_ATOM_32}, 1 << 61),
    ],
)
def test_each_shared_field_has_its_bits(changes: dict[str, int], word: int) -> None:
    nothing = {"address": 0, "leading_byte_offset": 0, "stride_byte_offset": 0, "swizzle": SwizzleMode.NONE}
    assert SharedDescriptor(**{**nothing, **changes}).encode() == word | 1 << 46  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"address": 0x3FFF0}, 0x3FFF),
        ({"leading_byte_offset": 0x3FFF0}, 0x3FFF << 16),
        ({"stride_byte_offset": 0x3FFF0}, 0x3FFF << 32),
        ({"base_offset": 7}, 7 << 49),
        ({"swizzle": WgmmaSwizzle.BYTES_128}, 1 << 62),
        ({"swizzle": WgmmaSwizzle.BYTES_64}, 2 << 62),
        ({"swizzle": WgmmaSwizzle.BYTES_32}, 3 << 62),
    ],
)
def test_each_wgmma_field_has_its_bits(changes: dict[str, int], word: int) -> None:
    nothing = {"address": 0, "leading_byte_offset": 0, "stride_byte_offset": 0, "swizzle": WgmmaSwizzle.NONE}
    assert WgmmaDescriptor(**{**nothing, **changes}).encode() == word  # type: ignore[arg-type]
    assert WgmmaDescriptor.decode(word).encode() == word


@pytest.mark.parametrize("name", ["NONE", "BYTES_128", "BYTES_64", "BYTES_32"])
def test_the_swizzle_codes_of_both_descriptors_are_the_same_bits(name: str) -> None:
    assert WgmmaSwizzle[name] << 62 == SwizzleMode[name] << 61


def test_what_no_wgmma_descriptor_has() -> None:
    with pytest.raises(
        ValueError, match=r"descriptor 0x400000000000 has bits 0x400000000000 that belong to no"
    ):
        WgmmaDescriptor.decode(1 << 46)  # the version of tcgen05
    with pytest.raises(ValueError, match="swizzle = 4 does not exist: choose NONE = 0, BYTES_128 = 1"):
        WgmmaDescriptor(0, 1024, 4)  # type: ignore[arg-type]
    assert list(WGMMA_FIELDS) == [
        "address", "leading_byte_offset", "stride_byte_offset", "base_offset", "swizzle"
    ]  # fmt: skip


def test_advancing_by_32_bytes_adds_two() -> None:
    assert shared(address=1024 + 32).encode() - shared(address=1024).encode() == 2


@pytest.mark.parametrize(
    ("m", "n", "word"),
    [
        (64, 8, 0x0402_0490),
        (64, 40, 0x040A_0490),
        (64, 64, 0x0410_0490),
        (64, 256, 0x0440_0490),
        (128, 256, 0x0840_0490),  # as CUTLASS and DeepGEMM make it for BF16 x BF16 -> F32
        (128, 16, 0x0804_0490),
    ],
)
def test_instruction_literals(m: int, n: int, word: int) -> None:
    assert InstructionDescriptor(m, n).encode() == word


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"d_type": AccumulatorType.F32}, 1 << 4),
        ({"a_type": OperandType.BF16}, 1 << 7),
        ({"b_type": OperandType.BF16}, 1 << 10),
        ({"negate_a": 1}, 1 << 13),
        ({"negate_b": 1}, 1 << 14),
        ({"a_major": Major.MN}, 1 << 15),
        ({"b_major": Major.MN}, 1 << 16),
    ],
)
def test_each_instruction_field_has_its_bits(changes: dict[str, int], word: int) -> None:
    nothing: dict[str, Any] = {
        "m": 64, "n": 8, "d_type": AccumulatorType.F16, "a_type": OperandType.F16, "b_type": OperandType.F16,
    }  # fmt: skip
    plain = InstructionDescriptor(**nothing).encode()
    assert plain == 4 << 24 | 1 << 17
    assert InstructionDescriptor(**{**nothing, **changes}).encode() == plain | word


@given(
    st.integers(0, 0x3FFF),
    st.integers(0, 0x3FFF),
    st.integers(0, 0x3FFF),
    st.integers(0, 7),
    st.sampled_from(SwizzleMode),
)
def test_shared_round_trip(address: int, leading: int, stride: int, base: int, swizzle: SwizzleMode) -> None:
    made = SharedDescriptor(16 * address, 16 * stride, swizzle, 16 * leading, base_offset=base)
    assert SharedDescriptor.decode(made.encode()) == made
    assert isinstance(SharedDescriptor.decode(made.encode()).swizzle, SwizzleMode)


@given(st.sampled_from([64, 128]), st.integers(1, 16), st.sampled_from(OperandType), st.sampled_from(Major))
def test_instruction_round_trip(m: int, n: int, kind: OperandType, major: Major) -> None:
    made = InstructionDescriptor(m, 16 * n, a_type=kind, b_major=major, negate_b=1)
    assert InstructionDescriptor.decode(made.encode()) == made


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"address": 8}, "address = 8: bits [0, 14) hold 0 to 262128, a multiple of 16"),
        ({"address": 1 << 18}, "address = 262144: bits [0, 14) hold 0 to 262128"),
        ({"address": -16}, "address = -16: bits [0, 14) hold"),
        (
            {"stride_byte_offset": 1000},
            "stride_byte_offset = 1000: bits [32, 46) hold 0 to 262128, a multiple",
        ),
        ({"leading_byte_offset": 1 << 18}, "leading_byte_offset = 262144: bits [16, 30)"),
        ({"base_offset": 8}, "base_offset = 8: bits [49, 52) hold 0 to 7"),
        ({"swizzle": 3}, "swizzle = 3 does not exist: choose NONE = 0, BYTES_128_ATOM_32 = 1, BYTES_128 = 2"),
        ({"version": 0}, "version = 0: sm_100 descriptors have version 1"),
    ],
)
def test_shared_fields_out_of_range(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        shared(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"m": 32}, "m = 32: one CTA multiplies 64 or 128 rows"),
        ({"n": 12}, "n = 12: with m = 64 it is a multiple of 8 from 8 to 256"),
        ({"n": 0}, "n = 0: with m = 64"),
        ({"n": 264}, "n = 264: with m = 64 it is a multiple of 8 from 8 to 256"),
        ({"m": 128, "n": 24}, "n = 24: with m = 128 it is a multiple of 16 from 16 to 256"),
        ({"a_type": 2}, "a_type = 2 does not exist: choose F16 = 0, BF16 = 1"),
        ({"d_type": 2}, "d_type = 2 does not exist: choose F16 = 0, F32 = 1"),
        ({"negate_a": 2}, "negate_a = 2: bits [13, 14) hold 0 to 1"),
    ],
)
def test_instruction_fields_out_of_range(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        InstructionDescriptor(**{"m": 64, "n": 8, **changes})


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (1 << 64, "does not fit 64 bits"),
        (-1, "does not fit 64 bits"),
        (3 << 61 | 1 << 46, "swizzle = 3 does not exist"),
        (1 << 53 | 1 << 46, "has bits 0x20000000000000 that belong to no field"),
        (0, "version = 0"),
    ],
)
def test_words_that_are_no_shared_descriptor(word: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SharedDescriptor.decode(word)


@pytest.mark.parametrize(
    ("word", "message"),
    [(1 << 32, "does not fit 32 bits"), (0x0402_0490 | 1 << 29, "has bits 0x20000000"), (0x490, "m = 0")],
)
def test_words_that_are_no_instruction_descriptor(word: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        InstructionDescriptor.decode(word)


@pytest.mark.parametrize("table", [SHARED_FIELDS, INSTRUCTION_FIELDS])
def test_fields_do_not_overlap(table: dict[str, descriptors.Bits]) -> None:
    used = [bit for bits in table.values() for bit in range(bits.low, bits.high)]
    assert len(used) == len(set(used))


def test_the_table_in_the_documentation_is_the_table_of_the_code() -> None:
    text = descriptors.__doc__ or ""
    for name, bits in (SHARED_FIELDS | INSTRUCTION_FIELDS).items():
        assert re.search(rf"\[{bits.low}, {bits.high}\)\s+{name}\b", text), name
