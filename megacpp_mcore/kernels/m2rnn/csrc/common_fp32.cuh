// For float32 inputs: a warp's tile of the state, and one step of the recurrence.
//
// A warp has 8 rows of a chain; thread 4 g + t holds columns 4 t .. 4 t + 3 of row g in fp32. With
// the columns numbered 4 t + 2 n + i (column tile n, i = 0, 1) that is both the layout of the
// result of mma.m16n8k8 and that of its left operand, so the result of a step is the operand of
// the next one. The operand's 16 rows are the 8 rows of the state twice: rows 0 - 7 its upper 11
// bits, rows 8 - 15 the remainder. W is in two parts as well (error bound: docs/m2rnn-kernels.md).
#pragma once

#include "common.cuh"

namespace m2rnn {

// The upper 11 bits of the mantissa, all that a tensor core reads; the remainder is exact in fp32.
__device__ inline float upper(float x) {
  return __uint_as_float(__float_as_uint(x) & 0xffffe000u);
}

__device__ inline void mma(float (&c)[4], const float (&a)[4], const float (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
        "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
}

// A V x V matrix as the right operand in two parts: [part of the inner sum][column tile][value].
struct Weight {
  float high[2][2][2], low[2][2][2];

  // Element (from, to) is x[from * row + to * column] * scale.
  __device__ void load(const float* x, int row, int column, float scale) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int from = 4 * t + 2 * j + i, to = 4 * (g / 2) + 2 * n + g % 2;
          const float value = x[from * row + to * column] * scale;
          high[j][n][i] = upper(value);
          low[j][n][i] = value - high[j][n][i];
        }
  }
};

// x times the weight: element 2 n + i is main[n][i] + main[n][2 + i] + rest[n][i].
__device__ inline void product(float (&main)[2][4], float (&rest)[2][4], const float (&x)[4],
                               const Weight& w) {
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) main[n][e] = rest[n][e] = 0.f;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const float a = upper(x[2 * j]), b = upper(x[2 * j + 1]);
    const float operand[4] = {a, x[2 * j] - a, b, x[2 * j + 1] - b};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      mma(main[n], operand, w.high[j][n]);
      mma(rest[n], operand, w.low[j][n]);
    }
  }
}

__device__ inline float reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// z = tanh(y) and its slope 1 - z^2, of one number in which both have all their digits. With
// p = e^(2 |y|) and r = 1 / (1 + p), |z| = 1 - 2 r is off by at most 2^-21 (p has 2 ulp, r has 1),
// which is too much for a small gate: where |y| < 1/4 the number is z itself, the series
// y - y^3 / 3 + ..., whose first dropped term is 2^-26 of it there. Elsewhere it is 1 + p with the
// sign of z: the slope 4 r (1 - r) of a saturated gate is far smaller than z's rounding.
struct Gate {
  float kept;

  // y is x / (2 log2(e)): |x| is the exponent of p as a power of two.
  __device__ static Gate of_exponent(float x) {
    float p;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(p) : "f"(fabsf(x)));
    const float y = x * (1.f / kTwoLog2E), square = y * y;
    float series = fmaf(square, 62.f / 2835.f, -17.f / 315.f);
    series = fmaf(series, square, 2.f / 15.f);
    series = fmaf(series, square, -1.f / 3.f);
    return {fabsf(y) < 0.25f ? fmaf(series * square, y, y) : copysignf(1.f + p, x)};
  }
  __device__ bool small() const { return fabsf(kept) < 1.f; }
  __device__ float z() const {
    return small() ? kept : copysignf(fmaf(-2.f, reciprocal(fabsf(kept)), 1.f), kept);
  }
  __device__ float slope() const {
    const float r = reciprocal(fabsf(kept));
    return small() ? fmaf(-kept, kept, 1.f) : 4.f * fmaf(-r, r, r);
  }
};

// h <- f h + (1 - f) z with z = tanh(h W + k v^T). `w` and k are multiplied by 2 log2(e)
// beforehand. decay: (f, 1 - f). gates: what `Gate` keeps of each z.
__device__ inline void step(float (&h)[4], float (&gates)[4], const Weight& w, float k,
                            const float (&v)[4], const float2& decay) {
  float main[2][4], rest[2][4];
  product(main, rest, h, w);
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int n = e / 2, i = e % 2;
    const Gate gate =
        Gate::of_exponent((main[n][i] + main[n][2 + i]) + fmaf(k, v[e], rest[n][i]));
    gates[e] = gate.kept;
    h[e] = fmaf(decay.y, gate.z(), decay.x * h[e]);
  }
}

// Offset in shared memory of a thread's four values of one step. Rows 2, 3, 6, 7 swap their halves,
// so that reading two columns of four rows at once has no bank conflict.
__device__ inline int slot() { return (threadIdx.x ^ ((threadIdx.x >> 2) & 2)) * 4; }
__device__ inline int slot_of(int row, int quad) { return row * 16 + (quad ^ (row & 2)) * 4; }

