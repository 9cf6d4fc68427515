"""Programs of the residual attention kernel, split and fused."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from oproj_lib.exchange_programs import result_mailbox
from oproj_lib.kernels.attnres_configuration import AttnResConfiguration
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
    from oproj_lib.kernels.attnres import AttnRes
    from oproj_lib.kernels.attnres_fused import FusedAttnRes, FusedTwoShotAttnRes


def build_attnres(
    kernel: AttnRes,
    *,
    target: str,
    mailbox_tokens: int,
    cache: Path | str | None = DEFAULT_CACHE,
) -> Program:
    """Compile the split kernel for a mailbox [3 * ranks, mailbox_tokens, 7168], or find it cached.

    Raises ValueError for an unknown target or a mailbox that cannot hold the tokens.
    """
    config = kernel.config
    slots = layout.slots_of(config.ranks)
    check_mailbox(config.tokens, slots, mailbox_tokens)
    return build_program(
        Build(
            name=f"attnres_nb{config.blocks}_m{config.tokens}_{target}",
            kernel=kernel,
            target=target,
            config={"engine": "attnres", **attnres_config(kernel)},
            parameters=(tensor("mailbox", slots, mailbox_tokens, N), *attnres_arrays(config), STATE),
            grid=config.tokens,
            threads=config.threads,
            shared_bytes=config.shared_bytes,
        ),
        cache=cache,
    )


def build_fused_attnres(
    fused: FusedAttnRes | FusedTwoShotAttnRes,
    *,
    target: str,
    mailbox_tokens: int,
    cache: Path | str | None = DEFAULT_CACHE,
) -> Program:
    """Compile an engine and AttnRes as one kernel, or find it cached; the mailboxes hold mailbox_tokens tokens.

    Raises ValueError for an unknown target, one that the engine does not run on, or mailboxes that cannot hold
    the tokens.
    """
    engine, config = fused.engine, fused.attnres.config
    of = engine_name(engine, target)
    name, ranks, columns = "fused_attnres", config.ranks, N
    more: dict[str, int | str] = {}
    extra: tuple[Parameter, ...] = ()
    if engine.twoshot:
        second = fused.second  # type: ignore[union-attr]
        name, ranks, columns = "fused_two_shot_attnres", second.ranks, second.shard
        more = {"result_transport": second.transport.name, "second_kernel": kernel_identity(type(second))}
        extra = (
            result_mailbox(mailbox_tokens),
            Parameter("result_mc", "address", "int64", ()),
            Parameter("result_state", "address", "int64", ()),
        )
    mailbox = (layout.slots_of(ranks), mailbox_tokens, columns)
    check_mailbox(config.tokens, *mailbox)
    return build_program(
        Build(
            name=f"{name}_{of}_k{engine.config.k}_nb{config.blocks}_m{config.tokens}_{target}",
            kernel=fused,
            target=target,
            config={
                **engine_config(engine, config.tokens, mailbox),
                **attnres_config(fused.attnres),
                **more,
                "engine": name,
                "of": of,
                "engine_kernel": kernel_identity(type(engine)),
            },
            parameters=(*engine_parameters(engine, config.tokens, mailbox), *extra, *attnres_arrays(config)),
            grid=CTAS,
            threads=engine.threads,
            shared_bytes=fused.shared_bytes,
        ),
        cache=cache,
    )


def attnres_arrays(config: AttnResConfiguration) -> tuple[Parameter, ...]:
    """The arguments that are AttnRes' own."""
    return (
        tensor("prefix", config.tokens, N),
        tensor("blocks", config.tokens, config.block_rows, N),
        tensor("norm_weight", N),
        tensor("qk_weight", N),
        tensor("out_weight", N),
        tensor("out", config.tokens, N),
    )


def attnres_config(kernel: AttnRes) -> dict[str, int | str]:
    """What tells AttnRes builds apart."""
    settings: dict[str, int | str] = {
        f"attnres_{name}": repr(value) if isinstance(value, float) else int(value)
        for name, value in asdict(kernel.config).items()
    }
    return {**settings, "attnres_kernel": kernel_identity(type(kernel))}
