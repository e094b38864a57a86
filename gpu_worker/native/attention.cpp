// loadonce::attend: attention of a step's rows over the paged cache, online softmax, float32 inside.
// Writes the new keys and values to the cache first. Any mix of one-token rows and prompt chunks.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "crew.h"
#include "exponential.h"
#include "rows.h"

namespace loadonce {
namespace {

constexpr int64_t kKeys = 64;      // keys per round of the online softmax
constexpr int64_t kTokens = 32;    // query tokens per task
constexpr int64_t kLanes = 16;     // float32 numbers in a register
constexpr float kNothing = -std::numeric_limits<float>::infinity();

inline float to_float(float value) { return value; }
inline float to_float(bf16_bits value) { return widen(value); }
inline void from_float(float value, float* at) { *at = value; }
inline void from_float(float value, bf16_bits* at) { *at = narrow(value); }

// Where things lie in a cache [pages, page_tokens, kv_heads, dim], in elements.
struct Strides {
  int64_t page, token, head;
};

struct Task {
  int64_t row, kv_head, first, tokens;  // tokens first … first + tokens of the row
};

template <typename Scalar>
struct Attention {
  const Scalar *query, *key, *value;
  Scalar *key_cache, *value_cache, *out;
  int64_t query_token, query_head, key_token, key_head, value_token, value_head;  // strides
  Strides keys_at, values_at;
  int64_t heads, kv_heads, key_dim, value_dim, page_tokens, table_width;
  const int64_t* slots;
  const int32_t *query_start, *context, *table;
  const float* sinks;
  float scaling, softcap;
  int64_t window;

  int64_t group() const { return heads / kv_heads; }

  // Whether a head's keys lie in a page pair by pair of their elements, [key_dim / 2, page_tokens, 2]: so a register
  // holds one pair of sixteen keys, and a score is summed in its lane. The same for as long as the cache lives.
  bool paired() const {
#ifdef LOADONCE_BF16_DOT
    return std::is_same_v<Scalar, bf16_bits> && page_tokens % kLanes == 0 && key_dim % 2 == 0 &&
           keys_at.token == key_dim;
#else
    return false;
#endif
  }

  const Scalar* keys_of(const Task& task, int64_t position) const {
    const int64_t page = table[task.row * table_width + position / page_tokens];
    return key_cache + page * keys_at.page + task.kv_head * keys_at.head +
           position % page_tokens * (paired() ? 2 : keys_at.token);
  }

  void write(int64_t token) const {
    const int64_t page = slots[token] / page_tokens, offset = slots[token] % page_tokens;
    Scalar* keys = key_cache + page * keys_at.page + offset * (paired() ? 2 : keys_at.token);
    Scalar* values = value_cache + page * values_at.page + offset * values_at.token;
    for (int64_t head = 0; head < kv_heads; ++head) {
      const Scalar* from = key + token * key_token + head * key_head;
      if (paired())
        for (int64_t d = 0; d < key_dim; d += 2)
          std::memcpy(keys + head * keys_at.head + d * page_tokens, from + d, 2 * sizeof(Scalar));
      else
        std::memcpy(keys + head * keys_at.head, from, key_dim * sizeof(Scalar));
      std::memcpy(values + head * values_at.head, value + token * value_token + head * value_head,
                  value_dim * sizeof(Scalar));
    }
  }

  struct Scratch {  // of one thread; R query rows = tokens × heads of a group
    std::vector<Scalar> query;   // [R, key_dim]
    std::vector<float> scores;   // [R, kKeys]
    std::vector<float> mixed;    // [R, value_dim]
    std::vector<float> most, total;  // [R]
    std::vector<const Scalar*> keys, values;  // [kKeys]
    std::vector<float> wide;     // [value_dim]
  };

