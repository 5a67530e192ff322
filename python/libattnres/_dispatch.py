# SPDX-License-Identifier: Apache-2.0
"""Which backend runs a call: the argument, then ``LIBATTNRES_BACKEND``, then the first that can serve."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, Protocol, cast

import torch

from libattnres._call import Call, Plan
from libattnres._core import UnsupportedError
from libattnres._records import PlanInfo

__all__ = [
    "BACKENDS",
    "ENVIRONMENT_VARIABLE",
    "Explanation",
    "explain_call",
    "explain_first",
    "requested_backend",
    "run",
    "run_first",
]

BACKENDS = ("native", "triton", "torch", "host")
ENVIRONMENT_VARIABLE = "LIBATTNRES_BACKEND"
AUTO_ORDER = {"cuda": ("native", "triton", "torch"), "cpu": ("host", "torch")}

BATCH_VARIANT = {
    "torch": "torch cannot be batch-invariant: PyTorch's sums may change their order with the batch"
}
"""Backends whose bits may depend on the batch, and why."""

Source = Literal["argument", "plan", "LIBATTNRES_BACKEND", "auto"]


class Backend(Protocol):
    """A module of ``libattnres.backends``."""

    def unsupported(self, prefix: torch.Tensor, blocks: torch.Tensor, num_blocks: int) -> str | None:
        """Why it cannot serve such a call here, or None."""

    def forward(
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
        out: torch.Tensor,
        pdl: str,
    ) -> None:
        """Run a call whose arguments were checked."""


@dataclass(frozen=True)
class Explanation:
    """What :func:`libattnres.explain` found."""

    backend: str | None
    """The backend that this call would run on; None when none can serve it."""
    source: Source
    """What decided: the ``backend`` or ``plan`` argument, the environment variable, or the automatic rule."""
    reasons: dict[str, str]
    """Why each other backend would not run."""
    plan: PlanInfo | None
    """Kernel and launch, when the backend is native."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "backend": self.backend,
            "source": self.source,
            "reasons": dict(self.reasons),
            "plan": None if self.plan is None else dict(self.plan),
        }


def load(name: str) -> Backend:
    """The module of a backend; imported when first needed, since Triton is slow to import."""
    return cast(Backend, import_module(f"libattnres.backends.{name}"))


def requested_backend(backend: str | None, plan: Plan | None) -> tuple[str | None, Source]:
    """The forced backend (None for the automatic rule) and who forced it."""
    source: Source = "argument"
    name: str | None = backend
    if name is None and plan is None:
        name = os.environ.get(ENVIRONMENT_VARIABLE) or None
        source = "LIBATTNRES_BACKEND"
    check_backend(name, plan, "backend" if source == "argument" else ENVIRONMENT_VARIABLE)
    if name in (None, "auto"):
        return (None, "auto") if plan is None else ("native", "plan")
    return name, source


def check_backend(backend: Any, plan: Any, culprit: str = "backend") -> None:
    """Whether there is such a backend, and whether a plan goes with it."""
    if backend is not None and (not isinstance(backend, str) or backend not in (*BACKENDS, "auto")):
        known = ", ".join(map(repr, ("auto", *BACKENDS)))
        raise ValueError(f"{culprit}: expected one of {known}, got {backend!r}")
    if plan is not None:
        if not isinstance(plan, Plan):
            raise TypeError(f"plan: expected a libattnres.Plan, got {type(plan).__name__}")
        if backend not in (None, "auto", "native"):
            raise ValueError(f"plan: expected None with backend {backend!r}, got {plan}")


def unsupported(name: str, call: Call) -> str | None:
    """Why a backend cannot serve a call, as far as its module can tell before trying, or None."""
    if call.batch_invariant:
        reason = BATCH_VARIANT.get(name)
        if reason is not None:
            return reason
    return load(name).unsupported(call.prefix, call.blocks, call.num_blocks)


