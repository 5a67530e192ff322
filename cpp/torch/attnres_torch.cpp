// SPDX-License-Identifier: Apache-2.0
// libattnres_torch.so: the ops torch.ops.libattnres.* without Python, for AOTInductor packages that a C++
// program runs. Schemas and semantics are those of python/libattnres/_ops.py; the kernels are native on
// CUDA and the host backend on CPU, with no fallback. Only PyTorch's stable ABI (>= 2.10) is used.
//
// Load it after libtorch, by linking or dlopen, before the package that calls the ops. A process that
// imports libattnres in Python has the ops already and must not load it: PyTorch refuses the second definition.
#include <attnres/attnres.h>
#include <dlfcn.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <cstdlib>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using OptionalString = std::optional<std::string>;
using OptionalInts = std::optional<std::vector<int64_t>>;
using OptionalBool = std::optional<bool>;

// What every op has after its tensors and indices.
struct Options {
  double eps;
  double output_norm_eps;
  const OptionalString& backend;
  const std::string& pdl;
  const OptionalInts& plan;
  OptionalBool batch_invariant;
};

int32_t dtype_of(const Tensor& prefix) {
  switch (prefix.scalar_type()) {
    case ScalarType::BFloat16:
      return ATTNRES_BFLOAT16;
    case ScalarType::Half:
      return ATTNRES_FLOAT16;
    case ScalarType::Float:
      return ATTNRES_FLOAT32;
    default:
      STD_TORCH_CHECK(false, "prefix: expected bfloat16, float16 or float32, got another dtype");
  }
  return -1;
}

int32_t index_of(const char* name, int64_t value) {
  STD_TORCH_CHECK(
      value >= std::numeric_limits<int32_t>::min() && value <= std::numeric_limits<int32_t>::max(),
      name, ": expected a 32-bit integer, got ", value);
  return static_cast<int32_t>(value);
}

// What the C interface cannot see: it takes pointers, sizes and strides.
void check_like_prefix(const char* name, const Tensor& tensor, const Tensor& prefix, int64_t rank) {
  STD_TORCH_CHECK(tensor.dim() == rank, name, ": expected ", rank, " dimensions, got ",
                  tensor.dim());
  STD_TORCH_CHECK(tensor.scalar_type() == prefix.scalar_type(), name,
                  ": expected the dtype of prefix, got another");
  STD_TORCH_CHECK(tensor.is_cuda() == prefix.is_cuda() && tensor.is_cpu() == prefix.is_cpu() &&
                      tensor.get_device_index() == prefix.get_device_index(),
                  name, ": expected the device of prefix, got another");
  const int64_t hidden_size = prefix.size(1);
  STD_TORCH_CHECK(tensor.size(rank - 1) == hidden_size, name, ": expected a last dimension of ",
                  hidden_size, " as prefix has, got ", tensor.size(rank - 1));
  STD_TORCH_CHECK(hidden_size <= 1 || tensor.stride(rank - 1) == 1, name,
                  ": expected last stride 1, got ", tensor.stride(rank - 1));
}

// Of a dimension with one element any stride will do, and torch keeps an arbitrary one.
int64_t stride_of(const Tensor& tensor, int64_t dimension, int64_t dense) {
  return tensor.size(dimension) > 1 ? tensor.stride(dimension) : dense;
}

int32_t pdl_of(const std::string& pdl) {
  if (pdl == "wait") return ATTNRES_PDL_WAIT;
  if (pdl == "early") return ATTNRES_PDL_EARLY;
  if (pdl == "off") return ATTNRES_PDL_OFF;
  STD_TORCH_CHECK(false, "pdl: expected one of 'wait', 'early', 'off', got '", pdl, "'");
  return -1;
}

// Whether the call runs natively rather than on the host; refuses a backend that is not here.
bool is_native(const Tensor& prefix, const Options& options) {
  const bool on_cuda = prefix.is_cuda();
  STD_TORCH_CHECK(on_cuda || prefix.is_cpu(), "prefix: expected a CPU or CUDA tensor, got another");
  const char* variable = std::getenv("LIBATTNRES_BACKEND");
  std::string backend = "auto";
  if (options.backend.has_value()) {
    backend = *options.backend;
  } else if (options.plan.has_value()) {
    backend = "native";
  } else if (variable != nullptr && *variable != '\0') {
    backend = variable;
  }
  const char* only = on_cuda ? "native" : "host";
  STD_TORCH_CHECK(backend == "auto" || backend == only, "backend: expected 'auto' or '", only,
                  "' for ", on_cuda ? "CUDA" : "CPU", " tensors without Python, got '", backend,
                  "'");
  return on_cuda;
}

