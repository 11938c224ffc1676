// Products of rows: those of A, or of the tokens that they are gathered from.
#pragma once

#include "run_product.cuh"

namespace grouped {

template <int kTileN>
cudaError_t run_rows(int kind, const void* a, const void* b, void* c, void* kept, const Problem& p,
                     cudaStream_t stream) {
  switch (kind) {
    case kForward:
      return p.source ? run<kForward, kTileN, kGather>(a, b, c, nullptr, p, stream)
                      : run<kForward, kTileN>(a, b, c, nullptr, p, stream);
    case kInputGradient:
      return p.source      ? run<kInputGradient, kTileN, kGatherKeep>(a, b, c, kept, p, stream)
             : p.copy.rows ? run<kInputGradient, kTileN, kCopy>(a, b, c, nullptr, p, stream)
                           : run<kInputGradient, kTileN>(a, b, c, nullptr, p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace grouped
