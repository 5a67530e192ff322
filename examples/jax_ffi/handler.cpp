// SPDX-License-Identifier: Apache-2.0
// Attention Residuals for XLA: the handlers that JAX's foreign function interface registers, over
// attnres.h. XLA has a calling convention of its own, so the C function cannot be registered itself.
//
// Arguments: prefix, blocks, norm_weight, qk_weight, then delta and output_norm_weight where there
// are. Results: the output, then prefix with a delta and blocks with a write; both must be aliased
// with the arguments.
#include <attnres/attnres.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// What differs between calls, beside shapes.
struct Options {
  int32_t num_blocks;
  int32_t block_write_idx;
  float eps;
  float output_norm_eps;
  bool has_delta;
  bool has_output_norm;
};

bool to_attnres(ffi::DataType type, int32_t* dtype) {
  switch (type) {
    case ffi::DataType::BF16:
      *dtype = ATTNRES_BFLOAT16;
      return true;
    case ffi::DataType::F16:
      *dtype = ATTNRES_FLOAT16;
      return true;
    case ffi::DataType::F32:
      *dtype = ATTNRES_FLOAT32;
      return true;
    default:
      return false;
  }
}

template <typename Call>
ffi::Error forward(Call call, const Options& options, const ffi::AnyBuffer& prefix,
                   const ffi::AnyBuffer& blocks, const ffi::AnyBuffer& norm_weight,
                   const ffi::AnyBuffer& qk_weight, const ffi::RemainingArgs& optional,
                   const ffi::RemainingRets& results) {
  if (prefix.dimensions().size() != 2 || blocks.dimensions().size() != 3) {
    return ffi::Error::InvalidArgument("prefix, blocks: expected [M, H] and [T, R, H]");
  }
  attnres_forward_args args = ATTNRES_FORWARD_ARGS_INIT;
  if (!to_attnres(prefix.element_type(), &args.dtype)) {
    return ffi::Error::InvalidArgument("prefix: expected bfloat16, float16 or float32");
  }
  args.num_tokens = prefix.dimensions()[0];
  args.hidden_size = prefix.dimensions()[1];
  args.num_bank_tokens = blocks.dimensions()[0];
  args.num_bank_rows = blocks.dimensions()[1];
  args.num_blocks = options.num_blocks;
  args.block_write_idx = options.block_write_idx;
  args.eps = options.eps;
  args.output_norm_eps = options.output_norm_eps;
  args.prefix = prefix.untyped_data();
  args.blocks = blocks.untyped_data();
  args.norm_weight = norm_weight.untyped_data();
  args.qk_weight = qk_weight.untyped_data();
  size_t next = 0;
  if (options.has_delta) args.delta = optional.get<ffi::AnyBuffer>(next++)->untyped_data();
  if (options.has_output_norm) {
    args.output_norm_weight = optional.get<ffi::AnyBuffer>(next++)->untyped_data();
  }
  args.output = results.get<ffi::AnyBuffer>(0).value()->untyped_data();
  args.prefix_stride = args.delta_stride = args.output_stride = args.hidden_size;
  args.blocks_row_stride = args.hidden_size;
  args.blocks_token_stride = args.num_bank_rows * args.hidden_size;

  next = 1;
  if (options.has_delta &&
      results.get<ffi::AnyBuffer>(next++).value()->untyped_data() != args.prefix) {
    return ffi::Error::InvalidArgument("prefix: expected a result that is aliased with it");
  }
  if (options.block_write_idx >= 0 &&
      results.get<ffi::AnyBuffer>(next++).value()->untyped_data() != args.blocks) {
    return ffi::Error::InvalidArgument("blocks: expected a result that is aliased with it");
  }
  if (call(args) != ATTNRES_OK) return ffi::Error::InvalidArgument(attnres_last_error_message());
  return ffi::Error::Success();
}

ffi::Error forward_host(int32_t num_blocks, int32_t block_write_idx, float eps,
                        float output_norm_eps, bool has_delta, bool has_output_norm,
                        ffi::AnyBuffer prefix, ffi::AnyBuffer blocks, ffi::AnyBuffer norm_weight,
                        ffi::AnyBuffer qk_weight, ffi::RemainingArgs optional,
                        ffi::RemainingRets results) {
  return forward([](const attnres_forward_args& args) { return attnres_forward_host(&args); },
                 {num_blocks, block_write_idx, eps, output_norm_eps, has_delta, has_output_norm},
                 prefix, blocks, norm_weight, qk_weight, optional, results);
}

ffi::Error forward_cuda(CUstream_st* stream, int32_t num_blocks, int32_t block_write_idx, float eps,
                        float output_norm_eps, bool has_delta, bool has_output_norm,
                        ffi::AnyBuffer prefix, ffi::AnyBuffer blocks, ffi::AnyBuffer norm_weight,
                        ffi::AnyBuffer qk_weight, ffi::RemainingArgs optional,
                        ffi::RemainingRets results) {
  return forward(
      [stream](const attnres_forward_args& args) { return attnres_forward(&args, stream); },
      {num_blocks, block_write_idx, eps, output_norm_eps, has_delta, has_output_norm}, prefix,
      blocks, norm_weight, qk_weight, optional, results);
}

template <typename Binding>
auto with_arguments(Binding binding) {
  return std::move(binding)
      .template Attr<int32_t>("num_blocks")
      .template Attr<int32_t>("block_write_idx")
      .template Attr<float>("eps")
      .template Attr<float>("output_norm_eps")
      .template Attr<bool>("has_delta")
      .template Attr<bool>("has_output_norm")
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .RemainingArgs()
      .RemainingRets();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(AttnResForwardHost, forward_host, with_arguments(ffi::Ffi::Bind()));

// Capturable: XLA may make the call part of a CUDA graph.
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    AttnResForwardCuda, forward_cuda,
    with_arguments(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<CUstream_st*>>()),
    {ffi::Traits::kCmdBufferCompatible});
