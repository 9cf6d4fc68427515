"""Builds of the producer by name: what the contract recommends, and what measured fastest on an H200.

A preset is a producer class and its settings for (k, batch). "tuned" is what `run` and the notebooks take on a GPU
when nothing else is asked for; on the virtual GPU, which has no clock, they take "recommended", the plainest build.
Where the numbers come from: `bench --device cuda`, recorded in oproj_lib/data/bench_h200.json; what was tried on the
way: docs/latency.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from oproj_lib.kernels import configuration
from oproj_lib.layouts.fragments import MMA_TOKENS

PRESETS = ("recommended", "tuned")
DIRECT_SETTINGS = {768: {"staged_blocks": 0, "rows": 2}, 1536: {"staged_blocks": 1, "rows": 2}}
"""By k, for one token tile: of all builds, the least exposed."""


@dataclass(frozen=True)
class Preset:
    """direct: `OprojProducerDirect` rather than `OprojProducer`; settings: its keyword arguments beside k."""

    direct: bool
    settings: dict[str, int]


def preset(name: str, k: int, batch: int) -> Preset:
    """The preset for k and batch. Raises ValueError for an unknown name or where nothing fits."""
    if name not in PRESETS:
        raise ValueError(f"preset = {name!r}: choose from {PRESETS}")
    if name == "tuned" and batch <= MMA_TOKENS and k in DIRECT_SETTINGS:
        return Preset(True, DIRECT_SETTINGS[k])
    return Preset(False, configuration.recommended(k, batch).settings())


def default_preset(device: str) -> str:
    """What a run takes that asks for nothing: "tuned" on a GPU."""
    return "tuned" if device == "cuda" else "recommended"
