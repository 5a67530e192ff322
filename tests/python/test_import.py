# SPDX-License-Identifier: Apache-2.0
"""What `import libattnres` does, and above all does not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import libattnres
import pytest
import torch
from libattnres import _core
from libattnres._call import checked_call


def run(program: str, *options: str) -> str:
    return subprocess.run(
        [sys.executable, *options, "-c", program], capture_output=True, text=True, check=True, timeout=120
    ).stdout


def test_import_loads_nothing_heavy_warns_nothing_and_starts_no_cuda() -> None:
    program = """
import sys, torch
before = set(sys.modules)
import libattnres
new = {name.partition('.')[0] for name in set(sys.modules) - before}
assert not new & {'triton', 'rich', 'matplotlib', 'numpy'}, new
assert not torch.cuda.is_initialized()
assert 'libattnres.reference' not in sys.modules
print('fine')
"""
    assert run(program, "-W", "error").strip() == "fine"


def test_import_alone_is_the_library_and_the_standard_one() -> None:
    """So its time is bounded by theirs: no PyTorch, no NumPy, no engine or array library."""
    program = """
import sys
before = set(sys.modules)
import libattnres
assert libattnres.UnsupportedError is libattnres._core.UnsupportedError
assert 'attn_res' in dir(libattnres)
new = {name.partition('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names
assert new == {'libattnres'}, new
print('fine')
"""
    assert run(program, "-W", "error").strip() == "fine"


def test_a_hidden_pytorch_is_an_absent_one() -> None:
    """As tests of optional dependencies hide it; the arrays of others are still served."""
    program = """
import sys
sys.modules["torch"] = None
import libattnres.array
try:
    libattnres.attn_res
except ModuleNotFoundError as error:
    print(error)
"""
    assert "torch" in run(program)


@pytest.mark.parametrize(
    "statements",
    [
        "import libattnres.array, importlib.util; importlib.util.find_spec('torch'); import torch",
        "import libattnres; libattnres.attn_res; import torch",
        "from libattnres.nn import AttnRes; import torch",
        "from libattnres._probe import probe; import libattnres, torch; assert probe is libattnres.probe",
    ],
)
def test_the_operator_is_registered_whatever_is_imported_first(statements: str) -> None:
    program = f"""
{statements}
prefix, blocks = torch.ones(2, 8), torch.ones(2, 1, 8)
torch.ops.libattnres.attn_res_add_(prefix, prefix.clone(), blocks, blocks[0, 0], blocks[0, 0], None, 1)
assert (prefix == 2).all()
import sys
assert not any('_after_import' in type(finder).__module__ for finder in sys.meta_path)
assert '_after_import' not in type(torch.__spec__.loader).__module__
print('fine')
"""
    assert run(program).strip() == "fine"


def test_all_is_all_there() -> None:
    for name in libattnres.__all__:
        assert getattr(libattnres, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'attn_ress'"):
        _ = libattnres.attn_ress


def test_version_is_that_of_the_library() -> None:
    assert libattnres.__version__ == _core.version()
    assert libattnres.__version__.count(".") == 2


def test_probe_has_a_reason_for_every_backend_that_cannot_be_used() -> None:
    probe = libattnres.probe()
    assert set(probe.backends) == {"native", "triton", "torch", "host"}
    assert probe.backends["host"] is None
    assert probe.backends["torch"] is None
    usable = any(device.native for device in probe.devices)
    assert (probe.backends["native"] is None) == usable
    assert probe.backends["native"] != ""
    assert probe.num_permutations == len(libattnres.permutations())


def test_warmup_without_a_native_device_says_why() -> None:
    if libattnres.probe().backends["native"] is None:
        pytest.skip("the native backend works here")
    with pytest.raises((libattnres.UnsupportedError, RuntimeError)) as raised:
        libattnres.warmup()
    assert str(raised.value)


@pytest.mark.parametrize(
    ("device", "exception", "text"),
    [
        ("cpu", ValueError, "device: expected a CUDA device, got cpu"),
        (torch.device("cpu"), ValueError, "device: expected a CUDA device, got cpu"),
        (-1, ValueError, "device: expected a number >= 0, got -1"),
        (1.0, TypeError, "device: expected an int, str or torch.device, got float"),
        (True, TypeError, "device: expected an int, str or torch.device, got bool"),
    ],
)
def test_warmup_refuses_what_is_no_cuda_device(device: Any, exception: type[Exception], text: str) -> None:
    with pytest.raises(exception) as raised:
        libattnres.warmup(device)
    assert str(raised.value) == text


def core_call(make_case: Callable[..., Any]) -> tuple[Any, list[int | float]]:
    """A checked call, which keeps the memory alive, and its form for _core."""
    call = checked_call(*make_case().arguments, None, "wait")
    return call, list(call.core_args())


def test_core_checks_count_types_and_ranges_of_its_arguments(make_case: Callable[..., Any]) -> None:
    _call, arguments = core_call(make_case)
    assert len(arguments) == len(_core.CALL_FIELDS)
    _core.forward_host(*arguments)
    _core.check(*arguments, False)
    count = len(arguments)
    with pytest.raises(TypeError, match=f"expected {count} positional arguments, got {count - 1}"):
        _core.forward_host(*arguments[:-1])
    with pytest.raises(TypeError, match=f"expected {count + 1} positional arguments, got {count}"):
        _core.forward(*arguments)
    for name, value, exception in (
        ("num_blocks", 2**40, ValueError),
        ("num_tokens", 2**70, ValueError),
        ("hidden_size", "64", TypeError),
        ("prefix", 1.5, TypeError),
        ("eps", None, TypeError),
    ):
        wrong = list(arguments)
        wrong[_core.CALL_FIELDS.index(name)] = value
        with pytest.raises(exception):
            _core.forward_host(*wrong)


def test_a_host_only_call_on_the_device_is_unsupported_not_a_crash(make_case: Callable[..., Any]) -> None:
    if torch.cuda.is_available():
        pytest.skip("these are host pointers")
    _call, arguments = core_call(make_case)
    with pytest.raises((libattnres.UnsupportedError, RuntimeError)):
        _core.forward(*arguments, 0)


def test_plan_for_describes_a_gpu_that_is_not_there(make_case: Callable[..., Any]) -> None:
    case = make_case(num_tokens=700, hidden_size=7168)
    call = checked_call(*case.arguments, None, "wait")
    if not libattnres.permutations():
        with pytest.raises(libattnres.UnsupportedError, match="built without CUDA"):
            _core.plan_for(*call.core_args(), 9, 0, 132)
        return
    target = libattnres.probe().built_targets[0].removesuffix("a")
    gpu = (int(target[:-1]), int(target[-1]), 148)
    plan = _core.plan_for(*call.core_args(), *gpu)
    assert plan["num_sources"] == 4
    assert plan["has_output_norm"]
    assert plan["static_common_path"]
    for rows_per_stage in (1, 2, 3):
        forced = libattnres.Plan("ring", rows_per_stage=rows_per_stage, ctas_per_sm=1)
        plan = _core.plan_for(*call.core_args(forced), *gpu)
        assert (plan["kernel"], plan["rows_per_stage"], plan["ctas_per_sm"]) == ("ring", rows_per_stage, 1)
        assert plan["grid_size"] == 148
    with pytest.raises(libattnres.UnsupportedError, match="cluster_size"):
        _core.plan_for(*call.core_args(libattnres.Plan("cluster", cluster_size=5)), *gpu)
    small = checked_call(*make_case().arguments, None, "wait")
    with pytest.raises(libattnres.UnsupportedError, match="hidden_size: expected one that is compiled"):
        _core.plan_for(*small.core_args(), *gpu)
    with pytest.raises(libattnres.UnsupportedError, match="compute capability"):
        _core.plan_for(*call.core_args(), 7, 5, 72)