// Rows of q and k are stored even ones first, then odd ones: see `rows_sum`.
__device__ inline int row_place(int row) { return (row & 1) * (kRows / 2) + (row >> 1); }

// The inputs of kSteps steps in fp32. Steps after the chain's last are padded with f = 1 and zeros,
// which leaves state and gradients unchanged.
struct Inputs {
  float q[kSteps][kRows], k[kSteps][kRows], v[kSteps][kColumns], dy[kSteps][kColumns];
  float2 decay[kSteps];  // f, 1 - f
};

// A block's next inputs, prefetched into registers.
struct Stage {
  float4 q, k, v;
  float f;

  // Threads 0 - 63 load v, threads 64 - 127 dy into `v`.
  __device__ void load(const Params& p, const Place& at, int t0) {
    const int step = threadIdx.x / 8, unit = threadIdx.x % 8;
    const bool valid = t0 + step < at.length;
    const int64_t token = at.start + t0 + step;
    const int row = at.row0 + unit * 4;
    q = load_vec4(static_cast<const float*>(p.q) + at.batch * p.q_batch + token * p.q_token +
                      (p.q_heads == 1 ? 0 : at.head * p.q_head) + row, valid);
    k = load_vec4(static_cast<const float*>(p.k) + at.batch * p.k_batch + token * p.k_token +
                      (p.k_heads == 1 ? 0 : at.head * p.k_head) + row, valid);
    const int part = threadIdx.x % 64, v_step = part / 4, column = part % 4 * 4;
    const bool v_valid = t0 + v_step < at.length;
    const int64_t v_token = at.start + t0 + v_step;
    if (threadIdx.x < 64) {
      v = load_vec4(static_cast<const float*>(p.v) + at.batch * p.v_batch + v_token * p.v_token +
                        at.head * p.v_head + column, v_valid);
    } else {
      const int64_t row_of_dy = at.token(p, t0 + v_step) * p.heads + at.head;
      v = load_vec4(static_cast<const float*>(p.dy) + row_of_dy * kColumns + column,
                    v_valid && p.dy != nullptr);
    }
    if (threadIdx.x < kSteps)
      f = t0 + threadIdx.x < at.length
              ? __ldg(p.f + at.batch * p.f_batch + (at.start + t0 + threadIdx.x) * p.f_token +
                      at.head * p.f_head)
              : 1.f;
  }

  __device__ void store(Inputs& to) const {
    const int step = threadIdx.x / 8, unit = threadIdx.x % 8;
    float* even_q = &to.q[step][unit * 2];
    *reinterpret_cast<float2*>(even_q) = make_float2(q.x, q.z);
    *reinterpret_cast<float2*>(even_q + kRows / 2) = make_float2(q.y, q.w);
    float* even_k = &to.k[step][unit * 2];
    *reinterpret_cast<float2*>(even_k) = make_float2(k.x * kTwoLog2E, k.z * kTwoLog2E);
    *reinterpret_cast<float2*>(even_k + kRows / 2) = make_float2(k.y * kTwoLog2E, k.w * kTwoLog2E);
    const int part = threadIdx.x % 64;
    float* row = threadIdx.x < 64 ? to.v[part / 4] : to.dy[part / 4];
    *reinterpret_cast<float4*>(row + part % 4 * 4) = v;
    if (threadIdx.x < kSteps) to.decay[threadIdx.x] = make_float2(f, 1.f - f);
  }
};

// Sums over the block's rows, out[s] = sum_row weight[s][row] x[s][row], for all steps s at once; x
// is laid out as in `slot`. Eight lanes share a step: each has four columns and every second row.
// Lanes with `holds_sum()` return step `summed_step()`, four columns from `summed_column()` on.
__device__ inline int summed_step() { return threadIdx.x / 8; }
__device__ inline int summed_column() { return threadIdx.x % 4 * 4; }
__device__ inline bool holds_sum() { return (threadIdx.x & 4) == 0; }

__device__ inline float4 rows_sum(const float (*x)[kRows * kColumns],
                                  const float (*weight)[kRows]) {
  const int quad = threadIdx.x % 4, half = threadIdx.x / 4 % 2, s = summed_step();
  float sum[4] = {};
#pragma unroll
  for (int block = 0; block < kRows / 8; ++block) {
    float w[4];
    load4(w, &weight[s][half * (kRows / 2) + block * 4]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float value[4];
      load4(value, &x[s][slot_of(2 * (block * 4 + i) + half, quad)]);
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[e] = fmaf(w[i], value[e], sum[e]);
    }
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) sum[e] += __shfl_xor_sync(0xffffffffu, sum[e], 4);
  return make_float4(sum[0], sum[1], sum[2], sum[3]);
}

}  // namespace m2rnn
