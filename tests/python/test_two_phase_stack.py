# SPDX-License-Identifier: Apache-2.0
"""``AttnResStack`` in two phases: its bank passes, its bits and bounds, its weights, and where it pays."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import libattnres
import pytest
import torch
from libattnres import _two_phase_plan, model_walk, nn, reference
from libattnres.backends import native
from libattnres.nn import AttnResStack, HandOver, Stream
from test_nn import (
    BETWEEN,
    ON_GPU,
    ROUNDING,
    SUBLAYERS,
    _one_thread,  # noqa: F401
    captured,
    decoded_plainly,
    filled,
    relative_error,
    rows,
)
from tiny_model import Decoded, Model, Sizes, decode

BOUNDS = {None: 2.6e-3, torch.float32: 2e-3}
"""Of one call in two phases with bfloat16 rows, by the dtype of what a bank pass leaves."""
WIDE = 1024
"""Elements of a row, enough for roundings to even out."""


def stack_of(num_layers: int = 7, block_size: int = 3, hidden_size: int = 64, **options: Any) -> AttnResStack:
    options = {"two_phase": True, "dtype": torch.bfloat16, **options}
    stack = AttnResStack(num_layers, hidden_size, block_size, **options)
    filled(stack)
    for name, weight in stack.named_parameters():
        if "proj" in name:  # scores of a few units
            weight.mul_(2 * hidden_size**-0.5)
    return stack


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The bank passes that are made."""
    made: list[dict[str, Any]] = []

    def record(blocks: Any, num_blocks: int, norm_weights: Any, *rest: Any, **options: Any) -> Any:
        given = {"num_blocks": num_blocks, "sites": norm_weights.shape[0], "pdl": options["pdl"]}
        made.append(given | {"bank": options.get("bank")})
        return libattnres.attn_res_bank(blocks, num_blocks, norm_weights, *rest, **options)

    monkeypatch.setattr(nn, "attn_res_bank", record)
    return made


# --- passes ---------------------------------------------------------------------------------------------


def test_there_is_one_pass_after_every_write_of_the_model(passes: list[dict[str, Any]]) -> None:
    stack = stack_of(model_walk.NUM_LAYERS, model_walk.LAYERS_PER_BLOCK, hidden_size=8)
    stack(rows(2, 8), *SUBLAYERS)
    sizes = [(made["num_blocks"], made["sites"]) for made in passes]
    assert sizes == [(n, 24) for n in range(1, 8)] + [(8, 18)]
    assert 1 + sum(sites for _, sites in sizes) == len(model_walk.walk_calls())
    # Memory is taken once, and used again as soon as its calls are over.
    assert [made["bank"] is None for made in passes] == [True] + [False] * 7
    assert {made["bank"].data_ptr() for made in passes[1:]} == {passes[1]["bank"].data_ptr()}


