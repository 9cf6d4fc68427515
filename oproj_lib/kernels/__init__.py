"""Device code in CuTe DSL, and the rules that say which builds exist.

configuration   which producers exist: one frozen dataclass with all validity rules (no CuTe DSL needed)
inputs          are these arrays what a kernel was built for (NumPy, torch, CuTe)
primitives      one function per PTX instruction the kernels use
transport       where a published chunk goes: multicast, unicast, or to the owner of its column (two-shot)
publishing      what every engine has for publishing: transport, policy, generation
lane            who a thread is
producer        the mma.sync projection kernel

mailbox         the Lamport protocol: polling, arming, three generations, and why they are enough
mailbox_primitives, mailbox_reduce, second_shot    its instructions; the reduction; the owner's part of two-shot
fused_reduce    an engine and the reduction, one-shot or two-shot, in one kernel

attnres_configuration, attnres_lane, attnres
                the residual attention mix over earlier blocks, the mailbox's other consumer
row_sums, float_primitives    sums over a row in a fixed order; FP32 arithmetic with fixed roundings
attnres_fused   an engine and the residual attention, one-shot or two-shot, in one kernel

ring_configuration, ring_primitives, ring_lane, ring_engine
                what the two kernels below share: the ring, its loaders, the publishing
umma_configuration, umma_primitives, umma_lane, umma
                the projection with tcgen05.mma, its accumulator in tensor memory (Blackwell)
wgmma_configuration, wgmma_primitives, wgmma
                the projection with wgmma, its accumulator in registers (Hopper)
"""

from __future__ import annotations
