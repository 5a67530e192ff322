# SPDX-License-Identifier: Apache-2.0
"""Argument, then environment, then the first backend that can serve; a forced one never falls through."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import libattnres
import pytest
import torch
from libattnres import _dispatch
from libattnres.backends import host
from libattnres.backends import torch as torch_backend


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the backends that ran, in order; the fast path is off so that each is seen."""
    from libattnres import _api

    names: list[str] = []

    def spy(name: str, module: Any) -> None:
        forward = module.forward

        def recording(*arguments: Any) -> None:
            names.append(name)
            forward(*arguments)

        monkeypatch.setattr(module, "forward", recording)

    spy("host", host)
    spy("torch", torch_backend)
    monkeypatch.setattr(_api, "_forward_tensors", lambda *arguments: False)
    return names


def test_auto_takes_host_for_cpu_tensors(ran: list[str], make_case: Callable[..., Any]) -> None:
    libattnres.attn_res(*make_case().arguments)
    assert ran == ["host"]


def test_auto_takes_torch_for_a_dtype_that_host_lacks(ran: list[str], make_case: Callable[..., Any]) -> None:
    libattnres.attn_res(*make_case(dtype=torch.float64).arguments)
    assert ran == ["torch"]


def test_the_argument_beats_the_environment(
    ran: list[str], make_case: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIBATTNRES_BACKEND", "torch")
    libattnres.attn_res(*make_case().arguments)
    libattnres.attn_res(*make_case().arguments, backend="host")
    libattnres.attn_res(*make_case().arguments, backend="auto")
    monkeypatch.setenv("LIBATTNRES_BACKEND", "")
    libattnres.attn_res(*make_case().arguments)
    monkeypatch.setenv("LIBATTNRES_BACKEND", "auto")
    libattnres.attn_res(*make_case().arguments)
    assert ran == ["torch", "host", "host", "host", "host"]


def test_the_environment_is_seen_by_the_fast_path(
    make_case: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[bool] = []
    forward = torch_backend.forward
    monkeypatch.setattr(torch_backend, "forward", lambda *a: (called.append(True), forward(*a))[1])
    libattnres.attn_res(*make_case().arguments)
    assert not called
    monkeypatch.setenv("LIBATTNRES_BACKEND", "torch")
    libattnres.attn_res(*make_case().arguments)
    assert called == [True]


def test_a_wrong_environment_value_is_an_error_that_names_the_variable(
    make_case: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIBATTNRES_BACKEND", "cuda")
    case = make_case()
    before = case.clone()
    with pytest.raises(ValueError, match=r"^LIBATTNRES_BACKEND: expected one of 'auto', .*, got 'cuda'"):
        libattnres.attn_res(*case.arguments)
    with pytest.raises(ValueError, match=r"^LIBATTNRES_BACKEND: "):
        libattnres.explain(*case.arguments)
    assert torch.equal(case.prefix, before.prefix)


@pytest.mark.parametrize("backend", ["native", "triton"])
@pytest.mark.parametrize("source", ["argument", "environment"])
def test_a_forced_backend_that_cannot_serve_raises_with_the_reason(
    backend: str,
    source: str,
    ran: list[str],
    make_case: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    case = make_case()
    before = case.clone()
    options = {"backend": backend}
    culprit = "backend"
    if source == "environment":
        monkeypatch.setenv("LIBATTNRES_BACKEND", backend)
        options, culprit = {}, "LIBATTNRES_BACKEND"
    with pytest.raises(
        libattnres.UnsupportedError, match=f"^{culprit}: expected .*, got '{backend}': .*CUDA tensors"
    ):
        libattnres.attn_res(*case.arguments, **options)
    assert ran == []
    assert torch.equal(case.prefix, before.prefix)
    assert torch.equal(case.blocks, before.blocks)


def test_host_refuses_float64_when_forced(ran: list[str], make_case: Callable[..., Any]) -> None:
    with pytest.raises(libattnres.UnsupportedError, match="host computes bfloat16, float16 and float32"):
        libattnres.attn_res(*make_case(dtype=torch.float64).arguments, backend="host")
    assert ran == []


def test_unsupported_error_is_a_runtime_error_of_this_package() -> None:
    assert issubclass(libattnres.UnsupportedError, RuntimeError)
    assert libattnres.UnsupportedError.__module__ == "libattnres"
    assert libattnres.UnsupportedError.__doc__


def test_a_plan_asks_for_the_native_backend(
    ran: list[str], make_case: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = libattnres.Plan(kernel="ring", rows_per_stage=2)
    monkeypatch.setenv("LIBATTNRES_BACKEND", "torch")  # an argument beats it
    with pytest.raises(libattnres.UnsupportedError, match=r"^plan: expected .*, got 'native': "):
        libattnres.attn_res(*make_case().arguments, plan=plan)
    with pytest.raises(ValueError, match=r"^plan: expected None with backend 'torch', got Plan"):
        libattnres.attn_res(*make_case().arguments, plan=plan, backend="torch")
    with pytest.raises(TypeError, match=r"^plan: expected a libattnres\.Plan, got dict"):
        libattnres.attn_res(*make_case().arguments, plan={"kernel": "ring"})
    assert ran == []


class Fake:
    """A backend that says what it is told to say and records its runs."""

    def __init__(self, name: str, log: list[str], reason: str | None, refuses: bool = False) -> None:
        self.name, self.log, self.reason, self.refuses = name, log, reason, refuses

    def unsupported(self, *arguments: Any) -> str | None:
        return self.reason

    def forward(self, *arguments: Any) -> None:
        if self.refuses:
            raise libattnres.UnsupportedError(f"{self.name} refuses these arguments")
        self.log.append(self.name)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Dispatch CPU tensors as if they were CUDA tensors, over fake backends."""

    def install(**reasons: str | None) -> list[str]:
        from libattnres import _api

        log: list[str] = []
        fakes = {name: Fake(name, log, reason, refuses=reason == "late") for name, reason in reasons.items()}
        for fake in fakes.values():
            if fake.refuses:
                fake.reason = None
        monkeypatch.setattr(_api, "_forward_tensors", lambda *arguments: False)
        monkeypatch.setitem(_dispatch.AUTO_ORDER, "cpu", _dispatch.AUTO_ORDER["cuda"])
        monkeypatch.setattr(_dispatch, "load", fakes.__getitem__)
        monkeypatch.setattr(_dispatch, "forward", lambda name, call, plan: fakes[name].forward(call))
        return log

    return install


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [
        ({"native": None, "triton": None, "torch": None}, ["native"]),
        ({"native": "no kernel", "triton": None, "torch": None}, ["triton"]),
        ({"native": "late", "triton": None, "torch": None}, ["triton"]),  # refused at launch, nothing written
        ({"native": "no kernel", "triton": "no compiler", "torch": None}, ["torch"]),
    ],
)
def test_auto_falls_back_in_order_on_cuda_tensors(
    reasons: dict[str, str | None],
    expected: list[str],
    as_on_a_gpu: Callable[..., list[str]],
    make_case: Callable[..., Any],
) -> None:
    log = as_on_a_gpu(**reasons)
    libattnres.attn_res(*make_case().arguments)
    assert log == expected


def test_auto_says_every_reason_when_nothing_can_serve(
    as_on_a_gpu: Callable[..., list[str]], make_case: Callable[..., Any]
) -> None:
    log = as_on_a_gpu(native="no kernel", triton="no compiler", torch="no memory")
    with pytest.raises(
        libattnres.UnsupportedError, match="native: no kernel; triton: no compiler; torch: no memory"
    ):
        libattnres.attn_res(*make_case().arguments)
    assert log == []


@pytest.mark.parametrize("reason", ["no kernel", "late"])
def test_a_forced_native_backend_never_falls_through(
    reason: str, as_on_a_gpu: Callable[..., list[str]], make_case: Callable[..., Any]
) -> None:
    log = as_on_a_gpu(native=reason, triton=None, torch=None)
    with pytest.raises(libattnres.UnsupportedError, match=r"^backend: expected .*, got 'native': "):
        libattnres.attn_res(*make_case().arguments, backend="native")
    assert log == []


def test_a_forked_child_can_call(make_case: Callable[..., Any]) -> None:
    """Neither import nor a CPU call leaves a CUDA context or dead worker threads to a child."""
    program = """
import os, torch, libattnres
def call():
    H = 64
    weight = torch.ones(H)
    return libattnres.attn_res(torch.ones(4, H), torch.ones(4, H), torch.ones(4, 8, H),
                               weight, weight, None, 8)
expected = call()
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(call(), expected) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
