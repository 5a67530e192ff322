# SPDX-License-Identifier: Apache-2.0
"""Modules: one call site, the schedule of a whole model, its parallel forms, and a model that decodes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import libattnres
import pytest
import torch
from libattnres import model_walk, reference
from libattnres.nn import AttnRes, AttnResStack, HandOver
from tiny_model import Decoded, Model, Sizes, decode

ROUNDING = 1.1
"""An error may be this many times that of plain PyTorch, which rounds at the same places ..."""
BETWEEN = 1.5
"""... and two results this much apart: as two that round independently, and a little."""

SUBLAYERS: tuple[Any, Any] = (
    lambda layer, hidden: hidden * (0.5 + 0.1 * layer),
    lambda layer, hidden: hidden.roll(layer + 1, dims=1),
)


def filled(stack: AttnResStack, seed: int = 0) -> AttnResStack:
    """The stack with random weights, the same for a layer whatever the stage."""
    for name, weight in stack.named_parameters():
        generator = torch.Generator().manual_seed(seed + sum(name.encode()) % 1000)
        weight.copy_(torch.randn(weight.shape, generator=generator))
    return stack


def rows(num_tokens: int, hidden_size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, hidden_size, generator=generator).bfloat16()


# --- one call site --------------------------------------------------------------------------------------


@pytest.mark.parametrize("output_norm", [True, False])
def test_a_site_is_attn_res_with_its_weights(output_norm: bool, make_case: Callable[..., Any]) -> None:
    case = make_case(eps=1e-3, output_norm_eps=1e-2, num_blocks=4, block_write_idx=4)
    if not output_norm:
        case = case.with_(output_norm_weight=None)
    site = AttnRes(
        64, output_norm=output_norm, eps=case.eps, output_norm_eps=case.output_norm_eps, dtype=torch.bfloat16
    )
    names = ["norm_weight", "qk_weight", *(["output_norm_weight"] if output_norm else [])]
    assert list(site.state_dict()) == names
    site.load_state_dict({name: getattr(case, name) for name in names})
    other = case.clone()
    expected = libattnres.attn_res(*other.arguments)
    out = torch.full_like(case.prefix, float("nan"))
    output = site(case.prefix, case.delta, case.blocks, 4, 4, out=out)
    assert output is out
    for left, right in ((output, expected), (case.prefix, other.prefix), (case.blocks, other.blocks)):
        assert reference.same_bits(left, right)


def test_a_new_site_attends_uniformly_and_needs_no_no_grad(make_case: Callable[..., Any]) -> None:
    case = make_case(delta=None)
    site = AttnRes(64, output_norm=False, dtype=torch.bfloat16)
    sources = torch.cat([case.blocks[:, :3], case.prefix[:, None]], dim=1).double()
    verdict = reference.compare(site(case.prefix, None, case.blocks, 3), sources.mean(dim=1))
    assert verdict.ok, verdict


# --- the schedule ---------------------------------------------------------------------------------------


def test_calls_are_those_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """All 187, in order; what the sub-layers return is the delta, or replaces the prefix."""
    calls: list[Any] = []

    def record(prefix: Any, delta: Any, blocks: Any, *rest: Any, **options: Any) -> torch.Tensor:
        calls.append((prefix, delta, blocks, *rest))
        return torch.zeros_like(prefix)

    monkeypatch.setattr("libattnres.nn.attn_res", record)
    config = {
        "text_config": {
            "num_hidden_layers": model_walk.NUM_LAYERS,
            "hidden_size": 8,
            "attn_res_block_size": model_walk.LAYERS_PER_BLOCK,
            "rms_norm_eps": model_walk.EPS,
        }
    }
    stack = AttnResStack.from_config(config)
    outputs: list[torch.Tensor] = []

    def sublayer(layer: int, hidden: torch.Tensor) -> torch.Tensor:
        outputs.append(torch.full_like(hidden, len(outputs)))
        return outputs[-1]

    embeddings = torch.zeros(2, 8)
    stack(embeddings, sublayer, sublayer)
    walk = model_walk.walk_calls()
    assert len(calls) == len(walk)
    prefix = embeddings
    for index, (call, wanted) in enumerate(zip(calls, walk, strict=True)):
        previous = outputs[index - 1] if index > 0 else None
        if wanted.replaces_prefix:
            assert previous is not None
            prefix = previous
        assert call[0] is prefix, wanted
        assert call[1] is (previous if wanted.has_delta else None), wanted
        assert call[2].shape == (2, model_walk.NUM_BANK_ROWS, 8)
        assert (call[5] is not None) == wanted.has_output_norm, wanted
        assert call[6:8] == (wanted.num_blocks, wanted.block_write_idx), wanted
        assert call[8:] == (model_walk.EPS, model_walk.EPS), wanted
    parameters = {id(weight): name for name, weight in stack.named_parameters()}
    assert parameters[id(calls[2][3])] == "layers.1.self_attention_res_norm.weight"
    assert parameters[id(calls[2][5])] == "layers.1.input_layernorm.weight"
    assert parameters[id(calls[3][3])] == "layers.1.mlp_res_norm.weight"
    assert parameters[id(calls[3][5])] == "layers.1.post_attention_layernorm.weight"
    assert parameters[id(calls[-1][3])] == "output_attn_res_norm.weight"


@pytest.mark.usefixtures("_one_thread")
def test_in_float64_the_stack_is_the_plain_model() -> None:
    model = Model(Sizes(length=8), dtype=torch.float64)
    ours, plain = decode(model, model.step), decode(model, model.plain_step)
    assert torch.equal(ours.tokens, plain.tokens)
    torch.testing.assert_close(ours.hidden, plain.hidden, rtol=0, atol=1e-11)


@pytest.mark.parametrize("cut", range(1, 7))
def test_two_pipeline_stages_are_the_whole(cut: int) -> None:
    options: dict[str, Any] = {"dtype": torch.bfloat16}
    whole = filled(AttnResStack(7, 64, 3, **options))
    first = filled(AttnResStack(7, 64, 3, end_layer=cut, **options))
    second = filled(AttnResStack(7, 64, 3, first_layer=cut, **options))
    assert {*first.state_dict(), *second.state_dict()} == {*whole.state_dict()}
    embeddings = rows(4, 64)
    expected = whole(embeddings.clone(), *SUBLAYERS)
    handed = first(embeddings, *SUBLAYERS)
    assert isinstance(handed, HandOver)
    assert handed.bank.shape == (4, -(-cut // 3), 64)
    assert handed.bank.isfinite().all()
    assert reference.same_bits(embeddings, rows(4, 64)), "the embeddings changed"
    received = HandOver(*(tensor.clone() for tensor in handed))
    result = second(received.prefix, *SUBLAYERS, bank=received.bank)
    assert reference.same_bits(result, expected)
    assert second.num_inherited_rows == handed.bank.shape[1]


def test_ranks_that_share_the_tokens_are_the_whole() -> None:
    """Two threads as ranks: all-gather in front of a sub-layer that mixes tokens, reduce-scatter behind."""
    stack = filled(AttnResStack(5, 64, 2, dtype=torch.float32))
    embeddings = rows(6, 64).float()

    def attention(layer: int, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.cumsum(dim=0) * 0.3

    mlp = SUBLAYERS[1]
    expected = stack(embeddings, attention, mlp)
    barrier = threading.Barrier(2, timeout=60)
    exchanged: list[Any] = [None, None]
    results: list[Any] = [None, None]

    def exchange(rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        exchanged[rank] = tensor
        barrier.wait()
        both = list(exchanged)
        barrier.wait()
        return both

    def run(rank: int) -> None:
        # Each rank has one half of every sub-layer's weights: its output is half of the sum.
        results[rank] = stack(
            embeddings.chunk(2)[rank],
            lambda layer, hidden: attention(layer, hidden) / 2,
            lambda layer, hidden: mlp(layer, hidden) / 2,
            gather=lambda tensor: torch.cat(exchange(rank, tensor)),
            scatter=lambda tensor: sum(exchange(rank, tensor)).chunk(2)[rank],  # type: ignore[union-attr]
        )

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert reference.same_bits(torch.cat(results), expected)


def test_a_bank_is_used_as_it_is_where_its_rows_suffice() -> None:
    stack = filled(AttnResStack(7, 64, 3, first_layer=4, dtype=torch.bfloat16))
    assert (stack.num_inherited_rows, stack.num_bank_rows) == (2, 3)
    inherited = torch.stack([rows(4, 64, seed) for seed in (1, 2)], dim=1)
    small, large = inherited.clone(), torch.full((4, 5, 64), float("nan")).bfloat16()
    large[:, :2] = inherited
    from_small = stack(rows(4, 64), *SUBLAYERS, bank=small)
    from_large = stack(rows(4, 64), *SUBLAYERS, bank=large)
    assert reference.same_bits(from_small, from_large)
    assert reference.same_bits(small, inherited)
    assert large[:, 2].isfinite().all()
    assert large[:, 3:].isnan().all()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"block_size": 0}, "block_size: expected a number >= 1, got 0"),
        ({"hidden_size": -1}, "hidden_size: expected a number >= 1, got -1"),
        ({"num_layers": 17}, "num_layers: expected 1..16 for 8 blocks of 2 layers, got 17"),
        ({"num_layers": 0}, "num_layers: expected 1..16 for 8 blocks of 2 layers, got 0"),
        ({"first_layer": 5}, "end_layer: expected 0 <= first_layer < end_layer <= 5, got 5 and 5"),
        ({"end_layer": 6}, "end_layer: expected 0 <= first_layer < end_layer <= 5, got 0 and 6"),
    ],
)
def test_a_stack_that_cannot_be_is_refused(options: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        AttnResStack(**{"num_layers": 5, "hidden_size": 8, "block_size": 2, **options})
    assert str(raised.value) == text


def test_steps_out_of_order_are_refused_before_anything_is_written() -> None:
    stack = AttnResStack(5, 64, 2, first_layer=1, end_layer=4, dtype=torch.bfloat16)
    prefix, bank = rows(4, 64), torch.stack([rows(4, 64, 1)] * 2, dim=1)
    before = bank.clone()
    with pytest.raises(ValueError, match=r"^bank: expected \[M, rows, H\] with rows >= 1, got 0 rows"):
        stack.begin(prefix)
    stream = stack.begin(prefix, bank)
    with pytest.raises(ValueError, match=r"^layer: expected 1\.\.3, got 4"):
        stack.before_attention(4, stream, prefix)
    with pytest.raises(
        ValueError, match=r"^mlp_output: expected None before the stage's first layer, got Te"
    ):
        stack.before_attention(1, stream, rows(4, 64))
    with pytest.raises(ValueError, match=r"^mlp_output: expected a tensor, got NoneType"):
        stack.before_attention(2, stream)
    with pytest.raises(ValueError, match=r"^end_layer: expected 5 for the call after the stack, got 4"):
        stack.finish(stream, rows(4, 64))
    with pytest.raises(ValueError, match=r"^config: expected one with attn_res_block_size, got none"):
        AttnResStack.from_config(SimpleNamespace(num_hidden_layers=3, hidden_size=8))
    assert reference.same_bits(prefix, rows(4, 64))
    assert reference.same_bits(bank, before)


# --- checkpoints ----------------------------------------------------------------------------------------

LAYER_NAMES = (
    "self_attention_res_norm",
    "self_attention_res_proj",
    "input_layernorm",
    "mlp_res_norm",
    "mlp_res_proj",
    "post_attention_layernorm",
)


def checkpoint(prefix: str, num_layers: int = 5) -> dict[str, torch.Tensor]:
    """Tensors named as in a Kimi K3 checkpoint, and others that are not for the stack."""
    names = [f"layers.{layer}.{name}.weight" for layer in range(num_layers) for name in LAYER_NAMES]
    names += ["output_attn_res_norm.weight", "output_attn_res_proj.weight", "norm.weight"]
    weights = {
        prefix + name: rows(1, 64, seed) if "proj" in name else rows(1, 64, seed)[0]
        for seed, name in enumerate(names)
    }
    weights["vision_tower.layers.0.input_layernorm.weight"] = torch.zeros(32)
    weights[f"{prefix}layers.0.self_attn.o_proj.weight"] = torch.zeros(2, 2)
    return weights


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.", ""])
@pytest.mark.parametrize("pairs", [False, True])
def test_a_checkpoint_loads_whatever_its_prefix(prefix: str, pairs: bool) -> None:
    weights = checkpoint(prefix)
    stack = AttnResStack(5, 64, 2, dtype=torch.bfloat16)
    loaded = stack.load_checkpoint(iter(weights.items()) if pairs else weights)
    state = stack.state_dict()
    assert loaded == {prefix + name for name in state}
    assert len(state) == 5 * len(LAYER_NAMES) + 2
    for name, tensor in state.items():
        assert reference.same_bits(tensor, weights[prefix + name]), name
    again = AttnResStack(5, 64, 2, dtype=torch.bfloat16)
    again.load_state_dict({name: weights[prefix + name] for name in state})
    embeddings = rows(3, 64)
    assert reference.same_bits(again(embeddings, *SUBLAYERS), stack(embeddings, *SUBLAYERS))


def test_a_stage_loads_its_layers_and_others_names_are_given_theirs() -> None:
    weights = checkpoint("")
    renamed = {name.replace("layers.", "blk.").replace("_weight", "w"): t for name, t in weights.items()}
    stack = AttnResStack(5, 64, 2, first_layer=2, end_layer=4, dtype=torch.bfloat16, device="meta")
    loaded = stack.load_checkpoint(renamed, rename=lambda name: name.replace("blk.", "layers."))
    assert len(loaded) == 2 * len(LAYER_NAMES)
    assert all(name.startswith(("blk.2.", "blk.3.")) for name in loaded)
    for name, weight in stack.named_parameters():
        assert reference.same_bits(weight.detach(), weights[name]), name
        assert not weight.requires_grad


def test_checkpoints_that_do_not_fit_are_refused_and_change_nothing() -> None:
    stack = filled(AttnResStack(5, 64, 2, dtype=torch.bfloat16))
    before = {name: tensor.clone() for name, tensor in stack.state_dict().items()}
    weights = checkpoint("model.")
    with pytest.raises(ValueError, match=r"^prefix: expected one in front of the AttnRes weights, got \["):
        stack.load_checkpoint({**weights, **checkpoint("draft.")})
    with pytest.raises(ValueError, match=r"^weights: expected draft.layers.0.input_layernorm.weight, "):
        stack.load_checkpoint(weights, prefix="draft.")
    proj = "model.layers.3.mlp_res_proj.weight"
    with pytest.raises(ValueError, match=f"^weights: expected {proj}, got none of that name"):
        stack.load_checkpoint({name: tensor for name, tensor in weights.items() if name != proj})
    with pytest.raises(ValueError, match=rf"^{proj}: expected shape \[1, 64\], got \[1, 32\]"):
        stack.load_checkpoint({**weights, proj: weights[proj][:, :32]})
    with pytest.raises(ValueError, match=rf"^{proj}: expected dtype .*, got torch.float8_e4m3fn"):
        stack.load_checkpoint({**weights, proj: weights[proj].to(torch.float8_e4m3fn)})
    with pytest.raises(TypeError, match=rf"^{proj}: expected a torch.Tensor, got list"):
        stack.load_checkpoint({**weights, proj: weights[proj].tolist()})
    with pytest.raises(ValueError, match=rf"^weights: expected one {proj}, got {proj} and {proj}"):
        stack.load_checkpoint([*weights.items(), (proj, weights[proj])])
    for name, tensor in stack.state_dict().items():
        assert reference.same_bits(tensor, before[name])
    stack.load_checkpoint({**weights, **checkpoint("draft.")}, prefix="draft.")
    stack.load_checkpoint({**weights, proj: weights[proj][0]})


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_weights_of_another_precision_become_the_stacks(device: str) -> None:
    """On meta, where the checkpoint's tensors take the place of the parameters, too."""
    stack = AttnResStack(5, 64, 2, dtype=torch.bfloat16, device=device)
    weights = checkpoint("model.")
    stack.load_checkpoint({name: tensor.float().requires_grad_() for name, tensor in weights.items()})
    for name, parameter in stack.named_parameters():
        assert reference.same_bits(parameter, weights["model." + name])
        assert not parameter.requires_grad


