"""Kernels that break one rule of the mailbox each, to see what goes wrong.

As in `broken`: each class overrides as little as it can, and the comment `# the mistake` marks the line that is
wrong. Most of these mistakes give the right result on most days: they need a word that arrives late, a call with
more tokens before one with fewer, or a rank that is slower than its peers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from oproj_lib.exchange import Exchange
from oproj_lib.kernels import mailbox_primitives, primitives
from oproj_lib.kernels.lane import Shared
from oproj_lib.kernels.mailbox import Crew, Generations, MailboxReader, Turn
from oproj_lib.kernels.mailbox_reduce import MailboxReduce
from oproj_lib.kernels.primitives import Words4
from oproj_lib.kernels.producer import OprojProducer


class OneWordReader(MailboxReader):
    """Takes a chunk as arrived when its first word is."""

    def poll(self, address: Int64, offsets: Sequence[int]) -> list[Words4]:
        return mailbox_primitives.poll_chunks(address, offsets, (0,))  # the mistake: all four words


class PollsOneWord(MailboxReduce):
    """Reads chunks whose other words may still be armed."""

    def make_reader(self, ranks: int) -> MailboxReader:
        return OneWordReader(ranks)


class ClearsZerosBeforeRounding(OprojProducer):
    """Rewrites -0.0 while the sum is FP32. A tiny negative sum is not -0.0 yet: rounding makes it so."""

    def round_chunk(self, sums: Sequence[Float32]) -> Words4:
        positive = [primitives.add_float(value, Float32(0.0)) for value in sums]  # -0.0 + 0.0 = +0.0
        return primitives.pack8(positive, "plain")  # the mistake: "latent", which looks at what rounding gave


class ClearsThisCallsTokens(MailboxReduce):
    """Re-arms as many tokens as this call has; the last one may have had more."""

    def turn(self, state: Int64, crew: Crew, tokens: int) -> Turn:
        turn = super().turn(state, crew, tokens)
        return replace(turn, previous_tokens=Int32(tokens))  # the mistake: what the last call had


class ClearsAhead(MailboxReduce):
    """Re-arms the generation of the next call, into which a faster peer may have published already."""

    def turn(self, state: Int64, crew: Crew, tokens: int) -> Turn:
        turn = super().turn(state, crew, tokens)
        ahead = self.reader.generations.next(turn.generation)
        return replace(turn, previous=ahead, previous_tokens=Int32(tokens))  # the mistake: ahead, not behind


class TwoGenerations(Generations):
    """Calls take turns with two generations."""

    def next(self, generation: Int32) -> Int32:
        return (generation + 1) % 2  # the mistake: % 3

    def previous(self, generation: Int32) -> Int32:
        return (generation + 1) % 2


class PublishesTwo(OprojProducer):
    """Publishes into two generations."""

    records = TwoGenerations()


class RotatesTwo(MailboxReduce):
    """Re-arms the last call's generation, which with two of them is the next call's: see ``ClearsAhead``."""

    def make_reader(self, ranks: int) -> MailboxReader:
        reader = MailboxReader(ranks)
        reader.generations = TwoGenerations()
        return reader


class TriggersBeforeWait(OprojProducer):
    """Lets its consumer start while the kernels before it may still run, the last call's consumer among them."""

    def load_weight(self, weight: cute.Tensor, shared: Shared) -> Any:
        cute.arch.griddepcontrol_launch_dependents()  # the mistake: not before griddepcontrol.wait
        return super().load_weight(weight, shared)


def multicast_arguments(exchange: Exchange, rank: int, out: Any) -> list[Any]:
    """Arguments of a ``MailboxReduce`` that polls and arms through the multicast address.

    A load there has no rank to read from, and arming would hit the copies that slower peers still read.
    """
    own, *rest = exchange.reduce_arguments(rank, out)
    del own
    return [exchange.result.mc[rank], *rest]  # the mistake: the own copy's address
