"""Slots, generations, records and shards as numbers."""

from __future__ import annotations

import numpy as np
import pytest

from oproj_lib.layouts import mailbox as layout


def test_slots_and_generations() -> None:
    assert [layout.slots_of(ranks) for ranks in (1, 8, 16)] == [3, 24, 48]
    assert layout.ranks_of(24) == 8
    assert sorted(layout.slot(g, r, 8) for g in range(3) for r in range(8)) == list(range(24))
    generation, seen = 0, []
    for _ in range(7):
        seen.append(generation)
        assert layout.next_generation(layout.previous_generation(generation)) == generation
        generation = layout.next_generation(generation)
    assert seen == [0, 1, 2, 0, 1, 2, 0]
    for slots in (0, 2, 8):
        with pytest.raises(ValueError, match=rf"mailbox of {slots} slots: .* multiple of 3"):
            layout.ranks_of(slots)


@pytest.mark.parametrize(
    ("grid", "threads"), [(112, 512), (112, 32), (1, 128), (64, 256), (512, 32), (3, 64)]
)
def test_a_grid_advances_every_record_once(grid: int, threads: int) -> None:
    """The stores of Generations.store: records of CTAs that the grid lacks are somebody's, and nobody's twice."""
    written = [
        cta + (step * threads + thread) * grid
        for step in range(layout.record_steps(grid, threads))
        for cta in range(grid)
        for thread in range(threads)
    ]
    inside = [record for record in written if record < layout.RECORDS]
    assert sorted(inside) == list(range(layout.RECORDS))


def test_records_do_not_overlap() -> None:
    records = {layout.record(role, cta) for role in layout.Role for cta in range(layout.RECORDS)}
    assert records == set(range(int(np.prod(layout.STATE_SHAPE))))
    with pytest.raises(ValueError, match="a grid of 513 CTAs: the state of a mailbox has 512 records"):
        layout.record_steps(513, 32)


def test_numbers_of_ranks_that_two_shot_knows() -> None:
    """A CTA's 64 columns have one owner where the ranks divide the 112 CTAs."""
    assert layout.two_shot_ranks() == (1, 2, 4, 7, 8, 14, 16, 28, 56, 112)
    for ranks in layout.two_shot_ranks():
        shard = layout.receive_columns(ranks)
        owners = {layout.owner(column, shard) for column in range(7168)}
        assert owners == set(range(ranks))
        for cta in range(112):
            assert len({layout.owner(cta * 64 + column, shard) for column in range(64)}) == 1
        assert max(layout.shard_column(column, shard) for column in range(7168)) == 7168 // ranks - 1


@pytest.mark.parametrize("ranks", [0, -8, 3, 6, 48])
def test_ranks_that_do_not_divide_the_columns_are_refused(ranks: int) -> None:
    with pytest.raises(ValueError, match=rf"ranks = {ranks} does not divide the 7168 columns: choose one of"):
        layout.receive_columns(ranks)


@pytest.mark.parametrize(("ranks", "shard"), [(32, 224), (64, 112), (128, 56), (7168, 1)])
def test_ranks_that_would_split_a_cta_are_refused(ranks: int, shard: int) -> None:
    with pytest.raises(
        ValueError, match=rf"shards of 7168 / {ranks} = {shard} columns, no multiple of the 64"
    ):
        layout.receive_columns(ranks)


@pytest.mark.parametrize(("grid", "threads", "chunks"), [(112, 128, 7168), (112, 32, 112), (112, 512, 57344)])
def test_dealt_chunks_are_all_and_in_lines_of_eight(grid: int, threads: int, chunks: int) -> None:
    first = np.array([[layout.dealt_chunk(c, t, grid) for t in range(threads)] for c in range(grid)])
    rounds = layout.passes(chunks, grid * threads)
    everything = np.concatenate([first.ravel() + i * grid * threads for i in range(rounds)])
    assert sorted(everything[everything < chunks]) == list(range(chunks))
    assert (first[:, 0::8] % 8 == 0).all() and (np.diff(first.reshape(grid, -1, 8), axis=2) == 1).all()
    busy = (first < chunks).any(axis=1).sum()
    assert busy == min(grid, -(-chunks // 8))  # few chunks land on many SMs


def test_a_cta_arms_its_own_columns_of_a_one_shot_mailbox() -> None:
    """896 chunks per token are 112 lines: dealing lines to 112 CTAs gives CTA c the columns 64 c .. 64 c + 63."""
    for cta in (0, 5, 111):
        for thread in (0, 7, 8, 127):
            chunk = layout.dealt_chunk(cta, thread, 112)
            assert chunk % 896 // 8 == cta and chunk // 896 == thread // 8


@pytest.mark.parametrize(
    ("tokens", "threads"), [(1, 128), (15, 128), (16, 128), (17, 160), (63, 512), (64, 512)]
)
def test_threads_of_a_consuming_cta(tokens: int, threads: int) -> None:
    assert layout.consumer_threads(tokens) == threads
    chunks = [layout.consumed_chunk(i) for i in range(8 * tokens)]
    assert sorted(chunks) == [(token, column) for token in range(tokens) for column in range(0, 64, 8)]


@pytest.mark.parametrize(
    ("tokens", "ranks", "threads"),
    [(1, 8, 32), (8, 8, 32), (64, 8, 64), (64, 1, 512), (64, 2, 256), (64, 56, 32)],
)
def test_threads_of_the_second_shot(tokens: int, ranks: int, threads: int) -> None:
    assert layout.second_shot_threads(tokens, ranks) == threads
    assert 112 * threads >= tokens * 7168 // ranks // 8
