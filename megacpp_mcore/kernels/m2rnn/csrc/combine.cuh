// Parts into whole values, added up in a fixed order.
#pragma once

#include "fast.cuh"

namespace m2rnn {

// to[i] = sum_j from[i + j * stride], four values a thread.
template <typename To, typename From>
__device__ void add_up(void* to, int64_t to_unit, const void* from, int64_t from_unit, int parts,
                       int64_t stride_units) {
  const From* from_type = nullptr;
  const To* to_type = nullptr;
  const auto* part = reinterpret_cast<const typename Unit<From>::Raw*>(from) + from_unit;
  float4 sum = widen(__ldg(part), from_type);
#pragma unroll 8
  for (int j = 1; j < parts; ++j) {
    const float4 x = widen(__ldg(part + j * stride_units), from_type);
    sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
  }
  reinterpret_cast<typename Unit<To>::Raw*>(to)[to_unit] = narrow(sum, to_type);
}

// dq or dk over the heads that share it.
template <typename T>
__device__ void add_heads(const Problem& p, void* to, const void* parts, int64_t unit) {
  const int units = p.k_dim / 4;
  const int64_t token = unit / units;
  add_up<T, T>(to, unit, parts, token * p.heads * units + unit % units, p.heads, units);
}

// y of float32; of 16-bit inputs, forward's blocks do it themselves.
__global__ void combine_forward(const __grid_constant__ Problem p) {
  const int64_t units = static_cast<int64_t>(p.batch) * p.tokens * p.heads * (kColumns / 4);
  const int64_t unit = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (unit < units) add_up<float, float>(p.y, unit, p.y_parts, unit, p.groups, units);
}

struct CombineSizes {
  int64_t dq, dk, dv, df, dW;  // units (df: values) to make, one a thread
};

__host__ __device__ inline CombineSizes combine_sizes(const Problem& p) {
  const int64_t tokens = static_cast<int64_t>(p.batch) * p.tokens, values = tokens * p.heads;
  const int64_t keys = tokens * (p.k_dim / 4);
  return {p.dq_parts != p.dq ? keys : 0, p.dk_parts != p.dk ? keys : 0,
          values * (kColumns / 4), values,
          static_cast<int64_t>(p.heads) * kColumns * kColumns / 4};
}

template <typename T>
__global__ void combine_backward(const __grid_constant__ Problem p) {
  const CombineSizes n = combine_sizes(p);
  int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n.dq) return add_heads<T>(p, p.dq, p.dq_parts, i);
  if ((i -= n.dq) < n.dk) return add_heads<T>(p, p.dk, p.dk_parts, i);
  // Of v and f a part of each block's rows, or, for 16-bit inputs, of each tile's.
  const int parts = sizeof(T) == 2 ? p.k_dim / kTileRows : p.groups;
  if ((i -= n.dk) < n.dv) return add_up<T, T>(p.dv, i, p.dv_parts, i, parts, n.dv);
  if ((i -= n.dv) < n.dW)
    return add_up<float, float>(p.dW, i, p.dW_parts, i, p.chains * p.groups, n.dW);
  if ((i -= n.dW) < n.df) {
    float sum = 0.f;
    for (int j = 0; j < parts; ++j) sum += p.df_parts[i + j * n.df];
    p.df[i] = sum;
  }
}

}  // namespace m2rnn
