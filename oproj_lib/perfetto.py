"""Timelines as Chrome-trace JSON, which ui.perfetto.dev and chrome://tracing open (Trace Event Format)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oproj_lib.timeline import CYCLES, RECORDED_NS, Interval, Timeline, pack

FIRST_ASYNCHRONOUS = 1000
"""Thread id of the first lane that is no warp; warps have their own number."""


def chrome_trace(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """One process per CTA; threads are warps, then what runs beside them. One tick of the timeline's clock is
    shown as one microsecond.

    Raises ValueError for timelines with different clocks, or two of one CTA.
    """
    clocks = {timeline.clock for timeline in timelines}
    if len(clocks) > 1:
        raise ValueError(
            f"timelines with different clocks, {' and '.join(sorted(clocks))}: export them apart"
        )
    ctas = [timeline.cta for timeline in timelines]
    if len(set(ctas)) < len(ctas):
        raise ValueError(f"two timelines of one CTA: {ctas}; a process is one CTA")
    events: list[dict[str, Any]] = []
    for timeline in timelines:
        events += _process(timeline)
    clock = clocks.pop() if clocks else CYCLES
    kind = "recorded" if clock == RECORDED_NS else "modelled or ordered, never measured"
    note = f"{clock}: 1 us here is one of them; {kind}"
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"clock": note}}


def _process(timeline: Timeline) -> list[dict[str, Any]]:
    cta = timeline.cta
    events: list[dict[str, Any]] = [_name("process_name", cta, 0, f"CTA {cta} ({timeline.clock})")]
    beside = 0
    for lane in timeline.lanes:
        packed = pack(timeline.of(lane))  # slices of one thread may not cross: overlapping work gets several
        first = packed[0][1]
        rows = 1 + max(row for row, _ in packed)
        base = first.warp if first.warp >= 0 else FIRST_ASYNCHRONOUS + beside
        beside += rows if first.warp < 0 else 0
        for row in range(rows):
            role = f": {first.role}" if first.role else ""
            events.append(_name("thread_name", cta, base + row, f"{lane}{role}"))
            sort = {"name": "thread_sort_index", "ph": "M", "pid": cta, "tid": base + row}
            events.append({**sort, "args": {"sort_index": base + row}})
        events += [_slice(cta, base + row, item) for row, item in packed]
    return events


def _name(kind: str, pid: int, tid: int, text: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": text}}


def _slice(cta: int, thread: int, item: Interval) -> dict[str, Any]:
    arguments = {"function": item.function, "source": f"{item.file}:{item.line}" if item.file else "",
                 "barrier": item.barrier, "stage": item.stage, "phase": item.phase, "bytes": item.bytes,
                 "finished": item.finished}  # fmt: skip
    name = item.what if item.kind != "wait" else f"wait for {item.what}"
    return {"name": name, "cat": item.kind, "ph": "X", "ts": item.start, "dur": item.duration, "pid": cta,
            "tid": thread, "args": arguments}  # fmt: skip


def validate_chrome_trace(trace: Any) -> int:
    """The number of slices of a trace that the viewers can open.

    Raises ValueError for the first event that is not as the Trace Event Format wants it, for a thread without
    a name, and for slices of one thread that cross (they may nest, or follow one another).
    """
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ValueError('no list "traceEvents"')
    named: set[tuple[int, int]] = set()
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for number, event in enumerate(trace["traceEvents"]):
        missing = [key for key in ("name", "ph", "pid", "tid") if key not in event]
        if missing:
            raise ValueError(f"event {number} has no {', '.join(missing)}: {event}")
        thread = (event["pid"], event["tid"])
        if event["ph"] == "M":
            named |= {thread} if event["name"] == "thread_name" else set()
        elif event["ph"] == "X":
            if not event.get("ts", -1) >= 0 or not event.get("dur", -1) >= 0:
                raise ValueError(f"event {number}: ts and dur must be numbers of at least 0: {event}")
            slices.setdefault(thread, []).append((event["ts"], event["ts"] + event["dur"]))
        else:
            raise ValueError(f"event {number}: phase {event['ph']!r}; only M and X are written here")
    for thread, spans in slices.items():
        if thread not in named:
            raise ValueError(f"process {thread[0]}, thread {thread[1]} has no name")
        spans.sort()
        for (_, end), (start, _) in itertools.pairwise(spans):
            if start < end:
                raise ValueError(f"process {thread[0]}, thread {thread[1]}: slices overlap at {start}")
    return sum(map(len, slices.values()))


def save_chrome_trace(timelines: Sequence[Timeline], path: str | Path) -> Path:
    """Writes the JSON file and returns its path."""
    trace = chrome_trace(timelines)
    validate_chrome_trace(trace)
    Path(path).write_text(json.dumps(trace), encoding="utf-8")
    return Path(path)
