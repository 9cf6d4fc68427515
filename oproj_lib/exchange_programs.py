"""Programs of the kernels that exchange partial sums between ranks: the reduction, the second shot, and their
fused forms."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from oproj_lib.layouts import mailbox as layout
from oproj_lib.problem import CTAS, N
from oproj_lib.program import (
    DEFAULT_CACHE,
    STATE,
    Build,
    Parameter,
    Program,
    build_program,
    check_mailbox,
    engine_config,
    engine_name,
    engine_parameters,
    kernel_identity,
    tensor,
)

if TYPE_CHECKING:
    from oproj_lib.kernels.fused_reduce import FusedMailboxReduce, FusedTwoShotReduce
    from oproj_lib.kernels.mailbox import MailboxReader
    from oproj_lib.kernels.mailbox_reduce import MailboxReduce
    from oproj_lib.kernels.second_shot import SecondShot


def build_mailbox_reduce(
    reduce: MailboxReduce,
    *,
    target: str,
    batch: int,
    mailbox_tokens: int,
    cache: Path | str | None = DEFAULT_CACHE,
) -> Program:
    """Compile ``reduce`` for a mailbox [3 * ranks, mailbox_tokens, 7168] and out [batch, 7168], or find it
    cached.

    Raises ValueError for an unknown target, a batch outside 1..64, or a mailbox that cannot hold it.
    """
    layout.check_batch(batch)
    slots = layout.slots_of(reduce.ranks)
    check_mailbox(batch, slots, mailbox_tokens)
    return build_program(
        Build(
            name=f"mailbox_reduce_r{reduce.ranks}_m{batch}_{target}",
            kernel=reduce,
            target=target,
            config={
                "engine": "mailbox_reduce",
                "ranks": reduce.ranks,
                "batch": batch,
                **reader_config(reduce.reader),
            },
            parameters=(tensor("mailbox", slots, mailbox_tokens, N), tensor("out", batch, N), STATE),
            grid=CTAS,
            threads=layout.consumer_threads(batch),
        ),
        cache=cache,
    )


def build_second_shot(
    second: SecondShot,
    *,
    target: str,
    mailbox_tokens: int,
    cache: Path | str | None = DEFAULT_CACHE,
) -> Program:
    """Compile ``second`` for a receive view [3 * ranks, mailbox_tokens, 7168 / ranks] and a result mailbox
    [3, mailbox_tokens, 7168], or find it cached.

    Raises ValueError for an unknown target, or mailboxes that cannot hold the batch.
    """
    slots, batch = layout.slots_of(second.ranks), second.batch
    check_mailbox(batch, slots, mailbox_tokens, second.shard)
    return build_program(
        Build(
            name=f"second_shot_r{second.ranks}_m{batch}_{target}",
            kernel=second,
            target=target,
            config={
                "engine": "second_shot",
                "ranks": second.ranks,
                "batch": batch,
                "transport": second.transport.name,
                **reader_config(second.reader),
            },
            parameters=(
                tensor("receive", slots, mailbox_tokens, second.shard),
                result_mailbox(mailbox_tokens),
                Parameter("mc", "address", "int64", ()),
                Parameter("rank", "scalar", "int32", ()),
                Parameter("receive_state", "address", "int64", ()),
                Parameter("result_state", "address", "int64", ()),
            ),
            grid=CTAS,
            threads=second.threads,
        ),
        cache=cache,
    )


def build_fused_reduce(
    fused: FusedMailboxReduce | FusedTwoShotReduce,
    *,
    target: str,
    batch: int,
    mailbox_tokens: int,
    cache: Path | str | None = DEFAULT_CACHE,
) -> Program:
    """Compile an engine and its reduction as one kernel, or find it cached.

    x is [batch, k], out [batch, 7168]; the mailboxes hold mailbox_tokens tokens. Raises ValueError for an
    unknown target, a batch that the engine cannot take, or mailboxes that cannot hold it.
    """
    engine = fused.engine
    of = engine_name(engine, target)
    plan = engine.plan(batch)
    columns = layout.receive_columns(fused.ranks) if engine.twoshot else N
    mailbox = (layout.slots_of(fused.ranks), mailbox_tokens, columns)
    check_mailbox(batch, *mailbox)
    name = "fused_two_shot" if engine.twoshot else "fused_reduce"
    extra: tuple[Parameter, ...] = ()
    config = {
        **engine_config(engine, batch, mailbox),
        **reader_config(fused.reduce.reader),
        "of": of,
        "of_kernel": kernel_identity(type(engine)),
        "engine": name,
        "ranks": fused.ranks,
    }
    if engine.twoshot:
        config["result_transport"] = fused.second.transport.name  # type: ignore[union-attr]
        extra = (
            result_mailbox(mailbox_tokens),
            Parameter("result_mc", "address", "int64", ()),
            Parameter("result_state", "address", "int64", ()),
        )
    return build_program(
        Build(
            name=f"{name}_{of}_k{engine.config.k}_m{batch}_{target}",
            kernel=fused,
            target=target,
            config=config,
            parameters=(*engine_parameters(engine, batch, mailbox), *extra, tensor("out", batch, N)),
            grid=CTAS,
            threads=engine.threads,
            shared_bytes=plan.shared_bytes,
        ),
        cache=cache,
    )


def reader_config(reader: MailboxReader) -> dict[str, str]:
    """The classes of a consumer that its own class does not name: a build with a changed one is another."""
    return {
        "reader": kernel_identity(type(reader)),
        "reader_records": kernel_identity(type(reader.generations)),
    }


def result_mailbox(tokens: int) -> Parameter:
    """The mailbox of the second shot: one slot per generation."""
    return tensor("result", layout.slots_of(1), tokens, N)
