// Products of rows: those of A, or of the tokens that they are gathered from.
#pragma once

#include "run_product.cuh"

namespace grouped {

template <int kTileN>
cudaError_t run_rows(int kind, const void* a, const void* b, void* c, const Problem& p,
                     cudaStream_t stream) {
  const bool gathered = p.source != nullptr;
  switch (kind) {
    case kForward:
      return gathered ? run<kForward, kTileN, kGathered>(a, b, c, p, stream)
                      : run<kForward, kTileN, kSorted>(a, b, c, p, stream);
    case kInputGradient:
      return gathered ? run<kInputGradient, kTileN, kGathered>(a, b, c, p, stream)
                      : run<kInputGradient, kTileN, kSorted>(a, b, c, p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace grouped
