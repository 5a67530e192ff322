# SPDX-License-Identifier: Apache-2.0
from typing import Final

import torch

from libattnres._records import Permutation, PlanInfo, ProbeInfo

class UnsupportedError(RuntimeError): ...

CALL_FIELDS: Final[tuple[str, ...]]

# `*call` is one value per name of CALL_FIELDS.
def forward(*call_and_stream: int | float) -> None: ...
def forward_host(*call: int | float) -> None: ...
def check(*call_and_on_device: int | float) -> None: ...
def plan(*call: int | float) -> PlanInfo: ...
def plan_for(*call_and_compute_major_minor_num_sms: int | float) -> PlanInfo: ...
def bind_tensors(
    tensor_type: type[torch.Tensor],
    parameter_type: type[torch.Tensor],
    exchange_api: object,
    /,
) -> bool: ...
def forward_tensors(
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
    pdl: str,
    backend: str | None,
    /,
) -> bool: ...
def probe(device: int = -1) -> ProbeInfo: ...
def warmup(device: int = -1) -> None: ...
def num_permutations() -> int: ...
def permutations() -> list[Permutation]: ...
def version() -> str: ...