@pytest.mark.parametrize("block_size", [1, 2, 3, 7])
@pytest.mark.parametrize("max_bank_bytes", [None, 3 * 4 * (2 * WIDE + 4)])  # for three calls
@pytest.mark.parametrize("bank_dtype", BOUNDS)
def test_every_call_is_right_and_the_stream_that_of_one_phase(
    bank_dtype: torch.dtype | None, max_bank_bytes: int | None, block_size: int
) -> None:
    sizes = {"block_size": block_size, "hidden_size": WIDE}
    stack = stack_of(**sizes, bank_dtype=bank_dtype, max_bank_bytes=max_bank_bytes)
    one_phase = stack_of(**sizes, two_phase=False)
    stream = stack.begin(rows(4, WIDE))
    worst, merges = 0.0, 0

    def merge(*arguments: Any, **options: Any) -> torch.Tensor:
        nonlocal merges
        merges += 1
        return libattnres.attn_res_merge(*arguments, **options)

    def run(call: Callable[..., Any], plain: Callable[..., Any], *arguments: Any, index: int) -> Any:
        """One call of the stack, judged by the same call in one phase, exactly and in bfloat16."""
        nonlocal worst
        taken: list[Any] = []

        def in_one_phase(*call_arguments: Any, **options: Any) -> torch.Tensor:
            taken.append(reference.attn_res(*call_arguments))
            return libattnres.attn_res(*call_arguments, **options)

        other = Stream(arguments[index].prefix.clone(), arguments[index].blocks.clone())
        copies = [
            argument.clone() if isinstance(argument, torch.Tensor) else argument for argument in arguments
        ]
        copies[index] = other
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nn, "attn_res", in_one_phase)
            patch.setattr(nn, "attn_res_merge", None)
            _, plain_stream = plain(*copies)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nn, "attn_res_merge", merge)
            hidden, stream = call(*arguments)
        error = float((hidden.double() - taken[0].output).norm() / taken[0].output.norm())
        worst = max(worst, error)
        assert reference.same_bits(stream.prefix, plain_stream.prefix)
        assert reference.same_bits(stream.blocks, plain_stream.blocks)
        return hidden, stream

    stream.blocks.fill_(math.nan)
    output: torch.Tensor | None = None
    for layer in stack.layer_range:
        hidden, stream = run(
            stack.before_attention, one_phase.before_attention, layer, stream, output, index=1
        )
        attention = SUBLAYERS[0](layer, hidden)
        hidden, stream = run(stack.before_mlp, one_phase.before_mlp, layer, stream, attention, index=1)
        output = SUBLAYERS[1](layer, hidden)

    def finish(stack: AttnResStack) -> Callable[..., Any]:
        return lambda stream, output: (stack.finish(stream, output), stream)

    run(finish(stack), finish(one_phase), stream, output, index=0)
    assert worst <= BOUNDS[bank_dtype]
    assert merges == 2 * stack.num_layers, "the first call alone runs in one phase"


def test_memory_is_bounded_by_passes_of_fewer_calls(passes: list[dict[str, Any]]) -> None:
    stack = stack_of(num_layers=24, block_size=12, hidden_size=8, max_bank_bytes=10 * 5 * (16 + 4))
    hidden = stack(rows(5, 8), *SUBLAYERS)
    assert [(made["num_blocks"], made["sites"]) for made in passes] == [(1, 8)] * 3 + [(2, 8)] * 3
    whole = stack_of(num_layers=24, block_size=12, hidden_size=8)(rows(5, 8), *SUBLAYERS)
    assert reference.same_bits(hidden, whole)


def test_sites_per_pass_share_the_calls_equally() -> None:
    row = 14336 + 4
    share = _two_phase_plan.sites_per_pass
    assert share(24, 100, 7168, 2, None) == 24
    assert share(24, 100, 7168, 2, 24 * 100 * row) == 24
    assert share(24, 100, 7168, 2, 24 * 100 * row - 1) == 12
    assert share(24, 100, 7168, 2, 10 * 100 * row) == 8
    assert share(18, 100, 7168, 4, 10 * 100 * (28672 + 4)) == 9
    assert share(24, 100, 7168, 2, 1) == 1


