"""What this machine can do: its GPUs, the packages that matter, and where each engine will run.

from oproj_lib import doctor
machine = doctor.examine()
rich.print(doctor.render(machine))      # tables for people
machine.as_dict()                       # plain data, for JSON
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table

PACKAGES = (
    "oproj-workbook",
    "nvidia-cutlass-dsl",
    "numpy",
    "numba",
    "ml_dtypes",
    "matplotlib",
    "torch",
    "triton",
    "cuda-bindings",
    "nvidia-cuda-nvdisasm",
    "jupyterlab",
    "papermill",
)
"""Packages whose version decides what the workbook does, by distribution name."""

CAPABILITY = {"sm_90a": (9, 0), "sm_100a": (10, 0)}
"""Compute capability that a target needs. The "a" means architecture-specific: no other capability, not even
a higher one, runs that code (PTX ISA, directive .target)."""

ENGINES = {"producer": ("sm_90a", "sm_100a"), "umma": ("sm_100a",), "wgmma": ("sm_90a",)}
"""Engines and the targets that they are built for."""

LAUNCHERS = ("vgpu", "cuda")
"""Devices that this version launches on: the virtual GPU and real ones."""


@dataclass(frozen=True)
class Gpu:
    """One CUDA device: memory in bytes; multicast says whether one address can reach several GPUs."""

    index: int
    name: str
    capability: tuple[int, int]
    multiprocessors: int
    memory: int
    multicast: bool


@dataclass(frozen=True)
class Cuda:
    """What the CUDA driver says: its version, such as "13.0", and GPUs; or why there are none.

    launch_problem: what keeps this Python from launching on them.
    """

    driver: str | None
    gpus: tuple[Gpu, ...]
    problem: str | None
    launch_problem: str | None = None


@dataclass(frozen=True)
class Placement:
    """Where an engine built for a target will run with device="auto", and why there."""

    engine: str
    target: str
    device: str
    why: str


@dataclass(frozen=True)
class Machine:
    """All that `examine` found: memory in bytes, packages by name with a version or None."""

    system: str
    processor: str
    cores: int
    memory: int
    python: str
    executable: str
    packages: dict[str, str | None]
    nvdisasm: str | None
    cuda: Cuda
    placements: tuple[Placement, ...]

    def as_dict(self) -> dict[str, Any]:
        """The same as dicts, lists, strings, numbers and None, ready for json.dumps."""
        return asdict(self)


def examine() -> Machine:
    """Look at this machine. Runs nothing on a GPU and changes nothing."""
    cuda = find_cuda()
    return Machine(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)),  # those that this process may use
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        python=platform.python_version(),
        executable=sys.executable,
        packages={name: version(name) for name in PACKAGES},
        nvdisasm=_nvdisasm(),
        cuda=cuda,
        placements=placements(cuda),
    )


def placements(cuda: Cuda, launchers: Sequence[str] = LAUNCHERS) -> tuple[Placement, ...]:
    """Where each engine will run, per target: on the first GPU of exactly its capability, else on vgpu."""
    return tuple(
        Placement(engine, target, *_place(target, cuda, launchers))
        for engine, targets in ENGINES.items()
        for target in targets
    )


def _place(target: str, cuda: Cuda, launchers: Sequence[str]) -> tuple[str, str]:
    if "cuda" not in launchers:
        return "vgpu", "this version launches on the virtual GPU only"
    if problem := cuda.problem or cuda.launch_problem:
        return "vgpu", problem
    wanted = CAPABILITY[target]
    for gpu in cuda.gpus:
        if gpu.capability == wanted:
            return "cuda", f"GPU {gpu.index}, {gpu.name}, has compute capability {_dotted(wanted)}"
    found = ", ".join(f"{gpu.name} has {_dotted(gpu.capability)}" for gpu in cuda.gpus)
    return "vgpu", f"{target} needs compute capability {_dotted(wanted)}; {found}"


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists() and (match := re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.M)):
        return match.group(1)
    return platform.processor() or platform.machine()


def _nvdisasm() -> str | None:
    """Path of the disassembler that the package nvidia-cuda-nvdisasm brought, or None."""
    try:
        files = metadata.files("nvidia-cuda-nvdisasm") or []
    except metadata.PackageNotFoundError:
        return None
    paths = [Path(str(file.locate())) for file in files if file.name in ("nvdisasm", "nvdisasm.exe")]
    return next((str(path) for path in paths if os.access(path, os.X_OK)), None)


def find_cuda() -> Cuda:
    """The CUDA driver and its GPUs, or why there are none."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return Cuda(None, (), "cuda-bindings is not installed, so no CUDA driver was looked for")
    from cuda.bindings import driver
    from cuda.pathfinder import DynamicLibNotFoundError

    try:
        found = query(driver)
    except DynamicLibNotFoundError:
        return Cuda(None, (), "no CUDA driver")
    return replace(found, launch_problem=torch_problem()) if found.gpus else found


