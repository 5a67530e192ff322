// SPDX-License-Identifier: Apache-2.0
// libattnres._core: the C ABI of attnres.h for Python. Pointers, sizes and strides in; exceptions out.
// `forward`, `floor`, `time_forward`, `time_plan`, `forward_host`, `check`, `plan` and `plan_for` share one
// list of positional arguments, that of Fields<attnres_forward_args>; the two phases have lists of their own.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <cstdint>

#include "attnres/attnres.h"
#include "call_args.hpp"
#include "status.hpp"
#include "tensor_call.hpp"

namespace py = pybind11;

namespace attnres::bindings {
namespace {

void require(attnres_status status) {
  if (status == ATTNRES_OK) return;
  set_exception(status);
  throw py::error_already_set();
}

const char* kernel_name(int32_t kernel) {
  return kernel == ATTNRES_KERNEL_CLUSTER ? "cluster" : "ring";
}

py::dict to_dict(const attnres_permutation& permutation) {
  py::dict dict;
  dict["kernel"] = kernel_name(permutation.kernel);
  dict["hidden_size"] = permutation.hidden_size;
  dict["num_sources"] = permutation.num_sources;
  dict["rows_per_stage"] = permutation.rows_per_stage;
  dict["prefixes_per_row"] = permutation.prefixes_per_row;
  dict["cluster_size"] = permutation.cluster_size;
  dict["has_output_norm"] = permutation.has_output_norm != 0;
  dict["static_common_path"] = permutation.static_common_path != 0;
  return dict;
}

py::dict to_dict(const attnres_plan_info& plan) {
  py::dict dict = to_dict(plan.permutation);
  dict["ctas_per_sm"] = plan.ctas_per_sm;
  dict["grid_size"] = plan.grid_size;
  dict["block_size"] = plan.block_size;
  dict["shared_memory_bytes"] = plan.shared_memory_bytes;
  dict["ring_rows"] = plan.ring_rows;
  return dict;
}

// attnres_forward, or another that launches.
template <typename Args, attnres_status (*Launch)(const Args*, CUstream_st*)>
PyObject* launch(PyObject*, PyObject* const* objects, Py_ssize_t count) {
  Args args;
  if (!parse_call(objects, count, 1, &args)) return nullptr;
  void* stream = PyLong_AsVoidPtr(objects[kNumFieldsOf<Args>]);
  if (stream == nullptr && PyErr_Occurred() != nullptr) return nullptr;
  attnres_status status = ATTNRES_OK;
  // A launch waits when the queue is full, perhaps for a host callback that needs the GIL.
  Py_BEGIN_ALLOW_THREADS;
  status = Launch(&args, static_cast<CUstream_st*>(stream));
  Py_END_ALLOW_THREADS;
  if (status == ATTNRES_OK) Py_RETURN_NONE;
  set_exception(status);
  return nullptr;
}

attnres_status plan_only(const attnres_forward_args* args, CUstream_st*) {
  attnres_plan_info info;
  info.struct_size = sizeof(info);
  return attnres_plan(args, &info);
}

// What one C call costs its caller: a loop that no Python runs in.
template <attnres_status (*Call)(const attnres_forward_args*, CUstream_st*)>
PyObject* time_calls(PyObject*, PyObject* const* objects, Py_ssize_t count) {
  attnres_forward_args args;
  if (!parse_call(objects, count, 2, &args)) return nullptr;
  void* stream = PyLong_AsVoidPtr(objects[kNumFields]);
  if (stream == nullptr && PyErr_Occurred() != nullptr) return nullptr;
  int64_t calls = 0;
  if (!to_int64(objects[kNumFields + 1], "calls", &calls)) return nullptr;
  attnres_status status = ATTNRES_OK;
  std::chrono::steady_clock::duration elapsed{};
  Py_BEGIN_ALLOW_THREADS;
  const auto started = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < calls && status == ATTNRES_OK; ++i) {
    status = Call(&args, static_cast<CUstream_st*>(stream));
  }
  elapsed = std::chrono::steady_clock::now() - started;
  Py_END_ALLOW_THREADS;
  if (status == ATTNRES_OK) {
    return PyFloat_FromDouble(std::chrono::duration<double>(elapsed).count());
  }
  set_exception(status);
  return nullptr;
}

template <typename Args, attnres_status (*Run)(const Args*)>
PyObject* run_on_host(PyObject*, PyObject* const* objects, Py_ssize_t count) {
  Args args;
  if (!parse_call(objects, count, 0, &args)) return nullptr;
  attnres_status status = ATTNRES_OK;
  Py_BEGIN_ALLOW_THREADS;
  status = Run(&args);
  Py_END_ALLOW_THREADS;
  if (status == ATTNRES_OK) Py_RETURN_NONE;
  set_exception(status);
  return nullptr;
}

template <typename Args, attnres_status (*Check)(const Args*, int32_t)>
PyObject* check(PyObject*, PyObject* const* objects, Py_ssize_t count) {
  Args args;
  if (!parse_call(objects, count, 1, &args)) return nullptr;
  const int on_device = PyObject_IsTrue(objects[kNumFieldsOf<Args>]);
  if (on_device < 0) return nullptr;
  const attnres_status status = Check(&args, on_device);
  if (status == ATTNRES_OK) Py_RETURN_NONE;
  set_exception(status);
  return nullptr;
}

attnres_forward_args parse(const py::args& call, Py_ssize_t extra) {
  attnres_forward_args args;
  PyObject* const* objects = PySequence_Fast_ITEMS(call.ptr());
  if (!parse_call(objects, static_cast<Py_ssize_t>(call.size()), extra, &args)) {
    throw py::error_already_set();
  }
  return args;
}

py::dict plan(const py::args& call) {
  const attnres_forward_args args = parse(call, 0);
  attnres_plan_info info{};
  info.struct_size = sizeof(info);
  require(attnres_plan(&args, &info));
  return to_dict(info);
}

py::dict plan_for(const py::args& call) {
  const attnres_forward_args args = parse(call, 3);
  attnres_plan_info info{};
  info.struct_size = sizeof(info);
  require(attnres_plan_for(&args, call[kNumFields].cast<int32_t>(),
                           call[kNumFields + 1].cast<int32_t>(),
                           call[kNumFields + 2].cast<int32_t>(), &info));
  return to_dict(info);
}

py::dict probe(int32_t device) {
  attnres_probe_info info{};
  info.struct_size = sizeof(info);
  attnres_status status = ATTNRES_OK;
  {
    const py::gil_scoped_release release;  // the first one may load the driver
    status = attnres_probe(device, &info);
  }
  require(status);
  py::dict dict;
  dict["native"] = info.native != 0;
  dict["device"] = info.device;
  dict["compute_major"] = info.compute_major;
  dict["compute_minor"] = info.compute_minor;
  dict["num_sms"] = info.num_sms;
  dict["driver_version"] = info.driver_version;
  dict["runtime_version"] = info.runtime_version;
  dict["device_name"] = info.device_name;
  dict["target"] = info.target;
  dict["built_targets"] = info.built_targets;
  dict["reason"] = info.reason;
  dict["plan"] = info.plan;
  dict["plan_error"] = info.plan_error;
  return dict;
}

void warmup(int32_t device) {
  attnres_status status = ATTNRES_OK;
  {
    const py::gil_scoped_release release;
    status = attnres_warmup(device);
  }
  require(status);
}

py::list permutations() {
  py::list list;
  for (int32_t i = 0; i < attnres_num_permutations(); ++i) {
    attnres_permutation permutation{};
    permutation.struct_size = sizeof(permutation);
    require(attnres_get_permutation(i, &permutation));
    list.append(to_dict(permutation));
  }
  return list;
}

template <typename Args>
py::tuple field_names() {
  py::tuple names(kNumFieldsOf<Args>);
  for (Py_ssize_t i = 0; i < kNumFieldsOf<Args>; ++i) {
    names[i] = py::str(Fields<Args>::kList[i].name);
  }
  return names;
}

template <PyObject* (*Function)(PyObject*, PyObject* const*, Py_ssize_t)>
PyMethodDef fast_method(const char* name, const char* doc) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(Function)),
          METH_FASTCALL, doc};
}

