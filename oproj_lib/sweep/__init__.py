"""Every configuration of the contract on a GPU, bit for bit: 3,654 builds for sm_90a, too many to carry as a bundle.

points      every configuration at every batch size, in an order that covers all of them early
expected    what each must publish: the virtual GPU's bits, one run per order of summation, as SHA-256
builds      compiles in a pool of processes, on the machine with the GPU
comparison  launches what is ready, and compares
record      the data file: counts, findings, machine, versions, date, command

python -m oproj_lib.sweep expect                     # here: oproj_lib/data/sweep_expected.json
python -m oproj_lib check --part sweep --out FILE    # there; FILE becomes oproj_lib/data/sweep_h200.json
"""

from __future__ import annotations
