"""What every engine has for publishing: where chunks go, in which generation, and how they are rounded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from oproj_lib.kernels import primitives
from oproj_lib.kernels.mailbox import Crew, Generations
from oproj_lib.kernels.primitives import Words4
from oproj_lib.kernels.transport import Mailbox, Transport, choose_transport
from oproj_lib.layouts import mailbox as layout
from oproj_lib.problem import CTAS, ROWS_PER_CTA, N

POLICIES = ("latent", "plain")


class Publishing:
    """Base of the engines. ``threads`` is the number of threads of a CTA, and by default all publish.

    With ``generations`` the kernel argument ``slot`` is the rank, and the slot that is written is the one of
    the current generation, which ``state`` holds.
    """

    threads: ClassVar[int]
    records: ClassVar[Generations] = Generations()
    """How the generation is counted."""

    def set_publishing(
        self, twoshot: bool, transport: Transport | str | None, policy: str, generations: bool
    ) -> None:
        """What every engine's constructor takes besides its configuration.

        Raises ValueError for a policy or transport that does not exist, and for a transport that contradicts
        twoshot.
        """
        if policy not in POLICIES:
            raise ValueError(f"policy = {policy!r}: choose from {POLICIES}")
        self.twoshot = twoshot
        self.policy = policy
        self.transport = choose_transport(twoshot, transport)
        self.generations = generations

    def published_columns(self, mailbox: Any) -> int:
        """Columns that the mailbox must have: 7168, or with two-shot those of one owner.

        Raises ValueError for a receive view whose columns are no shard, and where generations are counted for a
        mailbox that does not have three.
        """
        if self.generations:
            layout.ranks_of(mailbox.shape[0])
        if not self.twoshot:
            return N
        shard = mailbox.shape[-1]  # it says how many ranks there are
        return layout.receive_columns(N // shard if N % shard == 0 else 0)

    def check_state(self, state: Any) -> None:
        """Raises ValueError unless there is a state exactly where generations are counted."""
        if (state is not None) != self.generations:
            raise ValueError(
                f"generations = {self.generations} and state is {'given' if state is not None else 'missing'}: "
                f"state holds the generation records of generations = True"
            )

    # Device

    @property
    def consumers(self) -> int:
        """Threads of a CTA that publish, and are free to consume once they have."""
        return self.threads

    def publisher(self) -> Int32:
        """Which of these threads this one is."""
        return primitives.thread_index()

    def route(
        self, mailbox: Mailbox, mc: Int64, slot: Int32, state: Int64 | None
    ) -> tuple[Int64, Int32, Any]:
        """(mc, slot, generation) to publish with, from the kernel's arguments. After the PDL wait.

        generation: None unless the device counts them.
        """
        cta, _, _ = cute.arch.block_idx()
        mc = self.transport.open(mailbox, mc, cta * ROWS_PER_CTA)
        if state is None:
            return mc, slot, None
        generation = self.records.publishing(state, cta)
        return mc, layout.slot(generation, slot, layout.ranks_of(mailbox.slots)), generation

    def round_chunk(self, sums: Sequence[Float32]) -> Words4:
        """Eight sums as the words that are published."""
        return primitives.pack8(sums, self.policy)

    def count_on(self, state: Int64 | None, generation: Any) -> None:
        """After publishing, by all publishing threads: the next call publishes into the next generation.

        A barrier lies between ``route`` and this, so every thread has read the generation.
        """
        if state is not None:
            cta, _, _ = cute.arch.block_idx()
            crew = Crew(cta, self.publisher(), CTAS, self.consumers)
            self.records.published(state, generation, crew)
