"""Swizzles, the ring and tensor memory: tables written by hand, and what the kernel's functions must add up
to."""

from __future__ import annotations

from itertools import product

import pytest
from tensor_layouts import Swizzle

from oproj_lib.layouts import banks, ring, swizzle, tmem

# Chunk that lies at each 16-byte position of each row, after CUTLASS's and the PTX ISA's figures: position p
# of row r holds chunk p ^ r, p ^ (r // 2) or p ^ (r // 4). Rows are 128, 64 or 32 bytes.
TABLES = {
    128: ["01234567", "10325476", "23016745", "32107654", "45670123", "54761032", "67452301", "76543210"],
    64: ["0123", "0123", "1032", "1032", "2301", "2301", "3210", "3210"],
    32: ["01", "01", "01", "01", "10", "10", "10", "10"],
}


@pytest.mark.parametrize("width", [128, 64, 32])
def test_swizzle_tables(width: int) -> None:
    for row, positions in enumerate(TABLES[width]):
        for position, chunk in enumerate(positions):
            assert (
                swizzle.swizzle_address(row * width + int(chunk) * 16, width) == row * width + position * 16
            )


@pytest.mark.parametrize(("width", "bits"), [(128, 3), (64, 2), (32, 1)])
def test_swizzle_is_the_one_of_an_independent_library(width: int, bits: int) -> None:
    """tensor-layouts' Swizzle<bits, 4, 3> acts on byte addresses as CUTLASS's does."""
    other = Swizzle(bits, 4, 3)
    for address in range(0, 4096, 8):
        assert swizzle.swizzle_address(address, width) == other(address)


@pytest.mark.parametrize(("width", "period"), [(128, 1024), (64, 512), (32, 256)])
def test_swizzle_period_and_inverse(width: int, period: int) -> None:
    assert swizzle.swizzle_period(width) == period
    moved = [swizzle.swizzle_address(address, width) for address in range(period)]
    assert sorted(moved) == list(range(period))
    for address in range(period):
        assert swizzle.swizzle_address(moved[address], width) == address
        assert swizzle.swizzle_address(address + 3 * period, width) == moved[address] + 3 * period


@pytest.mark.parametrize("width", [0, 16, 48, 256])
def test_other_widths_are_refused(width: int) -> None:
    with pytest.raises(ValueError, match=rf"swizzle width = {width} bytes: choose from \(32, 64, 128\)"):
        swizzle.swizzle_address(0, width)


def test_tile_offset_literal() -> None:
    # (row, chunk): 8-row atoms of 1024 bytes, rows of 128, chunk position c ^ (r % 8)
    expected = {(0, 0): 0, (0, 7): 112, (1, 0): 144, (7, 7): 896, (8, 0): 1024, (13, 2): 1024 + 5 * 128 + 112}
    for (row, chunk), offset in expected.items():
        assert swizzle.tile_offset(row, chunk) == offset
    for row, chunk in product(range(64), range(8)):
        assert swizzle.tile_offset(row, chunk) == swizzle.swizzle_address(row * 128 + chunk * 16)


def test_a_column_of_chunks_is_free_of_conflicts_only_with_the_swizzle() -> None:
    for chunk in range(8):
        column = [swizzle.tile_offset(row, chunk) for row in range(8)]
        assert banks.wavefronts(column, 16) == 1
        assert banks.wavefronts([row * 128 + chunk * 16 for row in range(8)], 16) == 8


# Ring


def test_stage_arithmetic() -> None:
    assert (ring.TILE_K, ring.MMAS_PER_BLOCK, ring.MMA_STEP_BYTES, ring.W_TILE_BYTES) == (64, 4, 32, 8192)
    assert [ring.padded_tokens(m) for m in (1, 7, 8, 9, 63, 64)] == [8, 8, 8, 16, 64, 64]
    assert [ring.stage_bytes(n) for n in (8, 64, 256)] == [9216, 16384, 40960]
    assert ring.FULL_ARRIVALS == 256


@pytest.mark.parametrize(
    ("budget", "stages"), [(9215, 0), (9216, 1), (18431, 1), (18432, 2), (12 * 9216, 12), (200 * 1024, 12)]
)
def test_stage_count_at_its_boundaries(budget: int, stages: int) -> None:
    assert ring.stage_count(768, 8, budget) == stages


def test_slots_and_parities_of_eight_blocks_in_three_stages() -> None:
    blocks = range(8)
    assert [ring.slot_of(b, 3) for b in blocks] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert [ring.full_parity(b, 3) for b in blocks] == [0, 0, 0, 1, 1, 1, 0, 0]
    assert [ring.empty_parity(b, 3) for b in blocks[3:]] == [0, 0, 0, 1, 1]
    assert [ring.is_refilled(b, 8, 3) for b in blocks] == [True] * 5 + [False] * 3
    with pytest.raises(ValueError, match="block 2 is the first in its slot of 3"):
        ring.empty_parity(2, 3)


@pytest.mark.parametrize("stages", range(1, 13))
def test_parities_follow_the_phases_of_a_barrier(stages: int) -> None:
    """A wait for parity p returns when the phase of parity p is the last that completed: replay all 24
    blocks."""
    full, empty = [0] * stages, [0] * stages  # completed phases
    for block in range(24):
        slot = ring.slot_of(block, stages)
        if block >= stages:
            assert (empty[slot] - 1) % 2 == ring.empty_parity(block, stages)
        full[slot] += 1
        assert (full[slot] - 1) % 2 == ring.full_parity(block, stages)
        if ring.is_refilled(block, 24, stages):
            empty[slot] += 1
    # Nobody commits to a barrier that nobody waits for.
    assert sum(empty) == 24 - stages


