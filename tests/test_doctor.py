"""What `doctor` says about machines: this one, and others through a stand-in for the CUDA driver."""

from __future__ import annotations

import io
import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from oproj_lib import doctor
from oproj_lib.doctor import Cuda, Gpu

H200 = Gpu(0, "NVIDIA H200", (9, 0), 132, 141 * 2**30, True)
B200 = Gpu(1, "NVIDIA B200", (10, 0), 148, 180 * 2**30, False)
GB300 = Gpu(0, "NVIDIA GB300", (10, 3), 160, 288 * 2**30, True)
BOTH = ("vgpu", "cuda")


class Driver:
    """Answers like the module cuda.bindings.driver for the given GPUs; `refuse` is a function that fails."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=SimpleNamespace(name="CUDA_SUCCESS"))
    NO_DEVICE = SimpleNamespace(name="CUDA_ERROR_NO_DEVICE")

    def __init__(self, *gpus: Gpu, version: int = 13010, refuse: str = "") -> None:
        names = (
            "COMPUTE_CAPABILITY_MAJOR",
            "COMPUTE_CAPABILITY_MINOR",
            "MULTIPROCESSOR_COUNT",
            "MULTICAST_SUPPORTED",
        )
        self.CUdevice_attribute = SimpleNamespace(**{f"CU_DEVICE_ATTRIBUTE_{name}": name for name in names})
        self.gpus = gpus
        self.version = version
        self.refuse = refuse

    def __getattr__(self, function: str) -> Any:
        answers: dict[str, Any] = {
            "cuInit": lambda flags: (),
            "cuDriverGetVersion": lambda: (self.version,),
            "cuDeviceGetCount": lambda: (len(self.gpus),),
            "cuDeviceGet": lambda index: (index,),
            "cuDeviceGetName": lambda size, device: (self.gpus[device].name.encode().ljust(size, b"\0"),),
            "cuDeviceTotalMem": lambda device: (self.gpus[device].memory,),
            "cuDeviceGetAttribute": self.attribute,
        }

        def call(*arguments: Any) -> tuple[Any, ...]:
            if function == self.refuse:
                return (self.NO_DEVICE, *(None for _ in answers[function](*arguments)))
            return (self.CUresult.CUDA_SUCCESS, *answers[function](*arguments))

        return call

    def attribute(self, name: str, device: int) -> tuple[int]:
        gpu = self.gpus[device]
        values = {
            "COMPUTE_CAPABILITY_MAJOR": gpu.capability[0],
            "COMPUTE_CAPABILITY_MINOR": gpu.capability[1],
            "MULTIPROCESSOR_COUNT": gpu.multiprocessors,
            "MULTICAST_SUPPORTED": int(gpu.multicast),
        }
        return (values[name],)


def text(machine: doctor.Machine) -> str:
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(doctor.render(machine))
    return console.export_text()


def test_this_machine_as_tables_and_as_json() -> None:
    machine = doctor.examine()
    assert machine.cores >= 1 and machine.memory > 2**30
    assert machine.executable == sys.executable
    assert (machine.packages["nvidia-cutlass-dsl"] or "").startswith("4.8.")
    assert machine.nvdisasm is not None and machine.nvdisasm.endswith("nvdisasm")
    assert json.loads(json.dumps(machine.as_dict()))["cuda"]["problem"] == machine.cuda.problem
    shown = text(machine)
    for expected in (
        "CuTe DSL (nvidia-cutlass-dsl)",
        machine.python,
        "nvdisasm",
        "producer",
        "sm_90a",
        "sm_100a",
    ):
        assert expected in shown


def test_gpus_are_what_the_driver_says() -> None:
    assert doctor.query(Driver(H200, B200)) == Cuda("13.1", (H200, B200), None)


def test_no_gpu_and_no_start_are_told_apart() -> None:
    assert doctor.query(Driver()) == Cuda("13.1", (), "the CUDA driver sees no GPU")
    assert doctor.query(Driver(H200, refuse="cuInit")) == Cuda(
        None, (), "the CUDA driver does not start: CUDA_ERROR_NO_DEVICE"
    )


def test_a_driver_that_refuses_a_question_is_an_error() -> None:
    with pytest.raises(
        RuntimeError, match=r"cuDeviceTotalMem\(0,\) of the CUDA driver failed: CUDA_ERROR_NO_DEVICE"
    ):
        doctor.query(Driver(H200, refuse="cuDeviceTotalMem"))


def test_the_real_bindings_have_what_is_asked_for() -> None:
    from cuda.bindings import driver

    for name in (
        "COMPUTE_CAPABILITY_MAJOR",
        "COMPUTE_CAPABILITY_MINOR",
        "MULTIPROCESSOR_COUNT",
        "MULTICAST_SUPPORTED",
    ):
        assert hasattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    for name in ("cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName"):
        assert callable(getattr(driver, name))
    assert callable(driver.cuDeviceTotalMem) and callable(driver.cuDeviceGetAttribute)


@pytest.mark.parametrize(
    ("gpus", "launchers", "expected"),
    [
        (
            (H200,),
            BOTH,
            [
                ("cuda", "GPU 0, NVIDIA H200, has compute capability 9.0"),
                ("vgpu", "sm_100a needs compute capability 10.0; NVIDIA H200 has 9.0"),
            ],
        ),
        (
            (H200, B200),
            BOTH,
            [
                ("cuda", "GPU 0, NVIDIA H200, has compute capability 9.0"),
                ("cuda", "GPU 1, NVIDIA B200, has compute capability 10.0"),
            ],
        ),
        # sm_100a is architecture-specific: compute capability 10.3 does not run it
        (
            (GB300,),
            BOTH,
            [
                ("vgpu", "sm_90a needs compute capability 9.0; NVIDIA GB300 has 10.3"),
                ("vgpu", "sm_100a needs compute capability 10.0; NVIDIA GB300 has 10.3"),
            ],
        ),
        ((H200, B200), ("vgpu",), [("vgpu", "this version launches on the virtual GPU only")] * 2),
    ],
)
def test_where_engines_run(
    gpus: tuple[Gpu, ...], launchers: tuple[str, ...], expected: list[tuple[str, str]]
) -> None:
    places = doctor.placements(Cuda("13.1", gpus, None), launchers)
    assert [(place.engine, place.target) for place in places] == [
        ("producer", "sm_90a"),
        ("producer", "sm_100a"),
        ("umma", "sm_100a"),
        ("wgmma", "sm_90a"),
    ]
    # Where an engine runs depends on its target alone: umma runs where producer's sm_100a does.
    assert [(place.device, place.why) for place in places] == [*expected, expected[1], expected[0]]


def test_where_engines_run_without_a_driver() -> None:
    places = doctor.placements(Cuda(None, (), "no CUDA driver"), BOTH)
    assert [(place.device, place.why) for place in places] == [("vgpu", "no CUDA driver")] * 4


def test_gpus_are_shown() -> None:
    machine = doctor.examine()
    shown = text(doctor.Machine(**{**machine.__dict__, "cuda": Cuda("13.1", (H200, B200), None)}))
    for expected in ("NVIDIA H200", "9.0", "132", "141 GiB", "yes", "no", "driver 13.1"):
        assert expected in shown


def test_a_torch_without_a_gpu_is_why_nothing_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor.torch_problem() == (
        f"launching on a GPU needs a torch that sees one, and torch {torch.__version__} does not"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert doctor.torch_problem() is None
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert doctor.torch_problem() == "launching on a GPU needs torch, which is not installed"
    problem = doctor.torch_problem()
    places = doctor.placements(Cuda("13.1", (H200,), None, problem))
    assert {(place.device, place.why) for place in places} == {("vgpu", problem)}
