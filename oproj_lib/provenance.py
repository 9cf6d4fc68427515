"""Where and when a number came from: machine, GPU, driver, versions, clocks, date, command.

Every data file of a check or a benchmark on hardware carries one, and readers show it beside the numbers.
"""

from __future__ import annotations

import datetime
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from oproj_lib import doctor
from oproj_lib.devices import DeviceError
from oproj_lib.devices.cuda import Gpu

SMI_FIELDS = (
    "name",
    "driver_version",
    "vbios_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "power.limit",
    "temperature.gpu",
    "pstate",
)
"""What nvidia-smi is asked: nothing is set, ever."""
PACKAGES = ("oproj-workbook", "numpy", "torch", "triton", "cuda-bindings", "nvidia-cutlass-dsl", "ml_dtypes")


@dataclass(frozen=True)
class Provenance:
    """One session on one GPU. clocks: nvidia-smi's answers, by the moment they were asked for."""

    gpu: str
    capability: str
    multiprocessors: int
    l2_bytes: int
    driver: str
    cuda_driver_api: str
    system: str
    processor: str
    cores: int
    python: str
    packages: Mapping[str, str | None]
    clocks: Mapping[str, Mapping[str, str]]
    date: str
    command: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @property
    def title(self) -> str:
        """`NVIDIA H200, 2026-11-29, torch 2.11.0, driver 580.159.04`"""
        torch = self.packages.get("torch")
        return f"{self.gpu}, {self.date[:10]}, torch {torch}, driver {self.driver}"


def read_provenance(fields: Mapping[str, Any]) -> Provenance:
    """From a data file. Raises ValueError where a field is missing or unknown."""
    wanted = set(Provenance.__dataclass_fields__)
    if set(fields) != wanted:
        raise ValueError(
            f"provenance lacks {sorted(wanted - set(fields))} and has unknown {sorted(set(fields) - wanted)}"
        )
    return Provenance(**fields)


def collect(gpu: Gpu, command: Sequence[str], clocks: Mapping[str, Mapping[str, str]]) -> Provenance:
    """What this machine and this GPU say about themselves now. command: the command line's words."""
    machine = doctor.examine()
    return Provenance(
        gpu=gpu.name,
        capability=f"{gpu.capability[0]}.{gpu.capability[1]}",
        multiprocessors=gpu.multiprocessors,
        l2_bytes=gpu.attribute("L2_CACHE_SIZE"),
        driver=next((answers["driver_version"] for answers in clocks.values()), "unknown"),
        cuda_driver_api=machine.cuda.driver or "unknown",
        system=machine.system,
        processor=machine.processor,
        cores=machine.cores,
        python=machine.python,
        packages={name: doctor.version(name) for name in PACKAGES},
        clocks=dict(clocks),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=" ".join(command),
    )


def smi(index: int = 0) -> dict[str, str]:
    """nvidia-smi's answers for one GPU, as text with units.

    Raises DeviceError where nvidia-smi is missing or fails: a measurement without clocks is not kept.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        raise DeviceError("nvidia-smi is not on the PATH: clocks and driver version would be unknown")
    question = [program, f"--id={index}", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader"]
    answer = subprocess.run(question, capture_output=True, text=True, timeout=60)
    if answer.returncode:
        raise DeviceError(f"nvidia-smi failed: {(answer.stderr or answer.stdout).strip()}")
    return parse_smi(answer.stdout)


def parse_smi(text: str) -> dict[str, str]:
    """One line of nvidia-smi's CSV by field. Raises DeviceError for another number of fields."""
    values = [value.strip() for value in text.strip().splitlines()[0].split(",")] if text.strip() else []
    if len(values) != len(SMI_FIELDS):
        raise DeviceError(f"nvidia-smi gave {len(values)} of {len(SMI_FIELDS)} fields: {text!r}")
    return dict(zip(SMI_FIELDS, values, strict=True))
