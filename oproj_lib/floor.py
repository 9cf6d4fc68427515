"""The floor: how many bytes and operations the projection needs at least, and what a machine could do with
them."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from oproj_lib.problem import ROWS_PER_CTA, N, Problem

BF16_BYTES = 2


@dataclass(frozen=True)
class Work:
    """What one rank must move and compute, whatever the kernel: bytes, and operations (a multiply and an
    add)."""

    weight_bytes: int
    x_bytes: int
    out_bytes: int
    flops: int

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.x_bytes + self.out_bytes

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.bytes


def work(problem: Problem) -> Work:
    """Every weight once, x once, each output once; two operations per product."""
    return Work(
        weight_bytes=N * problem.k * BF16_BYTES,
        x_bytes=problem.batch * problem.k * BF16_BYTES,
        out_bytes=problem.batch * N * BF16_BYTES,
        flops=2 * problem.batch * N * problem.k,
    )


@dataclass(frozen=True)
class Roofline:
    """A machine with two limits: bandwidth in TB/s, matrix throughput in TFLOP/s."""

    bandwidth_tb_s: float
    peak_tflops: float

    def __post_init__(self) -> None:
        for name in ("bandwidth_tb_s", "peak_tflops"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name)}; it must be more than 0")

    @property
    def ridge(self) -> float:
        """Operations per byte from which on the tensor cores are the limit, not memory."""
        return self.peak_tflops / self.bandwidth_tb_s

    def tflops(self, intensity: float) -> float:
        """The most that can be reached at that many operations per byte."""
        return min(self.peak_tflops, intensity * self.bandwidth_tb_s)

    def memory_us(self, job: Work) -> float:
        """Microseconds to move the job's bytes."""
        return job.bytes / self.bandwidth_tb_s / 1e6

    def compute_us(self, job: Work) -> float:
        """Microseconds to do the job's operations."""
        return job.flops / self.peak_tflops / 1e6

    def floor_us(self, job: Work) -> float:
        """The longer of the two: no kernel that starts with cold weights is faster."""
        return max(self.memory_us(job), self.compute_us(job))


def in_flight_bytes(bandwidth_tb_s: float, latency_ns: float) -> float:
    """Bytes that must be under way at all times to keep memory busy: bandwidth x latency (Little's law)."""
    if not latency_ns > 0:
        raise ValueError(f"latency_ns = {latency_ns}; it must be more than 0")
    return bandwidth_tb_s * latency_ns * 1e3


@dataclass(frozen=True)
class Split:
    """W cut into CTAs of `rows` rows each, one CTA per SM, on a machine with `sms` SMs."""

    rows: int
    k: int
    sms: int

    def __post_init__(self) -> None:
        if self.rows < 1 or N % self.rows:
            raise ValueError(f"rows = {self.rows}: {N} rows must divide evenly")
        if self.sms < 1:
            raise ValueError(f"sms = {self.sms}; it must be at least 1")

    @property
    def ctas(self) -> int:
        return N // self.rows

    @property
    def waves(self) -> int:
        """Rounds in which the CTAs run."""
        return -(-self.ctas // self.sms)

    @property
    def busy(self) -> float:
        """Share of SM slots, over all waves, that have work."""
        return self.ctas / (self.waves * self.sms)

    @property
    def weight_bytes(self) -> int:
        """Weights that one CTA must hold to have them all before x."""
        return self.rows * self.k * BF16_BYTES


SM_BYTES = (256 + 227) * 1024
"""Registers (64 K of 4 bytes) and shared memory of one SM of sm_90 and sm_100: everything that weights could
wait in."""


def wave_table(sms: int, k: int) -> Table:
    """What other numbers of rows per CTA would mean on a machine with `sms` SMs."""
    table = Table(title=f"{N} rows of W cut into CTAs, one CTA per SM, {sms} SMs, K = {k}")
    for name in (
        "rows per CTA",
        "CTAs",
        "waves",
        "SMs busy",
        "weights of a CTA",
        "of an SM's registers and shared memory",
    ):
        table.add_column(name, justify="right")
    for rows in (16, 32, 64, 128, 256):
        split = Split(rows, k, sms)
        kib, share = split.weight_bytes / 1024, split.weight_bytes / SM_BYTES
        cells = (
            f"{rows}",
            f"{split.ctas}",
            f"{split.waves}",
            f"{split.busy:.0%}",
            f"{kib:.0f} KiB",
            f"{share:.0%}",
        )
        table.add_row(*cells, style="bold" if rows == ROWS_PER_CTA else None)
    return table
