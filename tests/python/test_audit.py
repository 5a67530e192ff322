# SPDX-License-Identifier: Apache-2.0
"""The audit of the machine code: every compiled kernel passes it, and code that breaks a rule does not."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import libattnres
import pytest
from libattnres import cli
from libattnres.audit import rules as audit
from libattnres.audit import sass
from libattnres.audit.kernel_flow import Scenario, follow
from permutation_table import ROOT, everything

LIBRARY = Path(next(iter(libattnres.__path__))) / "lib" / "libattnres.so"
BUILT_TARGETS = libattnres.probe().built_targets

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")


@pytest.mark.slow
@pytest.mark.skipif(not BUILT_TARGETS, reason="the library was built without kernels")
def test_every_permutation_keeps_what_it_promises_on_every_target() -> None:
    audits = audit.audit_binary(LIBRARY)
    found = {(one.kernel.name, one.kernel.arguments, one.target) for one in audits}
    wanted = {
        (instance.kernel, instance.arguments, target) for instance in everything() for target in BUILT_TARGETS
    }
    assert found == wanted
    assert [f"{one.kernel} {one.target}: {problem}" for one in audits for problem in one.problems] == []
    for one in audits:
        if not one.kernel.is_floor:
            assert one.warp_instructions_per_token > 0
            assert min(one.phases.values()) > 0


def fields(struct: str) -> list[tuple[str, str]]:
    """Types and names of the fields of a struct of parameters, those that it inherits first."""
    for header in ("instances.hpp", "two_phase.hpp"):
        text = (ROOT / "cuda" / header).read_text()
        found = re.search(rf"struct {struct}(?: : (\w+))? \{{(.*?)\}};", text, re.DOTALL)
        if found is not None:
            inherited = fields(found[1]) if found[1] else []
            return inherited + re.findall(r"^\s*(.+?)\s(\w+);", found[2], re.MULTILINE)
    raise AssertionError(f"no {struct}")


@pytest.mark.parametrize("struct", audit.PARAMETERS)
def test_parameters_are_those_of_the_kernels(struct: str) -> None:
    declared = fields(struct)
    sizes = {"float": 4, "int32_t": 4, "int64_t": 8}
    assert list(audit.PARAMETERS[struct]) == [name for _, name in declared]
    end = 0
    for kind, name in declared:
        parameter = audit.PARAMETERS[struct][name]
        assert parameter.size == sizes.get(kind, 8), name
        assert parameter.is_pointer == kind.endswith("*"), name
        assert parameter.offset % parameter.size == 0, name
        assert 0 <= parameter.offset - end < parameter.size, name
        end = parameter.offset + parameter.size


def test_shape_of_the_bank_kernel_is_that_of_its_source() -> None:
    header = (ROOT / "cuda" / "two_phase.hpp").read_text()
    constants = {name: int(value) for name, value in re.findall(r"constexpr int (\w+) = (\d+);", header)}
    assert constants == {
        "kBankClusterSize": audit.BANK_CLUSTER_SIZE,
        "kBankSitesPerPart": audit.BANK_SITES_PER_PART,
        "kBankEntriesPerGroup": audit.BANK_ENTRIES_PER_GROUP,
    }


# --- machine code that breaks a rule -------------------------------------------------------------------

RING = "template struct attnres::RingInstance<7168, 3, 1, 1, {}>;"
CLUSTER = "template struct attnres::ClusterInstance<7168, 3, 4, {}>;"
MERGE_RING = "template struct attnres::MergeRingInstance<7168, 1, false, {}>;"
MERGE_CLUSTER = "template struct attnres::MergeClusterInstance<7168, 7, true, {}>;"
BANK = "template struct attnres::BankInstance<7168, {}>;"


@dataclass(frozen=True)
class Break:
    """A change of the kernels' source, and what the audit must say of it."""

    name: str
    instance: str
    flags: str
    """HAS_OUTPUT_NORM, STATIC_COMMON_PATH; of the bank kernel FLOAT_BANK."""
    file: str
    pattern: str
    replacement: str
    says: str
    target: str = "90a"


