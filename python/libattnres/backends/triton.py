# SPDX-License-Identifier: Apache-2.0
"""Triton backend: any H, any row strides, bfloat16, float16 and float32, on GPUs from compute capability 8.0.

Under ``TRITON_INTERPRET=1`` it runs on CPU tensors, slowly. Triton is imported on first use.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from libattnres._core import UnsupportedError
from libattnres._two_phase_call import BankCall, MergeCall

__all__ = [
    "Policy",
    "bank",
    "compile_cubin",
    "cubin_variants",
    "forward",
    "merge",
    "policy",
    "toolchain_reason",
    "unsupported",
    "unsupported_phase",
]

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

# The kernels' PDL argument on a GPU that has dependent launches.
PDL_ARGUMENT = {"off": 0, "wait": 1, "early": 2}

# Longer rows do not fit in the registers of one program; they are walked in tiles.
MAX_BLOCK = 16384
TILE = 4096
# Power of two above the most bank rows a call can read.
TILED_SOURCES = 16


@dataclasses.dataclass(frozen=True)
class Policy:
    """How one program of the row kernel is built."""

    num_warps: int
    stages: int
    """One more than the bank rows in flight, each of which takes a padded row of shared memory."""
    own_first: bool
    """Prefix and delta are requested before the bank rows."""
    max_registers: int | None


# The figures below follow from what an H200 needs and what the compiled kernels use; none is a measurement.
# Padded bytes of bank rows that a program keeps in flight. With two programs per multiprocessor, 64 KiB
# each is three times what covers the memory latency (32 B/ns x 1.2 us).
THROUGHPUT_BYTES = 64 << 10
# With few tokens a program has its multiprocessor to itself: 7 rows of H = 7168 at once.
LATENCY_BYTES = 112 << 10
# Two programs of 8 warps share the 64 Ki registers of a multiprocessor; the kernels need 117 to 128.
THROUGHPUT_REGISTERS = 128
# Elements of a row per warp: 32 per thread, so that a row, query and mix fit in those registers.
ELEMENTS_PER_WARP = 1024
# Shared memory left for the exchange between warps and for what the driver reserves.
RESERVED_BYTES = 4 << 10


def policy(num_tokens: int | None, block: int, element_size: int, num_sms: int, shared_memory: int) -> Policy:
    """Choose the build for rows of ``block`` elements (a power of two, ``H`` padded).

    Two builds at most per variant and device, so that token counts and indices do not compile anew. Both do
    the same arithmetic in the same order, which depends on ``block`` alone; which of a sum's two products
    the compiler fuses is nevertheless its own choice in each.
    """
    # One warp at least; never so many that two hold the same column (see the kernels' file).
    num_warps = max(1, min(16, block // ELEMENTS_PER_WARP))
    # With more tokens than half the multiprocessors, dependent launches must share one to overlap.
    latency = num_tokens is not None and 2 * num_tokens <= num_sms
    wanted_bytes = LATENCY_BYTES if latency else THROUGHPUT_BYTES
    rows = min(wanted_bytes, shared_memory - RESERVED_BYTES) // (block * element_size)
    stages = 1 + max(1, min(7 if latency else 4, rows))
    return Policy(num_warps, stages, latency, None if latency else THROUGHPUT_REGISTERS)


@functools.cache
def toolchain_reason() -> str | None:
    """Why Triton cannot compile in this process, or None. Compiles nothing; kept for the process."""
    try:
        import triton
    except Exception as error:  # a broken installation raises more than ImportError
        return f"triton cannot be imported ({type(error).__name__}: {error})"
    try:
        from libattnres.backends import _triton_kernels as kernels
    except Exception as error:
        return f"triton {triton.__version__} cannot define the kernels ({type(error).__name__}: {error})"
    if kernels.INTERPRETED:
        return None
    if triton.knobs.build.impl is None:
        compiler = os.environ.get("CC")
        if compiler is None:
            if shutil.which("gcc") is None and shutil.which("clang") is None:
                return "triton needs a C compiler, and neither gcc nor clang is on PATH and CC is not set"
        elif shutil.which(compiler) is None:
            return f"triton needs a C compiler, and CC={compiler} is not an executable"
        scheme = sysconfig.get_default_scheme()
        scheme = "posix_prefix" if scheme == "posix_local" else scheme
        header = os.path.join(sysconfig.get_paths(scheme=scheme)["include"], "Python.h")
        if not os.path.exists(header):
            return f"triton needs Python's headers, and {header} does not exist"
    directory = triton.knobs.cache.dir
    try:
        os.makedirs(directory, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        return (
            f"triton needs a writable cache, and {directory} is not ({error.strerror}): set TRITON_CACHE_DIR"
        )
    return None


@functools.cache
def _device_reason(device: int) -> str | None:
    if torch.version.cuda is None:
        return "triton needs a CUDA build of PyTorch"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return (
            f"triton needs compute capability 8.0 or newer, cuda:{device} has {capability[0]}.{capability[1]}"
        )
    return None


def unsupported(prefix: torch.Tensor, blocks: torch.Tensor, num_blocks: int) -> str | None:
    """Why this backend cannot serve such a call here, or None."""
    del blocks, num_blocks
    return _unsupported_rows("prefix", prefix)


def unsupported_phase(call: BankCall | MergeCall) -> str | None:
    """Why this backend cannot serve one of two phases, or None."""
    reason = _unsupported_rows(call.ARGUMENTS[0], call.rows)
    hidden_size = call.rows.shape[-1]
    if reason is None and hidden_size > MAX_BLOCK:
        reason = f"triton computes two phases for H up to {MAX_BLOCK}, got H={hidden_size}"
    return reason


def _unsupported_rows(name: str, rows: torch.Tensor) -> str | None:
    if rows.dtype not in DTYPES:
        return f"triton computes bfloat16, float16 and float32, {name} is {rows.dtype}"
    interpreted = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0", "false", "off")
    if rows.device.type != "cuda" and not interpreted:
        return f"triton needs CUDA tensors, {name} is on {rows.device}"
    reason = toolchain_reason()
    if reason is not None:
        return reason
    if rows.device.type == "cuda":
        return _device_reason(rows.device.index)
    from libattnres.backends import _triton_kernels as kernels

    if not kernels.INTERPRETED:
        return "triton needs CUDA tensors; TRITON_INTERPRET was set after its kernels were imported"
    return None


@functools.cache
def _device_limits(device: int) -> tuple[int, int, bool]:
    """Multiprocessors, shared memory of one program, and whether dependent launches exist there."""
    from libattnres.backends import _triton_kernels as kernels

    properties = torch.cuda.get_device_properties(device)
    dependent_launch = properties.major >= 9 and kernels.HAS_GRID_DEPENDENCY_CONTROL
    # Not in PyTorch's type stubs.
    shared_memory: int = getattr(
        properties, "shared_memory_per_block_optin", properties.shared_memory_per_block
    )
    return properties.multi_processor_count, shared_memory, dependent_launch


def forward(
    prefix: torch.Tensor,
    delta: torch.Tensor | None,
    blocks: torch.Tensor,
    norm_weight: torch.Tensor,
    qk_weight: torch.Tensor,
    output_norm_weight: torch.Tensor | None,
    num_blocks: int,
    block_write_idx: int,
    eps: float,
    output_norm_eps: float,
    out: torch.Tensor,
    pdl: str,
    batch_invariant: bool = False,
) -> None:
    """Run the operator on validated arguments, on the current stream of their device.

    Writes ``out``, ``prefix`` with a delta, and a bank row. ``pdl`` is heeded from compute capability 9.0
    on; rows longer than 16384 elements treat ``"early"`` as ``"wait"``. With ``batch_invariant`` any number
    of tokens runs on one build; arguments that would make it another one are refused.
    """
    num_tokens, hidden_size = prefix.shape
    if num_tokens == 0:
        return
    num_sms, shared_memory, mode = _limits(prefix.device, pdl)
    prefixes_per_row = num_tokens // blocks.shape[0]
    strides = (
        prefix.stride(0),
        0 if delta is None else delta.stride(0),
        blocks.stride(0),
        blocks.stride(1),
        out.stride(0),
    )
    if batch_invariant:
        strides = _strides_of_one_build(
            prefix, delta, blocks, norm_weight, qk_weight, output_norm_weight, out
        )
    arguments = (
        prefix,
        prefix if delta is None else delta,
        blocks,
        norm_weight,
        qk_weight,
        norm_weight if output_norm_weight is None else output_norm_weight,
        out,
        *strides,
        num_blocks,
        block_write_idx,
        prefixes_per_row,
        float(eps),
        float(output_norm_eps),
    )
    kernel, constants, options = _build(
        None if batch_invariant else num_tokens,
        hidden_size,
        prefix.element_size(),
        delta is not None,
        output_norm_weight is not None,
        prefixes_per_row > 1,
        mode,
        num_sms,
        shared_memory,
    )
    _launch(kernel, num_tokens, arguments, constants, options, prefix.device)


def _limits(device: torch.device, pdl: str) -> tuple[int, int, int]:
    """Multiprocessors, shared memory of one program, and the kernels' PDL argument."""
    from libattnres.backends import _triton_kernels as kernels

    if kernels.INTERPRETED:
        return 1, LATENCY_BYTES + RESERVED_BYTES, 0
    num_sms, shared_memory, dependent_launch = _device_limits(device.index)
    return num_sms, shared_memory, PDL_ARGUMENT[pdl] if dependent_launch else 0


