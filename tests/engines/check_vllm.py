# SPDX-License-Identifier: Apache-2.0
"""The plugin in a real vLLM, on a machine without a GPU. Not part of the normal test run:

    python -m venv vllm && vllm/bin/pip install vllm==0.33.0 && vllm/bin/pip install --no-deps .
    vllm/bin/python tests/engines/check_vllm.py

vLLM loads its plugins and its Kimi K3 model itself. Then the model's own calls, made on CPU tensors, are held
against vLLM's Triton kernel under Triton's interpreter: in float32 and float16, where both round alike, and
in bfloat16, to which the interpreter truncates. About two minutes.
"""

from __future__ import annotations

import os

# Before anything imports triton: the interpreter, and what lets vLLM keep Triton without a GPU.
os.environ.update(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="", LIBATTNRES_BACKEND="host")
os.environ.pop("LIBATTNRES_VLLM", None)

import logging
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module, metadata
from typing import Any

import torch
from libattnres import reference
from libattnres.cli import competitors
from libattnres.engines import replacement, vllm

HIDDEN_SIZE = 7168
NUM_TOKENS = 3
NUM_BANK_ROWS = 8

messages: list[str] = []


class Collector(logging.Handler):
    """Keeps what the plugin says."""

    def emit(self, record: logging.LogRecord) -> None:
        """One message."""
        messages.append(f"{record.levelname}: {record.getMessage()}")


def said(text: str) -> None:
    """The plugin must have said it."""
    assert any(text in message for message in messages), f"not said: {text!r}; said: {messages}"


TOLERANCES = {torch.float32: 1e-5, torch.float16: 5e-4, torch.bfloat16: 8e-3}
"""Relative L2 distance of the outputs: one rounding, and a truncation for bfloat16."""


def tensors(seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Arguments of one call."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    return {
        "prefix": normal(NUM_TOKENS, HIDDEN_SIZE),
        "delta": normal(NUM_TOKENS, HIDDEN_SIZE),
        "blocks": normal(NUM_TOKENS, NUM_BANK_ROWS, HIDDEN_SIZE),
        "norm_weight": normal(HIDDEN_SIZE, scale=0.3) + 1,
        "qk_weight": normal(HIDDEN_SIZE, scale=2 * HIDDEN_SIZE**-0.5),
        "output_norm_weight": normal(HIDDEN_SIZE, scale=0.2) + 1,
    }


def relative(left: torch.Tensor, right: torch.Tensor) -> float:
    """L2 distance."""
    return float((left.double() - right.double()).norm() / right.double().norm())


def check_call(
    model: Any, call: Callable[[Any, dict[str, torch.Tensor]], torch.Tensor], seed: int, dtype: torch.dtype
) -> float:
    """One call of vLLM's model through our function and through its own; the distance of the outputs."""
    ours = model.attn_res
    results = []
    for function in (ours.__wrapped__, ours):
        arguments = tensors(seed, dtype)
        model.attn_res = function
        try:
            with torch.inference_mode():
                output = call(model, arguments)
        finally:
            model.attn_res = ours
        results.append((output, arguments["prefix"], arguments["blocks"]))
    expected, got = results
    for name, wanted, value in zip(("output", "prefix", "blocks"), expected, got, strict=True):
        assert value.dtype is dtype
        if name != "output" and dtype is not torch.bfloat16:
            assert reference.same_bits(value, wanted), f"{name} differs"
        distance = relative(value, wanted)
        assert distance <= TOLERANCES[dtype], f"{name} differs by {distance:.2e} in {dtype}"
    return relative(got[0], expected[0])


def norm(weight: torch.Tensor, epsilon: float = 1e-5) -> types.SimpleNamespace:
    """What the model reads of a norm."""
    return types.SimpleNamespace(weight=weight, variance_epsilon=epsilon)


def projection(weight: torch.Tensor) -> types.SimpleNamespace:
    """What the model reads of a projection."""
    return types.SimpleNamespace(weight=weight[None])


