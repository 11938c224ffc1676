// What fast_backward.cuh does backward: the gradient of the state, carried back step by step, and
// the sums it makes of a step.
#pragma once

#include "fast_remake.cuh"

namespace m2rnn {

// W^T as the right operand of a W^T, to the 11 bits that a tensor core reads of it. It cuts what a
// has beyond these, which takes 0.72 of 2^-11 off it on average: that is given back here.
struct TransposedWeight {
  float b[2][2][2];

  __device__ explicit TransposedWeight(const float* W) {
    constexpr float kUncut = 1.f + 0.72135f / 2048.f;
    const int g = lane_g(), t = lane_t();
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float x = kUncut * W[column_of(n, g) * kColumns + 4 * t + 2 * j + i];
          uint32_t bits;
          asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
          b[j][n][i] = __uint_as_float(bits);
        }
  }
};

template <typename T, bool kClamp>
struct Undo {
  const TransposedWeight w;
  const StepMasks masks;
  const float clamp;
  Tile dh;
  float dW[2][4];                            // its transpose
  float dk[4], dv[4], df[4], some_dW[2][4];  // of the unit, df row by row; of some parts

  const LaneInputs<T>& in;
  int t;  // first token of the unit that is sent for
  struct {
    uint32_t q[2], k[2];
    uint2 v, dy;
    float f, limit;
  } next, now;

  // d_final: (chains, H, K, V), or null. first: token of the first unit to undo.
  __device__ Undo(const Problem& p, const Place& at, const LaneInputs<T>& in, const float* d_final,
                  int64_t state, int first)
      : w(p.W + at.head * kColumns * kColumns), clamp(p.clamp), dh{}, dW{}, some_dW{}, in(in),
        t(first) {
    if (d_final) {
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) dh[n][e] = d_final[state + element(n, e)];
    }
    load(p, at);
    if constexpr (!kClamp) enter_dy();
  }
  // Offset of a lane's elements in a (K, V) state.
  __device__ static int element(int n, int e) { return e / 2 * 8 * kColumns + 2 * n + e % 2; }
  __device__ void store(float* state) const {
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) state[element(n, e)] = dh[n][e];
  }
  __device__ void load(const Problem& p, const Place& at) {
    const bool valid = has_step(t, at);
    in.q.load(next.q, t, valid);
    in.k.load(next.k, t, valid);
    next.v = in.v.load(t, valid);
    next.dy = in.dy.load(t, valid && p.dy != nullptr);
    next.f = in.f.load_f(t, valid);
    // A chain without a step has no gradient to clamp.
    if constexpr (kClamp) next.limit = t < at.length ? clamp : INFINITY;
  }
  // Takes the unit's inputs, those that enter dh apart, and sends for those of the unit before.
  __device__ void enter_dy() {
    now.q[0] = transposed(next.q[0]), now.q[1] = transposed(next.q[1]);
    now.dy = make_uint2(transposed(next.dy.x), transposed(next.dy.y));
  }
  // own_decay: for the lane's step's f and 1 - f.
  __device__ void enter(const Problem& p, const Place& at, float2* own_decay) {
    if constexpr (kClamp) enter_dy();
    now.k[0] = next.k[0], now.k[1] = next.k[1];
    now.v = next.v, now.limit = next.limit;
    __syncwarp();
    *own_decay = make_float2(next.f, 1.f - next.f);
    __syncwarp();
    t -= kUnit;
    load(p, at);
#pragma unroll
    for (int e = 0; e < 4; ++e) dk[e] = dv[e] = df[e] = 0.f;
  }
  // A tensor core cuts its sums: some terms each, then additions that round.
  __device__ void add_dW() {
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        dW[n][e] += some_dW[n][e];
        some_dW[n][e] = 0.f;
      }
  }

  // to += q dy^T of step i of the unit whose q and dy have been taken.
  __device__ void add_dy(Tile& to, int i) const {
    const uint32_t mask = masks.pair(i);
    mma8<T>(to[0], now.q[0], now.q[1], now.dy.x & mask);
    mma8<T>(to[1], now.q[0], now.q[1], now.dy.y & mask);
  }
  // A NaN stays one: it compares false with either limit.
  __device__ void clamp_dh() {
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        dh[n][e] = dh[n][e] > now.limit    ? now.limit
                   : dh[n][e] < -now.limit ? -now.limit
                                           : dh[n][e];
  }
  // Step i of the unit, backwards; own: where the lane's elements of its slot are in shared memory.
  // dh is the gradient of the state behind the step, dy's part included, or, where it is clamped,
  // to be included.
  __device__ void step(int i, uint32_t own, const float2 (&decay)[kUnit]) {
    const float f = decay[i].x, rest = decay[i].y;
    Packed slopes, gaps, before;
    load_words<kSlope>(slopes, own);
    load_words<kGap>(gaps, own);
    load_transposed(before, own);
    Tile from_dy = {};
    if constexpr (kClamp) {
      clamp_dh();
      add_dy(dh, i);
    } else {
      add_dy(from_dy, (i + kUnit - 1) % kUnit);
    }
    Packed packed, left;
    pack_tile<T>(packed, dh);
    const uint32_t upper = times_plus<T>(packed[0], gaps[0], times<T>(packed[2], gaps[2]));
    const uint32_t lower = times_plus<T>(packed[1], gaps[1], times<T>(packed[3], gaps[3]));
    mma8<T>(df, upper, lower, pack<T>(1.f, 1.f) & masks.g[i]);
    Tile a;  // the gradient of tanh's argument
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float2 slope = unpacked<__half>(slopes[2 * n + r]);
        a[n][2 * r] = rest * dh[n][2 * r] * slope.x;
        a[n][2 * r + 1] = rest * dh[n][2 * r + 1] * slope.y;
      }
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) dh[n][e] = fmaf(f, dh[n][e], from_dy[n][e]);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float operand[4] = {a[j][0], a[j][2], a[j][1], a[j][3]};
#pragma unroll
      for (int n = 0; n < 2; ++n) mma(dh[n], operand, w.b[j][n]);
    }
    pack_tile<T>(packed, a);
    mma16<T>(dk, packed, now.v.x & masks.g[i], now.v.y & masks.g[i]);
#pragma unroll
    for (int j = 0; j < 4; ++j) left[j] = transposed(packed[j % 2 * 2 + j / 2]);
    mma16<T>(dv, left, now.k[0] & masks.g[i], now.k[1] & masks.g[i]);
    mma16<T>(some_dW[0], left, before[0], before[1]);
    mma16<T>(some_dW[1], left, before[2], before[3]);
  }
};

}  // namespace m2rnn
