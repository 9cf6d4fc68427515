"""Run the residual attention kernel on the virtual GPU: tests and notebooks come through here.

run_attnres(AttnRes(...))                       the kernel alone, on sums that have arrived already
AttnResRanks(ranks, tokens).enqueue(programs)   R ranks, each with a chain of kernels that exchange sums
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from oproj_lib import vgpu
from oproj_lib.attnres_programs import build_attnres
from oproj_lib.attnres_reference import AttnResInputs, findings, make_inputs
from oproj_lib.exchange import Exchange, armed
from oproj_lib.kernels.attnres_configuration import AttnResConfiguration
from oproj_lib.layouts import mailbox as layout
from oproj_lib.problem import Array, N
from oproj_lib.program import Program
from oproj_lib.run import decoded, one_line

if TYPE_CHECKING:
    from oproj_lib.kernels.attnres import AttnRes

CONSTANTS = ("blocks", "norm_weight", "qk_weight", "out_weight")
"""Arrays of ``AttnResInputs`` that the kernel only reads, in the order of its arguments."""


@dataclass(frozen=True)
class AttnResRun:
    """What a launch left behind: prefix (P) and out, BF16 [M, 7168]; findings, one line each, of the virtual GPU
    and of the comparison with float64."""

    prefix: Array = field(repr=False)
    out: Array = field(repr=False)
    report: vgpu.Report = field(repr=False)
    findings: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.findings


def run_attnres(
    kernel: AttnRes,
    *,
    target: str = "sm_90a",
    inputs: AttnResInputs | None = None,
    seed: int = 0,
    kind: str = "random",
    checks: bool = False,
    schedule: str | int = "program",
) -> AttnResRun:
    """Builds the split kernel and runs it once, on a mailbox that every rank has published into.

    inputs: by default those that seed and kind make. Raises ValueError as ``make_inputs`` and
    ``build_attnres``.
    """
    config = kernel.config
    given = inputs if inputs is not None else make_inputs(config, seed, kind)
    program = build_attnres(kernel, target=target, mailbox_tokens=config.tokens)
    gpu = vgpu.VirtualGPU()
    mailbox = gpu.upload(filled_mailbox(config, given, config.tokens), "mailbox")
    state = gpu.upload(np.zeros(layout.STATE_SHAPE, np.int32), "state")
    prefix = gpu.upload(given.prefix.copy(), "prefix")
    out = gpu.empty((config.tokens, N), ml_dtypes.bfloat16, "out")
    constants = [gpu.upload(getattr(given, name), name) for name in CONSTANTS]
    report = gpu.launch(
        decoded(program), program.entry, grid=program.grid, block=program.block,
        args=[mailbox, prefix, *constants, out, state],
        dynamic_shared_bytes=program.dynamic_shared_bytes, checks=checks, schedule=schedule,
    )  # fmt: skip
    found = [*(one_line(finding) for finding in report.findings), *unwritten(out)]
    found += findings(config, given, prefix.array, out.array)
    return AttnResRun(prefix.array, out.array, report, tuple(found))


def filled_mailbox(
    config: AttnResConfiguration, inputs: AttnResInputs, tokens: int, generation: int = 0
) -> Array:
    """A mailbox [3 * ranks, tokens, 7168] in which every rank has published ``generation``; the rest is armed."""
    box = armed((layout.slots_of(config.ranks), tokens, N))
    first = layout.slot(generation, 0, config.ranks)
    box[first : first + config.ranks, : config.tokens] = inputs.slots
    return box


def unwritten(out: vgpu.Buffer) -> tuple[str, ...]:
    """A finding where not every byte of a buffer was stored."""
    if out.written is None or out.written.all():
        return ()
    return (f"unwritten output: {int((~out.written).sum())} bytes of {out.name} were never stored",)


@dataclass(frozen=True)
class Call:
    """One call of all ranks: handles of its grids, and each rank's out [M, 7168]."""

    handles: list[vgpu.GridHandle]
    out: list[vgpu.Buffer]


class AttnResRanks:
    """R virtual ranks that project, exchange sums and mix, call after call.

    prefix [tokens, 7168] of every rank stays from call to call, as in a model. ``exchange`` has the mailboxes.
    Raises ValueError as ``Exchange``.
    """

    def __init__(self, ranks: int, tokens: int, prefix: Array, **exchange: Any) -> None:
        self.exchange = Exchange(ranks, tokens, **exchange)
        self.gpu = self.exchange.gpu
        self.prefix = [
            self.gpu.upload(prefix.copy(), f"prefix of rank {rank}", rank) for rank in range(ranks)
        ]

    def enqueue(
        self,
        programs: Sequence[Program],
        x: Sequence[Array],
        weight: Sequence[Array],
        inputs: AttnResInputs,
        **options: Any,
    ) -> Call:
        """Puts one call behind the earlier ones on every rank.

        programs: in launch order, an engine and AttnRes (with the second shot between them where there are two),
        or the fused kernel. x [M, K] and weight [7168, K]: one per rank. inputs: blocks and weights are used.
        """
        call = Call([], [])
        for rank in range(self.exchange.ranks):
            upload = self._uploader(rank)
            arrays = [upload(x[rank], "x"), upload(weight[rank], "weight")]
            out = self.gpu.empty((len(x[rank]), N), ml_dtypes.bfloat16, f"out of rank {rank}", rank)
            own = [self.prefix[rank], *(upload(getattr(inputs, name), name) for name in CONSTANTS), out]
            call.out.append(out)
            for program in programs:
                arguments = self._arguments(str(program.config["engine"]), rank, arrays, own)
                call.handles.append(self.exchange.enqueue(program, rank, arguments, **options))
        return call

    def _uploader(self, rank: int) -> Any:
        return lambda array, name: self.gpu.upload(array, f"{name} of rank {rank}", rank)

    def _arguments(self, engine: str, rank: int, arrays: list[Any], own: list[Any]) -> list[Any]:
        exchange = self.exchange
        if engine == "attnres":
            return [exchange.result.boxes[rank], *own, exchange.result.states[rank]]
        if engine == "second_shot":
            return exchange.second_shot_arguments(rank)
        arguments = exchange.producer_arguments(rank, *arrays)
        if engine == "fused_two_shot_attnres":
            result = exchange.result
            arguments += [result.boxes[rank], result.mc[rank], result.states[rank]]
        return [*arguments, *own] if engine.startswith("fused") else arguments
