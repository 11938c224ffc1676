// What the entry points call, and what it launches kernels with. Each dtype and direction is a unit
// of its own, so that nvcc compiles them at once.
#pragma once

#include "common.cuh"

namespace m2rnn {

template <typename T>
cudaError_t run_forward(const Params& p, cudaStream_t stream);
template <typename T>
cudaError_t run_backward(const Params& p, cudaStream_t stream);
template <>
cudaError_t run_forward<float>(const Params& p, cudaStream_t stream);
template <>
cudaError_t run_backward<float>(const Params& p, cudaStream_t stream);

inline unsigned blocks(const Params& p) {
  return static_cast<unsigned>(p.chains) * p.heads * p.row_blocks;
}

template <typename Kernel>
cudaError_t launch(Kernel kernel, const Params& p, unsigned grid, int threads, size_t shared,
                   cudaStream_t stream) {
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  kernel<<<grid, threads, shared, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace m2rnn