  // Where the keys and values of positions [at, at + count) lie, page by page.
  void locate(Scratch& own, const Task& task, int64_t at, int64_t count) const {
    const int32_t* page = table + task.row * table_width + at / page_tokens;
    int64_t offset = at % page_tokens;
    const int64_t step = paired() ? 2 : keys_at.token;
    for (int64_t k = 0; k < count; ++page, offset = 0) {
      const Scalar* keys = key_cache + *page * keys_at.page + task.kv_head * keys_at.head;
      const Scalar* values = value_cache + *page * values_at.page + task.kv_head * values_at.head;
      for (; offset < page_tokens && k < count; ++offset, ++k) {
        own.keys[k] = keys + offset * step;
        own.values[k] = values + offset * values_at.token;
        // The values are wanted after the scores: fetch them meanwhile.
        for (int64_t d = 0; d < value_dim; d += 64 / sizeof(Scalar)) __builtin_prefetch(own.values[k] + d);
      }
    }
  }

  // The cache positions that a task reads: [from, end).
  struct Span {
    int64_t from, end;
  };

  Span span(const Task& task) const {
    const int64_t length = query_start[task.row + 1] - query_start[task.row];
    const int64_t position = context[task.row] - length + task.first;  // of the task's first token
    const int64_t from = window ? std::max<int64_t>(0, position - window + 1) : 0;
    return {paired() ? from / kLanes * kLanes : from, position + task.tokens};
  }

  // Ask for the keys of [at, end), one round of them at most, while something else is computed.
  void fetch_keys(const Task& task, int64_t at, int64_t end) const {
    end = std::min(end, at + kKeys);
    if (paired()) {
      for (; at < end; at += kLanes) {
        const Scalar* keys = keys_of(task, at);
        for (int64_t d = 0; d < key_dim; d += 2) __builtin_prefetch(keys + d * page_tokens);
      }
      return;
    }
    for (; at < end; ++at) {
      const Scalar* keys = keys_of(task, at);
      for (int64_t d = 0; d < key_dim; d += 64 / sizeof(Scalar)) __builtin_prefetch(keys + d);
    }
  }

  void run(const Task& task, const Task* next, Scratch& own) const {
    const int64_t rows = task.tokens * group();
    begin(task, own, rows);
    const auto [from, end] = span(task);
    const int64_t position = end - task.tokens;
    for (int64_t at = from; at < end; at += kKeys) {
      const int64_t count = std::min(kKeys, end - at);
      locate(own, task, at, count);
      score(own, rows, count);
      if (at + kKeys < end) {
        fetch_keys(task, at + kKeys, end);
      } else if (next) {
        fetch_keys(*next, span(*next).from, span(*next).end);
      }
      for (int64_t r = 0; r < rows; ++r) soften(own, r, position + r / group() - at, count);
      mix(own, rows, count);
    }
    finish(task, own, rows, query_start[task.row] + task.first);
  }

  void begin(const Task& task, Scratch& own, int64_t rows) const {
    own.query.resize(rows * key_dim);
    own.scores.resize(rows * kKeys);
    own.mixed.assign(rows * value_dim, 0.0f);
    own.most.assign(rows, kNothing);
    own.total.assign(rows, 0.0f);
    own.keys.resize(kKeys);
    own.values.resize(kKeys);
    own.wide.resize(value_dim);
    const int64_t start = query_start[task.row] + task.first;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t head = task.kv_head * group() + r % group();
      std::memcpy(own.query.data() + r * key_dim,
                  query + (start + r / group()) * query_token + head * query_head, key_dim * sizeof(Scalar));
      if (sinks) {
        own.most[r] = sinks[head];
        own.total[r] = 1.0f;
      }
    }
  }

  void score(Scratch& own, int64_t rows, int64_t count) const {
#ifdef LOADONCE_BF16_DOT
    if constexpr (std::is_same_v<Scalar, bf16_bits>) {
      if (paired()) {
        for (int64_t first = 0; first < rows; first += 6)
          score_rows(own, first, static_cast<int>(std::min<int64_t>(6, rows - first)), count);
        return;
      }
      for (int64_t k = 0; k < count; k += kColumns) {
        const bf16_bits* columns[kColumns];
        for (int c = 0; c < kColumns; ++c) columns[c] = own.keys[std::min(k + c, count - 1)];
        for (int64_t first = 0; first < rows; first += kMostRows)
          tile(static_cast<int>(std::min<int64_t>(kMostRows, rows - first)), own.query.data() + first * key_dim,
               key_dim, columns, key_dim, Ahead{},
               [&](int r, __m128 sum) { _mm_storeu_ps(own.scores.data() + (first + r) * kKeys + k, sum); });
      }
      return;
    }
#endif
    for (int64_t r = 0; r < rows; ++r) {
      const Scalar* q = own.query.data() + r * key_dim;
      for (int64_t k = 0; k < count; ++k) {
        const Scalar* one = own.keys[k];
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t d = 0; d < key_dim; ++d) sum += to_float(q[d]) * to_float(one[d]);
        own.scores[r * kKeys + k] = sum;
      }
    }
  }

#ifdef LOADONCE_BF16_DOT
  void score_rows(Scratch& own, int64_t first, int some, int64_t count) const {
    switch (some) {
      case 1: return score_tile<1>(own, first, count);
      case 2: return score_tile<2>(own, first, count);
      case 3: return score_tile<3>(own, first, count);
      case 4: return score_tile<4>(own, first, count);
      case 5: return score_tile<5>(own, first, count);
      default: return score_tile<6>(own, first, count);
    }
  }

