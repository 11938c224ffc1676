// Shared by all kernels of M2RNN: launch parameters, a block's rows and tokens, element loads.
//
// A chain is one head of one document. Its K rows are independent of each other, so a block takes
// 32 rows of a chain and the blocks of a chain exchange nothing. The math, the memory layout and
// the error bounds are in docs/m2rnn-kernels.md.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <type_traits>

namespace m2rnn {

constexpr int kColumns = 16;       // V
constexpr int kRows = 32;          // rows of the state in a block
constexpr int kThreads = 128;      // four threads a row
constexpr int kSteps = 16;         // steps of a stage, the granularity of chunk_size
constexpr int kMaxStages = 4;      // stages of a chunk, at most
constexpr float kTwoLog2E = 2.8853900817779268f;

// The same struct, field by field, is in megacpp_mcore/kernels/m2rnn/launch.py. Strides are in
// elements; rows of q, k, v and dy are contiguous. A pointer that may be null says so.
struct Params {
  const void *q, *k, *v;
  const float *W, *f;
  const float* initial;          // (chains, H, K, V), or null
  const int32_t* bounds;         // (documents + 1,) offsets in row 0, or null: a row is a document
  const int32_t* first_chunk;    // (documents,), index of a document's first checkpoint, or null
  void* checkpoints;             // (chunks, H, K, V), fp16, for float inputs float
  float* final_state;            // (chains, H, K, V)
  void* y;                       // (B, S, H, V)
  float* y_parts;                // (row_blocks, B, S, H, V), or null with one row block
  int32_t* y_counts;             // zeros, (B * S / 32 + 3 chains, H), or null for float inputs
  int32_t* state_ready;          // zeros, (chains, H, K / 8), then blocks started; or null for float
  const void* dy;                // (B, S, H, V) contiguous, or null
  const float* d_final;          // (chains, H, K, V), or null
  void *dq, *dk, *dv;            // as q, k, v, contiguous
  float *dW, *df, *d_initial;    // (H, V, V), (B, S, H), (chains, H, K, V)
  void *dq_parts, *dk_parts;     // (B, S, H, K), dtype of q; dq, dk themselves if not shared
  void* dv_parts;                // (row_blocks, B, S, H, V); for 16-bit (K / 16, B, S, H, V)
  float* df_parts;               // (row_blocks, B, S, H); for 16-bit inputs (K / 16, B, S, H)
  float* dW_parts;               // (chains * row_blocks, H, V, V)
  int32_t* segments_done;        // zeros: a count a (chain, H, row block), then blocks started
  int64_t q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head;
  int64_t f_batch, f_token, f_head;
  int32_t chains, batch, tokens, heads, q_heads, k_heads, k_dim, stages;
  int32_t row_blocks;            // blocks that share a head's rows
  int32_t slots;                 // 16-bit forward: bundles of heads computed at a time
  int32_t bundle;                // 16-bit forward: heads of a block: 1, or 3 that share q and k
  int32_t segments;              // 16-bit backward: parts of a chain, each in its own block
  float clamp;                   // limit of the state's gradient; 0 or less: none
  int32_t exact_tanh;            // 16-bit forward; 0: the GPU's tanh instruction
};

// Which rows of which chain a block computes, and where the chain's tokens are.
struct Place {
  int chain, head, row_block, row_blocks, row0;  // row0: first row of the block
  int batch, start, length, first_chunk;
  int first = 0;                 // first token of the block's segment, which ends at `length`
  int64_t state;                 // offset of a thread's four values in a (H, K, V) state (kRows)

  __device__ Place(const Params& p, int rows) : Place(p, rows, blockIdx.x / p.row_blocks) {}
  // chain_head: chain * heads + head.
  __device__ Place(const Params& p, int rows, int chain_head)
      : Place(p, rows, chain_head, blockIdx.x % p.row_blocks) {}
  __device__ Place(const Params& p, int rows, int chain_head, int row_block)
      : row_block(row_block) {
    row_blocks = p.row_blocks;
    head = chain_head % p.heads;
    chain = chain_head / p.heads;
    row0 = row_block * rows;
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
  // Index of a chain's token among all tokens of the batch.
  __device__ int64_t token(const Params& p, int t) const {
    return static_cast<int64_t>(batch) * p.tokens + start + t;
  }
};

__device__ inline int64_t state_size(const Params& p) {
  return static_cast<int64_t>(p.heads) * p.k_dim * kColumns;
}

// Four neighbouring elements as one memory access.
template <typename T>
struct Vec4 {
  using Raw = uint2;
};
template <>
struct Vec4<float> {
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
__device__ typename Vec4<T>::Raw load_vec4(const T* x, bool valid) {
  return valid ? __ldg(reinterpret_cast<const typename Vec4<T>::Raw*>(x)) : typename Vec4<T>::Raw{};
}

__device__ inline void load4(float (&x)[4], const float* from) {
  const float4 value = *reinterpret_cast<const float4*>(from);
  x[0] = value.x, x[1] = value.y, x[2] = value.z, x[3] = value.w;
}
__device__ inline void store4(float* to, const float (&x)[4]) {
  *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
}

}  // namespace m2rnn
