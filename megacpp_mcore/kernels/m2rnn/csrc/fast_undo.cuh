// What fast_backward.cuh does backward: the gradient of the state, carried back step by step, and
// the sums it makes of a step.
//
// dh is carried in float32, in multiples of 2^-scale, in which it goes into products in fp16. So
// scale is chosen anew for each unit: as large as leaves whatever dh may become in it below 2^14.
#pragma once

#include "fast_remake.cuh"

namespace m2rnn {

// r, the largest sum of a row of |W|, or 1: |dh| before a step is at most f + (1 - f) r times that
// after it, dy apart, for no element of a is more than 1 - f times dh's.
__device__ inline float largest_row(const float* W) {
  const float* row = W + threadIdx.x % kColumns * kColumns;
  float sum = 0.f;
#pragma unroll
  for (int j = 0; j < kColumns; ++j) sum += fabsf(row[j]);
  return __uint_as_float(__reduce_max_sync(kAll, __float_as_uint(fmaxf(sum, 1.f))));
}
__device__ inline float power(int exponent) {
  return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23);
}
// Bits. W with large rows saturates tanh, and no gradient grows: reserving more costs small ones.
constexpr int kMostGrowth = 18;

template <typename T, bool kClamp>
struct Undo {
  uint32_t w[2][2];  // W^T as the right operand of a W^T
  const StepMasks masks;
  const float clamp, row;  // row: r
  const int dither;        // of 1 - f in the lane's step of a unit, to be added to a float's bits
  // Of the unit before: how much dh grows in the lane's step, in 1/16 bits; log2 of what dy adds.
  int last_growth, last_added;
  Tile dh;
  float dW[2][4];                            // its transpose
  float dk[4], dv[4], df[4], unit_dW[2][4];  // of the unit, df row by row

  const LaneInputs<T>& in;
  int t;  // first token of the unit that is sent for
  struct {
    uint2 q, k, v, dy;
    uint32_t f;
  } next;
  struct {
    uint2 q, dy;
    float ratio;  // 2^scale to that of the unit before
    int scale;
  } coming;
  uint2 q, dy, k, v;  // q dy is in multiples of 2^-scale, too
  int scale;
  float k_unit, v_unit;

  // d_final: (chains, H, K, V), or null. first: token of the first unit to undo.
  __device__ Undo(const Problem& p, const Place& at, const LaneInputs<T>& in, const float* d_final,
                  int64_t state, int first)
      : clamp(p.clamp), row(largest_row(p.W + at.head * kColumns * kColumns)),
        dither(static_cast<int>(kept((lane_g() & 1) * 4096 + (lane_g() & 2) * 1024 +
                                     (lane_g() & 4) * 256 - 3584))),
        last_growth(0), last_added(-1000), dh{}, dW{}, in(in), t(first), next{}, scale(0) {
    // Steps that the chain does not have, behind its last, are zeros, f is 1: they leave state and
    // gradients as they are.
    next.f = __float_as_uint(1.f);
    const float* W = p.W + at.head * kColumns * kColumns;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float* from = W + column_of(n, lane_g()) * kColumns + 4 * lane_t() + 2 * i;
        w[n][i] = pack<__half>(from[0], from[1]);
      }
    if (d_final) {
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) dh[n][e] = d_final[state + element(n, e)];
    }
    load(p, at);
  }
  // Offset of a lane's elements in a (K, V) state.
  __device__ static int element(int n, int e) { return e / 2 * 2 * kColumns + 2 * n + e % 2; }
  __device__ void store(float* state) const {
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) state[element(n, e)] = dh[n][e] * power(-scale);
  }
  __device__ void load(const Problem& p, const Place& at) {
    const bool valid = has_step(t, at);
    in.q.load(next.q, t, valid);
    in.k.load(next.k, t, valid);
    in.v.load(next.v, t, valid);
    in.dy.load(next.dy, t, valid && p.dy != nullptr);
    in.f.load(next.f, t, valid);
    t -= kUnit;
  }
  // Two steps ahead, so that nothing waits for it: what has been sent for as the unit to come takes
  // it. own_decay: for f and 1 - f of the lane's step. reserve: as Remake leaves it.
  __device__ void prepare(float2* own_decay, int reserve) {
    float m = 0.f;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) m = fmaxf(m, fabsf(dh[n][e]));
    const int magnitude =
        static_cast<int>(__reduce_max_sync(kAll, __float_as_uint(m)) >> 23) - scale - 126;
    const float q_unit = unit_of<T>(next.q);
    const int q_exponent = exponent(q_unit), dy_exponent = exponent(unit_of<T>(next.dy));
    const float f = __uint_as_float(next.f), rest = 1.f - f;
    const int growth = static_cast<int>(fmaf(16.f, log2_of(fabsf(f) + fabsf(rest) * row), 0.99f));
    // Of eight steps and two; four lanes have a step's.
    const int all = __reduce_add_sync(kAll, growth + (lane_g() < 2 ? last_growth : 0));
    last_growth = growth;
    // |dh| < 2^magnitude, and eight steps' |q dy| < 2^added.
    const int added = q_exponent + dy_exponent + 5;
    const int largest = max(max(magnitude, last_added), added) + 2 +
                        min((all + 63) >> 6, kMostGrowth) + reserve;
    last_added = added;
    coming.scale = min(max(14 - largest, -126), min(112, scale + 127));
    coming.ratio = power(max(coming.scale - scale, -126));
    coming.q = next.q;
    if constexpr (std::is_same_v<T, __half>) {
      coming.q = in_units<T>(coming.q, inverse(q_unit));
      coming.dy = in_units<T>(next.dy, power(max(min(coming.scale + q_exponent, 127), -126)));
    } else {
      const float of_dy = power(coming.scale);
      const uint32_t pair = pack<T>(of_dy, of_dy);
      coming.dy = make_uint2(times<T>(next.dy.x, pair), times<T>(next.dy.y, pair));
    }
    coming.q = transposed(coming.q), coming.dy = transposed(coming.dy);
    // Else what fp16 takes off 1 - f would be the same at every step of a constant f. (0 stays 0.)
    const float dithered = rest == 0.f ? 0.f : __int_as_float(__float_as_int(rest) + dither);
    *own_decay = make_float2(f, __uint_as_float(pack<__half>(dithered, dithered)));
    __syncwarp();
  }
  // To the unit that has been prepared, its last step's dy included.
  __device__ void enter(const Problem& p, const Place& at) {
    q = coming.q, dy = coming.dy, scale = coming.scale;
    k_unit = unit_of<T>(next.k), v_unit = unit_of<T>(next.v);
    k = in_units<T>(next.k, inverse(k_unit)), v = in_units<T>(next.v, inverse(v_unit));
    load(p, at);
    Tile from_dy = {};
    if constexpr (!kClamp) add_dy(from_dy, kUnit - 1);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        dh[n][e] = fmaf(coming.ratio, dh[n][e], from_dy[n][e]);
        unit_dW[n][e] = 0.f;
      }
