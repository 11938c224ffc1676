// Shared by the forward and backward kernels for 16-bit inputs.
//
// Thread 4 g + t of a warp is lane (g, t), as in PTX's tables of mma's operands. State and gradient
// of the state are fp32; the factors of products are 16-bit. Steps are processed in units of 8.
#pragma once

#include "common.cuh"

namespace m2rnn {

constexpr int kUnit = 8;  // steps of a unit, whose inputs are loaded at once
constexpr int kTileRows = 16;
constexpr unsigned kFullMask = 0xffffffffu;
// A lane's elements of 16 rows and all columns: [n][2 r + i] is column 4 t + 2 n + i of row
// g + 8 r. So numbered it is the result of m16n8k16 and, two columns a word, its left operand.
using Tile = float[2][4];
using Packed = uint32_t[4];  // [2 n + r]

__device__ inline int lane_g() { return threadIdx.x % 32 / 4; }
__device__ inline int lane_t() { return threadIdx.x % 4; }

template <typename X>
__device__ inline uint32_t as_bits(const X& pair) {
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <typename T>
__device__ uint32_t pack(float low, float high);
template <>
__device__ inline uint32_t pack<__half>(float low, float high) {
  return as_bits(__floats2half2_rn(low, high));
}
template <>
__device__ inline uint32_t pack<__nv_bfloat16>(float low, float high) {
  return as_bits(__floats2bfloat162_rn(low, high));
}

template <typename T>
__device__ inline void pack_tile(Packed& packed, const Tile& x) {
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int r = 0; r < 2; ++r) packed[2 * n + r] = pack<T>(x[n][2 * r], x[n][2 * r + 1]);
}

template <typename T>
__device__ float2 unpacked(uint32_t x);
template <>
__device__ inline float2 unpacked<__half>(uint32_t x) {
  return __half22float2(*reinterpret_cast<const __half2*>(&x));
}
template <>
__device__ inline float2 unpacked<__nv_bfloat16>(uint32_t x) {
  return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
}
// Arithmetic on two elements in a word: x y, x - y and x y + z.
template <typename T>
using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
template <typename T>
__device__ inline Pair<T> as_pair(uint32_t x) {
  return *reinterpret_cast<const Pair<T>*>(&x);
}

template <typename T>
__device__ inline uint32_t times(uint32_t x, uint32_t y) {
  return as_bits(__hmul2(as_pair<T>(x), as_pair<T>(y)));
}
template <typename T>
__device__ inline uint32_t minus(uint32_t x, uint32_t y) {
  return as_bits(__hsub2(as_pair<T>(x), as_pair<T>(y)));
}
template <typename T>
__device__ inline uint32_t times_plus(uint32_t x, uint32_t y, uint32_t z) {
  return as_bits(__hfma2(as_pair<T>(x), as_pair<T>(y), as_pair<T>(z)));
}

template <typename T>
__device__ void mma16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __half>)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// c += a b, of inputs' dtype T, 16 x 8 by 8 x 8.
template <typename T>
__device__ void mma8(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  if constexpr (std::is_same_v<T, __half>)
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(b));
  else
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(b));
}

// Transposes an 8 x 8 matrix of which thread 4 g + t has elements 2 t, 2 t + 1 of row g.
__device__ inline uint32_t transposed(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// x, hidden from the compiler, which would otherwise recompute it at each use.
__device__ inline uint32_t opaque(uint32_t x) {
  const int lane = threadIdx.x % 32;
  return __float_as_uint(__shfl_sync(kFullMask, __uint_as_float(x), lane));
}
// Masks that select one step of a unit: all ones in the lanes of one g or t, else zeros.
struct StepMasks {
  uint32_t g[kUnit], t[4];

  __device__ StepMasks() {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) g[i] = opaque(lane_g() == i ? ~0u : 0u);
#pragma unroll
    for (int i = 0; i < 4; ++i) t[i] = opaque(lane_t() == i ? ~0u : 0u);
  }
  // For words of two neighbouring steps' elements: ones at step i, a compile-time constant.
  __device__ uint32_t pair(int i) const { return t[i / 2] & (i % 2 ? 0xffff0000u : 0xffffu); }
};

