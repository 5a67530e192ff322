# SPDX-License-Identifier: Apache-2.0
"""The operator as ``torch.ops.libattnres.*``, for ``torch.compile``, fake tensors and tensor subclasses.

A schema states what an op writes, and functionalisation copies whatever is written when it cannot prove
that nobody reads the old value. One op that declared both ``prefix`` and ``blocks`` as written would risk a
copy of the whole bank on each of the calls that only read it, so there is one op for each of the four
combinations, and :func:`attn_res` picks the one that writes exactly what the call writes:

==================== ======== ======== =======================================================
op                   prefix   blocks   call
==================== ======== ======== =======================================================
``attn_res``         read     read     no delta, no write
``attn_res_add_``    written  read     delta, no write: the common one
``attn_res_write_``  read     written  no delta, write
``attn_res_``        written  written  any; the declared writes are an upper bound
``attn_res_out_``    written  written  any, into ``out``
==================== ======== ======== =======================================================

``attn_res_functional`` writes nothing and returns (output, new prefix, new bank): two copies more.

A trace calls the writing ops with a base of what is written, and its ``*_place`` there: see :func:`_place`.
What is written in a graph input that begins at an offset in its storage costs copies of the prefix, and
where it is a view of the bank's memory possibly one of that. A graph that takes
the views itself, of an input at offset 0, has no copies.

Known limit, of inductor and any mutating op: in ``p.clone()`` between two calls that both write ``p``, the
copy is dropped, and a graph that *returns* it unchanged returns the later value
(https://github.com/pytorch/pytorch/pull/198096). Computing anything from the copy is right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.autograd import forward_ad

from libattnres._call import (
    ARGUMENTS,
    Plan,
    check_batch_invariant,
    check_call_without_memory,
    check_pdl,
    check_type,
    checked_epsilon,
    checked_index,
    known,
    refuse_grad_of,
    refuse_tangents_of,
    refuse_wide,
)
from libattnres._dispatch import check_backend, requested_backend
from libattnres._eager import eager

__all__ = ["OPS", "attn_res", "hand_over", "register", "same_memory"]

_WEIGHTS = "Tensor norm_weight, Tensor qk_weight, Tensor? output_norm_weight, SymInt num_blocks"
_WRITE = ", SymInt block_write_idx"
_OPTIONS = (
    ", float eps=1e-5, float output_norm_eps=1e-5, str? backend=None, str pdl='wait', int[]? plan=None"
    ", bool? batch_invariant=None"
)

SCHEMAS = {
    "attn_res": f"(Tensor prefix, Tensor blocks, {_WEIGHTS}{_OPTIONS}) -> Tensor",
    "attn_res_add_": (
        f"(Tensor(a!) prefix, Tensor delta, Tensor blocks, {_WEIGHTS}{_OPTIONS}"
        ", SymInt[]? prefix_place=None) -> Tensor"
    ),
    "attn_res_write_": (
        f"(Tensor prefix, Tensor(a!) blocks, {_WEIGHTS}{_WRITE}{_OPTIONS}"
        ", SymInt[]? blocks_place=None) -> Tensor"
    ),
    "attn_res_": (
        f"(Tensor(a!) prefix, Tensor? delta, Tensor(b!) blocks, {_WEIGHTS}{_WRITE}=-1{_OPTIONS}"
        ", SymInt[]? prefix_place=None, SymInt[]? blocks_place=None) -> Tensor"
    ),
    "attn_res_out_": (
        f"(Tensor(a!) prefix, Tensor? delta, Tensor(b!) blocks, {_WEIGHTS}{_WRITE}, Tensor(c!) out"
        f"{_OPTIONS}, SymInt[]? prefix_place=None, SymInt[]? blocks_place=None"
        ", SymInt[]? out_place=None) -> ()"
    ),
    "attn_res_functional": (
        f"(Tensor prefix, Tensor? delta, Tensor blocks, {_WEIGHTS}{_WRITE}=-1{_OPTIONS}) "
        "-> (Tensor output, Tensor new_prefix, Tensor new_blocks)"
    ),
}
OPS = tuple(SCHEMAS)
"""Names under ``torch.ops.libattnres``."""


def plan_from_numbers(numbers: list[int] | None) -> Plan | None:
    """The plan of an op argument."""
    if numbers is None:
        return None
    if len(numbers) not in (4, 5) or not 0 <= numbers[0] <= 2:
        raise ValueError(
            "plan: expected [kernel (0 automatic, 1 ring, 2 cluster), rows_per_stage, ctas_per_sm, "
            f"cluster_size, rows_in_flight (optional)], got {numbers}"
        )
    kernel = (None, "ring", "cluster")[numbers[0]]
    return Plan(kernel, *(number or None for number in numbers[1:]))  # type: ignore[arg-type]


def attn_res(
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
    out: torch.Tensor | None,
    backend: str | None,
    pdl: str,
    plan: Plan | None,
    batch_invariant: bool | None,
) -> torch.Tensor:
    """Call the op that writes exactly what this call writes.

    Types are judged here, in the words of attn_res: the dispatcher has its own, and takes a bool for an
    int. Values are for the kernels, fake or not.
    """
    tensors = (prefix, delta, blocks, norm_weight, qk_weight, output_norm_weight, out)
    for name, tensor in zip(ARGUMENTS, tensors, strict=True):
        if tensor is not None or name in ("prefix", "blocks", "norm_weight", "qk_weight"):
            check_type(name, tensor)
    num_blocks = checked_index("num_blocks", num_blocks)
    block_write_idx = checked_index("block_write_idx", block_write_idx)
    eps = checked_epsilon("eps", eps)
    output_norm_eps = checked_epsilon("output_norm_eps", output_norm_eps)
    refuse_wide("num_blocks", num_blocks)
    refuse_wide("block_write_idx", block_write_idx)
    check_pdl(pdl)
    check_batch_invariant(batch_invariant)
    check_backend(backend, plan)
    # What shares memory with something written is for the library to find, which in a compiled graph sees
    # what became of the arguments. One tensor passed twice is seen here, on any device.
    for name, written, other, tensor in (
        ("out", out, "prefix", prefix),
        ("out", out, "delta", delta),
        ("prefix", prefix, "delta", delta),
    ):
        if written is not None and written is tensor:
            raise ValueError(
                f"{name}: expected memory that shares no byte with {other}, got overlapping memory"
            )
    if any_dtensor(*tensors):
        from libattnres import distributed

        return distributed.attn_res(
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
            out=out,
            backend=backend,
            pdl=pdl,
            plan=plan,
            batch_invariant=batch_invariant,
        )
    ops = torch.ops.libattnres
    weights = (norm_weight, qk_weight, output_norm_weight, num_blocks)
    options = (eps, output_norm_eps, backend, pdl, None if plan is None else plan.numbers(), batch_invariant)
    if out is not None:
        ops.attn_res_out_(prefix, delta, blocks, *weights, block_write_idx, out, *options)
        return out
    # An index below -1 is as wrong as one past the bank: the general op says so.
    if block_write_idx == -1:
        if delta is None:
            output = ops.attn_res(prefix, blocks, *weights, *options)
        else:
            output = ops.attn_res_add_(prefix, delta, blocks, *weights, *options)
    elif delta is None:
        output = ops.attn_res_write_(prefix, blocks, *weights, block_write_idx, *options)
    else:
        output = ops.attn_res_(prefix, delta, blocks, *weights, block_write_idx, *options)
    return output  # type: ignore[no-any-return]


def any_dtensor(*tensors: object) -> bool:
    """Whether there is a DTensor, of which there is none before its module is imported."""
    module = getattr(torch.distributed, "tensor", None)
    return module is not None and any(isinstance(tensor, module.DTensor) for tensor in tensors)


# The kernels, in terms of one call. Each op's arguments are those of attn_res_out_, less those it lacks.


def _general(
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
    backend: str | None = None,
    pdl: str = "wait",
    plan: list[int] | None = None,
    batch_invariant: bool | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    # Inductor drops a copy whose source nobody else reads, so `attn_res(p, p.clone(), ...)` may arrive
    # here with the same memory twice, written and read. The copy was meant: make it again.
    if delta is not None and same_memory(delta, prefix):
        delta = delta.clone()
    return eager(
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
        plan_from_numbers(plan),
        batch_invariant,
    )


def _general_fake(
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
    backend: str | None = None,
    pdl: str = "wait",
    plan: list[int] | None = None,
    batch_invariant: bool | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    # All that the run will refuse, but for what only memory and the machine can tell: overlap, and
    # whether a forced backend can serve.
    output = prefix.new_empty(prefix.shape) if out is None else out
    check_call_without_memory(
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
        batch_invariant,
    )
    requested_backend(backend, plan_from_numbers(plan))
    return output


def same_memory(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors are the same elements of the same storage."""
    return (
        left.numel() > 0
        and left.data_ptr() == right.data_ptr()
        and left.shape == right.shape
        and left.stride() == right.stride()
    )


