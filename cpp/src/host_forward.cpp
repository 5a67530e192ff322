// SPDX-License-Identifier: Apache-2.0
#include "host_forward.hpp"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace attnres {
namespace {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

float load(float x) { return x; }
float load(BFloat16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }
float load(Float16 x) {
  const uint32_t magnitude = x.bits & 0x7fffu;
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  float value;
  if (magnitude >= 0x7c00u) {
    value = std::bit_cast<float>(0x7f800000u | (magnitude & 0x3ffu) << 13);
  } else if (magnitude >= 0x400u) {
    value = std::bit_cast<float>((magnitude << 13) + (112u << 23));
  } else {
    value = static_cast<float>(magnitude) * 0x1p-24f;
  }
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
}

void store(float& to, float x) { to = x; }
void store(BFloat16& to, float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  to.bits = std::isnan(x) ? 0x7fff : static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}
void store(Float16& to, float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7fffu;
  } else if (magnitude >= 0x477ff000u) {
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {
    half = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1)) >> 13;
  }
  to.bits = static_cast<uint16_t>(sign | half);
}

template <typename T>
void forward(const attnres_forward_args& args) {
  const int64_t h_size = args.hidden_size;
  const auto* norm_weight = static_cast<const T*>(args.norm_weight);
  const auto* qk_weight = static_cast<const T*>(args.qk_weight);
  const auto* output_norm_weight = static_cast<const T*>(args.output_norm_weight);
  const int64_t per_entry = args.num_tokens / args.num_bank_tokens;
  std::vector<float> query(h_size);
  std::vector<float> mixed(h_size);
  for (int64_t h = 0; h < h_size; ++h) query[h] = load(norm_weight[h]) * load(qk_weight[h]);

  for (int64_t m = 0; m < args.num_tokens; ++m) {
    T* prefix = static_cast<T*>(args.prefix) + m * args.prefix_stride;
    T* entry = static_cast<T*>(args.blocks) + m / per_entry * args.blocks_token_stride;
    T* output = static_cast<T*>(args.output) + m * args.output_stride;
    if (args.delta != nullptr) {
      const T* delta = static_cast<const T*>(args.delta) + m * args.delta_stride;
      for (int64_t h = 0; h < h_size; ++h) store(prefix[h], load(prefix[h]) + load(delta[h]));
    }
    const int n = args.num_blocks + 1;
    const T* sources[9];
    float weights[9] = {1.0f};
    for (int i = 0; i < n - 1; ++i) sources[i] = entry + i * args.blocks_row_stride;
    sources[n - 1] = prefix;
    if (n > 1) {
      float maximum = -INFINITY;
      for (int i = 0; i < n; ++i) {
        double squares = 0;
        double dot = 0;
        for (int64_t h = 0; h < h_size; ++h) {
          const double v = load(sources[i][h]);
          squares += v * v;
          dot += v * query[h];
        }
        weights[i] = static_cast<float>(dot / std::sqrt(squares / h_size + args.eps));
        maximum = std::fmax(maximum, weights[i]);
      }
      float sum = 0;
      for (int i = 0; i < n; ++i) sum += weights[i] = std::exp(weights[i] - maximum);
      for (int i = 0; i < n; ++i) weights[i] /= sum;
    }
    double squares = 0;
    for (int64_t h = 0; h < h_size; ++h) {
      float value = 0;
      for (int i = 0; i < n; ++i) value += weights[i] * load(sources[i][h]);
      mixed[h] = value;
      squares += static_cast<double>(value) * value;
    }
    if (output_norm_weight != nullptr) {
      const float scale =
          static_cast<float>(1.0 / std::sqrt(squares / h_size + args.output_norm_eps));
      for (int64_t h = 0; h < h_size; ++h) {
        store(output[h], mixed[h] * scale * load(output_norm_weight[h]));
      }
    } else {
      for (int64_t h = 0; h < h_size; ++h) store(output[h], mixed[h]);
    }
    if (args.block_write_idx >= 0) {
      std::memcpy(entry + args.block_write_idx * args.blocks_row_stride, prefix, h_size * sizeof(T));
    }
  }
}

}  // namespace

void host_forward(const attnres_forward_args& args) {
  switch (args.dtype) {
    case ATTNRES_BFLOAT16: return forward<BFloat16>(args);
    case ATTNRES_FLOAT16: return forward<Float16>(args);
    default: return forward<float>(args);
  }
}

}  // namespace attnres
