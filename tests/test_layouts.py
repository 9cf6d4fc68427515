"""The layout functions: every element has exactly one place, and the places are free of bank conflicts."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from tensor_layouts import atoms_nv

from oproj_lib.layouts import banks, fragments, publish, schedule, shared_memory

LANES = range(32)
WARPS = range(16)
# (k, rows): both tensor-parallel sizes, and every rows that divides K into 32-column blocks.
SPLITS = [(1536, 1), (1536, 2), (1536, 4), (768, 1), (768, 2)]


def register_position(lane: int, i: int, element: int) -> tuple[int, int]:
    """(row, K position) of A register i, from the PTX ISA: row group + 8 (i % 2), column 2 part + 8 (i // 2)
    + element."""
    return lane // 4 + 8 * (i % 2), 2 * (lane % 4) + 8 * (i // 2) + element


def test_register_positions_agree_with_an_independent_description_of_the_instruction() -> None:
    """tensor-layouts' atom maps (thread, value) to the offset in a 16 x 16 column-major A tile."""
    layout = atoms_nv.SM80_16x8x16_F32BF16BF16F32_TN.a_layout
    for lane, i, element in product(LANES, range(4), range(2)):
        row, k = register_position(lane, i, element)
        assert layout(lane, 2 * i + element) == row + 16 * k


def test_k_permutation_literal() -> None:
    columns = [[fragments.mma_k_to_column(half, k) for k in range(16)] for half in range(2)]
    assert columns == [
        [0, 1, 8, 9, 16, 17, 24, 25, 2, 3, 10, 11, 18, 19, 26, 27],
        [4, 5, 12, 13, 20, 21, 28, 29, 6, 7, 14, 15, 22, 23, 30, 31],
    ]


@pytest.mark.parametrize("half", range(2))
def test_a_lane_feeds_the_mma_what_the_permutation_says(half: int) -> None:
    for lane, i, element in product(LANES, range(4), range(2)):
        r, word = fragments.a_register(half, i)
        row, k = register_position(lane, i, element)
        group, part = fragments.lane_group(lane), fragments.lane_part(lane)
        assert fragments.weight_row(0, group, r) == row
        loaded = fragments.block_column(0, 1, 0, part) + 2 * word + element
        assert loaded == fragments.mma_k_to_column(half, k)
    for part, i, element in product(range(4), range(2), range(2)):
        k = 2 * part + 8 * i + element  # B register i holds K positions 2 part + 8 i + {0, 1}
        loaded = fragments.block_column(0, 1, 0, part) + 2 * fragments.b_register(half, i) + element
        assert loaded == fragments.mma_k_to_column(half, k)


@pytest.mark.parametrize(("k", "rows"), SPLITS)
def test_every_weight_of_a_cta_is_loaded_once(k: int, rows: int) -> None:
    parts = 4 * rows
    kblocks = k // (32 * parts)
    seen: Counter[tuple[int, int]] = Counter()
    for warp, lane, block, tile, r in product(WARPS, LANES, range(kblocks), range(rows), range(2)):
        row_tile = fragments.warp_row_tile(warp, parts, rows) + tile
        row = fragments.weight_row(row_tile, fragments.lane_group(lane), r)
        k_part = fragments.warp_k_part(warp, parts)
        seen[row, fragments.block_column(k_part, kblocks, block, fragments.lane_part(lane))] += 1
    assert seen == Counter({(row, column): 1 for row in range(64) for column in range(0, k, 8)})


def test_accumulators_cover_the_tile() -> None:
    seen = Counter(
        (fragments.accumulator_token(lane % 4, v), fragments.accumulator_row(lane // 4, v))
        for lane, v in product(LANES, range(4))
    )
    assert seen == Counter({(token, row): 1 for token in range(8) for row in range(16)})
    assert [(fragments.accumulator_token(1, v), fragments.accumulator_row(3, v)) for v in range(4)] == [
        (2, 3),
        (3, 3),
        (2, 11),
        (3, 11),
    ]


@pytest.mark.parametrize(
    ("rows", "group_tiles", "chains"),
    [
        (1, 0, 4),
        (1, 1, 4),
        (1, 2, 2),
        (1, 3, 1),
        (1, 4, 1),
        (1, 8, 1),
        (2, 0, 2),
        (2, 1, 2),
        (2, 2, 1),
        (4, 0, 1),
        (4, 8, 1),
    ],
)
def test_chain_count(rows: int, group_tiles: int, chains: int) -> None:
    assert fragments.chain_count(rows, group_tiles) == chains


def test_chains_take_turns() -> None:
    order = [fragments.chain_of(block, half, 4) for block in range(3) for half in range(2)]
    assert order == [0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize(("staged_blocks", "rows"), [(1, 1), (12, 1), (4, 2), (3, 4)])
def test_staged_chunks_fill_their_area_without_overlap(staged_blocks: int, rows: int) -> None:
    offsets = [
        shared_memory.staged_offset(shared_memory.staged_unit(warp, block, row, staged_blocks, rows), r, lane)
        for warp, block, row, r, lane in product(WARPS, range(staged_blocks), range(rows), range(2), LANES)
    ]
    assert sorted(offsets) == list(range(0, shared_memory.staged_bytes(16, staged_blocks, rows), 16))
    assert shared_memory.staged_bytes(16, staged_blocks, rows) == 16384 * staged_blocks * rows


def test_staged_reads_are_free_of_conflicts() -> None:
    for unit, r in product((0, 1, 17), range(2)):
        offsets = [shared_memory.staged_offset(unit, r, lane) for lane in LANES]
        assert banks.wavefronts(offsets, 16) == 4  # four phases of 8 lanes: the least there is


def x_read(k: int, stride_chunks: int) -> int:
    """Wavefronts of one x fragment read with a row stride of ``stride_chunks``."""
    return banks.wavefronts([(lane // 4 * stride_chunks + lane % 4) * 16 for lane in LANES], 16)


@pytest.mark.parametrize("k", [128, 768, 1536])
def test_the_four_chunks_of_padding_remove_the_conflicts(k: int) -> None:
    offsets = [shared_memory.x_offset(lane // 4, lane % 4, k) for lane in LANES]
    assert banks.wavefronts(offsets, 16) == 4
    assert x_read(k, k // 8 + 4) == 4
    assert x_read(k, k // 8) == 8  # without padding: two rows of a phase on the same banks
    assert [pad for pad in range(8) if x_read(k, k // 8 + pad) == 4] == [4]


@pytest.mark.parametrize("k", [128, 768, 1536])
def test_a_token_tile_is_copied_once(k: int) -> None:
    """The row is copied in steps of 32 chunks by the lanes that are still inside their half row."""
    per_warp = shared_memory.copy_row_chunks(k)
    seen = Counter(
        (shared_memory.copy_token(warp), shared_memory.copy_chunk(warp, lane, k) + first)
        for warp, lane in product(WARPS, LANES)
        for first in range(0, per_warp, 32)
        if first + lane < per_warp
    )
    assert seen == Counter({(token, chunk): 1 for token in range(8) for chunk in range(k // 8)})


@pytest.mark.parametrize(("tiles", "parts"), [(1, 4), (8, 4), (2, 8), (1, 16)])
def test_partial_sums_do_not_overlap(tiles: int, parts: int) -> None:
    offsets = [
        shared_memory.partial_offset(tile, row_tile, k_part, token, row, parts)
        for tile, row_tile, k_part, token, row in product(
            range(tiles), range(4), range(parts), range(8), range(16)
        )
    ]
    assert len(set(offsets)) == len(offsets)
    assert max(offsets) < shared_memory.partial_bytes(tiles, parts) == tiles * 4 * parts * 8 * 20 * 4


def partial_store(stride_words: int, v: int) -> int:
    return banks.wavefronts(
        [((2 * (lane % 4) + v % 2) * stride_words + lane // 4 + 8 * (v // 2)) * 4 for lane in LANES], 4
    )


def test_rows_of_20_words_remove_the_conflicts_of_the_stores() -> None:
    for v in range(4):
        offsets = [
            shared_memory.partial_offset(
                0, 0, 0, fragments.accumulator_token(lane % 4, v), fragments.accumulator_row(lane // 4, v), 4
            )
            for lane in LANES
        ]
        assert banks.wavefronts(offsets, 4) == 1
        assert partial_store(20, v) == 1
        assert partial_store(16, v) == 4


def publish_load(tokens: int, first_tid: int, parts: int, grouped: bool) -> int:
    offsets = []
    for tid in range(first_tid, first_tid + 32):
        token, row_tile, half = (
            publish.grouped_chunk(tid, tokens) if grouped else publish.ungrouped_chunk(tid)
        )
        offsets.append(shared_memory.partial_offset(token // 8, row_tile, 0, token % 8, 8 * half, parts))
    return banks.wavefronts(offsets, 16)


@pytest.mark.parametrize("parts", [4, 8, 16])
def test_grouped_publish_loads_are_free_of_conflicts(parts: int) -> None:
    for tokens in range(8, 65, 8):
        assert {publish_load(tokens, tid, parts, True) for tid in range(0, 8 * tokens, 32)} == {4}
    assert publish_load(8, 0, parts, False) > 4  # tokens in the slowest position: row tiles collide


@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 63, 64])
@pytest.mark.parametrize("grouped", [False, True])
def test_every_chunk_is_published_once(tokens: int, grouped: bool) -> None:
    threads = publish.publish_threads(tokens)
    assert threads == 8 * tokens
    seen = Counter(
        publish.grouped_chunk(tid, tokens) if grouped else publish.ungrouped_chunk(tid)
        for tid in range(threads)
    )
    assert seen == Counter(dict.fromkeys(product(range(tokens), range(4), range(2)), 1))


def test_output_columns_cover_the_output() -> None:
    columns = [
        publish.output_column(cta, row_tile, half)
        for cta, row_tile, half in product(range(112), range(4), range(2))
    ]
    assert columns == list(range(0, 7168, 8))


def test_mailbox_offset() -> None:
    assert publish.mailbox_offset(2, 3, 5, tokens=10, columns=7168) == (2 * 10 + 3) * 7168 + 5


@pytest.mark.parametrize(
    ("batch", "group_tiles", "expected"),
    [
        (1, 0, (1, 1, 1)),
        (8, 0, (1, 1, 1)),
        (9, 0, (2, 2, 1)),
        (64, 0, (8, 8, 1)),
        (8, 2, (1, 1, 1)),
        (16, 2, (2, 2, 1)),
        (17, 2, (3, 2, 2)),
        (64, 3, (8, 3, 3)),
        (64, 8, (8, 8, 1)),
        (63, 1, (8, 1, 8)),
    ],
)
def test_schedule(batch: int, group_tiles: int, expected: tuple[int, int, int]) -> None:
    assert schedule.schedule(batch, group_tiles) == expected


def test_groups_cover_the_batch() -> None:
    for batch, group_tiles in product(range(1, 65), range(9)):
        tiles, tiles_per_group, groups = schedule.schedule(batch, group_tiles)
        counts = [schedule.group_tile_count(group, tiles, tiles_per_group) for group in range(groups)]
        tokens = [schedule.group_tokens(group, batch, tiles_per_group) for group in range(groups)]
        assert sum(counts) == tiles and min(counts) >= 1
        assert sum(tokens) == batch and min(tokens) >= 1
        assert all(8 * (count - 1) < held <= 8 * count for count, held in zip(counts, tokens, strict=True))


def test_ring_buffers_alternate() -> None:
    assert [shared_memory.ring_buffer(group) for group in range(4)] == [0, 1, 0, 1]


def test_banks_counts_and_refuses() -> None:
    assert [banks.bank(offset) for offset in (0, 4, 124, 128)] == [0, 1, 31, 0]
    assert banks.wavefronts([4 * lane for lane in LANES], 4) == 1
    assert banks.wavefronts([128 * lane for lane in LANES], 4) == 32
    assert banks.wavefronts([0] * 32, 4) == 1  # the same word is shared
    assert banks.wavefronts([8 * lane for lane in LANES], 8) == 2
    with pytest.raises(ValueError, match="access_bytes = 2: a lane accesses 4, 8 or 16"):
        banks.wavefronts([0], 2)
    with pytest.raises(ValueError, match="offset 8 is not a multiple of 16"):
        banks.wavefronts([8], 16)