def layer(arguments: dict[str, torch.Tensor], index: int, block_size: int = 12) -> types.SimpleNamespace:
    """What the two calls of a decoder layer read of it."""
    return types.SimpleNamespace(
        use_attn_res=True,
        is_block_write_layer=index % block_size == 0,
        block_write_idx=index // block_size,
        prev_valid_blocks=-(-index // block_size),
        self_attention_res_norm=norm(arguments["norm_weight"]),
        self_attention_res_proj=projection(arguments["qk_weight"]),
        input_layernorm=norm(arguments["output_norm_weight"]),
        mlp_res_norm=norm(arguments["norm_weight"]),
        mlp_res_proj=projection(arguments["qk_weight"]),
        post_attention_layernorm=norm(arguments["output_norm_weight"], 1e-6),
    )


def before_attention(index: int) -> Callable[[Any, dict[str, torch.Tensor]], torch.Tensor]:
    """The first call of a layer; layer 0 has no delta."""

    def call(model: Any, arguments: dict[str, torch.Tensor]) -> torch.Tensor:
        delta = arguments["delta"] if index > 0 else None
        output: torch.Tensor = model.KimiDecoderLayer._pre_attn_norm(
            layer(arguments, index), delta, arguments["blocks"], arguments["prefix"]
        )[0]
        return output

    return call


def before_mlp(index: int) -> Callable[[Any, dict[str, torch.Tensor]], torch.Tensor]:
    """The second call of a layer; a layer that wrote a row starts its prefix anew."""

    def call(model: Any, arguments: dict[str, torch.Tensor]) -> torch.Tensor:
        output: torch.Tensor = model.KimiDecoderLayer._post_attn_norm(
            layer(arguments, index), arguments["delta"], arguments["blocks"], arguments["prefix"]
        )[0]
        return output

    return call


def final(model: Any, arguments: dict[str, torch.Tensor]) -> torch.Tensor:
    """The call after the stack, with the arguments that the model gives it."""
    output: torch.Tensor = model.attn_res(
        arguments["prefix"],
        arguments["delta"],
        arguments["blocks"],
        arguments["norm_weight"],
        arguments["qk_weight"],
        None,
        num_blocks=8,
        block_write_idx=-1,
        eps=1e-5,
        output_norm_eps=0.0,
    )
    return output


def main() -> None:
    """All checks, in the order in which a vLLM process would meet them."""
    vllm.logger.addHandler(Collector())
    import_module("vllm.logger")  # vLLM's logging, which every process of it sets up first
    vllm.logger.setLevel(logging.INFO)

    print(f"vLLM {metadata.version('vllm')}, torch {torch.__version__}, triton {metadata.version('triton')}")
    import_module("vllm.plugins").load_general_plugins()
    said("waits for vllm.models.kimi_k3.nvidia.ops.attn_res")
    assert not any(name.startswith("vllm.models.kimi_k3") for name in sys.modules), "the plugin imported it"

    model = import_module("vllm.models.kimi_k3.nvidia.model")
    said("replaced attn_res of vllm.models.kimi_k3.nvidia.ops.attn_res")
    module = sys.modules[vllm.ENGINE.module]
    function = vars(module)["attn_res"]
    own = function.__wrapped__
    assert own.__module__ == vllm.ENGINE.module
    holders = sorted(
        name
        for name, other in list(sys.modules.items())
        if name.startswith("vllm.") and any(value is function for value in vars(other).values())
    )
    left = [
        name
        for name, other in list(sys.modules.items())
        if name.startswith("vllm.") and any(value is own for value in vars(other).values())
    ]
    assert vllm.ENGINE.module in holders
    assert model.__name__ in holders
    assert not left, f"these still hold vLLM's own function: {left}"
    print("replaced in", ", ".join(holders))

    calls = {f"layer {index}, before attention": before_attention(index) for index in (0, 1, 12, 13, 60, 92)}
    calls |= {f"layer {index}, before MLP": before_mlp(index) for index in (0, 1, 48, 92)}
    calls["after the stack"] = final
    for seed, (name, call) in enumerate(calls.items()):
        distances = {dtype: check_call(model, call, seed, dtype) for dtype in TOLERANCES}
        text = ", ".join(f"{distance:.0e} in {dtype}" for dtype, distance in distances.items())
        print(f"{name}: relative L2 distance {text}")
    said("serves attention residuals on cpu")
    assert not any("left to vLLM" in message for message in messages), messages

    found, skipped = competitors.find(["vllm"])
    assert not skipped, skipped
    assert found[0][0].module == vllm.ENGINE.module

    # Another signature, as that of the operator which vLLM keeps for another vendor.
    changed = replace(vllm.ENGINE, module="vllm.models.kimi_k3.amd.ops.attn_res")
    replacement.install(changed)
    other = import_module(changed.module)
    assert not hasattr(other.attn_res if isinstance(other, types.ModuleType) else other, "__wrapped__")
    said("is left as it is: vllm.models.kimi_k3.amd.ops.attn_res.attn_res: expected parameters")
    replacement.install(replace(vllm.ENGINE, module="vllm.models.kimi_k4.nvidia.ops.attn_res"))
    said("is left as it is: it has no module vllm.models.kimi_k4")
    print(*messages, sep="\n")
    print("vLLM: all checks passed")


if __name__ == "__main__":
    main()
