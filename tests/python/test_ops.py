# SPDX-License-Identifier: Apache-2.0
"""The torch ops: schemas that tell the truth, fake kernels, compiled code that equals eager to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import libattnres
import pytest
import torch
from libattnres import _ops, reference
from torch._subclasses.fake_tensor import FakeTensorMode
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


def test_fake_tensors_get_shapes_and_errors(make_case: Callable[..., Any]) -> None:
    case = make_case(block_write_idx=3)
    with FakeTensorMode() as mode:
        fake = case.with_(
            **{
                name: mode.from_tensor(value)
                for name in case.__dataclass_fields__
                if isinstance(value := getattr(case, name), torch.Tensor)
            }
        )
        output = libattnres.attn_res(*fake.arguments)
        assert output.shape == (4, 64)
        assert output.dtype is torch.bfloat16
        assert output.stride() == (64, 1)
        with pytest.raises(ValueError, match=r"^delta: expected shape \[4, 64\]"):
            libattnres.attn_res(*fake.with_(delta=fake.delta[:3]).arguments)


def test_meta_tensors_get_shapes(make_case: Callable[..., Any]) -> None:
    case = make_case(num_tokens=7)
    meta = case.with_(
        **{
            name: value.to("meta")
            for name in case.__dataclass_fields__
            if isinstance(value := getattr(case, name), torch.Tensor)
        }
    )
    output = libattnres.attn_res(*meta.arguments)
    assert output.device.type == "meta"
    assert output.shape == (7, 64)


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


# torch.compile with inductor: the same backend must give the same bits, and no bank may be copied.

Function = Callable[..., Any]


def compiled_equals_eager(function: Function, tensors: tuple[torch.Tensor, ...]) -> str:
    """Compare results and arguments after a call; returns the generated code."""
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    eager_tensors = [tensor.clone() for tensor in tensors]
    compiled_tensors = [tensor.clone() for tensor in tensors]
    with torch.no_grad():
        expected = function(*eager_tensors)
        result, code = run_and_get_code(torch.compile(function, fullgraph=True), *compiled_tensors)
        again = [tensor.clone() for tensor in tensors]
        result_again = torch.compile(function, fullgraph=True)(*again)
    for got in (result, result_again):
        for left, right in zip(as_tuple(expected), as_tuple(got), strict=True):
            assert reference.same_bits(left, right)
    for changed in (compiled_tensors, again):
        for left, right in zip(eager_tensors, changed, strict=True):
            assert reference.same_bits(left, right)
    (source,) = code
    return source[source.index("def call") :]


def as_tuple(value: Any) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def bank_copies(source: str, num_bank_rows: int = 8) -> list[str]:
    """Allocations of generated code that are as large as the bank."""
    return [
        line.strip()
        for line in source.splitlines()
        if "empty_strided" in line and f", {num_bank_rows}, " in line
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("has_delta", "block_write_idx", "op"),
    [
        (True, -1, "attn_res_add_"),
        (True, 3, "attn_res_"),
        (False, 3, "attn_res_write_"),
        (False, -1, "attn_res"),
    ],
)
def test_compiled_call_equals_eager_without_copies(
    has_delta: bool, block_write_idx: int, op: str, make_case: Callable[..., Any]
) -> None:
    case = make_case()
    weights = case.arguments[3:6]

    def call(prefix: torch.Tensor, delta: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        return libattnres.attn_res(prefix, delta if has_delta else None, blocks, *weights, 3, block_write_idx)

    source = compiled_equals_eager(call, (case.prefix, case.delta, case.blocks))
    assert f"torch.ops.libattnres.{op}.default" in source
    assert "empty_strided" not in source


@pytest.mark.slow
def test_repeated_in_place_calls_in_one_graph(make_case: Callable[..., Any]) -> None:
    case = make_case()
    weights = case.arguments[3:6]

    def layers(prefix: torch.Tensor, delta: torch.Tensor, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = libattnres.attn_res(prefix, delta, blocks, *weights, 3, 3)
        second = libattnres.attn_res(prefix, first, blocks, *weights, 4)
        third = libattnres.attn_res(prefix, second * 2, blocks, *weights, 4, 4)
        fourth = libattnres.attn_res(prefix, None, blocks, *weights, 5)
        return first, second, third, fourth

    source = compiled_equals_eager(layers, (case.prefix, case.delta, case.blocks))
    assert bank_copies(source) == []


@pytest.mark.slow
def test_prefix_and_bank_that_are_views_of_one_tensor(make_case: Callable[..., Any]) -> None:
    case = make_case()
    weights = case.arguments[3:6]
    memory = torch.cat([case.blocks, case.prefix[:, None]], dim=1)

    def layers(memory: torch.Tensor, delta: torch.Tensor) -> tuple[torch.Tensor, ...]:
        prefix, blocks = memory[:, 8], memory[:, :8]
        first = libattnres.attn_res(prefix, delta, blocks, *weights, 3, 3)
        second = libattnres.attn_res(prefix, first, blocks, *weights, 4)
        return first, second

    source = compiled_equals_eager(layers, (memory, case.delta))
    assert bank_copies(source, 9) == bank_copies(source) == []


@pytest.mark.slow
def test_one_delta_used_by_two_calls(make_case: Callable[..., Any]) -> None:
    case = make_case()
    weights = case.arguments[3:6]

    def layers(prefix: torch.Tensor, delta: torch.Tensor, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = libattnres.attn_res(prefix, delta, blocks, *weights, 3)
        before = prefix.clone()
        second = libattnres.attn_res(prefix, delta, blocks, *weights, 3)
        return first, before * 2, second, prefix - before

    compiled_equals_eager(layers, (case.prefix, case.delta, case.blocks))


@pytest.mark.slow
@pytest.mark.parametrize("block_write_idx", [-1, 3])
def test_a_copy_of_the_prefix_as_delta(block_write_idx: int, make_case: Callable[..., Any]) -> None:
    """Inductor drops the copy and passes the same memory twice, written and read."""
    case = make_case()
    weights = case.arguments[3:6]

    def call(prefix: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        return libattnres.attn_res(prefix, prefix.clone(), blocks, *weights, 3, block_write_idx)

    compiled_equals_eager(call, (case.prefix, case.blocks))


@pytest.mark.slow
def test_copies_of_what_is_written_as_other_arguments(make_case: Callable[..., Any]) -> None:
    case = make_case()

    def call(prefix: torch.Tensor, delta: torch.Tensor, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weight = prefix[0].clone()
        first = libattnres.attn_res(prefix, delta, blocks, weight, weight, weight, 3)
        second = libattnres.attn_res(prefix, blocks[:, 4].clone(), blocks.clone(), weight, weight, None, 3)
        third = libattnres.attn_res(prefix, blocks[:, 4].clone(), blocks, weight, weight, None, 3, 4)
        return first, second, third

    compiled_equals_eager(call, (case.prefix, case.delta, case.blocks))


@pytest.mark.slow
@pytest.mark.xfail(
    strict=False,
    reason="inductor drops the clone of an input that a later custom op overwrites (pytorch #198096)",
)
def test_a_copy_of_the_prefix_returned_as_it_is(make_case: Callable[..., Any]) -> None:
    case = make_case()
    weights = case.arguments[3:6]

    def layers(prefix: torch.Tensor, delta: torch.Tensor, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        libattnres.attn_res(prefix, delta, blocks, *weights, 3)
        between = prefix.clone()
        return between, libattnres.attn_res(prefix, delta, blocks, *weights, 3)

    compiled_equals_eager(layers, (case.prefix, case.delta, case.blocks))


@pytest.mark.slow
def test_compiled_out_and_a_bank_made_inside(make_case: Callable[..., Any]) -> None:
    case = make_case()
    weights = case.arguments[3:6]

    def layers(prefix: torch.Tensor, delta: torch.Tensor) -> tuple[torch.Tensor, ...]:
        bank = prefix.new_empty(prefix.shape[0], 8, prefix.shape[1])
        first = libattnres.attn_res(prefix, None, bank, *weights, 0, 0)
        out = torch.empty_like(prefix)
        libattnres.attn_res(prefix, first, bank, *weights, 1, out=out)
        return first, out + delta

    source = compiled_equals_eager(layers, (case.prefix, case.delta))
    assert len(bank_copies(source)) == 1  # the bank itself


@pytest.mark.slow
def test_padded_rows_stay_padded_in_compiled_code(make_case: Callable[..., Any]) -> None:
    case = make_case()
    weights = case.arguments[3:6]
    padded = torch.cat([case.prefix, case.delta], dim=1)

    def call(memory: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        return libattnres.attn_res(memory[:, :64], memory[:, 64:], blocks, *weights, 3, 5)

    source = compiled_equals_eager(call, (padded, case.blocks))
    assert bank_copies(source) == []


def test_token_counts_do_not_recompile(make_case: Callable[..., Any]) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    weights = make_case().arguments[3:6]

    def call(prefix: torch.Tensor, delta: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        return libattnres.attn_res(prefix, delta, blocks, *weights, 3, 3)

    compiled = torch.compile(call, backend=counter, fullgraph=True, dynamic=True)
    for num_tokens in (4, 5, 9, 17):
        case = make_case(num_tokens=num_tokens)
        eager = case.clone()
        with torch.no_grad():
            output = compiled(case.prefix, case.delta, case.blocks)
            expected = call(eager.prefix, eager.delta, eager.blocks)
        assert reference.same_bits(output, expected)
        assert reference.same_bits(case.blocks, eager.blocks)
    graphs = [graph for graph in counter.graphs if "attn_res_" in graph.code]
    assert len(graphs) == 1


def test_export_keeps_the_op(make_case: Callable[..., Any]) -> None:
    class Module(torch.nn.Module):
        def __init__(self, case: Any) -> None:
            super().__init__()
            for name in ("norm_weight", "qk_weight", "output_norm_weight"):
                self.register_buffer(name, getattr(case, name))

        def forward(self, prefix: torch.Tensor, delta: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
            return libattnres.attn_res(
                prefix, delta, blocks, self.norm_weight, self.qk_weight, self.output_norm_weight, 3
            )

    case = make_case()
    module = Module(case)
    exported = torch.export.export(module, (case.prefix, case.delta, case.blocks))
    assert "libattnres.attn_res_add_" in str(exported.graph)
    eager, again = case.clone(), case.clone()
    with torch.no_grad():
        expected = module(eager.prefix, eager.delta, eager.blocks)
        output = exported.module()(again.prefix, again.delta, again.blocks)
    assert reference.same_bits(output, expected)
    assert reference.same_bits(again.prefix, eager.prefix)


def test_compiled_call_raises_rather_than_detaches(make_case: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    case = make_case()
    case.prefix.requires_grad_()
    compiled = torch.compile(libattnres.attn_res, backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        compiled(*case.arguments)