def test_barriers_do_not_overlap() -> None:
    offsets = [ring.full_barrier(s) for s in range(5)] + [ring.empty_barrier(s, 5) for s in range(5)]
    offsets.append(ring.accumulator_barrier(5))
    assert offsets == [8 * i for i in range(11)]
    assert ring.barrier_area_bytes(5) == 88


def test_128_loaders_cover_a_tile_once() -> None:
    seen = sorted(ring.copy_offset(tid) + i * ring.copy_pass_bytes() for tid in range(128) for i in range(4))
    assert seen == [16 * chunk for chunk in range(512)]
    for tid, i in product(range(128), range(4)):
        row, chunk = ring.copy_row(tid) + 16 * i, ring.copy_chunk(tid)
        assert ring.copy_offset(tid) + i * ring.copy_pass_bytes() == swizzle.tile_offset(row, chunk)


def test_the_mma_finds_what_the_loaders_stored() -> None:
    """A K-major descriptor says: row r, byte b of the K16 slice is at start + (r // 8) * SBO + (r % 8) * 128
    + b, and the swizzle is applied to that address."""
    tile = {}  # address -> (row, byte of the row)
    for row, chunk, byte in product(range(64), range(8), range(16)):
        tile[swizzle.tile_offset(row, chunk) + byte] = (row, chunk * 16 + byte)
    for step, row, byte in product(range(4), range(64), range(32)):
        start = step * ring.MMA_STEP_BYTES
        address = swizzle.swizzle_address(start + row // 8 * 1024 + row % 8 * 128 + byte)
        assert tile[address] == (row, step * 32 + byte)


def test_epilogue_tile_is_free_of_conflicts() -> None:
    for warp, token in product(range(4), (0, 1, 17)):
        stores = [ring.tile_word_offset(token, 16 * warp + lane) for lane in range(16)]
        assert banks.wavefronts(stores, 4) == 1
    for warp, half in product(range(4), range(2)):
        loads = []
        for lane in range(32):
            token, chunk = ring.publish_chunk(32 * warp + lane)
            loads.append(ring.tile_word_offset(token, 8 * chunk) + 16 * half)
        assert banks.wavefronts(loads, 16) == 4  # the least: 512 bytes at 128 a cycle
    # The plain order, eight chunks of a token side by side, takes twice as long.
    plain = [ring.tile_word_offset(lane // 8, lane % 8 * 8) for lane in range(32)]
    assert banks.wavefronts(plain, 16) == 8


def test_publish_covers_16_tokens_a_pass_in_whole_lines() -> None:
    assert sorted(ring.publish_chunk(tid) for tid in range(128)) == sorted(product(range(16), range(8)))
    for warp in range(4):
        assert {ring.publish_chunk(32 * warp + lane)[0] for lane in range(32)} == set(
            range(4 * warp, 4 * warp + 4)
        )
    assert [ring.publish_passes(m) for m in (1, 16, 17, 64)] == [1, 1, 2, 4]


@pytest.mark.parametrize(("n", "size"), [(8, 2176), (64, 17408), (256, 69632)])
def test_epilogue_size(n: int, size: int) -> None:
    assert ring.epilogue_bytes(n) == size


# Tensor memory


def test_lanes_of_rows() -> None:
    # PTX ISA, "Data path layout organization": M = 128, all lanes; M = 64, lanes 0-15 of every quarter.
    rows = [0, 15, 16, 31, 32, 47, 48, 63]
    assert [tmem.lane_of_row(row, 128) for row in rows] == rows
    assert [tmem.lane_of_row(row, 64) for row in rows] == [0, 15, 32, 47, 64, 79, 96, 111]
    for warp, lane in product(range(4), range(16)):
        assert tmem.lane_of_row(16 * warp + lane, 64) == tmem.first_lane(warp) + lane
    with pytest.raises(ValueError, match="m = 32: an MMA of one CTA has 64 or 128 rows"):
        tmem.lane_of_row(0, 32)


@pytest.mark.parametrize(
    ("n", "columns"), [(1, 32), (8, 32), (32, 32), (33, 64), (64, 64), (65, 128), (256, 256), (512, 512)]
)
def test_allocation_columns(n: int, columns: int) -> None:
    assert tmem.allocation_columns(n) == columns


@pytest.mark.parametrize("n", [0, 513])
def test_allocations_that_do_not_exist(n: int) -> None:
    with pytest.raises(ValueError, match=f"{n} TMEM columns: an SM has 512"):
        tmem.allocation_columns(n)


def test_tmem_addresses_and_quarters() -> None:
    assert tmem.tmem_address(0x100, 96, 5) == 0x600105
    assert [tmem.first_lane(warp) for warp in range(6)] == [0, 32, 64, 96, 0, 32]


@pytest.mark.parametrize(
    ("n", "pieces"),
    [
        (8, ((0, 8),)),
        (24, ((0, 16), (16, 8))),
        (64, ((0, 32), (32, 32))),
        (56, ((0, 32), (32, 16), (48, 8))),
    ],
)
def test_load_pieces(n: int, pieces: tuple[tuple[int, int], ...]) -> None:
    assert tmem.load_pieces(n) == pieces


def test_load_pieces_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match="0 columns to load"):
        tmem.load_pieces(0)
    with pytest.raises(ValueError, match=r"largest = 24 columns: choose from \(128, 64,"):
        tmem.load_pieces(8, 24)
