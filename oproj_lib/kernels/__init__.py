"""Device code in CuTe DSL, and the rules that say which builds exist.

configuration   which producers exist: one frozen dataclass with all validity rules (no CuTe DSL needed)
inputs          are these arrays what a kernel was built for (NumPy, torch, CuTe)
primitives      one function per PTX instruction the kernels use
transport       where a published chunk goes: multicast or unicast
lane            who a thread is
producer        the mma.sync projection kernel

umma_configuration, umma_primitives, umma_lane, umma    the same four for the tcgen05 projection kernel
"""

from __future__ import annotations
