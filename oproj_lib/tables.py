"""Results as tables for a terminal or a notebook."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from oproj_lib.bench.vgpu import Benchmark
from oproj_lib.run import RunResult


def result_table(results: Sequence[RunResult]) -> Table:
    """One row per run: what ran where, its error against float64, what it moved, how long the launch took."""
    table = Table(title="o_proj against float64", caption="error: |out - float64| / |float64| (Frobenius); seconds: one launch on this machine")
    for name in ("engine", "target", "device", "K", "M", "configuration"):
        table.add_column(name)
    for name in ("error", "limit", "thread instr.", "MMAs", "bank conflicts", "seconds"):
        table.add_column(name, justify="right")
    table.add_column("findings")
    for result in results:
        counters, settings = result.report.counters, result.configuration
        chosen = f"{settings['staged_blocks']} staged, rows {settings['rows']}, " + (
            f"ring of {settings['group_tiles']}" if settings["group_tiles"] else "no ring"
        )
        table.add_row(
            result.engine, result.target, result.device, str(result.k), str(result.batch), chosen, f"{result.error:.2e}",
            f"{result.tolerance:.1e}", f"{counters.thread_instructions:,}", f"{counters.matrix_instructions:,}",
            f"{counters.bank_conflicts:,}", f"{result.seconds:.2f}", str(len(result.findings)) if result.findings else "none",
        )  # fmt: skip
    return table


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
        table.add_row(mode.name, f"{mode.seconds:.3f}", f"{mode.thread_instructions:,}", f"{rate:.1f}", f"{mode.seconds / fast:.1f} x")
    return table