  // ROWS query rows with a round of keys. Of the last sixteen, those past `count` get scores that nobody reads.
  template <int ROWS>
  void score_tile(Scratch& own, int64_t first, int64_t count) const {
    constexpr int kGroups = kKeys / kLanes;
    const bf16_bits* at[kGroups];
    for (int g = 0; g < kGroups; ++g) at[g] = own.keys[g * kLanes < count ? g * kLanes : 0];
    __m512 sum[ROWS][kGroups];
    for (int r = 0; r < ROWS; ++r)
      for (int g = 0; g < kGroups; ++g) sum[r][g] = _mm512_setzero_ps();
    const bf16_bits* q = own.query.data() + first * key_dim;
    for (int64_t d = 0; d < key_dim; d += 2) {
      __m512bh keys[kGroups];
      for (int g = 0; g < kGroups; ++g) keys[g] = load_bf16(at[g] + d * page_tokens);
      for (int r = 0; r < ROWS; ++r) {
        int32_t pair;
        std::memcpy(&pair, q + r * key_dim + d, sizeof pair);
        const __m512bh row = (__m512bh)_mm512_set1_epi32(pair);
        for (int g = 0; g < kGroups; ++g) sum[r][g] = _mm512_dpbf16_ps(sum[r][g], row, keys[g]);
      }
    }
    for (int r = 0; r < ROWS; ++r)
      for (int g = 0; g < kGroups; ++g)
        _mm512_storeu_ps(own.scores.data() + (first + r) * kKeys + g * kLanes, sum[r][g]);
  }
#endif

  // Scores of query row r → weights, with what came before scaled down to the new maximum. `last` is the
  // row's own position, counted from the first of these keys.
  void soften(Scratch& own, int64_t r, int64_t last, int64_t count) const {
    float* scores = own.scores.data() + r * kKeys;
    const int64_t first = window ? std::max<int64_t>(0, last - window + 1) : 0;
    const int64_t end = std::min(count, last + 1);
    if (first >= end) {
      std::fill(scores, scores + count, 0.0f);
      return;
    }
    float most = own.most[r];
    if (softcap) {
      for (int64_t k = first; k < end; ++k) scores[k] = softcap * std::tanh(scores[k] * scaling / softcap);
    } else {
#pragma omp simd
      for (int64_t k = first; k < end; ++k) scores[k] *= scaling;
    }
#pragma omp simd reduction(max : most)
    for (int64_t k = first; k < end; ++k) most = std::max(most, scores[k]);
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t k = first; k < end; ++k) {
      scores[k] = exponential(scores[k] - most);
      sum += scores[k];
    }
    std::fill(scores, scores + first, 0.0f);
    std::fill(scores + end, scores + count, 0.0f);
    if (most != own.most[r]) {
      const float down = own.total[r] ? exponential(own.most[r] - most) : 0.0f;
      own.total[r] *= down;
      float* mixed = own.mixed.data() + r * value_dim;
#pragma omp simd
      for (int64_t d = 0; d < value_dim; ++d) mixed[d] *= down;
      own.most[r] = most;
    }
    own.total[r] += sum;
  }

  void mix(Scratch& own, int64_t rows, int64_t count) const {
#ifdef LOADONCE_BF16_DOT
    if constexpr (std::is_same_v<Scalar, bf16_bits>) {
      if (value_dim % 16 == 0) {
        for (int64_t first = 0; first < rows; first += 4) {
          switch (std::min<int64_t>(4, rows - first)) {
            case 1: mix_rows<1>(own, first, count); break;
            case 2: mix_rows<2>(own, first, count); break;
            case 3: mix_rows<3>(own, first, count); break;
            default: mix_rows<4>(own, first, count);
          }
        }
        return;
      }
    }
#endif
    for (int64_t k = 0; k < count; ++k) {
      const Scalar* one = own.values[k];
#pragma omp simd
      for (int64_t d = 0; d < value_dim; ++d) own.wide[d] = to_float(one[d]);
      for (int64_t r = 0; r < rows; ++r) {
        const float weight = own.scores[r * kKeys + k];
        float* mixed = own.mixed.data() + r * value_dim;
#pragma omp simd
        for (int64_t d = 0; d < value_dim; ++d) mixed[d] += weight * own.wide[d];
      }
    }
  }

