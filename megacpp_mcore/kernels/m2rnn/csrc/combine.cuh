// Sums of partial results, in a fixed order: results do not change from run to run.
#pragma once

#include "common_16bit.cuh"

namespace m2rnn {

// to[i] = sum_j from[i + j * stride], four values a thread.
template <typename To, typename From>
__device__ void sum_parts(void* to, int64_t to_vec, const void* from, int64_t from_vec, int parts,
                       int64_t stride) {
  const From* from_type = nullptr;
  const To* to_type = nullptr;
  const auto* part = reinterpret_cast<const typename Vec4<From>::Raw*>(from) + from_vec;
  float4 sum = widen(__ldg(part), from_type);
#pragma unroll 8
  for (int j = 1; j < parts; ++j) {
    const float4 x = widen(__ldg(part + j * stride), from_type);
    sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
  }
  reinterpret_cast<typename Vec4<To>::Raw*>(to)[to_vec] = narrow(sum, to_type);
}

// dq or dk, summed over the heads that share q or k.
template <typename T>
__device__ void sum_heads(const Params& p, void* to, const void* parts, int64_t vec) {
  const int vecs = p.k_dim / 4;
  const int64_t token = vec / vecs;
  sum_parts<T, T>(to, vec, parts, token * p.heads * vecs + vec % vecs, p.heads, vecs);
}

struct CombineSizes {
  int64_t dq, dk, dv, df, dW;  // outputs of four values (df: of one), one a thread
};

__host__ __device__ inline CombineSizes combine_sizes(const Params& p) {
  const int64_t tokens = static_cast<int64_t>(p.batch) * p.tokens, values = tokens * p.heads;
  const int64_t keys = tokens * (p.k_dim / 4);
  return {p.dq_parts != p.dq ? keys : 0, p.dk_parts != p.dk ? keys : 0,
          values * (kColumns / 4), values,
          static_cast<int64_t>(p.heads) * kColumns * kColumns / 4};
}

template <typename T>
__global__ void combine_backward(const __grid_constant__ Params p) {
  const CombineSizes n = combine_sizes(p);
  int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n.dq) return sum_heads<T>(p, p.dq, p.dq_parts, i);
  if ((i -= n.dq) < n.dk) return sum_heads<T>(p, p.dk, p.dk_parts, i);
  // dv and df have a part a block, or, for 16-bit inputs, a part a tile of 16 rows.
  const int parts = sizeof(T) == 2 ? p.k_dim / kTileRows : p.row_blocks;
  if ((i -= n.dk) < n.dv) return sum_parts<T, T>(p.dv, i, p.dv_parts, i, parts, n.dv);
  if ((i -= n.dv) < n.dW)
    return sum_parts<float, float>(p.dW, i, p.dW_parts, i, p.chains * p.row_blocks, n.dW);
  if ((i -= n.dW) < n.df) {
    float sum = 0.f;
    for (int j = 0; j < parts; ++j) sum += p.df_parts[i + j * n.df];
    p.df[i] = sum;
  }
}

constexpr int kCombineThreads = 256;

inline unsigned combine_blocks(int64_t vecs) {
  return static_cast<unsigned>((vecs + kCombineThreads - 1) / kCombineThreads);
}

template <typename T>
cudaError_t run_combine(const Params& p, cudaStream_t stream) {
  const CombineSizes n = combine_sizes(p);
  const unsigned grid = combine_blocks(n.dq + n.dk + n.dv + n.dW + n.df);
  combine_backward<T><<<grid, kCombineThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace m2rnn
