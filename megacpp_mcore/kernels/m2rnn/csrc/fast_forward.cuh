// Forward for 16-bit inputs. A block has 32 rows of a chain: four warps run the recurrence, eight
// rows each, and two read the inputs ahead of them and sum y behind them.
//
// Of m16n8k16 these warps use half the rows: what the recurrence waits for are the special
// functions of its own warp's elements, and half as many a warp are done in half the time.
#pragma once

#include "fast.cuh"

namespace m2rnn {

constexpr int kForwardRows = 32;
constexpr int kStrip = 8;                                        // rows of a warp
constexpr int kRecurrenceThreads = kForwardRows / kStrip * 32;
constexpr int kForwardTiles = kForwardRows / kTileRows;
constexpr int kForwardThreads = kRecurrenceThreads + 64;
constexpr int kPaddedUnit = kUnit + 4;  // so that four steps of eight rows meet every bank once

struct FastForwardShared {
  alignas(16) char h[2][kUnit][kForwardTiles][kTileBytes];  // behind each step
  struct {
    float k[kForwardRows][kPaddedUnit], v[kUnit][kColumns];
    float4 decay[kUnit];  // f, 1 - f, -2 (1 - f), .
  } in[2];
};

// Of a and b, both at least 1, at the price of one: forward waits for the reciprocals' unit.
__device__ inline void reciprocals(float& a, float& b) {
  const float both = reciprocal(a * b), x = a;
  a = both * b;
  b = both * x;
}
// 2^60 is far beyond where tanh rounds to 1, and its square is finite. A NaN stays one.
__device__ inline float below_60(float x) {
  float y;
  asm("min.NaN.f32 %0, %1, 0f42700000;" : "=f"(y) : "f"(x));
  return y;
}

// Where rows of h lie: eight lanes' rows, and eight rows of one half, meet every bank once.
__device__ inline int strip_offset(int row, int half) {
  const int upper = row >> 2 & 1;
  return ((row & 3) | (upper ^ half) << 2 | upper << 3 | row >> 3 << 4) * 16;
}

template <typename T>
__device__ void forward_recurrence(FastForwardShared& shared, const Problem& p, const Place& at) {
  const int warp = threadIdx.x / 32, g = lane_g(), t = lane_t();
  const int64_t state = (static_cast<int64_t>(at.head) * p.k_dim + at.row0 + warp * kStrip + g) *
                            kColumns + 4 * t;
  const TileWeight w(p.W + at.head * kColumns * kColumns);
  const int row = warp * kStrip + g;
  const int own = strip_offset(row % kTileRows, t / 2) + t % 2 * 8;
  char* const out = shared.h[0][0][row / kTileRows] + own;
  float h[4] = {};
  if (p.initial) load4(h, p.initial + at.chain * state_size(p) + state);
  uint32_t packed[4] = {pack<__half>(h[0], h[1]), 0, pack<__half>(h[2], h[3]), 0};
  const int units = Place::ceil_div(at.length, kUnit), units_a_chunk = 2 * p.stages;
  int in_chunk = 0;
  float* checkpoint = p.checkpoints + at.first_chunk * state_size(p) + state;
  __syncthreads();
  for (int unit = 0; unit < units; ++unit) {
    const auto& in = shared.in[unit % 2];
    if (in_chunk == 0) {
      store4(checkpoint, h);
      checkpoint += state_size(p);
    }
    if (++in_chunk == units_a_chunk) in_chunk = 0;
    char* const to = out + unit % 2 * static_cast<int>(sizeof(shared.h[0]));
    float k[4];
#pragma unroll 4
    for (int i = 0; i < kUnit; ++i) {
      if (i % 4 == 0) load4(k, &in.k[row][i]);
      float v[4], c[2][4];
      load4(v, &in.v[i][4 * t]);
      const float4 decay = in.decay[i];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int j = 2 * n + e;
          c[n][e] = fmaf(h[j], w.diagonal[j], k[i % 4] * v[j]);
          c[n][2 + e] = 0.f;
        }
        w.multiply(c[n], packed, n);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float& x = c[j / 2][j % 2];
        x = 1.f + exp2_of(below_60(x));
        if (j % 2 == 1) reciprocals(c[j / 2][0], c[j / 2][1]);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j)
        h[j] = fmaf(decay.z, c[j / 2][j % 2], fmaf(decay.x, h[j], decay.y));
      packed[0] = pack<__half>(h[0], h[1]);
      packed[2] = pack<__half>(h[2], h[3]);
      *reinterpret_cast<uint2*>(to + i * static_cast<int>(sizeof(shared.h[0][0]))) =
          make_uint2(pack<T>(h[0], h[1]), pack<T>(h[2], h[3]));
    }
    __syncthreads();
  }
  store4(p.final_state + at.chain * state_size(p) + state, h);
}

