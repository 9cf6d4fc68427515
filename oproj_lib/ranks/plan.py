"""What a run of ranks does, checked before anything is compiled or launched. Needs neither CuTe DSL nor a GPU.

Every rank must follow the same plan: ranks that publish different numbers of tokens, or by different programs,
poll for ever. ``Plan.digest`` is what real ranks compare before they launch anything.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from oproj_lib import problem
from oproj_lib.kernels.attnres_configuration import MAX_BLOCKS, MAX_RANKS
from oproj_lib.layouts import mailbox as layout
from oproj_lib.problem import CTAS, HIDDEN_K, MAX_BATCH, ROWS_PER_CTA
from oproj_lib.program import TARGETS

PAYLOAD = "payload"
ENGINE_TARGETS = {
    "producer": TARGETS,
    "direct": TARGETS,
    "umma": ("sm_100a",),
    "wgmma": ("sm_90a",),
    PAYLOAD: TARGETS,
}
"""Engines and where they run. direct: the producer for at most 8 tokens; payload: given partial sums, no projection
(``ranks.payload``)."""
CONSUMERS = ("reduce", "attnres")
TRANSPORTS = ("multicast", "unicast")
SHOTS = (1, 2)
NASTY = "nasty"
"""A kind of payload: all kinds in turn."""
FEW = 4
"""Different numbers of tokens of a run, since each needs programs of its own."""
DEFAULT_K = HIDDEN_K // 8


@dataclass(frozen=True)
class Plan:
    """A run, the same on every rank; checked when created.

    ranks, rounds; shots: 1 or 2; engine, target; consumer: reduce or attnres, fused with the engine or not;
    tokens: capacity of the mailboxes; batches: numbers of tokens that rounds choose from; k: columns of W on a
    rank; payload: a kind of ``problem.KINDS``, or "nasty" for all in turn; ctas: run only the first ones
    (None: all); in_flight: rounds that are enqueued before anybody waits; blocks: earlier blocks of AttnRes.

    Raises ValueError with what failed and the choices.
    """

    ranks: int
    rounds: int = 20
    shots: int = 1
    engine: str = "producer"
    target: str = "sm_90a"
    consumer: str = "reduce"
    fused: bool = False
    transport: str = "multicast"
    tokens: int = MAX_BATCH
    batches: tuple[int, ...] = (1, 8)
    k: int = DEFAULT_K
    payload: str = "random"
    seed: int = 0
    ctas: int | None = None
    in_flight: int = 3
    blocks: int = 1

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_names()
        self._check_batches()
        self._check_forms()

    def _check_numbers(self) -> None:
        limits = {
            "ranks": (1, MAX_RANKS), "rounds": (1, 1_000_000), "tokens": (1, MAX_BATCH), "in_flight": (1, 1000),
            "blocks": (0, MAX_BLOCKS), "seed": (0, 2**32 - 1), "k": (32, HIDDEN_K),
        }  # fmt: skip
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name} = {value!r} is a {type(value).__name__}; it must be an int")
            if not low <= value <= high:
                raise ValueError(f"{name} = {value}: choose {low} to {high}")

    def _check_names(self) -> None:
        choices: dict[str, tuple[Any, ...]] = {
            "shots": SHOTS, "engine": tuple(ENGINE_TARGETS), "target": TARGETS, "consumer": CONSUMERS,
            "transport": TRANSPORTS, "payload": (*problem.KINDS, NASTY),
        }  # fmt: skip
        for name, valid in choices.items():
            if getattr(self, name) not in valid:
                raise ValueError(f"{name} = {getattr(self, name)!r} is unknown; choose one of {valid}")
        if self.target not in ENGINE_TARGETS[self.engine]:
            raise ValueError(
                f"engine {self.engine!r} has no build for {self.target}; choose one of {ENGINE_TARGETS[self.engine]}"
            )

    def _check_batches(self) -> None:
        if not self.batches:
            raise ValueError("batches is empty: at least one number of tokens")
        for batch in self.batches:
            if batch < 1:
                raise ValueError(f"batch = {batch}: choose 1 to {self.tokens}")
            if batch > self.tokens:
                raise ValueError(f"batch = {batch} > tokens = {self.tokens}: a slot must hold every token")

    def _check_forms(self) -> None:
        if self.shots == 2:
            layout.receive_columns(self.ranks)
        if self.engine == PAYLOAD and self.fused:
            raise ValueError(
                f"fused = True: engine {PAYLOAD!r} is no engine to fuse; choose producer, umma or wgmma"
            )
        if self.ctas is None:
            return
        if not 1 <= self.ctas <= CTAS:
            raise ValueError(f"ctas = {self.ctas}: choose 1 to {CTAS}")
        if self.ctas < CTAS and (self.shots == 2 or self.consumer == "attnres"):
            raise ValueError(
                f"ctas = {self.ctas}: CTAs depend on one another in two-shot and AttnRes; leave ctas out"
            )

    @property
    def twoshot(self) -> bool:
        return self.shots == 2

    @property
    def columns(self) -> int:
        """Output columns that are computed."""
        return (self.ctas or CTAS) * ROWS_PER_CTA

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of inputs, in turn."""
        return problem.KINDS if self.payload == NASTY else (self.payload,)

    @property
    def transport_name(self) -> str:
        """The transport of an engine's constructor: of one-shot chunks, or of the second shot's sums."""
        return "multicast" if self.transport == "multicast" else f"unicast:{self.ranks}"

    @property
    def mailbox_shapes(self) -> tuple[tuple[int, int, int], tuple[int, int, int] | None]:
        """(first mailbox, result mailbox of two-shot), BF16 [slots, tokens, columns]."""
        slots = layout.slots_of(self.ranks)
        if not self.twoshot:
            return (slots, self.tokens, problem.N), None
        first = (slots, self.tokens, layout.receive_columns(self.ranks))
        return first, (layout.slots_of(1), self.tokens, problem.N)

    def batch(self, number: int) -> int:
        """Tokens of round ``number``. The first rounds take each batch once."""
        if number < len(self.batches):
            return self.batches[number]
        rng = np.random.default_rng([self.seed, number, 1])
        return int(self.batches[rng.integers(len(self.batches))])

    def kind(self, number: int) -> str:
        """Kind of inputs of round ``number``."""
        return self.kinds[number % len(self.kinds)]

    def check_rank(self, rank: int) -> int:
        """``rank`` itself. Raises ValueError for one that does not exist."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank = {rank}: {self.ranks} ranks, choose 0 to {self.ranks - 1}")
        return rank

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "batches": list(self.batches)}

    def digest(self, *more: str) -> str:
        """SHA-256 (hex) of the plan and of ``more``, the programs' keys for instance."""
        text = json.dumps([self.as_dict(), *more], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def few_batches(seed: int, most: int) -> tuple[int, ...]:
    """Up to four different numbers of tokens up to ``most``, at random but for the largest and 1."""
    rng = np.random.default_rng([seed, 2])
    between = rng.permutation(np.arange(2, most))[: FEW - 2]
    return tuple(dict.fromkeys([1, most, *(int(batch) for batch in between)]))
