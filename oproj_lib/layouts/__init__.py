"""Where every byte goes, in plain integer arithmetic.

The functions here use only ``+ - * // %`` on whole numbers. The CuTe DSL kernels call them with traced 32-bit
integers, the notebooks and the pictures call them with Python ``int`` (or NumPy integer arrays), so a drawing
of a layout is a drawing of what the kernel does.

fragments       registers of one lane: which weight row and which K column they hold, the K permutation
shared_memory   staged weight units, padded x rows, padded partial tiles, the two ring buffers
schedule        8-token tiles, tiles per group, groups
publish         which thread sends which 16-byte chunk
mailbox         slots and generations, records of the state, shards and owners, who consumes which chunk
attnres         chunks of a row among threads, and the sums that a CTA shares
banks           bank conflicts of a warp-wide shared-memory access
swizzle         the 32, 64 and 128-byte swizzles (these also need ^ & >>)
ring            stages, barriers and parities of the ring, the tile that overlays it, who publishes what
tmem            tensor memory: columns, lanes of the rows of D, addresses
wgmma           registers of a warpgroup: which thread holds which element of D
descriptors     shared-memory descriptors of tcgen05.mma and wgmma, instruction descriptors, bit by bit
"""

from __future__ import annotations
