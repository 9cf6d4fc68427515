"""A kernel's steps, modelled and recorded: the same table from the cost model and from a GPU, and what differs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from rich.table import Table

from oproj_lib.cost_model import CostModel
from oproj_lib.iket_timeline import BARRIER, END, WAITS, Recording, recorded_steps, steps_timeline
from oproj_lib.program import Program
from oproj_lib.timeline import CYCLES, MODELLED_NS, PREVIOUS, Interval, Timeline


def _starts(function: str) -> Callable[[Sequence[Interval]], float | None]:
    """When a warp is first in a function; None if never."""
    return lambda items: min((i.start for i in items if i.function == function), default=None)


def _ends(function: str) -> Callable[[Sequence[Interval]], float | None]:
    """When a warp is last in a function; None if never."""
    return lambda items: max((i.end for i in items if i.function == function), default=None)


def _multiplies(items: Sequence[Interval]) -> float | None:
    """Shared path: x is there. Register path: all its loads are issued, and the first MMA waits for them."""
    received = _ends("receive_x")(items)
    return _starts("multiply")(items) if received is None else received


EVENTS: dict[str, Callable[[Sequence[Interval]], float | None]] = {
    "load_weight": _starts("load_weight"),
    PREVIOUS: _ends("load_weight"),
    "route": _ends("compute"),
    "receive_x": _starts("stage_x"),
    "multiply": _multiplies,
    "store_partials": _ends("_add4"),
    BARRIER: _starts("publish_all"),
    "publish": _ends("publish_all"),
    END: lambda items: max((i.end for i in items), default=None),
}
"""Where an event of ``kernels.events`` would be in a warp's modelled intervals."""
OPTIONAL = ("receive_x",)
"""Only on the shared path."""
BEFORE = "load_weight"
"""The step before griddepcontrol.wait: what it takes is hidden as long as the previous kernel runs."""


def modelled_steps(timeline: Timeline, ghz: float) -> Timeline:
    """A producer's modelled timeline in the steps that events give, in modelled ns at this clock.

    Raises ValueError for a timeline in another clock, or without one of the steps: the ring path repeats them.
    """
    if timeline.clock != CYCLES:
        raise ValueError(f"the timeline is in {timeline.clock}: choose one in {CYCLES}")
    warps = [
        [(time / ghz, name) for time, name in _marks(timeline, warp)]
        for warp in sorted({i.warp for i in timeline.intervals if i.warp >= 0})
    ]
    return steps_timeline(timeline.cta, warps, MODELLED_NS, (f"modelled cycles at {ghz} GHz",))


def _marks(timeline: Timeline, warp: int) -> list[tuple[float, str]]:
    items = timeline.of(f"warp {warp}")
    found = {name: place(items) for name, place in EVENTS.items()}
    missing = [name for name, time in found.items() if time is None and name not in OPTIONAL]
    if missing:
        raise ValueError(
            f"warp {warp} has no step {', '.join(missing)}: choose a producer on the register or shared path"
        )
    return [(time, name) for name, time in found.items() if time is not None]


@dataclass(frozen=True)
class Comparison:
    """The same configuration, modelled and recorded. Times in ns; ``released`` is the same in both: the model
    takes from the recording when the previous kernel ends, and nothing else. program: what was modelled, the
    recorded build without its events."""

    recording: Recording
    modelled: Timeline
    model: CostModel
    program: Program

    @property
    def released(self) -> int:
        return self.recording.released

    @property
    def exposed(self) -> tuple[float, float]:
        """(modelled, recorded) ns from ``released`` to the last event: of CTA 0, of the grid."""
        recorded = self.recording.grid[END][2] - self.released
        return self.modelled.makespan - self.released, recorded

    def durations(self) -> dict[str, tuple[float, float]]:
        """Step -> (modelled, recorded) ns, medians over the warps of CTA 0 and of the grid."""
        found = {}
        for step, recorded in self.recording.durations.items():
            times = [i.duration for i in self.modelled.intervals if i.what == step]
            found[step] = (statistics.median(times), float(recorded))
        return found

    @property
    def late_start(self) -> float:
        """The recording's: see there."""
        return self.recording.late_start

    @property
    def lead(self) -> int:
        """ns by which the last warp of the recorded grid had issued the loads of its weights before the wait was
        over; negative: after it, so that loading was not hidden."""
        return self.released - self.recording.grid[PREVIOUS][2]

    def statement(self) -> str:
        """What differs, with numbers: the whole, the step after the wait that differs most, loading before it, and
        whether the kernels overlapped."""
        modelled, recorded = self.exposed
        steps = self.durations()
        after = {step: pair for step, pair in steps.items() if step not in (*WAITS, BEFORE)}
        step = max(after, key=lambda name: abs(after[name][0] - after[name][1]))
        text = (
            f"K = {self.recording.k}, M = {self.recording.batch}: from the end of the previous kernel to the last "
            f"event {modelled:,.0f} ns modelled, {recorded:,.0f} ns recorded. After the wait, the step that differs "
            f"most is {step}, {after[step][0]:,.0f} ns modelled, {after[step][1]:,.0f} ns recorded (medians over "
            f"warps). Before it a warp issues the loads of its weights in {steps[BEFORE][0]:,.0f} ns modelled, "
            f"{steps[BEFORE][1]:,.0f} ns recorded; the last warp had done so {abs(self.lead):,} ns "
            f"{'before' if self.lead >= 0 else 'after'} the end of the previous kernel."
        )
        if self.late_start:
            text += (
                f" The previous kernel ended {self.released:,} ns after the first event, at the latest, and works "
                f"for longer: on the GPU this kernel started at least {self.late_start:,.0f} ns after it."
            )
        return text

    def table(self) -> Table:
        """Steps with both durations."""
        table = Table(
            title=f"K = {self.recording.k}, M = {self.recording.batch}: ns per step, medians over warps"
        )
        table.add_column("step", style="bold", no_wrap=True)
        table.add_column(f"modelled, {self.model.clock_ghz} GHz", justify="right")
        table.add_column(self.recording.title, justify="right")
        for step, (modelled, recorded) in self.durations().items():
            least = self.recording.facts["resolution_ns"]
            table.add_row(step, f"{modelled:,.0f}", f"{recorded:,.0f}" if recorded else f"less than {least}")
        modelled, recorded = self.exposed
        table.add_row(
            "from the previous kernel's end to the last event", f"{modelled:,.0f}", f"{recorded:,.0f}"
        )
        return table


@cache
def compare_steps(k: int) -> Comparison:
    """Runs the recorded configuration on the virtual GPU and models it. Raises ValueError for a K that was not
    recorded."""
    from oproj_lib.kernels.producer import OprojProducer
    from oproj_lib.traced import trace_engine

    recording = recorded_steps(k)
    model = CostModel()
    model = replace(model, predecessor_end=recording.released * model.clock_ghz)
    settings: dict[str, Any] = {**recording.settings, "transport": recording.transport}
    engine = OprojProducer(k, **settings)
    traced = trace_engine(engine, target="sm_90a", batch=recording.batch)
    return Comparison(
        recording, modelled_steps(traced.modelled(model), model.clock_ghz), model, traced.program
    )
