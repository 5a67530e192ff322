# SPDX-License-Identifier: Apache-2.0
"""batch_invariant: the same bits for a token in any batch, wherever it stands; or a refusal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import libattnres
import pytest
import torch
from libattnres import _core, reference
from libattnres._call import checked_call
from libattnres.backends import triton as triton_backend

VARIABLE = "LIBATTNRES_BATCH_INVARIANT"
H = 7168


def parts(case: Any, ranges: Iterator[tuple[int, int]] | tuple[tuple[int, int], ...]) -> Iterator[Any]:
    """The same call on some of its tokens, in memory of their own."""
    for first, last in ranges:
        tokens = slice(first, last)
        yield (
            tokens,
            case.with_(
                prefix=case.prefix[tokens],
                delta=None if case.delta is None else case.delta[tokens],
                blocks=case.blocks[tokens],
            ).clone(),
        )


def assert_invariant(case: Any, ranges: tuple[tuple[int, int], ...], **options: Any) -> None:
    whole = case.clone()
    output = libattnres.attn_res(*whole.arguments, batch_invariant=True, **options)
    comparison = reference.compare(output, reference.attn_res(*case.arguments).output)
    assert comparison.ok, comparison
    for tokens, part in parts(case, ranges):
        alone = libattnres.attn_res(*part.arguments, batch_invariant=True, **options)
        assert reference.same_bits(alone, output[tokens]), tokens
        assert reference.same_bits(part.prefix, whole.prefix[tokens]), tokens
        assert reference.same_bits(part.blocks, whole.blocks[tokens]), tokens


RANGES = ((0, 1), (1, 2), (17, 18), (36, 37), (0, 5), (13, 37))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("hidden_size", [33, 7168])
@pytest.mark.parametrize("has_delta", [True, False])
@pytest.mark.parametrize("num_blocks", [0, 1, 8])
def test_host(
    dtype: torch.dtype, hidden_size: int, has_delta: bool, num_blocks: int, make_case: Callable[..., Any]
) -> None:
    case = make_case(num_tokens=37, hidden_size=hidden_size, dtype=dtype, num_blocks=num_blocks)
    if not has_delta:
        case = case.with_(delta=None, block_write_idx=3)
    assert_invariant(case, RANGES, backend="host")
    assert_invariant(case, RANGES)


def test_host_with_tokens_that_share_a_bank_entry(make_case: Callable[..., Any]) -> None:
    case = make_case(num_tokens=36, hidden_size=256, prefixes_per_row=2)
    whole = case.clone()
    output = libattnres.attn_res(*whole.arguments, batch_invariant=True)
    for entry in (0, 7, 17):
        tokens = slice(2 * entry, 2 * entry + 2)
        part = case.with_(
            prefix=case.prefix[tokens], delta=case.delta[tokens], blocks=case.blocks[entry : entry + 1]
        ).clone()
        alone = libattnres.attn_res(*part.arguments, batch_invariant=True)
        assert reference.same_bits(alone, output[tokens])


@pytest.mark.parametrize("source", ["argument", "environment"])
def test_torch_refuses_and_auto_passes_it_over(
    source: str, make_case: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"batch_invariant": True}
    if source == "environment":
        monkeypatch.setenv(VARIABLE, "1")
        options = {}
    case = make_case()
    before = case.clone()
    with pytest.raises(
        libattnres.UnsupportedError, match=r"^backend: .* got 'torch': torch cannot be batch-"
    ):
        libattnres.attn_res(*case.arguments, backend="torch", **options)
    explanation = libattnres.explain(*case.arguments, **options)
    assert explanation.backend == "host"
    assert explanation.reasons["torch"].startswith("torch cannot be batch-invariant")
    wide = make_case(dtype=torch.float64)
    with pytest.raises(libattnres.UnsupportedError, match=r"host computes.*; torch: torch cannot be batch-"):
        libattnres.attn_res(*wide.arguments, **options)
    assert libattnres.explain(*wide.arguments, **options).backend is None
    assert torch.equal(case.prefix, before.prefix)


def test_the_argument_beats_the_environment(
    make_case: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    case = make_case()
    assert libattnres.explain(*case.arguments, backend="torch", batch_invariant=False).backend == "torch"
    libattnres.attn_res(*case.arguments, backend="torch", batch_invariant=False)
    for text in ("", "0"):
        monkeypatch.setenv(VARIABLE, text)
        libattnres.attn_res(*case.arguments, backend="torch")


@pytest.mark.parametrize("backend", ["host", "torch", None])
@pytest.mark.parametrize("text", ["2", "true", " 1", "-1"])
def test_a_wrong_environment_value_is_an_error_that_names_the_variable(
    text: str, backend: str | None, make_case: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, text)
    case = make_case()
    before = case.clone()
    with pytest.raises(ValueError, match=f"^{VARIABLE}: expected 0 or 1, got '{text}'$"):
        libattnres.attn_res(*case.arguments, backend=backend)
    with pytest.raises(ValueError, match=f"^{VARIABLE}: expected 0 or 1"):
        libattnres.explain(*case.arguments)
    assert torch.equal(case.prefix, before.prefix)
    # An argument leaves nothing for the variable to say.
    libattnres.attn_res(*case.arguments, backend=backend, batch_invariant=False)


def test_the_library_reads_the_variable_too(
    make_case: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = checked_call(*make_case().arguments, None, "wait")
    arguments = list(call.core_args())
    arguments[_core.CALL_FIELDS.index("batch_invariant")] = 0
    monkeypatch.setenv(VARIABLE, "yes")
    with pytest.raises(ValueError, match=f"^{VARIABLE}: expected 0 or 1, got 'yes'$"):
        _core.check(*arguments, False)
    arguments[_core.CALL_FIELDS.index("batch_invariant")] = 2
    with pytest.raises(ValueError, match=r"^batch_invariant: expected -1\.\.1, got 2$"):
        _core.check(*arguments, False)


@pytest.mark.parametrize("value", [1, 0, "1", torch.tensor(True)])
def test_only_a_bool_is_taken(value: Any, make_case: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"^batch_invariant: expected a bool or None, got "):
        libattnres.attn_res(*make_case().arguments, batch_invariant=value)


def test_ops_take_it(make_case: Callable[..., Any]) -> None:
    case = make_case()
    weights = case.arguments[3:6]
    expected = libattnres.attn_res(*case.clone().arguments)
    got = torch.ops.libattnres.attn_res_add_(
        case.prefix, case.delta, case.blocks, *weights, case.num_blocks, batch_invariant=True
    )
    assert reference.same_bits(got, expected)
    with pytest.raises(libattnres.UnsupportedError, match="torch cannot be batch-invariant"):
        torch.ops.libattnres.attn_res(
            case.prefix, case.blocks, *weights, case.num_blocks, backend="torch", batch_invariant=True
        )


def test_compiled_calls_keep_it(make_case: Callable[..., Any]) -> None:
    case = make_case()

    def call(prefix: torch.Tensor) -> torch.Tensor:
        return libattnres.attn_res(prefix, *case.arguments[1:], backend="torch", batch_invariant=True)

    with pytest.raises(Exception, match="torch cannot be batch-invariant"):
        torch.compile(call, backend="eager")(case.prefix)


def test_the_native_plan_does_not_follow_from_the_batch(make_case: Callable[..., Any]) -> None:
    if not libattnres.permutations():
        pytest.skip("built without CUDA")
    target = libattnres.probe().built_targets[0].removesuffix("a")
    compute = (int(target[:-1]), int(target[-1]))
    for num_blocks, rows_per_stage in ((0, 2), (1, 2), (5, 2), (6, 3), (8, 3)):
        kernels = set()
        for num_tokens in (1, 16, 128, 300):
            case = make_case(num_tokens=num_tokens, hidden_size=H, num_blocks=num_blocks)
            for pdl in ("wait", "early", "off"):
                call = checked_call(*case.arguments, None, pdl, True)
                for num_sms in (78, 132, 148):
                    plan = _core.plan_for(*call.core_args(), *compute, num_sms)
                    kernels.add((plan["kernel"], plan["rows_per_stage"], plan["cluster_size"]))
        assert kernels == {("ring", rows_per_stage, 0)}
    forced = libattnres.Plan("cluster", cluster_size=4)
    assert _core.plan_for(*call.core_args(forced), *compute, 132)["cluster_size"] == 4
    with pytest.raises(libattnres.UnsupportedError, match=r"^cluster_size: expected one"):
        _core.plan_for(*call.core_args(libattnres.Plan("cluster")), *compute, 132)


def test_triton_has_one_build_for_any_number_of_tokens() -> None:
    sizes = (8192, 2, 132, 227 << 10)
    policies = {triton_backend.policy(num_tokens, *sizes) for num_tokens in (1, 66, 67, 8192)}
    assert len(policies) == 2
    assert triton_backend.policy(None, *sizes) == triton_backend.policy(8192, *sizes)


def test_triton_refuses_what_would_be_another_build(make_case: Callable[..., Any]) -> None:
    def strides(case: Any, out: torch.Tensor | None = None) -> tuple[int, ...]:
        arguments = case.arguments[:6]
        return triton_backend._strides_of_one_build(*arguments, case.prefix if out is None else out)

    case = make_case()
    wide = torch.zeros(4, 65, dtype=torch.bfloat16)
    assert strides(case) == (64, 64, 512, 64, 64)
    assert strides(case.with_(delta=None)) == (64, 0, 512, 64, 64)
    with pytest.raises(libattnres.UnsupportedError, match="multiple of 16, got H=100"):
        strides(make_case(hidden_size=100))
    with pytest.raises(libattnres.UnsupportedError, match="multiples of 16 elements, got 65 in delta"):
        strides(case.with_(delta=wide[:, :64]))
    with pytest.raises(libattnres.UnsupportedError, match="multiples of 16 elements, got 65 in out"):
        strides(case, wide[:, :64])
    with pytest.raises(
        libattnres.UnsupportedError, match="bases at multiples of 16 bytes, got another delta"
    ):
        strides(case.with_(delta=wide[:, 1:]))
    # One token has no stride between tokens, whatever its tensor says.
    lone = case.with_(prefix=case.prefix[:1], delta=wide[:1, :64], blocks=case.blocks[:1])
    assert strides(lone) == (64, 64, 64, 64, 64)


# On a GPU


GPU_RANGES = ((0, 1), (1, 2), (131, 132), (132, 133), (299, 300), (0, 17), (3, 140), (200, 300))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["native", "triton"])
@pytest.mark.parametrize("pdl", ["wait", "early"])
@pytest.mark.parametrize("has_output_norm", [True, False])
@pytest.mark.parametrize("num_blocks", [0, 1, 2, 3, 8])
def test_on_a_gpu(
    backend: str, pdl: str, has_output_norm: bool, num_blocks: int, make_case: Callable[..., Any]
) -> None:
    reason = libattnres.probe().backends[backend]
    if reason is not None:
        pytest.skip(reason)
    case = make_case(num_tokens=300, hidden_size=H, device="cuda", num_blocks=num_blocks)
    if not has_output_norm:
        case = case.with_(output_norm_weight=None)
    assert_invariant(case, GPU_RANGES, backend=backend, pdl=pdl)
    assert_invariant(case.with_(delta=None, block_write_idx=1), GPU_RANGES, backend=backend)


@pytest.mark.gpu
def test_native_kernels_that_a_plan_names_are_invariant(make_case: Callable[..., Any]) -> None:
    reason = libattnres.probe().backends["native"]
    if reason is not None:
        pytest.skip(reason)
    case = make_case(num_tokens=300, hidden_size=H, device="cuda", num_blocks=8)
    for plan in (
        libattnres.Plan("cluster", cluster_size=4),
        libattnres.Plan("ring", rows_per_stage=2, ctas_per_sm=1),
    ):
        assert_invariant(case, GPU_RANGES, plan=plan)
