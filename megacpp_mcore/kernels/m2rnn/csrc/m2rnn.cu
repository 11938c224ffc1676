// The entry points, plain C. They return 0 or a CUDA error, and run on the caller's device and
// stream.
#include "run.cuh"

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
