"""What recorded benchmarks say, as rows and tables: our pick beside torch.mm, the goals, neighbours, and the check.

Every number is read from a data file or computed from numbers of one session. Sessions are not mixed: the same kernel
differs between them (`drift_table`).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from oproj_lib.bench.alternatives import MM_ATTNRES
from oproj_lib.bench.consumers import EXCHANGES
from oproj_lib.bench.measure import copies_needed
from oproj_lib.bench.results import HardwareBench, Row
from oproj_lib.layouts.fragments import MMA_TOKENS
from oproj_lib.presets import preset
from oproj_lib.provenance import Provenance
from oproj_lib.recorded import DATA, recorded_bench
from oproj_lib.residency import Needs

BLAS = "torch.mm"
CONSUMER_FILES = {"reduce": "bench_reduce_h200.json", "attnres": "bench_attnres_h200.json"}
READING_FILE = "bench_read_h200.json"
ENGINES = ("producer", "direct", "wgmma")
SWEEP_BATCH = 8
PROJECTION_THREADS = 512
"""Of a CTA of the producers."""


@dataclass(frozen=True)
class Goal:
    """What was aimed at for one token tile on an H200: microseconds exposed, and how many times less than cuBLAS."""

    exposed_us: float
    ratio: float


GOALS = {768: Goal(1.4, 3.9), 1536: Goal(1.7, 4.8)}
GOAL_CONSUMER = "next"
"""The chain that the goals were set for."""


def goals_us(bench: HardwareBench) -> dict[int, float]:
    """k -> microseconds, for pictures; empty for a chain with another consumer, for which there are no goals."""
    return {k: goal.exposed_us for k, goal in GOALS.items()} if bench.consumer == GOAL_CONSUMER else {}


def at(bench: HardwareBench, k: int, batch: int, name: str) -> Row:
    """The first row of a name: the build that is measured at every size. Raises ValueError where there is none."""
    rows = bench.rows_at(k, batch, name)
    if not rows:
        raise ValueError(
            f"{name} at K = {k}, M = {batch} is not in this measurement (consumer {bench.consumer}); at this K it has "
            f"M = {', '.join(map(str, bench.batches(k)))} and {', '.join(bench.names())}"
        )
    return rows[0]


def ours(bench: HardwareBench, k: int, batch: int) -> Row:
    """Our pick: the preset "tuned" (beyond a token tile on a GPU that has it, `OprojUmma`).

    Raises ValueError where the session lacks it.
    """
    if bench.consumer in EXCHANGES:
        return ours_with_consumer(bench, k, batch)
    if batch > MMA_TOKENS and "umma" in bench.names():
        return at(bench, k, batch, "umma")
    tuned = preset("tuned", k, batch)
    name = tuned.engine
    at(bench, k, batch, name)  # the error names what there is
    rows = [row for row in bench.rows_at(k, batch, name) if dict(row.settings) == tuned.settings]
    if not rows:
        raise ValueError(f"{name} {tuned.settings} at K = {k}, M = {batch} is not in this measurement")
    return rows[0]


def ours_with_consumer(bench: HardwareBench, k: int, batch: int) -> Row:
    """Our pick where the chain has its consumer: the less exposed of all engines, split and fused.

    Raises ValueError where the session has none.
    """
    rows = [
        row
        for row in bench.rows
        if (row.k, row.batch) == (k, batch) and row.name.endswith((", split", ", fused"))
    ]
    if not rows:
        at(bench, k, batch, f"a projection with the consumer {bench.consumer}")  # raises, with what there is
    return min(rows, key=lambda row: row.exposed.median_us)


def beside(bench: HardwareBench, k: int, batch: int) -> Row:
    """What a user would call instead: torch.mm, and behind it, in the chain with AttnRes, the compiled formula.

    Raises ValueError where the session lacks it.
    """
    return at(bench, k, batch, beside_name(bench))


def beside_name(bench: HardwareBench) -> str:
    """The name of `beside`'s rows."""
    return MM_ATTNRES if bench.consumer == "attnres" else BLAS