Kernel = Callable[..., Any]


def _kernels(general: Kernel) -> dict[str, Kernel]:
    """One kernel per op from the kernel of the general one."""

    def attn_res(prefix: Any, blocks: Any, *weights_and_options: Any, **options: Any) -> Any:
        weights, rest = weights_and_options[:4], weights_and_options[4:]
        return general(prefix, None, blocks, *weights, -1, *rest, **options)

    def attn_res_add_(prefix: Any, delta: Any, blocks: Any, *weights_and_options: Any, **options: Any) -> Any:
        weights, rest = weights_and_options[:4], weights_and_options[4:]
        return general(prefix, delta, blocks, *weights, -1, *rest, **options)

    def attn_res_write_(prefix: Any, blocks: Any, *rest: Any, **options: Any) -> Any:
        return general(prefix, None, blocks, *rest, **options)

    def attn_res_out_(
        prefix: Any, delta: Any, blocks: Any, *weights_and_options: Any, **options: Any
    ) -> None:
        weights, out, rest = (
            weights_and_options[:5],
            weights_and_options[5],
            weights_and_options[6:],
        )
        general(prefix, delta, blocks, *weights, *rest, **options, out=out)

    def attn_res_functional(
        prefix: Any, delta: Any, blocks: Any, *rest: Any, **options: Any
    ) -> tuple[Any, Any, Any]:
        new_prefix = prefix.clone(memory_format=torch.contiguous_format)
        new_blocks = blocks.clone(memory_format=torch.contiguous_format)
        output = general(new_prefix, delta, new_blocks, *rest, **options)
        return output, new_prefix, new_blocks

    return {
        "attn_res": attn_res,
        "attn_res_add_": attn_res_add_,
        "attn_res_write_": attn_res_write_,
        "attn_res_": general,
        "attn_res_out_": attn_res_out_,
        "attn_res_functional": attn_res_functional,
    }


