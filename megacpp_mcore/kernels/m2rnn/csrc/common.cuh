// What the kernels of M2RNN share: the problem, a block's place in it; and, for float32 inputs, the
// tile of a warp and one step of the recurrence.
//
// A chain is one head of one document. Its K rows do not depend on each other, so a block takes 32
// rows of a chain, a warp 8, and a step exchanges nothing. Thread 4 g + t of a warp holds columns
// 4 t .. 4 t + 3 of row g, in fp32. That is how m16n8k8 hands out its result, and how it takes its
// left operand, when the columns are numbered 4 t + 2 n + i (column tile n, i = 0, 1); so the
// result of a step is the operand of the next. The 16 rows of the operand are the 8 rows of the
// state twice: rows 0 - 7 its upper 11 bits, rows 8 - 15 the rest. With W in two parts as well, the
// product is good to 2^-20 relative to the sum of the absolute products.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <type_traits>

namespace m2rnn {

constexpr int kColumns = 16;       // V
constexpr int kRows = 32;          // rows of the state in a block
constexpr int kThreads = 128;      // four threads a row
constexpr int kSteps = 16;         // steps a block stages at once
constexpr int kMaxStages = 4;      // stages a checkpoint covers, at most
constexpr float kTwoLog2E = 2.8853900817779268f;

// Also in megacpp_mcore/kernels/m2rnn/cuda.py, field by field. Strides are in elements; rows of q,
// k, v and dy are contiguous. A pointer that may be null says so.
struct Problem {
  const void *q, *k, *v;
  const float *W, *f;
  const float* initial;          // (chains, H, K, V), or null
  const int32_t* bounds;         // (documents + 1,) tokens in row 0, or null: every row a document
  const int32_t* first_chunk;    // (documents,), index of a document's first checkpoint, or null
  void* checkpoints;             // (chunks, H, K, V), in fp16, for float inputs in float
  float* final_state;            // (chains, H, K, V)
  void* y;                       // (B, S, H, V)
  float* y_parts;                // (groups, B, S, H, V), or null with one group
  int32_t* y_counts;             // zeros, (B * S / 32 + 3 chains, H), or null for float inputs
  int32_t* carried;              // zeros, (chains, H, K / 8), or null for float inputs
  const void* dy;                // (B, S, H, V) contiguous, or null
  const float* d_final;          // (chains, H, K, V), or null
  void *dq, *dk, *dv;            // as q, k, v, contiguous
  float *dW, *df, *d_initial;    // (H, V, V), (B, S, H), (chains, H, K, V)
  void *dq_parts, *dk_parts;     // (B, S, H, K), as q; dq and dk themselves with heads of their own
  void* dv_parts;                // (groups, B, S, H, V); for 16-bit inputs (K / 16, B, S, H, V)
  float* df_parts;               // (groups, B, S, H); for 16-bit inputs (K / 16, B, S, H)
  float* dW_parts;               // (chains * groups, H, V, V)
  int32_t* undone;               // zeros: segments, (chains, H, groups); then the blocks begun
  int64_t q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head;
  int64_t f_batch, f_token, f_head;
  int32_t chains, batch, tokens, heads, q_heads, k_heads, k_dim, stages;
  int32_t groups;                // blocks that share a head's rows
  int32_t slots;                 // fast forward: bundles of heads that are computed at a time
  int32_t bundle;                // fast forward: heads of a block, 1; 3 if they share q and k
  int32_t segments;              // fast backward: of a chain, each in blocks of its own
  float clamp;                   // 0 or less: none
  int32_t exact_tanh;            // forward; 0: the GPU's instruction, for 16-bit inputs
};

// A block's place: which rows of which chain, and where its tokens lie.
struct Place {
  int chain, head, group, groups, row0;  // row0: first row of the block
  int batch, start, length, first_chunk;
  int first = 0;                 // token of a segment of the chain; its `length` is where it ends
  int64_t state;                 // offset of a thread's four values in a (H, K, V) state (kRows)