def ratio(bench: HardwareBench, k: int, batch: int) -> float:
    """How many times longer a layer waits for torch.mm (see `beside`) than for our pick, in the same session."""
    return beside(bench, k, batch).exposed.median_us / ours(bench, k, batch).exposed.median_us


def recorded_consumers() -> dict[str, HardwareBench]:
    """Sessions whose chain has its real consumer, by consumer."""
    return {consumer: recorded_bench(DATA / name) for consumer, name in CONSUMER_FILES.items()}


def session_of(consumer: str, sessions: Mapping[str, HardwareBench]) -> HardwareBench:
    """The session with a consumer. Raises ValueError where none is recorded, with what there is and the command that
    makes one."""
    if consumer not in sessions:
        raise ValueError(
            f"consumer = {consumer!r} is not recorded; choose from {', '.join(sessions)}, or record it: `python -m "
            f"oproj_lib bench --device cuda --consumer {consumer} --out bench_{consumer}_h200.json`"
        )
    return sessions[consumer]


def origin(source: Provenance, *details: str) -> str:
    """Machine, driver, versions, clocks, date and command of a session, a line each."""
    packages = ", ".join(f"{name} {version}" for name, version in source.packages.items() if version)
    clocks = "; ".join(
        f"{moment}: SM {found['clocks.sm']} of {found['clocks.max.sm']}, memory {found['clocks.mem']}, "
        f"{found['temperature.gpu']} C"
        for moment, found in source.clocks.items()
    )
    lines = {
        "recorded on": f"{source.gpu}, {source.multiprocessors} SMs, {source.l2_bytes / 2**20:g} MiB of L2",
        "driver": f"{source.driver}, CUDA {source.cuda_driver_api}",
        "versions": f"Python {source.python}, {packages}",
        "clocks": clocks,
        "date": source.date,
        "command": source.command,
    }
    shown = [f"{name + ':':13s}{text}" for name, text in lines.items()]
    return "\n".join([*shown, *(f"{'':13s}{detail}" for detail in details)])


def bench_origin(bench: HardwareBench) -> str:
    """``origin`` of a benchmark, with what it measured how often."""
    carveout = "the driver's" if bench.carveout is None else f"{bench.carveout} % shared memory"
    return origin(
        bench.provenance,
        f"{bench.rounds} passes of {bench.replays} replays; {bench.chain}; carve-out of the kernels "
        f"around: {carveout}",
        f"memory in this measurement: copy {bench.ceilings.copy_tb_s:.2f}, read {bench.ceilings.read_tb_s:.2f} TB/s",
    )


def rotation_table(k: int, moved_bytes: int, l2_bytes: int, copies: Sequence[int]) -> Table:
    """Bytes read between two uses of the same copy of W, beside the L2 cache; the last row is what bench takes."""
    weight_bytes = 7168 * k * 2
    needed = copies_needed(weight_bytes, l2_bytes)
    table = Table(title=f"K = {k}: W has {weight_bytes / 1e6:.1f} MB, the L2 {l2_bytes / 1e6:.1f} MB")
    for name in ("copies of W", "MB until the same one again", "times the L2", "weights"):
        table.add_column(name, justify="left" if name == "weights" else "right")
    for count in (*copies, needed):
        between = (count - 1) * moved_bytes
        share = between / l2_bytes
        state = "warm: all fit" if share + moved_bytes / l2_bytes <= 1 else "not surely cold"
        table.add_row(
            str(count), f"{between / 1e6:,.0f}", f"{share:.1f}", "cold" if count >= needed else state
        )
    return table


def comparison_table(bench: HardwareBench) -> Table:
    """Our pick beside torch.mm at every size of a session."""
    table = Table(
        title=f"what a layer waits, {bench.chain}; recorded",
        caption=f"{bench.provenance.title}; microseconds, medians, in brackets the quartiles; all from one session",
    )
    for name in ("K", "M", "ours", "a layer waits", beside_name(bench), "ratio", "alone", "the other alone"):
        table.add_column(name, justify="left" if name == "ours" else "right")
    for k in sorted({job.k for job in bench.jobs}):
        for batch in bench.batches(k):
            mine, blas = ours(bench, k, batch), beside(bench, k, batch)
            assert mine.alone and blas.alone
            table.add_row(
                str(k),
                str(batch),
                mine.name,
                _spread(mine),
                _spread(blas),
                f"{ratio(bench, k, batch):.2f}",
                f"{mine.alone.median_us:.2f}",
                f"{blas.alone.median_us:.2f}",
            )
        table.add_section()
    return table