BREAKS = [
    Break(
        "no wait at all", RING, "true, false", "device/ptx.cuh",
        r'asm volatile\("griddepcontrol\.wait;" ::: "memory"\);', "",
        "there is no griddepcontrol.wait",
    ),
    Break(
        "bank rows before the wait in wait mode", RING, "true, true", "forward_ring.cuh",
        r"\|\| !params\.early\b", "",
        "blocks is loaded before griddepcontrol.wait",
    ),
    Break(
        "prefix before the wait", CLUSTER, "true, true", "forward_cluster.cuh",
        r"(if \(early\) ptx::griddepcontrol_wait\(\);)\s*(thread\.load_prefix\(\);)", r"\2 \1",
        "prefix is loaded before griddepcontrol.wait",
    ),
    Break(
        "trigger before the bank row is stored", RING, "true, false", "forward_ring.cuh",
        r"if \([^\n]*block_write_idx < 0\)(?=\s*\{?\s*ptx::griddepcontrol_launch)", "",
        "dependents are released before the bank row is stored",
    ),
    Break(
        "trigger before the last load", CLUSTER, "true, true", "forward_cluster.cuh",
        r"(thread\.load_prefix\(\);)\s*(thread\.release_dependents\(\);)", r"\2 \1",
        "an activation is loaded after dependents are released",
    ),
    Break(
        "trigger before the other threads have loaded", CLUSTER, "true, true", "forward_cluster.cuh",
        r"__syncthreads\(\);(?=\s*if \(threadIdx\.x == 0\) ptx::griddepcontrol_launch)", "",
        "dependents are released before other threads have loaded",
    ),
    Break(
        "no trigger", RING, "true, true", "device/ptx.cuh",
        r'asm volatile\("griddepcontrol\.launch_dependents;" ::: "memory"\);', "",
        "dependents are never released",
    ),
    Break(
        "loads of 4 bytes", CLUSTER, "true, true", "device/ptx.cuh",
        r'asm volatile\("ld\.global\.v4\.u32 \{%0, %1, %2, %3\}, \[%4\];"',
        'asm volatile("ld.global.u32 %0, [%4]; ld.global.u32 %1, [%4+4];'
        ' ld.global.u32 %2, [%4+8]; ld.global.u32 %3, [%4+12];"',
        "global access that is not of 16 bytes: LDG",
    ),
    Break(
        "output norm where there is none", CLUSTER, "false, false", "forward_cluster.cuh",
        r"if constexpr \(T::kHasOutputNorm\)(?=\s*\{\s*float square)",
        "if (params_.output_norm_weight != nullptr)",
        "output_norm_weight is read without HAS_OUTPUT_NORM",
    ),
    Break(
        "common path that tests delta", CLUSTER, "true, true", "forward_cluster.cuh",
        r"return T::kStaticCommonPath \|\| params_\.delta != nullptr;", "return params_.delta != nullptr;",
        "the static common path tests delta",
    ),
    Break(
        "common path that may write the bank", CLUSTER, "true, true", "forward_cluster.cuh",
        r"return !T::kStaticCommonPath && params_\.block_write_idx >= 0;",
        "return params_.block_write_idx >= 0;",
        "the static common path reads block_write_idx",
    ),
    Break(
        "too few registers", RING, "true, true", "ring_policy.cuh",
        r"kMaxCtasPerSm = [^;]+;", "kMaxCtasPerSm = 4;",
        "local memory: ",
    ),
    Break(
        "a loop that computes within the loop over entries", RING, "true, true", "forward_ring.cuh",
        r"#pragma unroll\n(?=\s*for \(int i = 0; i < T::kPairs; \+\+i\) squares = fma2)",
        "#pragma unroll 1\n",
        "the loop over chunks is not unrolled",
    ),
    Break(
        "a cluster kernel with a loop", CLUSTER, "true, true", "forward_cluster.cuh",
        r"#pragma unroll\n(?=\s*for \(int i = 0; i < 4; \+\+i\) \{\s*float2 value = mul2)",
        "#pragma unroll 1\n",
        "the cluster kernel computes in a loop",
    ),
    Break(
        "scalar arithmetic on Blackwell", CLUSTER, "true, true", "device/bf16.cuh",
        r"__CUDA_ARCH__ >= 1000", "__CUDA_ARCH__ >= 9999",
        "packed multiplications or FMAs, expected at least",
        "100a",
    ),
    Break(
        "a merge's bank row before the wait in wait mode", MERGE_RING, "true, true", "forward_ring.cuh",
        r"\|\| !params\.early\b", "",
        "bank is loaded before griddepcontrol.wait",
    ),
    Break(
        "a merge's lse before its bank row has landed", MERGE_RING, "true, true", "forward_ring.cuh",
        r"(take_mixed\(int32_t entry\) \{)(.*?)(\n    max_ = [^;]*;)", r"\1\3\2",
        "lse is loaded before griddepcontrol.wait",
    ),
    Break(
        "a merge that loads its bank row before the wait in wait mode", MERGE_CLUSTER, "true, true",
        "merge_cluster.cuh",
        r"(if \(!early\) ptx::griddepcontrol_wait\(\);)\s*(thread\.load_bank\(\);)", r"\2 \1",
        "lse is loaded before griddepcontrol.wait",
    ),
    Break(
        "a merge that stores another row", MERGE_CLUSTER, "true, true", "forward_cluster.cuh",
        r"(    ptx::store_global\(\s*static_cast<__nv_bfloat16\*>\()(params_\.output)(\)[^;]*;)",
        r"\1\2\3\n\1params_.prefix\3",
        "3 stores of an entry by a thread, expected 2",
    ),
    Break(
        "bank rows of a bank pass before the wait", BANK, "true", "bank_pass.cuh",
        r"ptx::griddepcontrol_wait\(\);(.*?)(ptx::griddepcontrol_launch_dependents)",
        r"\1ptx::griddepcontrol_wait(); \2",
        "blocks is loaded before griddepcontrol.wait",
    ),
    Break(
        "lse of a bank pass stored before anything has come", BANK, "true", "bank_pass.cuh",
        r"(  StageCursor<T> cursor\(0\);)(?=\s*BankShare::Group group;\s*for[^{]*\{\s*const uint32_t arr)",
        r"  if (item == 0) params.lse[blockIdx.x] = 0.0f;\n\1",
        "lse is stored before griddepcontrol.wait",
    ),
    Break(
        "a bank pass that mixes with too few registers", BANK, "false", "bank_pass.cuh",
        r"kMixRegisters = [^;]+;", "kMixRegisters = 56;",
        "local memory: ",
    ),
    Break(
        "a bank pass that takes more registers than it has", BANK, "false", "bank_pass.cuh",
        r"kScoreRegisters = [^;]+;(.*?)static_assert\(kGroupThreads.*?\);", r"kScoreRegisters = 160;\1",
        "registers are taken, 61440 launched",
    ),
    Break(
        "a bank pass that multiplies by a query in three parts", BANK, "true", "bank_pass.cuh",
        r"(for \(int j = 0; j < 6; \+\+j\) ptx::mma\(scores_\[j\][^;]*;)",
        r"\1 ptx::mma(scores_[0], a, query_[k][1][0], query_[k][1][1]);",
        "49 products to score, a warp and group, expected 42",
    ),
    Break(
        "a bank pass of other blocks", BANK, "true", "bank_pass.cuh",
        r"kBlockSize = 2 \* kGroupThreads \+ 128;", "kBlockSize = 2 * kGroupThreads + 256;",
        "768 threads in clusters of 8, expected 640 in clusters of 8",
    ),
]  # fmt: skip