PyMethodDef* fast_methods() {
  static PyMethodDef methods[] = {
      fast_method<launch<attnres_forward_args, attnres_forward>>(
          "forward", "forward(*call, stream): launch on a CUDA stream."),
      fast_method<launch<attnres_bank_args, attnres_bank>>(
          "bank", "bank(*bank_call, stream): launch on a CUDA stream."),
      fast_method<launch<attnres_bank_args, attnres_bank_floor>>(
          "bank_floor", "bank_floor(*bank_call, stream): move the same bytes and nothing more."),
      fast_method<launch<attnres_merge_args, attnres_merge>>(
          "merge", "merge(*merge_call, stream): launch on a CUDA stream."),
      fast_method<launch<attnres_forward_args, attnres_floor>>(
          "floor", "floor(*call, stream): move the bytes of forward and compute nothing of it."),
      fast_method<time_calls<attnres_forward>>(
          "time_forward",
          "time_forward(*call, stream, calls) -> seconds: so many forward calls, on the host's "
          "clock, without synchronising."),
      fast_method<time_calls<plan_only>>(
          "time_plan",
          "time_plan(*call, stream, calls) -> seconds: the same calls up to the launch: checks and "
          "plan."),
      fast_method<run_on_host<attnres_forward_args, attnres_forward_host>>(
          "forward_host", "forward_host(*call): run on the CPU."),
      fast_method<run_on_host<attnres_bank_args, attnres_bank_host>>(
          "bank_host", "bank_host(*bank_call): run on the CPU."),
      fast_method<run_on_host<attnres_merge_args, attnres_merge_host>>(
          "merge_host", "merge_host(*merge_call): run on the CPU."),
      fast_method<check<attnres_forward_args, attnres_check>>(
          "check", "check(*call, on_device): validate and do nothing else."),
      fast_method<check<attnres_bank_args, attnres_check_bank>>(
          "check_bank", "check_bank(*bank_call, on_device): validate and do nothing else."),
      fast_method<check<attnres_merge_args, attnres_check_merge>>(
          "check_merge", "check_merge(*merge_call, on_device): validate and do nothing else."),
      fast_method<bind_tensors>("bind_tensors",
                                "bind_tensors(tensor type, parameter type, exchange API) -> bool: "
                                "what forward_tensors takes."),
      fast_method<serve_tensors<attnres_forward_args, attnres_forward, attnres_forward_host, 14>>(
          "forward_tensors",
          "forward_tensors(prefix, delta, blocks, norm_weight, qk_weight, "
          "output_norm_weight, num_blocks, block_write_idx, eps, "
          "output_norm_eps, out, pdl, backend, batch_invariant) -> bool: True when served."),
      fast_method<serve_tensors<attnres_merge_args, attnres_merge, attnres_merge_host, 15>>(
          "merge_tensors",
          "merge_tensors(prefix, delta, bank, lse, norm_weight, qk_weight, output_norm_weight, "
          "blocks, block_write_idx, eps, output_norm_eps, out, pdl, backend, batch_invariant) -> "
          "bool: True when served."),
      {nullptr, nullptr, 0, nullptr},
  };
  return methods;
}

}  // namespace
}  // namespace attnres::bindings

