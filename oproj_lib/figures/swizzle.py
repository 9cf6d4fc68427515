"""Swizzled tiles, descriptors bit by bit, and what a wrong descriptor does to a product."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch, Rectangle

from oproj_lib.figures.style import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    ORANGE,
    PALE,
    PAPER,
    PURPLE,
    SKY,
    VERMILLION,
    YELLOW,
    Picture,
    bare,
)
from oproj_lib.layouts.banks import BANK_BYTES, BANKS
from oproj_lib.layouts.descriptors import Bits
from oproj_lib.layouts.fragments import CHUNK_BYTES
from oproj_lib.layouts.swizzle import ROW_BYTES, SWIZZLE_ROWS, swizzle_address, swizzle_mask
from oproj_lib.problem import Array

CHUNK_COLOURS = (SKY, ORANGE, GREEN, PURPLE, YELLOW, "#B7B7B7", "#A6CEE3", "#FDBF6F")
"""One per chunk number of a row."""
CHUNK_BANKS = CHUNK_BYTES // BANK_BYTES


def chunk_places(width: int, swizzled: bool) -> dict[tuple[int, int], int]:
    """(row, chunk) -> byte offset, for the eight rows of one period of the pattern."""
    swizzle_mask(width)
    linear = {
        (row, chunk): row * width + chunk * CHUNK_BYTES
        for row in range(SWIZZLE_ROWS)
        for chunk in range(width // CHUNK_BYTES)
    }
    return {key: swizzle_address(place, width) if swizzled else place for key, place in linear.items()}


def swizzle_atom(width: int = 128, chunk: int = 0) -> Picture:
    """Eight rows of a tile in memory, without and with the swizzle; `chunk` of every row is outlined.

    Raises:
        ValueError: for a width that no swizzle has, or a chunk that a row of that width does not have.
    """
    swizzle_mask(width)
    if not 0 <= chunk < width // CHUNK_BYTES:
        raise ValueError(
            f"chunk = {chunk}: a row of {width} bytes has chunks 0 to {width // CHUNK_BYTES - 1}"
        )
    lines = SWIZZLE_ROWS * width // ROW_BYTES
    picture = Picture(10.5, 1.6 + 0.42 * lines)
    texts = []
    for axes, swizzled in zip(picture.subplots(1, 2), (False, True), strict=True):
        texts.append(_atom_panel(axes, chunk_places(width, swizzled), width, chunk, swizzled))
    picture.alt = (
        f"Memory of 8 rows of {width} bytes, {lines} lines of {BANKS} banks; each cell is a 16-byte chunk, labelled "
        f"row.chunk and coloured by chunk. Chunk {chunk} of each row is outlined. " + " ".join(texts)
    )
    return picture


def _atom_panel(
    axes: Axes, places: Mapping[tuple[int, int], int], width: int, chosen: int, swizzled: bool
) -> str:
    groups = {places[row, chosen] % ROW_BYTES // CHUNK_BYTES for row in range(SWIZZLE_ROWS)}
    passes = max(
        sum(places[row, chosen] % ROW_BYTES // CHUNK_BYTES == group for row in range(SWIZZLE_ROWS))
        for group in groups
    )
    name = "with the swizzle" if swizzled else "rows one after the other"
    need = f"chunk {chosen} of 8 rows: {CHUNK_BANKS * len(groups)} banks, {passes} wavefront(s)"
    bare(axes, title=f"{name}\n{need}")
    for (row, chunk), place in places.items():
        x, y = place % ROW_BYTES // CHUNK_BYTES, place // ROW_BYTES
        mine = chunk == chosen
        axes.add_patch(
            Rectangle(
                (x, y), 1, 1, facecolor=CHUNK_COLOURS[chunk], edgecolor=PAPER, lw=1, alpha=1 if mine else 0.45
            )
        )
        if mine:
            axes.add_patch(Rectangle((x + 0.03, y + 0.04), 0.94, 0.92, facecolor="none", edgecolor=INK, lw=2))
        axes.text(x + 0.5, y + 0.5, f"{row}.{chunk}", ha="center", va="center", fontsize=8.5, color=INK)
    lines = SWIZZLE_ROWS * width // ROW_BYTES
    axes.set(xlim=(-0.05, ROW_BYTES / CHUNK_BYTES + 0.05), ylim=(lines + 0.05, -0.05))
    axes.set_xticks([i + 0.5 for i in range(8)], [f"{4 * i}–{4 * i + 3}" for i in range(8)])
    axes.set_yticks([i + 0.5 for i in range(lines)], [str(i * ROW_BYTES) for i in range(lines)])
    axes.tick_params(length=0, labelsize=8, colors=INK)
    axes.set_xlabel("bank", fontsize=9, color=INK)
    axes.set_ylabel("byte", fontsize=9, color=INK)
    return (
        f"{name.capitalize()}: it lies in {CHUNK_BANKS * len(groups)} banks and takes {passes} wavefront(s)."
    )


FIELD_COLOURS = (SKY, ORANGE, GREEN, PURPLE, YELLOW, "#A6CEE3", "#FDBF6F", "#B7B7B7", "#B2DF8A")


def descriptor_bits(title: str, word: int, fields: Mapping[str, Bits], size: int) -> Picture:
    """A descriptor's bits, most significant first, in lines of 32, coloured by field, with each field's value.

    Raises:
        ValueError: if the word has more bits than `size`.
    """
    if not 0 <= word < 1 << size:
        raise ValueError(f"{word:#x} does not fit {size} bits")
    lines = size // 32
    picture = Picture(11.0, 1.0 + 0.95 * lines + 0.28 * -(-len(fields) // 3))
    axes = bare(picture.subplots(), title=f"{title}: {word:#0{size // 4 + 2}x}")
    owner = {bit: name for name, bits in fields.items() for bit in range(bits.low, bits.high)}
    colours = dict(zip(fields, FIELD_COLOURS, strict=False))
    for bit in range(size):
        line, x = (size - 1 - bit) // 32, 31 - bit % 32
        colour = colours[owner[bit]] if bit in owner else PALE
        axes.add_patch(Rectangle((x, 1.9 * line), 1, 1, facecolor=colour, edgecolor=PAPER, lw=1.2))
        one = word >> bit & 1
        weight = "bold" if one else "normal"
        middle = (x + 0.5, 1.9 * line + 0.5)
        axes.text(*middle, str(one), ha="center", va="center", fontsize=9.5, color=INK, fontweight=weight)
        if bit % 4 == 0 or bit in {b.low for b in fields.values()}:
            axes.text(
                x + 0.5, 1.9 * line + 1.35, str(bit), ha="center", va="center", fontsize=6.5, color=MUTED
            )
    axes.set(xlim=(-0.1, 32.1), ylim=(1.9 * lines - 0.2, -0.1))
    values = {name: bits.decode(word) for name, bits in fields.items()}
    handles = [
        Patch(color=colours[name], label=f"{name} = {_value(bits, values[name])}  [{bits.low}, {bits.high})")
        for name, bits in fields.items()
    ]
    handles.append(Patch(color=PALE, label="reserved: 0"))
    picture.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8.5, frameon=False)
    parts = "; ".join(
        f"bits {b.low} to {b.high - 1}, {name}: {_value(b, values[name])}" for name, b in fields.items()
    )
    picture.alt = f"The {size} bits of {title}, {word:#x}, coloured by field. {parts}. All other bits are 0."
    return picture


def _value(bits: Bits, value: int) -> str:
    return f"{bits.choices(value).name} ({value})" if bits.choices is not None else str(value)


def wrong_products(products: Mapping[str, Array], right: Array) -> Picture:
    """Where each product [m, n] differs from the right one: one map per mistake.

    Raises:
        ValueError: if a product has another shape.
    """
    for name, product in products.items():
        if product.shape != right.shape:
            raise ValueError(f"{name}: shape {product.shape}, the right product has {right.shape}")
    m, n = right.shape
    picture = Picture(3.4 * len(products) + 1.0, 4.6)
    texts = []
    for axes, (name, product) in zip(
        picture.subplots(1, len(products), squeeze=False)[0], products.items(), strict=True
    ):
        wrong = ~(product == right)
        share = wrong.mean()
        bare(axes, title=f"{name}\n{share:.0%} of D is wrong")
        axes.imshow(
            wrong,
            cmap=ListedColormap([BLUE, VERMILLION]),
            vmin=0,
            vmax=1,
            aspect="auto",
            interpolation="nearest",
        )
        axes.set_yticks(range(0, m, 8), map(str, range(0, m, 8)))
        axes.set_xticks(range(0, n, max(8, n // 4)), map(str, range(0, n, max(8, n // 4))))
        axes.tick_params(length=0, labelsize=8, colors=INK)
        axes.set_xlabel("token", fontsize=9, color=INK)
        axes.set_ylabel("row of W", fontsize=9, color=INK)
        rows = np.flatnonzero(wrong.any(axis=1))
        where = f", rows {rows[0]} to {rows[-1]}" if rows.size else ""
        texts.append(f"{name}: {share:.0%} of the elements are wrong{where}")
    handles = [Patch(color=BLUE, label="right"), Patch(color=VERMILLION, label="wrong")]
    picture.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=8.5, frameon=False)
    picture.alt = f"Maps of D, {m} rows by {n} tokens, right or wrong: " + "; ".join(texts) + "."
    return picture
