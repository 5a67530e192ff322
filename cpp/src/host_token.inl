// SPDX-License-Identifier: Apache-2.0
// Included by one translation unit per target, which defines ATTNRES_HOST_LANES (floats per
// vector), ATTNRES_HOST_TABLE and ATTNRES_HOST_TARGET. Everything has internal linkage: the same
// template for two targets must never be merged.
//
// A row is walked in chunks of two vectors. For 16-bit types the first vector holds the even
// elements and the second the odd ones, which makes widening and narrowing a shift and a mask;
// scratch rows keep that order, so it never has to be undone. Sums live in lanes that depend on the
// position in the row alone, so a token's bits do not depend on how the work was divided.

namespace attnres {
namespace {

constexpr int kLanes = ATTNRES_HOST_LANES;
constexpr int kChunk = 2 * kLanes;
static_assert(kScratchFloats % kChunk == 0, "a scratch row must hold whole chunks");

// Vectors of the compiler's own, so that one source serves every target; unaligned and aliasing
// access goes through memcpy.
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef int32_t Integers __attribute__((vector_size(4 * kLanes)));

#define ATTNRES_INLINE [[gnu::always_inline]] inline

struct Pair {
  Floats even;
  Floats odd;
};

ATTNRES_INLINE Words select(Integers mask, Words yes, Words no) {
  return (yes & (Words)mask) | (no & ~(Words)mask);
}

ATTNRES_INLINE Words load_words(const void* from) {
  Words words;
  std::memcpy(&words, from, sizeof(words));
  return words;
}

ATTNRES_INLINE Floats load_floats(const float* from) {
  Floats floats;
  std::memcpy(&floats, from, sizeof(floats));
  return floats;
}

// One vector at a time: GCC copies a whole Pair through the stack.
ATTNRES_INLINE void store_floats(float* to, Floats floats) {
  std::memcpy(to, &floats, sizeof(floats));
}

// Each element type: one chunk from memory to float32 and, rounded to nearest even, back.

struct BFloat16 {
  uint16_t bits;

  ATTNRES_INLINE static Pair load(const BFloat16* from) {
    const Words words = load_words(from);
    return {(Floats)(words << 16), (Floats)(words & 0xffff0000u)};
  }

  ATTNRES_INLINE static void store(BFloat16* to, const Pair& pair) {
    const Words words = (rounded(pair.even) >> 16) | (rounded(pair.odd) & 0xffff0000u);
    std::memcpy(to, &words, sizeof(words));
  }

 private:
  // The result is in the upper half. NaN becomes 0x7fff, the NaN of the GPUs.
  ATTNRES_INLINE static Words rounded(Floats x) {
    const Words bits = (Words)x;
    return select(x != x, Words{} + 0x7fff0000u, bits + 0x7fffu + ((bits >> 16) & 1u));
  }
};

struct Float16 {
  uint16_t bits;

  ATTNRES_INLINE static Pair load(const Float16* from) {
    const Words words = load_words(from);
    return {widened(words & 0xffffu), widened(words >> 16)};
  }

  ATTNRES_INLINE static void store(Float16* to, const Pair& pair) {
    const Words words = narrowed(pair.even) | (narrowed(pair.odd) << 16);
    std::memcpy(to, &words, sizeof(words));
  }

 private:
  static constexpr uint32_t kRebias = (127 - 15) << 23;  // between the two exponents

  ATTNRES_INLINE static Floats widened(Words half) {
    const Words magnitude = half & 0x7fffu;
    const Integers ordered = (Integers)magnitude;
    const Words normal = (magnitude << 13) + kRebias;
    const Words subnormal = (Words)(__builtin_convertvector(ordered, Floats) * 0x1p-24f);
    const Words special =
        normal + kRebias;  // Inf and NaN: from the top exponent to the top exponent
    const Words finite = select(ordered < 0x400, subnormal, normal);
    return (Floats)(select(ordered >= 0x7c00, special, finite) | ((half & 0x8000u) << 16));
  }

