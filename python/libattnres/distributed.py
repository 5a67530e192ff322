# SPDX-License-Identifier: Apache-2.0
"""Attention Residuals over several processes: sequence and pipeline parallelism, and DTensor.

The operator works on each token by itself, so tokens may be split over processes in any way, and the hidden
dimension may not: every score needs a whole row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from libattnres import _api

__all__ = ["SequenceParallel", "attn_res", "receive", "send"]


class SequenceParallel:
    """Sequence parallelism of ``num_tokens`` tokens: each rank runs Attention Residuals on its own tokens.

    Ranks hold ``ceil(num_tokens / size)`` consecutive rows each, the last of them padded with zeros. In a
    model whose sub-layers are tensor-parallel::

        parallel = SequenceParallel(embeddings.shape[0], group)
        stack.forward(parallel.split(embeddings), attention, mlp,
                      gather=parallel.gather, scatter=parallel.scatter)
        hidden = parallel.gather(hidden)

    The collectives are those that ``torch.compile`` traces.

    Parameters
    ----------
    num_tokens : int
        Rows of the whole batch.
    group : ProcessGroup, optional
        The processes that share the batch; all by default.
    """

    def __init__(self, num_tokens: int, group: dist.ProcessGroup | None = None) -> None:
        if num_tokens < 0:
            raise ValueError(f"num_tokens: expected a number >= 0, got {num_tokens}")
        chosen = dist.group.WORLD if group is None else group
        if chosen is None:
            raise RuntimeError("group: expected torch.distributed to be initialised, got no process group")
        self.group = chosen
        self.num_tokens = num_tokens
        self.size = dist.get_world_size(chosen)
        self.rank = dist.get_rank(chosen)
        self.num_local_tokens = -(-num_tokens // self.size)

    def split(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of this rank of what every rank has: ``[num_tokens, ...]`` to ``[local, ...]``."""
        rows = self._padded("tensor", tensor)[self.rank * self.num_local_tokens :][: self.num_local_tokens]
        return rows.clone()  # the operator updates it in place

    def scatter(self, partial: torch.Tensor) -> torch.Tensor:
        """Reduce-scatter: of the sum of ``partial`` over the ranks, ``[num_tokens, ...]``, its own rows."""
        padded = self._padded("partial", partial)
        if self.size == 1:
            return padded.clone()
        scattered: torch.Tensor = collectives.reduce_scatter_tensor(padded, "sum", 0, self.group)
        return scattered

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """All-gather: the ``[num_tokens, ...]`` of which each rank has ``[local, ...]``, without padding."""
        if local.shape[0] != self.num_local_tokens:
            raise ValueError(f"local: expected {self.num_local_tokens} rows, got {local.shape[0]}")
        if self.size == 1:
            return local
        gathered = collectives.all_gather_tensor(local.contiguous(), 0, self.group)
        return gathered[: self.num_tokens]

    def _padded(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[0] != self.num_tokens:
            raise ValueError(f"{name}: expected {self.num_tokens} rows, got {tensor.shape[0]}")
        padding = self.num_local_tokens * self.size - self.num_tokens
        if padding == 0:
            return tensor.contiguous()
        return torch.cat([tensor, tensor.new_zeros((padding, *tensor.shape[1:]))])


def send(
    prefix: torch.Tensor, bank: torch.Tensor, destination: int, group: dist.ProcessGroup | None = None
) -> None:
    """Give the next pipeline stage what it needs, in one message; :func:`receive` is its other end.

    Parameters
    ----------
    prefix : torch.Tensor
        ``[T, H]``, with the output of the stage's last sub-layer added.
    bank : torch.Tensor
        ``[T, rows, H]``, the rows that this and earlier stages have written.
    destination : int
        Rank in the group.
    group : ProcessGroup, optional
        All processes by default.
    """
    if bank.dim() != 3 or prefix.shape != (bank.shape[0], bank.shape[2]):
        raise ValueError(
            f"bank: expected shape [T, rows, H] for a prefix of shape [T, H], got {list(bank.shape)} and "
            f"{list(prefix.shape)}"
        )
    dist.send(torch.cat([bank, prefix[:, None]], dim=1), group=group, group_dst=destination)


def receive(
    num_tokens: int,
    num_rows: int,
    hidden_size: int,
    source: int,
    group: dist.ProcessGroup | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What :func:`send` gave: ``prefix`` ``[T, H]`` and the inherited ``bank`` ``[T, rows, H]``.

    Both are views of one new tensor, which share no byte. ``AttnResStack.begin(prefix, bank)`` takes them.

    Parameters
    ----------
    num_tokens, num_rows, hidden_size : int
        ``T``, bank rows written so far, and ``H``; the sender's.
    source : int
        Rank in the group.
    group : ProcessGroup, optional
        All processes by default.
    dtype, device
        Of the tensors; the sender's type.
    """
    message = torch.empty((num_tokens, num_rows + 1, hidden_size), dtype=dtype, device=device)
    dist.recv(message, group=group, group_src=source)
    return message[:, num_rows], message[:, :num_rows]


# DTensor


def attn_res(
    prefix: Any,
    delta: Any,
    blocks: Any,
    norm_weight: Any,
    qk_weight: Any,
    output_norm_weight: Any,
    num_blocks: int,
    block_write_idx: int = -1,
    eps: float = 1e-5,
    output_norm_eps: float = 1e-5,
    *,
    out: Any = None,
    **options: Any,
) -> DTensor:
    """:func:`libattnres.attn_res` of DTensors, which that function calls by itself.

    ``prefix``, ``blocks`` and ``out`` are sharded by tokens (``Shard(0)``) or replicated, all in the same
    way. ``delta`` may also be ``Partial``: it is reduce-scattered or all-reduced to where the prefix is.
    Weights are replicated DTensors, or plain tensors that are equal everywhere. Nothing else is
    redistributed: what is written must be written where it lies.

    Returns
    -------
    DTensor
        ``[M, H]``, placed as ``prefix``.
    """
    for name, tensor in (("prefix", prefix), ("blocks", blocks), ("delta", delta), ("out", out)):
        if tensor is not None and not isinstance(tensor, DTensor):
            raise TypeError(
                f"{name}: expected a DTensor as others among prefix, delta, blocks and out are, "
                f"got {type(tensor).__name__}; use DTensor.from_local or distribute_tensor"
            )
    mesh, placements = prefix.device_mesh, prefix.placements
    check_rows("prefix", placements)
    for name, tensor in (("blocks", blocks), ("delta", delta), ("out", out)):
        if tensor is None:
            continue
        if tensor.device_mesh != mesh:
            raise ValueError(f"{name}: expected the mesh of prefix, {mesh}, got {tensor.device_mesh}")
        if tensor.placements == placements:
            continue
        check_rows(name, tensor.placements, partial=name == "delta")
        if name != "delta":
            raise ValueError(
                f"{name}: expected placements {describe(placements)} as prefix has, "
                f"got {describe(tensor.placements)}; {name} is not moved, so redistribute it beforehand"
            )
        delta = tensor.redistribute(mesh, placements)
    local_blocks = blocks.to_local()
    local_prefix = prefix.to_local()
    if local_prefix.shape[0] * blocks.shape[0] != local_blocks.shape[0] * prefix.shape[0]:
        raise ValueError(
            f"blocks: expected shards that hold the bank entries of prefix's shards, got "
            f"{local_blocks.shape[0]} of {blocks.shape[0]} entries here for {local_prefix.shape[0]} of "
            f"{prefix.shape[0]} tokens; make the number of entries a multiple of the mesh's size"
        )
    output = _api.attn_res(
        local_prefix,
        None if delta is None else delta.to_local(),
        local_blocks,
        local_weight("norm_weight", norm_weight),
        local_weight("qk_weight", qk_weight),
        local_weight("output_norm_weight", output_norm_weight),
        num_blocks,
        block_write_idx,
        eps,
        output_norm_eps,
        out=None if out is None else out.to_local(),
        **options,
    )
    if out is not None:
        result: DTensor = out
        return result
    return DTensor.from_local(
        output, mesh, placements, run_check=False, shape=prefix.shape, stride=(prefix.shape[1], 1)
    )


def describe(placements: Sequence[Placement]) -> str:
    """As one writes them."""
    return f"({', '.join(map(str, placements))})"


def check_rows(name: str, placements: Sequence[Placement], partial: bool = False) -> None:
    """Sharded by tokens or replicated; the hidden dimension whole."""
    for placement in placements:
        if isinstance(placement, Replicate) or placement == Shard(0):
            continue
        if isinstance(placement, Partial):
            if partial:
                continue
            advice = "redistribute it to Shard(0), a reduce-scatter by tokens"
        else:
            advice = (
                "every token needs its whole row, so shard tokens instead: redistribute it to Shard(0), an "
                "all-to-all, or to Replicate()"
            )
        raise ValueError(
            f"{name}: expected placements Shard(0) or Replicate(), got {describe(placements)}; {advice}"
        )


def local_weight(name: str, weight: Any) -> Any:
    """A weight that every process has in full."""
    if not isinstance(weight, DTensor):
        return weight
    if not all(isinstance(placement, Replicate) for placement in weight.placements):
        raise ValueError(
            f"{name}: expected placements Replicate(), got {describe(weight.placements)}; a weight is "
            f"{weight.shape[0]} numbers, so keep it whole: pass {name}.full_tensor()"
        )
    return weight.to_local()


def _rules(num_outputs: int) -> Any:
    """Acceptable placements of an op that writes nothing: outputs, then arguments."""

    def rules(*args: Any, **kwargs: Any) -> list[tuple[list[Any], list[Any]]]:
        specs = [*args, *kwargs.values()]
        ranks = [len(spec.shape) if hasattr(spec, "placements") else 0 for spec in specs]
        for spec, rank in zip(specs, ranks, strict=True):
            if rank > 1:
                check_rows("prefix" if rank == 2 else "blocks", spec.placements, partial=True)
        return [
            (
                [placement] * num_outputs,
                [None if rank == 0 else placement if rank > 1 else Replicate() for rank in ranks],
            )
            for placement in (Replicate(), Shard(0))
        ]

    return rules


# Of the ops that write, DTensor would return the first argument: attn_res unwraps those itself, above.
for _name, _num_outputs in (("attn_res", 1), ("attn_res_functional", 3)):
    register_sharding(getattr(torch.ops.libattnres, _name).default)(_rules(_num_outputs))
