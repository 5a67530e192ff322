# SPDX-License-Identifier: Apache-2.0
"""``torch.export`` and AOTInductor packages, with libattnres in Python, and without either in the process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import libattnres
import pytest
import torch
from libattnres import _ops, _two_phase_ops, reference
from permutation_table import ROOT
from programs import run_program

TORCH = Path(next(iter(torch.__path__)))
PACKAGE = Path(next(iter(libattnres.__path__)))
HAS_STABLE_ABI = (TORCH / "include" / "torch" / "csrc" / "stable" / "ops.h").exists()
HAS_TOOLS = all(shutil.which(name) is not None for name in ("cmake", "c++"))
NUM_TOKENS, NUM_ROWS = 5, 8

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_TOOLS, reason="needs cmake and a C++ compiler"),
]


class Layers(torch.nn.Module):
    """Two calls, one of which writes a row, and something between them for the compiler."""

    def __init__(self, weights: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        for name, weight in zip(("norm_weight", "qk_weight", "output_norm_weight"), weights, strict=True):
            self.register_buffer(name, weight)

    def forward(
        self, prefix: torch.Tensor, delta: torch.Tensor, blocks: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights = (self.norm_weight, self.qk_weight, self.output_norm_weight)
        first = libattnres.attn_res(prefix, delta, blocks, *weights, 3, 3)
        return first, libattnres.attn_res(prefix, first * 2, blocks, *weights, 4)


class Built:
    """A package, what it must compute, and the arguments for that."""

    def __init__(self, device: str, folder: Path) -> None:
        self.device = device
        self.hidden_size = 7168 if device == "cuda" else 64  # what runs natively, and what is quick
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(torch.bfloat16)

        H = self.hidden_size
        weights = (normal(H), normal(H) * H**-0.5, normal(H))
        self.arguments = (normal(NUM_TOKENS, H), normal(NUM_TOKENS, H), normal(NUM_TOKENS, NUM_ROWS, H))
        module = Layers(weights).to(device)
        example = tuple(argument.to(device) for argument in self.arguments)
        num_tokens = torch.export.Dim("num_tokens", min=2, max=1024)
        program = torch.export.export(module, example, dynamic_shapes=({0: num_tokens},) * 3)
        self.path = folder / f"layers_{device}.pt2"
        torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(self.path),
            inductor_configs={"aot_inductor.compile_wrapper_opt_level": "O0"},
        )
        inputs = self.inputs()
        with torch.no_grad():
            outputs = module(*inputs)
        self.expected = [tensor.cpu() for tensor in (*outputs, inputs[0], inputs[2])]

    def inputs(self) -> tuple[torch.Tensor, ...]:
        return tuple(argument.clone().to(self.device) for argument in self.arguments)

    def check(self, results: list[torch.Tensor]) -> None:
        """Outputs, prefix and bank, equal to the bit."""
        assert len(results) == len(self.expected)
        for result, expected in zip(results, self.expected, strict=True):
            assert reference.same_bits(result.cpu(), expected)


@pytest.fixture(
    scope="module", params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.sm90])]
)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    variables = pytest.MonkeyPatch()
    for name in ("LIBATTNRES_BACKEND", "LIBATTNRES_BATCH_INVARIANT"):
        variables.delenv(name, raising=False)
    yield Built(request.param, tmp_path_factory.mktemp("package"))
    variables.undo()


def cmake(source: Path, build: Path, *options: str) -> Path:
    """Configure and build; returns the build folder."""
    for command in (
        ["cmake", "-S", str(source), "-B", str(build), f"-DATTNRES_TORCH_ROOT={TORCH}", *options],
        ["cmake", "--build", str(build)],
    ):
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return build


@pytest.fixture(scope="module")
def op_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ops without Python, built against the installed package."""
    if not HAS_STABLE_ABI:
        pytest.skip("needs PyTorch >= 2.10")
    build = tmp_path_factory.mktemp("torch")
    return cmake(ROOT / "cpp" / "torch", build, f"-Dattnres_ROOT={PACKAGE}") / "libattnres_torch.so"