def _named(op: torch._ops.OpOverload, args: Any, kwargs: Any) -> dict[str, Any]:
    """All arguments of a call by name, in the schema's order."""
    values = {argument.name: argument.default_value for argument in op._schema.arguments}
    values.update(zip(values, args, strict=False))
    return {**values, **kwargs}


def _tensors(op: torch._ops.OpOverload) -> list[str]:
    """The names of the arguments that are tensors, or may be."""
    return [argument.name for argument in op._schema.arguments if "Tensor" in str(argument.type)]


def _written(op: torch._ops.OpOverload) -> list[str]:
    """The names of the arguments that the schema declares as written."""
    return [
        argument.name
        for argument in op._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


# What functionalisation makes of a written view is a way to find it again in its base: an as_strided, or a
# slice. Both go wrong where the base is a graph input that begins at an offset in its storage. torch 2.11's
# inductor adds the offset twice, 2.13's takes a symbolic one for 0
# (https://github.com/pytorch/pytorch/issues/198068), the slice counts rows from the start of the storage, and
# no guard compares the offset that was traced with that of the call that runs. The wrong rows are written,
# silently. Therefore a trace hands over the base, and numbers that say where the view lies in it.


def _place(view: torch.Tensor, base: torch.Tensor) -> list[Any]:
    """Where a view lies: sizes, strides, elements from the start of the base.

    The last becomes a constant, at the price of a guard: traced, it would be what the view's own offset in
    the storage is in the call that runs. In `memory[:, 8]` it is H that gets the guard, not the number of
    tokens.
    """
    start = view.storage_offset() - base.storage_offset()
    return [*view.shape, *view.stride(), start if known(start) is None else int(start)]


def _at_place(base: torch.Tensor, place: list[Any]) -> torch.Tensor:
    rank = len(place) // 2
    return base.as_strided(place[:rank], place[rank : 2 * rank], base.storage_offset() + place[-1])


def _placed_kernel(op: torch._ops.OpOverload, kernel: Kernel) -> Kernel:
    """Finds what is written in the bases that a trace hands over."""
    written = _written(op)
    num_arguments = len(op._schema.arguments) - len(written)
    if not written:
        return kernel

    def placed(*args: Any, **kwargs: Any) -> Any:
        if len(args) <= num_arguments and not any(f"{name}_place" in kwargs for name in written):
            return kernel(*args, **kwargs)
        named = _named(op, args, kwargs)
        for name in written:
            place = named.pop(f"{name}_place")
            if place:
                named[name] = _at_place(named[name], place)
        return kernel(*named.values())

    return placed


def _is_functionalizing() -> bool:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL) is not None


