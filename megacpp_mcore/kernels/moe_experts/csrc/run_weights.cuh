// Products of an expert's rows: gradients of weights.
#pragma once

#include "run_product.cuh"

namespace grouped {

template <int kTileN, int kForm>
cudaError_t run_weights(int kind, const void* b, void* c, const Problem& p, cudaStream_t stream) {
  switch (kind) {
    case kWeightGradient:
      return run<kWeightGradient, kTileN, kForm>(nullptr, b, c, p, stream);
    case kWideWeightGradient:
      return run<kWideWeightGradient, kTileN, kForm>(nullptr, b, c, p, stream);
    case kAddedWeightGradient:
      return run<kAddedWeightGradient, kTileN, kForm>(nullptr, b, c, p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace grouped