def compile_instance(folder: Path, source: str, target: str) -> Path:
    """One permutation, compiled from the kernels in a folder."""
    unit = folder / "instance.cu"
    headers = ("forward_ring", "forward_cluster", "merge_ring", "merge_cluster", "bank_pass")
    includes = "".join(f'#include "{header}.cuh"\n' for header in headers)
    unit.write_text(f"{includes}{source}\n")
    cubin = folder / f"instance.sm_{target}.cubin"
    subprocess.run(
        ["nvcc", "-std=c++20", f"-I{folder}", f"-gencode=arch=compute_{target},code=sm_{target}",
         "-cubin", "-o", str(cubin), str(unit)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return cubin


def copy_kernels(folder: Path) -> Path:
    """A copy of the kernels' source that may be broken."""
    copy = folder / "cuda"
    shutil.copytree(ROOT / "cuda", copy)
    return copy


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize("broken", BREAKS, ids=lambda broken: broken.name)
def test_audit_notices_source_that_breaks_a_rule(broken: Break, tmp_path: Path) -> None:
    kernels = copy_kernels(tmp_path)
    file = kernels / broken.file
    changed, places = re.subn(broken.pattern, broken.replacement, file.read_text(), flags=re.DOTALL)
    assert places, f"{broken.file} no longer has what this test would break: {broken.pattern}"
    file.write_text(changed)
    cubin = compile_instance(kernels, broken.instance.format(broken.flags), broken.target)
    (found,) = audit.audit_cubin(cubin)
    assert any(broken.says in problem for problem in found.problems), found.problems


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize("target", ["90a", "100a"])
def test_audit_passes_the_source_as_it_is(target: str, tmp_path: Path) -> None:
    source = RING.format("true, true") + CLUSTER.format("false, false")
    source += MERGE_RING.format("true, false") + MERGE_CLUSTER.format("true, true") + BANK.format("false")
    audits = audit.audit_cubin(compile_instance(copy_kernels(tmp_path), source, target))
    assert [one.problems for one in audits] == [[]] * 5


def test_more_instructions_than_on_hopper_are_a_broken_rule() -> None:
    kernel = audit.Kernel("ring", (7168, 3, 1, 1, 1, 1))

    def issued(target: str, instructions: float) -> audit.Audit:
        one = audit.Audit(kernel, target, 256, 128, 0, 0, 0, 0, 2)
        one.warp_instructions_per_token = instructions
        return one

    audits = [issued("90a", 1000), issued("100a", 1001), issued("103a", 1000)]
    audit.compare_targets(audits)
    assert [len(one.problems) for one in audits] == [0, 1, 0]
    assert "1001 instructions per token" in audits[1].problems[0]


# --- the reader ------------------------------------------------------------------------------------------

LISTING = """
\t.section\t.nv.info.kernel,"",@"SHT_CUDA_INFO"
\t.sectionflags\t@""
\t//----- nvinfo : EIATTR_MAX_THREADS
        /*0048*/ \t.word\t0x00000100
        /*004c*/ \t.word\t0x00000001
\t//----- nvinfo : EIATTR_PARAM_CBANK
        /*005c*/ \t.word\tindex@(.nv.constant0.kernel)
        /*0060*/ \t.short\t0x0380
        /*0062*/ \t.short\t0x0080
\t.section\t.text.kernel,"ax",@progbits
.text.kernel:
        /*0000*/                   LDCU.64 UR4, c[0x0][0x390] ;
        /*0010*/                   ISETP.NE.AND P0, PT, RZ, RZ, PT ;
.L_x_0:
        /*0020*/                   LDG.E.128 R4, desc[UR8][UR4.64] ;
        /*0030*/                   FADD R4, R4, R5 ;
        /*0040*/               @P0 BRA `(.L_x_0) ;
        /*0050*/                   ACQBULK ;
        /*0060*/               @P0 EXIT ;
        /*0070*/                   PREEXIT ;
        /*0080*/                   EXIT ;
\t.section\t.nv.constant0.kernel,"a",@progbits
"""


@pytest.fixture
def function() -> sass.Function:
    (parsed,) = sass.parse(LISTING).values()
    return parsed


def test_reader_finds_blocks_loops_and_notes(function: sass.Function) -> None:
    assert function.block_size == 256
    assert function.parameter_base == 0x380
    assert [len(block) for block in function.blocks] == [2, 3, 2, 2]
    assert function.successors == [(1,), (2, 1), (3,), ()]
    (loop,) = function.loops
    assert (loop.header, set(loop.blocks)) == (1, {1})
    assert function.does_math(loop)
    assert [instruction.bits for instruction in function.of("LDG", "LDCU")] == [64, 128]


def test_flow_knows_what_a_load_is_from_and_which_ways_can_be_gone(function: sass.Function) -> None:
    scenario = Scenario({"early": 0, "block_write_idx": -1})
    (flow,) = follow(
        function, audit.PARAMETERS["ForwardParams"], function.parameter_base, [scenario], audit.FORWARD
    )
    assert flow.loads == {0x20: frozenset({"blocks"})}
    assert flow.problems == {
        "blocks is loaded before griddepcontrol.wait": 0x20,
        "dependents are released before other threads have loaded": 0x70,
    }
    # P0 is false, so the loop is left and the first exit passed.
    assert flow.edges == {(0, 1), (1, 2), (2, 3)}


def test_flow_allows_bank_rows_before_the_wait_in_early_mode(function: sass.Function) -> None:
    scenario = Scenario({"early": 1, "block_write_idx": -1})
    (flow,) = follow(
        function, audit.PARAMETERS["ForwardParams"], function.parameter_base, [scenario], audit.FORWARD
    )
    assert list(flow.problems) == ["dependents are released before other threads have loaded"]


def test_kernels_are_told_apart_by_their_symbols() -> None:
    ring = audit.identify(
        "_ZN7attnres19forward_ring_kernelILi7168ELi9ELi3ELi2ELb1ELb0EEEvNS_13ForwardParamsE"
    )
    assert ring == audit.Kernel("ring", (7168, 9, 3, 2, 1, 0))
    assert (ring.num_sources, ring.prefixes, ring.has_output_norm, ring.static_common_path) == (
        9,
        2,
        True,
        False,
    )
    assert audit.identify("_ZN7attnres5otherEv") is None
    merge = audit.identify("_ZN7attnres20merge_cluster_kernelILi7168ELi7ELb1ELb1ELb0EEEvNS_11MergeParamsE")
    assert merge == audit.Kernel("merge_cluster", (7168, 7, 1, 1, 0))
    assert (merge.cluster_size, merge.float32_bank, merge.prefixes) == (7, True, 1)
    bank = audit.identify("_ZN7attnres11bank_kernelILi7168ELb0EEEvNS_10BankParamsE")
    assert bank == audit.Kernel("bank", (7168, 0))
    floor = audit.identify("_ZN7attnres17bank_floor_kernelILi7168ELb1EEEvNS_10BankParamsE")
    assert floor == audit.Kernel("bank_floor", (7168, 1))
    assert [str(kernel) for kernel in (ring, merge, bank, floor)] == [
        "ring N=9 NC=3 B=2 norm",
        "merge_cluster C=7 float32 norm",
        "bank bfloat16",
        "bank_floor float32",
    ]


def test_library_without_kernels_is_said_to_have_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def audit_binary(*arguments: object) -> list[audit.Audit]:
        raise AssertionError("a library without kernels is not looked into")

    monkeypatch.setattr(libattnres, "permutations", list)
    monkeypatch.setattr(audit, "audit_binary", audit_binary)
    assert cli.main(["permutations", "--audit"]) == 2
    assert "library: expected one with kernels, got one built without CUDA" in capsys.readouterr().err
