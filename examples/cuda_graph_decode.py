# SPDX-License-Identifier: Apache-2.0
"""A decode loop over one CUDA graph: captured once, replayed for every step."""

import sys

import libattnres
import torch
from libattnres.nn import AttnResStack

reason = libattnres.probe().backends["native"]
if reason is not None:
    sys.exit(f"this example needs a GPU with native kernels: {reason}")

NUM_LAYERS, H, BLOCK_SIZE, BATCH, STEPS = 24, 7168, 12, 8, 64
where = {"dtype": torch.bfloat16, "device": "cuda"}
torch.manual_seed(0)
stack = AttnResStack(NUM_LAYERS, H, BLOCK_SIZE, **where)
scales = torch.rand(NUM_LAYERS, 2, 1, **where) + 0.5  # stand for the sub-layers' weights
tokens = torch.empty(BATCH, H, **where)  # what a step reads: the same memory in every replay
bank = torch.empty(BATCH, stack.num_bank_rows, H, **where)


def step(embeddings: torch.Tensor) -> torch.Tensor:
    """Hidden states of one token of each sequence."""
    return stack(
        embeddings,
        attention=lambda layer, hidden: hidden * scales[layer, 0],
        mlp=lambda layer, hidden: hidden.roll(1, dims=1) * scales[layer, 1],
        bank=bank,
    )


with torch.inference_mode():
    libattnres.warmup()  # loads the kernels, so that the first call may be captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden = step(tokens)

    eager = torch.randn(BATCH, H, **where)
    tokens.copy_(eager)
    for _ in range(STEPS):
        graph.replay()
        tokens.copy_(hidden)  # the model's head and embedding would stand here
        eager = step(eager)
assert torch.equal(tokens, eager)
print(f"{STEPS} replays of {2 * NUM_LAYERS + 1} calls equal the eager ones to the bit")
