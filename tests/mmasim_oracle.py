"""mmasim's Hopper tensor core as the `mma` of `contract.expected_bits`."""

from __future__ import annotations

import numpy as np
import torch
from mmasim.nv_ptx import MMA, WGMMA, TCGen05MMA


def hopper_bf16(accumulator: np.ndarray, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """accumulator [M, 16] + x [M, 16] weight [16, 16]^T for M a multiple of 8, as m16n8k16 with the weights
    as A."""
    model = MMA("Hopper", "m16n8k16.f32.bf16.bf16.f32")
    result = np.empty_like(accumulator)
    a = torch.from_numpy(np.ascontiguousarray(weight)).to(torch.bfloat16)
    for token in range(0, x.shape[0], 8):
        b = torch.from_numpy(np.ascontiguousarray(x[token : token + 8].T)).to(torch.bfloat16)
        c = torch.from_numpy(np.ascontiguousarray(accumulator[token : token + 8].T))
        result[token : token + 8] = model(a, b, c).numpy().T
    return result


def blackwell_bf16(accumulator: np.ndarray, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """accumulator [8, 64] + x [8, 16] weight [64, 16]^T, as tcgen05.mma m64n8k16 with the weights as A."""
    model = TCGen05MMA("Blackwell", "m64n8k16.kind::f16.f32.bf16.bf16")
    a = torch.from_numpy(np.ascontiguousarray(weight)).to(torch.bfloat16)
    b = torch.from_numpy(np.ascontiguousarray(x.T)).to(torch.bfloat16)
    return model(a, b, torch.from_numpy(np.ascontiguousarray(accumulator.T))).numpy().T


def hopper_wgmma_bf16(accumulator: np.ndarray, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """accumulator [8, 64] + x [8, 16] weight [64, 16]^T, as wgmma m64n8k16 with the weights as A."""
    model = WGMMA("Hopper", "m64n8k16.f32.bf16.bf16")
    a = torch.from_numpy(np.ascontiguousarray(weight)).to(torch.bfloat16)
    b = torch.from_numpy(np.ascontiguousarray(x.T)).to(torch.bfloat16)
    return model(a, b, torch.from_numpy(np.ascontiguousarray(accumulator.T))).numpy().T
