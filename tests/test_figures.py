"""Pictures: each has a text alternative, nothing is cut off, and what they show is what the functions say."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text

from oproj_lib import accesses, attribution, figures
from oproj_lib.figures import style
from oproj_lib.figures.banks import collisions
from oproj_lib.figures.errors import half_step
from oproj_lib.figures.overview import readme_picture
from oproj_lib.figures.stream import wait_index
from oproj_lib.floor import Roofline
from oproj_lib.kernels.configuration import Configuration
from oproj_lib.problem import Problem, reference
from oproj_lib.recorded import recorded_h200
from oproj_lib.run import RunResult, run_producer

ROOT = Path(__file__).resolve().parents[1]
H200 = Roofline(4.26, 989.5)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
SPLIT = Configuration(1536, 4, 1, 0)
COUNTS = {"x_words": 86_016, "publish_chunk": 28_672}


@cache
def result() -> RunResult:
    return run_producer(ranks=16, batch=1, device="vgpu")


def padded(padding: int) -> list[int]:
    return accesses.x_row_offsets(1536, padding)


def staircase() -> figures.Picture:
    x, weight = Problem(16, 1).inputs(0)
    return figures.rounding_staircase(result().out, reference(x, weight))


PICTURES: dict[str, Callable[[], figures.Picture]] = {
    "work_split": lambda: figures.work_split(SPLIT, 8),
    "work_split, 1 token": lambda: figures.work_split(Configuration(768, 0), 1),
    "work_split, ring": lambda: figures.work_split(Configuration(1536, 2, 2, 1), 64),
    "work_split, 4 row tiles": lambda: figures.work_split(Configuration(1536, 1, 4, 0), 7),
    "instruction_stream": lambda: figures.instruction_stream(
        attribution.steps(result().program, result().report)
    ),
    "rounding_staircase": staircase,
    "roofline_plot": lambda: figures.roofline_plot(H200, BATCHES, Problem(8, 8)),
    "roofline_plot, low ridge": lambda: figures.roofline_plot(Roofline(8.0, 40.0), BATCHES, Problem(16, 64)),
    "time_floors": lambda: figures.time_floors(H200, BATCHES),
    "exposed_times 768": lambda: figures.exposed_times(recorded_h200(), 768),
    "exposed_times 1536": lambda: figures.exposed_times(recorded_h200(), 1536),
    "operand_maps": lambda: figures.operand_maps(31),
    "k_permutation": figures.k_permutation,
    "lane_loads": lambda: figures.lane_loads(SPLIT, lane=5, block=11),
    "bank_map": lambda: figures.bank_map({"no padding": padded(0), "+ 4": padded(4)}, 16),
    "padding_sweep": lambda: figures.padding_sweep("x", "chunks", range(13), padded, 16, 3),
    "wavefront_bars": lambda: figures.wavefront_bars(COUNTS, COUNTS, COUNTS),
}


@pytest.mark.parametrize("name", PICTURES)
def test_every_picture_can_be_read(name: str) -> None:
    picture = PICTURES[name]()
    assert isinstance(picture, Figure)
    assert len(picture.alt) > 80
    bundle = picture._repr_mimebundle_()
    alt = re.search(r'<img alt="([^"]*)"', bundle["text/html"])
    assert alt is not None and html.unescape(alt[1]) == picture.alt
    assert picture.alt in bundle["text/plain"]
    assert cut_off(picture) == []
    pixels = imread(io.BytesIO(picture.png()))
    assert tuple(np.round(pixels[0, 0] * 255).astype(int)) == (0xFB, 0xFA, 0xF7, 255)  # its own background
    assert len(np.unique(pixels.reshape(-1, 4), axis=0)) > 20  # and something on it


def cut_off(picture: figures.Picture) -> list[str]:
    """Texts that reach beyond the edge of the picture."""
    picture.canvas.draw()
    box = picture.bbox
    not_drawn = [label for axes in picture.axes for label in ticks_outside(axes)]
    found = []
    for text in picture.findobj(Text):
        assert isinstance(text, Text)
        if not text.get_visible() or not text.get_text().strip():
            continue
        if text in not_drawn:
            continue
        place = text.get_window_extent()
        if place.x0 < box.x0 - 1 or place.x1 > box.x1 + 1 or place.y0 < box.y0 - 1 or place.y1 > box.y1 + 1:
            found.append(text.get_text())
    return found


def ticks_outside(axes: Axes) -> list[Text]:
    """Labels of ticks beyond the limits, which matplotlib makes and does not draw."""
    outside: list[Text] = []
    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        low, high = min(low, high), max(low, high)
        for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
            if not low <= tick.get_loc() <= high:
                outside += [tick.label1, tick.label2]
    return outside


def test_a_cut_off_text_would_be_seen() -> None:
    picture = style.Picture(2, 1, alt="x" * 100)
    picture.text(0.9, 0.5, "a long text that does not fit")
    assert cut_off(picture) == ["a long text that does not fit"]


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2.2)."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    bright, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def test_texts_have_enough_contrast() -> None:
    assert contrast("#FFFFFF", "#000000") == pytest.approx(21)
    assert contrast(style.INK, style.PAPER) > 7
    assert contrast(style.MUTED, style.PAPER) > 4.5
    for fill in (*style.PARTS, style.PALE, style.ORANGE, style.SKY):
        assert contrast(style.INK, fill) > 4.5, fill  # numbers stand on these
    for colour in (style.VERMILLION, style.BLUE):
        assert contrast(colour, style.PAPER) > 3, colour  # lines and large text


def test_a_picture_needs_a_text_alternative() -> None:
    with pytest.raises(ValueError, match="needs a text alternative"):
        style.Picture(1, 1).png()


def test_the_readme_picture_is_the_library_s(tmp_path: Path) -> None:
    fresh = imread(readme_picture().save(tmp_path / "kernel.png"))
    committed = imread(ROOT / "docs" / "kernel.png")
    assert fresh.shape == committed.shape
    assert np.abs(fresh - committed).mean() < 5e-5, "run `python -m oproj_lib.figures`"


def test_another_picture_would_be_noticed() -> None:
    committed = imread(ROOT / "docs" / "kernel.png")
    other = imread(io.BytesIO(figures.work_split(Configuration(1536, 5), 8).png()))
    assert np.abs(other - committed).mean() > 5e-5


def test_alternatives_say_what_the_data_say() -> None:
    assert "8 words" not in figures.bank_map({"x": padded(4)}, 16).alt
    assert (
        "x: at most 2 word(s) of a bank wanted at once, 8 wavefronts"
        in figures.bank_map({"x": padded(0)}, 16).alt
    )
    assert (
        "x: at most 1 word(s) of a bank wanted at once, 4 wavefronts"
        in figures.bank_map({"x": padded(4)}, 16).alt
    )
    assert "MMA 0 has [0, 1, 8, 9, 16, 17, 24, 25, 2, 3" in figures.k_permutation().alt
    assert "reads rows 1 and 9 from column 8" in figures.lane_loads(SPLIT, lane=5, block=0).alt
    assert "4: 2.6" not in figures.exposed_times(recorded_h200(), 768).alt
    assert "4: 6.4 and 2.6" in figures.exposed_times(recorded_h200(), 1536).alt


def test_collisions_of_a_phase() -> None:
    assert set(collisions([4 * lane for lane in range(32)], 4).values()) == {1}
    assert set(collisions([128 * lane for lane in range(32)], 4).values()) == {32}
    assert set(collisions([0] * 32, 4).values()) == {1}  # one word, shared
    same_bank = collisions([0, 128, 16, 32, 48, 64, 80, 96], 16)  # lanes 0 and 1 of one phase
    assert same_bank[0, 0] == same_bank[1, 3] == 2 and same_bank[2, 4] == 1
    apart = collisions([0, *range(16, 128, 16), 128], 16)  # lane 8 is in the next phase
    assert apart[8, 0] == apart[0, 0] == 1


def test_half_a_step() -> None:
    # BF16 has 8 significant bits: neighbours in [1, 2) are 2**-7 apart, in [2, 4) 2**-6.
    assert half_step(np.array([1.0, 1.99, 2.0, -3.0, 0.5])).tolist() == [2**-8, 2**-8, 2**-7, 2**-7, 2**-9]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: figures.work_split(SPLIT, 8, cta=112), "cta = 112: there are 112, choose 0 to 111"),
        (lambda: figures.work_split(SPLIT, 65), "65"),
        (lambda: figures.operand_maps(32), "lane = 32: a warp has lanes 0 to 31"),
        (lambda: figures.lane_loads(SPLIT, lane=0, block=12), "block = 12: a warp has 12 K blocks"),
        (lambda: figures.bank_map({"x": [8] * 32}, 16), "offset 8 is not a multiple of 16"),
        (lambda: figures.wavefront_bars(COUNTS, {"x_words": 1}, COUNTS), "different functions"),
        (lambda: figures.rounding_staircase(np.zeros((1, 2)), np.zeros((1, 2))), "a reference value is 0"),
        (lambda: figures.rounding_staircase(np.zeros((1, 2)), np.ones((2, 2))), "must be equal"),
        (lambda: wait_index([]), "no griddepcontrol.wait"),
    ],
)  # fmt: skip
def test_wrong_input(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