def refusal(name: str, call: Call, plan: Plan | None) -> str | None:
    """Why a backend cannot serve a call here, or None."""
    reason = unsupported(name, call)
    # Without tokens nothing is launched, so there is no plan that could refuse.
    if reason is not None or name != "native" or call.prefix.shape[0] == 0:
        return reason
    from libattnres.backends import native

    try:
        native.plan(call, plan)
    except UnsupportedError as error:
        return str(error)
    return None


def forward(name: str, call: Call, plan: Plan | None) -> None:
    """Run a call on one backend."""
    arguments = (
        call.prefix,
        call.delta,
        call.blocks,
        call.norm_weight,
        call.qk_weight,
        call.output_norm_weight,
        call.num_blocks,
        call.block_write_idx,
        call.eps,
        call.output_norm_eps,
        call.out,
        call.pdl,
    )
    if name == "native":
        from libattnres.backends import native

        native.forward(*arguments, plan, call.batch_invariant)
    elif name == "triton":
        from libattnres.backends import triton

        triton.forward(*arguments, call.batch_invariant)
    else:
        load(name).forward(*arguments)


def run(call: Call, backend: str | None, plan: Plan | None) -> None:
    """Run a checked call on the backend it is due.

    Raises
    ------
    UnsupportedError
        When the forced backend cannot serve it, with the reason; it never falls through.
    """
    forced, source = requested_backend(backend, plan)
    run_first(
        AUTO_ORDER[call.prefix.device.type],
        forced,
        source,
        lambda name: unsupported(name, call),
        lambda name: forward(name, call, plan),
    )


def run_first(
    order: tuple[str, ...],
    forced: str | None,
    source: Source,
    unsupported: Callable[[str], str | None],
    forward: Callable[[str], None],
) -> None:
    """Run the forced backend, or the first in ``order`` that can serve, given what each says and does."""
    if forced is not None:
        reason = unsupported(forced)
        try:
            if reason is None:
                forward(forced)
                return
        except UnsupportedError as error:
            reason = str(error)
        raise UnsupportedError(unsupported_text(forced, source, reason))
    reasons = []
    for name in order:
        reason = unsupported(name)
        try:
            if reason is None:
                forward(name)
                return
        except UnsupportedError as error:
            reason = str(error)
        reasons.append(f"{name}: {reason}")
    raise UnsupportedError("backend: expected one that can serve this call, got none; " + "; ".join(reasons))


def unsupported_text(backend: str, source: Source, reason: str) -> str:
    """Message for a forced backend that cannot serve."""
    culprit = {"argument": "backend", "plan": "plan", "auto": "backend"}.get(source, source)
    return f"{culprit}: expected a backend that can serve this call, got {backend!r}: {reason}"


def explain_call(
    call: Call,
    backend: str | None,
    plan: Plan | None,
) -> Explanation:
    """The choice that :func:`run` would make, and why not the others. Runs nothing."""
    forced, source = requested_backend(backend, plan)
    chosen, reasons = explain_first(
        call.prefix.device.type, forced, source, lambda name: refusal(name, call, plan)
    )
    native_plan: PlanInfo | None = None
    if chosen == "native" and call.prefix.shape[0] > 0:
        from libattnres.backends import native

        native_plan = native.plan(call, plan)
    return Explanation(chosen, source, reasons, native_plan)


def explain_first(
    device_type: str, forced: str | None, source: Source, refusal: Callable[[str], str | None]
) -> tuple[str | None, dict[str, str]]:
    """The choice that :func:`run_first` would make, and why not the others."""
    chosen: str | None = None
    reasons: dict[str, str] = {}
    order = AUTO_ORDER[device_type]
    # The automatic candidates first, so that "native was chosen" can be said of the later ones.
    for name in (*order, *(name for name in BACKENDS if name not in order)):
        reason = refusal(name)
        if reason is None and name == forced:
            chosen = name
        elif reason is None and forced is not None:
            reason = f"{forced} was asked for ({source})"
        elif reason is None and chosen is None and name in order:
            chosen = name
        elif reason is None and name in order:
            reason = f"{chosen} comes first"
        elif reason is None:
            reason = f"never chosen automatically for {device_type} tensors"
        if reason is not None:
            reasons[name] = reason
    return chosen, reasons
