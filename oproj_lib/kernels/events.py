"""Engines that say when they do what: the steps of a kernel as IKET events.

IKET (In-Kernel Event Tracing, part of CuTe DSL) compiles an event to a ``pmevent`` instruction and patches the loaded
code so that every warp that reaches it writes the time, ``%globaltimer``, in steps of 32 ns.

    engine = OprojProducerEvents.recommended(1536, 8)     # the same engine, with events
    build_producer(engine, ...)                           # another class: another entry in the program cache

Events are wrapped around the steps from outside, by a subclass. An engine without them is not touched: its PTX is the
same, byte for byte, as if this module did not exist.

An event is the start of a step; the step lasts until the warp's next event. Names are those of the functions that the
virtual GPU's timeline attributes instructions to, and of what it says a warp waits for:

    event             the warp ...
    load_weight       starts the loads of its weights
    previous kernel   has issued them, and waits at griddepcontrol.wait
    route             may go on: finds the mailbox, and on the register path issues the loads of x
    receive_x         copies x to shared memory, waits for it and for the other warps (shared path)
    multiply          issues MMAs: each waits for its weights, which may still be on their way
    store_partials    stores the sums of its K part, which waits for the last MMA
    CTA barrier       waits for the partial sums of all warps
    publish           adds the K parts, rounds and sends
    end               has issued its last store

Of `OprojWgmma`, whose warps have two roles:

    event             a loader (warps 0-3) ...             a multiplier (warps 4-7) ...
    load_weight       starts to copy W of the first
                      stages, then asks for the rest of
                      it in L2
    previous kernel   waits at griddepcontrol.wait         waits at griddepcontrol.wait
    route                                                  may go on: finds the mailbox
    load_x            may go on: copies x block by block,
                      W too once the slots are reused
    multiply                                               waits for each K block, issues its wgmmas
    finish                                                 waits for its last wgmma
    meet                                                   waits for the other multipliers
    store_tile                                             stores D, waits for the other multipliers
    publish                                                rounds and sends
    end               has issued its last copy             has issued its last store
"""

from __future__ import annotations

from typing import Any

from cutlass import Int32, Int64
from cutlass.cute.experimental import iket

from oproj_lib.kernels.producer import OprojProducer
from oproj_lib.kernels.wgmma import OprojWgmma

STEPS = (
    "load_weight",
    "previous kernel",
    "route",
    "receive_x",
    "multiply",
    "store_partials",
    "CTA barrier",
    "publish",
)
"""Names of the events that start a step, in the order of a kernel with one token tile."""
END = "end"
"""The event after the last step."""
LOADER_STEPS = ("load_weight", "previous kernel", "load_x")
MULTIPLIER_STEPS = ("previous kernel", "route", "multiply", "finish", "meet", "store_tile", "publish")
"""The same, of the two roles of `OprojWgmma`."""


class StepEvents:
    """To mix into an engine that has OprojProducer's steps, before it: every step starts with an event."""

    compiler_options = "enable-iket=true"
    """What CuTe DSL needs to be told; without it, it drops the events."""

    def load_weight(self, *arguments: Any) -> Any:
        iket.mark("load_weight")
        return super().load_weight(*arguments)  # type: ignore[misc]

    def compute(self, *arguments: Any, **options: Any) -> None:
        iket.mark("previous kernel")
        super().compute(*arguments, **options)  # type: ignore[misc]
        iket.mark(END)

    def route(self, *arguments: Any) -> tuple[Int64, Int32, Any]:
        iket.mark("route")
        found: tuple[Int64, Int32, Any] = super().route(*arguments)  # type: ignore[misc]
        return found

    def receive_x(self, *arguments: Any) -> None:
        iket.mark("receive_x")
        super().receive_x(*arguments)  # type: ignore[misc]

    def multiply(self, *arguments: Any) -> Any:
        iket.mark("multiply")
        return super().multiply(*arguments)  # type: ignore[misc]

    def store_partials(self, *arguments: Any) -> None:
        iket.mark("store_partials")
        super().store_partials(*arguments)  # type: ignore[misc]

    def publish_all(self, *arguments: Any) -> None:
        iket.mark("CTA barrier")
        super().publish_all(*arguments)  # type: ignore[misc]

    def publish(self, *arguments: Any) -> None:
        iket.mark("publish")
        super().publish(*arguments)  # type: ignore[misc]


class OprojProducerEvents(StepEvents, OprojProducer):
    """OprojProducer with an event at the start of every step."""


class OprojWgmmaEvents(OprojWgmma):
    """OprojWgmma with an event at the start of every step of its loaders and of its multipliers."""

    compiler_options = StepEvents.compiler_options

    def load(self, *arguments: Any, **options: Any) -> None:
        iket.mark("load_weight")
        super().load(*arguments, **options)
        iket.mark(END)

    def prefetch_weight(self, *arguments: Any) -> None:
        super().prefetch_weight(*arguments)
        iket.mark("previous kernel")  # the next instruction is the wait

    def load_x_tile(self, lane: Any, shared: Any, plan: Any, block: int) -> None:
        if block == 0:
            iket.mark("load_x")
        super().load_x_tile(lane, shared, plan, block)

    def multiply_and_publish(self, *arguments: Any, **options: Any) -> None:
        iket.mark("previous kernel")
        super().multiply_and_publish(*arguments, **options)
        iket.mark(END)

    def route(self, *arguments: Any) -> tuple[Int64, Int32, Any]:
        iket.mark("route")
        found: tuple[Int64, Int32, Any] = super().route(*arguments)
        return found

    def multiply(self, *arguments: Any) -> Any:
        iket.mark("multiply")
        return super().multiply(*arguments)

    def finish(self, *arguments: Any) -> Any:
        iket.mark("finish")
        return super().finish(*arguments)

    def epilogue(self, *arguments: Any) -> None:
        iket.mark("meet")
        super().epilogue(*arguments)

    def store_tile(self, *arguments: Any) -> None:
        iket.mark("store_tile")
        super().store_tile(*arguments)

    def publish(self, *arguments: Any) -> None:
        iket.mark("publish")
        super().publish(*arguments)
