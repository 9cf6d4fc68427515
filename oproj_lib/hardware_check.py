"""Does hardware agree? Every program of a bundle is launched many times and compared bit for bit.

Three comparisons, each a finding where it fails: the published bits with the virtual GPU's exact arithmetic
(recorded in the bundle), every further launch with the first one, and the result with float64. The mailboxes
are armed before every launch, so an element that no thread wrote is a finding as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from oproj_lib import problem
from oproj_lib.bundle import Bundle, Entry, Expected, sha256, versions
from oproj_lib.delivery import SLOT, delivery_findings
from oproj_lib.devices.cuda import Gpu
from oproj_lib.devices.publishing import Publisher, upload
from oproj_lib.problem import Problem
from oproj_lib.provenance import Provenance

DATA_FORMAT = 1
WHAT = "oproj_lib check on hardware"
Progress = Callable[[str], None]


@dataclass(frozen=True)
class CaseResult:
    """One program and one kind of inputs. identical: to the virtual GPU's bits; registers as loaded."""

    label: str
    engine: str
    k: int
    batch: int
    kind: str
    seed: int
    launches: int
    identical: bool
    error: float
    tolerance: float
    registers: int
    local_bytes: int
    out_sha256: str
    findings: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.findings


@dataclass(frozen=True)
class Inputs:
    """One set of inputs and the programs that get it."""

    ranks: int
    batch: int
    kind: str
    seed: int

    def draw(self, expected: Expected) -> tuple[np.ndarray, np.ndarray]:
        """(x, weight). Raises ValueError where this machine draws other numbers than the bundle's did."""
        x, weight = Problem(self.ranks, self.batch).inputs(self.seed, self.kind)
        for name, array, wanted in (("x", x, expected.x_sha256), ("weight", weight, expected.weight_sha256)):
            if sha256(array) != wanted:
                raise ValueError(
                    f"{name} for {self} differs from the bundle's: the random numbers of numpy "
                    f"{versions()['numpy']} are not those of the version that made it; use that one, or build the "
                    "bundle with this one"
                )
        return x, weight


def check_bundle(
    bundle: Bundle,
    gpu: Gpu,
    *,
    launches: int = 20,
    keep: Path | None = None,
    progress: Progress | None = None,
) -> tuple[CaseResult, ...]:
    """Launch every program of ``bundle`` on ``gpu``, ``launches`` times per kind of inputs, and compare.

    keep: a folder for outputs that differ, as .npy. Results come in the bundle's order.

    Raises ValueError for a bundle of another target or without programs, for inputs that come out otherwise
    here, and for fewer than 1 launch; CudaError when the GPU refuses.
    """
    if launches < 1:
        raise ValueError(f"launches = {launches}: at least 1")
    if not bundle.entries:
        raise ValueError(f"{bundle.directory} holds no programs")
    publishers = {entry.label: Publisher(bundle.program(entry), gpu) for entry in bundle.entries}
    results: dict[tuple[str, str], CaseResult] = {}
    for inputs, cases in _by_inputs(bundle.entries).items():
        x, weight = inputs.draw(cases[0][1])
        device_x, device_weight = upload(x, gpu.tensors), upload(weight, gpu.tensors)
        verdicts: dict[str, problem.Verdict] = {}
        for entry, expected in cases:
            publisher = publishers[entry.label]
            run = _Run(publisher, device_x, device_weight, launches)
            results[entry.label, inputs.kind] = run.result(entry, expected, x, weight, verdicts, keep)
            if progress:
                progress(f"{entry.label}, {inputs.kind}")
    for publisher in publishers.values():
        publisher.close()
    return tuple(results[entry.label, case.kind] for entry in bundle.entries for case in entry.expected)


def _by_inputs(entries: Iterable[Entry]) -> dict[Inputs, list[tuple[Entry, Expected]]]:
    """Programs by the inputs they get, so that each set is drawn and uploaded once."""
    found: dict[Inputs, list[tuple[Entry, Expected]]] = {}
    for entry in entries:
        for case in entry.expected:
            inputs = Inputs(entry.ranks, entry.batch, case.kind, case.seed)
            found.setdefault(inputs, []).append((entry, case))
    return found