PYBIND11_MODULE(core_module, m) {
  using namespace attnres::bindings;  // NOLINT(google-build-using-namespace): the module's own
  m.doc() = "The C ABI of libattnres (attnres/attnres.h): pointers, sizes and strides in.";
  unsupported_error = PyErr_NewExceptionWithDoc(
      "libattnres.UnsupportedError",
      "A forced backend, or a plan, cannot serve this call here. The message says why.",
      PyExc_RuntimeError, nullptr);
  if (unsupported_error == nullptr) throw py::error_already_set();
  m.attr("UnsupportedError") = py::reinterpret_borrow<py::object>(unsupported_error);

  m.attr("CALL_FIELDS") = field_names<attnres_forward_args>();
  m.attr("BANK_CALL_FIELDS") = field_names<attnres_bank_args>();
  m.attr("MERGE_CALL_FIELDS") = field_names<attnres_merge_args>();
#ifdef NDEBUG
  m.attr("DEBUG_BUILD") = false;
#else
  m.attr("DEBUG_BUILD") = true;  // of the whole build: one build type serves library and module
#endif
  if (PyModule_AddFunctions(m.ptr(), fast_methods()) != 0) throw py::error_already_set();

  m.def("plan", &plan, "plan(*call): what forward would launch.");
  m.def(
      "plan_for", &plan_for,
      "plan_for(*call, compute_major, compute_minor, num_sms): the same for a GPU that need not be "
      "there.");
  m.def("probe", &probe, py::arg("device") = -1, "What the library can do on a CUDA device.");
  m.def("warmup", &warmup, py::arg("device") = -1, "Load every kernel for a CUDA device.");
  m.def("num_permutations", &attnres_num_permutations, "How many kernels are compiled in.");
  m.def("permutations", &permutations, "The compiled kernels.");
  m.def("version", &attnres_version_string, "Version of the library.");
}

// pybind11 asks for the GIL of the main interpreter before anything else, so that in a subinterpreter the
// import would wait for itself for ever. The module keeps state per process besides.
PyMODINIT_FUNC PyInit__core() {
  if (PyInterpreterState_Get() != PyInterpreterState_Main()) {
    PyErr_SetString(PyExc_ImportError,
                    "libattnres: expected the main interpreter, got a subinterpreter");
    return nullptr;
  }
  return PyInit_core_module();
}