#ifdef LOADONCE_BF16_DOT
  // ROWS query rows, 64 value elements at a time held in registers over all keys.
  template <int ROWS>
  void mix_rows(Scratch& own, int64_t first, int64_t count) const {
    int64_t from = 0;
    for (; from + 64 <= value_dim; from += 64) mix_block<ROWS, 4>(own, first, count, from);
    for (; from < value_dim; from += 16) mix_block<ROWS, 1>(own, first, count, from);
  }

  template <int ROWS, int VECTORS>
  void mix_block(Scratch& own, int64_t first, int64_t count, int64_t from) const {
    const float* weights = own.scores.data() + first * kKeys;
    float* mixed = own.mixed.data() + first * value_dim + from;
    __m512 sum[ROWS][VECTORS];
    for (int r = 0; r < ROWS; ++r)
      for (int v = 0; v < VECTORS; ++v) sum[r][v] = _mm512_loadu_ps(mixed + r * value_dim + 16 * v);
    for (int64_t k = 0; k < count; ++k) {
      __m512 wide[VECTORS];
      for (int v = 0; v < VECTORS; ++v) {
        const __m256i* at = reinterpret_cast<const __m256i*>(own.values[k] + from + 16 * v);
        wide[v] = wider(_mm256_loadu_si256(at));
      }
      for (int r = 0; r < ROWS; ++r) {
        const __m512 weight = _mm512_set1_ps(weights[r * kKeys + k]);
        for (int v = 0; v < VECTORS; ++v) sum[r][v] = _mm512_fmadd_ps(weight, wide[v], sum[r][v]);
      }
    }
    for (int r = 0; r < ROWS; ++r)
      for (int v = 0; v < VECTORS; ++v) _mm512_storeu_ps(mixed + r * value_dim + 16 * v, sum[r][v]);
  }
#endif

  void finish(const Task& task, Scratch& own, int64_t rows, int64_t token) const {
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t head = task.kv_head * group() + r % group();
      Scalar* to = out + ((token + r / group()) * heads + head) * value_dim;
      const float* mixed = own.mixed.data() + r * value_dim;
      const float share = 1.0f / own.total[r];
      for (int64_t d = 0; d < value_dim; ++d) from_float(mixed[d] * share, to + d);
    }
  }
};

template <typename Scalar>
void run(Attention<Scalar>& job, int64_t tokens, int64_t rows) {
  std::vector<Task> tasks;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t length = job.query_start[row + 1] - job.query_start[row];
    for (int64_t first = 0; first < length; first += kTokens)
      for (int64_t head = 0; head < job.kv_heads; ++head)
        tasks.push_back({row, head, first, std::min(kTokens, length - first)});
  }
  // Tokens past the last row are padding: their answer is never read, but must be a number.
  const int64_t real = job.query_start[rows];
  std::fill(job.out + real * job.heads * job.value_dim, job.out + tokens * job.heads * job.value_dim, Scalar{});
  // Every key is there before the first is read.
  for (int64_t token = 0; token < tokens; ++token) job.write(token);
  const int64_t count = static_cast<int64_t>(tasks.size());
  // A row that decodes is little work: several to a piece, so that the next one's keys are asked for in time.
  const int64_t pieces = tokens > rows ? count : std::min<int64_t>(count, std::max<int64_t>(4, count / 6));
  share_out(pieces, [&](int64_t number) {
    thread_local typename Attention<Scalar>::Scratch own;
    for (int64_t task = count * number / pieces; task < count * (number + 1) / pieces; ++task)
      job.run(tasks[task], task + 1 < count ? &tasks[task + 1] : nullptr, own);
  });
}

