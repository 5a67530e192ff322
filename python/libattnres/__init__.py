# SPDX-License-Identifier: Apache-2.0
"""libattnres: the Attention Residuals forward operator (arXiv 2603.15031).

:func:`attn_res` runs it on the backend that the tensors and the machine deserve: native CUDA kernels,
Triton, eager PyTorch, or C++ on the CPU. Importing this package starts no CUDA context.

PyTorch is imported with the first name that needs it, so that :mod:`libattnres.array` works without. The
operator is known to PyTorch as ``torch.ops.libattnres`` as soon as both packages are imported, in any order.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from libattnres import _core
from libattnres._core import UnsupportedError

if TYPE_CHECKING:
    from libattnres import array, distributed, model_walk, nn, reference
    from libattnres._api import attn_res, explain
    from libattnres._call import Plan
    from libattnres._dispatch import Explanation
    from libattnres._probe import DeviceStatus, Probe, permutations, probe, warmup
    from libattnres._two_phase import attn_res_bank, attn_res_merge, explain_bank, explain_merge

__all__ = [
    "DeviceStatus",
    "Explanation",
    "Plan",
    "Probe",
    "UnsupportedError",
    "__version__",
    "array",
    "attn_res",
    "attn_res_bank",
    "attn_res_merge",
    "distributed",
    "explain",
    "explain_bank",
    "explain_merge",
    "model_walk",
    "nn",
    "permutations",
    "probe",
    "reference",
    "warmup",
]

__version__: str = _core.version()

_MODULES = ("array", "distributed", "model_walk", "nn", "reference")
_WITH_TORCH = {
    "DeviceStatus": "_probe",
    "Explanation": "_dispatch",
    "Plan": "_call",
    "Probe": "_probe",
    "attn_res": "_api",
    "attn_res_bank": "_two_phase",
    "attn_res_merge": "_two_phase",
    "explain": "_api",
    "explain_bank": "_two_phase",
    "explain_merge": "_two_phase",
    "permutations": "_probe",
    "probe": "_probe",
    "warmup": "_probe",
}


def _load() -> None:
    """Import what works on tensors, and register the operator with PyTorch."""
    import_module("torch")  # before the modules that do: they cannot be imported from within each other
    for name, module in _WITH_TORCH.items():
        globals()[name] = getattr(import_module(f"libattnres.{module}"), name)


def _load_unless_loading() -> None:
    """The same, but where the import of PyTorch came from a module that is imported by itself."""
    if not any(f"libattnres.{module}" in sys.modules for module in _WITH_TORCH.values()):
        _load()


def __getattr__(name: str) -> Any:
    """Import what is asked for."""
    if name in _WITH_TORCH:
        _load()
        return globals()[name]
    if name in _MODULES:
        return import_module(f"libattnres.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Names that are not imported yet as well."""
    return sorted({*globals(), *__all__})


if sys.modules.get("torch") is not None:  # None is what hides an installed module
    _load()
else:
    from libattnres import _after_import

    _after_import.call("torch", _load_unless_loading)
