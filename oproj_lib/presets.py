"""Builds by name: what the contract recommends, and what measured fastest on an H200.

A preset is an engine and its settings for (k, batch). "tuned" is what a run takes on a GPU when nothing else is asked
for (`run.run_projection`, `python -m oproj_lib run`); on the virtual GPU, which has no clock, that is "recommended",
the plainest build. Where the numbers come from: `bench --device cuda` with the consumer "next", recorded in
oproj_lib/data/bench_h200.json, which a test holds the table against; what was tried on the way: docs/latency.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from oproj_lib.kernels import configuration
from oproj_lib.layouts.fragments import MMA_TOKENS
from oproj_lib.problem import MAX_BATCH

PRESETS = ("recommended", "tuned")
PRODUCERS = ("producer", "direct")
"""Engines that `run.run_producer` runs: `OprojProducer`, and `OprojProducerDirect` for at most 8 tokens."""
DIRECT_SETTINGS = {768: {"staged_blocks": 0, "rows": 2}, 1536: {"staged_blocks": 1, "rows": 2}}
"""By k, for one token tile: of all direct builds that were measured at every M, the least exposed."""
DIRECT_CONTENDERS = {768: (), 1536: ({"staged_blocks": 1, "rows": 4},)}
"""By k, direct builds that were not slower at 8 tokens (1.96 us at K = 1536, the preset 2.05) and have not been
measured at fewer. A bundle holds them at every M, so the next recording can choose."""
RECORDED_TARGET = "sm_90a"
"""What the table below was recorded for. For sm_100a nothing was measured; what one token tile takes there is
Hopper's choice, and beyond it "tuned" is "recommended"."""


@dataclass(frozen=True)
class Preset:
    """engine: producer, direct, wgmma; settings: its keyword arguments beside k. why: one sentence for people."""

    engine: str
    settings: dict[str, int]
    why: str = ""

    @property
    def direct(self) -> bool:
        """Whether it is `OprojProducerDirect`."""
        return self.engine == "direct"


TUNED: dict[int, tuple[tuple[int, str, dict[str, int]], ...]] = {
    768: ((MMA_TOKENS, "direct", DIRECT_SETTINGS[768]), (MAX_BATCH, "wgmma", {})),
    1536: ((MMA_TOKENS, "direct", DIRECT_SETTINGS[1536]), (MAX_BATCH, "wgmma", {})),
}
"""k -> (up to so many tokens, engine, settings), for sm_90a."""


def preset(name: str, k: int, batch: int, target: str = RECORDED_TARGET) -> Preset:
    """The preset for k, batch and target. Raises ValueError for an unknown name or where nothing fits."""
    if name not in PRESETS:
        raise ValueError(f"preset = {name!r}: choose from {PRESETS}")
    if name == "tuned" and k in TUNED:
        if target == RECORDED_TARGET and batch <= MAX_BATCH:
            engine, settings = next((e, s) for most, e, s in TUNED[k] if batch <= most)
            why = f"least exposed of the engines at K = {k} and M about {batch} in data/bench_h200.json"
            return Preset(engine, dict(settings), why)
        if batch <= MMA_TOKENS:
            return Preset("direct", direct_settings(k), f"Hopper's choice; nothing was measured for {target}")
    why = "the plainest build" if name == "recommended" else "recommended: nothing was measured for it"
    return Preset("producer", configuration.recommended(k, batch).settings(), why)


def direct_settings(k: int) -> dict[str, int]:
    """Settings of the direct engine for k. Raises ValueError for a k without."""
    if k not in DIRECT_SETTINGS:
        raise ValueError(
            f"k = {k} has no measured settings of the direct engine; choose from {tuple(DIRECT_SETTINGS)}"
        )
    return dict(DIRECT_SETTINGS[k])


def default_preset(device: str) -> str:
    """What a run takes that asks for nothing: "tuned" on a GPU."""
    return "tuned" if device == "cuda" else "recommended"