// What one of the 64 other threads brings in of a unit: four rows of k of a step; and four columns
// of v in the first 32, f in eight of the rest.
template <typename T>
struct ForwardStage {
  const T *k_at, *v_at;
  const float* f_at;
  int left, step, quad;  // left: of the chain, from the thread's step of the next unit
  uint2 k, v;
  float f;

  __device__ ForwardStage(const Problem& p, const Place& at, int thread)
      : step(thread / 8), quad(thread % 8 * 4) {
    const Source<T> of_k = k_of<T>(p, at), of_v = v_of<T>(p, at);
    k_at = of_k.x + step * of_k.token + quad;
    v_at = of_v.x + thread % 32 / 4 * of_v.token + thread % 4 * 4;
    f_at = p.f + at.batch * p.f_batch + (at.start + thread % 8) * p.f_token + at.head * p.f_head;
    left = at.length;
  }
  __device__ void load(const Problem& p, int thread) {
    k = load_unit(k_at, step < left);
    v = load_unit(v_at, thread < 32 && thread / 4 < left);
    f = thread % 8 < left ? __ldg(f_at) : 1.f;
    k_at += kUnit * p.k_token, v_at += kUnit * p.v_token, f_at += kUnit * p.f_token;
    left -= kUnit;
  }
  template <typename Inputs>
  __device__ void store(Inputs& to, int thread) const {
    const T* type = nullptr;
    const float4 x = widen(k, type);
    const float scaled[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) to.k[quad + e][step] = scaled[e] * kTwoLog2E;
    if (thread < 32)
      *reinterpret_cast<float4*>(&to.v[thread / 4][thread % 4 * 4]) = widen(v, type);
    else if (thread < 40)
      to.decay[thread - 32] = make_float4(f, 1.f - f, -2.f * (1.f - f), 0.f);
  }
};

// The block's part of y = q^T h, columns by steps: q of a step is in that step's column of the
// right operand, and zeros in the others. A warp has every second step.
template <typename T>
__device__ void forward_surroundings(FastForwardShared& shared, const Problem& p,
                                     const Place& at) {
  constexpr int kStepBytes = kForwardTiles * kTileBytes;
  const int thread = threadIdx.x - kRecurrenceThreads, parity = thread / 32;
  const int g = lane_g(), t = lane_t(), lane = threadIdx.x % 32;
  const bool has_step = g % 2 == parity;
  ForwardStage<T> next(p, at, thread);
  next.load(p, thread);
  next.store(shared.in[0], thread);
  next.load(p, thread);
  const Source<T> source = q_of<T>(p, at);
  const T* q_at = source.x + g * source.token + 2 * t;
  const int64_t token = static_cast<int64_t>(p.heads) * kColumns;
  float* to = p.y_parts + at.group * (static_cast<int64_t>(p.batch) * p.tokens) * token +
              at.token(p, 2 * t + parity) * token + at.head * kColumns + g;
  uint32_t h_at = shared_address(shared.h) + parity * kStepBytes +
                  strip_offset(lane % 8 + lane / 16 * 8, lane / 8 & 1);
  uint32_t q[kForwardTiles][2];
  const int units = Place::ceil_div(at.length, kUnit);
  int left = at.length;
  __syncthreads();
  int flip = kUnit * kStepBytes;
  for (int unit = 0; unit <= units; ++unit) {
    if (unit > 0) {
      float y[2][4] = {};
#pragma unroll
      for (int j = 0; j < kUnit / 2; ++j) {
        const bool own = g == 2 * j + parity;
#pragma unroll
        for (int tile = 0; tile < kForwardTiles; ++tile) {
          Packed h;
          load_columns(h, h_at + 2 * j * kStepBytes + tile * kTileBytes);
          mma16<T>(y[tile], h, own ? q[tile][0] : 0, own ? q[tile][1] : 0);
        }
      }
      if (2 * t + parity < left) {
#pragma unroll
        for (int c = 0; c < 2; ++c)
          to[8 * c] = parity ? y[0][2 * c + 1] + y[1][2 * c + 1] : y[0][2 * c] + y[1][2 * c];
      }
      to += kUnit * token;
      h_at += flip;
      flip = -flip;
      left -= kUnit;
    }
    if (unit == units) break;
#pragma unroll
    for (int tile = 0; tile < kForwardTiles; ++tile)
      load_pairs(q[tile], q_at + tile * kTileRows, has_step && g < left);
    q_at += kUnit * source.token;
    next.store(shared.in[(unit + 1) % 2], thread);
    next.load(p, thread);
    __syncthreads();
  }
}

template <typename T>
__global__ void __launch_bounds__(kForwardThreads, 4)
fast_forward(const __grid_constant__ Problem p) {
  extern __shared__ __align__(16) char memory[];
  auto& shared = *reinterpret_cast<FastForwardShared*>(memory);
  const Place at(p, kForwardRows);
  if (threadIdx.x < kRecurrenceThreads)
    forward_recurrence<T>(shared, p, at);
  else
    forward_surroundings<T>(shared, p, at);
}

}  // namespace m2rnn
