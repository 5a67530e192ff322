# SPDX-License-Identifier: Apache-2.0
"""The torch ops: schemas that tell the truth, fake kernels with the real errors, no silent derivative."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import libattnres
import pytest
import torch
from libattnres import _ops, reference
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.library import opcheck

ops = torch.ops.libattnres


def op_arguments(name: str, case: Any) -> tuple[Any, ...]:
    """Arguments of an op that make it write all that its schema says."""
    prefix, delta, blocks, *weights = case.arguments[:7]
    return {
        "attn_res": (prefix, blocks, *weights),
        "attn_res_add_": (prefix, delta, blocks, *weights),
        "attn_res_write_": (prefix, blocks, *weights, 3),
        "attn_res_": (prefix, delta, blocks, *weights, 3),
        "attn_res_out_": (prefix, delta, blocks, *weights, 3, torch.empty_like(prefix)),
        "attn_res_functional": (prefix, delta, blocks, *weights, 3),
    }[name]


@pytest.mark.parametrize("has_output_norm", [True, False])
@pytest.mark.parametrize("name", _ops.OPS)
def test_opcheck(name: str, has_output_norm: bool, make_case: Callable[..., Any]) -> None:
    case = make_case()
    if not has_output_norm:
        case = case.with_(output_norm_weight=None)
    opcheck(getattr(ops, name).default, op_arguments(name, case))


@pytest.mark.parametrize("name", ["attn_res_", "attn_res_functional"])
def test_opcheck_without_delta_and_write(name: str, make_case: Callable[..., Any]) -> None:
    case = make_case()
    opcheck(getattr(ops, name).default, (case.prefix, None, case.blocks, *case.arguments[3:7], -1))


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("attn_res", set()),
        ("attn_res_add_", {"prefix"}),
        ("attn_res_write_", {"blocks"}),
        ("attn_res_", {"prefix", "blocks"}),
        ("attn_res_out_", {"prefix", "blocks", "out"}),
        ("attn_res_functional", set()),
    ],
)
def test_schema_says_what_is_written(name: str, written: set[str], make_case: Callable[..., Any]) -> None:
    schema = getattr(ops, name).default._schema
    declared = {
        argument.name
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    assert declared == written

    arguments = op_arguments(name, make_case())
    names = [argument.name for argument in schema.arguments]
    before = [value.clone() if isinstance(value, torch.Tensor) else value for value in arguments]
    getattr(ops, name)(*arguments)
    changed = {
        name
        for name, value, old in zip(names, arguments, before, strict=False)
        if isinstance(value, torch.Tensor) and not reference.same_bits(value, old)
    }
    assert changed == written


@pytest.mark.parametrize("name", _ops.OPS)
def test_op_equals_attn_res(name: str, make_case: Callable[..., Any]) -> None:
    case = make_case()
    arguments = op_arguments(name, case.clone())
    result = getattr(ops, name)(*arguments)
    if name in ("attn_res", "attn_res_write_"):
        case = case.with_(delta=None)
    if name not in ("attn_res", "attn_res_add_"):
        case = case.with_(block_write_idx=3)
    expected = libattnres.attn_res(*case.arguments)
    if name == "attn_res_functional":
        output, new_prefix, new_blocks = result
        assert reference.same_bits(new_prefix, case.prefix)
        assert reference.same_bits(new_blocks, case.blocks)
    else:
        output = arguments[-1] if name == "attn_res_out_" else result
    assert reference.same_bits(output, expected)


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("name", [name for name in _ops.OPS if name.endswith("_")])
def test_op_writes_at_a_place_in_a_base(name: str, start: int, make_case: Callable[..., Any]) -> None:
    """As a trace calls it: what is written is named by sizes, strides and where it begins in the base."""
    case = make_case()
    schema = getattr(ops, name).default._schema
    names = [argument.name for argument in schema.arguments]

    def arguments(memory: torch.Tensor) -> dict[str, Any]:
        views = case.with_(prefix=memory[:, 8], blocks=memory[:, :8])
        named = dict(zip(names, op_arguments(name, views), strict=False))
        if "out" in named:
            named["out"] = memory[:, 9]
        return named

    storage = torch.randn(6, 10, 64).bfloat16()
    wanted, got = storage.clone(), storage.clone()
    expected = getattr(ops, name)(**arguments(wanted[start : start + 4]))
    base = got[start : start + 4]
    on_bases = arguments(base)
    places = {
        "prefix": [4, 64, 640, 1, 512],
        "blocks": [4, 8, 64, 640, 64, 1, 0],
        "out": [4, 64, 640, 1, 576],
    }
    for written in (argument.removesuffix("_place") for argument in names if argument.endswith("_place")):
        on_bases |= {written: base, f"{written}_place": places[written]}
    result = getattr(ops, name)(**on_bases)
    assert reference.same_bits(got, wanted)
    assert not reference.same_bits(got, storage)
    if name != "attn_res_out_":
        assert reference.same_bits(result, expected)
    with FakeTensorMode() as mode:
        fakes = {
            argument: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
            for argument, value in on_bases.items()
        }
        fake = getattr(ops, name)(**fakes)
    if name != "attn_res_out_":
        assert fake.shape == result.shape


@pytest.mark.parametrize("name", _ops.OPS)
def test_ops_raise_rather_than_detach(name: str, make_case: Callable[..., Any]) -> None:
    case = make_case()
    case.qk_weight.requires_grad_()
    arguments = op_arguments(name, case)
    with pytest.raises(RuntimeError, match=r"^qk_weight: expected .* does not require grad"):
        getattr(ops, name)(*arguments)
    with torch.no_grad():
        getattr(ops, name)(*arguments)


def test_ops_validate_as_attn_res_does(make_case: Callable[..., Any]) -> None:
    case = make_case()
    with pytest.raises(ValueError, match=r"^num_blocks: expected 0\.\.8, got 9"):
        ops.attn_res(case.prefix, case.blocks, *case.arguments[3:6], 9)
    with pytest.raises(ValueError, match=r"^backend: expected one of"):
        ops.attn_res(case.prefix, case.blocks, *case.arguments[3:7], backend="cuda")
    with pytest.raises(ValueError, match=r"^plan: expected \[kernel"):
        ops.attn_res(case.prefix, case.blocks, *case.arguments[3:7], plan=[3])


def on_meta(case: Any) -> Any:
    """The same sizes and strides without memory."""
    return case.with_(
        **{
            name: torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            for name in case.__dataclass_fields__
            if isinstance(value := getattr(case, name), torch.Tensor)
        }
    )


def faked(case: Any, mode: FakeTensorMode) -> Any:
    return case.with_(
        **{
            name: mode.from_tensor(value)
            for name in case.__dataclass_fields__
            if isinstance(value := getattr(case, name), torch.Tensor)
        }
    )


@pytest.mark.parametrize("is_symbolic", [False, True])
def test_fake_tensors_get_shapes(is_symbolic: bool, make_case: Callable[..., Any]) -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv() if is_symbolic else None, static_shapes=not is_symbolic)
    fake = faked(make_case(num_tokens=6), mode)
    with mode:
        assert isinstance(fake.prefix.shape[0], torch.SymInt) == is_symbolic
        output = libattnres.attn_res(*fake.arguments)
        assert output.shape == fake.prefix.shape
        assert output.dtype is torch.bfloat16
        assert output.stride() == (64, 1)
        out = torch.empty_like(fake.prefix)
        assert libattnres.attn_res(*fake.arguments, out=out) is out


def test_token_counts_that_depend_on_data_can_be_traced(make_case: Callable[..., Any]) -> None:
    """Nothing is known of such a number, so nothing may be asked of it."""
    case = make_case(block_write_idx=3)
    shape_env = ShapeEnv()
    with FakeTensorMode(shape_env=shape_env, static_shapes=True) as mode:
        fake = faked(case, mode)
        num_tokens = shape_env.create_unbacked_symint()
        prefix, blocks = torch.empty(num_tokens, 64).bfloat16(), torch.empty(num_tokens, 8, 64).bfloat16()
        fake = fake.with_(prefix=prefix, delta=torch.empty_like(prefix), blocks=blocks)
        output = libattnres.attn_res(*fake.arguments)
        assert output.shape == (num_tokens, 64)
        with pytest.raises(ValueError, match=r"^delta: expected dtype"):
            libattnres.attn_res(*fake.with_(delta=prefix.float()).arguments)


def test_meta_tensors_get_shapes(make_case: Callable[..., Any]) -> None:
    case = on_meta(make_case(num_tokens=7))
    padded = torch.empty(7, 96, dtype=torch.bfloat16, device="meta")[:, :64]
    for prefix in (case.prefix, padded):
        output = libattnres.attn_res(*case.with_(prefix=prefix).arguments)
        assert output.device.type == "meta"
        assert output.shape == (7, 64)
        assert output.stride() == (64, 1)


# The errors that need no memory and no machine: (exception, text, what to change, options).
FAKE_ERRORS: dict[str, tuple[type[Exception], str, Callable[[Any], dict[str, Any]], dict[str, Any]]] = {
    "num_blocks": (ValueError, "num_blocks: expected 0..8, got 9", lambda c: {"num_blocks": 9}, {}),
    "num_blocks_of_a_bank": (
        ValueError,
        "num_blocks: expected 0..2, got 3",
        lambda c: {"blocks": c.blocks[:, :2]},
        {},
    ),
    "num_blocks_type": (
        TypeError,
        "num_blocks: expected an int, got bool",
        lambda c: {"num_blocks": True},
        {},
    ),
    "num_blocks_width": (
        ValueError,
        "num_blocks: expected a 64-bit integer, got 1180591620717411303424",
        lambda c: {"num_blocks": 2**70},
        {},
    ),
    "block_write_idx": (
        ValueError,
        "block_write_idx: expected -1..7, got 8",
        lambda c: {"block_write_idx": 8},
        {},
    ),
    "block_write_idx_shared": (
        ValueError,
        "block_write_idx: expected -1 when 2 tokens share a bank entry, got 0",
        lambda c: {"blocks": c.blocks[:2], "block_write_idx": 0},
        {},
    ),
    "eps": (ValueError, "eps: expected a finite number >= 0, got -1.000000", lambda c: {"eps": -1.0}, {}),
    "eps_type": (TypeError, "eps: expected a float, got str", lambda c: {"eps": "1e-5"}, {}),
    "output_norm_eps": (
        ValueError,
        "output_norm_eps: expected a finite number >= 0, got nan",
        lambda c: {"output_norm_eps": float("nan")},
        {},
    ),
    "prefix_type": (TypeError, "prefix: expected a torch.Tensor, got list", lambda c: {"prefix": []}, {}),
    "qk_weight_type": (
        TypeError,
        "qk_weight: expected a torch.Tensor, got NoneType",
        lambda c: {"qk_weight": None},
        {},
    ),
    "delta_shape": (
        ValueError,
        "delta: expected shape [4, 64] as prefix has, got [3, 64]",
        lambda c: {"delta": c.delta[:3]},
        {},
    ),
    "delta_is_prefix": (
        ValueError,
        "prefix: expected memory that shares no byte with delta, got overlapping memory",
        lambda c: {"delta": c.prefix},
        {},
    ),
    "rows_that_overlap": (
        ValueError,
        "prefix: expected a token stride >= hidden_size (64) because it is written, got 0",
        lambda c: {"prefix": c.prefix[:1].expand(4, 64)},
        {},
    ),
    "pdl": (ValueError, "pdl: expected one of 'wait', 'early', 'off', got None", lambda c: {}, {"pdl": None}),
    "backend": (ValueError, "backend: expected one of 'auto', ", lambda c: {}, {"backend": "bogus"}),
    "backend_type": (ValueError, "backend: expected one of 'auto', ", lambda c: {}, {"backend": 3}),
    "plan": (TypeError, "plan: expected a libattnres.Plan, got list", lambda c: {}, {"plan": [1, 0, 0, 0]}),
    "plan_and_backend": (
        ValueError,
        "plan: expected None with backend 'host', got Plan(",
        lambda c: {},
        {"plan": libattnres.Plan(), "backend": "host"},
    ),
    "batch_invariant": (
        TypeError,
        "batch_invariant: expected a bool or None, got int",
        lambda c: {},
        {"batch_invariant": 1},
    ),
}


@pytest.mark.parametrize("kind", ["real", "meta", "fake", "symbolic"])
@pytest.mark.parametrize("what", FAKE_ERRORS)
def test_tensors_without_memory_get_the_errors_of_real_ones(
    what: str, kind: str, make_case: Callable[..., Any]
) -> None:
    exception, text, changes, options = FAKE_ERRORS[what]
    case = make_case()
    if kind == "meta":
        case = on_meta(case)
    mode: Any = contextlib.nullcontext()
    if kind in ("fake", "symbolic"):
        mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=kind == "fake")
        case = faked(case, mode)
        assert isinstance(case.prefix.shape[0], torch.SymInt) == (kind == "symbolic")
    with mode:
        case = case.with_(**changes(case))
        with pytest.raises(exception) as raised:
            libattnres.attn_res(*case.arguments, **options)
    if kind != "symbolic":  # sizes have names there
        assert str(raised.value).startswith(text)
    assert str(raised.value).startswith(text.split(":")[0] + ": expected ")


@pytest.mark.parametrize(
    ("variable", "value"), [("LIBATTNRES_BACKEND", "bogus"), ("LIBATTNRES_BATCH_INVARIANT", "yes")]
)
def test_tensors_without_memory_heed_the_environment(
    variable: str, value: str, make_case: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=f"^{variable}: expected .*, got '{value}'"):
        libattnres.attn_res(*on_meta(make_case()).arguments)


# No derivative: whoever asks for one is told.


def grad(function: Callable[..., torch.Tensor], value: torch.Tensor) -> Any:
    return torch.func.grad(lambda value: function(value).sum())(value)


def vjp(function: Callable[..., torch.Tensor], value: torch.Tensor) -> Any:
    return torch.func.vjp(function, value)


def jvp(function: Callable[..., torch.Tensor], value: torch.Tensor) -> Any:
    return torch.func.jvp(function, (value,), (torch.ones_like(value),))


def dual(function: Callable[..., torch.Tensor], value: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(value, torch.ones_like(value)))


def dual_without_grad(function: Callable[..., torch.Tensor], value: torch.Tensor) -> Any:
    with torch.no_grad():
        return dual(function, value)


@pytest.mark.parametrize(
    "name", ["prefix", "delta", "blocks", "norm_weight", "qk_weight", "output_norm_weight"]
)
@pytest.mark.parametrize("derive", [grad, vjp, jvp, dual, dual_without_grad])
def test_derivatives_are_refused_rather_than_dropped(
    derive: Callable[..., Any], name: str, make_case: Callable[..., Any]
) -> None:
    case = make_case(dtype=torch.float32)
    before = case.clone()
    with pytest.raises(
        RuntimeError, match=f"^{name}: expected a tensor .*because attn_res has no (back|deriv)"
    ):
        derive(lambda value: libattnres.attn_res(*case.with_(**{name: value}).arguments), getattr(case, name))
    assert reference.same_bits(case.prefix, before.prefix)


def test_a_dual_level_without_dual_arguments_is_no_error(make_case: Callable[..., Any]) -> None:
    case = make_case()
    expected = libattnres.attn_res(*case.clone().arguments)
    with forward_ad.dual_level():
        assert reference.same_bits(libattnres.attn_res(*case.arguments), expected)


@pytest.mark.parametrize("made_inside", [False, True])
@pytest.mark.parametrize("through_op", [False, True])
def test_inference_mode(made_inside: bool, through_op: bool, make_case: Callable[..., Any]) -> None:
    case = make_case(block_write_idx=3)
    expected = libattnres.attn_res(*case.clone().arguments)
    with torch.inference_mode():
        tensors = case.clone() if made_inside else case
        assert tensors.prefix.is_inference() == made_inside
        call = ops.attn_res_ if through_op else libattnres.attn_res
        output = call(*tensors.arguments)
    assert output.is_inference()
    assert reference.same_bits(output, expected)
    assert reference.same_bits(tensors.blocks[:, 3], tensors.prefix)


class Wrapped(torch.Tensor):
    """A tensor subclass that sees every op."""

    seen: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(str(function))
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("which", ["prefix", "blocks", "norm_weight"])
def test_subclasses_go_through_the_op(which: str, make_case: Callable[..., Any]) -> None:
    case = make_case()
    expected = libattnres.attn_res(*case.clone().arguments)
    wrapped = case.with_(**{which: getattr(case, which).as_subclass(Wrapped)})
    Wrapped.seen.clear()
    output = libattnres.attn_res(*wrapped.arguments)
    assert any("attn_res_add_" in name for name in Wrapped.seen), Wrapped.seen
    assert torch.equal(output.as_subclass(torch.Tensor), expected)


def test_dispatch_modes_see_the_op(make_case: Callable[..., Any]) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    case = make_case(block_write_idx=1)
    with Log():
        libattnres.attn_res(*case.arguments)
    assert seen == ["libattnres.attn_res_.default"]


def test_vmap_equals_a_loop(make_case: Callable[..., Any]) -> None:
    case = make_case()
    prefixes = torch.stack([case.prefix, case.delta])

    def call(prefix: torch.Tensor) -> torch.Tensor:
        return libattnres.attn_res(prefix, None, *case.arguments[2:])

    expected = torch.stack([call(prefix) for prefix in prefixes])
    assert reference.same_bits(torch.vmap(call)(prefixes), expected)
