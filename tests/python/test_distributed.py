# SPDX-License-Identifier: Apache-2.0
"""Attention Residuals over two real processes (gloo), against one."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import libattnres
import pytest
import torch
from libattnres import reference

dist = pytest.importorskip("torch.distributed")
if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("needs torch.distributed with gloo", allow_module_level=True)

from libattnres import distributed  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor  # noqa: E402

SIZE = 2
HIDDEN_SIZE = 64
NUM_ROWS = 4
Check = Callable[[int], None]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    """Runs in every process of one group; two processes serve all checks, since they start slowly."""
    CHECKS[function.__name__] = function
    return function


def process(rank: int, directory: str) -> None:
    """What each process runs: all checks, and what went wrong in them."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=SIZE)
    try:
        for name, function in CHECKS.items():
            try:
                function(rank)
                text = "passed"
            except BaseException:
                text = traceback.format_exc()
            (Path(directory) / f"{name}.{rank}").write_text(text)
            if text != "passed":
                return  # the other process may wait for this one forever, and is ended by the test
    finally:
        dist.destroy_process_group()


def case(num_tokens: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Prefix, delta, bank and the three weights, the same in every process."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(torch.bfloat16)

    return (
        normal(num_tokens, HIDDEN_SIZE),
        normal(num_tokens, HIDDEN_SIZE),
        normal(num_tokens, NUM_ROWS, HIDDEN_SIZE),
        normal(HIDDEN_SIZE),
        normal(HIDDEN_SIZE, scale=1.5 * HIDDEN_SIZE**-0.5),
        normal(HIDDEN_SIZE),
    )


def assert_same(left: torch.Tensor, right: torch.Tensor) -> None:
    """Equal to the bit; every token is computed by itself, so the host backend's bits do not depend on M."""
    assert left.shape == right.shape
    assert reference.same_bits(left.contiguous(), right.contiguous())


def refused(text: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        function(*arguments, **options)
    assert text in str(raised.value), str(raised.value)


# DTensor


def shard(tensor: torch.Tensor, *placements: Any) -> DTensor:
    mesh = init_device_mesh("cpu", (SIZE,))
    return distribute_tensor(tensor.clone(), mesh, placements)


@check
def tokens_may_be_sharded_and_weights_replicated(rank: int) -> None:
    for num_tokens in (6, 5, 1):  # equal shards, unequal ones, an empty one
        for placement in (Shard(0), Replicate()):
            for write in (-1, 3):
                tensors = case(num_tokens)
                sharded = [shard(tensor, placement) for tensor in tensors[:3]]
                weights = [shard(tensor, Replicate()) for tensor in tensors[3:]]
                expected = libattnres.attn_res(*tensors, 3, write, backend="host")
                output = libattnres.attn_res(*sharded, *weights, 3, write, backend="host")
                assert isinstance(output, DTensor)
                assert output.placements == (placement,)
                assert_same(output.full_tensor(), expected)
                assert_same(sharded[0].full_tensor(), tensors[0])
                assert_same(sharded[2].full_tensor(), tensors[2])


@check
def out_is_written_and_returned(rank: int) -> None:
    tensors = case(6)
    sharded = [shard(tensor, Shard(0)) for tensor in tensors[:3]]
    out = shard(torch.full_like(tensors[0], float("nan")), Shard(0))
    expected = libattnres.attn_res(*tensors, 3, backend="host")
    assert libattnres.attn_res(*sharded, *tensors[3:], 3, out=out, backend="host") is out
    assert_same(out.full_tensor(), expected)


@check
def partial_delta_is_reduced_to_where_the_prefix_is(rank: int) -> None:
    for placement in (Shard(0), Replicate()):
        tensors = case(6)
        mesh = init_device_mesh("cpu", (SIZE,))
        halves = tensors[1] / SIZE  # exact, and so is their sum
        delta = DTensor.from_local(halves, mesh, [Partial()])
        prefix, blocks = shard(tensors[0], placement), shard(tensors[2], placement)
        expected = libattnres.attn_res(*tensors, 3, backend="host")
        output = libattnres.attn_res(prefix, delta, blocks, *tensors[3:], 3, backend="host")
        assert_same(output.full_tensor(), expected)
        assert_same(prefix.full_tensor(), tensors[0])


@check
def several_prefixes_share_a_sharded_entry(rank: int) -> None:
    prefix, delta, _, *weights = case(8)
    blocks = case(4, seed=1)[2]
    sharded = [shard(tensor, Shard(0)) for tensor in (prefix, delta, blocks)]
    expected = libattnres.attn_res(prefix, delta, blocks, *weights, 3, backend="host")
    output = libattnres.attn_res(*sharded, *weights, 3, backend="host")
    assert_same(output.full_tensor(), expected)
    prefix, blocks = case(6)[0], case(3)[2]
    refused(
        "blocks: expected shards that hold the bank entries of prefix's shards",
        libattnres.attn_res,
        shard(prefix, Shard(0)),
        None,
        shard(blocks, Shard(0)),
        *weights,
        3,
    )


@check
def other_placements_are_refused_with_advice(rank: int) -> None:
    prefix, delta, blocks, *weights = case(6)
    tokens = [shard(tensor, Shard(0)) for tensor in (prefix, delta, blocks)]
    before = [tensor.full_tensor().clone() for tensor in tokens]
    call = libattnres.attn_res
    advice = "every token needs its whole row, so shard tokens instead: redistribute it to Shard(0)"
    refused(
        "prefix: expected placements Shard(0) or Replicate()",
        call,
        shard(prefix, Shard(1)),
        None,
        shard(blocks, Shard(2)),
        *weights,
        3,
    )
    refused(advice, call, shard(prefix, Shard(1)), None, shard(blocks, Shard(2)), *weights, 3)
    refused("blocks: ", call, tokens[0], None, shard(blocks, Shard(2)), *weights, 3)
    refused("delta: ", call, tokens[0], shard(delta, Shard(1)), tokens[2], *weights, 3)
    refused("blocks is not moved", call, tokens[0], None, shard(blocks, Replicate()), *weights, 3)
    refused("pass prefix.to_local()", libattnres.explain, tokens[0], None, tokens[2], *weights, 3)
    refused("delta: expected a DTensor", call, tokens[0], delta, tokens[2], *weights, 3)
    refused("prefix: expected a DTensor", call, prefix, None, tokens[2], *weights, 3)
    refused(
        "pass norm_weight.full_tensor()",
        call,
        tokens[0],
        None,
        tokens[2],
        shard(weights[0], Shard(0)),
        *weights[1:],
        3,
    )
    mesh = init_device_mesh("cpu", (SIZE,))
    refused(
        "redistribute it to Shard(0), a reduce-scatter",
        call,
        DTensor.from_local(prefix, mesh, [Partial()]),
        None,
        shard(blocks, Replicate()),
        *weights,
        3,
    )
    for tensor, value in zip(tokens, before, strict=True):
        assert_same(tensor.full_tensor(), value)


@check
def ops_that_write_nothing_have_sharding_rules(rank: int) -> None:
    tensors = case(6)
    rest = (3, -1, 1e-5, 1e-5, "host")
    expected = torch.ops.libattnres.attn_res_functional(*tensors, *rest)
    weights = [shard(tensor, Replicate()) for tensor in tensors[3:]]
    for placement in (Shard(0), Replicate()):
        sharded = [shard(tensor, placement) for tensor in tensors[:3]]
        outputs = torch.ops.libattnres.attn_res_functional(*sharded, *weights, *rest)
        for output, wanted in zip(outputs, expected, strict=True):
            assert output.placements == (placement,)
            assert_same(output.full_tensor(), wanted)
    output = torch.ops.libattnres.attn_res(sharded[0], sharded[2], *weights, 3, 1e-5, 1e-5, "host")
    assert_same(output.full_tensor(), torch.ops.libattnres.attn_res(tensors[0], tensors[2], *tensors[3:], 3))
    with pytest.raises(Exception, match="every token needs its whole row"):
        torch.ops.libattnres.attn_res(
            shard(tensors[0], Shard(1)), shard(tensors[2], Shard(2)), *weights, 3, 1e-5, 1e-5, "host"
        )


@check
def dtensors_compile(rank: int) -> None:
    def layer(prefix: Any, delta: Any, blocks: Any, *weights: Any) -> Any:
        first = libattnres.attn_res(prefix, delta, blocks, *weights, 3, 3, backend="host")
        return libattnres.attn_res(prefix, first, blocks, *weights, 4, backend="host")

    tensors = case(6)
    sharded = [shard(tensor, Shard(0)) for tensor in tensors[:3]]
    weights = [shard(tensor, Replicate()) for tensor in tensors[3:]]
    expected = layer(*tensors)
    with torch.no_grad():
        output = torch.compile(layer, backend="aot_eager", fullgraph=True)(*sharded, *weights)
    assert_same(output.full_tensor(), expected)
    assert_same(sharded[0].full_tensor(), tensors[0])
    assert_same(sharded[2].full_tensor(), tensors[2])


# Sequence and pipeline parallelism


def sub_layer(layer: int, hidden: torch.Tensor) -> torch.Tensor:
    """Stands for attention or MLP; exact in halves, so that a sum over ranks is what one process has."""
    return (hidden.roll(layer + 1, 0) * 0.5).round(decimals=2)


def make_stack(**options: Any) -> Any:
    """The residual stream of a small model with random weights."""
    from libattnres.nn import AttnResStack

    stack = AttnResStack(7, HIDDEN_SIZE, 2, dtype=torch.bfloat16, backend="host", **options)
    generator = torch.Generator().manual_seed(3)
    whole = AttnResStack(7, HIDDEN_SIZE, 2, dtype=torch.bfloat16)
    weights = {
        name: (torch.randn(value.shape, generator=generator) * 0.2 + value.float()).to(torch.bfloat16)
        for name, value in whole.state_dict().items()
    }
    own = stack.state_dict()
    stack.load_state_dict({name: weights[name] for name in own})
    return stack


@check
def sequence_parallel_stack_equals_one_process(rank: int) -> None:
    stack = make_stack()
    for num_tokens in (6, 5):
        embeddings = case(num_tokens)[0]
        expected = stack(embeddings.clone(), sub_layer, sub_layer)
        parallel = distributed.SequenceParallel(num_tokens)

        def half(layer: int, hidden: torch.Tensor, count: int = num_tokens) -> torch.Tensor:
            assert hidden.shape[0] == count, "a sub-layer sees every token and no padding"
            return sub_layer(layer, hidden) / SIZE

        local = stack(
            parallel.split(embeddings), half, half, gather=parallel.gather, scatter=parallel.scatter
        )
        assert local.shape[0] == 3
        assert_same(parallel.gather(local), expected)
    refused("partial: expected 5 rows, got 6", parallel.scatter, case(6)[0])
    refused("local: expected 3 rows, got 5", parallel.gather, case(5)[0])


@check
def a_stack_of_dtensors_equals_one_process(rank: int) -> None:
    """The bank that it makes lies as its tokens do."""

    def halved(layer: int, hidden: Any) -> Any:
        return hidden * 0.5

    for num_tokens in (6, 5):
        embeddings = case(num_tokens)[0]
        expected = make_stack()(embeddings, halved, halved)
        output = make_stack()(shard(embeddings, Shard(0)), halved, halved)
        assert output.placements == (Shard(0),)
        assert_same(output.full_tensor(), expected)
        stack = make_stack()
        stack.two_phase = True
        assert_same(stack(shard(embeddings, Shard(0)), halved, halved).full_tensor(), expected)


@check
def two_phases_refuse_dtensors_by_name(rank: int) -> None:
    prefix, delta, blocks, norm_weight, qk_weight, _ = case(4)
    bank, lse = libattnres.attn_res_bank(blocks, 2, norm_weight[None], qk_weight[None])
    sharded = shard(blocks, Shard(0))
    with pytest.raises(TypeError, match=r"^blocks: expected a tensor of this process, got a DTensor"):
        libattnres.attn_res_bank(sharded, 2, norm_weight[None], qk_weight[None])
    with pytest.raises(TypeError, match=r"^blocks: expected a tensor of this process, got a DTensor"):
        libattnres.explain_bank(sharded, 2, norm_weight[None], qk_weight[None])
    with pytest.raises(TypeError, match=r"^delta: expected a tensor of this process, got a DTensor"):
        libattnres.attn_res_merge(
            prefix, shard(delta, Shard(0)), bank[0], lse[0], norm_weight, qk_weight, None
        )


@check
def sequence_parallel_collectives_compile(rank: int) -> None:
    parallel = distributed.SequenceParallel(5)
    tensors = case(5)

    def step(embeddings: torch.Tensor) -> torch.Tensor:
        return parallel.gather(parallel.scatter(embeddings) + 1)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert_same(compiled(tensors[0]), tensors[0] * SIZE + 1)


@check
def pipeline_stages_equal_one_process(rank: int) -> None:
    # A stage that begins inside a block, one at its border, and one that opens no block.
    for border in (3, 4, 6):
        embeddings = case(5)[0]
        expected = make_stack()(embeddings.clone(), sub_layer, sub_layer)
        if rank == 0:
            handed = make_stack(end_layer=border)(embeddings, sub_layer, sub_layer)
            distributed.send(*handed, 1)
        else:
            stage = make_stack(first_layer=border)
            prefix, bank = distributed.receive(5, stage.num_inherited_rows, HIDDEN_SIZE, 0)
            assert_same(stage(prefix, sub_layer, sub_layer, bank=bank), expected)


@check
def pipeline_refuses_a_bank_of_other_tokens(rank: int) -> None:
    refused("bank: expected shape [T, rows, H]", distributed.send, case(5)[0], case(6)[2], 1 - rank)


def test_all_checks_in_two_processes(tmp_path: Path) -> None:
    """One test, so that workers of a test run do not start two processes each."""
    context = torch.multiprocessing.spawn(process, (str(tmp_path),), nprocs=SIZE, join=False)
    for child in context.processes:
        child.join(timeout=300)
    for child in context.processes:
        if child.is_alive():
            child.kill()
            child.join()
    failures = []
    for name in CHECKS:
        for rank in range(SIZE):
            file = tmp_path / f"{name}.{rank}"
            text = file.read_text() if file.exists() else "did not get there"
            if text != "passed":
                failures.append(f"{name} in process {rank}: {text}")
    assert not failures, "\n".join(failures)


def test_without_a_process_group_it_is_said() -> None:
    with pytest.raises((RuntimeError, ValueError), match="process group"):
        distributed.SequenceParallel(4)