@dataclass(frozen=True)
class _Run:
    """Launches of one program on one set of inputs."""

    publisher: Publisher
    x: Any
    weight: Any
    launches: int

    def result(
        self,
        entry: Entry,
        expected: Expected,
        x: np.ndarray,
        weight: np.ndarray,
        verdicts: dict[str, problem.Verdict],
        keep: Path | None,
    ) -> CaseResult:
        mailboxes, _ = self.publisher.run(self.x, self.weight, SLOT)
        findings = delivery_findings(mailboxes, entry.batch)
        out = mailboxes[0].array[SLOT, : entry.batch]
        digest = sha256(out)
        identical = digest == expected.out_sha256
        if not identical:
            findings.append(
                f"the bits differ from the virtual GPU's: SHA-256 {digest[:12]}, expected "
                f"{expected.out_sha256[:12]}{self.kept(out, entry, expected, keep)}"
            )
        findings += self.repeats()
        if digest not in verdicts:  # programs that sum in one order publish the same bits
            latent = self.publisher.program.config["policy"] == "latent"
            verdicts[digest] = problem.check(out, x, weight, latent=latent)
        verdict = verdicts[digest]
        findings += [f"wrong result: {reason}" for reason in verdict.reasons]
        function = self.publisher.kernel.function
        return CaseResult(
            label=entry.label,
            engine=entry.engine,
            k=entry.k,
            batch=entry.batch,
            kind=expected.kind,
            seed=expected.seed,
            launches=self.launches,
            identical=identical,
            error=verdict.measures.relative_frobenius,
            tolerance=problem.TOLERANCE,
            registers=function.attribute("NUM_REGS"),
            local_bytes=function.attribute("LOCAL_SIZE_BYTES"),
            out_sha256=digest,
            findings=tuple(findings),
        )

    def kept(self, out: np.ndarray, entry: Entry, expected: Expected, keep: Path | None) -> str:
        """Save an output that differs: where it is, as text for the finding."""
        if keep is None:
            return ""
        keep.mkdir(parents=True, exist_ok=True)
        path = keep / f"{entry.label}-{expected.kind}.npy"
        np.save(path, out.view(np.uint16))
        return f"; the output's bits are in {path}"

    def repeats(self) -> list[str]:
        """Launch again, every other time without PDL, and compare on the GPU with the launch before."""
        import torch

        publisher = self.publisher
        first = [mailbox.view(torch.int16).clone() for mailbox in publisher.mailboxes]
        for number in range(1, self.launches):
            publisher.arm()
            publisher.launch(self.x, self.weight, SLOT, pdl=publisher.program.pdl and number % 2 == 0)
            publisher.gpu.synchronize(f"running {publisher.program.name}")
            for rank, mailbox in enumerate(publisher.mailboxes):
                different = int((mailbox.view(torch.int16) != first[rank]).sum())
                if different:
                    return [
                        f"launch {number + 1} differs from launch 1 in {different} elements of rank {rank}'s mailbox: "
                        "a race, or memory that nothing wrote"
                    ]
        return []


def as_data(
    provenance: Provenance, bundle: Bundle | None, results: Iterable[CaseResult], conformance: Any = None
) -> dict[str, Any]:
    """The data file of a check, ready for json.dumps. conformance: the second part's own data."""
    return {
        "format": DATA_FORMAT,
        "what": WHAT,
        "provenance": provenance.as_dict(),
        "bundle": {"date": bundle.date, "target": bundle.target, "versions": bundle.versions}
        if bundle
        else None,
        "cases": [{**asdict(result), "ok": result.ok} for result in results],
        "conformance": conformance,
    }


def read_data(path: Path | str) -> dict[str, Any]:
    """A data file of `check`. Raises ValueError for a file of another kind."""
    data: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    if (data.get("what"), data.get("format")) != (WHAT, DATA_FORMAT):
        raise ValueError(f"{path} is no data file of `check` in format {DATA_FORMAT}")
    return data


def check_table(results: Iterable[CaseResult], title: str) -> Table:
    """One row per program: its kinds of inputs together."""
    table = Table(title=title, caption="error: against float64, the largest of the kinds; limit 2.5e-03")
    for name in ("program", "inputs", "launches", "bits", "registers", "error"):
        table.add_column(name, justify="right" if name in ("launches", "registers", "error") else "left")
    by_label: dict[str, list[CaseResult]] = {}
    for result in results:
        by_label.setdefault(result.label, []).append(result)
    for label, cases in by_label.items():
        good = all(case.ok for case in cases)
        table.add_row(
            label,
            ", ".join(case.kind for case in cases),
            str(sum(case.launches for case in cases)),
            "identical" if all(case.identical for case in cases) else "DIFFERENT",
            str(cases[0].registers),
            f"{max(case.error for case in cases):.2e}",
            style=None if good else "red",
        )
    return table