Strides strides(const at::Tensor& cache) { return {cache.stride(0), cache.stride(1), cache.stride(2)}; }

template <typename Scalar>
void attend_as(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
               const at::Tensor& key_cache, const at::Tensor& value_cache, const at::Tensor& slots,
               const at::Tensor& query_start, const at::Tensor& context, const at::Tensor& table,
               const float* sinks, double scaling, int64_t window, double softcap, at::Tensor& out) {
  Attention<Scalar> job{
      static_cast<const Scalar*>(query.data_ptr()), static_cast<const Scalar*>(key.data_ptr()),
      static_cast<const Scalar*>(value.data_ptr()), static_cast<Scalar*>(key_cache.data_ptr()),
      static_cast<Scalar*>(value_cache.data_ptr()), static_cast<Scalar*>(out.data_ptr()),
      query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
      strides(key_cache), strides(value_cache),
      query.size(1), key.size(1), key.size(2), value.size(2), key_cache.size(1), table.size(1),
      slots.data_ptr<int64_t>(), query_start.data_ptr<int32_t>(), context.data_ptr<int32_t>(),
      table.data_ptr<int32_t>(), sinks, static_cast<float>(scaling), static_cast<float>(softcap), window};
  run(job, query.size(0), context.size(0));
}

at::Tensor dense_last(const at::Tensor& tensor) { return tensor.stride(-1) == 1 ? tensor : tensor.contiguous(); }

at::Tensor attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                  const at::Tensor& key_cache, const at::Tensor& value_cache, const at::Tensor& slots,
                  const at::Tensor& query_start, const at::Tensor& context, const at::Tensor& table,
                  const std::optional<at::Tensor>& sinks, double scaling, int64_t window, double softcap) {
  const auto type = query.scalar_type();
  TORCH_CHECK(key_cache.scalar_type() == type && key.scalar_type() == type && value.scalar_type() == type,
              "attend: query, key, value and cache must be of one type");
  TORCH_CHECK(key_cache.stride(3) == 1 && value_cache.stride(3) == 1 && table.is_contiguous(),
              "attend: the page table, and each head in the cache, must be contiguous");
  TORCH_CHECK(query_start.size(0) == context.size(0) + 1 && slots.size(0) == query.size(0),
              "attend: as many slots as tokens, and one more start than rows");
  at::Tensor out = at::empty({query.size(0), query.size(1), value.size(2)}, query.options());
  const at::Tensor sink = sinks ? sinks->to(at::kFloat).contiguous() : at::Tensor();
  const float* sink_at = sinks ? sink.data_ptr<float>() : nullptr;
  const at::Tensor q = dense_last(query), k = dense_last(key), v = dense_last(value);
  if (type == at::kFloat) {
    attend_as<float>(q, k, v, key_cache, value_cache, slots, query_start, context, table, sink_at, scaling,
                     window, softcap, out);
  } else {
    TORCH_CHECK(type == at::kBFloat16, "attend: float32 or bfloat16, not ", type);
    attend_as<bf16_bits>(q, k, v, key_cache, value_cache, slots, query_start, context, table, sink_at, scaling,
                         window, softcap, out);
  }
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(loadonce, library) {
  // The caches are written, but declared as if they were only read: nothing else in a compiled graph reads
  // them, each layer has its own, and the declaration keeps the compiler from copying them every step.
  library.def(
      "attend(Tensor query, Tensor key, Tensor value, Tensor key_cache, Tensor value_cache, Tensor slots, "
      "Tensor query_start, Tensor context, Tensor page_table, Tensor? sinks, float scaling, int window, "
      "float softcap) -> Tensor");
}
TORCH_LIBRARY_IMPL(loadonce, CPU, library) { library.impl("attend", &attend); }

}  // namespace loadonce
