# SPDX-License-Identifier: Apache-2.0
"""The plugins of inference engines, against packages that are laid out as theirs are."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import sys
import types
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from libattnres import reference
from libattnres.engines import replacement, service, sglang, vllm

# Each operator is the float64 reference, and leaves a mark that an engine's own function ran.
VLLM = {
    "models/__init__.py": "",
    "models/kimi_k3/__init__.py": "from .nvidia.model import KimiK3ForConditionalGeneration\n",
    "models/kimi_k3/nvidia/__init__.py": "",
    "models/kimi_k3/nvidia/ops/__init__.py": "from .attn_res import attn_res\n",
    "models/kimi_k3/nvidia/ops/attn_res.py": """
from libattnres import reference

calls = []

def attn_res(prefix, delta, blocks, norm_weight, qk_weight, output_norm_weight, num_blocks, block_write_idx,
             eps, output_norm_eps):
    calls.append(num_blocks)
    result = reference.attn_res(prefix, delta, blocks, norm_weight, qk_weight, output_norm_weight, num_blocks,
                                block_write_idx, eps, output_norm_eps)
    prefix.copy_(result.prefix)
    blocks.copy_(result.blocks)
    return result.output.to(prefix.dtype)
""",
    "models/kimi_k3/nvidia/model.py": """
from vllm.models.kimi_k3.nvidia.ops import attn_res

class KimiK3ForConditionalGeneration:
    pass
""",
}
VLLM_MODEL = "vllm.models.kimi_k3.nvidia.model"

SGLANG = {
    "srt/__init__.py": "",
    "srt/models/__init__.py": "",
    "srt/models/kimi_k3.py": "from sglang.srt.layers.attn_residual import AttnResidual, aggregate_stream\n",
    "srt/layers/__init__.py": "",
    "srt/layers/attn_residual.py": """
from libattnres import reference

calls = []

def mix(prefix, bank, nvb, score_proj, score_norm, out_norm):
    calls.append(nvb)
    return reference.attn_res(
        prefix, None, bank, score_norm.weight, score_proj.weight.view(-1),
        None if out_norm is None else out_norm.weight, nvb, -1, score_norm.variance_epsilon,
        0.0 if out_norm is None else out_norm.variance_epsilon,
    ).output.to(prefix.dtype)

def aggregate_stream(prefix_sum, bank, nvb, score_proj, score_norm):
    return prefix_sum if nvb == 0 else mix(prefix_sum, bank, nvb, score_proj, score_norm, None)

class AttnResidual:
    def __init__(self, hidden_states, block_num):
        tokens, hidden_size = hidden_states.shape
        self.block_residual = hidden_states.new_full((tokens, block_num, hidden_size), float("nan"))
        self.num_valid_blocks = 0
        self.written_on_slice = False

    def _count_write(self, rows):
        self.num_valid_blocks += 1
        self.written_on_slice |= rows is not None

    def forward(self, hidden_states, prefix_sum, score_proj, score_norm, out_norm, rows=None, write=False):
        if rows is None and self.written_on_slice:
            raise RuntimeError("stale rows")
        prefix = hidden_states if prefix_sum is None else prefix_sum + hidden_states
        bank = self.block_residual if rows is None else self.block_residual[rows]
        output = mix(prefix, bank, self.num_valid_blocks, score_proj, score_norm, out_norm)
        if write:
            bank[:, self.num_valid_blocks].copy_(prefix)
            self._count_write(rows)
        return output, prefix
""",
}
SGLANG_MODEL = "sglang.srt.models.kimi_k3"

Package = Callable[..., None]


@pytest.fixture
def package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[Package]:
    """Writes an engine's package to where Python finds it."""
    names = ("vllm", "sglang")
    for name in [name for name in sys.modules if name.partition(".")[0] in names]:
        monkeypatch.delitem(sys.modules, name)
    for engine in (vllm.ENGINE, sglang.ENGINE):
        monkeypatch.delenv(engine.variable, raising=False)
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    caplog.set_level(logging.INFO)

    def write(name: str, files: dict[str, str]) -> None:
        for path, text in {"__init__.py": "", **files}.items():
            file = tmp_path / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        importlib.invalidate_caches()

    yield write
    for name in [name for name in sys.modules if name.partition(".")[0] in names]:
        del sys.modules[name]


