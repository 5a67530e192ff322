# SPDX-License-Identifier: Apache-2.0
"""What a machine may lack or hold: each fault is named, and a call that can be served still is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import libattnres
import pytest
import torch
from libattnres import _core, cli
from libattnres.backends import triton as triton_backend
from programs import run_program

LIBRARY = Path(next(iter(libattnres.__path__))) / "lib" / "libattnres.so"
CORE = Path(_core.__file__)

needs_kernels = pytest.mark.skipif(not libattnres.permutations(), reason="built with ATTNRES_CUDA=OFF")

NOT_SUPPORTED = 801
NO_DEVICE = 100
NOT_INITIALIZED = 3
MISMATCH = 803

DRIVER = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void note(const char* what) {
  const char* path = getenv("DRIVER_LOG");
  FILE* file = path ? fopen(path, "a") : NULL;
  if (file != NULL) fprintf(file, "%s\\n", what), fclose(file);
}
int cuDriverGetVersion(int* version) { return note("version"), *version = VERSION, 0; }
int cuInit(unsigned flags) { return note("init"), INIT; }
static int anything(void) { return note("other"), 801; }
int cuGetProcAddress_v2(const char* name, void** function, int version, unsigned long flags, int* status) {
  *function = (void*)(!strcmp(name, "cuInit") ? (void*)cuInit
                      : !strcmp(name, "cuDriverGetVersion") ? (void*)cuDriverGetVersion
                      : !strcmp(name, "cuGetProcAddress") ? (void*)cuGetProcAddress_v2
                      : (void*)anything);
  if (status != NULL) *status = 0;
  return 0;
}
"""
"""A driver that is there and can do nothing; it notes that it was called."""

# The module by itself: no package and no PyTorch, which has a CUDA runtime of its own.
LOAD_CORE = f"""
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("_core", {str(CORE)!r})
core = module_from_spec(spec)
spec.loader.exec_module(core)
"""

CPU_CALL = """
import torch, libattnres
torch.set_num_threads(1)  # PyTorch's threads do not outlive a fork
def arguments(M=4, H=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=generator).bfloat16()
    return normal(M, H), normal(M, H), normal(M, 8, H), normal(H), normal(H), normal(H), 8
def bits(tensor):
    return tensor.view(torch.int16).numpy().tobytes()
"""


def compiler() -> str:
    found = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if found is None:
        pytest.skip("no C compiler for a fake driver")
    return found


def found_first(folder: Path) -> dict[str, str]:
    """The variable with which the loader looks into a folder before any other."""
    return {"LD_LIBRARY_PATH": ":".join(filter(None, [str(folder), os.environ.get("LD_LIBRARY_PATH")]))}


