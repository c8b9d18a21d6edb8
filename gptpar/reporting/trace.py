"""The kinds of kernels in traces of training steps, and how long they cover. Times are milliseconds."""

from __future__ import annotations

import re
from collections.abc import Iterable

COMMUNICATION, TRANSFERS = "communication", "to and from the host"
KINDS = {
    COMMUNICATION: r"nccl|symm_mem|multimem|barrier",
    TRANSFERS: r"memcpy (HtoD|DtoH)",
    "attention": r"flash|fmha|attention|sdpa|cudnn_generated",
    "products of experts": r"GroupProblemShape|grouped_(gemm|mm)",
    "matrix products": r"gemm|nvjet|cutlass|xmma|cublas|splitK|^_symmetric$",
    "routing of experts": r"sort|scatter_gather",
    "permutation of rows": r"index_?select|vectorized_gather|index_elementwise",
    "compiled pointwise": r"triton",
    "optimizer": r"adam|multi_tensor|lpnorm|(?<!^_)norm_|^_(update|numbers)$",
    "own kernels": r"^_[a-z_]+$",
    "copies": r"memcpy|memset|copy",
}
"""Kind -> a pattern of its kernels' names; the first that fits is taken. A compiled kernel is named after all that is
fused in it, so that a permutation counts with what is computed on its rows. The project's own have short names."""
OTHER = "other kernels"
HOST_UPDATE = "cpu_optimizer"
"""Category of the CPU optimizer's updates in a trace."""

Interval = tuple[float, float]
"""Begin and end."""


def kind_of(kernel: str) -> str:
    """The kind of work of a kernel, judged by its name."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, kernel, re.IGNORECASE)), OTHER)


def covered(spans: Iterable[Interval]) -> float:
    """Length of the union of the spans."""
    total, reached = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total