def _on_bases(op: torch._ops.OpOverload, named: dict[str, Any]) -> dict[str, Any] | None:
    """The call with every written view as its base and its place there.

    None where a base cannot be handed over: torch copies one whose old value is read later, from the start
    of the storage on, and errs in an input that begins elsewhere. A base may have another dtype, too.
    """
    on_bases = dict(named)
    for name in _written(op):
        view = named[name]
        if view is None:
            continue
        base = view._inference_mode_base if torch.is_inference_mode_enabled() else view._base
        if base is not None:
            on_bases |= {name: base, f"{name}_place": _place(view, base)}
        base = on_bases[name]
        offset = base.storage_offset()
        if isinstance(offset, torch.SymInt):
            offset = offset.node.maybe_as_int()
        if offset != 0 or base.dtype != view.dtype:
            return None
    return on_bases


ThroughCopies = Callable[[dict[str, Any]], Any]
"""A call in terms of ops that write nothing but what they made; given the arguments by name."""


def _through_copies(named: dict[str, Any]) -> Any:
    """For the ops of attn_res."""
    ops = torch.ops.libattnres
    named = dict(named)
    prefix, delta, blocks = (named.pop(name, None) for name in ("prefix", "delta", "blocks"))
    block_write_idx, out = named.pop("block_write_idx", -1), named.pop("out", None)
    if delta is None:
        new_prefix = prefix
        output = ops.attn_res(prefix, blocks, **named)
    else:
        new_prefix = ops._copy(prefix)
        output = ops.attn_res_add_(new_prefix, delta, blocks, **named)
    return hand_over(output, new_prefix, prefix, delta, blocks, block_write_idx, out)


