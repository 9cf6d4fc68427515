"""What is compared: every configuration of the sm_90a engines at every batch size of the contract that it takes.

The order in which a sum is added (KERNELS: "Accumulation order") depends on few things: of the mma.sync producers on
K, the K parts and the chains, of the wgmma engine on K alone. So thousands of builds have few `Order`s, and the bits
of one build are those of every build with the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from oproj_lib.bundle_recipes import DIRECT, RING_STAGES, Recipe, direct_configurations
from oproj_lib.kernels.configuration import Configuration, configurations
from oproj_lib.layouts import ring
from oproj_lib.problem import HIDDEN_K, KINDS, RANKS

TARGET = "sm_90a"
BATCHES = (1, 2, 3, 5, 7, 8, 9, 13, 16, 17, 24, 32, 33, 48, 63, 64)
"""Tokens: one, the sizes beside multiples of a token tile (8) and of a group of tiles, the most."""
MAILBOXES = (1, 2)
"""How many a build publishes to, in turn: one, whose address is looked up early, or two, which are compared."""


@dataclass(frozen=True)
class Order:
    """How a sum is added. instruction: "mma.sync" or "wgmma"; parts: K parts added one after another; chains:
    accumulators of a warp, added pairwise."""

    instruction: str
    k: int
    parts: int = 1
    chains: int = 1

    @property
    def name(self) -> str:
        """`mma.sync-k1536-parts4-chains2`"""
        return f"{self.instruction}-k{self.k}-parts{self.parts}-chains{self.chains}"


def configuration_of(recipe: Recipe) -> Configuration:
    """The producer's configuration. Raises ValueError for another engine's recipe."""
    if recipe.engine not in ("producer", DIRECT):
        raise ValueError(f"engine = {recipe.engine!r} has no mma.sync configuration")
    return Configuration(recipe.k, **recipe.settings, direct=recipe.engine == DIRECT)


def order_of(recipe: Recipe) -> Order:
    """What the bits of this build depend on. Raises ValueError for an engine without an order here."""
    if recipe.engine == "wgmma":
        return Order("wgmma", recipe.k)
    config = configuration_of(recipe)
    return Order("mma.sync", recipe.k, config.parts, config.chains)


@dataclass(frozen=True)
class Member:
    """One configuration. path: how x reaches the multiplication; recipes: one per batch size, ascending."""

    name: str
    path: str
    recipes: tuple[Recipe, ...]


def members() -> tuple[Member, ...]:
    """Every configuration for sm_90a: the producers', the direct ones, and rings of `OprojWgmma`."""
    return tuple(member for ranks in sorted(RANKS, reverse=True) for member in _members(ranks))


def _members(ranks: int) -> Iterator[Member]:
    k = HIDDEN_K // ranks
    for settings in configurations(k):
        config = Configuration(k, *settings)
        yield _producer("producer", ranks, config, config.settings())
    for config in direct_configurations(k):
        yield _producer(DIRECT, ranks, config, {"staged_blocks": config.staged_blocks, "rows": config.rows})
    yield Member(f"wgmma-k{k}", "ring", tuple(_recipe("wgmma", ranks, batch, {}) for batch in BATCHES))
    for stages in RING_STAGES:
        recipes = (
            _recipe("wgmma", ranks, batch, {"budget": stages * ring.stage_bytes(ring.padded_tokens(batch))})
            for batch in BATCHES
        )
        yield Member(f"wgmma-k{k}-stages{stages}", "ring", tuple(recipes))


def _producer(engine: str, ranks: int, config: Configuration, settings: dict[str, int]) -> Member:
    valid = config.valid_batches()
    recipes = tuple(_recipe(engine, ranks, batch, settings) for batch in BATCHES if batch in valid)
    numbers = "".join(f"-{name}{value}" for name, value in settings.items())
    path = DIRECT if engine == DIRECT else config.path.value
    return Member(f"{engine}-k{config.k}{numbers}", path, recipes)


def _recipe(engine: str, ranks: int, batch: int, settings: dict[str, int]) -> Recipe:
    turn = BATCHES.index(batch) + settings.get("staged_blocks", 0)
    mailboxes = MAILBOXES[turn % len(MAILBOXES)]
    return Recipe(engine, ranks, batch, settings, timed=False, kinds=KINDS, mailboxes=mailboxes)


def points(found: Sequence[Member]) -> tuple[Recipe, ...]:
    """Every build once, in rounds: each round has every configuration at one batch size, another one for the next
    configuration and in the next round. So a sweep that is stopped has seen all configurations, and all sizes.
    """
    rounds = max((len(member.recipes) for member in found), default=0)
    return tuple(
        member.recipes[(number + turn) % len(member.recipes)]
        for turn in range(rounds)
        for number, member in enumerate(found)
        if turn < len(member.recipes)
    )