@pytest.mark.parametrize("pdl", ["wait", "early", "off"])
def test_nothing_is_read_early_that_the_kernel_before_writes(
    pdl: str, passes: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def merge(*arguments: Any, **options: Any) -> torch.Tensor:
        order.append(options["pdl"])
        return libattnres.attn_res_merge(*arguments, **options)

    monkeypatch.setattr(nn, "attn_res_merge", merge)
    options: dict[str, Any] = {"pdl": pdl, "max_bank_bytes": 4 * 4 * (128 + 4)}
    first, second = stack_of(end_layer=2, **options), stack_of(first_layer=2, **options)
    handed = first(rows(4, 64), *SUBLAYERS)
    assert isinstance(handed, HandOver)
    second(handed.prefix, *SUBLAYERS, bank=handed.bank)
    late = "wait" if pdl == "early" else pdl
    assert {made["pdl"] for made in passes} == {late}
    # A sub-layer lies between a write's pass and the next call, but not after the pass of a stage that begins
    # within a block, nor where the calls of one pass are over.
    assert order == [pdl] * 3 + [late, pdl, pdl] + [pdl] * 3 + [late, pdl, pdl] + [pdl] * 2


@pytest.mark.parametrize("cut", range(1, 7))
def test_two_pipeline_stages_are_the_whole(cut: int) -> None:
    embeddings = rows(4, 64)
    expected = stack_of()(embeddings.clone(), *SUBLAYERS)
    handed = stack_of(end_layer=cut)(embeddings, *SUBLAYERS)
    assert isinstance(handed, HandOver)
    result = stack_of(first_layer=cut)(handed.prefix.clone(), *SUBLAYERS, bank=handed.bank.clone())
    assert reference.same_bits(result, expected)


def test_a_stream_without_the_bank_s_share_goes_on_in_one_phase() -> None:
    """What a caller does who puts tokens together anew within a block."""
    stack = stack_of()
    hidden, stream = stack.before_attention(0, stack.begin(rows(4, 64)))
    assert stream.mixed is not None
    anew = Stream(stream.prefix[:2].clone(), stream.blocks[:2].clone())
    ours, _ = stack.before_mlp(0, anew, hidden[:2].clone())
    plain, _ = stack_of(two_phase=False).before_mlp(0, Stream(*stream[:2]), hidden.clone())
    assert reference.same_bits(ours, plain[:2])


# --- weights --------------------------------------------------------------------------------------------


def run_once(stack: AttnResStack) -> torch.Tensor:
    hidden = stack(rows(4, 64), *SUBLAYERS)
    assert isinstance(hidden, torch.Tensor)
    return hidden


def test_the_state_dict_is_that_of_one_phase_and_stays_so() -> None:
    stack, plain = stack_of(), stack_of(two_phase=False)
    before = {name: weight.clone() for name, weight in stack.state_dict().items()}
    run_once(stack)
    state = stack.state_dict()
    assert list(state) == list(plain.state_dict()) == list(before)
    for name, weight in state.items():
        assert weight.shape == before[name].shape
        assert reference.same_bits(weight, before[name])
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    other = AttnResStack(7, 64, 3, two_phase=True, dtype=torch.bfloat16)
    other.load_state_dict(torch.load(file))
    assert reference.same_bits(run_once(other), run_once(stack))


@pytest.mark.parametrize(
    "change",
    [
        lambda stack, state: [weight.copy_(state[name]) for name, weight in stack.named_parameters()],
        lambda stack, state: stack.load_state_dict(state),
        lambda stack, state: stack.load_state_dict(state, assign=True),
        lambda stack, state: [
            setattr(weight, "data", state[name].clone()) for name, weight in stack.named_parameters()
        ],
        lambda stack, state: (stack.float(), stack.load_state_dict(state), stack.bfloat16()),
    ],
    ids=["in place", "loaded", "assigned", "data", "moved"],
)
def test_new_weights_are_those_of_the_next_pass(change: Callable[..., Any]) -> None:
    stack = stack_of()
    run_once(stack)
    fresh = stack_of()
    with torch.no_grad():
        for weight in fresh.parameters():
            weight.mul_(1.25)
        change(stack, {name: weight.clone() for name, weight in fresh.state_dict().items()})
    assert reference.same_bits(run_once(stack), run_once(fresh))
    run_once(stack)
    weights = stack._site_weights
    assert weights.norms is not None
    names = [weight.data_ptr() for weight in stack.parameters()]
    assert weights.norms.data_ptr() in names, "the weights exist twice"


def test_copies_have_weights_of_their_own() -> None:
    stack = stack_of()
    expected = run_once(stack)
    other = copy.deepcopy(stack)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.25)
    assert reference.same_bits(run_once(stack), expected)
    assert not reference.same_bits(run_once(other), expected)


