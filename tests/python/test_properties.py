# SPDX-License-Identifier: Apache-2.0
"""The whole argument space, drawn by Hypothesis and held against the float64 reference.

CI draws the same calls on every run. ``LIBATTNRES_PROPERTY_EXAMPLES=N`` draws N others per test.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import libattnres
import pytest
import torch
from libattnres import reference
from programs import run_program

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("LIBATTNRES_PROPERTY_EXAMPLES", "0"))


def profile(examples: int) -> Any:
    """So many examples in CI, always the same ones."""
    return settings(
        max_examples=EXAMPLES or examples,
        derandomize=EXAMPLES == 0,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


@dataclass(frozen=True)
class Space:
    """The calls that a backend serves."""

    backend: str
    device: str = "cpu"
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)
    # Around the widths of vectors and of a warp's share of a row.
    hidden_sizes: tuple[int, ...] = (1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 130)
    max_tokens: int = 6
    prefixes_per_row: tuple[int, ...] = (1, 1, 1, 2, 3)
    alignment: int = 1
    """Elements that offsets and paddings are multiples of."""


SPACES = {
    "host": Space("host"),
    "torch": Space("torch", dtypes=(torch.bfloat16, torch.float16, torch.float32, torch.float64)),
    "triton_interpreted": Space("triton", max_tokens=3),
    "native": Space(
        "native",
        "cuda",
        dtypes=(torch.bfloat16,),
        hidden_sizes=(7168,),
        max_tokens=150,
        prefixes_per_row=(1, 1, 2),
        alignment=8,
    ),
    "triton": Space("triton", "cuda", hidden_sizes=(1, 17, 64, 130, 7168), max_tokens=150),
    "torch_on_gpu": Space("torch", "cuda", hidden_sizes=(1, 17, 64, 130, 7168), max_tokens=150),
}


@dataclass
class Drawn:
    """One call; every row array lies in an allocation that is NaN all around it."""

    prefix: torch.Tensor
    delta: torch.Tensor | None
    blocks: torch.Tensor
    norm_weight: torch.Tensor
    qk_weight: torch.Tensor
    output_norm_weight: torch.Tensor | None
    num_blocks: int
    block_write_idx: int
    eps: float
    output_norm_eps: float
    out: torch.Tensor | None
    seed: int
    what: str
    allocations: list[torch.Tensor]

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (
            self.prefix,
            self.delta,
            self.blocks,
            self.norm_weight,
            self.qk_weight,
            self.output_norm_weight,
            self.num_blocks,
            self.block_write_idx,
            self.eps,
            self.output_norm_eps,
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        names = ("prefix", "delta", "blocks", "norm_weight", "qk_weight", "output_norm_weight", "out")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def filled(kind: str, shape: torch.Size, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Values of one kind, on the generator's device."""
    random: dict[str, Any] = {"generator": generator, "device": generator.device}
    normal = torch.randn(shape, dtype=torch.float64, **random)
    info = torch.finfo(dtype)
    if kind == "plain":
        return normal.to(dtype)
    if kind == "scaled":  # each row of another size, none of which float32 minds
        exponents = torch.rand(*shape[:-1], 1, dtype=torch.float64, **random) * 6 - 3
        return (normal * 10**exponents).to(dtype)
    if kind == "wild":  # every size that the dtype has, denormal ones too
        span = math.log10(info.max) - math.log10(info.smallest_normal) + 4
        exponents = torch.rand(shape, dtype=torch.float64, **random) * span
        values = normal.sign() * 10 ** (exponents + math.log10(info.smallest_normal) - 4)
        return values.clamp(info.min, info.max).to(dtype)
    if kind == "bits":  # any bits at all
        integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        limits = torch.iinfo(integer)
        return torch.randint(limits.min, limits.max, shape, dtype=integer, **random).view(dtype)
    if kind == "zeros":
        return torch.zeros_like(normal).copysign(normal).to(dtype)
    assert kind == "specials", kind  # plain, with a few that are not
    values = normal.to(dtype)
    denormal = info.smallest_normal / 4
    special = torch.tensor(
        [math.nan, math.inf, -math.inf, info.max, info.min, info.smallest_normal, denormal, -0.0],
        dtype=torch.float64,
        device=generator.device,
    ).to(dtype)
    chosen = special[torch.randint(0, len(special), shape, **random)]
    return torch.where(torch.rand(shape, **random) < 1.5 / max(1, shape[-1]), chosen, values)