  ATTNRES_INLINE static Words narrowed(Floats x) {
    const Words bits = (Words)x;
    const Words magnitude = bits & 0x7fffffffu;
    const Integers ordered = (Integers)magnitude;
    const Words normal = (magnitude - kRebias + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    // Adding 0.5 leaves the result's bits at the bottom of the mantissa, rounded by the addition.
    const Words subnormal = (Words)((Floats)magnitude + 0.5f) - 0x3f000000u;
    Words half = select(ordered < 0x38800000, subnormal, normal);
    half = select(ordered >= 0x477ff000, Words{} + 0x7c00u, half);
    half = select(ordered > 0x7f800000, Words{} + 0x7fffu, half);
    return half | ((bits >> 16) & 0x8000u);
  }
};

struct Float32 {
  float value;

  ATTNRES_INLINE static Pair load(const Float32* from) {
    return {load_floats(&from->value), load_floats(&from[kLanes].value)};
  }

  ATTNRES_INLINE static void store(Float32* to, const Pair& pair) {
    store_floats(&to->value, pair.even);
    store_floats(&to[kLanes].value, pair.odd);
  }
};

ATTNRES_INLINE Pair load_scratch(const float* from) {
  return {load_floats(from), load_floats(from + kLanes)};
}

ATTNRES_INLINE void store_scratch(float* to, const Pair& pair) {
  store_floats(to, pair.even);
  store_floats(to + kLanes, pair.odd);
}

// The last, partial chunk of a row goes through a zero-padded copy.
template <typename T>
ATTNRES_INLINE Pair load_tail(const T* from, int64_t count) {
  T padded[kChunk] = {};
  std::memcpy(padded, from, count * sizeof(T));
  return T::load(padded);
}

template <typename T>
ATTNRES_INLINE void store_tail(T* to, const Pair& pair, int64_t count) {
  T padded[kChunk];
  T::store(padded, pair);
  std::memcpy(to, padded, count * sizeof(T));
}

// Float32 rows beside rows of T: chunks come in the order of T's vectors.
template <typename T>
struct Wide {
  float value;

  ATTNRES_INLINE static Pair load(const Wide* from) {
    float even[kLanes];
    float odd[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      even[lane] = from[2 * lane].value;
      odd[lane] = from[2 * lane + 1].value;
    }
    return {load_floats(even), load_floats(odd)};
  }

