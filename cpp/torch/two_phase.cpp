// SPDX-License-Identifier: Apache-2.0
// The ops of libattnres_torch.so for the operator in two phases; schemas and semantics are those of
// python/libattnres/_two_phase_ops.py.
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "op_arguments.hpp"

namespace {

using namespace attnres_torch;

// A tensor of float32 logarithms, whose last dimension has a stride of 1.
void check_lse(const Tensor& lse, const char* first_name, const Tensor& first, int64_t rank) {
  STD_TORCH_CHECK(lse.dim() == rank, "lse: expected ", rank, " dimensions, got ", lse.dim());
  STD_TORCH_CHECK(lse.scalar_type() == ScalarType::Float, "lse: expected float32, got another");
  check_device("lse", lse, first_name, first);
  STD_TORCH_CHECK(lse.size(rank - 1) <= 1 || lse.stride(rank - 1) == 1,
                  "lse: expected last stride 1, got ", lse.stride(rank - 1));
}

void check_size(const char* name, int64_t got, int64_t expected, const char* what) {
  STD_TORCH_CHECK(got == expected, name, ": expected ", expected, " ", what, ", got ", got);
}

int32_t batch_invariant_of(const OptionalBool& batch_invariant) {
  return batch_invariant.has_value() ? (*batch_invariant ? 1 : -1) : 0;
}

void finish(attnres_status status) {
  STD_TORCH_CHECK(status == ATTNRES_OK, attnres_last_error_message());
}

// The first phase.

void check_bank_inputs(const Tensor& blocks, const Tensor& norm_weights, const Tensor& qk_weights) {
  STD_TORCH_CHECK(blocks.dim() == 3, "blocks: expected shape [T, R, H], got ", blocks.dim(),
                  " dimensions");
  check_like("blocks", blocks, "blocks", blocks, 3);
  check_like("norm_weights", norm_weights, "blocks", blocks, 2);
  check_like("qk_weights", qk_weights, "blocks", blocks, 2);
  check_size("qk_weights", qk_weights.size(0), norm_weights.size(0), "rows as norm_weights has");
}

void run_bank(const Tensor& blocks, int64_t num_blocks, const Tensor& norm_weights,
              const Tensor& qk_weights, const Tensor& bank, const Tensor& lse,
              const Options& options) {
  check_bank_inputs(blocks, norm_weights, qk_weights);
  const int64_t num_sites = norm_weights.size(0), num_tokens = blocks.size(0);
  check_like("bank", bank, "blocks", blocks, 3, true);
  check_lse(lse, "blocks", blocks, 2);
  check_size("bank", bank.size(0), num_sites, "call sites as norm_weights has");
  check_size("bank", bank.size(1), num_tokens, "tokens as blocks has");
  check_size("lse", lse.size(0), num_sites, "call sites as norm_weights has");
  check_size("lse", lse.size(1), num_tokens, "tokens as blocks has");
  const bool native = is_native(blocks, options, "blocks");

  attnres_bank_args args = ATTNRES_BANK_ARGS_INIT;
  const int64_t hidden_size = blocks.size(2);
  args.num_bank_tokens = num_tokens;
  args.num_bank_rows = blocks.size(1);
  args.hidden_size = hidden_size;
  args.num_blocks = index_of("num_blocks", num_blocks);
  args.num_sites = index_of("norm_weights", num_sites);
  args.blocks = blocks.data_ptr();
  args.norm_weights = norm_weights.data_ptr();
  args.qk_weights = qk_weights.data_ptr();
  args.bank = bank.data_ptr();
  args.lse = static_cast<float*>(lse.data_ptr());
  args.blocks_row_stride = stride_of(blocks, 1, hidden_size);
  args.blocks_token_stride = stride_of(blocks, 0, args.num_bank_rows * args.blocks_row_stride);
  args.norm_weights_stride = stride_of(norm_weights, 0, hidden_size);
  args.qk_weights_stride = stride_of(qk_weights, 0, hidden_size);
  args.bank_token_stride = stride_of(bank, 1, hidden_size);
  args.bank_site_stride = stride_of(bank, 0, num_tokens * args.bank_token_stride);
  args.lse_stride = stride_of(lse, 0, num_tokens);
  args.eps = static_cast<float>(options.eps);
  args.dtype = dtype_of(blocks, "blocks");
  args.float32_bank = bank.scalar_type() == blocks.scalar_type() ? 0 : 1;
  args.pdl = pdl_of(options.pdl);
  args.batch_invariant = batch_invariant_of(options.batch_invariant);
  if (native) {
    args.device = blocks.get_device_index();
    finish(attnres_bank(&args, current_cuda_stream(args.device)));
  } else {
    finish(attnres_bank_host(&args));
  }
}

std::tuple<Tensor, Tensor> attn_res_bank(Tensor blocks, int64_t num_blocks, Tensor norm_weights,
                                         Tensor qk_weights, double eps,
                                         std::optional<ScalarType> bank_dtype,
                                         OptionalString backend, std::string pdl,
                                         OptionalBool batch_invariant) {
  check_bank_inputs(blocks, norm_weights, qk_weights);
  const int64_t sizes[] = {norm_weights.size(0), blocks.size(0), blocks.size(2)};
  const ScalarType dtype = bank_dtype.value_or(blocks.scalar_type());
  STD_TORCH_CHECK(dtype == blocks.scalar_type() || dtype == ScalarType::Float,
                  "bank_dtype: expected the dtype of blocks or float32, got another");
  Tensor bank = torch::stable::new_empty(blocks, {sizes, 3}, dtype);
  Tensor lse = torch::stable::new_empty(blocks, {sizes, 2}, ScalarType::Float);
  run_bank(blocks, num_blocks, norm_weights, qk_weights, bank, lse,
           {eps, 0, backend, pdl, std::nullopt, batch_invariant});
  return {bank, lse};
}

void attn_res_bank_out_(Tensor blocks, int64_t num_blocks, Tensor norm_weights, Tensor qk_weights,
                        Tensor bank, Tensor lse, double eps, OptionalString backend,
                        std::string pdl, OptionalBool batch_invariant, OptionalInts bank_place,
                        OptionalInts lse_place) {
  run_bank(blocks, num_blocks, norm_weights, qk_weights, at_place("bank", bank, bank_place),
           at_place("lse", lse, lse_place), {eps, 0, backend, pdl, std::nullopt, batch_invariant});
}

// The second phase. What every op of it has after its prefix and delta.

struct Sources {
  const Tensor& bank;
  const Tensor& lse;
  const Tensor& norm_weight;
  const Tensor& qk_weight;
  const OptionalTensor& output_norm_weight;
};

void run_merge(const Tensor& prefix, const OptionalTensor& delta, const Sources& sources,
               const OptionalTensor& blocks, int64_t block_write_idx, const Options& options,
               const Tensor& output) {
  STD_TORCH_CHECK(prefix.dim() == 2, "prefix: expected shape [M, H], got ", prefix.dim(),
                  " dimensions");
  check_like("prefix", prefix, "prefix", prefix, 2);
  check_like("bank", sources.bank, "prefix", prefix, 2, true);
  check_lse(sources.lse, "prefix", prefix, 1);
  check_size("lse", sources.lse.size(0), sources.bank.size(0), "tokens as bank has");
  check_like("norm_weight", sources.norm_weight, "prefix", prefix, 1);
  check_like("qk_weight", sources.qk_weight, "prefix", prefix, 1);
  if (sources.output_norm_weight.has_value()) {
    check_like("output_norm_weight", *sources.output_norm_weight, "prefix", prefix, 1);
  }
  const int64_t num_tokens = prefix.size(0);
  check_like("out", output, "prefix", prefix, 2);
  check_size("out", output.size(0), num_tokens, "rows as prefix has");
  if (delta.has_value()) {
    check_like("delta", *delta, "prefix", prefix, 2);
    check_size("delta", delta->size(0), num_tokens, "rows as prefix has");
  }
  const bool writes = block_write_idx != -1;
  STD_TORCH_CHECK(!writes || blocks.has_value(),
                  "block_write_idx: expected -1 without blocks, got ", block_write_idx);
  if (writes) {
    check_like("blocks", *blocks, "prefix", prefix, 3);
    check_size("blocks", blocks->size(0), sources.bank.size(0), "tokens as bank has");
  }
  const bool native = is_native(prefix, options);
  // A compiler drops a copy whose source nobody else reads, so that what was a copy may arrive as its source.
  const bool aliases = delta.has_value() && is_same_memory(*delta, prefix);
  const OptionalTensor own_delta = aliases ? OptionalTensor(copy(*delta)) : delta;

  attnres_merge_args args = ATTNRES_MERGE_ARGS_INIT;
  const int64_t hidden_size = prefix.size(1);
  args.num_tokens = num_tokens;
  args.num_bank_tokens = sources.bank.size(0);
  args.hidden_size = hidden_size;
  args.block_write_idx = index_of("block_write_idx", block_write_idx);
  args.float32_bank = sources.bank.scalar_type() == prefix.scalar_type() ? 0 : 1;
  args.prefix = prefix.data_ptr();
  args.delta = own_delta.has_value() ? own_delta->data_ptr() : nullptr;
  args.bank = sources.bank.data_ptr();
  args.lse = static_cast<const float*>(sources.lse.data_ptr());
  args.norm_weight = sources.norm_weight.data_ptr();
  args.qk_weight = sources.qk_weight.data_ptr();
  args.output_norm_weight =
      sources.output_norm_weight.has_value() ? sources.output_norm_weight->data_ptr() : nullptr;
  args.output = output.data_ptr();
  args.prefix_stride = stride_of(prefix, 0, hidden_size);
  args.delta_stride = own_delta.has_value() ? stride_of(*own_delta, 0, hidden_size) : 0;
  args.bank_stride = stride_of(sources.bank, 0, hidden_size);
  args.output_stride = stride_of(output, 0, hidden_size);
  if (writes) {
    args.blocks = blocks->data_ptr();
    args.num_bank_rows = blocks->size(1);
    args.blocks_row_stride = stride_of(*blocks, 1, hidden_size);
    args.blocks_token_stride = stride_of(*blocks, 0, args.num_bank_rows * args.blocks_row_stride);
  }
  args.eps = static_cast<float>(options.eps);
  args.output_norm_eps = static_cast<float>(options.output_norm_eps);
  args.dtype = dtype_of(prefix);
  args.pdl = pdl_of(options.pdl);
  args.batch_invariant = batch_invariant_of(options.batch_invariant);
  if (native) {
    args.device = prefix.get_device_index();
    finish(attnres_merge(&args, current_cuda_stream(args.device)));
  } else {
    finish(attnres_merge_host(&args));
  }
}

Tensor merge_into_new(const Tensor& prefix, const OptionalTensor& delta, const Sources& sources,
                      const OptionalTensor& blocks, int64_t block_write_idx,
                      const Options& options) {
  Tensor output = torch::stable::new_empty(prefix, prefix.sizes());
  run_merge(prefix, delta, sources, blocks, block_write_idx, options, output);
  return output;
}

// The ops. Arguments are in the order of their schemas.

Tensor attn_res_merge(Tensor prefix, Tensor bank, Tensor lse, Tensor norm_weight, Tensor qk_weight,
                      OptionalTensor output_norm_weight, double eps, double output_norm_eps,
                      OptionalString backend, std::string pdl, OptionalBool batch_invariant) {
  return merge_into_new(prefix, std::nullopt,
                        {bank, lse, norm_weight, qk_weight, output_norm_weight}, std::nullopt, -1,
                        {eps, output_norm_eps, backend, pdl, std::nullopt, batch_invariant});
}

Tensor attn_res_merge_add_(Tensor prefix, Tensor delta, Tensor bank, Tensor lse, Tensor norm_weight,
                           Tensor qk_weight, OptionalTensor output_norm_weight, double eps,
                           double output_norm_eps, OptionalString backend, std::string pdl,
                           OptionalBool batch_invariant, OptionalInts prefix_place) {
  return merge_into_new(at_place("prefix", prefix, prefix_place), delta,
                        {bank, lse, norm_weight, qk_weight, output_norm_weight}, std::nullopt, -1,
                        {eps, output_norm_eps, backend, pdl, std::nullopt, batch_invariant});
}

Tensor attn_res_merge_write_(Tensor prefix, Tensor bank, Tensor lse, Tensor norm_weight,
                             Tensor qk_weight, OptionalTensor output_norm_weight, Tensor blocks,
                             int64_t block_write_idx, double eps, double output_norm_eps,
                             OptionalString backend, std::string pdl, OptionalBool batch_invariant,
                             OptionalInts blocks_place) {
  return merge_into_new(prefix, std::nullopt,
                        {bank, lse, norm_weight, qk_weight, output_norm_weight},
                        at_place("blocks", blocks, blocks_place), block_write_idx,
                        {eps, output_norm_eps, backend, pdl, std::nullopt, batch_invariant});
}

Tensor attn_res_merge_(Tensor prefix, OptionalTensor delta, Tensor bank, Tensor lse,
                       Tensor norm_weight, Tensor qk_weight, OptionalTensor output_norm_weight,
                       Tensor blocks, int64_t block_write_idx, double eps, double output_norm_eps,
                       OptionalString backend, std::string pdl, OptionalBool batch_invariant,
                       OptionalInts prefix_place, OptionalInts blocks_place) {
  return merge_into_new(at_place("prefix", prefix, prefix_place), delta,
                        {bank, lse, norm_weight, qk_weight, output_norm_weight},
                        at_place("blocks", blocks, blocks_place), block_write_idx,
                        {eps, output_norm_eps, backend, pdl, std::nullopt, batch_invariant});
}

void attn_res_merge_out_(Tensor prefix, OptionalTensor delta, Tensor bank, Tensor lse,
                         Tensor norm_weight, Tensor qk_weight, OptionalTensor output_norm_weight,
                         OptionalTensor blocks, int64_t block_write_idx, Tensor out, double eps,
                         double output_norm_eps, OptionalString backend, std::string pdl,
                         OptionalBool batch_invariant, OptionalInts prefix_place,
                         OptionalInts blocks_place, OptionalInts out_place) {
  const OptionalTensor placed =
      blocks.has_value() ? OptionalTensor(at_place("blocks", *blocks, blocks_place)) : blocks;
  run_merge(at_place("prefix", prefix, prefix_place), delta,
            {bank, lse, norm_weight, qk_weight, output_norm_weight}, placed, block_write_idx,
            {eps, output_norm_eps, backend, pdl, std::nullopt, batch_invariant},
            at_place("out", out, out_place));
}

void implement(torch::stable::detail::StableLibrary& library) {
  library.impl("attn_res_bank", TORCH_BOX(&attn_res_bank));
  library.impl("attn_res_bank_out_", TORCH_BOX(&attn_res_bank_out_));
  library.impl("attn_res_merge", TORCH_BOX(&attn_res_merge));
  library.impl("attn_res_merge_add_", TORCH_BOX(&attn_res_merge_add_));
  library.impl("attn_res_merge_write_", TORCH_BOX(&attn_res_merge_write_));
  library.impl("attn_res_merge_", TORCH_BOX(&attn_res_merge_));
  library.impl("attn_res_merge_out_", TORCH_BOX(&attn_res_merge_out_));
}

}  // namespace