def _launch(
    kernel: Any,
    programs: int,
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
    options: dict[str, Any],
    device: torch.device,
) -> None:
    from libattnres.backends import _triton_kernels as kernels

    if kernels.INTERPRETED:
        kernel[(programs,)](*arguments, **constants)
    elif device.index == torch.cuda.current_device():
        kernel[(programs,)](*arguments, **constants, **options)
    else:
        with torch.cuda.device(device):
            kernel[(programs,)](*arguments, **constants, **options)


def bank(call: BankCall) -> None:
    """The bank's share of several calls, on the current stream of their device. The bits of a token depend on
    neither the number of tokens nor its place: there is one build for each layout.
    """
    blocks = call.blocks
    num_tokens, _, hidden_size = blocks.shape
    if num_tokens == 0:
        return
    num_sites = call.norm_weights.shape[0]
    num_sms, shared_memory, mode = _limits(blocks.device, call.pdl)
    stride = _stride
    if call.batch_invariant:
        _check_one_build(
            hidden_size,
            {
                "blocks": blocks,
                "norm_weights": call.norm_weights,
                "qk_weights": call.qk_weights,
                "bank": call.bank,
            },
        )
        stride = _stride_of_one_build
    arguments = (
        blocks,
        call.norm_weights,
        call.qk_weights,
        call.bank,
        call.lse,
        stride("blocks", blocks, 0),
        stride("blocks", blocks, 1),
        stride("norm_weights", call.norm_weights, 0),
        stride("qk_weights", call.qk_weights, 0),
        stride("bank", call.bank, 0),
        stride("bank", call.bank, 1),
        call.lse.stride(0),
        call.num_blocks,
        num_sites,
        float(call.eps),
    )
    kernel, constants, options = _bank_build(hidden_size, blocks.element_size(), mode, num_sms, shared_memory)
    _launch(kernel, num_tokens * num_sites, arguments, constants, options, blocks.device)


