# SPDX-License-Identifier: Apache-2.0
"""libattnres: the Attention Residuals forward operator (arXiv 2603.15031).

:func:`attn_res` runs it on the backend that the tensors and the machine deserve: native CUDA kernels,
Triton, eager PyTorch, or C++ on the CPU. Importing this package starts no CUDA context.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from libattnres import _core
from libattnres._api import attn_res, explain
from libattnres._call import Plan
from libattnres._core import UnsupportedError
from libattnres._dispatch import Explanation
from libattnres._probe import DeviceStatus, Probe, permutations, probe, warmup

if TYPE_CHECKING:
    from libattnres import model_walk, reference

__all__ = [
    "DeviceStatus",
    "Explanation",
    "Plan",
    "Probe",
    "UnsupportedError",
    "__version__",
    "attn_res",
    "explain",
    "model_walk",
    "permutations",
    "probe",
    "reference",
    "warmup",
]

__version__: str = _core.version()


def __getattr__(name: str) -> Any:
    """Import what a plain user of the operator does not need on first use."""
    if name in ("model_walk", "reference"):
        return import_module(f"libattnres.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