KINDS = ("plain", "plain", "scaled", "scaled", "specials", "wild", "bits", "zeros")


@st.composite
def calls(draw: Any, space: Space) -> Drawn:
    """A call that is right."""
    dtype = draw(st.sampled_from(space.dtypes))
    hidden_size = draw(st.sampled_from(space.hidden_sizes))
    prefixes_per_row = draw(st.sampled_from(space.prefixes_per_row))
    num_bank_tokens = draw(st.integers(0, space.max_tokens // prefixes_per_row))
    num_tokens = num_bank_tokens * prefixes_per_row
    num_bank_rows = draw(st.integers(0, 10))
    num_blocks = draw(st.integers(0, min(8, num_bank_rows)))
    block_write_idx = -1
    if prefixes_per_row == 1 and num_bank_rows > 0:
        # Rows that are read, the first that is not, any, or none.
        block_write_idx = draw(
            st.integers(0, max(0, num_blocks - 1))
            | st.just(min(num_blocks, num_bank_rows - 1))
            | st.integers(-1, num_bank_rows - 1)
            | st.just(-1)
        )
    has_delta, has_norm, has_out = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    kind, seed = draw(st.sampled_from(KINDS)), draw(st.integers(0, 2**31))
    epsilons = st.sampled_from((0.0, 1e-12, 1e-6, 1e-5, 1.0, 1e4))
    eps, output_norm_eps = draw(epsilons), draw(epsilons)
    generator = torch.Generator(space.device).manual_seed(seed)
    allocations: list[torch.Tensor] = []
    gaps = st.integers(0, 5).map(lambda gap: gap * space.alignment)

    def allocate(size: int) -> torch.Tensor:
        """Elements of NaN on the device, with a few more at the end."""
        allocation = torch.full((size + 64,), math.nan, dtype=dtype, device=space.device)
        allocations.append(allocation)
        return allocation

    def rows(*counts: int) -> torch.Tensor:
        """Padded rows at an offset; of two leading dimensions either may be the outer one in memory."""
        stride = hidden_size + draw(gaps)
        offset, gap = draw(gaps), draw(gaps)
        if len(counts) == 1:
            strides = (stride,)
        elif draw(st.booleans()):
            strides = (counts[1] * stride + gap, stride)
        else:
            strides = (stride, counts[0] * stride + gap)
        reach = sum(max(0, count - 1) * step for count, step in zip(counts, strides, strict=True))
        allocation = allocate(offset + reach + hidden_size)
        return allocation.as_strided((*counts, hidden_size), (*strides, 1), offset)

    layout = "apart"
    if prefixes_per_row == 1:
        layout = draw(st.sampled_from(("apart", "interleaved", "expanded")))
    delta = out = None
    if layout == "interleaved":
        # Everything of one token side by side, as `memory[:, :8]` and `memory[:, 8]`.
        memory = rows(num_bank_tokens, num_bank_rows + 3)
        before = draw(st.integers(0, 3))
        blocks = memory[:, before : before + num_bank_rows]
        others = [memory[:, row] for row in range(num_bank_rows + 3) if not 0 <= row - before < num_bank_rows]
        prefix = others[0]
        delta = others[1] if has_delta else None
        out = others[2] if has_out else None
    else:
        prefix, blocks = rows(num_tokens), rows(num_bank_tokens, num_bank_rows)
        delta = rows(num_tokens) if has_delta else None
        out = rows(num_tokens) if has_out else None
        if layout == "expanded" and block_write_idx == -1 and num_bank_tokens > 0:
            blocks = blocks[:1].expand(num_bank_tokens, -1, -1)

    def weight(scale: float, shift: float) -> torch.Tensor:
        values = filled("plain", torch.Size([hidden_size]), torch.float64, generator) * scale + shift
        offset = draw(gaps)
        return allocate(offset + hidden_size)[offset : offset + hidden_size].copy_(values)

    norm_weight = weight(0.3, 1.0)
    # Scores of a few units, or so large that the softmax picks one row.
    qk_weight = weight(draw(st.sampled_from((0.0, 2.0, 2.0, 100.0))) / math.sqrt(hidden_size), 0.0)
    output_norm_weight = weight(0.2, 1.0) if has_norm else None

    prefix.copy_(filled(kind, prefix.shape, dtype, generator))
    if delta is not None:
        delta.copy_(filled(kind, delta.shape, dtype, generator))
    read = blocks[:1] if layout == "expanded" and blocks.shape[0] > 1 and blocks.stride(0) == 0 else blocks
    read[:, :num_blocks].copy_(filled(kind, read[:, :num_blocks].shape, dtype, generator))
    what = f"{space.backend} {dtype} {layout} {kind}"
    return Drawn(
        prefix,
        delta,
        blocks,
        norm_weight,
        qk_weight,
        output_norm_weight,
        num_blocks,
        block_write_idx,
        eps,
        output_norm_eps,
        out,
        seed,
        what,
        allocations,
    )


def copied(drawn: Drawn) -> Drawn:
    """The same call in memory of its own, of the same layout."""
    allocations = [allocation.clone() for allocation in drawn.allocations]
    mine = {
        old.untyped_storage().data_ptr(): new for old, new in zip(drawn.allocations, allocations, strict=True)
    }
    tensors = {
        name: mine[tensor.untyped_storage().data_ptr()].as_strided(
            tensor.shape, tensor.stride(), tensor.storage_offset()
        )
        for name, tensor in drawn.tensors().items()
    }
    return Drawn(**{**vars(drawn), **tensors, "allocations": allocations})


def sources(drawn: Drawn, new_prefix: torch.Tensor) -> torch.Tensor:
    """``[M, N, H]`` in float64."""
    num_tokens = new_prefix.shape[0]
    shared = max(1, num_tokens // max(1, drawn.blocks.shape[0]))
    bank = drawn.blocks[:, : drawn.num_blocks].double().repeat_interleave(shared, 0)
    return torch.cat([bank, new_prefix.double()[:, None]], 1)


def allowed_error(drawn: Drawn, expected: reference.Result) -> torch.Tensor:
    """``[M, H]``: how far float32 sums in any order may be from the reference, by forward error analysis.

    Infinite for tokens whose squares or norms leave the range of float32.
    """
    dtype = drawn.prefix.dtype
    values = sources(drawn, expected.prefix)
    hidden_size = values.shape[-1]
    # Half a unit in the last place of the arithmetic, and of a sum of H such.
    unit = 2.0**-53 if dtype is torch.float64 else 2.0**-24
    of_sum = (min(hidden_size, 512) + 16) * unit
    magnitude = values.abs()
    query = drawn.norm_weight.double() * drawn.qk_weight.double()
    dot = (magnitude * query.abs()).sum(-1)
    mean_square = values.square().mean(-1) + drawn.eps
    inverse = mean_square.rsqrt()
    score = (values * query).sum(-1) * inverse
    # A sum that underflows loses what is below the smallest normal number.
    score_error = of_sum * (dot * inverse + score.abs()) + hidden_size * 2.0**-126 * inverse
    top = score.max(-1, keepdim=True).values
    exponent_error = 2 * score_error.max(-1, keepdim=True).values + 4 * unit * ((top - score) + 16)
    weights = score.softmax(-1)
    weight_error = weights * torch.expm1(exponent_error) + 2.0**-125
    if drawn.num_blocks == 0:
        weights, weight_error = torch.ones_like(weights), torch.zeros_like(weights)
    terms = weights[..., None] * magnitude
    error = (weight_error[..., None] * magnitude).sum(1) + 12 * unit * terms.sum(1)
    mixed = (weights[..., None] * values).sum(1)
    in_range = (magnitude.amax((1, 2)) < 1e17) & (score.abs().amax(-1) < 1e30)
    in_range &= drawn.num_blocks == 0 or (mean_square.amin(-1) > 1e-30) | (magnitude.amax((1, 2)) == 0)
    if drawn.output_norm_weight is not None:
        mean_square = mixed.square().mean(-1, keepdim=True) + drawn.output_norm_eps
        relative = 2 * (mixed.abs() * error).mean(-1, keepdim=True) / mean_square + of_sum
        weight = drawn.output_norm_weight.double().abs()
        error = weight * mean_square.rsqrt() * (2 * error + 2 * mixed.abs() * relative)
        in_range &= (relative[:, 0] < 0.1) & (mean_square[:, 0] > 1e-30)
    rounding = reference.TOLERANCES[dtype].element_relative * expected.output.abs()
    error = error + rounding + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    return torch.where(in_range[:, None], error, math.inf)


def spoiled(drawn: Drawn, expected: reference.Result) -> torch.Tensor:
    """``[M]``: tokens that read a NaN or an infinity and else only what float32 holds the squares of."""
    values = sources(drawn, expected.prefix)
    finite = values.isfinite()
    return ~finite.all(-1).all(-1) & (torch.where(finite, values, 0.0).abs().amax((1, 2)) < 1e15)


def assert_output(drawn: Drawn, output: torch.Tensor, expected: reference.Result) -> None:
    if output.numel() == 0:
        return
    wanted, got = expected.output, output.double()
    error = allowed_error(drawn, expected)
    # Rounded to its dtype a result may pass the largest number, on either side of the last step.
    largest = torch.finfo(output.dtype).max
    overflows = got.isinf() & (wanted.sign() == got.sign()) & (wanted.abs() + error >= largest)
    overflows |= wanted.abs() > largest * (1 + torch.finfo(output.dtype).eps / 4)
    right = ((got - wanted).abs() <= error) | overflows
    unchecked = ~(error < math.inf)
    bad = spoiled(drawn, expected)[:, None]
    same_kind = (got.isnan() == wanted.isnan()) & (got.isinf() == wanted.isinf())
    right = torch.where(bad, same_kind, right | unchecked)
    if not right.all():
        token, column = (~right).nonzero()[0].tolist()
        raise AssertionError(
            f"{drawn.what}: token {token}, column {column}: expected {wanted[token, column]} +- "
            f"{error[token, column]}, got {got[token, column]}"
        )
    if drawn.what.endswith(("plain", "zeros")) and drawn.qk_weight.abs().max() < 20 / drawn.prefix.shape[1]:
        verdict = reference.compare(output, expected.output)
        # Of a few elements rounding alone may exceed the bound of the norm.
        ok = verdict.ok if output.numel() >= 500 else verdict.worst_element <= 1
        assert ok, f"{drawn.what}: {verdict}"
    if drawn.num_blocks == 0 and drawn.output_norm_weight is None:
        # The softmax of one score is exactly 1.
        assert_same(output, expected.prefix, drawn.what)


def assert_same(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    """The same bits; a NaN for a NaN, whose bits no backend promises."""
    numbers = ~wanted.isnan()
    assert torch.equal(got.isnan(), ~numbers), f"{what}: NaN"
    assert reference.same_bits(got[numbers], wanted[numbers]), what


def run(drawn: Drawn, space: Space) -> torch.Tensor:
    output = libattnres.attn_res(*drawn.arguments, out=drawn.out, backend=space.backend)
    if drawn.out is not None:
        assert output is drawn.out
    else:
        assert output.is_contiguous()
        assert (output.shape, output.dtype) == (drawn.prefix.shape, drawn.prefix.dtype)
    return output


def check_call(drawn: Drawn, space: Space) -> None:
    """One call against the reference, every byte of every allocation, a second run, and a spoiled token."""
    expected = reference.attn_res(*drawn.arguments)
    again, wanted, other = copied(drawn), copied(drawn), copied(drawn)
    output = run(drawn, space)
    wanted.prefix.copy_(expected.prefix)
    if drawn.block_write_idx >= 0:
        wanted.blocks[:, drawn.block_write_idx].copy_(expected.prefix)
    if wanted.out is not None:
        wanted.out.copy_(output)  # judged below
    for got, right in zip(drawn.allocations, wanted.allocations, strict=True):
        assert_same(got, right, drawn.what)
    assert_output(again, output, expected)  # judged by what the call read
    assert reference.same_bits(run(again, space), output), f"{drawn.what}: another run, other bits"

    num_tokens = output.shape[0]
    if num_tokens < 2 or other.blocks.shape[0] != num_tokens:
        return
    victim = drawn.seed % num_tokens
    other.prefix[victim, drawn.seed % output.shape[1]] = math.nan
    kept = [token for token in range(num_tokens) if token != victim]
    assert reference.same_bits(run(other, space)[kept], output[kept]), f"{drawn.what}: a token's neighbour"


def check_calls(name: str, examples: int) -> None:
    """Draw calls of a space and check each."""
    space = SPACES[name]

    @profile(examples)
    @given(drawn=calls(space))
    def property_holds(drawn: Drawn) -> None:
        check_call(drawn, space)

    property_holds()


def on_gpu(name: str) -> None:
    reason = libattnres.probe().backends[SPACES[name].backend]
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize(("name", "examples"), [("host", 200), ("torch", 80)])
def test_every_call_is_right(name: str, examples: int) -> None:
    check_calls(name, examples)


def test_every_call_is_right_interpreted() -> None:
    pytest.importorskip("triton")
    run_program(
        f"import test_properties; test_properties.check_calls('triton_interpreted', {EXAMPLES or 30})",
        TRITON_INTERPRET="1",
    )


# Triton compiles for nearly every example.
@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(("name", "examples"), [("native", 200), ("triton", 60), ("torch_on_gpu", 100)])
def test_every_call_is_right_on_the_gpu(name: str, examples: int) -> None:
    on_gpu(name)
    check_calls(name, examples)


# Calls that are wrong in one way.


@dataclass(frozen=True)
class Wrong:
    """What is wrong with a call, and the error that must say so."""

    changes: dict[str, Any]
    exception: type[Exception]
    names: tuple[str, ...]
    """Arguments that the error may name."""
    needs_memory: bool = False
    """Whether only tensors with memory can show it."""


def reshaped(draw: Any, name: str, tensor: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The same memory in a shape that does not fit the other arguments."""
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "one dimension more": lambda: tensor[None],
        "one column less": lambda: tensor[..., :-1],
        "one column more": lambda: torch.cat([tensor, tensor[..., :1]], -1),
        "a scalar": lambda: tensor.new_ones(()),
    }
    if name in ("delta", "out"):
        ways |= {
            "one token more": lambda: torch.cat([tensor, tensor.new_ones(1, tensor.shape[1])]),
            "a vector": lambda: tensor.flatten(),
        }
    if name == "blocks" and num_tokens > 0:
        ways["more bank entries than tokens"] = lambda: tensor.new_ones(num_tokens + 1, *tensor.shape[1:])
    return ways[draw(st.sampled_from(sorted(ways)))]()


@st.composite
def wrong_calls(draw: Any, space: Space) -> tuple[Drawn, Wrong]:
    """A call that is right, and a change that is not."""
    drawn = draw(calls(space))
    tensors = drawn.tensors()
    name = draw(st.sampled_from(sorted(tensors)))
    tensor = tensors[name]
    num_bank_rows, prefixes = drawn.blocks.shape[1], drawn.prefix.shape[0] // max(1, drawn.blocks.shape[0])
    way = draw(st.integers(0, 12))
    if way == 0:
        most = min(8, num_bank_rows)
        value: Any = draw(st.integers(-(2**70), 2**70) | st.integers(-3, 12))
        if 0 <= value <= most:
            value = most + 1
        return drawn, Wrong({"num_blocks": value}, ValueError, ("num_blocks",))
    if way == 1:
        value = draw(st.integers(-(2**70), 2**70) | st.integers(-3, 12))
        if -1 <= value < num_bank_rows and not (value >= 0 and prefixes > 1):
            value = num_bank_rows
        return drawn, Wrong({"block_write_idx": value}, ValueError, ("block_write_idx",))
    if way == 2:
        index = draw(st.sampled_from(("num_blocks", "block_write_idx")))
        value = draw(st.sampled_from((True, False, None, 1.0, "1", 1j, [1], torch.tensor(1))))
        return drawn, Wrong({index: value}, TypeError, (index,))
    if way == 3:
        epsilon = draw(st.sampled_from(("eps", "output_norm_eps")))
        value = draw(st.floats(max_value=-1e-30) | st.sampled_from((math.nan, math.inf, 1e39, -1, 10**400)))
        return drawn, Wrong({epsilon: value}, ValueError, (epsilon,))
    if way == 4:
        epsilon = draw(st.sampled_from(("eps", "output_norm_eps")))
        value = draw(st.sampled_from((True, None, "1e-5", 1j, [1e-5], torch.tensor(1e-5))))
        return drawn, Wrong({epsilon: value}, TypeError, (epsilon,))
    if way == 5:
        option, values, exception = draw(
            st.sampled_from(
                (
                    ("pdl", ("", "late", None, 1, True), ValueError),
                    ("backend", ("", "cuda", 3, True), ValueError),
                    ("plan", ("ring", 1, [1, 0, 0, 0]), TypeError),
                    ("batch_invariant", (0, 1, "yes"), TypeError),
                )
            )
        )
        return drawn, Wrong({option: draw(st.sampled_from(values))}, exception, (option,))
    if way == 6:
        value = draw(st.sampled_from(([1.0], 1.0, "x", None)))
        if value is None and name in ("delta", "output_norm_weight", "out"):
            value = 0
        return drawn, Wrong({name: value}, TypeError, (name,))
    # What does not fit prefix is another argument, so it is that one which is named.
    others = ("blocks", "delta", "out", "norm_weight") if name == "prefix" else ()
    if way == 7:
        return drawn, Wrong(
            {name: reshaped(draw, name, tensor, drawn.prefix.shape[0])}, ValueError, (name, *others)
        )
    if way == 8:
        others = ("blocks",) if name == "prefix" else ()
        dtypes = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.complex64]
        dtypes.remove(tensor.dtype)
        converted = torch.ones(tensor.shape, dtype=draw(st.sampled_from(dtypes)), device=tensor.device)
        return drawn, Wrong({name: converted}, ValueError, (name, *others))
    if way == 9 and tensor.shape[-1] > 1:
        wide = torch.ones(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype, device=tensor.device)
        return drawn, Wrong({name: wide[..., ::2]}, ValueError, (name,))
    if way == 10 and tensor.numel() > 0:
        freed = tensor.clone()
        freed.untyped_storage().resize_(0)
        return drawn, Wrong({name: freed}, ValueError, (name,), needs_memory=True)
    if way == 11:
        return drawn, Wrong({name: torch._neg_view(tensor)}, ValueError, (name,), needs_memory=True)
    grown = tensor.detach().requires_grad_()
    return drawn, Wrong({name: grown}, RuntimeError, (name,))


def message(arguments: dict[str, Any], wrong: Wrong) -> str:
    """Of the error that a call must raise."""
    with pytest.raises(wrong.exception) as raised:
        libattnres.attn_res(**arguments)
    text = str(raised.value)
    assert text.split(":")[0] in wrong.names, f"{text} rather than one about {wrong.names}"
    assert ": expected " in text, text
    assert ", got " in text, text
    return text


def check_wrong_call(drawn: Drawn, wrong: Wrong, backend: str | None) -> None:
    """The documented error, no byte changed, and the same error from tensors without memory."""
    arguments: dict[str, Any] = {
        **drawn.tensors(),
        **{
            name: getattr(drawn, name) for name in ("num_blocks", "block_write_idx", "eps", "output_norm_eps")
        },
        "backend": backend,
    }
    arguments = {"delta": None, "output_norm_weight": None, **arguments, **wrong.changes}
    before = [allocation.clone() for allocation in drawn.allocations]
    changed = [value for value in wrong.changes.values() if isinstance(value, torch.Tensor)]
    kept = [value.clone() for value in changed if not wrong.needs_memory]
    text = message(arguments, wrong)
    for allocation, old in zip(drawn.allocations, before, strict=True):
        assert reference.same_bits(allocation, old), text
    for value, old in zip(changed, kept, strict=False):
        assert torch.equal(value.detach(), old.detach()) or value.isnan().any(), text
    if wrong.needs_memory:
        return
    meta = {
        name: torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device="meta"
        ).requires_grad_(value.requires_grad)
        if isinstance(value, torch.Tensor) and name in (*drawn.tensors(), *wrong.changes)
        else value
        for name, value in arguments.items()
    }
    assert message(meta, wrong) == text


def check_wrong_calls(name: str, examples: int, backends: tuple[str | None, ...]) -> None:
    space = SPACES[name]

    @profile(examples)
    @given(drawn=wrong_calls(space), backend=st.sampled_from(backends))
    def property_holds(drawn: tuple[Drawn, Wrong], backend: str | None) -> None:
        check_wrong_call(*drawn, backend)

    property_holds()


def test_every_wrong_call_is_named_and_changes_no_byte() -> None:
    check_wrong_calls("torch", 200, (None, "torch"))
    check_wrong_calls("host", 80, ("host",))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["native", "triton", "torch_on_gpu"])
def test_every_wrong_call_is_named_and_changes_no_byte_on_the_gpu(name: str) -> None:
    on_gpu(name)
    check_wrong_calls(name, 150, (None, SPACES[name].backend))


# Views of one allocation: refused exactly when what is written shares an element with another argument.


@st.composite
def views(draw: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor], int, int]:
    """(memory, row arrays anywhere in it, num_blocks, block_write_idx)."""
    hidden_size, num_tokens = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    num_bank_rows = draw(st.integers(0, 3))
    size = draw(st.integers(60, 240))
    memory = torch.arange(1, size + 1, dtype=torch.float32).div_(64).remainder_(3).bfloat16()

    def view(*counts: int) -> torch.Tensor:
        strides = [draw(st.integers(0, 3 * hidden_size + 8)) for _ in counts]
        reach = sum(max(0, count - 1) * step for count, step in zip(counts, strides, strict=True))
        offset = draw(st.integers(0, size - reach - hidden_size))
        return memory.as_strided((*counts, hidden_size), (*strides, 1), offset)

    tensors = {"prefix": view(num_tokens), "blocks": view(num_tokens, num_bank_rows), "out": view(num_tokens)}
    if draw(st.booleans()):
        tensors["delta"] = view(num_tokens)
    block_write_idx = draw(st.integers(-1, num_bank_rows - 1))
    return memory, tensors, draw(st.integers(0, num_bank_rows)), block_write_idx


def elements(tensor: torch.Tensor) -> list[int]:
    """Where each element lies in the allocation."""
    places = torch.arange(tensor.untyped_storage().nbytes() // tensor.element_size())
    found: list[int] = (
        places.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).flatten().tolist()
    )
    return found


def test_overlap_is_refused_exactly_where_it_is() -> None:
    outcomes = {True: 0, False: 0}

    @profile(300)
    @given(drawn=views())
    def property_holds(drawn: tuple[torch.Tensor, dict[str, torch.Tensor], int, int]) -> None:
        memory, tensors, num_blocks, block_write_idx = drawn
        places = {name: elements(tensor) for name, tensor in tensors.items()}
        written = {"out"} | ({"prefix"} if "delta" in tensors else set())
        written |= {"blocks"} if block_write_idx >= 0 else set()
        overlaps = any(len(set(places[name])) < len(places[name]) for name in written) or any(
            set(places[name]) & set(places[other]) for name in written for other in tensors if other != name
        )
        outcomes[overlaps] += 1
        weight = torch.ones(tensors["prefix"].shape[1], dtype=torch.bfloat16)
        arguments = (tensors["prefix"], tensors.get("delta"), tensors["blocks"], weight, weight, weight)
        before = memory.clone()
        if overlaps:
            with pytest.raises(ValueError, match=r"^(out|prefix|blocks): expected .*, got "):
                libattnres.attn_res(*arguments, num_blocks, block_write_idx, out=tensors["out"])
            assert reference.same_bits(memory, before)
            return
        expected = reference.attn_res(*arguments, num_blocks, block_write_idx)
        libattnres.attn_res(*arguments, num_blocks, block_write_idx, out=tensors["out"])
        assert reference.compare(tensors["out"], expected.output).worst_element <= 1
        assert reference.same_bits(tensors["prefix"], expected.prefix)
        assert reference.same_bits(tensors["blocks"], expected.blocks)
        touched = [place for name in written for place in places[name]]
        rest = [place for place in range(len(memory)) if place not in set(touched)]
        assert reference.same_bits(memory[rest], before[rest])

    property_holds()
    assert min(outcomes.values()) >= sum(outcomes.values()) // 10, outcomes
