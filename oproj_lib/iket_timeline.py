"""Timelines of real kernels: the events that IKET recorded on a GPU, as the same table that the model gives.

IKET (In-Kernel Event Tracing) comes with CuTe DSL and decodes what it recorded to JSON: launches, each with
markers (time, name, location), and a table of locations (CTA, warp, SM). An event is the start of a step, which
lasts until the warp's next event (``kernels.events`` says what the steps are). Times are %globaltimer,
nanoseconds in steps of 32.

    trace.json of IKET --read_iket--> launches --record_iket--> data/iket_h200.json --recorded_steps--> Timeline

``docs/in_kernel_timelines.md`` says how to record one.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from oproj_lib.timeline import (
    PREVIOUS,
    RECORDED_NS,
    RUN,
    WAIT,
    Interval,
    Timeline,
)

DATA = Path(__file__).resolve().parent / "data" / "iket_h200.json"
DRIVER_CARVEOUT = DATA.with_name("iket_driver_carveout_h200.json")
"""The same of the producer, the previous kernel's carve-out left to the driver, which favours the L1."""
RESOLUTION_NS = 32
"""How finely %globaltimer counts on an H200: all recorded times are multiples of it."""
JSON_VERSION = 1
END, RELEASED, BARRIER = "end", "route", "CTA barrier"
"""Events: a warp has issued its last store; it has passed griddepcontrol.wait; it waits for all warps."""
MEET, FINISH = "meet", "finish"
"""Events of `OprojWgmma`: a warp waits for the other multipliers; for its last wgmma."""
WAITS = (PREVIOUS, BARRIER, MEET)
"""Steps in which a warp waits for others; in the others it issues instructions or waits for its own data."""
PRODUCER, WGMMA = "producer", "wgmma"
"""Engines with events, as ``Program.config`` calls them."""
ROLE = "loads, multiplies, publishes"
WGMMA_ROLES = {**dict.fromkeys(range(4), "loader"), **dict.fromkeys(range(4, 8), "multiplier")}
SETTINGS = ("staged_blocks", "rows", "group_tiles", "budget")
KEPT_CTAS = (0, 55, 111)
"""CTAs whose events are kept: the first, one in the middle, the last. Medians are over all of them."""
Mark = tuple[int, str]
"""(nanoseconds, name of the event)"""
_TABLES = ("launches", "locationTable", "stringTable", "meta")


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel with events. marks: (CTA, warp) -> its events in order of time."""

    kernel: str
    marks: Mapping[tuple[int, int], tuple[Mark, ...]]

    @property
    def start(self) -> int:
        """When the first event of the grid was."""
        return min(marks[0][0] for marks in self.marks.values())

    @property
    def released(self) -> int:
        """When the first warp of the grid had passed griddepcontrol.wait: the previous kernel ended before."""
        return min(self.times(RELEASED))

    @property
    def exposed(self) -> int:
        """Nanoseconds from ``released`` to the grid's last event."""
        return max(marks[-1][0] for marks in self.marks.values()) - self.released

    def times(self, event: str) -> list[int]:
        """When the warps of the grid had this event. Raises ValueError if none had."""
        found = [time for marks in self.marks.values() for time, name in marks if name == event]
        if not found:
            names = dict.fromkeys(name for marks in self.marks.values() for _, name in marks)
            raise ValueError(f"no event {event!r} in {self.kernel}; there are {', '.join(names)}")
        return found

    def durations(self) -> dict[str, list[int]]:
        """Step -> how long it lasted, one number per warp of the grid."""
        found: dict[str, list[int]] = {}
        for marks in self.marks.values():
            for (begin, step), (end, _) in itertools.pairwise(marks):
                found.setdefault(step, []).append(end - begin)
        return found