def torch_problem() -> str | None:
    """Why this Python's torch cannot hold tensors on a GPU, or None."""
    if importlib.util.find_spec("torch") is None:
        return "launching on a GPU needs torch, which is not installed"
    import torch

    if torch.cuda.is_available():
        return None
    return f"launching on a GPU needs a torch that sees one, and torch {torch.__version__} does not"


def query(driver: Any) -> Cuda:
    """Ask the CUDA driver API, given as the module cuda.bindings.driver, for its GPUs.

    Raises:
        RuntimeError: if the driver loads and answers cuInit, but then refuses a question.
    """
    (status,) = driver.cuInit(0)
    if status != driver.CUresult.CUDA_SUCCESS:
        return Cuda(None, (), f"the CUDA driver does not start: {status.name}")

    def ask(function: str, *arguments: Any) -> Any:
        status, *values = getattr(driver, function)(*arguments)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{function}{arguments} of the CUDA driver failed: {status.name}")
        return values[0]

    version = ask("cuDriverGetVersion")  # 1000 * major + 10 * minor
    attribute = driver.CUdevice_attribute
    gpus = []
    for index in range(ask("cuDeviceGetCount")):
        device = ask("cuDeviceGet", index)
        major, minor, processors, multicast = (
            ask("cuDeviceGetAttribute", getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), device)
            for name in (
                "COMPUTE_CAPABILITY_MAJOR",
                "COMPUTE_CAPABILITY_MINOR",
                "MULTIPROCESSOR_COUNT",
                "MULTICAST_SUPPORTED",
            )
        )
        name = ask("cuDeviceGetName", 256, device).split(b"\0")[0].decode()
        memory = ask("cuDeviceTotalMem", device)
        gpus.append(Gpu(index, name, (major, minor), processors, memory, bool(multicast)))
    problem = None if gpus else "the CUDA driver sees no GPU"
    return Cuda(f"{version // 1000}.{version % 1000 // 10}", tuple(gpus), problem)


def render(machine: Machine) -> Group:
    """Tables for a terminal or a notebook: the machine, its GPUs if any, and where each engine runs."""
    return Group(
        *filter(None, (_machine_table(machine), _gpu_table(machine.cuda), _placement_table(machine)))
    )


def _machine_table(machine: Machine) -> Table:
    table = Table("this machine", "", title="doctor", title_justify="left")
    table.add_row("system", machine.system)
    table.add_row("processor", f"{machine.processor}, {machine.cores} cores")
    table.add_row("memory", f"{machine.memory / 2**30:.1f} GiB")
    table.add_row("Python", f"{machine.python} ({machine.executable})")
    for name, version in machine.packages.items():
        table.add_row(
            "CuTe DSL (nvidia-cutlass-dsl)" if name == "nvidia-cutlass-dsl" else name,
            version or "not installed",
        )
    table.add_row("nvdisasm", machine.nvdisasm or "not found")
    table.add_row("CUDA", machine.cuda.problem or f"driver {machine.cuda.driver}")
    return table


def _gpu_table(cuda: Cuda) -> Table | None:
    if not cuda.gpus:
        return None
    table = Table("GPU", "name", "capability", "SMs", "memory", "multicast")
    for gpu in cuda.gpus:
        table.add_row(
            str(gpu.index),
            gpu.name,
            _dotted(gpu.capability),
            str(gpu.multiprocessors),
            f"{gpu.memory / 2**30:.0f} GiB",
            "yes" if gpu.multicast else "no",
        )
    return table


def _placement_table(machine: Machine) -> Table:
    table = Table("engine", "target", "runs on", "because")
    for place in machine.placements:
        table.add_row(place.engine, place.target, place.device, place.why)
    return table
