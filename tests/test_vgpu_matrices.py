"""Descriptors of matrix operands, as literal words, and where each element of a tile lies."""

from __future__ import annotations

import re

import numpy as np
import pytest
from canonical_layouts import byte_offset, packed_offsets

from oproj_lib.vgpu.matrices import (
    DescriptorError,
    InstructionDescriptor,
    SharedDescriptor,
    accumulator_lanes,
    decode_instruction,
    decode_shared,
    element_offsets,
    swizzled,
)

TRITON_128 = 4611756662049472512  # stands in Triton's PTX for sm_100, K-major BF16 with rows of 128 bytes
TRITON_64 = -9223301530671644672 % 2**64  # rows of 64 bytes


def test_tcgen05_literals() -> None:
    assert decode_shared(TRITON_128, tcgen05=True) == SharedDescriptor(0, 0, 1024, 0, 128)
    assert decode_shared(TRITON_64, tcgen05=True) == SharedDescriptor(0, 0, 512, 0, 64)
    assert decode_shared(0x4000_4040_0001_0240, tcgen05=True) == SharedDescriptor(0x2400, 16, 1024, 0, 128)


@pytest.mark.parametrize(
    ("word", "field", "value"),
    [
        (0x3FFF, "address", 0x3FFF0),
        (0x3FFF << 16, "leading", 0x3FFF0),
        (0x3FFF << 32, "stride", 0x3FFF0),
        (5 << 49, "base_offset", 5),
        (2 << 61, "swizzle", 128),
        (4 << 61, "swizzle", 64),
        (6 << 61, "swizzle", 32),
    ],
)
def test_each_field_has_its_bits(word: int, field: str, value: int) -> None:
    empty = SharedDescriptor(0, 0, 0, 0, 0)
    assert decode_shared(1 << 46, tcgen05=True) == empty
    assert decode_shared(1 << 46 | word, tcgen05=True) == SharedDescriptor(**{**vars(empty), field: value})


def test_wgmma_has_another_swizzle_code_and_no_version() -> None:
    spans = [decode_shared(code << 62, tcgen05=False).swizzle for code in range(4)]
    assert spans == [0, 128, 64, 32]
    # Triton's descriptor for sm_90: 128-byte swizzle, 1024 bytes from 8 rows to the next.
    assert decode_shared(0x4000_0040_0001_0000, tcgen05=False) == SharedDescriptor(0, 16, 1024, 0, 128)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (0, "bits 46-48 are 0, must be 1 for tcgen05"),
        (2 << 46, "bits 46-48 are 2"),
        (5 << 46, "bits 46-48 are 5"),
        (1 << 46 | 1 << 14, "reserved bits 0x4000 must be 0"),
        (1 << 46 | 1 << 31, "reserved bits 0x80000000 must be 0"),
        (1 << 46 | 1 << 60, "reserved bits 0x1000000000000000 must be 0"),
        (1 << 46 | 1 << 52, "absolute leading-dimension mode (bit 52) is not modelled"),
        (1 << 46 | 1 << 61, "swizzle code 1; modelled: [0, 2, 4, 6]"),
        (1 << 46 | 7 << 61, "swizzle code 7"),
    ],
)
def test_undefined_words_are_refused(word: int, message: str) -> None:
    with pytest.raises(DescriptorError, match=re.escape(message)) as caught:
        decode_shared(word, tcgen05=True)
    assert f"{word:#018x}" in str(caught.value)


def test_instruction_literals() -> None:
    # Triton's word for 128 x 64, BF16 x BF16 -> F32 with B "transposed", and CUTLASS's for 128 x 256.
    assert decode_instruction(0x0811_0490) == InstructionDescriptor(
        128, 64, "f32", "bf16", "bf16", True, False, False, False
    )
    assert decode_instruction(0x0840_0490) == InstructionDescriptor(
        128, 256, "f32", "bf16", "bf16", True, True, False, False
    )
    assert decode_instruction(0x0402_0010) == InstructionDescriptor(
        64, 8, "f32", "f16", "f16", True, True, False, False
    )


