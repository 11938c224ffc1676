// The entry points, plain C. They return 0 or a CUDA error, and run on the caller's device and
// stream.
#include "run.cuh"

namespace grouped {
namespace {

template <int kTileN>
cudaError_t run(int kind, const void* a, const void* b, void* c, void* kept, const Problem& p,
                cudaStream_t stream) {
  return kind >= kWeightGradient ? run_weights<kTileN>(kind, a, b, c, p, stream)
                                 : run_rows<kTileN>(kind, a, b, c, kept, p, stream);
}

const uint8_t* bytes(const void* data) { return static_cast<const uint8_t*>(data); }

}  // namespace
}  // namespace grouped

// tile: columns of a block's tile, 256 or 224. rows: of A. source: null, or where kForward's or
// kInputGradient's rows of A are among those of a; the latter leaves them in kept (rows, k).
// first: expert of those up to `experts`. idle: multiprocessors that no block of this runs on.
extern "C" int grouped_product(int kind, int tile, const void* a, const int* source, const void* b,
                               void* c, void* kept, const int* ends, int64_t rows, int first,
                               int experts, int idle, int m, int n, int k, cudaStream_t stream) {
  using namespace grouped;
  Problem p{ends, experts, m, n, k, rows, bytes(a), source};
  p.first = first, p.idle = idle;
  return tile == 224 ? run<224>(kind, a, b, c, kept, p, stream)
                     : run<256>(kind, a, b, c, kept, p, stream);
}

// kInputGradient, and meanwhile rows[r] (., width) = tokens[source[r]], or 0 if that is negative.
extern "C" int grouped_product_and_copy(int tile, const void* a, const void* b, void* c,
                                        const int* ends, int64_t size, int experts, int n, int k,
                                        const void* tokens, const int* source, void* rows,
                                        int width, cudaStream_t stream) {
  using namespace grouped;
  Problem p{ends, experts, 0, n, k, size};
  p.copy = {bytes(tokens), source, static_cast<uint8_t*>(rows), width / 8};
  return tile == 224 ? run<224>(kInputGradient, a, b, c, nullptr, p, stream)
                     : run<256>(kInputGradient, a, b, c, nullptr, p, stream);
}

extern "C" const char* grouped_error(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}
