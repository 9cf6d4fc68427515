"""A projection kernel on a real GPU: mailboxes armed, kernel launched, what it published read back.

All mailboxes are on the one GPU ("local ranks"), so the kernel must be built for the unicast transport: a
multicast address reaches several GPUs and needs them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from oproj_lib.devices.cuda import CudaKernel, Gpu
from oproj_lib.problem import N
from oproj_lib.program import Program

LATENT_PATTERN = 0x8000
"""Half a mailbox word that was never published (KERNELS: "Lamport protocol"): BF16 -0.0, which a kernel with
policy "latent" never sends."""
PLAIN_PATTERN = 0xFFA5
"""For policy "plain", which may send -0.0: a BF16 NaN that no conversion makes, since cvt gives 0x7FFF (PTX
ISA, "cvt")."""


@dataclass(frozen=True)
class Mailbox:
    """A mailbox after a launch: array BF16 [slots, tokens, 7168]; written, per byte and flat like a
    virtual GPU's buffer: what no longer holds the pattern it was armed with."""

    name: str
    array: np.ndarray
    written: np.ndarray | None


def upload(array: np.ndarray, device: str) -> Any:
    """A BF16 NumPy array as a torch tensor on ``device``: a copy, bit for bit."""
    import torch

    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)


def download(tensor: Any) -> np.ndarray:
    """A BF16 torch tensor as a NumPy array: a copy, bit for bit."""
    import torch

    words: np.ndarray = tensor.detach().view(torch.int16).cpu().numpy()
    return np.array(words.view(ml_dtypes.bfloat16))


def arming_pattern(program: Program) -> int:
    """The 16-bit pattern that this program's kernel never publishes."""
    return LATENT_PATTERN if program.config["policy"] == "latent" else PLAIN_PATTERN


def unicast_ranks(program: Program) -> int:
    """How many mailboxes the kernel publishes to. Raises ValueError for a program that needs a multicast
    address."""
    kind, _, ranks = str(program.config["transport"]).partition(":")
    if kind != "unicast":
        raise ValueError(
            f"{program.name} publishes by {kind}, which needs a multicast address over several GPUs: build it "
            "with transport 'unicast:<ranks>' to run it on one"
        )
    return int(ranks)


class Publisher:
    """A projection program on one GPU with its mailboxes, ready for many launches.

    Raises ValueError for a program of another target, or with the multicast transport.
    """

    def __init__(self, program: Program, gpu: Gpu, *, carveout: int | None = None) -> None:
        import torch

        self.program, self.gpu = program, gpu
        self.ranks = unicast_ranks(program)
        self.kernel: CudaKernel = gpu.program(program, carveout=carveout)
        shape = (int(program.config["mailbox_slots"]), int(program.config["mailbox_tokens"]), N)
        self.mailboxes = [
            torch.empty(shape, dtype=torch.bfloat16, device=gpu.tensors) for _ in range(self.ranks)
        ]
        addresses = [mailbox.data_ptr() for mailbox in self.mailboxes]
        self.table = torch.tensor(addresses, dtype=torch.int64, device=gpu.tensors)
        pattern = arming_pattern(program)
        self.pattern = pattern - 0x10000  # as int16: every pattern here has its top bit set

    def arm(self) -> None:
        """Fill every mailbox with the pattern that means "never published"."""
        import torch

        for mailbox in self.mailboxes:
            mailbox.view(torch.int16).fill_(self.pattern)

    def launch(
        self, x: Any, weight: Any, slot: int, *, stream: int | None = None, pdl: bool | None = None
    ) -> None:
        """Publish x @ weight.T into ``slot`` of every mailbox; x and weight are CUDA tensors."""
        self.kernel(x, weight, self.mailboxes[0], self.table, slot, stream=stream, pdl=pdl)

    def run(self, x: Any, weight: Any, slot: int, *, pdl: bool | None = None) -> tuple[list[Mailbox], float]:
        """Arm, launch, wait, read back: (every rank's mailbox, seconds by the host's clock).

        The seconds include the launch's own cost: the benchmarks measure otherwise.
        """
        self.arm()
        self.gpu.synchronize("arming the mailboxes")
        start = time.perf_counter()
        self.launch(x, weight, slot, pdl=pdl)
        self.gpu.synchronize(f"running {self.program.name}")
        seconds = time.perf_counter() - start
        return [self.read(rank) for rank in range(self.ranks)], seconds

    def read(self, rank: int) -> Mailbox:
        """One rank's mailbox as it is now."""
        array = download(self.mailboxes[rank])
        written = np.repeat(array.view(np.uint16).reshape(-1) != np.uint16(self.pattern & 0xFFFF), 2)
        return Mailbox(f"mailbox of rank {rank}", array, written)

    def close(self) -> None:
        """Unload the kernel. The mailboxes go with the object."""
        self.kernel.function.unload()