def merge(call: MergeCall) -> None:
    """One call from what :func:`bank` left, on the current stream of its device."""
    prefix, delta, blocks, out = call.prefix, call.delta, call.blocks, call.out
    num_tokens, hidden_size = prefix.shape
    if num_tokens == 0:
        return
    num_sms, shared_memory, mode = _limits(prefix.device, call.pdl)
    stride = _stride
    if call.batch_invariant:
        _check_one_build(
            hidden_size,
            {
                "prefix": prefix,
                "delta": delta,
                "bank": call.bank,
                "norm_weight": call.norm_weight,
                "qk_weight": call.qk_weight,
                "output_norm_weight": call.output_norm_weight,
                "blocks": blocks,
                "out": out,
            },
        )
        stride = _stride_of_one_build
    prefixes_per_row = num_tokens // call.bank.shape[0]
    arguments = (
        prefix,
        prefix if delta is None else delta,
        call.bank,
        call.lse,
        call.norm_weight,
        call.qk_weight,
        call.norm_weight if call.output_norm_weight is None else call.output_norm_weight,
        prefix if blocks is None else blocks,
        out,
        stride("prefix", prefix, 0),
        stride("delta", delta, 0),
        stride("bank", call.bank, 0),
        stride("blocks", blocks, 0),
        stride("blocks", blocks, 1),
        stride("out", out, 0),
        call.block_write_idx,
        prefixes_per_row,
        float(call.eps),
        float(call.output_norm_eps),
    )
    kernel, constants, options = _merge_build(
        None if call.batch_invariant else num_tokens,
        hidden_size,
        prefix.element_size(),
        delta is not None,
        call.output_norm_weight is not None,
        prefixes_per_row > 1,
        mode,
        num_sms,
        shared_memory,
    )
    _launch(kernel, num_tokens, arguments, constants, options, prefix.device)


