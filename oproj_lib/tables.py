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
        ring = settings["group_tiles"]
        return f"ring of 2 x {ring} tiles" if ring else ("registers" if result.k == 768 else "shared memory")

    def instructions(result: RunResult) -> str:
        counters = result.report.counters
        return f"{counters.tensor_instructions or counters.matrix_instructions:,}"

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
            ("arithmetic", "exact" if result.arithmetic == "exact" else "FP32"),
            ("error", f"{result.error:.3e}"),
            ("limit", f"{result.tolerance:.1e}"),
            ("thread-instructions", f"{result.thread_instructions:,}"),
            ("matrix instructions", instructions(result)),
            ("bank conflicts", f"{result.report.counters.bank_conflicts:,}"),
            ("seconds per launch", f"{result.seconds:.2f}"),
            ("checks", "all" if result.checks else "bounds, alignment, deadlock"),
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