def own_calls(engine: replacement.Engine) -> list[int]:
    """The calls that an engine ran itself."""
    calls: list[int] = sys.modules[engine.module].__dict__["calls"]
    return calls


def check_vllm(function: Callable[..., torch.Tensor], case: Any) -> None:
    """One call through the function that a model holds, against the reference."""
    with torch.no_grad():
        expected = reference.attn_res(*case.arguments)
    output = function(*case.arguments)
    assert reference.compare(output, expected.output).ok
    assert reference.same_bits(case.prefix, expected.prefix)
    assert reference.same_bits(case.blocks, expected.blocks)


@pytest.mark.parametrize("engine", [vllm.ENGINE, sglang.ENGINE], ids=lambda engine: engine.name)
def test_installed_package_has_the_entry_point(engine: replacement.Engine) -> None:
    group = {"vLLM": "vllm.general_plugins", "SGLang": "sglang.srt.plugins"}[engine.name]
    module = {"vLLM": vllm, "SGLang": sglang}[engine.name]
    points = [point for point in metadata.entry_points(group=group) if point.name == "libattnres"]
    assert points, f"libattnres is not among the plugins of {group}"
    assert points[0].load() is module.register


# vLLM


def test_vllm_finds_the_replacement_when_it_imports_the_model(
    package: Package, make_case: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    package("vllm", VLLM)
    monkeypatch.setenv("LIBATTNRES_BACKEND", "host")
    vllm.register()
    assert not any(name.startswith("vllm.") for name in sys.modules), "a plugin must not import the model"
    model = importlib.import_module(VLLM_MODEL)
    assert model.attn_res is sys.modules[vllm.ENGINE.module].__dict__["attn_res"]
    check_vllm(model.attn_res, make_case(block_write_idx=3))
    check_vllm(model.attn_res, make_case(delta=None, output_norm_weight=None))
    assert own_calls(vllm.ENGINE) == []
    assert (
        "replaced attn_res of vllm.models.kimi_k3.nvidia.ops.attn_res (vLLM of unknown version)"
        in caplog.text
    )
    assert "serves attention residuals on cpu" in caplog.text


def test_vllm_that_imported_the_model_first_gets_the_replacement_everywhere(
    package: Package, make_case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    package("vllm", VLLM)
    monkeypatch.setenv("LIBATTNRES_BACKEND", "host")
    model = importlib.import_module(VLLM_MODEL)
    vllm.register()
    vllm.register()  # as processes do that load their plugins twice
    check_vllm(model.attn_res, make_case())
    check_vllm(importlib.import_module("vllm.models.kimi_k3.nvidia.ops").attn_res, make_case())
    assert own_calls(vllm.ENGINE) == []
    assert not hasattr(model.attn_res.__wrapped__, "__wrapped__"), "replaced twice"


def test_vllm_runs_what_is_not_served(
    package: Package, make_case: Any, caplog: pytest.LogCaptureFixture
) -> None:
    package("vllm", VLLM)
    vllm.register()
    model = importlib.import_module(VLLM_MODEL)
    check_vllm(model.attn_res, make_case())
    check_vllm(model.attn_res, make_case())
    assert own_calls(vllm.ENGINE) == [3, 3]
    left = [record.message for record in caplog.records if "left to vLLM" in record.message]
    assert left == ["libattnres: left to vLLM: native needs CUDA tensors, these are on cpu"]


def test_vllm_runs_a_call_that_attn_res_refuses(
    package: Package, make_case: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    package("vllm", VLLM)
    monkeypatch.setenv("LIBATTNRES_BACKEND", "host")
    vllm.register()
    model = importlib.import_module(VLLM_MODEL)
    case = make_case()
    check_vllm(model.attn_res, case.with_(norm_weight=case.norm_weight.float()))
    assert own_calls(vllm.ENGINE) == [3]
    assert "left to vLLM: norm_weight: expected dtype torch.bfloat16" in caplog.text


def test_vllm_may_pass_weights_that_require_grad(
    package: Package, make_case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    package("vllm", VLLM)
    monkeypatch.setenv("LIBATTNRES_BACKEND", "host")
    vllm.register()
    model = importlib.import_module(VLLM_MODEL)
    case = make_case()
    check_vllm(model.attn_res, case.with_(norm_weight=torch.nn.Parameter(case.norm_weight)))
    assert own_calls(vllm.ENGINE) == []


def test_vllm_compiles_its_own_function(
    package: Package, make_case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = """
import torch
calls = []
def attn_res(prefix, delta, blocks, norm_weight, qk_weight, output_norm_weight, num_blocks, block_write_idx,
             eps, output_norm_eps):
    return torch.full_like(prefix, 7)
"""
    package("vllm", {**VLLM, "models/kimi_k3/nvidia/ops/attn_res.py": own})
    monkeypatch.setenv("LIBATTNRES_BACKEND", "host")
    vllm.register()
    model = importlib.import_module(VLLM_MODEL)
    compiled = torch.compile(model.attn_res, backend="eager", fullgraph=True)
    assert (compiled(*make_case().arguments) == 7).all()


@pytest.mark.parametrize("value", ["0", "no"])
def test_vllm_is_left_alone_when_it_is_said_so(
    value: str, package: Package, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    package("vllm", VLLM)
    monkeypatch.setenv("LIBATTNRES_VLLM", value)
    vllm.register()
    model = importlib.import_module(VLLM_MODEL)
    assert not hasattr(model.attn_res, "__wrapped__")
    text = "off (LIBATTNRES_VLLM=0)" if value == "0" else "LIBATTNRES_VLLM: expected 0 or 1, got 'no'"
    assert text in caplog.text


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("output_norm_eps):", "output_norm_eps, scale=None):", "expected parameters (prefix, delta"),
        ("def attn_res(prefix, delta", "def attn_res(delta, prefix", "expected parameters (prefix, delta"),
        (
            "def attn_res",
            "def attention_residuals",
            "vllm.models.kimi_k3.nvidia.ops.attn_res.attn_res: not there",
        ),
    ],
)
def test_vllm_with_another_function_is_left_alone(
    old: str, new: str, text: str, package: Package, caplog: pytest.LogCaptureFixture
) -> None:
    file = "models/kimi_k3/nvidia/ops/attn_res.py"
    package(
        "vllm",
        {
            **VLLM,
            file: VLLM[file].replace(old, new),
            "models/kimi_k3/nvidia/ops/__init__.py": "",
            "models/kimi_k3/nvidia/model.py": "class KimiK3ForConditionalGeneration: pass",
        },
    )
    vllm.register()
    module = importlib.import_module(vllm.ENGINE.module)
    assert not any(hasattr(value, "__wrapped__") for value in vars(module).values())
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert text in warnings[0]


def test_vllm_without_the_model_is_left_alone(package: Package, caplog: pytest.LogCaptureFixture) -> None:
    package("vllm", {"models/__init__.py": ""})
    finders = list(sys.meta_path)
    vllm.register()
    assert sys.meta_path == finders
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "it has no module vllm.models.kimi_k3.nvidia.ops.attn_res" in caplog.text


def test_an_engine_that_is_not_installed_is_called_that(
    package: Package, caplog: pytest.LogCaptureFixture
) -> None:
    replacement.install(dataclasses.replace(vllm.ENGINE, package="wllm", module="wllm.ops"))
    assert "vLLM of unknown version is left as it is: it is not installed" in caplog.text


def test_vllm_that_wants_batch_invariance_gets_it(
    package: Package, make_case: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    package("vllm", VLLM)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setenv("LIBATTNRES_BACKEND", "torch")  # which cannot promise it
    vllm.register()
    model = importlib.import_module(VLLM_MODEL)
    check_vllm(model.attn_res, make_case())
    assert own_calls(vllm.ENGINE) == [3]
    assert "torch cannot be batch-invariant" in caplog.text


def test_an_engine_goes_on_when_kernels_cannot_be_loaded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = torch.device("cuda", 0)
    asked = []

    def warmup(device: torch.device) -> None:
        asked.append(device)
        raise RuntimeError("out of memory")

    capturing = True
    monkeypatch.setattr(service.native, "device_reason", lambda index: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(service._probe, "warmup", warmup)
    caplog.set_level(logging.INFO)
    served = service.Service("vLLM", logging.getLogger("test"))
    assert served.serves(device), "a graph that is being captured does not load kernels"
    assert not asked
    capturing = False
    assert not served.serves(device)
    assert not served.serves(device)
    assert asked == [device]
    assert "left to vLLM: kernels cannot be loaded: out of memory" in caplog.text


# SGLang


def modules(case: Any) -> tuple[Any, Any, Any]:
    """Projection, score norm and output norm, as SGLang's layers hold their weights."""
    return (
        types.SimpleNamespace(weight=case.qk_weight[None]),
        types.SimpleNamespace(weight=case.norm_weight, variance_epsilon=1e-5),
        types.SimpleNamespace(weight=case.output_norm_weight, variance_epsilon=1e-6),
    )


@pytest.mark.parametrize("rows", [None, slice(2, 4)])
@pytest.mark.parametrize("has_prefix", [True, False])
@pytest.mark.parametrize("write", [True, False])
def test_sglang_reads_its_bank_through_attn_res(
    write: bool,
    has_prefix: bool,
    rows: slice | None,
    package: Package,
    make_case: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package("sglang", SGLANG)
    monkeypatch.setenv("LIBATTNRES_BACKEND", "host")
    sglang.register()
    model = importlib.import_module(SGLANG_MODEL)
    own = sys.modules[sglang.ENGINE.module].__dict__
    case = make_case(num_tokens=6)
    count = 6 if rows is None else rows.stop - rows.start
    results = []
    for forward in (model.AttnResidual.forward.__wrapped__, model.AttnResidual.forward):
        bank = model.AttnResidual(case.prefix, 8)
        bank.block_residual[:, :3] = case.blocks[:, :3]
        bank.num_valid_blocks = 3
        hidden_states, prefix_sum = case.delta[:count].clone(), case.prefix[:count].clone()
        output, prefix = forward(
            bank, hidden_states, prefix_sum if has_prefix else None, *modules(case), rows=rows, write=write
        )
        assert reference.same_bits(prefix_sum, case.prefix[:count]), "SGLang keeps its old prefix"
        results.append((output, prefix, bank))
    assert own["calls"] == [3]
    (expected, expected_prefix, expected_bank), (output, prefix, bank) = results
    assert reference.compare(output, expected.double()).ok
    assert reference.same_bits(prefix, expected_prefix)
    assert reference.same_bits(bank.block_residual, expected_bank.block_residual)
    assert bank.num_valid_blocks == expected_bank.num_valid_blocks == 3 + write
    assert bank.written_on_slice == (write and rows is not None)


def test_sglang_keeps_the_first_read_and_its_errors(
    package: Package, make_case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    package("sglang", SGLANG)
    monkeypatch.setenv("LIBATTNRES_BACKEND", "host")
    sglang.register()
    model = importlib.import_module(SGLANG_MODEL)
    case = make_case(num_tokens=6)
    bank = model.AttnResidual(case.prefix, 8)
    bank.forward(case.prefix[:3], None, *modules(case), rows=slice(0, 3), write=True)
    assert own_calls(sglang.ENGINE) == [0]
    with pytest.raises(RuntimeError, match="stale rows"):
        bank.forward(case.prefix, None, *modules(case))


def test_sglang_reads_a_stream_through_attn_res(
    package: Package, make_case: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    package("sglang", SGLANG)
    monkeypatch.setenv("LIBATTNRES_BACKEND", "host")
    sglang.register()
    stream = importlib.import_module(SGLANG_MODEL).aggregate_stream
    case = make_case()
    score_proj, score_norm, _ = modules(case)
    expected = reference.attn_res(
        case.prefix, None, case.blocks, case.norm_weight, case.qk_weight, None, 5, -1, 1e-5, 1e-5
    )
    assert reference.compare(stream(case.prefix, case.blocks, 5, score_proj, score_norm), expected.output).ok
    assert stream(case.prefix, case.blocks, 0, score_proj, score_norm) is case.prefix
    assert own_calls(sglang.ENGINE) == []
    assert (
        "replaced AttnResidual.forward and aggregate_stream of sglang.srt.layers.attn_residual" in caplog.text
    )


def test_sglang_runs_what_is_not_served(package: Package, make_case: Any) -> None:
    package("sglang", SGLANG)
    sglang.register()
    model = importlib.import_module(SGLANG_MODEL)
    case = make_case()
    score_proj, score_norm, out_norm = modules(case)
    bank = model.AttnResidual(case.prefix, 8)
    bank.block_residual[:, :2] = case.blocks[:, :2]
    bank.num_valid_blocks = 2
    bank.forward(case.delta, case.prefix, score_proj, score_norm, out_norm, write=True)
    model.aggregate_stream(case.prefix, bank.block_residual, 3, score_proj, score_norm)
    assert own_calls(sglang.ENGINE) == [2, 3]


@pytest.mark.parametrize(
    "missing", ["_count_write(self, rows)", "class AttnResidual", "aggregate_stream(prefix_sum"]
)
def test_sglang_is_replaced_whole_or_not_at_all(
    missing: str, package: Package, caplog: pytest.LogCaptureFixture
) -> None:
    file = "srt/layers/attn_residual.py"
    changed = SGLANG[file].replace(missing, missing[:8] + "_" + missing[8:])
    package("sglang", {**SGLANG, file: changed})
    sglang.register()
    module = importlib.import_module(sglang.ENGINE.module)
    functions = [*vars(module).values()]
    functions += [member for value in functions if isinstance(value, type) for member in vars(value).values()]
    assert not any(hasattr(function, "__wrapped__") for function in functions)
    assert [record.levelno for record in caplog.records][-1] == logging.WARNING


# On a GPU


@pytest.mark.gpu
@pytest.mark.usefixtures("native_device")
def test_engines_are_served_natively(
    package: Package, gpu_case: Any, caplog: pytest.LogCaptureFixture
) -> None:
    package("vllm", VLLM)
    package("sglang", SGLANG)
    vllm.register()
    sglang.register()
    model = importlib.import_module(VLLM_MODEL)
    check_vllm(model.attn_res, gpu_case(num_tokens=5, block_write_idx=3))
    case = gpu_case(num_tokens=5)
    bank = importlib.import_module(SGLANG_MODEL).AttnResidual(case.prefix, 8)
    bank.block_residual[:, :3] = case.blocks[:, :3]
    bank.num_valid_blocks = 3
    expected = reference.attn_res(case.prefix + case.delta, None, *case.arguments[2:6], 3, -1, 1e-5, 1e-6)
    output, _ = bank.forward(case.delta, case.prefix, *modules(case), write=True)
    assert reference.compare(output, expected.output).ok
    assert own_calls(vllm.ENGINE) == own_calls(sglang.ENGINE) == []
    # Another type is not served natively, so it is the engine's.
    half = gpu_case(num_tokens=5, dtype=torch.float16)
    model.attn_res(*half.arguments)
    assert own_calls(vllm.ENGINE) == [3]
    assert "serves attention residuals on cuda:0" in caplog.text
    assert "left to vLLM: " in caplog.text
