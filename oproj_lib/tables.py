"""Results as tables for a terminal or a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from oproj_lib.run import RunResult

if TYPE_CHECKING:
    from oproj_lib.bench.vgpu import Benchmark


def result_table(results: Sequence[RunResult]) -> Table:
    """One column per run: what ran where, its error against float64, what it moved, how long the launch
    took."""
    table = Table(
        title="o_proj against float64",
        show_header=False,
        caption="error: |out - float64| / |float64|, Frobenius norms",
    )
    table.add_column("what", style="bold")
    for _ in results:
        table.add_column(justify="right")
    for label, cells in result_rows(results):
        table.add_row(label, *cells)
    return table


def result_rows(results: Sequence[RunResult]) -> list[tuple[str, list[str]]]:
    """The rows of `result_table` as plain strings."""

    def blocks_and_rows(result: RunResult) -> str:
        settings = result.configuration
        return f"{settings['staged_blocks']}, {settings['rows']}" if "rows" in settings else "–"

    def x_path(result: RunResult) -> str:
        settings = result.configuration
        if "budget" in settings:
            return f"ring in {settings['budget']:,} bytes"
        if "direct" in settings:
            return "registers, direct"
        ring = settings["group_tiles"]
        return f"ring of 2 x {ring} tiles" if ring else ("registers" if result.k == 768 else "shared memory")

    def counted(result: RunResult, names: Sequence[str]) -> str:
        """The first of these counters that is not 0; hardware counts nothing here."""
        if result.vgpu_report is None:
            return "–"
        return f"{next(filter(None, (getattr(result.report.counters, name) for name in names)), 0):,}"

    def checked(result: RunResult) -> str:
        if result.vgpu_report is None:
            return "delivery, float64"
        return "all" if result.checks else "bounds, alignment, deadlock"

    columns = [
        (
            ("engine", result.engine),
            ("target", result.target),
            ("device", "virtual GPU" if result.device == "vgpu" else result.device),
            ("ranks, K", f"TP{result.ranks}, {result.k}"),
            ("tokens M", str(result.batch)),
            ("staged blocks, rows", blocks_and_rows(result)),
            ("x path", x_path(result)),
            ("transport", str(result.configuration["transport"])),
            ("arithmetic", {"exact": "exact", "hardware": "hardware"}.get(result.arithmetic, "FP32")),
            ("error", f"{result.error:.3e}"),
            ("limit", f"{result.tolerance:.1e}"),
            ("thread-instructions", counted(result, ["thread_instructions"])),
            ("matrix instructions", counted(result, ["tensor_instructions", "matrix_instructions"])),
            ("bank conflicts", counted(result, ["bank_conflicts"])),
            ("seconds per launch", f"{result.seconds:.2f}" if result.vgpu_report else "not timed"),
            ("checks", checked(result)),
            ("findings", str(len(result.findings)) if result.findings else "none"),
        )
        for result in results
    ]
    return [(rows[0][0], [cell for _, cell in rows]) for rows in zip(*columns, strict=True)]


def bench_table(benchmark: Benchmark) -> Table:
    """One row per mode of the virtual GPU."""
    table = Table(
        title=f"virtual GPU: {benchmark.target}, K = {benchmark.k}, M = {benchmark.batch}, full grid",
        caption=f"{benchmark.machine}; medians of {benchmark.repeat} launches after decoding, {benchmark.date}",
    )
    table.add_column("mode")
    for name in ("seconds", "thread-instructions", "million per second", "against fast"):
        table.add_column(name, justify="right")
    fast = benchmark.modes[0].seconds
    for mode in benchmark.modes:
        rate = mode.thread_instructions / mode.seconds / 1e6
        table.add_row(
            mode.name,
            f"{mode.seconds:.3f}",
            f"{mode.thread_instructions:,}",
            f"{rate:.1f}",
            f"{mode.seconds / fast:.1f} x",
        )
    return table
