# SPDX-License-Identifier: Apache-2.0
"""What ``bench`` compares: the floor kernel, the backends of this library, and other packages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import libattnres
from libattnres import _core, timing
from libattnres._call import checked_call
from libattnres.cli.competitors import Competitor, Prepared, find
from libattnres.cli.verify import native_plans
from libattnres.cli.workload import Shape

__all__ = ["Contender", "backend_contender", "find_contenders"]


@dataclass(frozen=True)
class Contender:
    """One line of the comparison."""

    name: str
    backend: str
    prepare: Callable[[tuple[Any, ...], torch.Tensor], Prepared]
    """From the arguments of one set, and where its output goes."""
    pdl: str | None = None
    plan: str | None = None
    """What is changed about the plan of the native backend."""
    launched: Callable[[tuple[Any, ...], torch.Tensor], dict[str, Any] | None] = lambda arguments, out: None
    """Kernel and launch, where they are known."""
    competitor: Competitor | None = None

    def unsupported(self, shape: Shape) -> str | None:
        """Why it cannot run a shape, as far as that is known beforehand."""
        return self.competitor.unsupported(shape) if self.competitor is not None else None


def backend_contender(
    backend: str, pdl: str | None = None, override: str | None = None, **options: Any
) -> Contender:
    """A backend of this library, forced; ``override`` names what ``options`` change about its plan."""

    def prepare(arguments: tuple[Any, ...], out: torch.Tensor) -> Prepared:
        def run() -> None:
            libattnres.attn_res(*arguments, out=out, backend=backend, pdl=pdl or "wait", **options)

        return Prepared(run, lambda: (out, arguments[0], arguments[2]))

    def launched(arguments: tuple[Any, ...], out: torch.Tensor) -> dict[str, Any] | None:
        explanation = libattnres.explain(*arguments, out=out, backend=backend, pdl=pdl or "wait", **options)
        return None if explanation.plan is None else dict(explanation.plan)

    name = " ".join(filter(None, (backend, pdl, override)))
    return Contender(name, backend, prepare, pdl, override, launched)


def prepare_floor(arguments: tuple[Any, ...], out: torch.Tensor) -> Prepared:
    """The floor kernel, which does not compute the operator."""
    call = checked_call(*(*arguments, out, "wait")).core_args()

    def run() -> None:
        _core.floor(*call, torch.cuda.current_stream().cuda_stream)

    return Prepared(run, lambda: (out, arguments[0], arguments[2]))


def foreign_contender(competitor: Competitor, prepare: Callable[..., Prepared]) -> Contender:
    """Another package."""
    return Contender(
        competitor.name, competitor.name, lambda arguments, out: prepare(*arguments), competitor=competitor
    )


def find_contenders(
    device: torch.device,
    backends: Sequence[str] | None,
    pdl: Sequence[str],
    *,
    kernels: bool = False,
    batch_invariant: bool = False,
    competitors: list[str] | None = None,
) -> tuple[list[Contender], list[str]]:
    """Those of a device that were asked for, and a line for each that cannot be measured.

    Parameters
    ----------
    device : torch.device
        Where it is measured.
    backends : sequence of str, optional
        Of this library; all by default.
    pdl : sequence of str
        Modes of the backends that have any.
    kernels, batch_invariant : bool
        Also every native kernel, forced; also the native batch-invariant mode.
    competitors : list of str, optional
        Other packages; on a GPU by default those that are installed.
    """
    on_gpu = timing.is_gpu(device)
    possible = ("native", "triton", "torch") if on_gpu else ("host", "torch")
    wanted = possible if backends is None else backends
    usable = libattnres.probe().backends
    skipped = [f"{name}: not for {device}" for name in wanted if name not in possible]
    found = []
    if on_gpu and usable["native"] is None:
        found.append(Contender("floor", "floor", prepare_floor, "wait"))
    for name in possible:
        if name not in wanted:
            continue
        if usable[name] is not None:
            skipped.append(f"{name}: {usable[name]}")
            continue
        modes = pdl if name in ("native", "triton") else (None,)
        found += [backend_contender(name, mode) for mode in modes]
        if name != "native":
            continue
        for mode in modes:
            if batch_invariant:
                found.append(backend_contender(name, mode, "batch-invariant", batch_invariant=True))
            if kernels:
                found += [backend_contender(name, mode, label, plan=plan) for label, plan in native_plans()]
    if on_gpu or competitors:
        foreign, missing = find(competitors)
        skipped += missing
        found += [foreign_contender(competitor, prepare) for competitor, prepare in foreign]
    return found, skipped