def run_in_python(package: Path, inputs: Path, results: Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which a loader may take down; writes outputs, prefix and bank."""
    program = f"""
import torch, libattnres
inputs = torch.load({str(inputs)!r})
outputs = torch._inductor.aoti_load_package({str(package)!r})(*inputs)
torch.save([*outputs, inputs[0], inputs[-1]], {str(results)!r})
"""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


def plain_package_dies(device: str, folder: Path) -> bool:
    """Whether a package without any op of ours takes its process down as well."""
    module = torch.nn.Linear(64, 64).to(device).eval()
    inputs = (torch.ones(NUM_TOKENS, 64, device=device),)
    package, saved = folder / "plain.pt2", folder / "plain.pt"
    with torch.no_grad():
        program = torch.export.export(module, inputs)
    torch._inductor.aoti_compile_and_package(program, package_path=str(package))
    torch.save(inputs, saved)
    return run_in_python(package, saved, folder / "plain.results").returncode < 0


def test_a_package_runs_with_python_and_without(
    built: Built, op_library: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """One test for both, so that workers of a test run do not compile a package each."""
    inputs, results = tmp_path_factory.mktemp("runs") / "inputs.pt", built.path.with_suffix(".results")
    torch.save(built.inputs(), inputs)
    process = run_in_python(built.path, inputs, results)
    if process.returncode < 0 and plain_package_dies(built.device, inputs.parent):
        pytest.skip(f"PyTorch {torch.__version__} runs no package on this device, whatever is in it")
    assert process.returncode == 0, process.stderr
    built.check(torch.load(results))

    program = cmake(ROOT / "tests" / "aot", tmp_path_factory.mktemp("runner")) / "run_package"
    assert (
        "libpython" not in subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    )
    bytes_in = b"".join(argument.view(torch.uint8).numpy().tobytes() for argument in built.arguments)
    shape = [str(size) for size in (NUM_TOKENS, NUM_ROWS, built.hidden_size)]
    result = subprocess.run(
        [program, op_library, built.path, *shape, built.device.upper()],
        input=bytes_in,
        capture_output=True,
        check=False,
        timeout=300,
        env={name: value for name, value in os.environ.items() if not name.startswith("LIBATTNRES_")},
    )
    assert result.returncode == 0, result.stderr.decode()
    flat = torch.frombuffer(bytearray(result.stdout), dtype=torch.bfloat16)
    results, start = [], 0
    for expected in built.expected:
        results.append(flat[start : start + expected.numel()].view(expected.shape))
        start += expected.numel()
    assert start == flat.numel()
    built.check(results)


def test_the_op_library_is_what_python_defines(op_library: Path) -> None:
    """The same: one worker builds it."""
    check_schemas(op_library)
    check_places_and_refusals(op_library)
    check_two_phases(op_library)
    check_second_definition(op_library)


def check_schemas(op_library: Path) -> None:
    """Names, arguments and defaults."""
    names = (*_ops.OPS, *_two_phase_ops.OPS, "_copy")
    program = f"""
import sys, torch
torch.ops.load_library({str(op_library)!r})
for name in {names!r}:
    print(getattr(torch.ops.libattnres, name).default._schema)
assert "libattnres" not in sys.modules
"""
    schemas = [str(getattr(torch.ops.libattnres, name).default._schema) for name in names]
    assert run_program(program).splitlines() == schemas


def check_places_and_refusals(op_library: Path) -> None:
    """What the ops do beside calling the C interface."""
    program = f"""
import torch
torch.ops.load_library({str(op_library)!r})
ops = torch.ops.libattnres
T, R, H = 3, 4, 16
generator = torch.Generator().manual_seed(1)
normal = lambda *shape: torch.randn(*shape, generator=generator).to(torch.bfloat16)
weights = (normal(H), normal(H), normal(H))
memory, delta = normal(T, R + 1, H), normal(T, H)
other = memory.clone()
# The bank and the prefix as views of one memory, and the same as places in it.
expected = ops.attn_res_(memory[:, R], delta, memory[:, :R], *weights, 2, 2)
place = lambda view: [*view.shape, *view.stride(), view.storage_offset()]
output = ops.attn_res_(other, delta, other, *weights, 2, 2, prefix_place=place(other[:, R]),
                       blocks_place=place(other[:, :R]))
assert torch.equal(output, expected) and torch.equal(memory, other)
# Padded rows stay as they are, and what is new is dense.
padded = normal(T, 2 * H)
output, prefix, bank = ops.attn_res_functional(padded[:, :H], delta, memory[:, :R], *weights, 2)
assert prefix.is_contiguous() and bank.is_contiguous()
assert torch.equal(prefix, padded[:, :H] + delta) and torch.equal(bank, memory[:, :R])
out = torch.zeros_like(delta)
assert ops.attn_res_out_(prefix.clone(), None, bank, *weights, 2, -1, out) is None
assert torch.equal(out, ops.attn_res(prefix, bank, *weights, 2)) and torch.equal(out, output)
# A compiler may hand over one memory twice where there was a copy.
twice = prefix.clone()
assert torch.equal(ops.attn_res_add_(twice, twice, bank, *weights, 2),
                   ops.attn_res_add_(prefix.clone(), prefix.clone(), bank, *weights, 2))
assert torch.equal(twice, prefix * 2)

def refused(text, *arguments):
    before = prefix.clone(), bank.clone()
    try:
        ops.attn_res_(*arguments)
    except RuntimeError as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"not refused: {{text}}")
    assert torch.equal(prefix, before[0]) and torch.equal(bank, before[1])

refused("num_blocks: expected 0..4, got 5", prefix, delta, bank, *weights, 5)
refused("delta: expected the dtype of prefix", prefix, delta.float(), bank, *weights, 2)
refused("blocks: expected 3 dimensions", prefix, delta, bank[:, 0], *weights, 2)
refused("qk_weight: expected a last dimension of 16", prefix, delta, bank, weights[0], weights[1][:8],
        weights[2], 2)