// Looked up in libtorch_cuda.so, which a CPU build of PyTorch does not have.
CUstream_st* current_cuda_stream(int32_t device) {
  using Get = AOTITorchError (*)(int32_t, void**);
  static const Get get = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void* symbol =
        dlsym(library == nullptr ? RTLD_DEFAULT : library, "aoti_torch_get_current_cuda_stream");
    return reinterpret_cast<Get>(symbol);
  }();
  STD_TORCH_CHECK(get != nullptr, "prefix: expected a CUDA build of PyTorch, got one without");
  void* stream = nullptr;
  STD_TORCH_CHECK(get(device, &stream) == AOTI_TORCH_SUCCESS, "PyTorch gave no CUDA stream");
  return static_cast<CUstream_st*>(stream);
}

Tensor copy(Tensor rows) {
  Tensor dense = torch::stable::new_empty(rows, rows.sizes());
  return torch::stable::copy_(dense, rows);
}

bool is_same_memory(const Tensor& left, const Tensor& right) {
  return left.numel() > 0 && left.data_ptr() == right.data_ptr() && left.dim() == right.dim() &&
         left.size(0) == right.size(0) && left.stride(0) == right.stride(0);
}

void run(const Tensor& prefix, const OptionalTensor& delta, const Tensor& blocks,
         const Tensor& norm_weight, const Tensor& qk_weight,
         const OptionalTensor& output_norm_weight, int64_t num_blocks, int64_t block_write_idx,
         const Options& options, const Tensor& output) {
  STD_TORCH_CHECK(prefix.dim() == 2, "prefix: expected shape [M, H], got ", prefix.dim(),
                  " dimensions");
  check_like_prefix("prefix", prefix, prefix, 2);
  check_like_prefix("blocks", blocks, prefix, 3);
  check_like_prefix("out", output, prefix, 2);
  check_like_prefix("norm_weight", norm_weight, prefix, 1);
  check_like_prefix("qk_weight", qk_weight, prefix, 1);
  if (output_norm_weight.has_value()) {
    check_like_prefix("output_norm_weight", *output_norm_weight, prefix, 1);
  }
  const int64_t num_tokens = prefix.size(0);
  STD_TORCH_CHECK(output.size(0) == num_tokens, "out: expected ", num_tokens,
                  " rows as prefix has, got ", output.size(0));
  if (delta.has_value()) {
    check_like_prefix("delta", *delta, prefix, 2);
    STD_TORCH_CHECK(delta->size(0) == num_tokens, "delta: expected ", num_tokens,
                    " rows as prefix has, got ", delta->size(0));
  }
  const bool native = is_native(prefix, options);
  // A compiler drops a copy whose source nobody else reads, so that what was a copy may arrive as its source.
  const bool aliases = delta.has_value() && is_same_memory(*delta, prefix);
  const OptionalTensor own_delta = aliases ? OptionalTensor(copy(*delta)) : delta;

  attnres_forward_args args = ATTNRES_FORWARD_ARGS_INIT;
  const int64_t hidden_size = prefix.size(1);
  args.num_tokens = num_tokens;
  args.num_bank_tokens = blocks.size(0);
  args.num_bank_rows = blocks.size(1);
  args.hidden_size = hidden_size;
  args.num_blocks = index_of("num_blocks", num_blocks);
  args.block_write_idx = index_of("block_write_idx", block_write_idx);
  args.prefix = prefix.data_ptr();
  args.delta = own_delta.has_value() ? own_delta->data_ptr() : nullptr;
  args.blocks = blocks.data_ptr();
  args.norm_weight = norm_weight.data_ptr();
  args.qk_weight = qk_weight.data_ptr();
  args.output_norm_weight =
      output_norm_weight.has_value() ? output_norm_weight->data_ptr() : nullptr;
  args.output = output.data_ptr();
  args.prefix_stride = stride_of(prefix, 0, hidden_size);
  args.delta_stride = own_delta.has_value() ? stride_of(*own_delta, 0, hidden_size) : 0;
  args.blocks_row_stride = stride_of(blocks, 1, hidden_size);
  args.blocks_token_stride = stride_of(blocks, 0, args.num_bank_rows * args.blocks_row_stride);
  args.output_stride = stride_of(output, 0, hidden_size);
  args.eps = static_cast<float>(options.eps);
  args.output_norm_eps = static_cast<float>(options.output_norm_eps);
  args.dtype = dtype_of(prefix);
  args.pdl = pdl_of(options.pdl);
  if (options.batch_invariant.has_value()) args.batch_invariant = *options.batch_invariant ? 1 : -1;
  if (options.plan.has_value()) {
    const std::vector<int64_t>& plan = *options.plan;
    STD_TORCH_CHECK(plan.size() == 4 || plan.size() == 5, "plan: expected 4 or 5 numbers, got ",
                    plan.size());
    args.kernel = index_of("plan", plan[0]);
    args.rows_per_stage = index_of("plan", plan[1]);
    args.ctas_per_sm = index_of("plan", plan[2]);
    args.cluster_size = index_of("plan", plan[3]);
    args.rows_in_flight = plan.size() == 5 ? index_of("plan", plan[4]) : 0;
  }
  attnres_status status = ATTNRES_OK;
  if (native) {
    args.device = prefix.get_device_index();
    status = attnres_forward(&args, current_cuda_stream(args.device));
  } else {
    status = attnres_forward_host(&args);
  }
  STD_TORCH_CHECK(status == ATTNRES_OK, attnres_last_error_message());
}

