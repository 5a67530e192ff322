# SPDX-License-Identifier: Apache-2.0
"""Other public implementations, made to do what one call of ``attn_res`` does.

Each adapter prepares its arguments beforehand, in the memory layout that its package likes best, and then
runs the whole operator: prefix update, mix and output norm. What a package does not fuse runs in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from libattnres.cli.workload import Shape

__all__ = ["COMPETITORS", "Competitor", "Prepared", "find"]


@dataclass(frozen=True)
class Prepared:
    """One set of arguments, bound to an implementation."""

    run: Callable[[], object]
    result: Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    """Output, prefix and bank after a run."""


Prepare = Callable[..., Prepared]
"""Called with the positional arguments of ``attn_res``."""


@dataclass(frozen=True)
class Competitor:
    """An implementation of another package."""

    name: str
    module: str
    """Imported only when it is measured."""
    load: Callable[[Any], Prepare]
    """From the imported module to the adapter."""
    by_default: bool = True
    """Whether it is measured wherever it is installed; otherwise when it is named."""
    stacks_sources: bool = False
    """Whether it wants all sources of a token in one array, so that it knows neither writes nor B > 1."""

    def unsupported(self, shape: Shape) -> str | None:
        """Why it cannot run a shape, or None."""
        variant = shape.variant
        if self.stacks_sources and (variant.writes or variant.padding or variant.prefixes_per_row > 1):
            return f"has no variant {variant.name!r}"
        if variant.prefixes_per_row > 1:
            return "has one bank entry per token"
        return None


def vllm(module: Any) -> Prepare:
    """The operator of vLLM, whose arguments are the same."""

    def prepare(*arguments: Any) -> Prepared:
        outputs: list[torch.Tensor] = []

        def run() -> None:
            outputs[:] = [module.attn_res(*arguments)]

        return Prepared(run, lambda: (outputs[0], arguments[0], arguments[2]))

    return prepare


def stacked(mix: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]) -> Prepare:
    """An implementation that takes sources ``[N, T, H]``, query and norm weight, and mixes alone."""

    def prepare(
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
    ) -> Prepared:
        del block_write_idx
        sources = torch.cat([blocks[:, :num_blocks].transpose(0, 1), prefix[None]]).contiguous()
        outputs: list[torch.Tensor] = []

        def run() -> None:
            if delta is not None:
                sources[num_blocks].add_(delta)
            output = mix(sources, qk_weight, norm_weight, eps)
            if output_norm_weight is not None:
                output = torch.nn.functional.rms_norm(
                    output, output.shape[-1:], output_norm_weight, output_norm_eps
                )
            outputs[:] = [output]

        return Prepared(run, lambda: (outputs[0], sources[num_blocks], blocks))

    return prepare


def fla(module: Any) -> Prepare:
    """The mix of flash-linear-attention."""
    return stacked(lambda sources, query, weight, eps: module.fused_attnres(query, sources, weight, eps))


def liger(module: Any) -> Prepare:
    """The mix of Liger-Kernel."""
    return stacked(
        lambda sources, query, weight, eps: module.attn_res_forward(sources, query, weight, eps)[0]
    )


def torch_compile(module: Any) -> Prepare:
    """The formula in plain PyTorch, compiled by inductor for each shape."""
    compiled = torch.compile(formula, dynamic=False, fullgraph=True)
    del module

    def prepare(*arguments: Any) -> Prepared:
        out = torch.empty_like(arguments[0])
        return Prepared(lambda: compiled(*(*arguments, out)), lambda: (out, arguments[0], arguments[2]))

    return prepare


def formula(
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
) -> None:
    """The operator as one would write it for a compiler, in float32."""
    updated = prefix if delta is None else prefix + delta
    values = torch.cat([blocks[:, :num_blocks], updated[:, None]], dim=1).float()
    scores = (values * (norm_weight.float() * qk_weight.float())).sum(-1)
    scores = scores * torch.rsqrt(values.square().mean(-1) + eps)
    mixed = (scores.softmax(-1)[..., None] * values).sum(1)
    if output_norm_weight is not None:
        scale = torch.rsqrt(mixed.square().mean(-1, keepdim=True) + output_norm_eps)
        mixed = mixed * scale * output_norm_weight.float()
    out.copy_(mixed)
    if delta is not None:
        prefix.copy_(updated)
    if block_write_idx >= 0:
        blocks[:, block_write_idx].copy_(updated)


COMPETITORS = (
    Competitor("vllm", "vllm.models.kimi_k3.nvidia.ops.attn_res", vllm),
    Competitor("fla", "fla.ops.attnres.fused", fla, stacks_sources=True),
    Competitor("liger", "liger_kernel.ops.attn_res", liger, stacks_sources=True),
    Competitor("torch.compile", "torch", torch_compile, by_default=False),
)


def find(wanted: list[str] | None) -> tuple[list[tuple[Competitor, Prepare]], list[str]]:
    """Those that are named, or by default those that are installed.

    Returns
    -------
    found : list of (Competitor, Prepare)
        With their packages imported.
    skipped : list of str
        One line for each that was left out, saying why.
    """
    found, skipped = [], []
    for competitor in COMPETITORS:
        if wanted is None and not competitor.by_default:
            continue
        if wanted is not None and competitor.name not in wanted:
            continue
        package = competitor.module.partition(".")[0]
        if find_spec(package) is None:
            skipped.append(f"{competitor.name}: {package} is not installed")
            continue
        try:
            found.append((competitor, competitor.load(import_module(competitor.module))))
        except Exception as error:  # what a foreign package raises while it is imported is its own
            skipped.append(f"{competitor.name}: {competitor.module}: {type(error).__name__}: {error}")
    return found, skipped
