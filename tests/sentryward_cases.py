"""SentryWard on the PTX of this library: what it needs to read it, and one command per kernel.

    .venv/bin/python tests/sentryward_cases.py umma --k 768 --batch 8 --stages 2

docs/sentryward.md says what came out.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import sentryward

from oproj_lib.kernels.umma import OprojUmma
from oproj_lib.layouts import ring
from oproj_lib.lessons.broken import BROKEN
from oproj_lib.lessons.broken_umma import BROKEN_UMMA
from oproj_lib.lessons.mutants import without
from oproj_lib.program import Program, build_producer, build_umma
from oproj_lib.run import SLOT, SLOTS, producer_for

MULTIMEM = "multimem.st.relaxed.sys.global.v4.bf16x2"


def input_configuration(program: Program, ctas: int = 1) -> dict[str, Any]:
    """The ``input.json`` of a launch (schema spverify.kernel-input/v1): tensors and windows are pointers to
    distinct objects, the one scalar is the mailbox slot."""
    declarations, arguments = [], []
    for index, parameter in enumerate(program.parameters):
        if parameter.kind == "scalar":
            arguments.append({"parameter": index, "type": "u32", "value": SLOT})
        else:
            pointer = {"type": "pointer", "space": "global", "object": parameter.name}
            declarations.append({"parameter": index, **pointer})
    launch = {
        "grid_dim": [ctas, 1, 1],
        "block_dim": list(program.block),
        "dynamic_shared_bytes": program.dynamic_shared_bytes,
    }
    return {
        "schema": "spverify.kernel-input/v1",
        "entry": program.entry,
        "launch": launch,
        "declarations": declarations,
        "arguments": arguments,
    }


def verdict(program: Program, *, ctas: int = 1, timeout: float = 50) -> dict[str, Any]:
    """What SentryWard says about a launch of the program's PTX, within ``timeout`` seconds."""
    with tempfile.TemporaryDirectory() as folder:
        ptx, configuration = Path(folder, "kernel.ptx"), Path(folder, "input.json")
        ptx.write_text(program.ptx)
        configuration.write_text(json.dumps(input_configuration(program, ctas)))
        return sentryward.verify(ptx, input=configuration, timeout_seconds=timeout)


def plain_stores(program: Program) -> Program:
    """Multicast stores as ordinary 16-byte stores to the same address: SentryWard knows no multimem."""
    if MULTIMEM not in program.ptx:
        raise ValueError(f"{program.name}: no {MULTIMEM} in its PTX; build it with transport='multicast'")
    return replace(program, ptx=program.ptx.replace(MULTIMEM, "st.relaxed.sys.global.v4.b32"))


def lagging(program: Program) -> Program:
    """Without any bar.warp.sync: the idle lanes of the MMA warp wait on their own."""
    return replace(program, ptx=re.sub(r"bar\.warp\.sync[^;]*;", "", program.ptx))


def expecting(program: Program, arrivals: int) -> Program:
    """The full barriers expect this many arrivals instead of 256."""
    ptx, changed = re.subn(r"(mbarrier\.init[^;]*), 256;", rf"\1, {arrivals};", program.ptx)
    if not changed:
        raise ValueError(f"{program.name}: no mbarrier.init with 256 arrivals in its PTX")
    return replace(program, ptx=ptx)


def umma(k: int, batch: int, stages: int, transport: str = "multicast") -> Program:
    engine = OprojUmma(k, budget=stages * ring.stage_bytes(ring.padded_tokens(batch)), transport=transport)
    return build(engine, batch)


def build(engine: Any, batch: int, target: str = "sm_100a", cached: bool = True) -> Program:
    builder = build_umma if isinstance(engine, OprojUmma) else build_producer
    cache = "default" if cached else None
    return builder(engine, target=target, batch=batch, mailbox_slots=SLOTS, mailbox_tokens=batch, cache=cache)


def case(arguments: argparse.Namespace) -> Program:
    if arguments.engine == "umma":
        if arguments.broken:
            broken = BROKEN_UMMA[arguments.broken]
            return build(broken.build(), broken.batch, cached=False)
        return umma(arguments.k, arguments.batch, arguments.stages, arguments.transport)
    if arguments.broken:
        mistake = BROKEN[arguments.broken]
        return build(mistake.build(), mistake.batch, cached=False)
    producer = producer_for(arguments.k, arguments.batch, staged_blocks=arguments.stages)
    return build(producer, arguments.batch, arguments.target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("engine", choices=("umma", "producer"))
    parser.add_argument("--k", type=int, default=768)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--stages", type=int, default=2, help="ring stages, or staged blocks of the producer")
    parser.add_argument("--target", default="sm_90a", help="of the producer; UMMA is for sm_100a")
    parser.add_argument("--transport", default="multicast")
    parser.add_argument("--broken", help="a name in BROKEN or BROKEN_UMMA; --stages must be its own")
    parser.add_argument("--multimem", action="store_true", help="leave the multicast stores as they are")
    parser.add_argument("--lagging", action="store_true", help="take out the MMA warp's bar.warp.sync")
    parser.add_argument("--arrivals", type=int, help="arrivals that the full barriers expect")
    parser.add_argument("--without", metavar="OPCODE:N", help="take out the Nth instruction with that opcode")
    parser.add_argument("--ctas", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=120)
    arguments = parser.parse_args()
    program = case(arguments)
    if arguments.lagging:
        program = lagging(program)
    if arguments.arrivals:
        program = expecting(program, arguments.arrivals)
    if arguments.without:
        opcode, _, occurrence = arguments.without.rpartition(":")
        program = without(program, opcode, occurrence=int(occurrence))
    if arguments.transport == "multicast" and not arguments.multimem:
        program = plain_stores(program)
    start = time.perf_counter()
    said = verdict(program, ctas=arguments.ctas, timeout=arguments.timeout)
    print(f"{said['result']} in {time.perf_counter() - start:.1f} s; checks {said['checks']}")
    for diagnostic in said["diagnostics"]:
        print(f"  {diagnostic['code']}: {diagnostic.get('message')}")


if __name__ == "__main__":
    main()