// A trace hands over the base of what is written, and where that lies in it: sizes, strides, and elements
// from the start of the base.
Tensor at_place(const char* name, const Tensor& base, const OptionalInts& place) {
  if (!place.has_value() || place->empty()) return base;
  const size_t rank = place->size() / 2;
  STD_TORCH_CHECK(place->size() == 2 * rank + 1, name,
                  "_place: expected an odd number of integers, got ", place->size());
  AtenTensorHandle view = nullptr;
  const AOTITorchError status =
      aoti_torch__reinterpret_tensor(base.get(), static_cast<int64_t>(rank), place->data(),
                                     place->data() + rank, place->back(), &view);
  STD_TORCH_CHECK(status == AOTI_TORCH_SUCCESS, name, "_place: PyTorch made no view of it");
  return Tensor(view);
}

Tensor run_into_new(const Tensor& prefix, const OptionalTensor& delta, const Tensor& blocks,
                    const Tensor& norm_weight, const Tensor& qk_weight,
                    const OptionalTensor& output_norm_weight, int64_t num_blocks,
                    int64_t block_write_idx, const Options& options) {
  Tensor output = torch::stable::new_empty(prefix, prefix.sizes());
  run(prefix, delta, blocks, norm_weight, qk_weight, output_norm_weight, num_blocks,
      block_write_idx, options, output);
  return output;
}

// The ops. Arguments are in the order of their schemas.

Tensor attn_res(Tensor prefix, Tensor blocks, Tensor norm_weight, Tensor qk_weight,
                OptionalTensor output_norm_weight, int64_t num_blocks, double eps,
                double output_norm_eps, OptionalString backend, std::string pdl, OptionalInts plan,
                OptionalBool batch_invariant) {
  return run_into_new(prefix, std::nullopt, blocks, norm_weight, qk_weight, output_norm_weight,
                      num_blocks, -1, {eps, output_norm_eps, backend, pdl, plan, batch_invariant});
}

Tensor attn_res_add_(Tensor prefix, Tensor delta, Tensor blocks, Tensor norm_weight,
                     Tensor qk_weight, OptionalTensor output_norm_weight, int64_t num_blocks,
                     double eps, double output_norm_eps, OptionalString backend, std::string pdl,
                     OptionalInts plan, OptionalBool batch_invariant, OptionalInts prefix_place) {
  return run_into_new(at_place("prefix", prefix, prefix_place), delta, blocks, norm_weight,
                      qk_weight, output_norm_weight, num_blocks, -1,
                      {eps, output_norm_eps, backend, pdl, plan, batch_invariant});
}

Tensor attn_res_write_(Tensor prefix, Tensor blocks, Tensor norm_weight, Tensor qk_weight,
                       OptionalTensor output_norm_weight, int64_t num_blocks,
                       int64_t block_write_idx, double eps, double output_norm_eps,
                       OptionalString backend, std::string pdl, OptionalInts plan,
                       OptionalBool batch_invariant, OptionalInts blocks_place) {
  return run_into_new(prefix, std::nullopt, at_place("blocks", blocks, blocks_place), norm_weight,
                      qk_weight, output_norm_weight, num_blocks, block_write_idx,
                      {eps, output_norm_eps, backend, pdl, plan, batch_invariant});
}

Tensor attn_res_(Tensor prefix, OptionalTensor delta, Tensor blocks, Tensor norm_weight,
                 Tensor qk_weight, OptionalTensor output_norm_weight, int64_t num_blocks,
                 int64_t block_write_idx, double eps, double output_norm_eps,
                 OptionalString backend, std::string pdl, OptionalInts plan,
                 OptionalBool batch_invariant, OptionalInts prefix_place,
                 OptionalInts blocks_place) {
  return run_into_new(at_place("prefix", prefix, prefix_place), delta,
                      at_place("blocks", blocks, blocks_place), norm_weight, qk_weight,
                      output_norm_weight, num_blocks, block_write_idx,
                      {eps, output_norm_eps, backend, pdl, plan, batch_invariant});
}

