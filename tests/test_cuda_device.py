"""Launching on a GPU, without one: arguments, launch attributes, errors, mailboxes. A stand-in driver takes the
calls, with the real bindings' structures; one test at the end needs a GPU."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from stand_in_driver import HOPPER, Launch, Projections, StandIn, StandInGpu, simulated
from test_doctor import H200

from oproj_lib import bundle, doctor, notebook_intro
from oproj_lib.devices import CudaError, DeviceError, choose_device, cuda, publishing
from oproj_lib.devices.cuda import pack
from oproj_lib.doctor import Cuda
from oproj_lib.problem import N, Problem
from oproj_lib.program import Parameter, Program, build_producer
from oproj_lib.run import SLOT, SLOTS, delivery_findings, judge, launch_on_cuda, producer_for, run_producer

PARAMETERS = (
    Parameter("x", "tensor", "bfloat16", (2, 768)),
    Parameter("table", "address", "int64", ()),
    Parameter("slot", "scalar", "int32", ()),
    Parameter("eps", "scalar", "float32", ()),
)


@cache
def program(ranks: int = 2, policy: str = "latent") -> Program:
    """K = 768, M = 1."""
    producer = producer_for(768, 1, transport=f"unicast:{ranks}", policy=policy)
    return build_producer(producer, target="sm_90a", batch=1, mailbox_slots=SLOTS, mailbox_tokens=1)


def x_tensor(*shape: int) -> torch.Tensor:
    return torch.zeros(shape or (2, 768), dtype=torch.bfloat16)


# ---- arguments ----


def test_arguments_become_c_values_in_order() -> None:
    x, table = x_tensor(), torch.zeros(2, dtype=torch.int64)
    values = pack(PARAMETERS, (x, table, np.int64(-3), 1e-5), "cpu")
    assert [type(value) for value in values] == [
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int32,
        ctypes.c_float,
    ]
    assert (values[0].value, values[1].value, values[2].value) == (x.data_ptr(), table.data_ptr(), -3)
    assert values[3].value == np.float32(1e-5)
    assert pack(PARAMETERS, (x, 2**47, 0, 0.0), "cpu")[1].value == 2**47


def misaligned() -> torch.Tensor:
    return torch.zeros(2 * 768 + 8, dtype=torch.bfloat16)[1 : 1 + 2 * 768].view(2, 768)


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, np.zeros((2, 768)), "x is a ndarray: it must be a torch tensor on cpu"),
        (0, x_tensor().to("meta"), "x is on meta: it must be on cpu"),
        (0, x_tensor().float(), "x is float32: the kernel was built for bfloat16"),
        (0, x_tensor(3, 768), r"x has shape \(3, 768\): the kernel was built for \(2, 768\)"),
        (0, x_tensor(768, 2).T, r"x of shape \(2, 768\) has strides \(1, 2\).*copy it first"),
        (0, misaligned(), r"x starts at address 0x\w+, 2 bytes past a multiple of 16"),
        (1, 2**63, "table = 9223372036854775808 is outside int64"),
        (1, "0x10", "table = '0x10' is a str: it must be an integer"),
        (2, 2**31, "slot = 2147483648 is outside int32, -2147483648 to 2147483647"),
        (2, 1.0, "slot = 1.0 is a float: it must be an integer"),
        (2, True, "slot = True is a bool: it must be an integer"),
    ],
)
def test_what_does_not_fit_a_parameter_is_refused(index: int, value: Any, message: str) -> None:
    arguments: list[Any] = [x_tensor(), 0, 1, 0.0]
    arguments[index] = value
    with pytest.raises(ValueError, match=message):
        pack(PARAMETERS, arguments, "cpu")


def test_the_number_of_arguments_and_the_types_are_checked() -> None:
    with pytest.raises(
        ValueError, match=r"1 arguments for 4 parameters: the kernel takes \(x, table, slot, eps\)"
    ):
        pack(PARAMETERS, (x_tensor(),), "cpu")
    with pytest.raises(ValueError, match="n is a float16: choose from int32, int64, float32"):
        pack((Parameter("n", "scalar", "float16", ()),), (1,), "cpu")


# ---- loading and launching ----


def test_a_launch_is_what_the_program_says() -> None:
    seen: list[Launch] = []
    kernel = StandInGpu(StandIn(seen.append)).program(program())
    mailbox, table = x_tensor(SLOTS, 1, N), torch.zeros(2, dtype=torch.int64)
    x, weight = x_tensor(1, 768), x_tensor(N, 768)
    kernel(x, weight, mailbox, table, 1)
    kernel(x, weight, mailbox, table, 1, stream=99, pdl=False)
    first, second = seen
    assert (first.entry, first.grid, first.block) == (program().entry, (112, 1, 1), (512, 1, 1))
    assert first.shared_bytes == program().dynamic_shared_bytes > 0
    assert (first.stream, second.stream) == (7, 99)
    # cudaLaunchAttributeProgrammaticStreamSerialization holds one int: 1 is "allowed".
    assert first.attributes == {"PROGRAMMATIC_STREAM_SERIALIZATION": b"\1" + bytes(11)}
    assert second.attributes == {}


def test_values_reach_the_driver_in_order() -> None:
    read: list[int] = []

    def run(launch: Launch) -> None:
        read.extend(launch.value(i, ctypes.c_uint64) for i in range(4))
        read.append(launch.value(4, ctypes.c_int32))

    kernel = StandInGpu(StandIn(run)).program(program())
    tensors = (x_tensor(1, 768), x_tensor(N, 768), x_tensor(SLOTS, 1, N), torch.zeros(2, dtype=torch.int64))
    kernel(*tensors, 1)
    assert read == [*(tensor.data_ptr() for tensor in tensors), 1]


def test_shared_memory_is_granted_and_the_cubin_goes_in_unchanged() -> None:
    driver = StandIn()
    StandInGpu(driver).program(program(), carveout=100)
    granted = {which.name: value for _, which, value in driver.named("cuFuncSetAttribute")}
    assert granted == {
        "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES": program().dynamic_shared_bytes,
        "CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT": 100,
    }
    assert driver.named("cuModuleLoadData") == [(program().cubin,)]
    with pytest.raises(ValueError, match="carveout = 101: a percentage, choose 0 to 100"):
        StandInGpu(driver).program(program(), carveout=101)


def test_ptx_gets_the_nul_that_a_c_string_needs() -> None:
    driver = StandIn()
    StandInGpu(driver).load(b".version 8.0", "k")
    assert driver.named("cuModuleLoadData") == [(b".version 8.0\0",)]


def test_a_cluster_is_a_launch_attribute() -> None:
    seen: list[Launch] = []
    kernel = StandInGpu(StandIn(seen.append)).program(replace(program(), cluster=(2, 1, 1)))
    kernel(x_tensor(1, 768), x_tensor(N, 768), x_tensor(SLOTS, 1, N), 16, 1, pdl=False)
    assert seen[0].attributes == {"CLUSTER_DIMENSION": bytes([2, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0])}


def test_a_program_of_another_architecture_is_refused_before_it_is_loaded() -> None:
    driver = StandIn(attributes={**HOPPER, "COMPUTE_CAPABILITY_MAJOR": 10})
    with pytest.raises(ValueError, match=r"built for sm_90a, compute capability 9\.0; GPU 0, .*, has 10\.0"):
        StandInGpu(driver).program(program())
    assert not driver.named("cuModuleLoadData")


# ---- errors ----


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        ("cuInit", "CUDA_ERROR_NO_DEVICE", ("opening GPU 0", "nvidia-smi")),
        (
            "cuModuleLoadData",
            "CUDA_ERROR_NO_BINARY_FOR_GPU",
            ("loading the kernel", "another architecture"),
        ),
        ("cuModuleGetFunction", "CUDA_ERROR_NOT_FOUND", ("no kernel of that name",)),
        (
            "cuFuncSetAttribute",
            "CUDA_ERROR_INVALID_VALUE",
            ("setting MAX_DYNAMIC_SHARED_SIZE_BYTES", "more shared memory"),
        ),
        ("cuLaunchKernelEx", "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", ("grid (112, 1, 1)", "registers")),
        ("cuCtxSynchronize", "CUDA_ERROR_ILLEGAL_ADDRESS", ("running", "start a new process")),
    ],
)
def test_an_error_says_what_was_done_and_what_usually_causes_it(
    function: str, error: str, words: tuple[str, ...]
) -> None:
    driver = StandIn(refuse={function: error})
    with pytest.raises(CudaError) as caught:
        publisher = publishing.Publisher(program(), StandInGpu(driver))
        publisher.launch(x_tensor(1, 768), x_tensor(N, 768), SLOT)
        publisher.gpu.synchronize(f"running {program().name}")
    assert caught.value.name == error
    for word in (function, error, f"text of {error}", "Usual cause: ", *words):
        assert word in str(caught.value)


def test_every_explained_error_exists() -> None:
    for name in cuda.CAUSES:
        assert hasattr(StandIn.CUresult, name), name


def test_without_a_gpu_the_reason_is_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CudaError, match=r"torch .* sees none"):
        cuda.Gpu()
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CudaError, match="torch is missing: pip install torch; cuda-bindings is missing"):
        cuda.Gpu()


# ---- publishing ----


def test_what_no_thread_wrote_is_found() -> None:
    def spoil(number: int, out: np.ndarray) -> None:
        out[0, 5] = publishing.LATENT_PATTERN

    gpu = StandInGpu(StandIn(Projections([program()], spoil)))
    x, weight = Problem(16, 1).inputs(0)
    mailboxes, _ = launch_on_cuda(program(), x, weight, gpu=gpu)
    assert delivery_findings(mailboxes, 1) == [
        f"unwritten output: mailbox of rank {rank}: 1 elements never published, first token 0 column 5"
        for rank in range(2)
    ]


def test_a_kernel_that_may_publish_negative_zero_is_armed_with_a_nan() -> None:
    def spoil(number: int, out: np.ndarray) -> None:
        out[0, 5] = 0x8000

    plain = program(1, "plain")
    gpu = StandInGpu(StandIn(Projections([plain], spoil)))
    mailboxes, _ = launch_on_cuda(plain, *Problem(16, 1).inputs(0), gpu=gpu)
    assert delivery_findings(mailboxes, 1) == []
    assert mailboxes[0].array.view(np.uint16)[0, 0, 0] == publishing.PLAIN_PATTERN


def test_a_multicast_program_needs_several_gpus() -> None:
    multicast = replace(program(), config={**program().config, "transport": "multicast"})
    with pytest.raises(
        ValueError, match=r"publishes by multicast, which needs .* build it with transport 'unicast"
    ):
        publishing.Publisher(multicast, StandInGpu(StandIn()))


# ---- the path of `run` ----


def gpus(*found: doctor.Gpu, launch_problem: str | None = None) -> Callable[[], Cuda]:
    return lambda: Cuda("13.0", found, None, launch_problem)


def test_auto_takes_a_gpu_of_the_target_and_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_cuda", gpus(H200))
    assert choose_device("auto", "producer", "sm_90a") == (
        "cuda",
        "GPU 0, NVIDIA H200, has compute capability 9.0",
    )
    assert choose_device("auto", "producer", "sm_100a")[0] == "vgpu"
    assert choose_device("auto", "producer", "sm_90a", vgpu_only=("a", "b")) == ("vgpu", "a")
    with pytest.raises(DeviceError, match="device = 'cuda': a; choose device = 'vgpu' or 'auto'"):
        choose_device("cuda", "producer", "sm_90a", vgpu_only=("a",))
    monkeypatch.setattr(doctor, "find_cuda", gpus(H200, launch_problem="no torch"))
    assert choose_device("auto", "producer", "sm_90a") == ("vgpu", "no torch")
    with pytest.raises(DeviceError, match="device = 'cuda': no torch"):
        choose_device("cuda", "producer", "sm_90a")


def test_notebooks_that_show_counters_stay_on_the_virtual_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_cuda", gpus(H200))
    assert notebook_intro.announce("auto", "sm_90a") == "vgpu"
    assert notebook_intro.announce("auto", "sm_90a", on_gpu=True) == "cuda"
    with pytest.raises(DeviceError, match="this notebook shows counters, checks or traces"):
        notebook_intro.announce("cuda", "sm_90a")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"checks": True}, "checks = True: undefined data and races are tracked by the virtual GPU only"),
        ({"exact": True}, "exact = True chooses an arithmetic of the virtual GPU"),
        ({"schedule": 3}, "schedule = 3: only the virtual GPU's order of warps can be chosen"),
        ({"transport": "multicast"}, "transport = 'multicast' needs a multicast address over several GPUs"),
    ],
)
def test_what_only_the_virtual_gpu_can_do_is_refused_on_cuda(
    monkeypatch: pytest.MonkeyPatch, option: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(doctor, "find_cuda", gpus(H200))
    with pytest.raises(DeviceError, match=message):
        run_producer(ranks=16, batch=1, device="cuda", **option)


def test_a_run_on_cuda_is_judged_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_cuda", gpus(H200))
    sixteen = program(16)
    monkeypatch.setattr(cuda, "Gpu", lambda: StandInGpu(StandIn(Projections([sixteen]))))
    result = run_producer(ranks=16, batch=1, device="cuda", seed=3)
    assert (result.ok, result.device, result.arithmetic) == (True, "cuda", "hardware")
    assert result.configuration["transport"] == "unicast:16"
    plain = result.as_dict()
    assert plain["thread_instructions"] is None and plain["counters"] is None
    with pytest.raises(ValueError, match="a run on hardware has no report"):
        result.report  # noqa: B018
    from oproj_lib.tables import result_rows

    shown = dict(result_rows([result]))
    assert (shown["arithmetic"], shown["bank conflicts"], shown["seconds per launch"]) == (
        ["hardware"],
        ["–"],
        ["not timed"],
    )


def test_hardware_needs_neither_cute_dsl_nor_numba() -> None:
    """What `check --part programs` and `bench` import: torch, cuda-bindings, numpy, ml_dtypes, rich and tqdm."""
    missing = ("cutlass", "numba", "matplotlib", "triton", "nvidia")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({missing!r}))\n"
        "import oproj_lib.cli, oproj_lib.cli_hardware, oproj_lib.bundle, oproj_lib.hardware_check\n"
        "import oproj_lib.provenance, oproj_lib.devices.publishing, oproj_lib.bench.hardware, oproj_lib.bench.results\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.gpu
def test_hardware_publishes_the_virtual_gpus_bits() -> None:
    """K = 768, M = 1, inputs with NaN, on the first GPU. The program comes from the bundle that OPROJ_PROGRAMS
    names, where CuTe DSL is missing, or is built here."""
    folder = os.environ.get("OPROJ_PROGRAMS")
    if folder:
        programs = bundle.load(folder)
        entry = next(e for e in programs.entries if (e.engine, e.k, e.batch) == ("producer", 768, 1))
    kernel = programs.program(entry) if folder else program()
    x, weight = Problem(16, 1).inputs(5, "nan")
    mailboxes, _ = launch_on_cuda(kernel, x, weight)
    assert judge(mailboxes, x, weight, "latent")[1] == []
    bits = simulated(kernel, x, weight, publishing.unicast_ranks(kernel))
    assert np.array_equal(mailboxes[0].array[SLOT].view(np.uint16), bits)