def _strides_of_one_build(
    prefix: torch.Tensor,
    delta: torch.Tensor | None,
    blocks: torch.Tensor,
    norm_weight: torch.Tensor,
    qk_weight: torch.Tensor,
    output_norm_weight: torch.Tensor | None,
    out: torch.Tensor,
) -> tuple[int, int, int, int, int]:
    """Strides for a batch-invariant call, or an error."""
    _check_one_build(
        prefix.shape[1],
        {
            "prefix": prefix,
            "delta": delta,
            "blocks": blocks,
            "norm_weight": norm_weight,
            "qk_weight": qk_weight,
            "output_norm_weight": output_norm_weight,
            "out": out,
        },
    )
    return (
        _stride_of_one_build("prefix", prefix, 0),
        _stride_of_one_build("delta", delta, 0),
        _stride_of_one_build("blocks", blocks, 0),
        _stride_of_one_build("blocks", blocks, 1),
        _stride_of_one_build("out", out, 0),
    )


# Triton compiles anew for what is no multiple of 16 and may then spread a row differently over the threads,
# which changes the order of its sums. So for a batch-invariant call everything must be one, whatever the
# number of tokens; a stride that means nothing, because there is one token, is made one.


def _check_one_build(hidden_size: int, tensors: dict[str, torch.Tensor | None]) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.data_ptr() % 16 != 0:
            raise UnsupportedError(
                f"triton is batch-invariant for bases at multiples of 16 bytes, got another {name}"
            )
    if hidden_size % 16 != 0:
        raise UnsupportedError(
            f"triton is batch-invariant for H that is a multiple of 16, got H={hidden_size}"
        )


def _stride_of_one_build(name: str, tensor: torch.Tensor | None, dimension: int) -> int:
    if tensor is None:
        return 0
    if tensor.shape[dimension] <= 1:
        return tensor.shape[-1]
    if tensor.stride(dimension) % 16 != 0:
        raise UnsupportedError(
            f"triton is batch-invariant for strides that are multiples of 16 elements, "
            f"got {tensor.stride(dimension)} in {name}"
        )
    return tensor.stride(dimension)


def _stride(name: str, tensor: torch.Tensor | None, dimension: int) -> int:
    del name
    return 0 if tensor is None else tensor.stride(dimension)