void attn_res_out_(Tensor prefix, OptionalTensor delta, Tensor blocks, Tensor norm_weight,
                   Tensor qk_weight, OptionalTensor output_norm_weight, int64_t num_blocks,
                   int64_t block_write_idx, Tensor out, double eps, double output_norm_eps,
                   OptionalString backend, std::string pdl, OptionalInts plan,
                   OptionalBool batch_invariant, OptionalInts prefix_place,
                   OptionalInts blocks_place, OptionalInts out_place) {
  run(at_place("prefix", prefix, prefix_place), delta, at_place("blocks", blocks, blocks_place),
      norm_weight, qk_weight, output_norm_weight, num_blocks, block_write_idx,
      {eps, output_norm_eps, backend, pdl, plan, batch_invariant}, at_place("out", out, out_place));
}

std::tuple<Tensor, Tensor, Tensor> attn_res_functional(
    Tensor prefix, OptionalTensor delta, Tensor blocks, Tensor norm_weight, Tensor qk_weight,
    OptionalTensor output_norm_weight, int64_t num_blocks, int64_t block_write_idx, double eps,
    double output_norm_eps, OptionalString backend, std::string pdl, OptionalInts plan,
    OptionalBool batch_invariant) {
  Tensor new_prefix = copy(prefix);
  Tensor new_blocks = copy(blocks);
  Tensor output = run_into_new(new_prefix, delta, new_blocks, norm_weight, qk_weight,
                               output_norm_weight, num_blocks, block_write_idx,
                               {eps, output_norm_eps, backend, pdl, plan, batch_invariant});
  return {output, new_prefix, new_blocks};
}

void implement(torch::stable::detail::StableLibrary& library) {
  library.impl("attn_res", TORCH_BOX(&attn_res));
  library.impl("attn_res_add_", TORCH_BOX(&attn_res_add_));
  library.impl("attn_res_write_", TORCH_BOX(&attn_res_write_));
  library.impl("attn_res_", TORCH_BOX(&attn_res_));
  library.impl("attn_res_out_", TORCH_BOX(&attn_res_out_));
  library.impl("attn_res_functional", TORCH_BOX(&attn_res_functional));
  library.impl("_copy", TORCH_BOX(&copy));
}

}  // namespace

#define WEIGHTS \
  "Tensor norm_weight, Tensor qk_weight, Tensor? output_norm_weight, SymInt num_blocks"
#define WRITE ", SymInt block_write_idx"
#define OPTIONS                                                                              \
  ", float eps=1e-5, float output_norm_eps=1e-5, str? backend=None, str pdl='wait', int[]? " \
  "plan=None"                                                                                \
  ", bool? batch_invariant=None"

#define PLACE(NAME) ", SymInt[]? " NAME "_place=None"

STABLE_TORCH_LIBRARY_FRAGMENT(libattnres, library) {
  library.def("attn_res(Tensor prefix, Tensor blocks, " WEIGHTS OPTIONS ") -> Tensor");
  library.def("attn_res_add_(Tensor(a!) prefix, Tensor delta, Tensor blocks, " WEIGHTS OPTIONS
                  PLACE("prefix") ") -> Tensor");
  library.def("attn_res_write_(Tensor prefix, Tensor(a!) blocks, " WEIGHTS WRITE OPTIONS PLACE(
      "blocks") ") -> Tensor");
  library.def("attn_res_(Tensor(a!) prefix, Tensor? delta, Tensor(b!) blocks, " WEIGHTS WRITE
              "=-1" OPTIONS PLACE("prefix") PLACE("blocks") ") -> Tensor");
  library.def("attn_res_out_(Tensor(a!) prefix, Tensor? delta, Tensor(b!) blocks, " WEIGHTS WRITE
              ", Tensor(c!) out" OPTIONS PLACE("prefix") PLACE("blocks") PLACE("out") ") -> ()");
  library.def("attn_res_functional(Tensor prefix, Tensor? delta, Tensor blocks, " WEIGHTS WRITE
              "=-1" OPTIONS ") -> (Tensor output, Tensor new_prefix, Tensor new_blocks)");
  library.def("_copy(Tensor rows) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(libattnres, CPU, library) { implement(library); }
STABLE_TORCH_LIBRARY_IMPL(libattnres, CUDA, library) { implement(library); }
