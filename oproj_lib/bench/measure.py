"""Timing on a GPU: graph replays between events, summed up as medians and quartiles, held against the hardware.

A time is microseconds per launch: one replay of a captured graph of many launches, divided by their number. Every
launch of the graph reads another copy of the weights, and the copies together are many times the L2 cache, so weights
are cold as in a model whose other layers ran in between.
"""

from __future__ import annotations

import ctypes
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from oproj_lib.bench import small_kernels
from oproj_lib.devices.cuda import Gpu

ROTATION_L2S = 16
"""The copies of the weights are at least this many times the L2 cache. It does not evict strictly in order, so
"more than the L2" is not enough."""
ROTATION_MIN_BYTES = 512 * 2**20
SAMPLE_BYTES = 2 * 2**30
"""What the bandwidth measurements move: far more than the L2."""
BANDWIDTH_REPEATS = 15


class ImpossibleTimeError(RuntimeError):
    """A time below what the hardware can do: the measurement is wrong."""


class WrongOutputError(RuntimeError):
    """What was timed did not compute the right thing."""


@dataclass(frozen=True)
class Statistics:
    """Microseconds per launch. samples: replays; rounds_us: the median of each pass, to show drift."""

    median_us: float
    q1_us: float
    q3_us: float
    least_us: float
    samples: int
    rounds_us: tuple[float, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def minus(self, base_us: float) -> Statistics:
        """The same with a constant taken off: what is exposed beside a baseline."""
        return Statistics(
            self.median_us - base_us,
            self.q1_us - base_us,
            self.q3_us - base_us,
            self.least_us - base_us,
            self.samples,
            tuple(value - base_us for value in self.rounds_us),
        )


def summarise(rounds: Sequence[Sequence[float]]) -> Statistics:
    """Statistics of passes of samples in microseconds. Raises ValueError without samples or with one that is no
    positive number."""
    samples = [sample for one in rounds for sample in one]
    if not samples or not all(rounds):
        raise ValueError("no samples: at least 1 pass of 1 replay")
    if not all(math.isfinite(sample) and sample > 0 for sample in samples):
        raise ValueError(f"samples must be positive numbers of microseconds, found {min(samples)}")
    ordered = sorted(samples)
    q1, median, q3 = (
        statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else ordered * 3
    )
    return Statistics(
        median, q1, q3, ordered[0], len(ordered), tuple(statistics.median(one) for one in rounds)
    )


def copies_needed(weight_bytes: int, l2_bytes: int) -> int:
    """How many copies of a weight are rotated."""
    return max(2, -(-max(ROTATION_L2S * l2_bytes, ROTATION_MIN_BYTES) // weight_bytes))


@dataclass(frozen=True)
class Ceilings:
    """What this GPU's memory does, measured in the same session, TB/s. copy counts bytes read and written."""

    copy_tb_s: float
    read_tb_s: float

    @property
    def best_tb_s(self) -> float:
        return max(self.copy_tb_s, self.read_tb_s)

    def floor_us(self, moved_bytes: int) -> float:
        """Microseconds that the bytes need at least."""
        return moved_bytes / self.best_tb_s / 1e6

    def check(self, what: str, us: float, moved_bytes: int) -> None:
        """Raises ImpossibleTimeError for a time below the floor: warm weights, work left out, or bad timing."""
        floor = self.floor_us(moved_bytes)
        if us < floor:
            raise ImpossibleTimeError(
                f"{what}: {us:.3f} us for {moved_bytes:,} bytes is {moved_bytes / us / 1e6:.2f} TB/s, and this GPU's "
                f"memory reached {self.best_tb_s:.2f} TB/s in this measurement (floor {floor:.3f} us): weights were "
                "not cold, or work was left out"
            )


@dataclass
class Graph:
    """A captured graph of ``launches`` launches."""

    graph: Any
    launches: int

    def replay_us(self) -> float:
        """One replay, by events: microseconds per launch."""
        import torch

        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / self.launches

    def sample(self, replays: int, warmup: int = 3) -> list[float]:
        """Microseconds per launch of each of ``replays`` replays, after some that warm up clocks."""
        for _ in range(warmup):
            self.graph.replay()
        return [self.replay_us() for _ in range(replays)]


def capture(launch: Callable[[int], None], launches: int) -> Graph:
    """A graph of launch(0) ... launch(launches - 1) on torch's capture stream.

    Every launch runs once before, on a side stream, so that modules are loaded and memory is allocated.
    """
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for index in range(min(launches, 3)):
            launch(index)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(launches):
            launch(index)
    return Graph(graph, launches)


def ceilings(gpu: Gpu) -> Ceilings:
    """Copy and read bandwidth of this GPU, medians."""
    import torch

    source = torch.empty(SAMPLE_BYTES // 4, dtype=torch.int32, device=gpu.tensors).random_()
    target = torch.empty_like(source)
    copy_us = _event_us(lambda: target.copy_(source))
    read, read_bytes = reader_launch(gpu, source, target)
    return Ceilings(2 * SAMPLE_BYTES / copy_us / 1e6, read_bytes / _event_us(read) / 1e6)


def reader_launch(gpu: Gpu, source: Any, never: Any) -> tuple[Callable[[], None], int]:
    """(launch of the reading kernel, bytes that it reads): ``source`` but for the part of a round at its end.

    Raises ValueError for a source that is shorter than one round.
    """
    function = gpu.load(small_kernels.reader().encode(), "reader")
    grid, block = (4 * gpu.multiprocessors, 1, 1), (small_kernels.READER_BLOCK, 1, 1)
    round_bytes = grid[0] * block[0] * small_kernels.LOADS * small_kernels.CHUNK_BYTES
    read_bytes = source.numel() * source.element_size() // round_bytes * round_bytes
    if not read_bytes:
        raise ValueError(
            f"{source.numel() * source.element_size()} bytes are less than a round of {round_bytes}"
        )
    values = (
        ctypes.c_void_p(source.data_ptr()),
        ctypes.c_void_p(never.data_ptr()),
        ctypes.c_uint32(read_bytes // small_kernels.CHUNK_BYTES),
    )

    def launch() -> None:
        function.launch(grid, block, values, stream=gpu.current_stream())

    return launch, read_bytes


def _event_us(work: Callable[[], Any]) -> float:
    """Median microseconds of one call, by events, after three."""
    import torch

    times = []
    for repeat in range(BANDWIDTH_REPEATS + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        if repeat >= 3:
            times.append(float(start.elapsed_time(end)) * 1e3)
    return statistics.median(times)


def relative_error(out: Any, reference: Any) -> float:
    """|out - reference| / |reference| of torch tensors on the GPU, in float64; NaN where anything is NaN."""
    difference = out.double() - reference
    return float(difference.norm() / reference.norm())


def check_output(what: str, out: Any, reference: Any, tolerance: float) -> float:
    """The relative error. Raises WrongOutputError above the tolerance, and for NaN, which poison leaves."""
    error = relative_error(out, reference)
    if not error < tolerance:
        raise WrongOutputError(
            f"{what}: relative error {error:.3e} against float64, limit {tolerance:.1e} (NaN: an element that was "
            "never written)"
        )
    return error
