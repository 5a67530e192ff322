# SPDX-License-Identifier: Apache-2.0
"""One call of the operator on the best backend of this machine."""

import libattnres
import torch

M, R, H = 16, 8, 7168  # tokens, bank rows, hidden size
where = {"dtype": torch.bfloat16, "device": "cuda" if torch.cuda.is_available() else "cpu"}
prefix, delta = torch.randn(M, H, **where), torch.randn(M, H, **where)
blocks = torch.randn(M, R, H, **where)
norm_weight, qk_weight, output_norm_weight = torch.randn(3, H, **where)
arguments = (prefix, delta, blocks, norm_weight, qk_weight, output_norm_weight)

output = libattnres.attn_res(*arguments, num_blocks=3, block_write_idx=3)  # updates prefix, blocks[:, 3]
assert torch.equal(blocks[:, 3], prefix)
print(f"{list(output.shape)} on the {libattnres.explain(*arguments, num_blocks=3).backend} backend")
