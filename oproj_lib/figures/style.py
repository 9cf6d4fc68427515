"""One look for every picture: colour-blind safe, readable on light and dark pages, with a text
alternative."""

from __future__ import annotations

import base64
import io
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# Okabe and Ito, "Color Universal Design" (2008): eight colours that colour-blind readers tell apart.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILLION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
PARTS = (SKY, ORANGE, GREEN, PURPLE)
PAPER = "#FBFAF7"  # pictures bring their own background, so they read the same on a dark page
INK = "#222222"
MUTED = "#6B6B6B"
PALE = "#E4E2DC"
DPI = 160
PIXELS_PER_INCH = 96  # of a page, so that 1 inch of figure is 1 inch of page


class Picture(Figure):
    """A matplotlib Figure with a text alternative, `alt`, that goes with it into notebook and page.

    A notebook cell that ends in a Picture shows it: as an <img> with its alt text, for readers who cannot
    see it.
    """

    def __init__(self, width: float, height: float, *, alt: str = "") -> None:
        """width and height in inches."""
        super().__init__(figsize=(width, height), layout="constrained", facecolor=PAPER)
        FigureCanvasAgg(self)
        self.alt = alt

    def draw(self, renderer: RendererBase) -> None:
        """As in Figure, but cells and their numbers, which lie inside their axes, do not slow the layout down."""
        for axes in self.axes:
            for artist in (*axes.patches, *axes.texts, *axes.lines):
                artist.set_in_layout(False)
        super().draw(renderer)

    def png(self) -> bytes:
        """The picture as PNG, the same bytes for the same picture."""
        if not self.alt.strip():
            raise ValueError("a picture needs a text alternative: set alt")
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=DPI, facecolor=PAPER, metadata={"Software": None})
        return buffer.getvalue()

    def save(self, path: str | Path) -> Path:
        """Write the PNG and return its path."""
        Path(path).write_bytes(self.png())
        return Path(path)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        width = round(self.get_figwidth() * PIXELS_PER_INCH)
        data = base64.b64encode(self.png()).decode()
        style = "max-width:100%;height:auto;border-radius:6px"
        source = f"data:image/png;base64,{data}"
        image = f'<img alt="{escape(self.alt)}" width="{width}" style="{style}" src="{source}">'
        return {"text/html": image, "text/plain": f"[picture: {self.alt}]"}


def plain(axes: Axes, *, title: str = "", x: str = "", y: str = "", grid: str | None = None) -> Axes:
    """Axes with the project's look: title at the left, no box, a light grid along `grid` ("x", "y" or
    "both")."""
    axes.set_facecolor(PAPER)
    axes.set_title(title, loc="left", fontsize=10.5, color=INK)
    axes.set_xlabel(x, fontsize=9, color=INK)
    axes.set_ylabel(y, fontsize=9, color=INK)
    axes.tick_params(labelsize=8, colors=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(MUTED)
    if grid:
        axes.grid(True, axis=grid, color=PALE, linewidth=0.8)  # type: ignore[arg-type]
        axes.set_axisbelow(True)
    return axes


def bare(axes: Axes, *, title: str = "") -> Axes:
    """Axes without frame and ticks, for drawings."""
    plain(axes, title=title)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)
    return axes
