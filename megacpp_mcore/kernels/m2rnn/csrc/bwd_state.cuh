// The gradient warp of bwd.cuh: the gradient of the state, step by step backwards, and the
// gradients of k, v, f and W.
//
// dh is carried in float32 as dh * 2^shift and rounded to fp16 for products. shift is chosen for
// each unit as large as keeps dh below 2^14 throughout the unit ("The scale of dh" in
// docs/m2rnn-kernels.md). The same bound tells whether anything in the unit can reach the clamp; if
// not, which is so in training, the unit's steps leave the clamp out.
#pragma once

#include "bwd_recompute.cuh"

namespace m2rnn {

// r = max(1, max_i sum_j |W_ij|). Without dy, one step backwards multiplies max |dh| by at most
// f + (1 - f) r.
__device__ inline float max_row_sum(const float* W) {
  const float* row = W + threadIdx.x % kColumns * kColumns;
  float sum = 0.f;
#pragma unroll
  for (int j = 0; j < kColumns; ++j) sum += fabsf(row[j]);
  return __uint_as_float(__reduce_max_sync(kFullMask, __float_as_uint(fmaxf(sum, 1.f))));
}
__device__ inline float exp2i(int exponent) {
  return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23);
}
// Limit in bits of the growth reserved for a unit. W with large rows saturates tanh, which stops
// the growth, and reserving more would cost small gradients their bits.
constexpr int kMaxGrowth = 18;

template <typename T, bool kClamp>
struct StateGradient {
  uint32_t w[2][2];  // W^T as the right operand of a W^T
  const StepMasks masks;
  const float clamp, max_row;  // max_row: r
  bool clamps;                 // in this unit
  const int dither;  // added to the bits of 1 - f, before it is rounded to fp16
  // Of the previous unit: growth of dh in the lane's step in 1/16 bits, and log2 of what dy adds.
  int last_growth, last_added;
  Tile dh;
  float dW[2][4];                            // transposed
  float dk[4], dv[4], df[4], unit_dW[2][4];  // of the unit; df by rows

  const LaneInputs<T>& in;
  int t;  // first token of the unit to load next
  struct {
    uint2 q, k, v, dy;
    uint32_t f;
  } next;
  struct {
    uint2 q, dy;
    float ratio;  // 2^(shift - shift of the unit before)
    int shift;
    bool clamps;
  } prepared;
  uint2 q, dy, k, v;  // q dy has the factor 2^shift, too
  int shift;
  float k_scale, v_scale;