  __device__ Place(const Problem& p, int rows) : Place(p, rows, blockIdx.x / p.groups) {}
  // job: of all chains' heads.
  __device__ Place(const Problem& p, int rows, int job)
      : Place(p, rows, job, blockIdx.x % p.groups) {}
  __device__ Place(const Problem& p, int rows, int job, int group) : group(group) {
    groups = p.groups;
    head = job % p.heads;
    chain = job / p.heads;
    row0 = group * rows;
    if (p.bounds) {
      batch = 0;
      start = p.bounds[chain];
      length = p.bounds[chain + 1] - start;
      first_chunk = p.first_chunk[chain];
    } else {
      batch = chain;
      start = 0;
      length = p.tokens;
      first_chunk = chain * ceil_div(p.tokens, p.stages * kSteps);
    }
    state = (static_cast<int64_t>(head) * p.k_dim + row0) * kColumns + threadIdx.x * 4;
  }
  __host__ __device__ static int ceil_div(int a, int b) { return (a + b - 1) / b; }
  // Index of a token among those of the whole batch.
  __device__ int64_t token(const Problem& p, int t) const {
    return static_cast<int64_t>(batch) * p.tokens + start + t;
  }
};

__device__ inline int64_t state_size(const Problem& p) {
  return static_cast<int64_t>(p.heads) * p.k_dim * kColumns;
}

// Four neighbouring elements, as they lie in memory.
template <typename T>
struct Unit {
  using Raw = uint2;
};
template <>
struct Unit<float> {
  using Raw = float4;
};

__device__ inline float4 widen(float4 x, const float*) { return x; }
__device__ inline float4 widen(uint2 x, const __nv_bfloat16*) {
  return make_float4(__uint_as_float(x.x << 16), __uint_as_float(x.x & 0xffff0000u),
                     __uint_as_float(x.y << 16), __uint_as_float(x.y & 0xffff0000u));
}
__device__ inline float4 widen(uint2 x, const __half*) {
  const float2 low = __half22float2(*reinterpret_cast<__half2*>(&x.x));
  const float2 high = __half22float2(*reinterpret_cast<__half2*>(&x.y));
  return make_float4(low.x, low.y, high.x, high.y);
}
__device__ inline float4 narrow(float4 x, const float*) { return x; }
__device__ inline uint2 narrow(float4 x, const __nv_bfloat16*) {
  __nv_bfloat162 low = __floats2bfloat162_rn(x.x, x.y), high = __floats2bfloat162_rn(x.z, x.w);
  return make_uint2(*reinterpret_cast<uint32_t*>(&low), *reinterpret_cast<uint32_t*>(&high));
}
__device__ inline uint2 narrow(float4 x, const __half*) {
  __half2 low = __floats2half2_rn(x.x, x.y), high = __floats2half2_rn(x.z, x.w);
  return make_uint2(*reinterpret_cast<uint32_t*>(&low), *reinterpret_cast<uint32_t*>(&high));
}

template <typename T>
__device__ typename Unit<T>::Raw load_unit(const T* x, bool valid) {
  return valid ? __ldg(reinterpret_cast<const typename Unit<T>::Raw*>(x)) : typename Unit<T>::Raw{};
}

__device__ inline void load4(float (&x)[4], const float* from) {
  const float4 value = *reinterpret_cast<const float4*>(from);
  x[0] = value.x, x[1] = value.y, x[2] = value.z, x[3] = value.w;
}
__device__ inline void store4(float* to, const float (&x)[4]) {
  *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
}

// The upper 11 bits of the mantissa, which is what a tensor core reads; the rest is exact in fp32.
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

// A V x V matrix as the right operand, in two parts: [part of the sum][column tile][value].
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

// h <- f h + (1 - f) z with z = tanh(h W + k v^T) = 1 - 2 r, r = 1 / (1 + 2^x). `w` and k come
// multiplied by 2 log2(e), so that x is the exponent itself; decay is (f, 1 - f, -2 (1 - f), .).
// z is off by at most 2^-21 beyond what its argument is off by: 2^x is good to 2 ulp, r to 1.
__device__ inline void step(float (&h)[4], float (&r)[4], const Weight& w, float k,
                            const float (&v)[4], const float4& decay) {
  float main[2][4], rest[2][4];
  product(main, rest, h, w);
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int n = e / 2, i = e % 2;
    const float x = (main[n][i] + main[n][2 + i]) + fmaf(k, v[e], rest[n][i]);
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r[e]) : "f"(power + 1.f));
    h[e] = fmaf(decay.z, r[e], fmaf(decay.x, h[e], decay.y));
  }
}

// Where a thread's four values of one step lie in shared memory. Rows 2, 3, 6, 7 swap their halves,
// so that reading two columns of four rows at once meets every bank once.
__device__ inline int slot() { return (threadIdx.x ^ ((threadIdx.x >> 2) & 2)) * 4; }
__device__ inline int slot_of(int row, int quad) { return row * 16 + (quad ^ (row & 2)) * 4; }

// Rows of q and k lie even ones first, then odd ones: see `rows_sum`.
__device__ inline int row_place(int row) { return (row & 1) * (kRows / 2) + (row >> 1); }

// The inputs of kSteps steps, in fp32. A step behind the last of the chain has f = 1 and zeros: it
// leaves state and gradients as they are.
struct Inputs {
  float q[kSteps][kRows], k[kSteps][kRows], v[kSteps][kColumns], dy[kSteps][kColumns];
  float4 decay[kSteps];  // f, 1 - f, -2 (1 - f), 4 (1 - f)
};

// A block's next inputs on their way through registers.
struct Stage {
  float4 q, k, v;
  float f;

  // v: of dy in threads 64 - 127.
  __device__ void load(const Problem& p, const Place& at, int t0) {
    const int step = threadIdx.x / 8, unit = threadIdx.x % 8;
    const bool valid = t0 + step < at.length;
    const int64_t token = at.start + t0 + step;
    const int row = at.row0 + unit * 4;
    q = load_unit(static_cast<const float*>(p.q) + at.batch * p.q_batch + token * p.q_token +
                      (p.q_heads == 1 ? 0 : at.head * p.q_head) + row, valid);
    k = load_unit(static_cast<const float*>(p.k) + at.batch * p.k_batch + token * p.k_token +
                      (p.k_heads == 1 ? 0 : at.head * p.k_head) + row, valid);
    const int part = threadIdx.x % 64, v_step = part / 4, column = part % 4 * 4;
    const bool v_valid = t0 + v_step < at.length;
    const int64_t v_token = at.start + t0 + v_step;
    if (threadIdx.x < 64) {
      v = load_unit(static_cast<const float*>(p.v) + at.batch * p.v_batch + v_token * p.v_token +
                        at.head * p.v_head + column, v_valid);
    } else {
      const int64_t row_of_dy = at.token(p, t0 + v_step) * p.heads + at.head;
      v = load_unit(static_cast<const float*>(p.dy) + row_of_dy * kColumns + column,
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
    if (threadIdx.x < kSteps) {
      const float rest = 1.f - f;
      to.decay[threadIdx.x] = make_float4(f, rest, -2.f * rest, 4.f * rest);
    }
  }
};

// Sums over the block's rows: out[s] = sum_row weight[s][row] x[s][row] for all steps s at once, x
// as `slot` lays it out. Eight lanes a step: one column quad and every second row each. Lanes of
// even rows return the sum of step `summed_step()`, columns `summed_column()` on.
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