def hand_over(
    output: torch.Tensor,
    new_prefix: torch.Tensor,
    prefix: torch.Tensor,
    delta: torch.Tensor | None,
    blocks: torch.Tensor | None,
    block_write_idx: int,
    out: torch.Tensor | None,
) -> torch.Tensor | None:
    """Copy what a call writes to where it belongs; the output itself where there is no ``out``."""
    if block_write_idx != -1 and blocks is not None:
        blocks.select(1, block_write_idx).copy_(new_prefix)
    if delta is not None:
        prefix.copy_(new_prefix)
    if out is None:
        return output
    out.copy_(output)
    return None


def _without_places(named: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in named.items() if not name.endswith("_place")}


def _functionalizing_kernel(op: torch._ops.OpOverload, through_copies: ThroughCopies) -> Kernel:
    """For traces in inference mode, where no Autograd kernel is called."""

    def kernel(mode: Any, *args: Any, **kwargs: Any) -> Any:
        named = _named(op, args, kwargs)
        on_bases = _on_bases(op, named)
        if on_bases is None:
            with mode:
                return through_copies(_without_places(named))
        types = [type(value) for value in on_bases.values() if isinstance(value, torch.Tensor)]
        return mode.__torch_dispatch__(op, types, tuple(on_bases.values()), {})

    return kernel


def _autograd_kernel(op: torch._ops.OpOverload, operator_name: str, through_copies: ThroughCopies) -> Kernel:
    """Refuses what wants a derivative: there is no backward to record, and no tangent to compute."""
    is_mutable = op._schema.is_mutable
    tensors = _tensors(op)

    def kernel(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        named = _named(op, args, kwargs)
        arguments = {name: named[name] for name in tensors}
        if torch.is_grad_enabled():
            refuse_grad_of(operator_name, arguments)
        if forward_ad._current_level >= 0:
            refuse_tangents_of(operator_name, arguments)
        if is_mutable and _is_functionalizing():
            on_bases = _on_bases(op, named)
            if on_bases is None:
                return through_copies(_without_places(named))
            args, kwargs = tuple(on_bases.values()), {}
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)

    return kernel


def _version_kernel(op: torch._ops.OpOverload) -> Kernel:
    """Tells autograd which arguments were written, so that a stale saved tensor is noticed."""
    written = _written(op)

    def kernel(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        named = _named(op, args, kwargs)
        torch.autograd.graph.increment_version([named[name] for name in written if named[name] is not None])
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return op.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args, **kwargs)

    return kernel


def _copy(rows: torch.Tensor) -> torch.Tensor:
    """A copy that no compiler knows to be one, and so cannot do without."""
    return rows.clone(memory_format=torch.contiguous_format)


def register(
    library: Any,
    name: str,
    schema: str,
    kernel: Kernel,
    fake: Kernel,
    operator_name: str,
    through_copies: ThroughCopies,
) -> None:
    """Define one op, with what each part of PyTorch must know of it."""
    # Strides are part of the contract: inductor must pass padded rows on as they are.
    library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    op = getattr(torch.ops.libattnres, name).default
    for key in ("CPU", "CUDA"):
        library.impl(name, _placed_kernel(op, kernel), key)
    library._register_fake(name, _placed_kernel(op, fake))
    library.impl(name, _autograd_kernel(op, operator_name, through_copies), "Autograd", with_keyset=True)
    if op._schema.is_mutable:
        library.impl(name, _version_kernel(op), "ADInplaceOrView", with_keyset=True)
        op.py_impl(FunctionalTensorMode)(_functionalizing_kernel(op, through_copies))


def _register() -> Any:
    library: Any = torch.library.Library("libattnres", "FRAGMENT")  # type: ignore[no-untyped-call]
    kernels, fakes = _kernels(_general), _kernels(_general_fake)
    for name, schema in SCHEMAS.items():
        register(library, name, schema, kernels[name], fakes[name], "attn_res", _through_copies)
    library.define("_copy(Tensor rows) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA", "Meta"):
        library.impl("_copy", _copy, key)
    return library


_library = _register()  # the registrations live as long as this object