@pytest.mark.parametrize(
    ("bit", "field", "value"),
    [
        (7, "a_type", "bf16"), (10, "b_type", "bf16"), (13, "negate_a", True), (14, "negate_b", True),
        (15, "a_major_k", False), (16, "b_major_k", False),
    ],
)  # fmt: skip
def test_each_instruction_field_has_its_bit(bit: int, field: str, value: object) -> None:
    plain = decode_instruction(0x0402_0010)
    assert decode_instruction(0x0402_0010 | 1 << bit) == InstructionDescriptor(
        **{**vars(plain), field: value}
    )


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (0x0402_0010 | 1 << 2, "sparsity"),
        (0x0402_0010 | 1 << 3, "saturation"),
        (0x0402_0010 | 1 << 23, "reserved bits"),
        (0x0402_0010 | 1 << 30, "max-shift"),
        (0x0402_0000, "an F16 accumulator is not modelled"),
        (0x0402_0020, "types of kind::f16 are D 0 (F16) or 1 (F32)"),
        (0x0402_0010 | 2 << 7, "A and B 0 (F16) or 1 (BF16)"),
        (2 << 24 | 0x2_0010, "M = 32; one CTA has M = 64 or 128"),
        (16 << 24 | 0x2_0010, "M = 256; one CTA"),
        (4 << 24 | 0x10, "N = 0; M = 64 takes multiples of 8 from 8 to 256"),
        (4 << 24 | 33 << 17 | 0x10, "N = 264; M = 64"),
        (8 << 24 | 3 << 17 | 0x10, "N = 24; M = 128 takes multiples of 16 from 16 to 256"),
    ],
)
def test_undefined_instructions_are_refused(word: int, message: str) -> None:
    with pytest.raises(DescriptorError, match=re.escape(message)):
        decode_instruction(word)


def place(address: int, span: int, base_offset: int = 0) -> int:
    return int(swizzled(np.array([address]), span, base_offset)[0])


def test_swizzles_by_hand() -> None:
    # Row 3 of 128 bytes: chunk 5 goes to chunk 5 ^ 3. Row 5: chunk 0 to chunk 5. Row 8: as row 0.
    assert [place(a, 128) for a in (3 * 128 + 80, 5 * 128 + 2, 8 * 128 + 16)] == [
        3 * 128 + 96, 5 * 128 + 82, 8 * 128 + 16,
    ]  # fmt: skip
    # 64 bytes: two rows share 128, and the chunk is XORed with half of the row number modulo 4.
    assert [place(64 * row, 64) % 64 // 16 for row in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [place(32 * row, 32) % 32 // 16 for row in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert place(3 * 128 + 80, 0) == 3 * 128 + 80


def test_the_base_offset_starts_the_pattern() -> None:
    """A tile that starts in row 3 of the pattern, as if it were row 0 (PTX ISA, "Base offset")."""
    start = 3 * 128
    rows = [place(start + 128 * r, 128, 3) - start - 128 * r for r in range(8)]
    assert rows == [16 * r for r in range(8)]


@pytest.mark.parametrize("k_major", [True, False], ids=["K-major", "MN-major"])
@pytest.mark.parametrize("span", [0, 32, 64, 128])
@pytest.mark.parametrize("rows", [64, 128, 256])
def test_tiles_lie_as_the_manual_draws_them(rows: int, span: int, k_major: bool) -> None:
    leading, stride = packed_offsets(rows, 16, span, k_major)
    base = 4096
    descriptor = SharedDescriptor(base, leading, stride, 0, span)
    expected = [
        [base + byte_offset(r, k, span=span, k_major=k_major, leading=leading, stride=stride) for k in range(16)]
        for r in range(rows)
    ]  # fmt: skip
    assert element_offsets(descriptor, rows, 16, k_major).tolist() == expected


def test_an_element_twice_in_a_tile_would_be_seen() -> None:
    """The layouts are one to one."""
    for span in (0, 32, 64, 128):
        for k_major in (True, False):
            leading, stride = packed_offsets(64, 16, span, k_major)
            offsets = element_offsets(SharedDescriptor(0, leading, stride, 0, span), 64, 16, k_major)
            assert len(np.unique(offsets)) == 64 * 16


def test_lanes_of_the_accumulator() -> None:
    assert accumulator_lanes(128, 0).tolist() == list(range(128))
    quarters = [*range(16), *range(32, 48), *range(64, 80), *range(96, 112)]
    assert accumulator_lanes(64, 0).tolist() == quarters
    assert accumulator_lanes(64, 16).tolist() == [lane + 16 for lane in quarters]
