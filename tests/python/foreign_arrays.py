# SPDX-License-Identifier: Apache-2.0
"""Tensors in the hands of other libraries: nothing but the protocols of their arrays."""

from __future__ import annotations

from typing import Any

import pytest
import torch


class Exported:
    """Nothing but the protocols of an array of some library."""

    def __init__(self, tensor: Any, **changes: Any) -> None:
        self.tensor = tensor
        self.__dict__.update(changes)


class ThroughDlpack(Exported):
    """From DLPack 1.0 on; ``old`` for before."""

    old = False
    kind: Any = None

    def __dlpack__(self, **options: Any) -> Any:
        if self.old and "max_version" in options:
            raise TypeError("unexpected keyword argument 'max_version'")
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.kind or self.tensor.__dlpack_device__()


def interface(tensor: torch.Tensor, **changes: Any) -> dict[str, Any]:
    """Of NumPy, and of CUDA arrays."""
    size = tensor.element_size()
    kinds = {torch.bfloat16: "<V2", torch.float16: "<f2", torch.float32: "<f4", torch.float64: "<f8"}
    return {
        "typestr": kinds[tensor.dtype],
        "shape": tuple(tensor.shape),
        "strides": tuple(stride * size for stride in tensor.stride()),
        "data": (tensor.data_ptr(), False),
        "version": 3,
        **changes,
    }


class ThroughInterface(Exported):
    """As a NumPy array with the dtype of ml_dtypes."""

    def __init__(self, tensor: torch.Tensor, **changes: Any) -> None:
        super().__init__(tensor)
        self.dtype = str(tensor.dtype).removeprefix("torch.")
        self.__array_interface__ = interface(tensor, **changes)


class OnCuda(Exported):
    """As a CUDA array of Numba, wherever it is."""

    def __init__(self, tensor: torch.Tensor, **changes: Any) -> None:
        super().__init__(tensor)
        self.dtype = str(tensor.dtype).removeprefix("torch.")
        self.__cuda_array_interface__ = interface(tensor, **changes)


def as_numpy(tensor: torch.Tensor) -> Any:
    """The same memory; bfloat16 by the dtype of ml_dtypes."""
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    return tensor.view(torch.int16).numpy().view(pytest.importorskip("ml_dtypes").bfloat16)