def _build(
    num_tokens: int | None,
    hidden_size: int,
    element_size: int,
    has_delta: bool,
    has_output_norm: bool,
    shares_rows: bool,
    pdl: int,
    num_sms: int,
    shared_memory: int,
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The kernel of a call, its compile-time arguments and its compiler options; without ``num_tokens``
    those of a call with many.
    """
    from libattnres.backends import _triton_kernels as kernels

    constants: dict[str, Any] = {
        "HIDDEN_SIZE": hidden_size,
        "HAS_DELTA": has_delta,
        "HAS_OUTPUT_NORM": has_output_norm,
        "PDL": pdl,
        "CONVERT_BY_HAND": kernels.INTERPRETED,
    }
    options: dict[str, Any] = {}
    if pdl:
        options["launch_pdl"] = True
    block = 1 << (hidden_size - 1).bit_length()
    if block > MAX_BLOCK:
        options["num_warps"] = 8
        constants |= {"TILE": TILE, "SOURCES": TILED_SOURCES}
        return kernels.forward_tiled_kernel, constants, options
    chosen = policy(num_tokens, block, element_size, num_sms, shared_memory)
    options["num_warps"] = chosen.num_warps
    if chosen.max_registers is not None:
        options["maxnreg"] = chosen.max_registers
    constants |= {
        "BLOCK": block,
        "SHARES_ROWS": shares_rows,
        "OWN_FIRST": chosen.own_first,
        "STAGES": chosen.stages,
    }
    return kernels.forward_kernel, constants, options


def _row_build(
    num_tokens: int | None, hidden_size: int, element_size: int, pdl: int, num_sms: int, shared_memory: int
) -> tuple[Policy, dict[str, Any], dict[str, Any]]:
    """Policy, compile-time arguments and compiler options that the kernels of both phases share."""
    from libattnres.backends import _triton_kernels as kernels

    block = 1 << (hidden_size - 1).bit_length()
    chosen = policy(num_tokens, block, element_size, num_sms, shared_memory)
    constants: dict[str, Any] = {
        "HIDDEN_SIZE": hidden_size,
        "BLOCK": block,
        "PDL": pdl,
        "CONVERT_BY_HAND": kernels.INTERPRETED,
    }
    options: dict[str, Any] = {"num_warps": chosen.num_warps}
    if pdl:
        options["launch_pdl"] = True
    if chosen.max_registers is not None:
        options["maxnreg"] = chosen.max_registers
    return chosen, constants, options


def _bank_build(
    hidden_size: int, element_size: int, pdl: int, num_sms: int, shared_memory: int
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The kernel of a bank pass, which has many programs however few its tokens are."""
    from libattnres.backends import _triton_kernels as kernels

    chosen, constants, options = _row_build(None, hidden_size, element_size, pdl, num_sms, shared_memory)
    return kernels.bank_kernel, constants | {"STAGES": chosen.stages}, options


def _merge_build(
    num_tokens: int | None,
    hidden_size: int,
    element_size: int,
    has_delta: bool,
    has_output_norm: bool,
    shares_rows: bool,
    pdl: int,
    num_sms: int,
    shared_memory: int,
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The kernel of a merge; without ``num_tokens`` that of a call with many."""
    from libattnres.backends import _triton_kernels as kernels

    _, constants, options = _row_build(num_tokens, hidden_size, element_size, pdl, num_sms, shared_memory)
    constants |= {
        "HAS_DELTA": has_delta,
        "HAS_OUTPUT_NORM": has_output_norm,
        "SHARES_ROWS": shares_rows,
    }
    return kernels.merge_kernel, constants, options


@dataclasses.dataclass(frozen=True)
class CubinVariant:
    """A call whose kernel :func:`compile_cubin` builds."""

    dtype: torch.dtype = torch.bfloat16
    hidden_size: int = 7168
    num_tokens: int = 4096
    has_delta: bool = True
    has_output_norm: bool = True
    shares_rows: bool = False
    pdl: str = "wait"
    phase: str | None = None
    """One of two phases, ``"bank"`` or ``"merge"``."""
    float32_bank: bool = False
    aligned: bool = True
    """Whether bases are multiples of 16 bytes and row strides of 16 elements."""


def cubin_variants() -> Iterator[CubinVariant]:
    """Each kernel of the model's walk, for few and for many tokens, then the other paths once."""
    for num_tokens in (1, 4096):
        for pdl in ("off", "wait", "early"):
            yield CubinVariant(num_tokens=num_tokens, pdl=pdl)
        yield CubinVariant(num_tokens=num_tokens, has_delta=False)
        yield CubinVariant(num_tokens=num_tokens, has_output_norm=False)
    yield CubinVariant(shares_rows=True)
    yield CubinVariant(aligned=False)
    yield CubinVariant(dtype=torch.float16)
    yield CubinVariant(dtype=torch.float32)
    yield CubinVariant(hidden_size=96)
    yield CubinVariant(hidden_size=20000)
    for pdl in ("off", "wait", "early"):
        yield CubinVariant(phase="bank", pdl=pdl)
        yield CubinVariant(phase="merge", pdl=pdl)
    yield CubinVariant(phase="merge", num_tokens=1)
    for phase in ("bank", "merge"):
        yield CubinVariant(phase=phase, float32_bank=True)
        yield CubinVariant(phase=phase, hidden_size=96, aligned=False)
        yield CubinVariant(phase=phase, dtype=torch.float32)


def compile_cubin(compute_capability: int, variant: CubinVariant) -> Any:
    """Compile one kernel for a GPU that need not be there, e.g. 90, 100 or 103.

    Returns Triton's compiled kernel: ``asm["cubin"]`` and ``asm["ptx"]`` hold the code.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    element_size = torch.empty(0, dtype=variant.dtype).element_size()
    mode = PDL_ARGUMENT[variant.pdl] if compute_capability >= 90 else 0
    gpu = (mode, 132, 227 << 10)
    kinds = (variant.has_delta, variant.has_output_norm, variant.shares_rows)
    if variant.phase == "bank":
        kernel, constants, options = _bank_build(variant.hidden_size, element_size, *gpu)
    else:
        build = _build if variant.phase is None else _merge_build
        kernel, constants, options = build(
            variant.num_tokens, variant.hidden_size, element_size, *kinds, *gpu
        )
    signature = {}
    attributes = {}
    for position, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name == "lse_ptr" or (name == "bank_ptr" and variant.float32_bank):
            signature[name] = "*fp32"
        elif name.endswith("_ptr"):
            signature[name] = f"*{DTYPES[variant.dtype]}"
        elif name in ("eps", "output_norm_eps"):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
        if name.endswith(("_ptr", "_stride")) and not name.startswith("lse") and variant.aligned:
            attributes[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", compute_capability, 32), options=options)
