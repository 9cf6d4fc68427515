"""The small tcgen05 kernels of notebooks 05 and 07, and the pictures drawn from them and from the layouts."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from canonical_layouts import byte_offset
from tensor_layouts import Layout, Swizzle, compose
from test_figures import cut_off

from oproj_lib import figures, tile_demo
from oproj_lib.figures.swizzle import chunk_places
from oproj_lib.layouts import descriptors
from oproj_lib.problem import Array

REACH = {(warp, quarter): warp == quarter for warp in range(4) for quarter in range(4)}
WORD = tile_demo.tile_descriptor(0x2400).encode()


def product(m: int, n: int, seed: int = 0) -> tuple[Array, Array, Array]:
    weights, tokens = tile_demo.factors(m, n, seed)
    return weights, tokens, weights.astype(float) @ tokens.astype(float).T


PICTURES: dict[str, Callable[[], figures.Picture]] = {
    **{f"swizzle_atom {w}": lambda w=w: figures.swizzle_atom(w, 1) for w in (32, 64, 128)},  # type: ignore[misc]
    "shared descriptor": lambda: figures.descriptor_bits("A", WORD, descriptors.SHARED_FIELDS, 64),
    "instruction descriptor": lambda: figures.descriptor_bits(
        "I", descriptors.InstructionDescriptor(128, 256).encode(), descriptors.INSTRUCTION_FIELDS, 32
    ),
    "wrong_products": lambda: figures.wrong_products({"a": np.eye(64, 8), "b": np.ones((64, 8))}, np.ones((64, 8))),
    "accumulator_map": lambda: figures.accumulator_map(24, 63),
    "accumulator_map, full": lambda: figures.accumulator_map(256, 0),
    "warpgroup_fragment": lambda: figures.warpgroup_fragment(8, 0),
    "allocation_strip": lambda: figures.allocation_strip({"batch 1": 8, "batch 64": 64, "all": 512}),
    "reach_map": lambda: figures.reach_map(REACH),
}  # fmt: skip


@pytest.mark.parametrize("name", PICTURES)
def test_every_picture_can_be_read(name: str) -> None:
    picture = PICTURES[name]()
    assert len(picture.alt) > 80
    assert len(picture.png()) > 5000
    assert cut_off(picture) == []


def test_alternatives_say_what_the_pictures_show() -> None:
    assert "Chunk 2 of each row is outlined" in figures.swizzle_atom(128, 2).alt
    assert "it lies in 4 banks and takes 8 wavefront(s)" in figures.swizzle_atom(128, 2).alt
    assert (
        "With the swizzle: it lies in 32 banks and takes 1 wavefront(s)" in figures.swizzle_atom(128, 2).alt
    )
    alt = figures.descriptor_bits("A", WORD, descriptors.SHARED_FIELDS, 64).alt
    assert "bits 0 to 13, address: 9216; " in alt and "swizzle: BYTES_128 (2)" in alt
    assert "row 37 in lane 69; M = 128: row 37 in lane 37" in figures.accumulator_map(24, 37).alt
    alt = figures.warpgroup_fragment(24, 77).alt
    assert (
        "lane 13 of warp 2, holds 12 elements: (35, 2), (35, 3), (43, 2), (43, 3) in registers 0 to 3" in alt
    )
    assert "a: 98% of the elements are wrong" in PICTURES["wrong_products"]().alt
    assert "warp 2 lanes 64 to 95" in figures.reach_map(REACH).alt


@pytest.mark.parametrize(("width", "bits"), [(32, 1), (64, 2), (128, 3)])
def test_swizzled_chunks_are_those_of_the_layout_algebra(width: int, bits: int) -> None:
    """tensor-layouts' Swizzle<bits, 4, 3> over rows of `width` bytes, and the manual's canonical layout."""
    layout = compose(Swizzle(bits, 4, 3), Layout((8, width), (width, 1)))
    for (row, chunk), place in chunk_places(width, True).items():
        assert place == layout(row, 16 * chunk)
        assert place == byte_offset(row, 8 * chunk, span=width, k_major=True, leading=16, stride=8 * width)


@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize(("m", "n"), [(64, 8), (64, 64), (128, 16)])
def test_products_are_exact(m: int, n: int, width: int) -> None:
    columns = width // 2
    weights, tokens = (tile_demo.whole_numbers(rows, columns, rows) for rows in (m, n))
    run = tile_demo.multiply(weights, tokens, width)
    run.report.raise_for_findings()
    assert (run.rows(m) == weights.astype(float) @ tokens.astype(float).T).all()
    assert np.isnan(run.lanes).sum() == (128 - m) * n


def test_wrong_descriptors_are_wrong_where_the_notebook_says() -> None:
    weights, tokens, expected = product(64, 16)
    stride = tile_demo.multiply(weights, tokens, stride=512).rows(64)
    assert (stride[:8, :8] == expected[:8, :8]).all() and (stride[8:, 8:] != expected[8:, 8:]).mean() > 0.95
    stored = tile_demo.multiply(weights, tokens, stored=64).rows(64)
    rows, columns = np.arange(64)[:, None], np.arange(16)
    agree = (
        rows // 4 % 2 == columns // 4 % 2
    )  # the XORs of row and token differ from the described ones alike
    assert (stored[agree] == expected[agree]).all() and (stored[~agree] != expected[~agree]).mean() > 0.95


@pytest.mark.parametrize("start", [128, 512, 896])
def test_a_base_offset_repairs_a_shifted_tile(start: int) -> None:
    weights, tokens, expected = product(64, 8)
    assert (tile_demo.multiply(weights, tokens, start=start).rows(64) != expected).mean() > 0.9
    repaired = tile_demo.multiply(weights, tokens, start=start, base_offset=start // 128)
    assert (repaired.rows(64) == expected).all()


@pytest.mark.parametrize(("warp", "quarter"), [(0, 1), (3, 0)])
def test_the_lane_quarter_finding(warp: int, quarter: int) -> None:
    report = tile_demo.read_quarters(64, [quarter if w == warp else w for w in range(4)]).report
    assert {finding.kind for finding in report.findings} == {"lane quarter"}
    message = (
        f"warp {warp} reaches tensor memory lanes {32 * warp}..{32 * warp + 31}, not "
        f"{32 * quarter}..{32 * quarter + 31}"
    )
    assert report.findings[0].message == message


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tile_demo.tile_image(np.zeros((8, 64)), 64), "a row of 64 BF16 is 128 bytes; this tile has"),
        (lambda: tile_demo.tile_image(np.zeros((8, 64)), 48), "swizzle width = 48"),
        (lambda: tile_demo.slot_address(4, 4, 8192), "slot = 4: the ring has slots 0 to 3"),
        (lambda: tile_demo.pair_of(4, 0), "warp = 4, quarter = 0: both are 0 to 3"),
        (lambda: tile_demo.read_quarters(64, (0, 1, 2)), "four warps each read one of the quarters 0 to 3"),
        (lambda: tile_demo.read_quarters(64, remove="wgmma"), "remove = 'wgmma': no line of this kernel has it"),
        (lambda: tile_demo.multiply_tiles(np.zeros(4, np.uint8), [], [], 0), "m = 0: one CTA multiplies"),
        (lambda: figures.swizzle_atom(64, 4), "chunk = 4: a row of 64 bytes has chunks 0 to 3"),
        (lambda: figures.swizzle_atom(48), "swizzle width = 48"),
        (lambda: figures.accumulator_map(24, 64), "row = 64: D has rows 0 to 63"),
        (lambda: figures.accumulator_map(513, 0), "513 TMEM columns"),
        (lambda: figures.warpgroup_fragment(8, 128), "thread = 128: a warpgroup has threads 0 to 127"),
        (lambda: figures.warpgroup_fragment(12, 0), "n = 12: choose a multiple of 8 from 8 to 64"),
        (lambda: figures.descriptor_bits("I", 1 << 32, descriptors.INSTRUCTION_FIELDS, 32), "does not fit 32 bits"),
        (lambda: figures.wrong_products({"a": np.ones((2, 2))}, np.ones((2, 3))), "a: shape (2, 2), the right product"),
    ],
)  # fmt: skip
def test_wrong_input(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
