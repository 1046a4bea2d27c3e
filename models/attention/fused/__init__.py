"""Fused attention: the operators of each device, a CPU kernel of this project, blocks of queries on a CPU, and the
choice between them.
"""

import re

import torch

from ....errors import UsageError

# 2.9 and 2.10 attend rightly, and cannot plan what is sharded.
if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < (2, 9):
    raise UsageError(
        f"torch {torch.__version__} computes wrong attention, and raises no error: birthmark needs 2.11 or later; "
        "pip install -U torch"
    )
