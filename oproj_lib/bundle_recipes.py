"""Which programs a bundle holds: every engine that runs on the target, at sizes that a check or a benchmark
needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from oproj_lib import doctor, presets
from oproj_lib.kernels import configuration
from oproj_lib.kernels.configuration import Configuration
from oproj_lib.layouts.fragments import BLOCK_K, MMA_TOKENS
from oproj_lib.problem import HIDDEN_K, KINDS, RANKS
from oproj_lib.program import Program, check_target
from oproj_lib.ranks.plan import CONSUMERS, ENGINE_TARGETS, PAYLOAD, Plan

BATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Tokens that `bench` measures."""
BOUNDARIES = (3, 7, 9, 13, 17, 24, 33, 48, 63, 5)
"""Tokens beside tile boundaries (8 tokens) and group boundaries, which `check` adds."""
QUICK_BATCHES = (1, 8, 64)
SWEEP_BATCH = 8
DIRECT = "direct"
"""`kernels.direct`, the producer for at most 8 tokens; built like any producer."""
DIRECT_ROWS = 2
"""Rows of its default build."""
RING_STAGES = (1, 2, 3)
"""Short rings, in which slots are reused, of the engines that have one."""


@dataclass(frozen=True)
class Recipe:
    """One program. settings: the engine's arguments beside k; timed: `bench` measures it; kinds: of inputs."""

    engine: str
    ranks: int
    batch: int
    settings: dict[str, int]
    timed: bool
    kinds: tuple[str, ...] = ("random",)
    mailboxes: int = 1

    @property
    def k(self) -> int:
        return HIDDEN_K // self.ranks

    @property
    def transport(self) -> str:
        return f"unicast:{self.mailboxes}"

    @property
    def label(self) -> str:
        """`producer-k768-m8-staged_blocks0-rows1-group_tiles0-unicast1`, a folder's name."""
        settings = "".join(f"-{name}{value}" for name, value in self.settings.items())
        return f"{self.engine}-k{self.k}-m{self.batch}{settings}-unicast{self.mailboxes}"

    def seed(self, kind: str) -> int:
        """The same for every program, so that programs of one size share their inputs."""
        return 1 + KINDS.index(kind)


@dataclass
class _Plan:
    """Collects recipes without duplicates; every program gets random inputs and one nasty kind in turn."""

    found: dict[str, Recipe] = field(default_factory=dict)

    def add(
        self, engine: str, ranks: int, batch: int, settings: dict[str, int], timed: bool, mailboxes: int = 1
    ) -> None:
        nasty = KINDS[1 + len(self.found) % (len(KINDS) - 1)]
        recipe = Recipe(engine, ranks, batch, settings, timed, ("random", nasty), mailboxes)
        self.found.setdefault(recipe.label, recipe)


def recipes(target: str, *, quick: bool = False) -> tuple[Recipe, ...]:
    """The programs of a bundle for ``target``; quick: the recommended ones at 1, 8 and 64 tokens.

    Raises ValueError for an unknown target.
    """
    check_target(target)
    plan = _Plan()
    batches = QUICK_BATCHES if quick else BATCHES
    for engine, targets in doctor.ENGINES.items():
        if target not in targets:
            continue
        for ranks in sorted(RANKS, reverse=True):
            if engine == "producer":
                _add_producers(plan, engine, ranks, batches, quick)
                _add_direct(plan, ranks, batches, quick)
            else:
                _add_ring_engines(plan, engine, ranks, batches, quick)
    return tuple(plan.found.values())


def _add_producers(plan: _Plan, engine: str, ranks: int, batches: tuple[int, ...], quick: bool) -> None:
    """Recommended ones; every number of staged blocks at 8 tokens; the corners of every x path."""
    k = HIDDEN_K // ranks
    for batch in batches:
        plan.add(engine, ranks, batch, configuration.recommended(k, batch).settings(), timed=True)
    if quick:
        return
    every = [Configuration(k, *numbers) for numbers in configuration.configurations(k)]
    for config in every:
        if config.rows == 1 and config.group_tiles == 0 and SWEEP_BATCH in config.valid_batches():
            plan.add(engine, ranks, SWEEP_BATCH, config.settings(), timed=True)
    for number, config in enumerate(corners(every)):
        batch = _boundary(config, number)
        plan.add(engine, ranks, batch, config.settings(), timed=False, mailboxes=2)


