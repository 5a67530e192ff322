# SPDX-License-Identifier: Apache-2.0
"""``attn_res`` and ``explain``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.autograd import forward_ad

from libattnres import _core, _ops
from libattnres._call import ARGUMENTS, Plan, checked_call, refuse_grad, refuse_tangents
from libattnres._dispatch import Explanation, explain_call
from libattnres._eager import eager

__all__ = ["attn_res", "explain"]

_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_empty_like = torch.empty_like
_forward_tensors = _core.forward_tensors


def _version_counter() -> Callable[[tuple[torch.Tensor, ...]], object]:
    """``increment_version``, where it can be without its Python wrapper, which takes longer than the work."""
    direct = getattr(torch._C, "_increment_version", None)
    try:
        direct((torch.empty(0),))  # type: ignore[misc]
    except TypeError:  # none, or one of another signature
        return torch.autograd.graph.increment_version
    return cast("Callable[[tuple[torch.Tensor, ...]], object]", direct)


_increment_version = _version_counter()


def attn_res(
    prefix: torch.Tensor,
    delta: torch.Tensor | None,
    blocks: torch.Tensor,
    norm_weight: torch.Tensor,
    qk_weight: torch.Tensor,
    output_norm_weight: torch.Tensor | None,
    num_blocks: int,
    block_write_idx: int = -1,
    eps: float = 1e-5,
    output_norm_eps: float = 1e-5,
    *,
    out: torch.Tensor | None = None,
    backend: str | None = None,
    pdl: str = "wait",
    plan: Plan | None = None,
    batch_invariant: bool | None = None,
) -> torch.Tensor:
    r"""Attention Residuals: softmax attention of each token over its residual stream's history.

    .. math::
        p = \mathrm{round}(prefix + delta), \quad v_i = blocks_i, \quad v_n = p \\
        score_i = \frac{v_i \cdot (norm\_weight \cdot qk\_weight)}{\sqrt{mean(v_i^2) + eps}}, \quad
        mixed = \sum_i softmax(score)_i v_i \\
        output = mixed \quad\text{or}\quad
        \frac{mixed}{\sqrt{mean(mixed^2) + output\_norm\_eps}} \cdot output\_norm\_weight

    Then ``prefix <- p`` when ``delta`` is given, and ``blocks[t, block_write_idx] <- p`` when
    ``block_write_idx >= 0``, after every bank row was read. Both are exact to the bit in every backend.
    Sums, softmax and norms are float32 (float64 for float64 tensors, which run on the torch backend).

    Parameters
    ----------
    prefix : torch.Tensor
        ``[M, H]``, running residual of each token. Updated in place when ``delta`` is given. All tensors
        share its dtype (bfloat16, float16, float32 or float64) and its device (CPU or CUDA), and have
        last stride 1; rows of ``prefix``, ``delta``, ``blocks`` and ``out`` may be padded.
    delta : torch.Tensor or None
        ``[M, H]``, the last sub-layer's output, added to ``prefix`` with one rounding.
    blocks : torch.Tensor
        ``[T, R, H]``, block bank. ``M`` is a multiple of ``T``; token ``m`` reads entry ``m // B`` with
        ``B = M / T``. Rows that are neither read nor written are not touched and may be uninitialised.
    norm_weight, qk_weight : torch.Tensor
        ``[H]``, weight of the scores' RMSNorm and learned pseudo-query.
    output_norm_weight : torch.Tensor or None
        ``[H]``, weight of the output's RMSNorm; None for no output norm.
    num_blocks : int
        Bank rows read, ``0..min(8, R)``.
    block_write_idx : int
        Bank row that receives the updated prefix, ``-1..R-1``; -1 for none. Needs ``B = 1`` otherwise.
    eps, output_norm_eps : float
        Epsilons of the scores' and of the output's norm.
    out : torch.Tensor, optional
        ``[M, H]``, written and returned instead of a new tensor.
    backend : {"auto", "native", "triton", "torch", "host"}, optional
        Force a backend. By default the environment variable ``LIBATTNRES_BACKEND`` decides, and without
        it the first that can serve: native, Triton, torch for CUDA tensors; host, torch for CPU tensors.
    pdl : {"wait", "early", "off"}
        Programmatic dependent launch on GPUs that have it. ``"early"`` reads bank rows before
        the kernels ahead on the stream have finished: the caller promises that none that may still be
        running writes rows ``0..num_blocks-1``. It has no meaning for the torch and host backends.
    plan : Plan, optional
        Overrides of the native launch plan; such a call runs natively or not at all.
    batch_invariant : bool, optional
        Whether the bits of a token's results must not depend on ``M`` or on its place in the batch, for
        arguments of one layout on one backend. By default the environment variable
        ``LIBATTNRES_BATCH_INVARIANT`` (0 or 1) decides, and without it they may. The torch backend cannot
        promise it.

    Returns
    -------
    torch.Tensor
        ``[M, H]``: ``out``, or a new dense tensor.

    Raises
    ------
    TypeError, ValueError
        When an argument is wrong, naming it, what was expected and what came; also when memory that is
        written overlaps another argument. Nothing was written then.
    UnsupportedError
        When the forced backend cannot serve this call here, with the reason. Nothing was written.
    RuntimeError
        When an argument requires grad under grad mode or carries a forward-mode tangent, or CUDA failed.

    Notes
    -----
    On CUDA tensors the call is asynchronous on the current stream of their device, never synchronises,
    and can be captured into a CUDA graph after :func:`libattnres.warmup`.

    Source: Attention Residuals, arXiv 2603.15031.
    """
    if _is_compiling() or _dispatch_modes() != 0 or _transforms() is not None:
        return _ops.attn_res(
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
            out,
            backend,
            pdl,
            plan,
            batch_invariant,
        )
    if _is_grad_enabled() and _may_require_grad(
        prefix, delta, blocks, norm_weight, qk_weight, output_norm_weight, out
    ):
        refuse_grad(prefix, delta, blocks, norm_weight, qk_weight, output_norm_weight, out)
    if forward_ad._current_level >= 0:
        refuse_tangents(prefix, delta, blocks, norm_weight, qk_weight, output_norm_weight, out)
    output = out
    served = False
    if plan is None and type(prefix) in _PLAIN_TYPES:
        if output is None:
            output = _empty_like(prefix)
        served = _forward_tensors(
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
            output,
            pdl,
            backend,
            batch_invariant,
        )
    if not served:
        if _is_for_dispatcher(prefix, delta, blocks, norm_weight, qk_weight, output_norm_weight, out):
            return _ops.attn_res(
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
                out,
                backend,
                pdl,
                plan,
                batch_invariant,
            )
        output = eager(
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
            out,
            backend,
            pdl,
            plan,
            batch_invariant,
        )
    # What torch's own in-place ops do: a backward that saved the old value then fails instead of lying.
    written: tuple[torch.Tensor, ...]
    if delta is None:
        written = () if out is None else (out,)
    else:
        written = (prefix,) if out is None else (prefix, out)
    if block_write_idx != -1:
        written = (*written, blocks)
    if written:
        _increment_version(written)
    return output  # type: ignore[return-value]


def _may_require_grad(
    prefix: Any,
    delta: Any,
    blocks: Any,
    norm_weight: Any,
    qk_weight: Any,
    output_norm_weight: Any,
    out: Any,
) -> bool:
    """Quick and without names; True also when an argument is no tensor."""
    try:
        return (
            prefix.requires_grad
            or (delta is not None and delta.requires_grad)
            or blocks.requires_grad
            or norm_weight.requires_grad
            or qk_weight.requires_grad
            or (output_norm_weight is not None and output_norm_weight.requires_grad)
            or (out is not None and out.requires_grad)
        )
    except AttributeError:
        return True


def _is_for_dispatcher(*arguments: object) -> bool:
    """Whether an argument is a tensor subclass, or a tensor without memory."""
    return any(
        isinstance(argument, torch.Tensor) and (type(argument) not in _PLAIN_TYPES or argument.is_meta)
        for argument in arguments
    )


def explain(
    prefix: torch.Tensor,
    delta: torch.Tensor | None,
    blocks: torch.Tensor,
    norm_weight: torch.Tensor,
    qk_weight: torch.Tensor,
    output_norm_weight: torch.Tensor | None,
    num_blocks: int,
    block_write_idx: int = -1,
    eps: float = 1e-5,
    output_norm_eps: float = 1e-5,
    *,
    out: torch.Tensor | None = None,
    backend: str | None = None,
    pdl: str = "wait",
    plan: Plan | None = None,
    batch_invariant: bool | None = None,
) -> Explanation:
    """Which backend :func:`attn_res` would take for the same arguments, and why not the others.

    Nothing is run or written. A call that ``attn_res`` would refuse as wrong raises the same error; one
    that no backend, or not the forced one, can serve has ``backend=None`` and its reasons.

    Parameters
    ----------
    prefix, delta, blocks, norm_weight, qk_weight, output_norm_weight, num_blocks, block_write_idx
        As for :func:`attn_res`; so are ``eps``, ``output_norm_eps``, ``out``, ``backend``, ``pdl``,
        ``plan`` and ``batch_invariant``.

    Returns
    -------
    Explanation
        Backend, what decided, reasons, and for the native backend the kernel and its launch.
    """
    if _is_grad_enabled():
        refuse_grad(prefix, delta, blocks, norm_weight, qk_weight, output_norm_weight, out)
    if forward_ad._current_level >= 0:
        refuse_tangents(prefix, delta, blocks, norm_weight, qk_weight, output_norm_weight, out)
    tensors = (prefix, delta, blocks, norm_weight, qk_weight, output_norm_weight, out)
    for name, tensor in zip(ARGUMENTS, tensors, strict=True):
        if _ops.any_dtensor(tensor):
            raise TypeError(
                f"{name}: expected a tensor of this process, got a DTensor; pass {name}.to_local()"
            )
    call = checked_call(
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
        out,
        pdl,
        batch_invariant,
    )
    return explain_call(call, backend, plan)
