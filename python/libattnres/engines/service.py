# SPDX-License-Identifier: Apache-2.0
"""One call of an engine: served by libattnres where it runs natively, and otherwise left to the engine."""

from __future__ import annotations

import logging
import os

import torch

from libattnres import _core, _probe
from libattnres._api import attn_res
from libattnres._call import BATCH_INVARIANT_VARIABLE
from libattnres._dispatch import ENVIRONMENT_VARIABLE
from libattnres.backends import native

__all__ = ["Service"]

_MAX_REASONS = 16


class Service:
    """Serves calls for one engine, and says once what it serves and why it does not."""

    def __init__(self, engine: str, logger: logging.Logger, batch_invariant: bool = False) -> None:
        self.engine = engine
        self.logger = logger
        self.backend = os.environ.get(ENVIRONMENT_VARIABLE) or "native"
        # The engine's own switch; without it, the variable of libattnres decides.
        self.batch_invariant = True if batch_invariant else None
        self._devices: dict[torch.device, str | None] = {}
        self._reasons: set[str] = set()
        logger.info(
            "libattnres: backend %s%s%s",
            self.backend,
            f" ({ENVIRONMENT_VARIABLE})" if os.environ.get(ENVIRONMENT_VARIABLE) else "",
            ", batch-invariant" if batch_invariant or os.environ.get(BATCH_INVARIANT_VARIABLE) == "1" else "",
        )

    def serves(self, device: torch.device) -> bool:
        """Whether calls on a device are served at all; what is wrong with a single call is found later."""
        # A compiler decides once for all calls what only the tensors' memory tells.
        if torch.compiler.is_compiling():
            return False
        try:
            return self._devices[device] is None
        except KeyError:
            return self._prepare(device) is None

    def attn_res(
        self,
        prefix: torch.Tensor,
        delta: torch.Tensor | None,
        blocks: torch.Tensor,
        norm_weight: torch.Tensor,
        qk_weight: torch.Tensor,
        output_norm_weight: torch.Tensor | None,
        num_blocks: int,
        block_write_idx: int,
        eps: float,
        output_norm_eps: float,
    ) -> torch.Tensor | None:
        """The output, or None when nothing was written and the engine has to run the call itself."""
        if not self.serves(prefix.device):
            return None
        arguments = (
            prefix,
            delta,
            blocks,
            norm_weight,
            qk_weight,
            output_norm_weight,
            num_blocks,
            block_write_idx,
            eps,
            output_norm_eps,
        )
        try:
            if not torch.is_grad_enabled():
                return attn_res(*arguments, backend=self.backend, batch_invariant=self.batch_invariant)
            # As in the engine's operator, which autograd does not see.
            with torch.no_grad():
                return attn_res(*arguments, backend=self.backend, batch_invariant=self.batch_invariant)
        except (_core.UnsupportedError, TypeError, ValueError) as error:
            self._left(str(error))
            return None

    def _prepare(self, device: torch.device) -> str | None:
        """What stands against a device, asked once; kernels are loaded, which no graph may capture."""
        reason: str | None = None
        what = ""
        if self.backend == "native":
            if device.type != "cuda":
                reason = f"native needs CUDA tensors, these are on {device}"
            else:
                reason = native.device_reason(device.index)
        if self.backend == "native" and reason is None:
            if torch.cuda.is_current_stream_capturing():
                return None  # asked again by the next call
            try:
                _probe.warmup(device)
            except RuntimeError as error:  # such as want of memory: the engine is not to fail for that
                reason = f"kernels cannot be loaded: {error}"
            else:
                status = _probe.device_status(device.index)
                what = f" ({status.name}, kernels for sm_{status.target})"
        self._devices[device] = reason
        if reason is None:
            self.logger.info("libattnres: serves attention residuals on %s%s", device, what)
        else:
            self._left(reason)
        return reason

    def _left(self, reason: str) -> None:
        """Say once for each reason that calls are left to the engine."""
        if reason in self._reasons or len(self._reasons) >= _MAX_REASONS:
            return
        self._reasons.add(reason)
        self.logger.info("libattnres: left to %s: %s", self.engine, reason)
