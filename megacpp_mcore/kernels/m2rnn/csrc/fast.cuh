// The kernels for 16-bit inputs and K = 64: what forward and backward share.
//
// As in common.cuh a thread holds four columns of a row, but of two rows, g and g + 8 of its warp's
// 16: a tile is one m16n8k16 operand in fp16. h W is a product of 11-bit factors (h is at most 1,
// or what the initial state is at most), tanh is the hardware's (relative error 2^-10.9); both are
// below the 8 bits of bf16. The sum, the state and everything that is carried on are fp32.
//
// tile[n][2 r + i] is row g + 8 r, column 4 t + 2 n + i.
#pragma once

#include "common.cuh"

namespace m2rnn {

constexpr int kFastRows = 64;
using Tile = float[2][4];

template <typename T>
__device__ uint32_t pack(float low, float high);
template <>
__device__ inline uint32_t pack<__half>(float low, float high) {
  const __half2 x = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&x);
}
template <>
__device__ inline uint32_t pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 x = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&x);
}

template <typename T>
__device__ void mma16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (std::is_same_v<T, __half>)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <typename T>
__device__ void pack_tile(uint32_t (&packed)[4], const Tile& x) {
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int r = 0; r < 2; ++r) packed[2 * n + r] = pack<T>(x[n][2 * r], x[n][2 * r + 1]);
}

// A tensor core reads the upper 11 bits of a float32 factor and cuts the rest, which takes a share of
// 2^-11 / m off a mantissa m, on average 0.72 of 2^-11. Multiplied back, so that no sum drifts.
constexpr float kUncut = 1.f + 0.72135f / 2048.f;

// To the nearest of 11 bits; a NaN stays one.
__device__ inline float rounded(float x) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return __uint_as_float(bits);
}

// Column of W that lane group g has in tile n.
__device__ inline int column_of(int n, int g) { return 4 * (g / 2) + 2 * n + g % 2; }

// W as the right operand of h W, in fp16.
struct FastWeight {
  uint32_t b[2][2];

  __device__ explicit FastWeight(const float* W) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float* from = W + (4 * t + 2 * i) * kColumns + column_of(n, g);
        b[n][i] = pack<__half>(from[0], from[kColumns]);
      }
  }
};

// k v^T of the thread's elements. Made one step ahead, it costs the chain of steps nothing.
struct Given {
  Tile outer;

  // row: where k of rows g and g + 8 lies.
  template <typename Inputs>
  __device__ void load(const Inputs& in, int s, int row, int column) {
    float v[4];
    load4(v, &in.v[s][column]);
    const float2 k = *reinterpret_cast<const float2*>(&in.k[s][row]);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) outer[n][e] = (e < 2 ? k.x : k.y) * v[2 * n + e % 2];
  }
};

__device__ inline int own_row() {
  return threadIdx.x % kThreads / 32 * 16 + threadIdx.x % 32 / 4 * 2;
}
__device__ inline int own_column() { return threadIdx.x % 4 * 4; }

// h <- f h + (1 - f) z, z = tanh(h W + k v^T); decay is (f, 1 - f), packed is h in fp16.
__device__ inline void fast_step(Tile& h, Tile& z, uint32_t (&packed)[4], const FastWeight& w,
                                 const Given& given, const float2& decay) {
  Tile c;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) c[n][e] = given.outer[n][e];
    mma16<__half>(c[n], packed, w.b[n]);
  }
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      asm("tanh.approx.f32 %0, %1;" : "=f"(z[n][e]) : "f"(c[n][e]));
      h[n][e] = fmaf(decay.y, z[n][e], decay.x * h[n][e]);
    }
  pack_tile<__half>(packed, h);
}

__device__ inline void load_state(Tile& h, const float* state) {
  float low[4], high[4];
  load4(low, state);
  load4(high, state + 8 * kColumns);
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) h[n][i] = low[2 * n + i], h[n][2 + i] = high[2 * n + i];
}
__device__ inline void store_state(float* state, const Tile& h) {
  const float low[4] = {h[0][0], h[0][1], h[1][0], h[1][1]};
  const float high[4] = {h[0][2], h[0][3], h[1][2], h[1][3]};
  store4(state, low);
  store4(state + 8 * kColumns, high);
}
// Offset of a thread's first row in a (K, V) state.
__device__ inline int fast_state_offset() {
  return (threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4) * kColumns + threadIdx.x % 4 * 4;
}

