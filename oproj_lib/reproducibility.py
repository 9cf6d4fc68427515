"""Which settings change the bits of the output, and which do not: what the kernels publish, run by run.

By the contract an output's bits depend on its own token and row of W, and on the order of its sum: the number of K
parts (4 * rows) and of chains. They do not depend on where weights wait, how x travels, which way results are
published, the target, the order in which warps run, or the other tokens.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import numpy as np

from oproj_lib.kernels.configuration import ROW_CHOICES, Configuration
from oproj_lib.kernels.producer import OprojProducer
from oproj_lib.problem import MAX_BATCH, Array
from oproj_lib.program import TARGETS, build_producer
from oproj_lib.run import SLOT, SLOTS, launch_on_vgpu, producer_for, transport_name


def order_of(config: Configuration) -> tuple[int, int]:
    """(K parts, chains): all that the order of a sum depends on."""
    return config.parts, config.chains


@dataclass(frozen=True)
class Setting:
    """One way to run the projection. `name` says what is different about it."""

    name: str
    config: Configuration
    target: str
    transport: str = "multicast"
    schedule: str | int = "program"
    policy: str = "latent"

    @property
    def order(self) -> tuple[int, int]:
        """(K parts, chains): all that the order of a sum depends on."""
        return order_of(self.config)


def variations(base: Setting, batch: int) -> list[Setting]:
    """Settings that differ from `base` in one thing each, as far as they fit the batch; `base` is the first."""
    config = base.config
    fewer = config.staged_blocks - 1 if config.staged_blocks else 1
    changes = {
        f"staged blocks: {fewer}": {"staged_blocks": fewer},
        "x in a ring of 1 tile": {"group_tiles": 1},
        "x in a ring of 2 tiles": {"group_tiles": 2},
        **{f"rows per warp: {rows}": {"rows": rows} for rows in ROW_CHOICES if rows != config.rows},
    }
    found = [base]
    for name, change in changes.items():
        try:
            other = Configuration(**{**asdict(config), **change})
            other.plan(batch)
        except ValueError:
            continue  # this kernel does not exist for K or the batch, so there is nothing to compare
        found.append(replace(base, name=name, config=other))
    other_target = next(target for target in TARGETS if target != base.target)
    found.append(replace(base, name=f"built for {other_target}", target=other_target))
    return [*found, replace(base, name="unicast, warps in random order", transport="unicast", schedule=1)]


def orders_by_batch(k: int) -> dict[tuple[int, int], list[int]]:
    """The batch sizes, 1 to 64, whose recommended configurations add in one order: bits stay the same among these."""
    found: dict[tuple[int, int], list[int]] = {}
    for batch in range(1, MAX_BATCH + 1):
        found.setdefault(order_of(producer_for(k, batch).config), []).append(batch)
    return found


def published(setting: Setting, x: Array, weight: Array, ranks: int) -> Array:
    """What the kernel publishes, BF16 [M, 7168], on the virtual GPU with the tensor core's own arithmetic.

    Args:
        x: [M, K] bfloat16; weight: [7168, K] bfloat16.

    Raises:
        ValueError: if the configuration does not fit the batch.
    """
    batch, k = x.shape
    transport = transport_name(setting.transport, ranks)
    config = setting.config
    producer = OprojProducer(
        k,
        staged_blocks=config.staged_blocks,
        rows=config.rows,
        group_tiles=config.group_tiles,
        transport=transport,
        policy=setting.policy,
    )
    producer.plan(batch)
    program = build_producer(
        producer, target=setting.target, batch=batch, mailbox_slots=SLOTS, mailbox_tokens=batch
    )
    mailboxes, _, _ = launch_on_vgpu(program, x, weight, ranks=ranks, exact=True, schedule=setting.schedule)
    return np.array(mailboxes[0].array[SLOT, :batch])
