// The entry points, plain C. They return 0 or a CUDA error, and run on the caller's device and
// stream.
#include "run.cuh"

namespace grouped {
namespace {

template <int kTileN>
cudaError_t run(int kind, int transposed, const void* a, const void* b, void* c, const Problem& p,
                cudaStream_t stream) {
  if (kind < kWeightGradient) return run_rows<kTileN>(kind, a, b, c, p, stream);
  if (p.source == nullptr) return cudaErrorInvalidValue;
  return transposed ? run_weights<kTileN, kTransposed>(kind, b, c, p, stream)
                    : run_weights<kTileN, kGathered>(kind, b, c, p, stream);
}

}  // namespace
}  // namespace grouped

// tile: columns of a block's tile, 256 or 224. rows: of the sorted A. source: where A's rows are among
// those of a, or null where a is sorted, as no weight gradient's is. transposed: a weight gradient's C
// is (experts, n, m). first: expert of those up to `experts`. idle: multiprocessors that no block of
// this runs on.
extern "C" int grouped_product(int kind, int tile, int transposed, const void* a, const int* source,
                               const void* b, void* c, const int* ends, int64_t rows, int first,
                               int experts, int idle, int m, int n, int k, cudaStream_t stream) {
  using namespace grouped;
  Problem p{ends, experts, m, n, k, rows, static_cast<const uint8_t*>(a), source, first, idle};
  return tile == 224 ? run<224>(kind, transposed, a, b, c, p, stream)
                     : run<256>(kind, transposed, a, b, c, p, stream);
}

extern "C" const char* grouped_error(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}
