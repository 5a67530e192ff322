# SPDX-License-Identifier: Apache-2.0
"""A model's step with Attention Residuals between its sub-layers, as one graph of torch.compile."""

import argparse

import torch
from libattnres.nn import AttnResStack
from torch import nn


class Model(nn.Module):
    """Matrices stand for attention and MLP; the residual stream is the stack's."""

    def __init__(self, num_layers: int, hidden_size: int, block_size: int, **where) -> None:
        super().__init__()
        self.stack = AttnResStack(num_layers, hidden_size, block_size, **where)

        def sublayers():
            return nn.ModuleList(
                nn.Linear(hidden_size, hidden_size, bias=False, **where) for _ in range(num_layers)
            )

        self.attention, self.mlp = sublayers(), sublayers()

    def forward(self, embeddings: torch.Tensor) -> torch.Tensor:
        """``[tokens, hidden size]``, before the final norm; what ``self.stack(...)`` does, step by step."""
        stack, output = self.stack, None
        stream = stack.begin(embeddings)
        for layer in stack.layer_range:
            hidden, stream = stack.before_attention(layer, stream, output)
            hidden, stream = stack.before_mlp(layer, stream, self.attention[layer](hidden))
            output = self.mlp[layer](hidden)
        return stack.finish(stream, output)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--compiler", default="inductor", help="backend of torch.compile")
options = parser.parse_args()

torch.manual_seed(0)
on_gpu = torch.cuda.is_available()
where = {"dtype": torch.bfloat16, "device": "cuda" if on_gpu else "cpu"}
hidden_size = 7168 if on_gpu else 256
with torch.inference_mode():
    model = Model(num_layers=5, hidden_size=hidden_size, block_size=2, **where)
    for query in (weight for name, weight in model.stack.named_parameters() if "proj" in name):
        query.normal_(std=hidden_size**-0.5)
    embeddings = torch.randn(16, hidden_size, **where)
    expected = model(embeddings)
    step = torch.compile(model, fullgraph=True, backend=options.compiler)
    difference = (step(embeddings).float() - expected.float()).norm() / expected.float().norm()
assert difference < 2e-2, difference
print(f"compiled and eager differ by {difference:.1e} of the hidden states, rounding included")