def test_a_stack_made_in_inference_mode_has_weights_as_any_other() -> None:
    """An inference tensor counts no versions, and may not get the memory of a tensor that does."""
    expected = run_once(stack_of())
    with torch.inference_mode():
        stack = stack_of()
        hidden = rows(4, 64)
        assert reference.same_bits(stack(hidden, *SUBLAYERS), expected)
        assert reference.same_bits(stack(hidden, *SUBLAYERS), expected)
        assert stack._site_weights.are_tied()
        assert all(weight.is_inference() for weight in stack.parameters())
        stack.output_attn_res_norm.weight.mul_(1.25)
        assert not reference.same_bits(stack(hidden, *SUBLAYERS), expected)


# --- a model that decodes -------------------------------------------------------------------------------


def two_phase_of(model: Model, bank_dtype: torch.dtype | None) -> Model:
    """The same model in two phases."""
    other = copy.deepcopy(model)
    other.stack.two_phase, other.stack.bank_dtype = True, bank_dtype
    return other


SPREAD = 1.1
"""By how much two ways to round come apart over a quarter of the steps, beside what one phase is allowed."""


def assert_near(ours: Decoded, plain: Decoded, exact: Decoded, bank_dtype: torch.dtype | None) -> None:
    """As near to the float64 model as plain PyTorch, by as much more as a call's bound is."""
    more = ROUNDING * BOUNDS[bank_dtype] / BOUNDS[torch.float32]
    for some in zip(*(decoded.hidden.chunk(4) for decoded in (ours, plain, exact)), strict=True):
        rounding = relative_error(some[1], some[2])
        assert relative_error(some[0], some[2]) <= more * SPREAD * rounding
        assert relative_error(some[0], some[1]) <= more * BETWEEN * rounding


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("bank_dtype", BOUNDS)
def test_decoding_on_the_host_is_plain_pytorch_to_rounding(bank_dtype: torch.dtype | None) -> None:
    model, plain, exact = decoded_plainly(Sizes(), "cpu")
    model = two_phase_of(model, bank_dtype)
    assert_near(decode(model, model.step, plain.tokens), plain, exact, bank_dtype)