@pytest.fixture
def fake_driver(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """Variables with which a program finds this libcuda.so.1 rather than the machine's."""

    def make(version: int = 13000, init: int = 0) -> dict[str, str]:
        source, library = tmp_path / "driver.c", tmp_path / "libcuda.so.1"
        source.write_text(DRIVER)
        flags = ["-shared", "-fPIC", f"-DVERSION={version}", f"-DINIT={init}"]
        subprocess.run([compiler(), *flags, source, "-o", library], check=True)
        return {**found_first(tmp_path), "DRIVER_LOG": str(tmp_path / "log")}

    return make


@pytest.fixture
def no_driver(tmp_path: Path) -> dict[str, str]:
    """The loader stops at this file, as it would if there were none anywhere."""
    (tmp_path / "libcuda.so.1").touch()
    return found_first(tmp_path)


NATIVE_IS_REFUSED = """
assert reason == core.probe(0)["reason"], core.probe(0)
assert core.probe(0)["native"] is False and core.probe(255)["reason"] == reason
for device in (-1, 0, 1):
    try:
        core.warmup(device)
    except core.UnsupportedError as error:
        assert str(error) == reason, error
    else:
        raise SystemExit("warmup did not say that there is no device")
print(core.probe(0)["driver_version"])
"""


@needs_kernels
def test_no_driver_is_named(no_driver: dict[str, str]) -> None:
    program = f"{LOAD_CORE}\nreason = 'no CUDA driver is installed'\n{NATIVE_IS_REFUSED}"
    assert run_program(program, **no_driver).strip() == "0"


@needs_kernels
@pytest.mark.parametrize(
    ("version", "init", "reason"),
    [
        (12040, 0, "the CUDA driver is too old: expected at least 13000, got 12040"),
        (13000, NO_DEVICE, "no CUDA device: cudaErrorNoDevice (no CUDA-capable device is detected)"),
        (13000, NOT_INITIALIZED, "no CUDA device: cudaErrorInitializationError (initialization error)"),
        (
            13000,
            MISMATCH,
            "no CUDA device: cudaErrorSystemDriverMismatch "
            "(system has unsupported display driver / cuda driver combination)",
        ),
    ],
    ids=["old", "no GPU", "not initialised", "mismatch"],
)
def test_a_driver_that_cannot_serve_is_named(
    version: int, init: int, reason: str, fake_driver: Callable[..., dict[str, str]]
) -> None:
    runtime = libattnres.probe().runtime_version
    version = version - 13000 + runtime  # the fake is as new as the runtime inside, or older
    reason = reason.replace("13000", str(runtime)).replace("12040", str(version))
    program = f"{LOAD_CORE}\nreason = {reason!r}\n{NATIVE_IS_REFUSED}"
    assert run_program(program, **fake_driver(version, init)).strip() == str(version)


FALLS_BACK = f"""
{CPU_CALL}
from libattnres import reference
call = arguments()
assert libattnres.explain(*call).backend == "host"
expected = reference.attn_res(*(a.clone() if isinstance(a, torch.Tensor) else a for a in call))
output = libattnres.attn_res(*call)
assert reference.same_bits(call[0], expected.prefix.to(call[0].dtype))
assert (output.double() - expected.output).norm() <= 2e-3 * expected.output.norm()
probe = libattnres.probe()
assert probe.backends["native"] and probe.backends["host"] is None and probe.backends["torch"] is None
print(probe.backends["native"])
"""


@needs_kernels
def test_calls_are_served_beside_an_old_driver(fake_driver: Callable[..., dict[str, str]]) -> None:
    assert "the CUDA driver is too old" in run_program(FALLS_BACK, **fake_driver(12040))


def test_calls_are_served_without_a_driver(no_driver: dict[str, str]) -> None:
    assert re.search("no CUDA driver is installed|built without CUDA", run_program(FALLS_BACK, **no_driver))


@needs_kernels
def test_nothing_touches_the_driver_before_it_is_needed(fake_driver: Callable[..., dict[str, str]]) -> None:
    variables = fake_driver(13000, NO_DEVICE)
    log = variables["DRIVER_LOG"]
    run_program(
        f"""
{CPU_CALL}
import os
assert not torch.cuda.is_initialized()
libattnres.attn_res(*arguments())
libattnres.permutations()
assert not os.path.exists({log!r}), open({log!r}).read()
libattnres._core.probe(0)
assert "init" in open({log!r}).read()
""",
        **variables,
    )


def test_another_cuda_on_the_library_path_is_not_loaded(tmp_path: Path) -> None:
    source = tmp_path / "other.c"
    source.write_text(
        "#include <stdlib.h>\n__attribute__((constructor)) static void loaded(void) { abort(); }"
    )
    library = tmp_path / "libcudart.so.13"
    subprocess.run([compiler(), "-shared", "-fPIC", source, "-o", library], check=True)
    others = ("libcudart.so", "libcudart.so.12", "libnvrtc.so.13", "libtorch.so", "libc10.so")
    for name in (*others, LIBRARY.name):  # another build of this library too
        shutil.copy(library, tmp_path / name)
    program = f"""{LOAD_CORE}
core.probe(0)
mapped = open("/proc/self/maps").read()
assert {str(LIBRARY)!r} in mapped
assert {str(tmp_path)!r} not in mapped
"""
    run_program(program, **found_first(tmp_path))


@pytest.mark.parametrize("library", [LIBRARY, CORE], ids=["libattnres", "_core"])
def test_no_symbol_of_pytorch_or_of_a_cuda_library_is_asked_for(library: Path) -> None:
    listing = subprocess.run(
        ["nm", "--dynamic", "--undefined-only", "--format=posix", library],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    wanted = [line.split()[0].partition("@")[0] for line in listing.splitlines()]
    assert len(wanted) > 20
    # What one PyTorch or CUDA exports another may not, so nothing of theirs may be resolved by the loader.
    foreign = re.compile(r"at[0-9]|.*(torch|c10|caffe2|Tensor|ATen)|cuda[A-Z]|cu[A-Z]|nv|__cuda|THP")
    assert [name for name in wanted if foreign.match(name)] == []


WATCH_WRITES = """
import os, sys, torch
sys.modules["triton"] = None
written = []
def watch(event, arguments):
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
        written.append(arguments[0])
    elif event in ("os.mkdir", "os.rename", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"):
        written.append((event, arguments[0]))
sys.addaudithook(watch)
"""

NOTHING_WRITTEN = """
assert written == [], written
open("/dev/null", "w").close()
assert written == ["/dev/null"]
print(probe.backends["triton"])
"""


def test_a_bare_machine_is_enough_and_nothing_is_written(tmp_path: Path) -> None:
    """No Triton, no compiler, no folder to write to; root may write anywhere, so it is watched too."""
    (tmp_path / "file").touch()
    nowhere = str(tmp_path / "file" / "home")
    folders = ("HOME", "XDG_CACHE_HOME", "TMPDIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    output = run_program(
        WATCH_WRITES + FALLS_BACK + NOTHING_WRITTEN,
        **dict.fromkeys((*folders, "CUDA_CACHE_PATH"), nowhere),
        PATH="/nonexistent",
        CC="/nonexistent/cc",
        PYTHONDONTWRITEBYTECODE="1",
        CUDA_VISIBLE_DEVICES="",
    )
    assert output.splitlines()[-1] == "triton is not installed"


@pytest.fixture
def device_86(monkeypatch: pytest.MonkeyPatch) -> None:
    """One device, of a compute capability that the library has no kernel for."""
    reason = "no kernel for compute capability 8.6: this library was built for 90a;100a;103a"
    answer = {
        "native": False,
        "device": 0,
        "compute_major": 8,
        "compute_minor": 6,
        "num_sms": 84,
        "driver_version": 13000,
        "runtime_version": 13000,
        "device_name": "Some GPU",
        "target": "",
        "built_targets": "90a;100a;103a",
        "reason": reason,
        "plan": "",
        "plan_error": "",
    }
    monkeypatch.setattr(_core, "probe", lambda device=-1: dict(answer, device=device))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


@pytest.mark.usefixtures("device_86")
def test_a_device_whose_target_is_not_built_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(triton_backend, "toolchain_reason", lambda: None)
    probe = libattnres.probe()
    (device,) = probe.devices
    assert (device.compute_capability, device.native, device.target) == ((8, 6), False, "")
    assert probe.backends["native"] == device.reason
    assert device.reason.startswith("no kernel for compute capability 8.6")
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    assert "no kernel for compute capability 8.6" in re.sub(r"\s+", " ", printed)


@pytest.mark.usefixtures("device_86")
def test_a_gpu_without_a_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    triton_backend.toolchain_reason.cache_clear()
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CC", raising=False)
    try:
        reason = libattnres.probe().backends["triton"]
    finally:
        triton_backend.toolchain_reason.cache_clear()
    assert reason == "triton needs a C compiler, and neither gcc nor clang is on PATH and CC is not set"


@pytest.mark.usefixtures("device_86")
def test_a_pytorch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = _core.probe(0)
    monkeypatch.setattr(_core, "probe", lambda device=-1: {**answer, "native": True, "reason": ""})
    monkeypatch.setattr(torch.version, "cuda", None)
    probe = libattnres.probe()
    assert probe.devices == ()
    assert probe.backends["native"] == "this PyTorch was built without CUDA"
    assert probe.backends["triton"] in ("no CUDA device that PyTorch can use", "triton is not installed")


def test_a_child_forked_in_the_middle_of_a_call_can_call() -> None:
    """The pool's threads and the lock that one of them holds stay with the parent."""
    run_program(f"""
{CPU_CALL}
import os, sys, threading, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads, which is the point here
large = dict(M=256, H=1024)  # 4 MiB of bank, enough for several threads
expected = bits(libattnres.attn_res(*arguments(**large)))
stop = threading.Event()
def keep_calling():
    mine = arguments(**large)
    while not stop.is_set():
        libattnres.attn_res(*mine)
thread = threading.Thread(target=keep_calling)
thread.start()
def child(depth):
    if bits(libattnres.attn_res(*arguments(**large))) != expected:
        os._exit(1)
    if depth == 0:
        grandchild = os.fork()
        if grandchild == 0:
            child(1)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]))
    os._exit(0)
for _ in range(6):
    pid = os.fork()
    if pid == 0:
        child(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert bits(libattnres.attn_res(*arguments(**large))) == expected
stop.set()
thread.join()
""")


@pytest.mark.gpu
def test_a_child_forked_after_import_can_use_the_gpu() -> None:
    run_program("""
import os, torch, libattnres
libattnres.permutations()
def call():
    bf16 = dict(dtype=torch.bfloat16, device="cuda")
    H = 7168
    prefix, delta, blocks = torch.ones(4, H, **bf16), torch.ones(4, H, **bf16), torch.ones(4, 8, H, **bf16)
    weights = torch.ones(3, H, **bf16)
    output = libattnres.attn_res(prefix, delta, blocks, *weights, 8)
    assert output.isfinite().all() and (prefix == 2).all()
    return 0
child = os.fork()
if child == 0:
    os._exit(call())
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
call()
""")


SUBINTERPRETER = """
import sys
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
program = '''
import sys
sys.path.insert(0, {folder!r})
try:
    import {module}
except ImportError as error:
    print("refused:", error, flush=True)
'''
sys.path.insert(0, {folder!r})
{before}
subinterpreter = interpreters.create()
interpreters.run_string(subinterpreter, program)
interpreters.destroy(subinterpreter)
import _core
print("main:", _core.version())
"""


@pytest.mark.parametrize("before", ["", "import _core"], ids=["first", "after the main interpreter"])
@pytest.mark.parametrize("module", ["_core", "libattnres"])
def test_a_subinterpreter_is_refused_and_the_main_interpreter_goes_on(module: str, before: str) -> None:
    if sys.version_info >= (3, 14):
        pytest.skip("another module makes subinterpreters there")
    output = run_program(SUBINTERPRETER.format(folder=str(CORE.parent), module=module, before=before))
    assert "refused: libattnres: expected the main interpreter, got a subinterpreter" in output
    assert f"main: {libattnres.__version__}" in output


def test_import_takes_less_than_a_fifth_of_a_second_beyond_pytorch() -> None:
    """The least processor time of several fresh children: other work on the machine does not count."""
    seconds = run_program("""
import os, time, torch
best = float("inf")
for _ in range(5):
    readable, writable = os.pipe()
    if os.fork() == 0:
        started = time.process_time()
        import libattnres
        os.write(writable, str(time.process_time() - started).encode())
        os._exit(0)
    os.wait()
    best = min(best, float(os.read(readable, 100)))
print(best)
""")
    assert 0.0 < float(seconds) < 0.2


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("LIBATTNRES_BACKEND", "cuda", "LIBATTNRES_BACKEND: expected one of 'auto', 'native'"),
        ("LIBATTNRES_BATCH_INVARIANT", "yes", "LIBATTNRES_BATCH_INVARIANT: expected"),
        ("LIBATTNRES_NUM_THREADS", "many", "LIBATTNRES_NUM_THREADS: expected an integer >= 1"),
    ],
)
def test_info_says_that_a_variable_is_wrong(
    name: str, value: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    assert cli.main(["info"]) == 1
    printed = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert f"WRONG: {text}" in printed
    assert f"got '{value}'" in printed


def test_info_lists_the_variables_that_are_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in os.environ if name.startswith("LIBATTNRES_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("LIBATTNRES_BACKEND", "torch")
    monkeypatch.setenv("LIBATTNRES_BACKND", "host")
    assert cli.main(["info"]) == 0
    lines = [re.sub(r"[\s│|]+", " ", line).strip() for line in capsys.readouterr().out.splitlines()]
    assert any(line.startswith("LIBATTNRES_BACKEND torch") and "unknown" not in line for line in lines)
    assert any(line.startswith("LIBATTNRES_BACKND host unknown") for line in lines)