refused("delta: expected 3 rows", prefix, delta[:2], bank, *weights, 2)
refused("pdl: expected one of", prefix, delta, bank, *weights, 2, -1, 1e-5, 1e-5, None, "now")
refused("backend: expected 'auto' or 'host'", prefix, delta, bank, *weights, 2, -1, 1e-5, 1e-5, "torch")
refused("prefix: expected bfloat16", prefix.double(), delta.double(), bank.double(),
        *(weight.double() for weight in weights), 2)
print("fine")
"""
    assert run_program(program, LIBATTNRES_BACKEND="").strip() == "fine"


def check_two_phases(op_library: Path) -> None:
    """The bits of the ops that Python defines, places and refusals."""
    program = """
import sys, torch
if len(sys.argv) > 1:
    torch.ops.load_library(sys.argv[1])
else:
    import libattnres
    libattnres.attn_res
ops = torch.ops.libattnres
T, R, H, S = 3, 4, 16, 2
generator = torch.Generator().manual_seed(1)
normal = lambda *shape: torch.randn(*shape, generator=generator).to(torch.bfloat16)
blocks, norm, qk, weight = normal(T, R, H), normal(S, H), normal(S, H), normal(H)
prefix, delta = normal(T, H), normal(T, H)
results = []
for dtype in (None, torch.float32):
    bank, lse = ops.attn_res_bank(blocks, 2, norm, qk, bank_dtype=dtype)
    memory, logs = torch.zeros(S + 1, T, H, dtype=bank.dtype), torch.zeros(S + 1, T)
    place = lambda view: [*view.shape, *view.stride(), view.storage_offset()]
    ops.attn_res_bank_out_(blocks, 2, norm, qk, memory, logs, bank_place=place(memory[1:]),
                           lse_place=place(logs[1:]))
    assert torch.equal(memory[1:], bank) and torch.equal(logs[1:], lse)
    assert not memory[0].any() and not logs[0].any()
    site = (bank[1], lse[1], norm[1], qk[1])
    results += [bank, lse, ops.attn_res_merge(prefix, *site, None)]
    own, rows = prefix.clone(), blocks.clone()
    results += [ops.attn_res_merge_add_(own, delta, *site, weight), own.clone()]
    results += [ops.attn_res_merge_write_(own, *site, weight, rows, 3), rows.clone()]
    both = torch.cat([own[:, None], rows], dim=1)
    expected = ops.attn_res_merge_(own, delta, *site, weight, rows, 0)
    got = ops.attn_res_merge_(both, delta, *site, weight, both, 0, prefix_place=place(both[:, 0]),
                              blocks_place=place(both[:, 1:]))
    assert torch.equal(got, expected) and torch.equal(both[:, 0], own) and torch.equal(both[:, 1:], rows)
    out = torch.zeros(T, H, dtype=torch.bfloat16)
    ops.attn_res_merge_out_(own, own, *site, weight, None, -1, out)
    results += [expected, own, rows, out]

def refused(text, op, *arguments):
    before = prefix.clone(), blocks.clone()
    try:
        op(*arguments)
    except (RuntimeError, ValueError) as error:
        assert text in str(error), error
    else:
        raise AssertionError("not refused: " + text)
    assert torch.equal(prefix, before[0]) and torch.equal(blocks, before[1])

refused("num_blocks: expected 1..4, got 0", ops.attn_res_bank, blocks, 0, norm, qk)
refused("bank_dtype: expected ", ops.attn_res_bank, blocks, 2, norm, qk, 1e-5, torch.float16)
refused("qk_weights: expected ", ops.attn_res_bank, blocks, 2, norm, qk[:1])
refused("lse: expected ", ops.attn_res_merge, prefix, bank[0], lse[0].half(), norm[0], qk[0], None)
refused("bank: expected ", ops.attn_res_merge, prefix, bank[0][:, :8], lse[0], norm[0], qk[0], None)
refused("block_write_idx: expected -1..3, got 4", ops.attn_res_merge_, prefix, delta, bank[0], lse[0],
        norm[0], qk[0], None, blocks, 4)
print([result.view(torch.uint8).sum(dtype=torch.int64).item() for result in results])
print([result.double().sum().item() for result in results])
"""
    command = [sys.executable, "-c", program]
    outputs = []
    for arguments in ([], [str(op_library)]):
        result = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        outputs.append(result.stdout)
    assert outputs[0] == outputs[1]
    assert outputs[0].count("[") == 2


def check_second_definition(op_library: Path) -> None:
    """PyTorch's own error, from either side."""
    program = f"""
import torch
torch.ops.load_library({str(op_library)!r})
try:
    import libattnres
    libattnres.attn_res
except RuntimeError as error:
    print(error)
"""
    assert "libattnres::attn_res" in run_program(program)


def test_it_is_said_which_pytorch_the_op_library_needs(tmp_path: Path) -> None:
    result = subprocess.run(
        ["cmake", "-S", ROOT / "cpp" / "torch", "-B", tmp_path, f"-Dattnres_ROOT={PACKAGE}",
         f"-DATTNRES_TORCH_ROOT={sys.prefix}/nowhere"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode != 0
    assert "expected the folder of PyTorch >= 2.10" in " ".join(result.stderr.split())