@pytest.mark.usefixtures("_one_thread")
def test_decoding_traced_in_one_graph_is_the_same_to_the_bit() -> None:
    model, plain, _ = decoded_plainly(Sizes(), "cpu")
    model = two_phase_of(model, None)
    torch._dynamo.reset()
    traced = torch.compile(model.step, fullgraph=True, backend="aot_eager")
    ours = decode(model, traced, plain.tokens)
    assert reference.same_bits(ours.hidden, decode(model, model.step, plain.tokens).hidden)
    # The graph reads the weights where they are.
    with torch.no_grad():
        for weight in model.stack.parameters():
            weight.mul_(1.25)
    assert reference.same_bits(
        decode(model, traced, plain.tokens).hidden, decode(model, model.step, plain.tokens).hidden
    )


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("is_tied", [True, False])
def test_one_graph_for_any_number_of_tokens_follows_the_table(
    is_tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced before anything ran eagerly; a choice that depends on the tokens is a guard."""
    Row = _two_phase_plan.Row
    monkeypatch.setattr(_two_phase_plan, "unmeasured", lambda *arguments: None)
    monkeypatch.setattr(_two_phase_plan, "TABLE", (Row(15, 9, 4), Row(96, 2, 4), Row(math.inf, 1, 4)))
    stack = stack_of(two_phase=True if is_tied else None)
    stack.two_phase = None
    assert (stack._site_weights.norms is not None) == is_tied
    torch._dynamo.reset()

    def step(hidden: torch.Tensor) -> Any:
        return stack(hidden, *SUBLAYERS)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    results = {num_tokens: compiled(rows(num_tokens, 64)) for num_tokens in (8, 12, 40, 50, 200, 300)}
    passes = [sum(choice.two_phase for choice in stack.explain(n).values()) for n in results]
    assert passes == [0, 0, 1, 1, 2, 2]
    for num_tokens, result in results.items():
        assert reference.same_bits(result, step(rows(num_tokens, 64))), num_tokens


@pytest.mark.slow
@pytest.mark.usefixtures("_one_thread")
def test_decoding_compiled_on_the_host_is_plain_pytorch_to_rounding() -> None:
    model, plain, exact = decoded_plainly(Sizes(), "cpu")
    model = two_phase_of(model, None)
    torch._dynamo.reset()
    compiled = torch.compile(model.step, fullgraph=True)
    assert_near(decode(model, compiled, plain.tokens), plain, exact, None)


@pytest.mark.gpu
@pytest.mark.usefixtures("native_device")
@pytest.mark.parametrize("bank_dtype", BOUNDS)
@pytest.mark.parametrize("how", ["eager", "compiled", "captured"])
def test_decoding_natively_is_plain_pytorch_to_rounding(how: str, bank_dtype: torch.dtype | None) -> None:
    model, plain, exact = decoded_plainly(ON_GPU, "cuda")
    model = two_phase_of(model, bank_dtype)
    step = model.step
    if how == "compiled":
        torch._dynamo.reset()
        step = torch.compile(model.step, fullgraph=True)
    elif how == "captured":
        step = captured(model)
    assert_near(decode(model, step, plain.tokens), plain, exact, bank_dtype)


# --- where it pays --------------------------------------------------------------------------------------


def test_by_default_the_cpu_runs_in_one_phase(passes: list[dict[str, Any]]) -> None:
    stack, plain = stack_of(two_phase=None), stack_of(two_phase=False)
    assert reference.same_bits(run_once(stack), run_once(plain))
    assert passes == []
    choices = stack.explain(4)
    assert list(choices) == [0, 1, 7, 13]
    assert choices[0].reason == "no bank row is read"
    assert choices[7] == (False, "only native kernels gain by it, the rows are on cpu")
    assert plain.explain(4)[7] == (False, "two_phase=False was asked for")
    assert stack_of().explain(4)[7] == (True, "two_phase=True was asked for")


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native kernels, as far as the choice asks."""
    monkeypatch.setattr(native, "device_reason", lambda device: None)
    monkeypatch.setattr(native, "hidden_sizes", lambda: frozenset({7168}))


CUDA = torch.device("cuda", 0)


@pytest.mark.usefixtures("on_gpu")
def test_the_choice_follows_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    Row, choose = _two_phase_plan.Row, _two_phase_plan.choose
    monkeypatch.setattr(_two_phase_plan, "TABLE", (Row(64, 5, 8), Row(math.inf, 3, 4)))
    assert choose(5, 64, 8, 7168, CUDA) == (True, "8 calls read the same 5 bank rows")
    assert choose(4, 64, 8, 7168, CUDA) == (False, "4 bank rows are read, it pays from 5 on")
    assert choose(5, 64, 7, 7168, CUDA) == (False, "7 calls read the same rows, it pays from 8 on")
    assert choose(3, 65, 4, 7168, CUDA).two_phase
    assert not choose(2, 65, 24, 7168, CUDA).two_phase
    assert not choose(8, 65, 3, 7168, CUDA).two_phase


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": 64}, "only native kernels gain by it: none is compiled for H=64"),
        ({"dtype": torch.float16}, "only native kernels gain by it, the rows are torch.float16"),
        ({"backend": "triton"}, "only native kernels gain by it, the backend is triton"),
        ({"batch_invariant": True}, "the choice depends on the batch, on which no bit may depend"),
        ({"device": torch.device("cpu")}, "only native kernels gain by it, the rows are on cpu"),
    ],
)
def test_the_choice_is_for_native_kernels_alone(changes: dict[str, Any], reason: str) -> None:
    arguments = {"num_blocks": 8, "num_tokens": 1024, "num_sites": 24, "hidden_size": 7168, "device": CUDA}
    assert _two_phase_plan.choose(**arguments).two_phase
    assert _two_phase_plan.choose(**{**arguments, **changes}) == (False, reason)


