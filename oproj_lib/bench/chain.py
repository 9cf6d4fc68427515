"""What a decode layer waits for the projection: a chain of kernels, minus its first kernel alone.

    predecessor -> projection (-> consumer), again and again, in one CUDA graph

Every kernel of the chain is launched with programmatic dependent launch (PDL), as a decode layer's are. The
predecessor waits for what came before, lets its dependents start at once, works for about 8 microseconds and then
writes x. "spin" (132 CTAs of 128 threads) leaves the memory alone, which the projection's weights then have to
themselves; "read" (512 threads, one CTA per SM) reads 35 MB at nearly full bandwidth, as attention over a long context
does. The projection may start early, where it is built for PDL, and fetch its weights meanwhile. The consumer is the
next predecessor, which cannot begin before the projection has ended and its output has arrived (consumer "next"), or a
kernel of its own that copies what was published ("copy"), or the kernel that stands there in a model and polls the
mailbox ("reduce", "attnres": then the candidates bring it, see `bench.consumers`). Repetitions don't overlap. Exposed
time: chain minus predecessors alone, per repetition.

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
from oproj_lib.bench.measure import SAMPLE_BYTES, Graph, capture
from oproj_lib.devices.cuda import Function, Gpu
from oproj_lib.problem import N
from oproj_lib.ranks import plan

PREDECESSOR_US = 8.0
PREDECESSORS = ("spin", "read")
READ_ROUNDS = 4
"""Of 132 x 512 threads with 8 loads of 16 bytes: 34.6 MB, 8.5 us on an H200."""
CONSUMERS = ("next", "copy", *plan.CONSUMERS)


class Chain:
    """The kernels around a projection for one job."""

    def __init__(
        self,
        job: Job,
        *,
        predecessor_us: float = PREDECESSOR_US,
        carveout: int | None = None,
        consumer: str = CONSUMERS[0],
        predecessor: str = PREDECESSORS[0],
    ) -> None:
        import torch

        self.copies = consumer == "copy"

        self.job = job
        gpu = job.gpu
        self.reads = Reads(gpu) if predecessor == "read" else None
        self.predecessor: Function = (
            gpu.load(
                small_kernels.reading_predecessor().encode(),
                "reading_predecessor",
                shared_bytes=small_kernels.READING_SHARED_BYTES,
                carveout=carveout,
            )
            if self.reads
            else gpu.load(small_kernels.PREDECESSOR.encode(), "predecessor", carveout=carveout)
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
            *(self.reads.values(index) if self.reads else (ctypes.c_uint64(self.cycles),)),
        )
        grid = small_kernels.PREDECESSOR_GRID
        block = small_kernels.READING_BLOCK if self.reads else small_kernels.PREDECESSOR_BLOCK
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


class Reads:
    """What the reading predecessor reads: the next part of a buffer many times the L2 at every launch."""

    def __init__(self, gpu: Gpu, size: int = SAMPLE_BYTES) -> None:
        import torch

        self.size = size
        self.data = torch.empty(size // 4, dtype=torch.int32, device=gpu.tensors).random_()
        self.never = torch.zeros(1, dtype=torch.int32, device=gpu.tensors)
        threads = small_kernels.PREDECESSOR_GRID * small_kernels.READING_BLOCK
        self.bytes = threads * small_kernels.LOADS * small_kernels.CHUNK_BYTES * READ_ROUNDS

    def values(self, index: int) -> tuple[Any, ...]:
        """The kernel's last three arguments for launch ``index``."""
        start = self.data.data_ptr() + index % (self.size // self.bytes) * self.bytes
        return ctypes.c_void_p(start), ctypes.c_uint32(READ_ROUNDS), *_pointers(self.never)


def _pointers(*tensors: Any) -> tuple[ctypes.c_void_p, ...]:
    return tuple(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors)


def _chunks(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size() // small_kernels.CHUNK_BYTES)
