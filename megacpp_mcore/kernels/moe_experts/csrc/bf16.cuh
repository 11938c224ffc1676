// bf16 in registers: pairs in 32 bits, eight in a chunk of 16 bytes.

#pragma once
#include <cuda_bf16.h>
#include <cstdint>

namespace bf16 {

constexpr int kChunk = 8;

__device__ __forceinline__ float low(uint32_t pair) { return __uint_as_float(pair << 16); }

__device__ __forceinline__ float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000); }

__device__ __forceinline__ uint32_t pack(float a, float b) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ uint4 pack(const float (&from)[kChunk]) {
  return {pack(from[0], from[1]), pack(from[2], from[3]), pack(from[4], from[5]),
          pack(from[6], from[7])};
}

__device__ __forceinline__ void unpack(float (&to)[kChunk], const uint4& from) {
  to[0] = low(from.x), to[1] = high(from.x), to[2] = low(from.y), to[3] = high(from.y);
  to[4] = low(from.z), to[5] = high(from.z), to[6] = low(from.w), to[7] = high(from.w);
}

}  // namespace bf16
