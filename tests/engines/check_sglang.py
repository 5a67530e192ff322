# SPDX-License-Identifier: Apache-2.0
"""The plugin in a real SGLang, on a machine without a GPU. Not part of the normal test run:

    python -m venv sglang && sglang/bin/pip install sglang==0.5.23 && sglang/bin/pip install --no-deps .
    sglang/bin/python tests/engines/check_sglang.py

SGLang loads its plugins and its snapshot bank itself. Then reads of the bank on CPU tensors are held against
SGLang's Triton kernels under Triton's interpreter, in float32 and float16, where both round alike.
"""

from __future__ import annotations

import os

os.environ.update(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="", LIBATTNRES_BACKEND="host")
os.environ.pop("LIBATTNRES_SGLANG", None)

import logging
import sys
import types
from dataclasses import replace
from importlib import import_module, metadata
from typing import Any

import torch
from libattnres import reference
from libattnres.engines import replacement, sglang

HIDDEN_SIZE = 7168
NUM_TOKENS = 3
NUM_BANK_ROWS = 4
# SGLang mixes in the tensors' type and normalises afterwards: two roundings.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3}

messages: list[str] = []


class Collector(logging.Handler):
    """Keeps what the plugin says."""

    def emit(self, record: logging.LogRecord) -> None:
        """One message."""
        messages.append(f"{record.levelname}: {record.getMessage()}")


def said(text: str) -> None:
    """The plugin must have said it."""
    assert any(text in message for message in messages), f"not said: {text!r}; said: {messages}"


class Norm(torch.nn.Module):
    """What a read needs of SGLang's RMSNorm, whose own CPU path wants SGLang's CPU kernels."""

    def __init__(self, weight: torch.Tensor, variance_epsilon: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.variance_epsilon = variance_epsilon

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """In float32, one rounding."""
        wide = values.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return (wide * scale * self.weight.float()).to(values.dtype)


def check_reads(module: Any, dtype: torch.dtype, rows: slice | None) -> float:
    """A stack's reads, with an add, without, and with a write; through our function and SGLang's own."""
    ours = module.AttnResidual.forward
    results: list[list[torch.Tensor]] = []
    for forward in (ours.__wrapped__, ours):
        generator = torch.Generator().manual_seed(7)

        def normal(*shape: int, scale: float = 1.0, generator: torch.Generator = generator) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator) * scale).to(dtype)

        score_norm = Norm(normal(HIDDEN_SIZE, scale=0.3) + 1, 1e-5)
        out_norm = Norm(normal(HIDDEN_SIZE, scale=0.2) + 1, 1e-5)
        score_proj = types.SimpleNamespace(weight=normal(1, HIDDEN_SIZE, scale=2 * HIDDEN_SIZE**-0.5))
        modules = (score_proj, score_norm, out_norm)
        count = NUM_TOKENS if rows is None else rows.stop - rows.start
        bank = module.AttnResidual(normal(NUM_TOKENS, HIDDEN_SIZE), NUM_BANK_ROWS)
        bank.block_residual.zero_()
        results.append([])
        with torch.inference_mode():
            prefix: torch.Tensor | None = None
            for step in range(NUM_BANK_ROWS + 1):
                hidden_states = normal(count, HIDDEN_SIZE)
                write = step < NUM_BANK_ROWS
                output, formed = forward(bank, hidden_states, prefix, *modules, rows=rows, write=write)
                results[-1] += [output, formed.clone()]
                # A write restarts the residual; every other time a plain read comes between.
                prefix = None
                if step % 2 and write:
                    prefix = formed
                    output, prefix = forward(bank, normal(count, HIDDEN_SIZE), prefix, *modules, rows=rows)
                    results[-1] += [output, prefix.clone()]
                if step == 0:
                    assert bank.num_valid_blocks == 1
        assert bank.num_valid_blocks == NUM_BANK_ROWS
        results[-1].append(bank.block_residual)
    worst = 0.0
    for index, (wanted, value) in enumerate(zip(*results, strict=True)):
        assert value.dtype is dtype
        if index % 2 or index == len(results[0]) - 1:
            assert reference.same_bits(value, wanted), "prefix or bank differs"
        distance = float((value.double() - wanted.double()).norm() / wanted.double().norm())
        assert distance <= TOLERANCES[dtype], f"differs by {distance:.2e}"
        worst = max(worst, distance)
    return worst


def check_stream(module: Any, dtype: torch.dtype) -> float:
    """The read without add and norm."""
    generator = torch.Generator().manual_seed(8)
    prefix, bank = (
        torch.randn(*shape, HIDDEN_SIZE, generator=generator).to(dtype)
        for shape in ((NUM_TOKENS,), (NUM_TOKENS, NUM_BANK_ROWS))
    )
    score_norm = Norm(torch.ones(HIDDEN_SIZE, dtype=dtype), 1e-5)
    score_proj = types.SimpleNamespace(weight=torch.full((1, HIDDEN_SIZE), 0.01, dtype=dtype))
    stream = module.aggregate_stream
    with torch.inference_mode():
        wanted = stream.__wrapped__(prefix, bank, 3, score_proj, score_norm)
        value = stream(prefix, bank, 3, score_proj, score_norm)
    distance = float((value.double() - wanted.double()).norm() / wanted.double().norm())
    assert distance <= TOLERANCES[dtype], f"differs by {distance:.2e}"
    return distance


def main() -> None:
    """All checks, in the order in which an SGLang process would meet them."""
    sglang.logger.addHandler(Collector())
    sglang.logger.setLevel(logging.INFO)
    try:
        version = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        version = "of unknown version"
    print(f"SGLang {version}, torch {torch.__version__}, triton {metadata.version('triton')}")
    import_module("sglang.srt.plugins").load_plugins()
    said("waits for sglang.srt.layers.attn_residual")
    assert sglang.ENGINE.module not in sys.modules, "the plugin imported it"
    module = import_module(sglang.ENGINE.module)
    said("replaced AttnResidual.forward and aggregate_stream of sglang.srt.layers.attn_residual")
    bank = import_module("sglang.srt.layers.layer_boundary.residual.attn_bank")
    assert bank.AttnResidual.forward is module.AttnResidual.forward
    assert hasattr(module.AttnResidual.forward, "__wrapped__")
    for dtype in TOLERANCES:
        for rows in (None, slice(1, 3)):
            where = "all tokens" if rows is None else f"tokens {rows.start} to {rows.stop}"
            distance = check_reads(module, dtype, rows)
            print(f"reads and writes of {where}, {dtype}: relative L2 distance {distance:.0e}")
        print(f"stream, {dtype}: relative L2 distance {check_stream(module, dtype):.0e}")
    said("serves attention residuals on cpu")
    assert not any("left to SGLang" in message for message in messages), messages
    changed = replace(
        sglang.ENGINE,
        functions=(replace(sglang.ENGINE.functions[0], parameters=("self", "hidden_states")),),
    )
    replacement.install(changed)
    said("is left as it is: sglang.srt.layers.attn_residual.AttnResidual.forward: expected parameters")
    replacement.install(replace(sglang.ENGINE, module="sglang.srt.layers.no_residual"))
    said("is left as it is: it has no module sglang.srt.layers.no_residual")
    print(*messages, sep="\n")
    print("SGLang: all checks passed")


if __name__ == "__main__":
    main()
