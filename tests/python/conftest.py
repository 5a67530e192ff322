# SPDX-License-Identifier: Apache-2.0
"""Arguments for calls, and which tests a machine can run."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import libattnres
import pytest
import torch
from libattnres import _ops

# PyTorch keys its compiled graphs on the calls in them, not on how the ops trace: what another state of the
# ops left behind must not be run.
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR",
    os.path.join(
        tempfile.gettempdir(),
        "libattnres-inductor-" + hashlib.sha256(Path(_ops.__file__).read_bytes()).hexdigest()[:16],
    ),
)
# Graphs of a kernel or two: a pool of compilers for each process would take longer to start than they do.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# pytest listens to loggers that do not propagate, and PyTorch writes down all of a compilation for who
# listens to this one.
logging.getLogger("torch.__trace").propagate = True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU that is not there; asked of CUDA only when such a test was collected."""
    for item in items:
        wanted = [name for name in ("gpu", "sm90", "sm100") if item.get_closest_marker(name) is not None]
        if not wanted:
            continue
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
            continue
        capability = torch.cuda.get_device_capability()
        if "sm90" in wanted and capability != (9, 0):
            item.add_marker(pytest.mark.skip(reason=f"needs compute capability 9.0, this is {capability}"))
        if "sm100" in wanted and capability not in ((10, 0), (10, 3)):
            item.add_marker(pytest.mark.skip(reason=f"needs compute capability 10.x, this is {capability}"))


@pytest.fixture(autouse=True)
def _no_forced_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests choose the backend themselves."""
    monkeypatch.delenv("LIBATTNRES_BACKEND", raising=False)
    monkeypatch.delenv("LIBATTNRES_BATCH_INVARIANT", raising=False)


@dataclass(frozen=True)
class Case:
    """The arguments of one call; `with_(...)` changes some, `snapshot` copies the bytes of all."""

    prefix: Any
    delta: Any
    blocks: Any
    norm_weight: Any
    qk_weight: Any
    output_norm_weight: Any
    num_blocks: Any = 3
    block_write_idx: Any = -1
    eps: Any = 1e-5
    output_norm_eps: Any = 1e-5

    def with_(self, **changes: Any) -> Case:
        return replace(self, **changes)

    @property
    def arguments(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.__dataclass_fields__)

    def clone(self) -> Case:
        """The same values in dense memory of their own."""
        return replace(
            self,
            **{
                name: value.clone()
                for name in self.__dataclass_fields__
                if isinstance(value := getattr(self, name), torch.Tensor)
            },
        )


@pytest.fixture
def make_case() -> Callable[..., Case]:
    """Random arguments of the given sizes."""

    def make(
        num_tokens: int = 4,
        hidden_size: int = 64,
        num_bank_rows: int = 8,
        prefixes_per_row: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cpu",
        seed: int = 0,
        **changes: Any,
    ) -> Case:
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator, device=device) * scale).to(dtype)

        M, H = num_tokens, hidden_size
        case = Case(
            normal(M, H),
            normal(M, H),
            normal(M // prefixes_per_row, num_bank_rows, H),
            normal(H),
            normal(H, scale=1.5 * H**-0.5),
            normal(H),
        )
        return case.with_(**changes)

    return make


@pytest.fixture
def native_device() -> None:
    """For tests about the native kernels: there must be some for this device."""
    reason = libattnres.probe().backends["native"]
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def gpu_case(make_case: Callable[..., Case]) -> Callable[..., Case]:
    """Arguments on the GPU at the model's hidden size; bank rows that are not read hold NaN."""

    def make(**options: Any) -> Case:
        case = make_case(**{"hidden_size": 7168, "device": "cuda", **options})
        case.blocks[:, case.num_blocks :] = float("nan")
        return case

    return make