// Tiles of one step in shared memory: float4 n of lane (g, t) of a warp. The order keeps those apart
// that are read together: all t and n of one g, and four neighbouring g and both n of one t.
__device__ inline int fast_slot(int warp, int g, int t, int n) {
  return (n * kThreads + warp * 32 + (g ^ n) * 4 + (t ^ ((g >> 1) & 1) ^ (n << 1))) * 4;
}
__device__ inline int own_slot(int n) {
  return fast_slot(threadIdx.x % kThreads / 32, threadIdx.x % 32 / 4, threadIdx.x % 4, n);
}
constexpr int kTileFloats = kFastRows * kColumns;

// Row g of a warp lies beside row g + 8.
__device__ inline int fast_row_place(int row) {
  return (row & ~15) + 2 * (row & 7) + ((row >> 3) & 1);
}

template <typename T>
struct FastInputs {
  float q[kSteps][kFastRows], k[kSteps][kFastRows], v[kSteps][kColumns], dy[kSteps][kColumns];
  T raw_dy[kSteps][kColumns];
  float2 decay[kSteps];  // f, 1 - f
  float zeros[4];
};

template <typename T>
struct FastStage {
  typename Unit<T>::Raw q[2], k[2], v;
  float f;

  __device__ void load(const Problem& p, const Place& at, int t0) {
    const int thread = threadIdx.x % kThreads;
    const int unit = thread % 16;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int step = thread / 16 + 8 * i;
      const bool valid = t0 + step < at.length;
      const int64_t token = at.start + t0 + step;
      q[i] = load_unit(static_cast<const T*>(p.q) + at.batch * p.q_batch + token * p.q_token +
                           (p.q_heads == 1 ? 0 : at.head * p.q_head) + unit * 4, valid);
      k[i] = load_unit(static_cast<const T*>(p.k) + at.batch * p.k_batch + token * p.k_token +
                           (p.k_heads == 1 ? 0 : at.head * p.k_head) + unit * 4, valid);
    }
    const int part = thread % 64, step = part / 4, column = part % 4 * 4;
    const bool valid = t0 + step < at.length;
    if (thread < 64) {
      v = load_unit(static_cast<const T*>(p.v) + at.batch * p.v_batch +
                        (at.start + t0 + step) * p.v_token + at.head * p.v_head + column, valid);
    } else {
      const int64_t row = at.token(p, t0 + step) * p.heads + at.head;
      v = load_unit(static_cast<const T*>(p.dy) + row * kColumns + column,
                    valid && p.dy != nullptr);
    }
    if (thread < kSteps)
      f = t0 + thread < at.length
              ? __ldg(p.f + at.batch * p.f_batch + (at.start + t0 + thread) * p.f_token +
                      at.head * p.f_head)
              : 1.f;
  }

  __device__ void store(FastInputs<T>& to) const {
    const T* type = nullptr;
    const int thread = threadIdx.x % kThreads;
    const int row = thread % 16 * 4, place = fast_row_place(row);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int step = thread / 16 + 8 * i;
      const float4 x = widen(q[i], type), y = widen(k[i], type);
      const float a[4] = {x.x, x.y, x.z, x.w}, b[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        to.q[step][place + 2 * e] = a[e];
        to.k[step][place + 2 * e] = b[e];
      }
    }
    const int part = thread % 64, step = part / 4, column = part % 4 * 4;
    if (thread < 64) {
      *reinterpret_cast<float4*>(&to.v[step][column]) = widen(v, type);
    } else {
      *reinterpret_cast<float4*>(&to.dy[step][column]) = widen(v, type);
      *reinterpret_cast<uint2*>(&to.raw_dy[step][column]) = v;
    }
    if (thread < kSteps) to.decay[thread] = make_float2(f, 1.f - f);
    if (thread < 4) to.zeros[thread] = 0.f;
  }
};

constexpr int kHalf = kSteps / 2;

// Decay of a half's steps, read before its first.
__device__ inline void load_decay(float2 (&decay)[kHalf], const float2* from) {
#pragma unroll
  for (int i = 0; i < kHalf; i += 2) {
    const float4 two = *reinterpret_cast<const float4*>(from + i);
    decay[i] = make_float2(two.x, two.y);
    decay[i + 1] = make_float2(two.z, two.w);
  }
}

template <typename T>
__device__ void store_pair(void* to, int64_t offset, const float2& x) {
  *reinterpret_cast<uint32_t*>(static_cast<T*>(to) + offset) = pack<T>(x.x, x.y);
}

}  // namespace m2rnn
