// The draw of the token that follows each row.
//
//   token = argmax over the kept ids of fl(logit / temperature) + g(seed, id, position + 1)
//   g = -log(-log u), u = ((x >> 9) + 1/2) 2^-23, x = word id % 4 of Philox4x32-10 with the seed as
//   key and (id / 4, position + 1, 0) as counter
//
// Grid    a cluster of kTeam blocks a row; each reads its share of the row in 16-byte vectors.
// Reads   the row once from HBM, then from L1 and L2: once for the draw and the sum of
//         exponentials, and for each of top-k and top-p once a digit of its select (about 4),
//         top-p once more.
// Floor   4 * T * W bytes of HBM: 0.66 MB and 0.14 us a row at W = 163840 and 4.8 TB/s (H200). A
//         pass over a block's 20480 ids takes about 2 us, that with the noise about 5 us.
// Needs   W <= 2^24.
#include <cfloat>

#include "early.cuh"
#include "select.cuh"

namespace kdtree::cuda {
namespace {

constexpr float kMaxNoise = 16.7f;  // -log(-log u) for u = 1 - 2^-24

__device__ inline int id_of_rank(uint64_t rank) { return ~static_cast<uint32_t>(rank); }

// At least the noise of a word, without a logarithm: -log(-log u) <= -log(1 - u), as -log u >= 1 - u,
// and log2 of a float is at least what its bits say read as a fixed-point number.
__device__ inline float noise_at_most(uint32_t word) {
  constexpr float kNats = 0x1.62f9p-24f;  // log(2) 2^-23 and 2e-4 of it, far above all rounding
  const float left = 1 - (static_cast<float>(word) + .5f) * 0x1p-23f;  // 1 - u, exact
  return static_cast<float>(0x3f800000 - __float_as_int(left)) * kNats;
}

// One row and what its sequence asks for.
struct Draw {
  const float* row;
  int W;
  int top;  // the best id, which every filter keeps
  float max, temperature, min_p;
  uint64_t seed, position;  // of the drawn token
  uint64_t last = kAllIds;  // the worst code that top-k and top-p keep

  // logit / temperature, kept finite where a tiny temperature would overflow; -inf stays.
  __device__ float scaled(float x) const {
    const float y = x / temperature;
    return x == -INFINITY ? x : y > FLT_MAX ? FLT_MAX : y < -FLT_MAX ? -FLT_MAX : y;
  }

  __device__ void filter(int top_k, float top_p) {
    const float best = scaled(max);
    if (top_k > 0 && top_k < W) {
      last = last_code(row, W, top_k, true, [&](int id, float x, uint64_t& code, uint64_t& weight) {
        code = code_of(scaled(x), best, id), weight = 1;
        return id < W;
      });
    }
    if (top_p < 1) {
      const auto entry = [&](int id, float x, uint64_t& code, uint64_t& weight) {
        const float y = scaled(x);
        code = code_of(y, best, id), weight = mass_of(y - best);
        return code <= last;
      };
      uint64_t mass = 0;
      for_share(row, W, [&](int id, const float (&x)[kQuad]) {
        for (int i = 0; i < kQuad; ++i) {
          uint64_t code, weight;
          if (entry(id + i, x[i], code, weight)) mass += weight;
        }
      });
      mass = team_sum(mass);
      const double target = ceil(double(top_p) * static_cast<double>(mass));
      last = last_code(row, W, min(mass, static_cast<uint64_t>(fmax(target, 1.))), false, entry);
    }
  }

  // The block's best noisy score, as a rank; adds the raw masses of its share to mass. Rounding is
  // monotone, so an id that stays under a score that some id surely reaches, even with the greatest
  // noise, cannot win and needs no noise.
  // A function of its own: inlined it costs registers that two blocks of a processor do not have.
  __device__ __noinline__ uint64_t best_noisy(uint64_t& mass) const {
    uint32_t own[kQuad];
    noise_words(seed, position, top / kQuad, own);
    float sure = -FLT_MAX;
    for (int i = 0; i < kQuad; ++i)
      if (i == top % kQuad) sure = scaled(max) + noise_of(own[i]);
    uint64_t winner = 0;
    for_share(row, W, [&](int id, const float (&x)[kQuad]) {
      float y[kQuad];
      bool may_win = false;
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        mass += mass_of(x[i] - max);
        y[i] = scaled(x[i]);
        may_win |= y[i] + kMaxNoise >= sure;
      }
      if (!may_win) return;
      uint32_t word[kQuad];
      noise_words(seed, position, id / kQuad, word);
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        if (!(y[i] + noise_at_most(word[i]) >= sure)) continue;
        if (last != kAllIds && code_of(y[i], scaled(max), id + i) > last) continue;
        if (min_p > 0 && exp_negative(y[i] - scaled(max)) < fminf(min_p, 1.f)) continue;
        const float score = y[i] + noise_of(word[i]);
        winner = ::max(winner, rank_of(score, id + i));
        sure = fmaxf(sure, score);
      }
    });
    return winner;
  }
};

__global__ void __launch_bounds__(kRowThreads, 2)
    sample_kernel(const __grid_constant__ SampleParams p) {
  begin_early();
  const int64_t t = blockIdx.x / kTeam;
  const int b = t / p.N, position = p.position[t];
  const float* row = p.logits + t * p.W;
  const bool writes = team().block_rank() == 0 && threadIdx.x == 0;
  const auto write = [&](int64_t token, float logprob, bool finite) {
    if (!writes) return;
    p.token[t] = token;
    p.logprob[t] = logprob;
    p.finite[t] = finite;
  };
  if (position < 0) return write(-1, 0, true);  // the whole team leaves

  uint64_t winner = row_best(row, p.W);
  const float max = value_of(winner >> 32);
  const float* raw = p.raw + t * p.W;
  const float raw_max = raw == row ? max : value_of(row_best(raw, p.W) >> 32);
  if (!(fabsf(max) < INFINITY && fabsf(raw_max) < INFINITY)) return write(-1, 0, false);

  uint64_t mass = 0;
  const float temperature = p.temperature[b];
  if (temperature > 0) {
    const auto next = static_cast<uint64_t>(int64_t{position} + 1);
    const int top = id_of_rank(winner);
    const auto seed = static_cast<uint64_t>(p.seed[b]);
    Draw draw{row, p.W, top, max, temperature, p.min_p[b], seed, next};
    draw.filter(p.top_k[b], p.top_p[b]);
    winner = team_max(draw.best_noisy(mass));
  } else {
    mass = share_mass(row, p.W, max);
  }
  if (raw != row) mass = share_mass(raw, p.W, raw_max);
  mass = team_sum(mass);
  const int token = id_of_rank(winner);
  if (writes) write(token, logprob_of(raw[token], raw_max, mass), true);
}

}  // namespace

void sample(const SampleParams& p, Stream stream) {
  const Grid grid{
      .blocks = p.B * p.N * kTeam, .threads = kRowThreads, .cluster = kTeam, .early = true};
  launch(sample_kernel, grid, stream, p);
}

}  // namespace kdtree::cuda