# --- a model that decodes -------------------------------------------------------------------------------


@pytest.fixture
def _one_thread() -> Iterator[None]:
    """Matrices this small only wait for more of them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def relative_error(hidden: torch.Tensor, wanted: torch.Tensor) -> float:
    """Over the hidden states of all steps."""
    return float((hidden.double() - wanted.double()).norm() / wanted.double().norm())


def assert_same_to_rounding(ours: Decoded, plain: Decoded, exact: Decoded) -> None:
    """As near to the float64 model as plain PyTorch is, in every quarter of the 64 steps."""
    assert ours.hidden.shape[0] == 64
    for some in zip(*(decoded.hidden.chunk(4) for decoded in (ours, plain, exact)), strict=True):
        rounding = relative_error(some[1], some[2])
        assert relative_error(some[0], some[2]) <= ROUNDING * rounding
        assert relative_error(some[0], some[1]) <= BETWEEN * rounding


@cache
def decoded_plainly(sizes: Sizes, device: str) -> tuple[Model, Decoded, Decoded]:
    """A model, what it decodes in plain PyTorch, and in float64 from the same tokens."""
    model = Model(sizes, device, backend="native" if device == "cuda" else "host")
    plain = decode(model, model.plain_step)
    exact = Model(sizes, device, torch.float64)
    return model, plain, decode(exact, exact.plain_step, plain.tokens)


@pytest.mark.usefixtures("_one_thread")
def test_decoding_on_the_host_is_plain_pytorch_to_rounding() -> None:
    model, plain, exact = decoded_plainly(Sizes(), "cpu")
    ours = decode(model, model.step, plain.tokens)
    assert_same_to_rounding(ours, plain, exact)


@pytest.mark.usefixtures("_one_thread")
def test_decoding_traced_in_one_graph_is_the_same_to_the_bit() -> None:
    """Dynamo and functionalisation alone change no kernel, so no bit may change."""
    model, plain, _ = decoded_plainly(Sizes(), "cpu")
    torch._dynamo.reset()
    traced = torch.compile(model.step, fullgraph=True, backend="aot_eager")
    expected = decode(model, model.step, plain.tokens)
    assert reference.same_bits(decode(model, traced, plain.tokens).hidden, expected.hidden)


@pytest.mark.slow
@pytest.mark.usefixtures("_one_thread")
def test_decoding_compiled_on_the_host_is_plain_pytorch_to_rounding() -> None:
    model, plain, exact = decoded_plainly(Sizes(), "cpu")
    torch._dynamo.reset()
    compiled = torch.compile(model.step, fullgraph=True)
    assert_same_to_rounding(decode(model, compiled, plain.tokens), plain, exact)


ON_GPU = Sizes(hidden_size=7168, num_heads=4, head_size=64, intermediate_size=512, batch=4)


@pytest.mark.gpu
@pytest.mark.usefixtures("native_device")
@pytest.mark.parametrize("how", ["eager", "compiled", "captured"])
def test_decoding_natively_is_plain_pytorch_to_rounding(how: str) -> None:
    model, plain, exact = decoded_plainly(ON_GPU, "cuda")
    step = model.step
    if how == "compiled":
        torch._dynamo.reset()
        step = torch.compile(model.step, fullgraph=True)
    elif how == "captured":
        step = captured(model)
    assert_same_to_rounding(decode(model, step, plain.tokens), plain, exact)


@torch.no_grad()
def captured(model: Model) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The decode step as one CUDA graph over buffers of its own."""
    libattnres.warmup()
    tokens = torch.zeros(model.sizes.batch, dtype=torch.int64, device="cuda")
    position = torch.zeros(1, dtype=torch.int64, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model.step(tokens, position)  # cuBLAS needs its workspace
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden = model.step(tokens, position)

    def replay(new_tokens: torch.Tensor, new_position: torch.Tensor) -> torch.Tensor:
        tokens.copy_(new_tokens)
        position.copy_(new_position)
        graph.replay()
        return hidden

    return replay