def read_iket(source: Mapping[str, Any] | Path | str) -> tuple[Launch, ...]:
    """The launches with events of IKET's decoded JSON, in order; source: the JSON itself, or its path.

    Raises ValueError for something else than IKET's decoded JSON, for another version of it, and for grids
    with more than one dimension.
    """
    data = source if isinstance(source, Mapping) else _load(Path(source))
    if missing := [name for name in _TABLES if name not in data]:
        raise ValueError(
            f"this is not IKET's decoded JSON: it lacks {', '.join(missing)} and has {', '.join(list(data)[:5])}; "
            "choose the .trace.json of a run with `--postprocess all`"
        )
    if (version := data["meta"].get("version")) != JSON_VERSION:
        raise ValueError(f"IKET's JSON has version {version}; version {JSON_VERSION} can be read")
    launches = (_launch(item, data["locationTable"], data["stringTable"]) for item in data["launches"])
    return tuple(launch for launch in launches if launch.marks)


def _load(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # no text, or no JSON
        raise ValueError(f"{path} is not JSON ({error}): choose the .trace.json of IKET") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} is a JSON {type(data).__name__}: choose the .trace.json of IKET")
    return data


def _launch(item: Mapping[str, Any], locations: Sequence[Any], names: Sequence[str]) -> Launch:
    found: dict[tuple[int, int], list[Mark]] = {}
    for marker in item["markers"]:
        place = locations[marker["locIdx"]]
        cta, *others = place["ctaId"]
        if any(others):
            raise ValueError(f"CTA {place['ctaId']}: only grids of one dimension can be read")
        marks = found.setdefault((cta, place["warpId"]), [])
        marks.append((marker["timestamp"], names[marker["markerNameIdx"]]))
    ordered = {place: tuple(sorted(found[place], key=lambda mark: mark[0])) for place in sorted(found)}
    return Launch(item["kernelName"], ordered)


