# SPDX-License-Identifier: Apache-2.0
"""The order of the ring kernel's copies, loads and partial sums, with every race made wide.

Compiles copies of the kernel's headers with the changes below: on a GPU the changed kernel must give the
library's bits, and each mutation, which takes one defence away, must not.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import libattnres
import pytest

ROOT = Path(__file__).parents[2]
RING, PTX = "forward_ring.cuh", "device/ptx.cuh"

Change = tuple[str, str, str]
"""A header of cuda/, what stands there exactly once, and what is to stand there."""

WAIT_FOR_SLOT = "ptx::mbarrier_wait(shared.empty(cursor.slot), cursor.parity);"
TAKE_ROW = "take_row(uint4 (&row)[T::kVectors]) {\n    "
WAIT_FOR_ROW = f"{TAKE_ROW}ptx::mbarrier_wait(shared_.full(cursor_.slot), cursor_.parity);"
TRY_ROW = '"mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\\n"'
TAKE_CHUNK = "#pragma unroll\n    for (int r = 0; r < kRows; ++r) take_row(rows[r]);\n"
RELEASE_CHUNK = "    release_rows(first, kRows);\n"
TAKE_DELTA = "take_row(delta);\n      release_rows(first, 2);"

WIDENED: tuple[Change, ...] = (
    (RING, WAIT_FOR_SLOT, f"{WAIT_FOR_SLOT} spoil_slot(shared.row(cursor.slot), T::kRowBytes);"),
    (RING, WAIT_FOR_ROW, f"{WAIT_FOR_ROW} linger(cursor_.slot);"),
    (
        RING,
        "for (int i = 0; i < V; ++i) sums[i] = sum_of_warps(buffer + i * 32);",
        "for (int i = 0; i < V; ++i) { linger_at_sums(i); sums[i] = sum_of_warps(buffer + i * 32); }",
    ),
    # A mutated kernel may wait for ever; this one gives up after 100 ms.
    (
        PTX,
        f'"RETRY_%=:\\n"\n      {TRY_ROW}\n      "@!done bra RETRY_%=;\\n"',
        '".reg .u64 start, now; mov.u64 start, %%globaltimer;\\n" "RETRY_%=:\\n"'
        f'{TRY_ROW} "@done bra LEAVE_%=;\\n"'
        '"mov.u64 now, %%globaltimer; sub.u64 now, now, start; setp.lt.u64 done, now, 100000000;\\n"'
        '"@done bra RETRY_%=; trap; LEAVE_%=:\\n"',
    ),
)

MUTATIONS: dict[str, tuple[Change, ...]] = {
    "a slot is filled before it was handed back": ((RING, WAIT_FOR_SLOT, ""),),
    "a row is read before it has arrived": ((RING, WAIT_FOR_ROW, TAKE_ROW),),
    "a chunk's slots are handed back before they are read": (
        (RING, TAKE_CHUNK + RELEASE_CHUNK, RELEASE_CHUNK + TAKE_CHUNK),
    ),
    "the prefix's slots are handed back before they are read": (
        (RING, "take_row(row);\n    if (T::kStaticCommonPath", "\n    if (T::kStaticCommonPath"),
        (RING, TAKE_DELTA, "release_rows(first, 2); take_row(row); take_row(delta);"),
    ),
    "a chunk's sums lie where the last chunk's lay": ((RING, "chunk_buffer_ ^= 1;", ""),),
    "nobody waits for the others' sums": (
        (RING, "void meet() const { ptx::named_barrier_sync(1, T::kConsumers); }", "void meet() const {}"),
    ),
}


def changed_headers(folder: Path, changes: tuple[Change, ...]) -> Path:
    """A copy of cuda/ with the changes; each must apply exactly once."""
    copy = folder / "cuda"
    shutil.copytree(ROOT / "cuda", copy)
    for header, old, new in changes:
        text = (copy / header).read_text()
        assert text.count(old) == 1, f"{header} holds {old!r} {text.count(old)} times"
        (copy / header).write_text(text.replace(old, new))
    return copy


def build(folder: Path, changes: tuple[Change, ...]) -> subprocess.Popen[str]:
    """Start compiling the test program with changed headers to ``folder/poisoned_ring``."""
    nvcc = shutil.which("nvcc")
    assert nvcc is not None
    package = Path(libattnres.__file__).parent
    command = [nvcc, "-std=c++20", "-O2", "-arch=sm_90a", f"-I{changed_headers(folder, changes)}"]
    command += [
        f"-I{ROOT / 'tests/cpp'}",
        f"-I{package / 'include'}",
        str(ROOT / "tests/cpp/poisoned_ring.cu"),
    ]
    command += ["-o", str(folder / "poisoned_ring"), f"-L{package / 'lib'}", "-lattnres"]
    command += ["-Xlinker", f"-rpath={package / 'lib'}"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(folder / "poisoned_ring")], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("mutation", [None, *MUTATIONS])
def test_every_change_applies_to_the_headers(mutation: str | None, tmp_path: Path) -> None:
    """Or the tests below would test nothing."""
    changed_headers(tmp_path, all_changes(mutation))


def all_changes(mutation: str | None) -> tuple[Change, ...]:
    """The widened races, and a defence less."""
    if mutation is None:
        return WIDENED
    mutated = {(header, old): new for header, old, new in MUTATIONS[mutation]}
    # Where a wait is taken away, what follows it stays.
    widened = [
        (header, old, mutated.pop((header, old), old) + new.removeprefix(old))
        if new.startswith(old)
        else (header, old, new)
        for header, old, new in WIDENED
    ]
    return (*widened, *((header, old, new) for (header, old), new in mutated.items()))


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Path]:
    """The test program with the widened races, and with each mutation besides."""
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    folders = {mutation: tmp_path_factory.mktemp("ring") for mutation in (None, *MUTATIONS)}
    builds = {mutation: build(folder, all_changes(mutation)) for mutation, folder in folders.items()}
    outputs = {mutation: process.communicate(timeout=600)[0] for mutation, process in builds.items()}
    for mutation, process in builds.items():
        assert process.returncode == 0, f"{mutation}: {outputs[mutation]}"
    return folders


@pytest.mark.slow
def test_every_change_compiles(programs: dict[str | None, Path]) -> None:
    assert len(programs) == 1 + len(MUTATIONS)


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.slow
@pytest.mark.usefixtures("native_device")
def test_only_the_intact_order_gives_the_librarys_bits(programs: dict[str | None, Path]) -> None:
    for mutation, folder in programs.items():
        result = run(folder)
        if mutation is None:
            assert result.returncode == 0, result.stdout + result.stderr
        else:
            assert result.returncode == 1, f"not found: {mutation}\n{result.stdout}"