def _add_direct(plan: _Plan, ranks: int, batches: tuple[int, ...], quick: bool) -> None:
    """The producer for one token tile: preset, fewest staged blocks and contenders at every size, others at 8."""
    found = direct_configurations(HIDDEN_K // ranks)
    first = next(config for config in found if config.rows == DIRECT_ROWS)
    k = HIDDEN_K // ranks
    everywhere = [presets.direct_settings(k), _direct_settings(first), *presets.DIRECT_CONTENDERS[k]]
    for batch in batches:
        if batch <= first.max_batch:
            for settings in everywhere:
                plan.add(DIRECT, ranks, batch, settings, timed=True)
    if quick:
        return
    for number, config in enumerate(found):
        plan.add(DIRECT, ranks, SWEEP_BATCH, _direct_settings(config), timed=True)
        if number % 3 == 0:
            plan.add(
                DIRECT, ranks, _boundary(config, number // 3), _direct_settings(config), False, mailboxes=2
            )


def direct_configurations(k: int) -> list[Configuration]:
    """Every direct build for ``k``, by rows, then staged blocks."""
    found = []
    for rows in configuration.ROW_CHOICES:
        for staged_blocks in range(k // (BLOCK_K * 4 * rows) + 1):
            try:
                config = Configuration(k, staged_blocks, rows, direct=True)
                config.plan(SWEEP_BATCH)
            except ValueError:  # as `configuration.configurations`: what does not exist is left out
                continue
            found.append(config)
    return found


def _direct_settings(config: Configuration) -> dict[str, int]:
    return {"staged_blocks": config.staged_blocks, "rows": config.rows}


def corners(every: list[Configuration]) -> list[Configuration]:
    """Per number of rows and of group tiles (none, one, two, the most): the fewest, a middle and the most
    staged blocks."""
    found = []
    for rows in configuration.ROW_CHOICES:
        tiles = sorted({config.group_tiles for config in every if config.rows == rows})
        for group_tiles in sorted({*tiles[:3], *tiles[-1:]}):  # none where k has too few blocks
            family = [c for c in every if (c.rows, c.group_tiles) == (rows, group_tiles)]
            family.sort(key=lambda config: config.staged_blocks)
            found += [family[i] for i in sorted({0, len(family) // 2, len(family) - 1})]
    return found


def _boundary(config: Configuration, number: int) -> int:
    """A batch size beside a boundary that this configuration takes: the largest, or one of the others."""
    valid = config.valid_batches()
    choices = [batch for batch in BOUNDARIES if batch in valid] or list(valid)
    return max(choices) if number % 2 else choices[number // 2 % len(choices)]


def _add_ring_engines(plan: _Plan, engine: str, ranks: int, batches: tuple[int, ...], quick: bool) -> None:
    """The default ring at every size, and short rings."""
    from oproj_lib.layouts import ring

    for batch in batches:
        plan.add(engine, ranks, batch, {}, timed=True)
    if quick:
        return
    for number, stages in enumerate(RING_STAGES):
        for batch in (BOUNDARIES[number], BOUNDARIES[-2 - number]):
            budget = stages * ring.stage_bytes(ring.padded_tokens(batch))
            plan.add(engine, ranks, batch, {"budget": budget}, timed=False, mailboxes=2)


CONSUMER_BATCHES = (1, 8, 64)
CONSUMER_BLOCKS = 8
"""Earlier blocks of AttnRes in the chain: as many as it takes, so the most that can be hidden or not."""


def consumer_plans(target: str) -> tuple[Plan, ...]:
    """The chains of one rank with a consumer that `bench --consumer reduce` and `attnres` measure: every engine of the
    target, split and fused, at 1, 8 and 64 tokens. Raises ValueError for an unknown target."""
    check_target(target)
    found = []
    for consumer in CONSUMERS:
        for ranks in sorted(RANKS, reverse=True):
            for batch in CONSUMER_BATCHES:
                engines = [
                    name for name, targets in ENGINE_TARGETS.items() if target in targets and name != PAYLOAD
                ]
                for engine in engines:
                    if engine == DIRECT and batch > MMA_TOKENS:
                        continue
                    found += [
                        Plan(
                            1, engine=engine, target=target, consumer=consumer, fused=fused, transport="unicast",
                            tokens=batch, batches=(batch,), k=HIDDEN_K // ranks, blocks=CONSUMER_BLOCKS,
                        )
                        for fused in (False, True)
                    ]  # fmt: skip
    return tuple(found)


def build_program(recipe: Recipe, target: str) -> Program:
    """Compile a recipe, or find it cached. Raises RuntimeError where CuTe DSL is missing."""
    from oproj_lib import program
    from oproj_lib.delivery import SLOTS

    program.compiler_version()  # says what to install, before an import fails
    build, engine = _engine(recipe)
    made: Program = build(
        engine, target=target, batch=recipe.batch, mailbox_slots=SLOTS, mailbox_tokens=recipe.batch
    )
    return made


def _engine(recipe: Recipe) -> tuple[Any, Any]:
    """(build function, engine object)."""
    from oproj_lib import program

    options: dict[str, Any] = {**recipe.settings, "transport": recipe.transport}
    if recipe.engine == "producer":
        from oproj_lib.kernels.producer import OprojProducer

        return program.build_producer, OprojProducer(recipe.k, **options)
    if recipe.engine == DIRECT:
        from oproj_lib.kernels.direct import OprojProducerDirect

        return program.build_producer, OprojProducerDirect(recipe.k, **options)
    if recipe.engine == "umma":
        from oproj_lib.kernels.umma import OprojUmma

        return program.build_umma, OprojUmma(recipe.k, **options)
    if recipe.engine == "wgmma":
        from oproj_lib.kernels.wgmma import OprojWgmma

        return program.build_wgmma, OprojWgmma(recipe.k, **options)
    raise ValueError(f"engine = {recipe.engine!r} has no recipe; choose producer, direct, umma or wgmma")
