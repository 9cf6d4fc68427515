"""Kernels of a rank exchange written once more, in NumPy, behind the stand-in driver: they follow the protocol that
``kernels.mailbox`` describes, and poll in earnest."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
from stand_in_driver import Launch, StandIn, bf16_at

from oproj_lib.program import Program

SENTINEL = 0x80008000
PATIENCE = 5.0
"""Seconds that a consumer polls."""
WAITED_IN_VAIN = threading.local()
PREDECESSOR_PARAMETERS = 4


class RankKernels(StandIn):
    """A stand-in GPU that knows ``payload``, ``producer``, ``mailbox_reduce`` and the benchmark's ``predecessor``.
    launched: engines, in order. late: called before every launch."""

    def __init__(
        self, programs: Sequence[Program], late: Callable[[str], object] = lambda entry: None
    ) -> None:
        super().__init__(self.execute)
        self.programs = {program.key: program for program in programs}
        self.late = late
        self.launched: list[str] = []

    def _cuModuleGetFunction(self, module: bytes, entry: bytes) -> tuple[SimpleNamespace]:
        """Modules of several programs have entries of one name: here a function is called by its program's key."""
        if entry == b"predecessor":
            return (SimpleNamespace(entry=entry.decode()),)
        (key,) = [key for key, program in self.programs.items() if program.cubin == module]
        assert self.programs[key].entry == entry.decode()
        return (SimpleNamespace(entry=key),)

    def _cuLaunchKernelEx(self, config: Any, function: Any, pointers: int, extra: int) -> tuple[()]:
        known = function.entry in self.programs
        self.count = len(self.programs[function.entry].parameters) if known else PREDECESSOR_PARAMETERS
        return super()._cuLaunchKernelEx(config, function, pointers, extra)

    def execute(self, launch: Launch) -> None:
        if launch.entry == "predecessor":
            to, source, chunks = (
                launch.value(0, ctypes.c_int64),
                launch.value(1, ctypes.c_int64),
                launch.value(2, ctypes.c_int32),
            )
            ctypes.memmove(to, source, 16 * chunks)
            return
        program = self.programs[launch.entry]
        self.late(launch.entry)
        self.launched.append(str(program.config["engine"]))
        assert launch.grid == (112, 1, 1) and "PROGRAMMATIC_STREAM_SERIALIZATION" in launch.attributes
        shapes = {parameter.name: parameter.shape for parameter in program.parameters}
        values = {
            parameter.name: launch.value(i, ctypes.c_int32 if parameter.dtype == "int32" else ctypes.c_int64)
            for i, parameter in enumerate(program.parameters)
        }
        state = np.ctypeslib.as_array((ctypes.c_int32 * 1536).from_address(values["state"])).reshape(3, 512)
        if program.config["engine"] == "payload":
            publish(bf16_at(values["payload"], shapes["payload"]), values, shapes, state)
        elif program.config["engine"] == "producer":
            x, weight = (bf16_at(values[name], shapes[name]).astype(np.float32) for name in ("x", "weight"))
            publish((x @ weight.T).astype(ml_dtypes.bfloat16), values, shapes, state)
        else:
            consume(values, shapes, state)


def publish(
    payload: np.ndarray, values: dict[str, int], shapes: dict[str, tuple[int, ...]], state: np.ndarray
) -> None:
    ranks = shapes["mailbox"][0] // 3
    words = payload.view(np.uint16).copy()
    words[words == 0x8000] = 0
    words[np.isnan(payload)] = 0x7FFF
    slot = int(state[0, 0]) * ranks + values["slot"]
    for address in (ctypes.c_int64 * ranks).from_address(values["mc"]):
        bf16_at(address, shapes["mailbox"])[slot, : len(words)].view(np.uint16)[:] = words
    state[0] = (state[0] + 1) % 3


def consume(values: dict[str, int], shapes: dict[str, tuple[int, ...]], state: np.ndarray) -> None:
    box, out = bf16_at(values["mailbox"], shapes["mailbox"]), bf16_at(values["out"], shapes["out"])
    ranks, generation = len(box) // 3, int(state[1, 0])
    old = (generation - 1) % 3 * ranks
    box[old : old + ranks, : state[2, 0]].view(np.uint32)[:] = SENTINEL
    mine = box[generation * ranks : (generation + 1) * ranks, : len(out)]
    until = time.monotonic() + (0.0 if getattr(WAITED_IN_VAIN, "before", False) else PATIENCE)
    while (mine.view(np.uint32) == SENTINEL).any() and time.monotonic() < until:
        time.sleep(0.001)
    # Whoever was missing once is missing in the rounds after it, too, and they have been enqueued: not PATIENCE each.
    WAITED_IN_VAIN.before = bool((mine.view(np.uint32) == SENTINEL).any())
    total = np.zeros(out.shape, np.float32)
    with np.errstate(all="ignore"):
        for rank in range(ranks):
            total = mine[rank].astype(np.float32) if rank == 0 else total + mine[rank].astype(np.float32)
        out[:] = total.astype(out.dtype)
    out.view(np.uint16)[np.isnan(total)] = 0x7FFF
    state[1], state[2] = (state[1] + 1) % 3, len(out)


def replayed(launch: Callable[[], None]) -> Callable[[], None]:
    """In place of a CUDA graph: the launches themselves, again."""
    return launch