#define BANK "Tensor blocks, SymInt num_blocks, Tensor norm_weights, Tensor qk_weights"
#define MERGE \
  "Tensor bank, Tensor lse, Tensor norm_weight, Tensor qk_weight, Tensor? output_norm_weight"
#define DISPATCH ", str? backend=None, str pdl='wait', bool? batch_invariant=None"
#define OPTIONS ", float eps=1e-5, float output_norm_eps=1e-5" DISPATCH
#define PLACE(NAME) ", SymInt[]? " NAME "_place=None"

STABLE_TORCH_LIBRARY_FRAGMENT(libattnres, library) {
  library.def("attn_res_bank(" BANK ", float eps=1e-5, ScalarType? bank_dtype=None" DISPATCH
              ") -> (Tensor bank, Tensor lse)");
  library.def("attn_res_bank_out_(" BANK
              ", Tensor(a!) bank, Tensor(b!) lse, float eps=1e-5" DISPATCH PLACE("bank")
                  PLACE("lse") ") -> ()");
  library.def("attn_res_merge(Tensor prefix, " MERGE OPTIONS ") -> Tensor");
  library.def("attn_res_merge_add_(Tensor(a!) prefix, Tensor delta, " MERGE OPTIONS PLACE(
      "prefix") ") -> Tensor");
  library.def("attn_res_merge_write_(Tensor prefix, " MERGE
              ", Tensor(a!) blocks, SymInt block_write_idx" OPTIONS PLACE("blocks") ") -> Tensor");
  library.def("attn_res_merge_(Tensor(a!) prefix, Tensor? delta, " MERGE
              ", Tensor(b!) blocks, SymInt block_write_idx" OPTIONS PLACE("prefix")
                  PLACE("blocks") ") -> Tensor");
  library.def("attn_res_merge_out_(Tensor(a!) prefix, Tensor? delta, " MERGE
              ", Tensor(b!)? blocks, SymInt block_write_idx, Tensor(c!) out" OPTIONS PLACE("prefix")
                  PLACE("blocks") PLACE("out") ") -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(libattnres, CPU, library) { implement(library); }
STABLE_TORCH_LIBRARY_IMPL(libattnres, CUDA, library) { implement(library); }
