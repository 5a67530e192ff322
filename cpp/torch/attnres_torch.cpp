// SPDX-License-Identifier: Apache-2.0
// libattnres_torch.so: the ops torch.ops.libattnres.* without Python, for AOTInductor packages that a C++
// program runs. Schemas and semantics are those of python/libattnres/_ops.py; the kernels are native on
// CUDA and the host backend on CPU, with no fallback. Only PyTorch's stable ABI (>= 2.10) is used.
//
// Load it after libtorch, by linking or dlopen, before the package that calls the ops. A process that
// imports libattnres in Python has the ops already and must not load it: PyTorch refuses the second definition.
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "op_arguments.hpp"

namespace {

using namespace attnres_torch;

void run(const Tensor& prefix, const OptionalTensor& delta, const Tensor& blocks,
         const Tensor& norm_weight, const Tensor& qk_weight,
         const OptionalTensor& output_norm_weight, int64_t num_blocks, int64_t block_write_idx,
         const Options& options, const Tensor& output) {
  STD_TORCH_CHECK(prefix.dim() == 2, "prefix: expected shape [M, H], got ", prefix.dim(),
                  " dimensions");
  check_like("prefix", prefix, "prefix", prefix, 2);
  check_like("blocks", blocks, "prefix", prefix, 3);
  check_like("out", output, "prefix", prefix, 2);
  check_like("norm_weight", norm_weight, "prefix", prefix, 1);
  check_like("qk_weight", qk_weight, "prefix", prefix, 1);
  if (output_norm_weight.has_value()) {
    check_like("output_norm_weight", *output_norm_weight, "prefix", prefix, 1);
  }
  const int64_t num_tokens = prefix.size(0);
  STD_TORCH_CHECK(output.size(0) == num_tokens, "out: expected ", num_tokens,
                  " rows as prefix has, got ", output.size(0));
  if (delta.has_value()) {
    check_like("delta", *delta, "prefix", prefix, 2);
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