#pragma unroll
    for (int e = 0; e < 4; ++e) dk[e] = dv[e] = df[e] = 0.f;
  }
  // Returns what df is to be multiplied with.
  __device__ float end_unit() {
    const float down = power(-scale), of_dk = down * v_unit, of_dv = down * k_unit;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      dk[e] *= of_dk, dv[e] *= of_dv;
#pragma unroll
      for (int n = 0; n < 2; ++n) dW[n][e] = fmaf(unit_dW[n][e], down, dW[n][e]);
    }
    return down;
  }

  // to += q dy^T of step i of the unit.
  __device__ void add_dy(Tile& to, int i) const {
    const uint32_t mask = masks.pair(i);
    mma8<T>(to[0], q.x, q.y, dy.x & mask);
    mma8<T>(to[1], q.x, q.y, dy.y & mask);
  }
  // A NaN stays one: it compares false with either limit.
  __device__ void clamp_dh() {
    const float limit = clamp * power(scale);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        dh[n][e] = dh[n][e] > limit ? limit : dh[n][e] < -limit ? -limit : dh[n][e];
  }
  // Step i of the unit, backwards; own: where the lane's elements of its slot are in shared memory.
  // dh is the gradient of the state behind the step, dy's part included, or, where it is clamped,
  // to be included.
  __device__ void step(int i, uint32_t own, const float2* decay) {
    const float f = decay[i].x;
    const uint32_t rest = __float_as_uint(decay[i].y);
    Packed z, h, before, a, left;
    load_words<kZ>(z, own);
    load_matrices(h, own);
    load_transposed(before, own);
    Tile from_dy = {};
    if constexpr (kClamp) {
      clamp_dh();
      add_dy(dh, i);
    } else if (i > 0) {
      add_dy(from_dy, i - 1);
    }
    pack_tile<__half>(a, dh);
    Packed products;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t gap = minus<__half>(h[j], z[j]);
      products[j] = j < 2 ? times<__half>(a[j], gap)
                          : times_plus<__half>(a[j], gap, products[j - 2]);
      a[j] = times<__half>(a[j], times<__half>(rest, one_minus_square(z[j])));
    }
    mma8<__half>(df, products[2], products[3], pack<__half>(1.f, 1.f) & masks.g[i]);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) dh[n][e] = fmaf(f, dh[n][e], from_dy[n][e]);
      mma16<__half>(dh[n], a, w[n][0], w[n][1]);
    }
    mma16<__half>(dk, a, v.x & masks.g[i], v.y & masks.g[i]);
#pragma unroll
    for (int j = 0; j < 4; ++j) left[j] = transposed(a[j % 2 * 2 + j / 2]);
    mma16<__half>(unit_dW[0], left, before[0], before[1]);
    mma16<__half>(unit_dW[1], left, before[2], before[3]);
    mma16<__half>(dv, left, k.x & masks.g[i], k.y & masks.g[i]);
  }
  __device__ static uint32_t one_minus_square(uint32_t z) {
    const __half2 x = as_pair<__half>(z);
    return as_bits(__hfma2(__hneg2(x), x, __float2half2_rn(1.f)));
  }
};

}  // namespace m2rnn
