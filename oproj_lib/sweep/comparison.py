"""Launches builds on a GPU and compares every bit of every mailbox with what is expected.

The first output of an (order, batch size, kind) is read back and its SHA-256 compared; it stays on the GPU, and all
further launches of all builds with that order are compared there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from oproj_lib.bundle import sha256
from oproj_lib.bundle_recipes import Recipe
from oproj_lib.delivery import SLOT, delivery_findings
from oproj_lib.devices.cuda import Gpu
from oproj_lib.devices.publishing import Publisher, download, upload
from oproj_lib.sweep.builds import Built
from oproj_lib.sweep.expected import Expectations
from oproj_lib.sweep.points import Order, order_of


@dataclass(frozen=True)
class Compared:
    """One build. launches: over all kinds of inputs, each compared; registers: per thread, as loaded; 0 launches
    and registers for what does not build."""

    recipe: Recipe
    launches: int
    registers: int
    build_seconds: float
    machine_code: bool
    findings: tuple[str, ...]


@dataclass
class Comparison:
    """A GPU, the expectations, and what was found so far. launches: per build and kind of inputs."""

    gpu: Gpu
    expected: Expectations
    launches: int
    results: list[Compared] = field(default_factory=list)
    seconds: float = 0.0
    stopped: bool = False
    _inputs: dict[tuple[int, str], tuple[Any, Any]] = field(default_factory=dict)
    _wanted: dict[tuple[Order, str, int], Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.launches < 1:
            raise ValueError(f"launches = {self.launches}: at least 1")

    def run(
        self,
        builds: Iterable[Built],
        limit_seconds: float | None = None,
        progress: Callable[[Comparison], None] = lambda comparison: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Compare builds as they come, until there are no more or the time is over, which `stopped` then says.

        Raises CudaError when the GPU refuses: after an error inside a kernel nothing more can be launched.
        """
        start = clock()
        for built in builds:
            self.results.append(self.compare(built))
            self.seconds = clock() - start
            progress(self)
            if limit_seconds is not None and self.seconds >= limit_seconds:
                self.stopped = True
                return

    def compare(self, built: Built) -> Compared:
        """Launch one build on every kind of inputs that its recipe names."""
        recipe, found = built.recipe, list(built.problems)
        if built.program is None:
            return Compared(recipe, 0, 0, built.seconds, built.machine_code, tuple(found))
        publisher = Publisher(built.program, self.gpu)
        function = publisher.kernel.function
        registers, local = function.attribute("NUM_REGS"), function.attribute("LOCAL_SIZE_BYTES")
        if local:
            found.append(f"the loaded code has {local} bytes of local memory per thread, expected none")
        launches = 0
        for kind in recipe.kinds:
            x, weight = self.inputs(recipe.k, kind)
            for number in range(self.launches):
                publisher.arm()
                pdl = built.program.pdl and number % 2 == 0
                publisher.launch(x[: recipe.batch], weight, SLOT, pdl=pdl)
                self.gpu.synchronize(f"running {recipe.label}, {kind}")
                launches += 1
                findings = self.findings(publisher, recipe, kind)
                found += [f"{kind}, launch {number + 1}: {finding}" for finding in findings]
        publisher.close()
        return Compared(recipe, launches, registers, built.seconds, built.machine_code, tuple(found))

    def inputs(self, k: int, kind: str) -> tuple[Any, Any]:
        """(x [64, k], weight) on the GPU. Raises ValueError where this machine draws other numbers."""
        if (k, kind) not in self._inputs:
            x, weight = self.expected.draw(k, kind)
            self._inputs[k, kind] = upload(x, self.gpu.tensors), upload(weight, self.gpu.tensors)
        return self._inputs[k, kind]

    def findings(self, publisher: Publisher, recipe: Recipe, kind: str) -> list[str]:
        """What is wrong with the mailboxes after a launch."""
        import torch

        order = order_of(recipe)
        wanted = self._wanted.get((order, kind, recipe.batch))
        words = [mailbox.view(torch.int16) for mailbox in publisher.mailboxes]
        if wanted is not None and all(torch.equal(one, wanted) for one in words):
            return []
        mailboxes = [publisher.read(rank) for rank in range(publisher.ranks)]
        found = delivery_findings(mailboxes, recipe.batch)
        out = mailboxes[0].array[SLOT, : recipe.batch]
        digest, right = sha256(out), self.expected.bits[order, kind].out[recipe.batch]
        if digest != right:
            where = "" if wanted is None else _difference(out, download(wanted.view(torch.bfloat16))[SLOT])
            found.append(
                f"the bits differ from the virtual GPU's: SHA-256 {digest[:12]}, expected {right[:12]}{where}"
            )
        if not found and wanted is None:
            self._wanted[order, kind, recipe.batch] = words[0].clone()
        elif not found:
            found.append("the mailboxes differ from an earlier right launch's, and nothing says how")
        return found


def _difference(out: np.ndarray, wanted: np.ndarray) -> str:
    """`; 3 elements, first at token 0, column 7`"""
    places = np.argwhere(out.view(np.uint16) != wanted.view(np.uint16))
    token, column = places[0]
    return f"; {len(places)} elements, first at token {token}, column {column}"
