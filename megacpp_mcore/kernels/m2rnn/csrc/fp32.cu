// Both directions for float32 inputs.
#include "bwd_fp32.cuh"
#include "combine.cuh"
#include "fwd_fp32.cuh"
#include "run.cuh"

namespace m2rnn {

// y of float32 inputs. For 16-bit inputs the forward kernel's blocks sum y themselves.
__global__ void combine_forward(const __grid_constant__ Params p) {
  const int64_t vecs = static_cast<int64_t>(p.batch) * p.tokens * p.heads * (kColumns / 4);
  const int64_t vec = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (vec < vecs) sum_parts<float, float>(p.y, vec, p.y_parts, vec, p.row_blocks, vecs);
}

template <>
cudaError_t run_forward<float>(const Params& p, cudaStream_t stream) {
  const cudaError_t error =
      launch(forward_fp32, p, blocks(p), kThreads, sizeof(ForwardFp32Shared), stream);
  if (error != cudaSuccess || p.y_parts == nullptr) return error;
  const int64_t vecs = static_cast<int64_t>(p.batch) * p.tokens * p.heads * (kColumns / 4);
  combine_forward<<<combine_blocks(vecs), kCombineThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

template <bool kClamp>
cudaError_t launch_backward_fp32(const Params& p, cudaStream_t stream) {
  return launch(backward_fp32<kClamp>, p, blocks(p), kThreads, sizeof(BackwardFp32Shared), stream);
}

template <>
cudaError_t run_backward<float>(const Params& p, cudaStream_t stream) {
  const cudaError_t error =
      p.clamp > 0 ? launch_backward_fp32<true>(p, stream) : launch_backward_fp32<false>(p, stream);
  return error != cudaSuccess ? error : run_combine<float>(p, stream);
}

}  // namespace m2rnn