def predecessor_table(sessions: Mapping[str, HardwareBench], k: int) -> Table:
    """What a layer waits at every size that all sessions have, by what stands before the projection.

    sessions: by predecessor, of one kind of consumer. Rows are each engine's least exposed build in that chain, which
    need not be the same, and torch.mm. Raises ValueError for sessions with other consumers.
    """
    consumers = {bench.consumer for bench in sessions.values()}
    if len(consumers) != 1:
        raise ValueError(
            f"consumers {sorted(consumers)}: sessions are compared that differ in the predecessor only"
        )
    first = next(iter(sessions.values()))
    table = Table(
        title=f"K = {k}: what a layer waits, by predecessor; recorded on {first.provenance.title}",
        caption="microseconds, medians; of each engine the least exposed build in that chain; consumer "
        + consumers.pop(),
    )
    table.add_column("M", justify="right")
    table.add_column("projection")
    for name in sessions:
        table.add_column(f"predecessor {name}", justify="right")
    for batch in common_batches(sessions, k):
        for name in (*ENGINES, BLAS):
            rows = [bench.best(k, batch, name) for bench in sessions.values()]
            if all(rows):
                table.add_row(str(batch), name, *(_with_settings(row) for row in rows if row))
        table.add_section()
    return table


def common_batches(sessions: Mapping[str, HardwareBench], k: int) -> list[int]:
    """Tokens that all sessions measured at K, ascending."""
    return sorted(set.intersection(*(set(bench.batches(k)) for bench in sessions.values())))


def _with_settings(row: Row) -> str:
    """`1.62 (0, 2)`: the settings in the order of the row's title."""
    settings = f" ({', '.join(map(str, row.settings.values()))})" if row.settings else ""
    return f"{row.exposed.median_us:.2f}{settings}"


def predecessor_markdown(sessions: Mapping[str, HardwareBench]) -> str:
    """The table of docs/latency.md: least exposed of ours and torch.mm, by predecessor."""
    lines = [
        "| K | M | " + " | ".join(f"{name}: ours | torch.mm" for name in sessions) + " |",
        "| ---: | ---: |" + " --- | ---: |" * len(sessions),
    ]
    first = next(iter(sessions.values()))
    for k in sorted({job.k for job in first.jobs}):
        for batch in common_batches(sessions, k):
            cells = []
            for bench in sessions.values():
                found = [row for name in ENGINES if (row := bench.best(k, batch, name))]
                best = min(found, key=lambda row: row.exposed.median_us)
                cells.append(
                    f"{best.exposed.median_us:.2f}, {best.title} | {at(bench, k, batch, BLAS).exposed.median_us:.2f}"
                )
            lines.append(f"| {k} | {batch} | {' | '.join(cells)} |")
    return "\n".join(lines)


def recorded_predecessors() -> dict[str, HardwareBench]:
    """The recorded sessions whose chain ends in the next predecessor, by predecessor."""
    return {"spin": recorded_bench(), "read": recorded_bench(DATA / READING_FILE)}


def results_markdown(bench: HardwareBench) -> str:
    """The table of docs/latency.md: our pick beside torch.mm at every size, exposed."""
    lines = [
        f"| K | M | projection | exposed | {beside_name(bench)} | ratio |",
        "| ---: | ---: | --- | ---: | ---: | ---: |",
    ]
    for k in sorted({job.k for job in bench.jobs}):
        for batch in bench.batches(k):
            mine, blas = ours(bench, k, batch), beside(bench, k, batch)
            times = (
                f"{mine.exposed.median_us:.2f} | {blas.exposed.median_us:.2f} | {ratio(bench, k, batch):.2f}"
            )
            lines.append(f"| {k} | {batch} | {mine.title} | {times} |")
    return "\n".join(lines)


