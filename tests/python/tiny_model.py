# SPDX-License-Identifier: Apache-2.0
"""A small model shaped like Kimi K3, on libattnres and in plain PyTorch, that decodes with a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from libattnres.nn import AttnResStack
from torch import nn

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Sizes:
    """Three blocks, of which the last is not full, as in the model."""

    hidden_size: int = 64
    num_layers: int = 5
    block_size: int = 2
    num_heads: int = 4
    head_size: int = 16
    intermediate_size: int = 128
    vocabulary: int = 211
    batch: int = 3
    length: int = 64


class Sublayers(nn.Module):
    """Embedding, causal attention over a cache, gated MLP and head: what is not AttnRes."""

    def __init__(self, sizes: Sizes, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.sizes = sizes
        generator = torch.Generator(device).manual_seed(1)

        def matrix(rows: int, columns: int, scale: float = 1.0) -> nn.Parameter:
            values = torch.randn(rows, columns, generator=generator, device=device) * scale * columns**-0.5
            # The same values in every dtype that is compared.
            return nn.Parameter(values.bfloat16().to(dtype), requires_grad=False)

        width = sizes.num_heads * sizes.head_size
        self.embedding = matrix(sizes.vocabulary, sizes.hidden_size, scale=sizes.hidden_size**0.5)
        self.head = matrix(sizes.vocabulary, sizes.hidden_size)
        self.qkv = nn.ParameterList(matrix(3 * width, sizes.hidden_size) for _ in range(sizes.num_layers))
        self.o = nn.ParameterList(matrix(sizes.hidden_size, width) for _ in range(sizes.num_layers))
        self.gate_up = nn.ParameterList(
            matrix(2 * sizes.intermediate_size, sizes.hidden_size) for _ in range(sizes.num_layers)
        )
        self.down = nn.ParameterList(
            matrix(sizes.hidden_size, sizes.intermediate_size, scale=2.0) for _ in range(sizes.num_layers)
        )
        cache = torch.zeros(sizes.num_layers, 2, sizes.batch, sizes.length, width, device=device, dtype=dtype)
        self.cache = nn.Buffer(cache)

    def attention(self, layer: int, hidden: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """``[M, H]`` of one token of each sequence, which the cache then holds."""
        sizes = self.sizes
        query, key, value = (hidden @ self.qkv[layer].T).chunk(3, dim=1)
        keys, values = self.cache[layer].unbind()
        keys.index_copy_(1, position, key[:, None])
        values.index_copy_(1, position, value[:, None])
        heads = (sizes.batch, sizes.length, sizes.num_heads, sizes.head_size)
        scores = torch.einsum("bhd,bthd->bht", query.view(sizes.batch, *heads[2:]), keys.view(heads)) * (
            sizes.head_size**-0.5
        )
        future = torch.arange(sizes.length, device=hidden.device) > position
        weights = scores.masked_fill(future, -torch.inf).softmax(dim=-1)
        mixed = torch.einsum("bht,bthd->bhd", weights, values.view(heads))
        return mixed.reshape(sizes.batch, -1) @ self.o[layer].T

    def mlp(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """``[M, H]``."""
        gate, up = (hidden @ self.gate_up[layer].T).chunk(2, dim=1)
        return (nn.functional.silu(gate) * up) @ self.down[layer].T


class Model(nn.Module):
    """One decode step, ``(tokens [M], position [1]) -> hidden states [M, H]``, in two versions."""

    def __init__(
        self, sizes: Sizes, device: str = "cpu", dtype: torch.dtype = torch.bfloat16, **options: Any
    ) -> None:
        super().__init__()
        self.sizes = sizes
        self.sublayers = Sublayers(sizes, device, dtype)
        self.stack = AttnResStack(
            sizes.num_layers, sizes.hidden_size, sizes.block_size, device=device, dtype=dtype, **options
        )
        generator = torch.Generator(device).manual_seed(2)
        for name, weight in self.stack.named_parameters():
            noise = torch.randn(weight.shape, generator=generator, device=device)
            # Scores of a few units: a softmax that neither is uniform nor picks one row.
            values = noise * 1.5 * sizes.hidden_size**-0.5 if "proj" in name else 1 + 0.2 * noise
            weight.copy_(values.bfloat16().to(dtype))

    def step(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """On libattnres."""
        hidden = self.stack(
            self.sublayers.embedding[tokens],
            lambda layer, hidden: self.sublayers.attention(layer, hidden, position),
            self.sublayers.mlp,
        )
        assert isinstance(hidden, torch.Tensor)
        return hidden

    def plain_step(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """In plain PyTorch, without the stack's schedule: finished blocks are a list that grows."""
        weights = dict(self.stack.named_parameters())
        finished: list[torch.Tensor] = []
        prefix: torch.Tensor | None = self.sublayers.embedding[tokens]
        for layer in range(self.sizes.num_layers):
            name = f"layers.{layer}."
            hidden = self.mixed(
                [*finished, prefix],
                weights[name + "self_attention_res_norm.weight"],
                weights[name + "self_attention_res_proj.weight"],
                weights[name + "input_layernorm.weight"],
            )
            if layer % self.sizes.block_size == 0:
                assert prefix is not None
                finished.append(prefix)
                prefix = None
            output = self.sublayers.attention(layer, hidden, position)
            prefix = output if prefix is None else prefix + output
            hidden = self.mixed(
                [*finished, prefix],
                weights[name + "mlp_res_norm.weight"],
                weights[name + "mlp_res_proj.weight"],
                weights[name + "post_attention_layernorm.weight"],
            )
            prefix = prefix + self.sublayers.mlp(layer, hidden)
        norm, proj = weights["output_attn_res_norm.weight"], weights["output_attn_res_proj.weight"]
        return self.mixed([*finished, prefix], norm, proj, None)

    def mixed(
        self,
        sources: list[Any],
        norm_weight: torch.Tensor,
        proj_weight: torch.Tensor,
        output_norm_weight: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention over the sources; float32 for bfloat16, float64 for float64."""
        dtype = norm_weight.dtype
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        size = (self.sizes.hidden_size,)
        values = torch.stack(sources, dim=1).to(wide)
        keys = nn.functional.rms_norm(values, size, norm_weight.to(wide), self.stack.eps)
        scores = keys @ proj_weight.to(wide)[0]
        mixed = (scores.softmax(dim=1)[:, :, None] * values).sum(dim=1)
        if output_norm_weight is not None:
            mixed = nn.functional.rms_norm(
                mixed, size, output_norm_weight.to(wide), self.stack.output_norm_eps
            )
        return mixed.to(dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[M, vocabulary]``."""
        return hidden @ self.sublayers.head.T


@dataclass
class Decoded:
    """What a model made of a sequence."""

    tokens: torch.Tensor
    """``[steps, M]``, what each step was given."""
    hidden: torch.Tensor
    """``[steps, M, H]``."""


@torch.no_grad()
def decode(model: Model, step: Step, tokens: torch.Tensor | None = None) -> Decoded:
    """As many steps as the cache holds; each is given its row of ``tokens``, or the likeliest one."""
    sizes, device = model.sizes, model.sublayers.head.device
    model.sublayers.cache.zero_()
    current = torch.arange(sizes.batch, device=device)
    seen, states = [], []
    for index in range(sizes.length):
        if tokens is not None:
            current = tokens[index]
        hidden = step(current, torch.tensor([index], device=device))
        seen.append(current)
        states.append(hidden.clone())
        current = model.logits(hidden).argmax(dim=1)
    return Decoded(torch.stack(seen), torch.stack(states))