// A load that sees what other blocks have released.
__device__ inline int32_t load_acquire(const int32_t* from) {
  int32_t x;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}

// Blocks are numbered in the order in which they start, so that one only waits for a started block.
// started: a count of all that have, zero before the launch. memory: shared, overwritten. To be
// called by all threads.
__device__ inline int block_number(int32_t* started, char* memory) {
  auto& ticket = *reinterpret_cast<int32_t*>(memory);
  if (threadIdx.x == 0) ticket = atomicAdd(started, 1);
  __syncthreads();
  const int number = __reduce_max_sync(kFullMask, ticket);  // known to be the same in all threads
  __syncthreads();
  return number;
}

// Column of W that lanes g have in column tile n.
__device__ inline int column_of(int n, int g) { return 4 * (g / 2) + 2 * n + g % 2; }

// A tensor of a chain: its first token, and the stride between tokens in elements.
template <typename T>
struct Source {
  const T* x;
  int64_t token;
};
template <typename T>
__device__ Source<T> rows_of(const void* x, const Place& at, int64_t batch, int64_t token,
                             int64_t head, int heads) {
  return {static_cast<const T*>(x) + at.batch * batch + at.start * token +
              (heads == 1 ? 0 : at.head * head) + at.row0, token};
}
template <typename T>
__device__ Source<T> q_of(const Params& p, const Place& at) {
  return rows_of<T>(p.q, at, p.q_batch, p.q_token, p.q_head, p.q_heads);
}
template <typename T>
__device__ Source<T> k_of(const Params& p, const Place& at) {
  return rows_of<T>(p.k, at, p.k_batch, p.k_token, p.k_head, p.k_heads);
}
template <typename T>
__device__ Source<T> v_of(const Params& p, const Place& at) {
  return {static_cast<const T*>(p.v) + at.batch * p.v_batch + at.start * p.v_token +
              at.head * p.v_head, p.v_token};
}
// x is null where y has no gradient.
template <typename T>
__device__ Source<T> dy_of(const Params& p, const Place& at) {
  if (p.dy == nullptr) return {nullptr, 0};
  const int64_t token = static_cast<int64_t>(p.heads) * kColumns;
  return {static_cast<const T*>(p.dy) + at.token(p, 0) * token + at.head * kColumns, token};
}

__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// min(x, 30): tanh already rounds to 1 there, and (2^30)^4 is finite. NaN stays NaN.
__device__ inline float at_most_30(float x) {
  float y;
  asm("min.NaN.f32 %0, %1, 0f41F00000;" : "=f"(y) : "f"(x));
  return y;
}
// x limited to [-limit, limit]. NaN stays NaN.
__device__ inline float within(float x, float limit) {
  float y;
  asm("{ .reg .f32 t; min.NaN.f32 t, %1, %2; max.NaN.f32 %0, t, %3; }"
      : "=f"(y)
      : "f"(x), "f"(limit), "f"(-limit));
  return y;
}
// x <- tanh(x): the GPU's instruction (PTX: relative error 2^-11), or, if exact, 1 - 2 / (1 + e^2x)
// with one reciprocal for all four (error 2^-20).
template <bool kExact>
__device__ inline void tanh_of(float (&x)[4]) {
  if constexpr (kExact) {
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = 1.f + exp2_approx(at_most_30(kTwoLog2E * x[e]));
    const float a = x[0], b = x[1], c = x[2], d = x[3], ab = a * b, cd = c * d;
    const float all = -2.f * rcp_approx(ab * cd), of_ab = all * cd, of_cd = all * ab;
    x[0] = fmaf(of_ab, b, 1.f), x[1] = fmaf(of_ab, a, 1.f);
    x[2] = fmaf(of_cd, d, 1.f), x[3] = fmaf(of_cd, c, 1.f);
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) asm("tanh.approx.f32 %0, %1;" : "=f"(x[e]) : "f"(x[e]));
  }
}
}  // namespace m2rnn