def goal_table(bench: HardwareBench) -> Table:
    """The goals for one token tile and what was recorded, computed. Raises ValueError for another consumer."""
    if bench.consumer != GOAL_CONSUMER:
        raise ValueError(f"consumer = {bench.consumer}: the goals are for the chain with {GOAL_CONSUMER!r}")
    table = Table(
        title=f"the goals for M <= {MMA_TOKENS}",
        caption=f"recorded on {bench.provenance.title}; microseconds; ratio: times less than {BLAS}",
    )
    for name in (
        "K",
        "M",
        "a layer waits",
        "goal",
        "over it",
        "ratio",
        "goal ratio",
        "verdict",
    ):
        table.add_column(name, justify="left" if name == "verdict" else "right")
    for k, goal in GOALS.items():
        for batch in (batch for batch in bench.batches(k) if batch <= MMA_TOKENS):
            waits, times = ours(bench, k, batch).exposed.median_us, ratio(bench, k, batch)
            verdict = {True: "met", False: "missed"}
            table.add_row(
                str(k),
                str(batch),
                f"{waits:.2f}",
                f"under {goal.exposed_us}",
                f"{waits - goal.exposed_us:+.2f}",
                f"{times:.2f}",
                f"{goal.ratio}",
                f"time {verdict[waits < goal.exposed_us]}, ratio {verdict[times >= goal.ratio]}",
            )
        table.add_section()
    return table


def beside_table(recorded: HardwareBench, now: HardwareBench | None, k: int, batch: int) -> Table:
    """One size, recorded, and measured now where there is a measurement; nothing stands in for a missing one."""
    table = Table(
        title=f"K = {k}, M = {batch}: microseconds exposed",
        caption="measured now: "
        + (now.provenance.title if now else "nothing, no GPU was used; recorded numbers only"),
    )
    table.add_column("projection")
    for name in (f"recorded on {recorded.provenance.gpu}, {recorded.provenance.date[:10]}", "measured now"):
        if now or name.startswith("recorded"):
            table.add_column(name, justify="right")
    names = dict.fromkeys((*recorded.names(), *(now.names() if now else ())))
    for name in names:
        rows = [bench.rows_at(k, batch, name)[:1] for bench in (recorded, now) if bench]
        if any(rows):
            table.add_row(name, *(_spread(row[0]) if row else "not measured" for row in rows))
    return table


def session_table(bench: HardwareBench, k: int, batch: int) -> Table:
    """One size of one session: every name's first build, alone and exposed."""
    table = Table(
        title=f"K = {k}, M = {batch}: recorded on {bench.provenance.title}",
        caption=f"microseconds, medians, in brackets the quartiles; {bench.chain}",
    )
    for name in ("projection", "alone", "a layer waits"):
        table.add_column(name, justify="left" if name == "projection" else "right")
    for name in bench.names():
        for row in bench.rows_at(k, batch, name)[:1]:
            table.add_row(row.name, _alone(row), _spread(row))
    return table


def recorded_note(bench: HardwareBench, target: str) -> str:
    """What the recorded numbers are of, and whether that is the target."""
    recorded_target = f"sm_{bench.provenance.capability.replace('.', '')}a"
    other = "" if target == recorded_target else f"; for {target} nothing is recorded"
    return f"recorded: {recorded_target} builds on one {bench.provenance.gpu}{other}"


def drift_table(sessions: Mapping[str, HardwareBench], k: int, batch: int, names: Sequence[str]) -> Table:
    """The same kernels, alone, in several sessions."""
    table = Table(title=f"K = {k}, M = {batch}: microseconds alone, by session")
    table.add_column("session")
    for name in names:
        table.add_column(name, justify="right")
    for title, bench in sessions.items():
        rows = [bench.rows_at(k, batch, name)[:1] for name in names]
        table.add_row(title, *(_alone(row[0]) if row else "not measured" for row in rows))
    return table


