// The entry points, plain C. They return 0 or a CUDA error, and run on the caller's device and
// stream.
#include "bwd_fp32.cuh"
#include "combine.cuh"
#include "bwd.cuh"
#include "fwd.cuh"
#include "fwd_fp32.cuh"

namespace m2rnn {
namespace {

constexpr int kCombineThreads = 256;

unsigned combine_blocks(int64_t vecs) {
  return static_cast<unsigned>((vecs + kCombineThreads - 1) / kCombineThreads);
}

unsigned blocks(const Params& p) {
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

template <typename T, bool kExact, int kHeads>
cudaError_t launch_bundles(const Params& p, cudaStream_t stream) {
  const unsigned grid = static_cast<unsigned>(p.slots) * p.row_blocks;
  return launch(forward_16bit<T, kExact, kHeads>, p, grid, kForwardThreads<kHeads>,
                sizeof(ForwardShared<kHeads>), stream);
}

template <typename T, bool kExact>
cudaError_t launch_forward(const Params& p, cudaStream_t stream) {
  return p.bundle == 1 ? launch_bundles<T, kExact, 1>(p, stream)
                       : launch_bundles<T, kExact, 3>(p, stream);
}

template <typename T>
cudaError_t run_forward(const Params& p, cudaStream_t stream) {
  if constexpr (sizeof(T) == 2) {
    return p.exact_tanh ? launch_forward<T, true>(p, stream) : launch_forward<T, false>(p, stream);
  } else {
    const cudaError_t error =
        launch(forward_fp32, p, blocks(p), kThreads, sizeof(ForwardFp32Shared), stream);
    if (error != cudaSuccess || p.y_parts == nullptr) return error;
    const int64_t vecs = static_cast<int64_t>(p.batch) * p.tokens * p.heads * (kColumns / 4);
    combine_forward<<<combine_blocks(vecs), kCombineThreads, 0, stream>>>(p);
    return cudaGetLastError();
  }
}

template <typename T, bool kClamp>
cudaError_t launch_backward(const Params& p, cudaStream_t stream) {
  if constexpr (sizeof(T) == 4) {
    return launch(backward_fp32<kClamp>, p, blocks(p), kThreads, sizeof(BackwardFp32Shared),
                  stream);
  } else {
    return launch(backward_16bit<T, kClamp>, p, blocks(p) * p.segments, kBackwardThreads,
                  sizeof(BackwardShared), stream);
  }
}

template <typename T>
cudaError_t run_backward(const Params& p, cudaStream_t stream) {
  cudaError_t error = p.clamp > 0 ? launch_backward<T, true>(p, stream)
                                  : launch_backward<T, false>(p, stream);
  if (error != cudaSuccess) return error;
  const CombineSizes n = combine_sizes(p);
  const unsigned grid = combine_blocks(n.dq + n.dk + n.dv + n.dW + n.df);
  combine_backward<T><<<grid, kCombineThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace
}  // namespace m2rnn

// dtype of q, k, v, y and their gradients: 0 float, 1 bfloat16, 2 half.
extern "C" int m2rnn_forward(const m2rnn::Params* p, int dtype, void* stream) {
  auto* s = static_cast<cudaStream_t>(stream);
  if (dtype == 0) return m2rnn::run_forward<float>(*p, s);
  if (dtype == 1) return m2rnn::run_forward<__nv_bfloat16>(*p, s);
  return m2rnn::run_forward<__half>(*p, s);
}

extern "C" int m2rnn_backward(const m2rnn::Params* p, int dtype, void* stream) {
  auto* s = static_cast<cudaStream_t>(stream);
  if (dtype == 0) return m2rnn::run_backward<float>(*p, s);
  if (dtype == 1) return m2rnn::run_backward<__nv_bfloat16>(*p, s);
  return m2rnn::run_backward<__half>(*p, s);
}

extern "C" const char* m2rnn_error(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

// Lets a caller check that its declaration of Params is this one.
extern "C" int64_t m2rnn_params_size() { return sizeof(m2rnn::Params); }
