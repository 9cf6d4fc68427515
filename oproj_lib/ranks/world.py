"""The processes of a run find each other: torchrun's variables, a key-value store, a process group.

Nothing here waits without a limit. A rank that is not there within the timeout is named before NCCL, whose own
bootstrap would wait silently, is started at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from oproj_lib.devices.cuda import open_driver
from oproj_lib.ranks.agreement import Agreement, RankLostError

NO_MULTICAST = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
"""Environment without which torch and NCCL create multicast objects of their own accord."""
KEYS = "oproj_lib"
"""First part of this package's keys in the store."""
START = "start"


@dataclass(frozen=True)
class Place:
    """Where torchrun has put this process."""

    rank: int
    world: int
    local_rank: int


def place_of(environment: Mapping[str, str]) -> Place:
    """From torchrun's variables. Raises ValueError where they are missing."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    lacking = [name for name in names if name not in environment]
    if lacking:
        raise ValueError(
            f"{', '.join(lacking)} not set: start with torchrun --nproc-per-node R -m oproj_lib ranks ..."
        )
    return Place(*(int(environment[name]) for name in names))


def set_multicast(environment: MutableMapping[str, str], wanted: bool) -> None:
    """Before torch.distributed starts: no multicast objects unless they are wanted.

    Raises ValueError where they are wanted and this environment forbids them.
    """
    if not wanted:
        environment.update(NO_MULTICAST)
    elif environment.get("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0") not in ("", "0"):
        raise ValueError(
            "--multicast, and TORCH_SYMM_MEM_DISABLE_MULTICAST = "
            f"{environment['TORCH_SYMM_MEM_DISABLE_MULTICAST']} in this environment forbids it: leave --multicast out"
        )


@dataclass(frozen=True)
class World:
    """All processes of a run, as one of them sees them. timeout: seconds that every rank has for every step."""

    place: Place
    store: Any
    group: Any
    timeout: float

    def agreement(self, topic: str) -> Agreement:
        """An agreement of its own for ``topic``, whose keys and failures no other one sees."""
        return agreement_on(self.store, topic, self.place, self.timeout)


def agreement_on(store: Any, topic: str, place: Place, timeout: float) -> Agreement:
    """An agreement whose keys begin with ``topic``."""
    import torch.distributed as dist

    return Agreement(dist.PrefixStore(f"{KEYS}/{topic}", store), place.rank, place.world, timeout)


def meet(place: Place, environment: Mapping[str, str], timeout: float) -> Any:
    """torch.distributed's key-value store, when every process has come to it.

    torchrun keeps the store; without it rank 0 does. Raises ValueError without its address, RankLostError with the
    missing ranks.
    """
    import torch.distributed as dist

    lacking = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if lacking:
        raise ValueError(f"{', '.join(lacking)} not set: start with torchrun, which sets them")
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    torchruns = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store: Any = dist.TCPStore(
            host,
            port,
            place.world,
            is_master=place.rank == 0 and not torchruns,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
        )
    except dist.DistError as error:
        keeper = "torchrun" if torchruns else "rank 0"
        raise RankLostError(
            f"rank {place.rank} found no key-value store at {host}:{port} within {timeout:g} s: {keeper}, which keeps "
            "it, is not there"
        ) from error
    store = dist.PrefixStore(f"attempt {environment.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    agreement = agreement_on(store, START, place, timeout)
    try:
        agreement.exchange(START, "here")
    except RankLostError as error:
        agreement.fail(str(error))
        raise
    if reason := agreement.failed():
        raise RankLostError(f"rank {place.rank} came too late: {reason}")
    return store


def join(place: Place, environment: MutableMapping[str, str], timeout: float, *, multicast: bool) -> World:
    """Start torch.distributed on this process's GPU, when every process is there.

    Raises RankLostError and ValueError as ``meet`` and ``set_multicast``, CudaError where there is no GPU.
    """
    set_multicast(environment, multicast)
    import torch
    import torch.distributed as dist

    open_driver()  # says what is missing
    store = meet(place, environment, timeout)
    torch.cuda.set_device(place.local_rank)
    dist.init_process_group(
        "nccl",
        store=dist.PrefixStore("torch", store),
        rank=place.rank,
        world_size=place.world,
        timeout=timedelta(seconds=2 * timeout),
        device_id=torch.device("cuda", place.local_rank),
    )
    return World(place, store, dist.group.WORLD, timeout)


def leave(world: World) -> None:
    """This process needs the others no more. Rank 0, which may keep the store, waits until nobody needs it, at most
    the timeout: else the others would see a lost store in place of what they were about to read."""
    agreement, topic = world.agreement("end"), "left"
    with contextlib.suppress(RankLostError):  # whoever failed has said so already, and nothing is left to do
        agreement.tell(topic, "")
        if world.place.rank == 0:
            agreement.wait(lambda: not agreement.missing(topic), "the others to leave")