@dataclass(frozen=True)
class Neighbours:
    """A build in two chains. copied_us: with a consumer that is a kernel of its own. registers: per thread, as
    loaded."""

    row: Row
    next_us: float
    copied_us: float
    registers: int

    @property
    def registers_left(self) -> int:
        """Of the multiprocessor's, for a neighbour's CTA."""
        return Needs(self.row.title, PROJECTION_THREADS, self.registers).registers_left


def neighbours(
    alone: HardwareBench, copied: HardwareBench, check: Mapping[str, Any], k: int
) -> tuple[Neighbours, ...]:
    """Every producer build at `SWEEP_BATCH` in the chain without and with a consumer of its own, by the latter.

    alone, copied: sessions with consumer "next" and "copy". check: a data file of `check`, for the registers.
    """
    registers = {case["label"]: case["registers"] for case in check["cases"]}
    found = []
    for name in ("producer", "direct"):
        other = {tuple(row.settings.items()): row for row in copied.rows_at(k, SWEEP_BATCH, name)}
        for row in alone.rows_at(k, SWEEP_BATCH, name):
            settings = "".join(f"-{key}{value}" for key, value in row.settings.items())
            label = f"{name}-k{k}-m{SWEEP_BATCH}{settings}-unicast1"
            after = other[tuple(row.settings.items())].exposed.median_us
            found.append(Neighbours(row, row.exposed.median_us, after, registers[label]))
    return tuple(sorted(found, key=lambda one: one.copied_us))


def neighbour_table(found: Sequence[Neighbours], tuned: Row, shown: int = 4) -> Table:
    """The first and the last few of `neighbours`, and the tuned build."""
    table = Table(
        title=f"K = {tuned.k}, M = {tuned.batch}: microseconds exposed, by what follows; recorded",
        caption=f"{len(found)} builds, sorted by the third column; registers as loaded, 65,536 per multiprocessor",
    )
    for name in ("build", "next", "copy", "registers", "left for a neighbour"):
        table.add_column(name, justify="left" if name == "build" else "right")
    for rank, one in enumerate(found, 1):
        if rank <= shown or rank > len(found) - shown or one.row == tuned:
            mark = " (the preset)" if one.row == tuned else ""
            table.add_row(
                f"{rank}. {one.row.title}{mark}",
                f"{one.next_us:.2f}",
                f"{one.copied_us:.2f}",
                str(one.registers),
                f"{one.registers_left:,}",
            )
    return table


def check_statement(check: Mapping[str, Any]) -> str:
    """What the recorded check did and found, computed from its cases."""
    cases = check["cases"]
    programs = {case["label"] for case in cases}
    identical = sum(case["identical"] for case in cases)
    findings = sum(len(case["findings"]) for case in cases)
    worst = max(case["error"] for case in cases)
    kinds = ", ".join(dict.fromkeys(case["kind"] for case in cases))
    return (
        f"{len(programs)} programs with {len(cases)} sets of inputs ({kinds}), {sum(c['launches'] for c in cases):,} "
        f"launches: the bits of the virtual GPU in {identical} of {len(cases)}, {findings} findings, largest error "
        f"{worst:.2e} of {cases[0]['tolerance']:.1e} allowed"
    )


def average_statement(samples: Sequence[float]) -> str:
    """Mean beside median and quartiles of samples in microseconds."""
    q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    return (
        f"{len(samples)} samples: mean {statistics.fmean(samples):.2f}, median {median:.2f}, quartiles {q1:.2f} and "
        f"{q3:.2f} us"
    )


def _spread(row: Row) -> str:
    return f"{row.exposed.median_us:.2f} [{row.exposed.q1_us:.2f}, {row.exposed.q3_us:.2f}]"


def _alone(row: Row) -> str:
    return f"{row.alone.median_us:.2f}" if row.alone else "nothing to time"


if __name__ == "__main__":  # `python -m oproj_lib.measured_tables` prints the tables of docs/latency.md
    for session in (recorded_bench(), *recorded_consumers().values()):
        print(results_markdown(session), end="\n\n")
    print(predecessor_markdown(recorded_predecessors()))
