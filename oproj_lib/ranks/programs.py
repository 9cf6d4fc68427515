"""The chain of programs of one round, compiled for a plan, or read from a folder where CuTe DSL is not installed.

folder/ranks.json     the plan
folder/m8/0, 1, ...   saved programs of a round with 8 tokens, in launch order
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oproj_lib.layouts import mailbox as layout
from oproj_lib.presets import direct_settings
from oproj_lib.program import Program, build_producer, build_umma, build_wgmma
from oproj_lib.ranks.plan import PAYLOAD, Plan

Chain = tuple[Program, ...]
INDEX = "ranks.json"
FREE = ("rounds", "seed", "payload", "in_flight", "ctas")
"""Fields of a plan that its programs do not depend on."""


def build_chains(plan: Plan) -> dict[int, Chain]:
    """Programs of every batch of the plan, compiled or from the cache.

    Raises ValueError for what an engine or consumer cannot take, RuntimeError where CuTe DSL is missing.
    """
    return {batch: build_chain(plan, batch) for batch in sorted(set(plan.batches))}


def build_chain(plan: Plan, batch: int) -> Chain:
    """Programs of a round with ``batch`` tokens, in launch order."""
    if plan.fused:
        return (_fused(plan, batch),)
    second = [_second_shot_program(plan, batch)] if plan.twoshot else []
    return (_producer(plan, batch), *second, _consumer(plan, batch))


def engine_of(plan: Plan) -> Any:
    """The engine, in one configuration for all batches of the plan: sums do not depend on the batch then."""
    from oproj_lib.kernels.direct import OprojProducerDirect
    from oproj_lib.kernels.producer import OprojProducer
    from oproj_lib.kernels.umma import OprojUmma
    from oproj_lib.kernels.wgmma import OprojWgmma

    kinds: Mapping[str, Any] = {
        "producer": OprojProducer, "direct": OprojProducerDirect, "umma": OprojUmma, "wgmma": OprojWgmma
    }  # fmt: skip
    transport = None if plan.twoshot else plan.transport_name
    options = direct_settings(plan.k) if plan.engine == "direct" else {}
    engine = kinds[plan.engine].recommended(
        plan.k, max(plan.batches), generations=True, twoshot=plan.twoshot, transport=transport, **options
    )
    for batch in plan.batches:
        engine.plan(batch)
    return engine


def _producer(plan: Plan, batch: int) -> Program:
    if plan.engine == PAYLOAD:
        from oproj_lib.ranks.payload import PayloadPublisher, build_payload

        transport = None if plan.twoshot else plan.transport_name
        publisher = PayloadPublisher(batch, twoshot=plan.twoshot, transport=transport)
        return build_payload(publisher, target=plan.target, ranks=plan.ranks, mailbox_tokens=plan.tokens)
    builders: Mapping[str, Callable[..., Program]] = {
        "producer": build_producer, "direct": build_producer, "umma": build_umma, "wgmma": build_wgmma
    }  # fmt: skip
    return builders[plan.engine](
        engine_of(plan),
        target=plan.target,
        batch=batch,
        mailbox_slots=layout.slots_of(plan.ranks),
        mailbox_tokens=plan.tokens,
        ranks=plan.ranks if plan.twoshot else 1,
    )


def _second_shot(plan: Plan, batch: int) -> Any:
    from oproj_lib.kernels.second_shot import SecondShot

    return SecondShot(plan.ranks, batch, transport=plan.transport_name)


def _second_shot_program(plan: Plan, batch: int) -> Program:
    from oproj_lib.exchange_programs import build_second_shot

    return build_second_shot(_second_shot(plan, batch), target=plan.target, mailbox_tokens=plan.tokens)


def _attnres(plan: Plan, batch: int, **options: Any) -> Any:
    from oproj_lib.kernels.attnres import AttnRes

    return AttnRes(plan.blocks, ranks=1 if plan.twoshot else plan.ranks, tokens=batch, **options)


def _consumer(plan: Plan, batch: int) -> Program:
    where: dict[str, Any] = {"target": plan.target, "mailbox_tokens": plan.tokens}
    if plan.consumer == "attnres":
        from oproj_lib.attnres_programs import build_attnres

        return build_attnres(_attnres(plan, batch), **where)
    from oproj_lib.exchange_programs import build_mailbox_reduce
    from oproj_lib.kernels.mailbox_reduce import MailboxReduce

    return build_mailbox_reduce(MailboxReduce(1 if plan.twoshot else plan.ranks), batch=batch, **where)


def _fused(plan: Plan, batch: int) -> Program:
    from oproj_lib.attnres_programs import build_fused_attnres
    from oproj_lib.exchange_programs import build_fused_reduce
    from oproj_lib.kernels.attnres_fused import FusedAttnRes, FusedTwoShotAttnRes
    from oproj_lib.kernels.fused_reduce import FusedMailboxReduce, FusedTwoShotReduce

    engine = engine_of(plan)
    where: dict[str, Any] = {"target": plan.target, "mailbox_tokens": plan.tokens}
    if plan.consumer == "attnres":
        options = {"threads": attnres_threads(plan)}
        attnres = _attnres(plan, batch, **options)
        if plan.twoshot:
            return build_fused_attnres(
                FusedTwoShotAttnRes(engine, _second_shot(plan, batch), attnres), **where
            )
        return build_fused_attnres(FusedAttnRes(engine, attnres), **where)
    if plan.twoshot:
        fused: Any = FusedTwoShotReduce(engine, _second_shot(plan, batch))
    else:
        fused = FusedMailboxReduce(engine, plan.ranks)
    return build_fused_reduce(fused, batch=batch, **where)


def attnres_threads(plan: Plan) -> int:
    """Threads of AttnRes, which are part of its summation order: fused with a ring engine, as many as publish."""
    from oproj_lib.kernels.attnres_configuration import DEFAULT_THREADS

    return 128 if plan.fused and plan.engine in ("umma", "wgmma") else DEFAULT_THREADS


# ---- folders ----


def save(plan: Plan, folder: Path | str, progress: Callable[[str], None] = lambda line: None) -> None:
    """Compile the programs of a plan into ``folder``.

    Raises ValueError for a folder with other files in it.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()) and not (folder / INDEX).exists():
        raise ValueError(f"{folder} is not empty and holds no programs of ranks: give a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    for batch, chain in build_chains(plan).items():
        for place, program in enumerate(chain):
            target = folder / f"m{batch}" / str(place)
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
            program.save(target)
            progress(f"m = {batch}: {program.name}")
    (folder / INDEX).write_text(json.dumps(plan.as_dict(), indent=1) + "\n", encoding="utf-8")


def plan_of(folder: Path | str) -> Plan:
    """The plan that ``save`` wrote beside the programs. Raises ValueError for one of another version."""
    fields = json.loads(Path(folder, INDEX).read_text(encoding="utf-8"))
    try:
        return Plan(**{**fields, "batches": tuple(fields["batches"])})
    except (KeyError, TypeError) as error:
        raise ValueError(f"{Path(folder, INDEX)} is no plan of this version: {error}") from error


def built_plan(folder: Path | str) -> Plan:
    """The plan that a folder was built for. Raises FileNotFoundError where it holds none."""
    index = Path(folder, INDEX)
    if not index.exists():
        raise FileNotFoundError(
            f"no {INDEX} in {folder}: make it with `python -m oproj_lib ranks --device cuda --local --build {folder}` "
            "and this run's options, where CuTe DSL is installed"
        )
    fields = json.loads(index.read_text(encoding="utf-8"))
    return Plan(**{**fields, "batches": tuple(fields["batches"])})


@dataclass(frozen=True)
class Task:
    """A plan to run, and the folder that its programs are in; None compiles them. name: for people, empty for one."""

    plan: Plan
    folder: Path | str | None = None
    name: str = ""

    def chains(self) -> dict[int, Chain]:
        """The programs. Raises as ``load`` and ``build_chains``."""
        return build_chains(self.plan) if self.folder is None else load(self.plan, self.folder)


def suite(folders: Sequence[Path | str]) -> list[Task]:
    """A task per folder of programs: the given ones, and those right inside a given one, by name.

    Raises FileNotFoundError for a folder with neither, ValueError for two of one name.
    """
    tasks = []
    for folder in map(Path, folders):
        inside = (
            [folder]
            if (folder / INDEX).exists()
            else sorted(path.parent for path in folder.glob(f"*/{INDEX}"))
        )
        if not inside:
            raise FileNotFoundError(
                f"no {INDEX} in {folder} or in a folder inside it: `ranks --build` makes them"
            )
        tasks += [Task(built_plan(one), one, one.name) for one in inside]
    names = [task.name for task in tasks]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two folders are called {', '.join(twice)}: results are told apart by name")
    return tasks


def load(plan: Plan, folder: Path | str) -> dict[int, Chain]:
    """Programs of a plan from a folder that ``save`` wrote.

    Raises FileNotFoundError where there are none, ValueError where they were built for another plan.
    """
    folder = Path(folder)
    built = built_plan(folder).as_dict()
    for name, value in plan.as_dict().items():
        if name not in (*FREE, "batches") and built[name] != value:
            raise ValueError(f"{folder} was built for {name} = {built[name]!r}, this run has {value!r}")
    lacking = sorted(set(plan.batches) - set(built["batches"]))
    if lacking or max(plan.batches) != max(built["batches"]):
        raise ValueError(
            f"{folder} was built for batches {built['batches']}: this run has {list(plan.batches)}; choose among them, "
            "the largest included, since it decides the engine's configuration"
        )
    chains: dict[int, Chain] = {}
    for batch in sorted(set(plan.batches)):
        places = sorted((folder / f"m{batch}").iterdir(), key=lambda path: int(path.name))
        chains[batch] = tuple(Program.load(place) for place in places)
    return chains
