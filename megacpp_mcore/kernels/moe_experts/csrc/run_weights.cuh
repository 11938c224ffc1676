// Products of an expert's rows: gradients of weights.
#pragma once

#include "run_product.cuh"

namespace grouped {

template <int kTileN>
cudaError_t run_weights(int kind, const void* a, const void* b, void* c, const Problem& p,
                        cudaStream_t stream) {
  switch (kind) {
    case kWeightGradient:
      return run<kWeightGradient, kTileN>(a, b, c, nullptr, p, stream);
    case kWideWeightGradient:
      return run<kWideWeightGradient, kTileN>(a, b, c, nullptr, p, stream);
    case kAddedWeightGradient:
      return run<kAddedWeightGradient, kTileN>(a, b, c, nullptr, p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace grouped