@pytest.mark.usefixtures("on_gpu")
def test_a_bank_of_another_type_is_taken_only_when_asked_for() -> None:
    stack = stack_of(24, 12, two_phase=None, bank_dtype=torch.float32)
    reason = "only a bank of the rows' type gains by it, it is torch.float32"
    assert stack._choice(25, 4096, CUDA, torch.bfloat16) == (False, reason)
    assert stack_of(24, 12, bank_dtype=torch.float32)._choice(25, 4096, CUDA, torch.bfloat16).two_phase


def test_the_choice_heeds_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {"num_blocks": 8, "num_tokens": 1024, "num_sites": 24, "hidden_size": 7168, "device": CUDA}
    monkeypatch.setattr(native, "device_reason", lambda device: None)
    monkeypatch.setattr(native, "hidden_sizes", lambda: (7168,))
    assert _two_phase_plan.choose(**arguments).two_phase
    monkeypatch.setenv("LIBATTNRES_BACKEND", "triton")
    reason = "only native kernels gain by it, the backend is triton"
    assert _two_phase_plan.choose(**arguments) == (False, reason)
    assert _two_phase_plan.choose(**arguments, backend="native").two_phase


def test_a_pass_serves_no_more_sites_than_it_may() -> None:
    assert _two_phase_plan.sites_per_pass(1024, 1, 64, 2, None) == 1024
    assert _two_phase_plan.sites_per_pass(1500, 1, 64, 2, None) == 750


def test_what_a_pass_left_for_other_calls_is_not_taken() -> None:
    """A stream that was put together for a site before, or long after, those of its pass."""
    stack = stack_of()
    stream = stack.begin(rows(3, 64))
    _, stream = stack.before_attention(0, stream, None)
    assert stream.mixed is not None
    for first_site in (stream.mixed.first_site + 5, -100):
        moved = stream._replace(mixed=stream.mixed._replace(first_site=first_site))
        hidden, after = stack.before_mlp(0, moved, rows(3, 64))
        expected, _ = stack.before_mlp(0, stream._replace(mixed=None), rows(3, 64))
        assert reference.same_bits(hidden, expected)
        assert after.mixed is None


def test_a_gpu_without_kernels_runs_in_one_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "device_reason", lambda device: "no kernel for it")
    choice = _two_phase_plan.choose(8, 1, 24, 7168, CUDA)
    assert choice == (False, "only native kernels gain by it: no kernel for it")


def test_the_built_in_table_takes_no_long_batch_that_moves_more_rows() -> None:
    for row in _two_phase_plan.TABLE:
        if row.max_tokens <= 48:
            continue  # latency counts there, and was measured
        for num_blocks in range(row.min_blocks, 9):
            assert row.min_sites > num_blocks / (num_blocks - 2)
    bounds = [row.max_tokens for row in _two_phase_plan.TABLE]
    assert bounds == sorted(bounds)
    assert bounds[-1] == math.inf


def test_wrong_options_are_refused() -> None:
    with pytest.raises(TypeError, match=r"^two_phase: expected a bool or None, got str"):
        stack_of(two_phase="auto")
    with pytest.raises(ValueError, match=r"^max_bank_bytes: expected a number >= 1 or None, got 0"):
        stack_of(max_bank_bytes=0)
    with pytest.raises(ValueError, match=r"^bank_dtype: expected .*, got torch.float16"):
        run_once(stack_of(bank_dtype=torch.float16))
