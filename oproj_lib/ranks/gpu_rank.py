"""One rank's memory and kernels on a real GPU: the same programs, bound to torch tensors instead of buffers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from oproj_lib.devices.cuda import CudaKernel, Gpu
from oproj_lib.devices.publishing import download, upload
from oproj_lib.layouts import mailbox as layout
from oproj_lib.problem import Array, N
from oproj_lib.program import Parameter
from oproj_lib.ranks import verdict
from oproj_lib.ranks.inputs import Inputs
from oproj_lib.ranks.memory import bind
from oproj_lib.ranks.plan import PAYLOAD, Plan
from oproj_lib.ranks.programs import Chain

ARMED = layout.SENTINEL - 2**32
"""The sentinel as an int32."""
CONSTANTS = ("blocks", "norm_weight", "qk_weight", "out_weight")
CARVEOUT = 100
"""Percent of the L1 cache that every kernel of a chain asks for as shared memory, those that use little of it too: one
that wants another split waits for an empty SM (docs/latency.md, "Residency")."""


def new_mailbox(shape: tuple[int, ...], device: str, make: Any = None) -> Any:
    """An armed mailbox, BF16. make: allocates it, torch.empty by default."""
    import torch

    box = (make or torch.empty)(shape, dtype=torch.bfloat16, device=device)
    box.view(torch.int32).fill_(ARMED)
    return box


def new_state(device: str) -> Any:
    """The generation records before the first call."""
    import torch

    return torch.zeros(layout.STATE_SHAPE, dtype=torch.int32, device=device)


def table_of(addresses: Sequence[int], device: str) -> Any:
    """The peers' addresses as the kernels read them."""
    import torch

    return torch.tensor(list(addresses), dtype=torch.int64, device=device)


class GpuRank:
    """A rank: x, weight (or payload), out, mailboxes, states, and for AttnRes prefix, blocks and weights.

    boxes: (first mailbox, result mailbox or None); mcs: what their writers get, a table or a multicast address.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        device: str,
        inputs: Inputs,
        boxes: tuple[Any, Any],
        mcs: tuple[Any, Any],
        attnres: verdict.AttnResChecker | None,
    ) -> None:
        import torch

        self.plan, self.rank, self.device, self.inputs = plan, rank, device, inputs
        self.first, self.result = boxes[0], boxes[0] if boxes[1] is None else boxes[1]
        self.out = torch.empty((plan.tokens, N), dtype=torch.bfloat16, device=device)
        first_state = new_state(device)
        self.memory: dict[str, Any] = {
            "rank": rank,
            "first": self.first,
            "first_mc": mcs[0],
            "first_state": first_state,
            "result": self.result,
            "result_mc": mcs[0] if boxes[1] is None else mcs[1],
            "result_state": first_state if boxes[1] is None else new_state(device),
            "out": self.out,
        }
        self.input_name, columns = ("payload", N) if plan.engine == PAYLOAD else ("x", plan.k)
        self.memory[self.input_name] = torch.empty(
            (plan.tokens, columns), dtype=torch.bfloat16, device=device
        )
        if plan.engine != PAYLOAD:
            self.memory["weight"] = upload(inputs.weight(rank), device)
        if attnres is not None:
            for name in ("prefix", *CONSTANTS):
                self.memory[name] = upload(getattr(attnres.inputs, name), device)

    def launch(self, kernel: CudaKernel) -> None:
        """Launch one kernel of a round on torch's current stream."""
        kernel(*bind(kernel.program, self.memory, first_rows))

    def upload_inputs(self, numbers: Iterable[int]) -> dict[int, Any]:
        """Inputs of rounds, on the GPU. A copy from the host's memory may wait for the stream, and so for a rank that
        never comes: nothing is copied from the host once a kernel may poll."""
        given = self.inputs.payload if self.plan.engine == PAYLOAD else self.inputs.x
        return {number: upload(given(number, self.rank), self.device) for number in numbers}

    def set_inputs(self, values: Any) -> None:
        """A round's input [M, ...] to where its kernels read it, behind the rounds before it on the stream; spoil
        out."""
        import torch

        self.memory[self.input_name][: len(values)].copy_(values)
        self.out.view(torch.int16).fill_(verdict.UNWRITTEN - 2**16)

    def published(self, number: int) -> Any:
        """What all ranks published into this rank's first mailbox in a round, [R, M, columns]: a copy, made behind
        the round on the stream and before the next one arms it again."""
        generation = number % layout.GENERATIONS
        slots = self.first[generation * self.plan.ranks :][: self.plan.ranks]
        return slots[:, : self.plan.batch(number)].clone()

    def out_of(self, number: int) -> Any:
        """A copy of a round's out, made on the stream."""
        return self.out[: self.plan.batch(number)].clone()

    def exact(self, number: int) -> Any:
        """float64 [M, 7168] on the GPU: the rank's partial sum."""
        import torch

        if self.plan.engine == PAYLOAD:
            return torch.from_numpy(self.inputs.exact(number, self.rank)).to(self.device)
        x = upload(self.inputs.x(number, self.rank), self.device)
        return x.double() @ self.memory["weight"].double().T

    def memory_findings(self, number: int) -> list[str]:
        """Mailboxes and prefix after a round; all work of the GPU is done."""
        where = f"after round {number}, rank {self.rank}"
        found = []
        boxes = {"mailbox": self.first}
        if self.plan.twoshot:
            boxes = {"receive view": self.first, "result mailbox": self.result}
        for name, box in boxes.items():
            words = download(box).view(np.uint32)
            found += verdict.memory_findings(
                f"{where}, {name}", words, number % layout.GENERATIONS, self.plan.batch(number)
            )
        return found

    def prefix(self) -> Array:
        """prefix [tokens, 7168] as it is now."""
        return download(self.memory["prefix"])


def first_rows(value: Any, parameter: Parameter) -> Any:
    """The argument for a parameter: of a tensor with room for more tokens the first M rows."""
    return value[: parameter.shape[0]] if parameter.kind == "tensor" else value


def load_kernels(gpu: Gpu, chains: dict[int, Chain]) -> dict[int, list[CudaKernel]]:
    """The programs of every batch on one GPU. Raises ValueError where they are built for another one."""
    return {
        batch: [gpu.program(program, carveout=CARVEOUT) for program in chain]
        for batch, chain in chains.items()
    }


def capture(launch: Callable[[], None]) -> Callable[[], None]:
    """What ``launch()`` enqueues, as a CUDA graph: a function that replays it. Nothing runs now."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()

    def replay() -> None:
        graph.replay()

    return replay


def digest(array: Array) -> str:
    """SHA-256 of an array's bits."""
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
