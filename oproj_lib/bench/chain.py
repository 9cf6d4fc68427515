"""What a decode layer waits for the projection: a chain of kernels, minus its first kernel alone.

    predecessor -> projection (-> consumer), again and again, in one CUDA graph

Every kernel of the chain is launched with programmatic dependent launch (PDL), as a decode layer's are. The
predecessor (132 CTAs of 128 threads) waits for what came before, lets its dependents start at once, works for about 8
microseconds and then writes x. The projection may start early, where it is built for PDL, and fetch its weights
meanwhile. The consumer is the next predecessor, which cannot begin before the projection has ended and its output
has arrived (consumer "next"), or a kernel of its own that copies what was published ("copy"). Repetitions don't
overlap. Exposed time: chain minus predecessors alone, per repetition.

Kernels that want different splits of the L1 cache and shared memory cannot share an SM, and a kernel without shared
memory may get a split in which no projection fits beside it. An attention kernel, which stands before this
projection in a model, uses much shared memory; the kernels around the projection therefore ask for the largest share
(carveout 100). None leaves it to the driver.
"""

from __future__ import annotations

import ctypes
from typing import Any

from oproj_lib.bench import small_kernels
from oproj_lib.bench.candidates import SOURCES, Candidate, Job
from oproj_lib.bench.measure import Graph, capture
from oproj_lib.devices.cuda import Function
from oproj_lib.problem import N

PREDECESSOR_US = 8.0
CONSUMERS = ("next", "copy")


class Chain:
    """The kernels around a projection for one job."""

    def __init__(
        self,
        job: Job,
        *,
        predecessor_us: float = PREDECESSOR_US,
        carveout: int | None = None,
        consumer: str = CONSUMERS[0],
    ) -> None:
        import torch

        self.copies = consumer == "copy"

        self.job = job
        gpu = job.gpu
        self.predecessor: Function = gpu.load(
            small_kernels.PREDECESSOR.encode(), "predecessor", carveout=carveout
        )
        self.consumer: Function = gpu.load(small_kernels.CONSUMER.encode(), "consumer", carveout=carveout)
        kilohertz = gpu.attribute("CLOCK_RATE")
        self.cycles = int(predecessor_us * kilohertz / 1e3)
        self.seen = torch.empty((job.problem.batch, N), dtype=torch.bfloat16, device=gpu.tensors)

    def precede(self, index: int) -> None:
        """The predecessor of repetition ``index``; it writes source ``index % 2`` to x."""
        source = self.job.sources[index % SOURCES]
        values = (
            *_pointers(self.job.x, source),
            ctypes.c_uint32(_chunks(source)),
            ctypes.c_uint64(self.cycles),
        )
        grid, block = small_kernels.PREDECESSOR_GRID, small_kernels.PREDECESSOR_BLOCK
        self.predecessor.launch(
            (grid, 1, 1), (block, 1, 1), values, stream=self.job.gpu.current_stream(), pdl=True
        )

    def consume(self, published: Any) -> None:
        """Copy ``published`` to ``seen`` once the projection has ended, if this chain copies."""
        if not self.copies:
            return
        values = (*_pointers(self.seen, published), ctypes.c_uint32(_chunks(published)))
        grid, block = small_kernels.CONSUMER_GRID, small_kernels.CONSUMER_BLOCK
        self.consumer.launch(
            (grid, 1, 1), (block, 1, 1), values, stream=self.job.gpu.current_stream(), pdl=True
        )

    def alone(self, repetitions: int) -> Graph:
        """Predecessors only: the baseline."""
        return capture(self.precede, repetitions)

    def around(self, candidate: Candidate, repetitions: int) -> Graph:
        """The whole chain."""

        def repetition(index: int) -> None:
            self.precede(index)
            candidate.launch(index)
            self.consume(candidate.output())

        return capture(repetition, repetitions)

    def expected(self, repetitions: int) -> Any:
        """What ``seen`` must be near after a replay: the reference of the last repetition's x."""
        return self.job.references[(repetitions - 1) % SOURCES]

    def close(self) -> None:
        """Unload the kernels."""
        self.predecessor.unload()
        self.consumer.unload()


def _pointers(*tensors: Any) -> tuple[ctypes.c_void_p, ...]:
    return tuple(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors)


def _chunks(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size() // small_kernels.CHUNK_BYTES)
