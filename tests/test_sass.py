"""The machine code: the preload is still a preload, and what breaks it is noticed."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from typing import Any

import pytest

from oproj_lib import sass
from oproj_lib.cubin import resources
from oproj_lib.kernels import configuration, primitives
from oproj_lib.kernels.producer import OprojProducer
from oproj_lib.program import Program, build_producer
from oproj_lib.sass import check_sass, disassemble, find_nvdisasm

BUILDS = [
    (768, 0, 1, 0, 8, "sm_90a"),
    (768, 2, 2, 0, 9, "sm_100a"),
    (1536, 4, 1, 0, 8, "sm_90a"),
    (1536, 4, 1, 2, 64, "sm_100a"),
    (1536, 12, 1, 1, 3, "sm_90a"),
]


def build(
    k: int, staged_blocks: int, rows: int, group_tiles: int, batch: int, target: str, *, fresh: bool = False
) -> Program:
    producer = OprojProducer(k, staged_blocks=staged_blocks, rows=rows, group_tiles=group_tiles)
    cache = None if fresh else "default"
    return build_producer(
        producer, target=target, batch=batch, mailbox_slots=1, mailbox_tokens=batch, cache=cache
    )


@pytest.mark.parametrize("settings", BUILDS)
def test_the_preload_stands_before_the_wait(settings: tuple[Any, ...]) -> None:
    k = settings[0]
    report = check_sass(build(*settings))
    report.raise_for_problems()
    # 64 rows of k BF16, 16 bytes per lane and load, 512 lanes: the same total wherever the weights wait.
    assert report.weight_loads_before_wait == report.expected_weight_loads == 64 * k * 2 // (512 * 16)
    assert (report.weight_loads_after_wait, report.spills, report.stack_bytes) == (0, 0, 0)
    assert (report.waits, report.triggers) == (1, 1)
    assert 32 <= report.registers <= 128
    assert report.ok


def test_a_non_coherent_preload_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """ptxas sinks ld.global.nc below griddepcontrol.wait, although the PTX has it above."""

    @primitives.dsl_user_op
    def load_non_coherent(address: Any, offset: int, *, loc: Any = None, ip: Any = None) -> Any:
        text = f"ld.global.nc.L1::no_allocate.v4.b32 {{$0, $1, $2, $3}}, [$4+{offset}];"
        return primitives._load4(text, ("l", address), None, loc, ip)

    monkeypatch.setattr(primitives, "load_weight_chunk", load_non_coherent)
    program = build(768, 0, 1, 0, 8, "sm_90a", fresh=True)
    assert program.ptx.index("ld.global.nc") < program.ptx.index("griddepcontrol.wait")
    report = check_sass(program)
    assert not report.ok
    assert report.weight_loads_after_wait > 0
    with pytest.raises(RuntimeError, match=r"of 12 16-byte LDG weight loads stand before ACQBULK"):
        report.raise_for_problems()


def test_spills_stop_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """96 registers of weights and several ring groups: the estimate refuses it, and so it should."""
    with pytest.raises(ValueError, match="registers per thread"):
        build(1536, 0, 1, 1, 64, "sm_90a")
    monkeypatch.setattr(configuration.Configuration, "register_need", lambda self, tiles_per_group, groups: 0)
    with pytest.raises(RuntimeError, match=r"ptxas uses 128 registers .* and spills \d+ bytes per thread"):
        build(1536, 0, 1, 1, 64, "sm_90a", fresh=True)


def test_every_problem_has_a_message() -> None:
    good = build(768, 0, 1, 0, 8, "sm_90a")
    other = build(1536, 4, 1, 0, 8, "sm_90a")
    wrong = dataclasses.replace(good, config=other.config)
    text = "; ".join(check_sass(wrong).problems)
    assert "12 of 16 16-byte LDG weight loads" in text
    assert "0 of 8 16-byte LDGSTS weight loads" in text
    assert "10240 dynamic shared bytes, the plan says 100864" in text
    huge = dataclasses.replace(good, dynamic_shared_bytes=232449)
    assert any("0 static + 232449 dynamic shared bytes exceed 232448" in p for p in check_sass(huge).problems)


def test_a_trigger_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cutlass.cute.arch.griddepcontrol_launch_dependents", lambda: None)
    report = check_sass(build(768, 0, 1, 0, 8, "sm_90a", fresh=True))
    assert report.problems == ("0 PREEXIT (griddepcontrol.launch_dependents), expected 1",)


def test_disassembly_is_in_order() -> None:
    program = build(768, 0, 1, 0, 8, "sm_90a")
    (code,) = disassemble(program.cubin).values()
    addresses = [instruction.address for instruction in code]
    assert addresses == list(range(0, 16 * len(code), 16))  # 16 bytes an instruction since Volta
    assert {"LDG", "HMMA", "ACQBULK", "STS", "EXIT"} <= {instruction.name for instruction in code}
    assert any(instruction.predicate.startswith("@") for instruction in code)


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    program = build(768, 0, 1, 0, 8, "sm_90a")
    with pytest.raises(ValueError, match="engine 'umma'"):
        check_sass(dataclasses.replace(program, config={"engine": "umma"}))
    with pytest.raises(ValueError, match="nvdisasm cannot read this cubin of 7 bytes"):
        disassemble(b"no elf!")
    with pytest.raises(ValueError, match="is no 64-bit ELF file"):
        resources(b"no elf!", program.entry)
    with pytest.raises(ValueError, match="no kernel 'other' in this cubin"):
        resources(program.cubin, "other")
    assert find_nvdisasm().is_file()

    def missing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(sass.importlib.metadata, "files", missing)
    with pytest.raises(FileNotFoundError, match="nvdisasm is missing: pip install nvidia-cuda-nvdisasm"):
        find_nvdisasm()
    monkeypatch.setattr(sass.importlib.metadata, "files", lambda name: [])
    with pytest.raises(FileNotFoundError, match="without its nvdisasm program"):
        find_nvdisasm()