def median_launch(launches: Sequence[Launch]) -> Launch:
    """The one whose exposed time is the median; of two in the middle, the shorter. Raises ValueError for none."""
    if not launches:
        raise ValueError("no launches to choose from")
    return sorted(launches, key=lambda launch: launch.exposed)[(len(launches) - 1) // 2]


# What is kept


@dataclass(frozen=True)
class Recording:
    """One configuration's recorded launch. Times in ns; 0 is the grid's first event.

    released: when the first warp of the grid had passed griddepcontrol.wait. grid: event -> (first, median,
    last) over all warps; durations: step -> median over all warps. warps: CTA -> warp -> events. times: what
    events cost, see ``overhead``. facts: machine, driver, versions, date, command.
    """

    engine: str
    k: int
    batch: int
    settings: Mapping[str, int]
    transport: str
    released: int
    grid: Mapping[str, tuple[int, int, int]]
    durations: Mapping[str, int]
    warps: Mapping[int, tuple[tuple[Mark, ...], ...]]
    times: Mapping[str, Mapping[str, float]]
    facts: Mapping[str, Any]

    @property
    def title(self) -> str:
        """`recorded on an NVIDIA H200, 2026-11-29, in steps of 32 ns`"""
        resolution = self.facts["resolution_ns"]
        return f"recorded on an {self.facts['machine']}, {self.facts['date']}, in steps of {resolution} ns"

    @property
    def late_start(self) -> float:
        """ns by which the kernel started later, at least, than the previous kernel, whose CTAs work for a time
        that is known: 0 where the recording does not show it."""
        return max(0.0, self._works - self.released)

    @property
    def late_end(self) -> float:
        """ns by which the wait was over later, at least, than the previous kernel's CTAs work: the hand-over, and
        whatever else kept that kernel. 0 where the recording does not show it."""
        return max(0.0, self.released - self._works)

    @property
    def _works(self) -> float:
        """ns that a CTA of the previous kernel spins."""
        return float(self.facts["predecessor_cycles"] / self.facts["clock_khz"] * 1e6)

    def timeline(self, cta: int) -> Timeline:
        """The steps of a CTA's warps. Raises ValueError for a CTA that was not kept."""
        if cta not in self.warps:
            raise ValueError(f"CTA {cta} was not kept: choose from {', '.join(map(str, self.warps))}")
        roles = WGMMA_ROLES if self.engine == WGMMA else {}
        return steps_timeline(cta, self.warps[cta], notes=(self.title,), roles=roles)

    def overhead(self) -> str:
        """What events cost, as a sentence: medians, microseconds from the previous kernel's end on."""
        graph, eager = self.times["graph_us"], self.times["eager_us"]
        return (
            f"{self.engine}, K = {self.k}, M = {self.batch}: {graph['without']:.2f} us exposed without events and "
            f"{graph['with']:.2f} with them (CUDA graph); {eager['without']:.2f}, {eager['with']:.2f} and, while "
            f"IKET records, {eager['recording']:.2f} (single launches, with the hand-over to a next kernel)"
        )


def steps_timeline(
    cta: int,
    warps: Sequence[Sequence[tuple[float, str]]],
    clock: str = RECORDED_NS,
    notes: tuple[str, ...] = (),
    roles: Mapping[int, str] = MappingProxyType({}),
) -> Timeline:
    """Events of a CTA's warps as a timeline. roles: of the warps, `ROLE` where left out.

    Raises ValueError unless the last event of every warp is END.
    """
    intervals: list[Interval] = []
    for warp, marks in enumerate(warps):
        if not marks or marks[-1][1] != END:
            raise ValueError(f"CTA {cta}, warp {warp}: the last event is {marks[-1:]}, and not {END!r}")
        for (begin, step), (end, _) in itertools.pairwise(marks):
            kind = WAIT if step in WAITS else RUN
            lane = f"warp {warp}"
            intervals.append(
                Interval(lane, warp, roles.get(warp, ROLE), kind, step, "", -1, -1, begin, end, function=step)
            )  # fmt: skip
    makespan = max((item.end for item in intervals), default=0.0)
    return Timeline(cta, clock, tuple(intervals), (), (), makespan, notes)


def recorded_steps(k: int, path: Path | str = DATA, engine: str = PRODUCER) -> Recording:
    """The recording of this package at K. Raises ValueError for a K or an engine that was not recorded."""
    data = json.loads(Path(path).read_text(encoding="utf-8"))
    kept = {(_engine(item), item["k"]): item for item in data["launches"]}
    if (engine, k) not in kept:
        there = ", ".join(f"{k} ({name})" for name, k in kept)
        raise ValueError(f"k = {k} was not recorded for {engine}: choose from {there}")
    item = kept[engine, k]
    warps = {
        int(cta): tuple(
            tuple(zip(times, names, strict=True))
            for times, names in zip(warps, _names(item, len(warps)), strict=True)
        )
        for cta, warps in item["ctas"].items()
    }
    grid = {name: tuple(times) for name, times in item["grid"].items()}
    return Recording(
        engine, k, item["batch"], item["settings"], item["transport"], item["released"], grid, item["durations"],
        warps, item["times"], data["facts"],
    )  # fmt: skip


def recorded_engines(path: Path | str = DATA) -> tuple[str, ...]:
    """The engines of which this package has a recording."""
    data = json.loads(Path(path).read_text(encoding="utf-8"))
    return tuple(dict.fromkeys(_engine(item) for item in data["launches"]))


def _engine(item: Mapping[str, Any]) -> str:
    """Of a kept launch: the oldest recordings are of the producer alone, and do not say so."""
    return str(item.get("engine", PRODUCER))


def _names(item: Mapping[str, Any], warps: int) -> Sequence[Sequence[str]]:
    """The events of each warp: kept once where all warps have the same."""
    names = item["events"]
    return [names] * warps if isinstance(names[0], str) else names


def record_iket(
    trace: Path | str,
    plain: Path | str,
    traced: Path | str,
    out: Path | str = DATA,
    ctas: Sequence[int] = KEPT_CTAS,
) -> Path:
    """Writes what is worth keeping of IKET's JSON: the median launch of each case, some CTAs of it.

    plain, traced: the two ``times`` files of ``bench.iket_run``, without and with the tool. The first launch of
    a case is a warm-up. Raises ValueError where the files do not belong together, or a CTA is not there.
    """
    launches = read_iket(trace)
    without, recorded = (json.loads(Path(path).read_text(encoding="utf-8")) for path in (plain, traced))
    counts = [1 + len(case["exposed_ns_eager"]) for case in recorded["cases"]]
    if sum(counts) != len(launches):
        raise ValueError(
            f"{trace} has {len(launches)} launches, {traced} speaks of {' + '.join(map(str, counts))}: "
            "choose files of one run"
        )
    items, first = [], 0
    for case, count in zip(recorded["cases"], counts, strict=True):
        chosen = median_launch(launches[first + 1 : first + count])
        first += count
        items.append(_kept(case, chosen, count - 1, ctas, _times(case, without["cases"])))
    facts = {
        **without["facts"],
        "source": "recorded on hardware",
        "tool": "IKET of CuTe DSL",
        "unit": "ns",
        "resolution_ns": RESOLUTION_NS,
        "command": [without["facts"]["command"], recorded["facts"]["command"]],
    }
    text = json.dumps({"facts": facts, "launches": items}, separators=(",", ":"))
    Path(out).write_text(text.replace('],"', '],\n"') + "\n", encoding="utf-8")
    return Path(out)


def _kept(
    case: Mapping[str, Any], launch: Launch, among: int, ctas: Sequence[int], times: Mapping[str, Any]
) -> dict[str, Any]:
    start, by_warp = launch.start, _events(launch)
    names = list(dict.fromkeys(name for events in by_warp for name in events))
    warps: dict[int, list[list[int]]] = {}
    for cta in ctas:
        warps[cta] = [
            [time - start for time, _ in marks] for (at, _), marks in launch.marks.items() if at == cta
        ]
        if not warps[cta]:
            raise ValueError(f"CTA {cta} has no events: choose from 0 to {max(at for at, _ in launch.marks)}")
    spread = {name: [time - start for time in launch.times(name)] for name in names}
    config = case["config"]
    return {
        "engine": _engine(case),
        "k": case["k"],
        "batch": config["batch"],
        "settings": {name: config[name] for name in SETTINGS if name in config},
        "transport": config["transport"],
        "events": by_warp[0] if all(events == by_warp[0] for events in by_warp) else by_warp,
        "chosen": f"median exposed time of {among} launches",
        "released": launch.released - start,
        "grid": {name: [min(t), statistics.median_low(t), max(t)] for name, t in spread.items()},
        "durations": {name: statistics.median_low(t) for name, t in launch.durations().items()},
        "times": times,
        "ctas": warps,
    }


def _events(launch: Launch) -> list[list[str]]:
    """The events of each warp, which are the same in every CTA. Raises ValueError where they are not."""
    found: dict[int, list[str]] = {}
    for (cta, warp), marks in launch.marks.items():
        events = [name for _, name in marks]
        if found.setdefault(warp, events) != events:
            raise ValueError(f"CTA {cta}, warp {warp} has the events {events}, others have {found[warp]}")
    return [found[warp] for warp in sorted(found)]


def _times(case: Mapping[str, Any], cases: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Exposed microseconds, medians: without events, with them, and while IKET records."""
    same = (_engine(case), case["k"])
    at_k = {other["program"]: other for other in cases if (_engine(other), other["k"]) == same}
    if missing := {"off", "events"} - set(at_k):
        raise ValueError(f"{same[0]}, K = {case['k']} was not timed with {' and '.join(sorted(missing))}")
    graph, eager = {}, {}
    for name, program in (("without", "off"), ("with", "events")):
        graph[name] = round(statistics.median(one["exposed_us"] for one in at_k[program]["graph_us"]), 3)
        eager[name] = statistics.median(at_k[program]["exposed_ns_eager"]) / 1e3
    eager["recording"] = statistics.median(case["exposed_ns_eager"]) / 1e3
    return {"graph_us": graph, "eager_us": eager}
