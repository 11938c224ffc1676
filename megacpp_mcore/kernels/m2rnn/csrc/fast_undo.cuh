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

__device__ inline void unpack(float (&to)[8], const uint4& from) {
  const uint32_t words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float2 x = __half22float2(*reinterpret_cast<const __half2*>(&words[j]));
    to[2 * j] = x.x, to[2 * j + 1] = x.y;
  }
}

template <typename T, bool kClamp>
struct Undo {
  const TransposedWeight w;
  const float clamp;
  Tile dh;
  float dW[2][4];                        // its transpose
  float dk[4], dv[4], unit_dW[2][4];     // of the unit

  const LaneInputs<T>& in;
  int t;  // first token of the unit that is sent for
  struct {
    uint32_t q[2], k[2];
    uint2 v, dy;
    float f, limit;
  } next, now;

  // first: token of the first unit to undo.
  __device__ Undo(const Problem& p, const Place& at, const LaneInputs<T>& in, int64_t state,
                  int first)
      : w(p.W + at.head * kColumns * kColumns), clamp(p.clamp), dh{}, dW{}, in(in), t(first) {
    if (p.d_final) {
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) dh[n][e] = p.d_final[state + element(n, e)];
    }
    load(p, at);
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
  // Takes the unit's inputs and sends for those of the unit before.
  __device__ void enter(const Problem& p, const Place& at) {
    now = next;
    now.q[0] = transposed(next.q[0]), now.q[1] = transposed(next.q[1]);
    now.dy = make_uint2(transposed(next.dy.x), transposed(next.dy.y));
    t -= kUnit;
    load(p, at);
#pragma unroll
    for (int e = 0; e < 4; ++e) dk[e] = dv[e] = unit_dW[0][e] = unit_dW[1][e] = 0.f;
  }
  // A tensor core cuts its sums: few terms each, then additions that round.
  __device__ void leave() {
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) dW[n][e] += unit_dW[n][e];
  }

  // Step i of the unit, backwards; own: the lane's elements of its slot. Returns the lane's share
  // of df.
  __device__ float step(int i, const uint4* own) {
    const float f = __shfl_sync(kAll, now.f, 4 * i), rest = 1.f - f;
    float slope[8], gap[8];
    unpack(slope, own[32]);
    unpack(gap, own[64]);
    if constexpr (kClamp) {
      // A NaN stays one: it compares false with either limit.
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          dh[n][e] = dh[n][e] > now.limit    ? now.limit
                     : dh[n][e] < -now.limit ? -now.limit
                                             : dh[n][e];
    }
    const uint32_t mask = step_mask(i);
    mma8<T>(dh[0], now.q[0], now.q[1], now.dy.x & mask);
    mma8<T>(dh[1], now.q[0], now.q[1], now.dy.y & mask);
    float df = 0.f;
    Tile a;  // the gradient of tanh's argument
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float from_z = rest * dh[n][e];
        df = fmaf(dh[n][e], gap[4 * n + e], df);
        a[n][e] = from_z * slope[4 * n + e];
        dh[n][e] -= from_z;
      }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float operand[4] = {a[j][0], a[j][2], a[j][1], a[j][3]};
#pragma unroll
      for (int n = 0; n < 2; ++n) mma(dh[n], operand, w.b[j][n]);
    }
    Packed packed, left;
    pack_tile<T>(packed, a);
    mma_step<T>(dk, packed, now.v.x, now.v.y, i);
#pragma unroll
    for (int j = 0; j < 4; ++j) left[j] = transposed(packed[j % 2 * 2 + j / 2]);
    mma_step<T>(dv, left, now.k[0], now.k[1], i);
    const uint4 h = own[0];
    mma16<T>(unit_dW[0], left, transposed(h.x), transposed(h.y));
    mma16<T>(unit_dW[1], left, transposed(h.z), transposed(h.w));
    return df;
  }
};

}  // namespace m2rnn