  ATTNRES_INLINE static void store(Wide* to, const Pair& pair) {
    float even[kLanes];
    float odd[kLanes];
    store_floats(even, pair.even);
    store_floats(odd, pair.odd);
    for (int lane = 0; lane < kLanes; ++lane) {
      to[2 * lane].value = even[lane];
      to[2 * lane + 1].value = odd[lane];
    }
  }
};
template <>
struct Wide<Float32> : Float32 {
  ATTNRES_INLINE static Pair load(const Wide* from) { return Float32::load(from); }
  ATTNRES_INLINE static void store(Wide* to, const Pair& pair) { Float32::store(to, pair); }
};

ATTNRES_INLINE float sum_of_lanes(const Pair& pair) {
  float lanes[kLanes];
  const Floats both = pair.even + pair.odd;
  std::memcpy(lanes, &both, sizeof(lanes));
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

// What a row contributes to its score.
struct RowSums {
  float squares;
  float dot;

  float score(int64_t hidden_size, float eps) const {
    return dot / std::sqrt(squares / static_cast<float>(hidden_size) + eps);
  }
};

struct RowLanes {
  Pair squares{};
  Pair dot{};

  ATTNRES_INLINE void add(const Pair& v, const Pair& q) {
    squares.even += v.even * v.even;
    squares.odd += v.odd * v.odd;
    dot.even += v.even * q.even;
    dot.odd += v.odd * q.odd;
  }

  ATTNRES_INLINE RowSums total() const { return {sum_of_lanes(squares), sum_of_lanes(dot)}; }
};

// ROWS rows at once: they share the query's chunk and hide each other's latency.
template <typename T, int ROWS>
void measure_rows(const T* const* rows, const float* query, int64_t hidden_size, RowSums* sums) {
  RowLanes lanes[ROWS];
  int64_t h = 0;
  for (; h + kChunk <= hidden_size; h += kChunk) {
    const Pair q = load_scratch(query + h);
    for (int row = 0; row < ROWS; ++row) lanes[row].add(T::load(rows[row] + h), q);
  }
  if (h < hidden_size) {
    const Pair q = load_scratch(query + h);
    for (int row = 0; row < ROWS; ++row)
      lanes[row].add(load_tail(rows[row] + h, hidden_size - h), q);
  }
  for (int row = 0; row < ROWS; ++row) sums[row] = lanes[row].total();
}

template <typename T>
void measure_bank(const T* const* rows, int num_rows, const float* query, int64_t hidden_size,
                  RowSums* sums) {
  int row = 0;
  for (; row + 3 <= num_rows; row += 3) {
    measure_rows<T, 3>(rows + row, query, hidden_size, sums + row);
  }
  if (num_rows - row == 2) measure_rows<T, 2>(rows + row, query, hidden_size, sums + row);
  if (num_rows - row == 1) measure_rows<T, 1>(rows + row, query, hidden_size, sums + row);
}

// prefix <- p = round(prefix + delta), and the sums of p.
template <typename T>
RowSums update_prefix(T* prefix, const T* delta, const float* query, int64_t hidden_size) {
  RowLanes lanes;
  int64_t h = 0;
  for (; h + kChunk <= hidden_size; h += kChunk) {
    const Pair x = T::load(prefix + h);
    const Pair d = T::load(delta + h);
    T::store(prefix + h, {x.even + d.even, x.odd + d.odd});
    lanes.add(T::load(prefix + h), load_scratch(query + h));
  }
  if (h < hidden_size) {
    const int64_t count = hidden_size - h;
    const Pair x = load_tail(prefix + h, count);
    const Pair d = load_tail(delta + h, count);
    store_tail(prefix + h, {x.even + d.even, x.odd + d.odd}, count);
    lanes.add(load_tail(prefix + h, count), load_scratch(query + h));
  }
  return lanes.total();
}

// mixed = sum_i weights[i] * rows[i]; returns the sum of its squares.
template <typename T, int N>
float mix(const T* const* rows, const float* weights, int64_t hidden_size, float* mixed) {
  Pair squares{};
  const auto add_chunk = [&](int64_t h, auto load) __attribute__((always_inline)) {
    const Pair first = load(rows[0] + h);
    Pair sum{first.even * weights[0], first.odd * weights[0]};
    for (int i = 1; i < N; ++i) {
      const Pair v = load(rows[i] + h);
      sum.even += v.even * weights[i];
      sum.odd += v.odd * weights[i];
    }
    squares.even += sum.even * sum.even;
    squares.odd += sum.odd * sum.odd;
    store_scratch(mixed + h, sum);
  };
  int64_t h = 0;
  for (; h + kChunk <= hidden_size; h += kChunk) {
    add_chunk(h, [](const T* from) __attribute__((always_inline)) { return T::load(from); });
  }
  if (h < hidden_size) {
    add_chunk(h, [&](const T* from)
                     __attribute__((always_inline)) { return load_tail(from, hidden_size - h); });
  }
  return sum_of_lanes(squares);
}

template <typename T>
using Mix = float (*)(const T* const*, const float*, int64_t, float*);
template <typename T>
constexpr Mix<T> kMix[] = {mix<T, 1>, mix<T, 2>, mix<T, 3>, mix<T, 4>, mix<T, 5>,
                           mix<T, 6>, mix<T, 7>, mix<T, 8>, mix<T, 9>};

// mixed = weights[0] * bank + weights[1] * own; returns the sum of its squares.
template <typename BankT, typename T>
float merge(const BankT* bank, const T* own, const float* weights, int64_t hidden_size,
            float* mixed) {
  Pair squares{};
  const auto add_chunk = [&](int64_t h, const Pair& b, const Pair& p)
                             __attribute__((always_inline)) {
                               const Pair sum{b.even * weights[0] + p.even * weights[1],
                                              b.odd * weights[0] + p.odd * weights[1]};
                               squares.even += sum.even * sum.even;
                               squares.odd += sum.odd * sum.odd;
                               store_scratch(mixed + h, sum);
                             };
  int64_t h = 0;
  for (; h + kChunk <= hidden_size; h += kChunk) {
    add_chunk(h, BankT::load(bank + h), T::load(own + h));
  }
  if (h < hidden_size) {
    const int64_t count = hidden_size - h;
    add_chunk(h, load_tail(bank + h, count), load_tail(own + h, count));
  }
  return sum_of_lanes(squares);
}

// output = mixed, or mixed * scale * weight.
template <typename T, typename OutputT>
void write_output(const float* mixed, float scale, const T* weight, int64_t hidden_size,
                  OutputT* output) {
  int64_t h = 0;
  for (; h + kChunk <= hidden_size; h += kChunk) {
    Pair v = load_scratch(mixed + h);
    if (weight != nullptr) {
      const Pair w = T::load(weight + h);
      v = {v.even * scale * w.even, v.odd * scale * w.odd};
    }
    OutputT::store(output + h, v);
  }
  if (h < hidden_size) {
    Pair v = load_scratch(mixed + h);
    if (weight != nullptr) {
      const Pair w = load_tail(weight + h, hidden_size - h);
      v = {v.even * scale * w.even, v.odd * scale * w.odd};
    }
    store_tail(output + h, v, hidden_size - h);
  }
}

struct Exponentials {
  float maximum;
  float sum;  // of exp(score - maximum)

  float log() const { return maximum + std::log(sum); }
};

// scores -> softmax, in place. A NaN score makes every weight NaN, one NaN whichever it was: the sign of a
// NaN depends on the order of operands, which differs between the ways to compute a score.
Exponentials softmax(float* scores, int n) {
  float maximum = scores[0];
  for (int i = 1; i < n; ++i) maximum = scores[i] > maximum ? scores[i] : maximum;
  float sum = 0.0f;
  for (int i = 0; i < n; ++i) sum += scores[i] = std::exp(scores[i] - maximum);
  if (std::isnan(sum)) {
    maximum = sum = std::numeric_limits<float>::quiet_NaN();
    for (int i = 0; i < n; ++i) scores[i] = sum;
    return {maximum, sum};
  }
  for (int i = 0; i < n; ++i) scores[i] /= sum;
  return {maximum, sum};
}

template <typename T>
void prepare_query(const void* norm_weight, const void* qk_weight, int64_t hidden_size,
                   float* query) {
  const T* norm = static_cast<const T*>(norm_weight);
  const T* qk = static_cast<const T*>(qk_weight);
  int64_t h = 0;
  for (; h + kChunk <= hidden_size; h += kChunk) {
    const Pair a = T::load(norm + h);
    const Pair b = T::load(qk + h);
    store_scratch(query + h, {a.even * b.even, a.odd * b.odd});
  }
  if (h < hidden_size) {
    const Pair a = load_tail(norm + h, hidden_size - h);
    const Pair b = load_tail(qk + h, hidden_size - h);
    store_scratch(query + h, {a.even * b.even, a.odd * b.odd});
  }
}

template <typename T>
void forward_tokens(const attnres_forward_args& args, const float* query, int64_t begin,
                    int64_t end, float* mixed) {
  constexpr int kMaxSources = 9;
  const int64_t hidden_size = args.hidden_size;
  const int64_t prefixes_per_entry = args.num_tokens / args.num_bank_tokens;
  const T* output_norm_weight = static_cast<const T*>(args.output_norm_weight);
  const int num_blocks = args.num_blocks;
  const int num_sources = num_blocks + 1;

  const T* rows[kMaxSources];
  RowSums sums[kMaxSources];
  int64_t measured_entry = -1;  // tokens that share a bank entry share its sums
  for (int64_t token = begin; token < end; ++token) {
    const int64_t entry = token / prefixes_per_entry;
    T* prefix = static_cast<T*>(args.prefix) + token * args.prefix_stride;
    // A bank without rows may be null, and its strides anything.
    T* bank = args.num_bank_rows > 0
                  ? static_cast<T*>(args.blocks) + entry * args.blocks_token_stride
                  : nullptr;
    T* output = static_cast<T*>(args.output) + token * args.output_stride;

    rows[num_blocks] = prefix;
    if (args.delta != nullptr) {
      const T* delta = static_cast<const T*>(args.delta) + token * args.delta_stride;
      sums[num_blocks] = update_prefix(prefix, delta, query, hidden_size);
    } else if (num_blocks > 0) {
      measure_rows<T, 1>(&rows[num_blocks], query, hidden_size, &sums[num_blocks]);
    }
    if (entry != measured_entry) {
      for (int i = 0; i < num_blocks; ++i) rows[i] = bank + i * args.blocks_row_stride;
      measure_bank(rows, num_blocks, query, hidden_size, sums);
      measured_entry = entry;
    }

    float weights[kMaxSources] = {1.0f};  // one source has weight 1, whatever it holds
    if (num_blocks > 0) {
      for (int i = 0; i < num_sources; ++i) weights[i] = sums[i].score(hidden_size, args.eps);
      softmax(weights, num_sources);
    }
    const float squares = kMix<T>[num_blocks](rows, weights, hidden_size, mixed);
    const float scale =
        1.0f / std::sqrt(squares / static_cast<float>(hidden_size) + args.output_norm_eps);
    write_output(mixed, scale, output_norm_weight, hidden_size, output);

    // Last: the row that is written may be one of those that were read.
    if (args.block_write_idx >= 0) {
      std::memcpy(bank + args.block_write_idx * args.blocks_row_stride, prefix,
                  hidden_size * sizeof(T));
    }
  }
}

// ROWS rows times SITES queries: a chunk of a row serves several call sites.
template <typename T, int ROWS, int SITES>
void dot_rows(const T* const* rows, const float* queries, int64_t query_stride, int64_t hidden_size,
              float* dots) {
  Pair sums[SITES][ROWS] = {};
  const auto add_chunk = [&](int64_t h, auto load) __attribute__((always_inline)) {
    Pair v[ROWS];
    for (int row = 0; row < ROWS; ++row) v[row] = load(rows[row] + h);
    for (int site = 0; site < SITES; ++site) {
      const Pair q = load_scratch(queries + site * query_stride + h);
      for (int row = 0; row < ROWS; ++row) {
        sums[site][row].even += v[row].even * q.even;
        sums[site][row].odd += v[row].odd * q.odd;
      }
    }
  };
  int64_t h = 0;
  for (; h + kChunk <= hidden_size; h += kChunk) {
    add_chunk(h, [](const T* from) __attribute__((always_inline)) { return T::load(from); });
  }
  if (h < hidden_size) {
    add_chunk(h, [&](const T* from)
                     __attribute__((always_inline)) { return load_tail(from, hidden_size - h); });
  }
  for (int site = 0; site < SITES; ++site) {
    for (int row = 0; row < ROWS; ++row) {
      dots[site * kMaxHostBankRows + row] = sum_of_lanes(sums[site][row]);
    }
  }
}

template <typename T, int SITES>
void dot_bank(const T* const* rows, int num_rows, const float* queries, int64_t query_stride,
              int64_t hidden_size, float* dots) {
  int row = 0;
  for (; row + 2 <= num_rows; row += 2) {
    dot_rows<T, 2, SITES>(rows + row, queries, query_stride, hidden_size, dots + row);
  }
  if (row < num_rows) {
    dot_rows<T, 1, SITES>(rows + row, queries, query_stride, hidden_size, dots + row);
  }
}

// The rows of a token come from memory once: after the first call site they are in the cache.
template <typename T>
void bank_tokens(const attnres_bank_args& args, const float* queries, int64_t begin, int64_t end,
                 float* own) {
  const int64_t hidden_size = args.hidden_size;
  const int64_t query_stride = (hidden_size + kScratchFloats - 1) / kScratchFloats * kScratchFloats;
  const int num_blocks = args.num_blocks;
  const int num_sites = args.num_sites;
  float* mixed = own;
  float* scores = own + query_stride;
  const T* rows[kMaxHostBankRows];
  float scales[kMaxHostBankRows];
  for (int64_t token = begin; token < end; ++token) {
    const T* entry = static_cast<const T*>(args.blocks) + token * args.blocks_token_stride;
    for (int i = 0; i < num_blocks; ++i) {
      rows[i] = entry + i * args.blocks_row_stride;
      RowSums sums;
      measure_rows<T, 1>(&rows[i], queries, hidden_size, &sums);
      scales[i] = std::sqrt(sums.squares / static_cast<float>(hidden_size) + args.eps);
    }
    int site = 0;
    for (; site + 2 <= num_sites; site += 2) {
      dot_bank<T, 2>(rows, num_blocks, queries + site * query_stride, query_stride, hidden_size,
                     scores + site * kMaxHostBankRows);
    }
    if (site < num_sites) {
      dot_bank<T, 1>(rows, num_blocks, queries + site * query_stride, query_stride, hidden_size,
                     scores + site * kMaxHostBankRows);
    }
    for (site = 0; site < num_sites; ++site) {
      float* weights = scores + site * kMaxHostBankRows;
      for (int i = 0; i < num_blocks; ++i) weights[i] /= scales[i];
      args.lse[site * args.lse_stride + token] = softmax(weights, num_blocks).log();
      kMix<T>[num_blocks - 1](rows, weights, hidden_size, mixed);
      const int64_t offset = site * args.bank_site_stride + token * args.bank_token_stride;
      if (args.float32_bank != 0) {
        write_output<T>(mixed, 1.0f, nullptr, hidden_size,
                        static_cast<Wide<T>*>(args.bank) + offset);
      } else {
        write_output<T>(mixed, 1.0f, nullptr, hidden_size, static_cast<T*>(args.bank) + offset);
      }
    }
  }
}

template <typename T>
void merge_tokens(const attnres_merge_args& args, const float* query, int64_t begin, int64_t end,
                  float* mixed) {
  const int64_t hidden_size = args.hidden_size;
  const int64_t prefixes_per_entry = args.num_tokens / args.num_bank_tokens;
  for (int64_t token = begin; token < end; ++token) {
    const int64_t entry = token / prefixes_per_entry;
    T* prefix = static_cast<T*>(args.prefix) + token * args.prefix_stride;
    RowSums sums;
    if (args.delta != nullptr) {
      const T* delta = static_cast<const T*>(args.delta) + token * args.delta_stride;
      sums = update_prefix(prefix, delta, query, hidden_size);
    } else {
      const T* row = prefix;
      measure_rows<T, 1>(&row, query, hidden_size, &sums);
    }
    float weights[2] = {args.lse[entry], sums.score(hidden_size, args.eps)};
    softmax(weights, 2);
    const int64_t offset = entry * args.bank_stride;
    const float squares =
        args.float32_bank != 0
            ? merge(static_cast<const Wide<T>*>(args.bank) + offset, prefix, weights, hidden_size,
                    mixed)
            : merge(static_cast<const T*>(args.bank) + offset, prefix, weights, hidden_size, mixed);
    const float scale =
        1.0f / std::sqrt(squares / static_cast<float>(hidden_size) + args.output_norm_eps);
    write_output(mixed, scale, static_cast<const T*>(args.output_norm_weight), hidden_size,
                 static_cast<T*>(args.output) + token * args.output_stride);
    if (args.block_write_idx >= 0) {
      std::memcpy(static_cast<T*>(args.blocks) + entry * args.blocks_token_stride +
                      args.block_write_idx * args.blocks_row_stride,
                  prefix, hidden_size * sizeof(T));
    }
  }
}

#undef ATTNRES_INLINE

}  // namespace

const HostKernels ATTNRES_HOST_TABLE = {
    ATTNRES_HOST_TARGET,
    {prepare_query<BFloat16>, prepare_query<Float16>, prepare_query<Float32>},
    {forward_tokens<BFloat16>, forward_tokens<Float16>, forward_tokens<Float32>},
    {bank_tokens<BFloat16>, bank_tokens<Float16>, bank_tokens<Float32>},
    {merge_tokens<BFloat16>, merge_tokens<Float16>, merge_tokens<Float32>},
};

}  // namespace attnres
