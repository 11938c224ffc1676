// One product: its tensors described to the copy engine, and its kernel launched.
#pragma once

#include "grouped.cuh"
#include "run.cuh"

namespace grouped {

using Encode = decltype(&cuTensorMapEncodeTiled);

inline Encode encode() {
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
inline bool describe(CUtensorMap* map, const void* data, bool wide, int rank, const uint64_t (&sizes)[3],
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

template <int kKind, int kTileN, int kForm>
cudaError_t run(const void* a, const void* b, void* c, const Problem& p, cudaStream_t stream) {
  using B = Boxes<kKind, kTileN, kForm>;
  const auto kernel = product<kKind, kTileN, kForm>;
  constexpr size_t kBytes = sizeof(Shared) + 1024;
  // First of all: it gives a thread that has not used the device, as autograd's may not have, the
  // context that encode() needs.
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  const uint64_t r = p.rows, e = p.experts, m = p.m, n = p.n, k = p.k;
  CUtensorMap of_a{}, of_b, of_c;
  bool ok = encode() != nullptr;
  if constexpr (kForm == kSorted) {
    ok = ok && describe(&of_a, a, false, 2, {k, r, 1}, {64, kTileM, 1});
  }
  if constexpr (kOfWeights<kKind>) {
    constexpr bool kTurned = kForm == kTransposed;
    ok = ok && describe(&of_b, b, false, 2, {n, r, 1}, {64, 64, 1}) &&
         describe(&of_c, c, kWide<kKind>, 3, {kTurned ? m : n, kTurned ? n : m, e},
                  {B::kColumns, B::kRows, 1});
  } else {
    constexpr uint32_t kRowsB = kKind == kForward ? kTileN / 2 : 64;
    const bool forward = kKind == kForward;
    ok = ok && describe(&of_c, c, false, 2, {n, r, 1}, {B::kColumns, B::kRows, 1}) &&
         describe(&of_b, b, false, 3, {forward ? k : n, forward ? n : k, e}, {64, kRowsB, 1});
  }
  if (!ok) return cudaErrorInvalidValue;
  int device, processors;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  const int blocks = processors - p.idle < kBlocks ? processors : processors - p.idle;
  kernel<<<blocks / kBlocks * kBlocks, kThreads, kBytes, stream>>>(of_a, of_b, of_c, p);
  return cudaGetLastError();
}

}  // namespace grouped
