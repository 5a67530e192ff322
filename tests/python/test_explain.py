# SPDX-License-Identifier: Apache-2.0
"""explain() says what attn_res() would do, why not otherwise, and does nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import libattnres
import pytest
import torch


def test_explain_gives_a_reason_for_every_other_backend(make_case: Callable[..., Any]) -> None:
    explanation = libattnres.explain(*make_case().arguments)
    assert explanation.backend == "host"
    assert explanation.source == "auto"
    assert explanation.plan is None
    assert set(explanation.reasons) == {"native", "triton", "torch"}
    assert "CUDA tensors" in explanation.reasons["native"]
    assert explanation.reasons["torch"] == "host comes first"


def test_explain_writes_and_allocates_nothing_that_is_seen(make_case: Callable[..., Any]) -> None:
    case = make_case(block_write_idx=3)
    before = case.clone()
    out = torch.full_like(case.prefix, 7.0)
    libattnres.explain(*case.arguments, out=out)
    assert torch.equal(case.prefix, before.prefix)
    assert torch.equal(case.blocks, before.blocks)
    assert (out == 7.0).all()
    assert case.prefix._version == 0


@pytest.mark.parametrize(
    ("options", "environment", "backend", "source"),
    [
        ({}, "torch", "torch", "LIBATTNRES_BACKEND"),
        ({"backend": "host"}, "torch", "host", "argument"),
        ({"backend": "auto"}, "torch", "host", "auto"),
        ({}, "auto", "host", "auto"),
        ({}, "native", None, "LIBATTNRES_BACKEND"),
        ({"backend": "native"}, "", None, "argument"),
        ({"plan": libattnres.Plan("ring")}, "torch", None, "plan"),
    ],
)
def test_explain_says_who_decided(
    options: dict[str, Any],
    environment: str,
    backend: str | None,
    source: str,
    make_case: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LIBATTNRES_BACKEND", environment)
    explanation = libattnres.explain(*make_case().arguments, **options)
    assert (explanation.backend, explanation.source) == (backend, source)
    if backend is None:
        assert "CUDA tensors" in explanation.reasons["native"]
        assert "was asked for" in explanation.reasons["host"]


def test_explain_agrees_with_the_dtype_rules(make_case: Callable[..., Any]) -> None:
    explanation = libattnres.explain(*make_case(dtype=torch.float64).arguments)
    assert explanation.backend == "torch"
    assert "float64" in explanation.reasons["host"]


def test_explanation_is_json(make_case: Callable[..., Any]) -> None:
    document = json.loads(json.dumps(libattnres.explain(*make_case().arguments).as_dict()))
    assert document["backend"] == "host"
    assert document["plan"] is None


def test_explain_refuses_grad_as_attn_res_does(make_case: Callable[..., Any]) -> None:
    case = make_case()
    case.qk_weight.requires_grad_()
    with pytest.raises(RuntimeError, match=r"^qk_weight: expected .* does not require grad"):
        libattnres.explain(*case.arguments)