  // d_final: (chains, H, K, V), or null. first: first token of the chain's last unit.
  __device__ StateGradient(const Params& p, const Place& at, const LaneInputs<T>& in,
                           const float* d_final, int64_t state, int first)
      : clamp(p.clamp), max_row(max_row_sum(p.W + at.head * kColumns * kColumns)),
        dither(static_cast<int>(opaque((lane_g() & 1) * 4096 + (lane_g() & 2) * 1024 +
                                       (lane_g() & 4) * 256 - 3584))),
        last_growth(0), last_added(-1000), dh{}, dW{}, in(in), t(first), next{}, shift(0) {
    // Steps after the chain's last are padded with f = 1 and zeros, which leaves state and
    // gradients unchanged.
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
      for (int e = 0; e < 4; ++e) state[element(n, e)] = dh[n][e] * exp2i(-shift);
  }
  __device__ void load(const Params& p, const Place& at) {
    const bool valid = has_step(t, at);
    in.q.load(next.q, t, valid);
    in.k.load(next.k, t, valid);
    in.v.load(next.v, t, valid);
    in.dy.load(next.dy, t, valid && p.dy != nullptr);
    in.f.load(next.f, t, valid);
    t -= kUnit;
  }
  // Chooses the shift of the next unit from its inputs, which are in `next`, and scales its q and
  // dy; called two steps early, so that nothing waits for it. own_decay: output, f and 1 - f of the
  // lane's step. headroom: of Recompute::enter_chunk.
  __device__ void prepare(float2* own_decay, int headroom) {
    float m = 0.f;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) m = fmaxf(m, fabsf(dh[n][e]));
    const int magnitude =
        static_cast<int>(__reduce_max_sync(kFullMask, __float_as_uint(m)) >> 23) - shift - 126;
    const float q_scale = scale_of<T>(next.q);
    const int q_exponent = exponent(q_scale), dy_exponent = exponent(scale_of<T>(next.dy));
    const float f = __uint_as_float(next.f), rest = 1.f - f;
    const float factor = fabsf(f) + fabsf(rest) * max_row;
    const int growth = static_cast<int>(fmaf(16.f, log2_approx(factor), 0.99f));
    // The growth over the eight steps and the two still to come; four lanes have a step each.
    const int all = __reduce_add_sync(kFullMask, growth + (lane_g() < 2 ? last_growth : 0));
    last_growth = growth;
    // |dh| < 2^magnitude, and the sum of |q dy| over the eight steps is < 2^added.
    const int added = q_exponent + dy_exponent + 5;
    const int first = max(max(magnitude, last_added), added) + 2, grown = (all + 63) >> 6;
    const int largest = first + min(grown, kMaxGrowth) + headroom;
    // |dh| < 2^(first + grown) throughout the unit.
    prepared.clamps = kClamp && first + grown > exponent(clamp);
    last_added = added;
    prepared.shift = min(max(14 - largest, -126), min(112, shift + 127));
    prepared.ratio = exp2i(max(prepared.shift - shift, -126));
    prepared.q = next.q;
    if constexpr (std::is_same_v<T, __half>) {
      prepared.q = scaled<T>(prepared.q, inverse(q_scale));
      prepared.dy = scaled<T>(next.dy, exp2i(max(min(prepared.shift + q_exponent, 127), -126)));
    } else {
      const float of_dy = exp2i(prepared.shift);
      const uint32_t pair = pack<T>(of_dy, of_dy);
      prepared.dy = make_uint2(times<T>(next.dy.x, pair), times<T>(next.dy.y, pair));
    }
    prepared.q = transposed(prepared.q), prepared.dy = transposed(prepared.dy);
    // Dithered, as the rounding error of 1 - f would be the same at every step of a constant f.
    const float dithered = rest == 0.f ? 0.f : __int_as_float(__float_as_int(rest) + dither);
    *own_decay = make_float2(f, __uint_as_float(pack<__half>(dithered, dithered)));
    __syncwarp();
  }
  // Enters the prepared unit, and adds its last step's dy to dh, except with a clamp.
  __device__ void enter(const Params& p, const Place& at) {
    q = prepared.q, dy = prepared.dy, shift = prepared.shift, clamps = prepared.clamps;
    k_scale = scale_of<T>(next.k), v_scale = scale_of<T>(next.v);
    k = scaled<T>(next.k, inverse(k_scale)), v = scaled<T>(next.v, inverse(v_scale));
    load(p, at);
    Tile from_dy = {};
    if (!kClamp || !clamps) add_dy(from_dy, kUnit - 1);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        dh[n][e] = fmaf(prepared.ratio, dh[n][e], from_dy[n][e]);
        unit_dW[n][e] = 0.f;
      }
#pragma unroll
    for (int e = 0; e < 4; ++e) dk[e] = dv[e] = df[e] = 0.f;
  }
  // Scales the unit's sums; returns 2^-shift, the factor of df.
  __device__ float end_unit() {
    const float down = exp2i(-shift), of_dk = down * v_scale, of_dv = down * k_scale;
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
  // dh, clamped, plus q dy^T of step i.
  __device__ void clamp_dh(int i) {
    const float limit = clamp * exp2i(shift);
    Tile from_dy = {};
    add_dy(from_dy, i);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) dh[n][e] = within(dh[n][e], limit) + from_dy[n][e];
  }
  // Step i of the unit, backwards. own: shared-memory address of the lane's part of its slot.
  // On entry dh is the gradient of the state after the step, with this step's q dy^T already added,
  // except with a clamp, which comes before that addition.
  template <bool kClamps>
  __device__ void step(int i, uint32_t own, const float2* decay) {
    const float f = decay[i].x;
    const uint32_t rest = __float_as_uint(decay[i].y);
    Packed z, h, before, a, left;
    load_words<kZOffset>(z, own);
    load_matrices(h, own);
    load_transposed(before, own);
    Tile from_dy = {};
    if constexpr (kClamps) {
      clamp_dh(i);
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
