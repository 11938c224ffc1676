// The entry points, plain C. They return 0 or a CUDA error, and run on the caller's device and
// stream.
#include <cuda_runtime.h>

#include "grouped.cuh"

namespace grouped {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

Encode encode() {
  static const Encode found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault,
                                     &result);
    return result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
  }();
  return found;
}

// A contiguous tensor and the box of it that the copy engine moves. sizes, box: innermost first.
bool describe(CUtensorMap* map, const void* data, bool wide, int rank, const uint64_t (&sizes)[3],
              const uint32_t (&box)[3]) {
  const uint64_t element = wide ? 4 : 2;
  const uint64_t strides[2] = {sizes[0] * element, sizes[0] * sizes[1] * element};
  const uint32_t steps[3] = {1, 1, 1};
  const bool narrow = box[0] * element == 64;
  return encode()(map, wide ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                  rank, const_cast<void*>(data), sizes, strides, box, steps,
                  CU_TENSOR_MAP_INTERLEAVE_NONE,
                  narrow ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// kept: of kGatherKeep, where A's rows (rows, k) are left.
template <int kKind, int kTileN, int kMore = kNothing>
cudaError_t run(const void* a, const void* b, void* c, void* kept, const Problem& p,
                cudaStream_t stream) {
  const auto kernel = product<kKind, kTileN, kMore>;
  constexpr size_t kBytes = sizeof(Shared) + 1024;
  // First of all: it gives a thread that has not used the device, as autograd's may not have, the
  // context that encode() needs.
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  constexpr uint32_t kColumns = kWide<kKind> || kTileN % 64 ? 32 : 64;
  const uint64_t r = p.rows, e = p.experts, m = p.m, n = p.n, k = p.k;
  CUtensorMap of_a{}, of_b, of_c, of_rows{};
  bool ok = encode() != nullptr;
  if constexpr (kOfWeights<kKind>) {
    ok = ok && describe(&of_a, a, false, 2, {m, r, 1}, {64, 64, 1}) &&
         describe(&of_b, b, false, 2, {n, r, 1}, {64, 64, 1}) &&
         describe(&of_c, c, kWide<kKind>, 3, {n, m, e}, {kColumns, 64, 1});
  } else {
    if constexpr (!kGathered<kMore>) {
      ok = ok && describe(&of_a, a, false, 2, {k, r, 1}, {64, kTileM, 1});
    }
    if constexpr (kMore == kGatherKeep) {
      ok = ok && describe(&of_rows, kept, false, 2, {k, r, 1}, {64, 64, 1});
    }
    ok = ok && describe(&of_c, c, false, 2, {n, r, 1}, {kColumns, 64, 1});
    if constexpr (kKind == kForward) {
      ok = ok && describe(&of_b, b, false, 3, {k, n, e}, {64, kTileN / 2, 1});
    } else {
      ok = ok && describe(&of_b, b, false, 3, {n, k, e}, {64, 64, 1});
    }
  }
  if (!ok) return cudaErrorInvalidValue;
  int device, processors;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  kernel<<<processors / kBlocks * kBlocks, kThreads, kBytes, stream>>>(of_a, of_b, of_c, of_rows, p);
  return cudaGetLastError();
}

template <int kTileN>
cudaError_t run_kind(int kind, const void* a, const void* b, void* c, void* kept, const Problem& p,
                     cudaStream_t stream) {
  switch (kind) {
    case kForward:
      return p.source ? run<kForward, kTileN, kGather>(a, b, c, nullptr, p, stream)
                      : run<kForward, kTileN>(a, b, c, nullptr, p, stream);
    case kInputGradient:
      return p.source      ? run<kInputGradient, kTileN, kGatherKeep>(a, b, c, kept, p, stream)
             : p.copy.rows ? run<kInputGradient, kTileN, kCopy>(a, b, c, nullptr, p, stream)
                           : run<kInputGradient, kTileN>(a, b, c, nullptr, p, stream);
    case kWeightGradient:
      return run<kWeightGradient, kTileN>(a, b, c, nullptr, p, stream);
    case kWideWeightGradient:
      return run<kWideWeightGradient, kTileN>(a, b, c, nullptr, p, stream);
    case kAddedWeightGradient:
      return run<kAddedWeightGradient, kTileN>(a, b, c, nullptr, p, stream);
  }
  return cudaErrorInvalidValue;
}

const uint8_t* bytes(const void* data) { return static_cast<const uint8_t*>(data); }

}  // namespace
}  // namespace grouped

// tile: columns of a block's tile, 256 or 224. rows: of A. source: null, or where kForward's or
// kInputGradient's rows of A are among those of a; the latter leaves them in kept (rows, k).
extern "C" int grouped_product(int kind, int tile, const void* a, const int* source, const void* b,
                               void* c, void* kept, const int* ends, int64_t rows, int experts,
                               int m, int n, int k, cudaStream_t stream) {
  using namespace grouped;
  const Problem p{ends, experts, m, n, k, rows, bytes(a), source};
  return tile == 224 ? run_kind<224>(kind, a, b, c, kept, p, stream)
                     : run_kind<256>(kind, a, b, c, kept, p, stream);
}

// kInputGradient, and meanwhile rows[r] (., width) = tokens[source[r]], or 0 if that is negative.
extern "C" int grouped_product_and_copy(int tile, const void* a, const void* b, void* c,
                                        const int* ends, int64_t size, int experts, int n, int k,
                                        const void* tokens, const int* source, void* rows,
                                        int width, cudaStream_t stream) {
  using namespace grouped;
  Problem p{ends, experts, 0, n, k, size};
  p.copy = {bytes(tokens), source, static_cast<uint8_t*>(rows), width / 8};
  return tile == 224 ? run_kind<224>(kInputGradient, a, b, c, nullptr, p, stream)
                     : run_kind<256>(kInputGradient, a, b, c, nullptr, p, stream);
}

extern "C" const char* grouped_error(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}
