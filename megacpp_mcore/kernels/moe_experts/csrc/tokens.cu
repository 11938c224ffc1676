// The gradient of a MoE layer's input: what the experts, the router and the shared expert give to
// the tokens, summed, and the backward pass of the RMSNorm in front of them, in one pass.
//
// A token's rows come into shared memory by the copy engine, a few tokens ahead. A thread has eight
// columns of every token of its block, and their part of the router's weight in registers.
#include <cuda_runtime.h>

#include "bf16.cuh"
#include "hopper.cuh"

namespace tokens {
namespace {

using namespace bf16;
using namespace hopper;

constexpr int kColumns = kChunk;  // of a thread
// Threads that compute. With one warp more, and the one that loads, each has 96 registers, not 128.
constexpr int kMostThreads = 480;
constexpr int kMostExperts = 16;
constexpr int kMostStages = 8;
constexpr int kSharedBytes = 227 * 1024;

struct Shared {
  uint64_t full[kMostStages], empty[kMostStages];
  float d_logits[kMostStages][kMostExperts];
  float rstd[kMostStages];
  uint32_t routed[kMostStages];  // bit k: the token has a k-th expert
  float4 sums[2][4];             // each warp's part of the token's, which two tokens use in turns
};

// As of tokens_gradient, below; bf16 in chunks of 16 bytes.
struct Problem {
  const uint4 *y, *shared, *x, *d_residual, *gate, *weight;
  const int* rows;
  const float *d_logits, *rstd;
  uint4* dx;
  float* partial;
  int tokens, width, experts, topk, stages;
};

// to += factor from.
__device__ __forceinline__ void add(float (&to)[kColumns], const uint4& from, float factor = 1) {
  float found[kColumns];
  unpack(found, from);
#pragma unroll
  for (int i = 0; i < kColumns; ++i) to[i] += factor * found[i];
}

// Rows of a stage: the token's of y, then of x, d_residual and, where there is one, shared.
__device__ __forceinline__ int rows_of(const Problem& p) {
  return p.topk + 2 + (p.shared != nullptr);
}

// By one warp.
__device__ void load(Shared& shared, uint8_t* stages, const Problem& p) {
  const int lane = threadIdx.x % 32, bytes = 2 * p.width, rows = rows_of(p);
  int stage = 0;
  uint32_t phase = 1;
  for (int token = blockIdx.x; token < p.tokens; token += gridDim.x) {
    const int64_t chunks = p.width / kColumns, at = token;
    const int row = lane < p.topk ? __ldg(p.rows + at * p.topk + lane) : -1;
    const float d_logit = lane < p.experts ? __ldg(p.d_logits + at * p.experts + lane) : 0;
    const float rstd = __ldg(p.rstd + token);
    const uint32_t routed = __ballot_sync(~0u, row >= 0), full = address(&shared.full[stage]);
    barrier_wait(address(&shared.empty[stage]), phase);
    if (lane < kMostExperts) shared.d_logits[stage][lane] = d_logit;
    if (lane == 0) shared.rstd[stage] = rstd, shared.routed[stage] = routed;
    __syncwarp();
    if (lane == 0) barrier_expect(full, (__popc(routed) + rows - p.topk) * bytes);
    __syncwarp();
    const uint4* from = lane < p.topk        ? p.y + row * chunks
                        : lane == p.topk     ? p.x + at * chunks
                        : lane == p.topk + 1 ? p.d_residual + at * chunks
                                             : p.shared + at * chunks;
    if (lane < p.topk ? row >= 0 : lane < rows) {
      load_bytes(address(stages + (static_cast<int64_t>(stage) * rows + lane) * bytes), from, bytes,
                 full);
    }
    if (++stage == p.stages) stage = 0, phase ^= 1;
  }
}

// By the other warps, of which the last may have threads beyond the width.
__device__ void compute(Shared& shared, const uint8_t* stages, const Problem& p, int threads) {
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int chunks = p.width / kColumns;
  const bool inside = thread < chunks;
  const uint4 zero{};
  uint4 gates[kMostExperts];
#pragma unroll
  for (int e = 0; e < kMostExperts; ++e) {
    gates[e] = inside && e < p.experts ? __ldg(p.gate + e * chunks + thread) : zero;
  }
  const uint4 weight = inside ? __ldg(p.weight + thread) : zero;
  const int rows = rows_of(p);
  float total[kColumns] = {};
  int stage = 0, turn = 0;
  uint32_t phase = 0;
  for (int token = blockIdx.x; token < p.tokens; token += gridDim.x, turn ^= 1) {
    // Else the compiler keeps them as float32 from token to token, in twice the registers.
#pragma unroll
    for (uint4& gate : gates) {
      asm volatile("" : "+r"(gate.x), "+r"(gate.y), "+r"(gate.z), "+r"(gate.w));
    }
    barrier_wait(address(&shared.full[stage]), phase);
    const uint4* at = reinterpret_cast<const uint4*>(stages) + stage * rows * chunks + thread;
    const uint32_t routed = shared.routed[stage];
    float g[kColumns] = {}, normed[kColumns];
    uint4 residual = zero, x = zero;
    if (inside) {
      for (int k = 0; k < p.topk; ++k) {
        if (routed >> k & 1) add(g, at[k * chunks]);
      }
      x = at[p.topk * chunks], residual = at[(p.topk + 1) * chunks];
      if (p.shared) add(g, at[(p.topk + 2) * chunks]);
    }
    const float rstd = shared.rstd[stage];
    const float4* factors = reinterpret_cast<const float4*>(shared.d_logits[stage]);
#pragma unroll
    for (int e = 0; e < kMostExperts; e += 4) {
      const float4 factor = factors[e / 4];
      add(g, gates[e], factor.x), add(g, gates[e + 1], factor.y);
      add(g, gates[e + 2], factor.z), add(g, gates[e + 3], factor.w);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(address(&shared.empty[stage]), 0);
    unpack(normed, x);
    float w[kColumns], sum = 0;
    unpack(w, weight);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      normed[i] *= rstd;
      total[i] += g[i] * normed[i];
      g[i] *= w[i];
      sum += g[i] * normed[i];
    }
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
    float* sums = reinterpret_cast<float*>(shared.sums[turn]);
    if (lane == 0) sums[warp] = sum;
    asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory");
    float mean = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 four = shared.sums[turn][i];
      mean += four.x + four.y + four.z + four.w;
    }
    mean /= p.width;
    float rest[kColumns];
    unpack(rest, residual);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) rest[i] += rstd * (g[i] - normed[i] * mean);
    if (inside) {
      p.dx[static_cast<int64_t>(token) * chunks + thread] = pack(rest);
    }
    if (++stage == p.stages) stage = 0, phase ^= 1;
  }
  if (inside) {
    float4* to = reinterpret_cast<float4*>(p.partial + static_cast<int64_t>(blockIdx.x) * p.width);
    to[2 * thread] = {total[0], total[1], total[2], total[3]};
    to[2 * thread + 1] = {total[4], total[5], total[6], total[7]};
  }
}

__global__ void __launch_bounds__(kMostThreads + 32, 1) gradient(const Problem p) {
  extern __shared__ __align__(128) uint8_t stages[];
  __shared__ Shared shared;
  const int threads = blockDim.x - 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.stages; ++i) {
      barrier_init(address(&shared.full[i]), 1);
      barrier_init(address(&shared.empty[i]), threads / 32);
    }
    barrier_fence();
  }
  if (threadIdx.x < 32) {
    reinterpret_cast<float*>(shared.sums)[threadIdx.x] = 0;  // of warps that there are not
  }
  __syncthreads();
  if (threadIdx.x >= threads) {
    load(shared, stages, p);
  } else {
    compute(shared, stages, p, threads);
  }
}

// The weight's gradient: a thread sums a column of partial (blocks, width).
__global__ void add_up(const float* partial, __nv_bfloat16* d_weight, int blocks, int width) {
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= width) return;
  float sum = 0;
#pragma unroll 12
  for (int i = 0; i < blocks; ++i) sum += partial[static_cast<int64_t>(i) * width + column];
  d_weight[column] = __float2bfloat16_rn(sum);
}

}  // namespace
}  // namespace tokens

// With g[t] = the sum of y[rows[t, k]] over k, plus shared[t] and d_logits[t] gate, and
// z = x rstd: dx = rstd (g weight - z mean(g weight z)) + d_residual, d_weight = the sum of g z.
//
// y (R, width); rows (count, topk), -1 where a token has fewer experts; shared (count, width) or
// null; d_logits (count, experts); gate (experts, width); x, d_residual, dx (count, width); weight,
// d_weight (width); rstd (count); partial (blocks, width). int32, float32, all others bf16.
extern "C" int tokens_gradient(const void* y, const int* rows, const void* shared,
                               const float* d_logits, const void* gate, const void* x,
                               const void* d_residual, const void* weight, const float* rstd,
                               void* dx, float* partial, void* d_weight, int count, int width,
                               int experts, int topk, int blocks, cudaStream_t stream) {
  using namespace tokens;
  const auto chunks = [](const void* data) { return static_cast<const uint4*>(data); };
  Problem p{chunks(y), chunks(shared), chunks(x), chunks(d_residual), chunks(gate), chunks(weight),
            rows, d_logits, rstd, static_cast<uint4*>(dx), partial, count, width, experts, topk};
  const int stage = (topk + 2 + (shared != nullptr)) * width * 2;
  const int most = (kSharedBytes - static_cast<int>(sizeof(Shared))) / stage;
  p.stages = most < kMostStages ? most : kMostStages;
  const int threads = (width / kColumns + 31) / 32 * 32;
  if (p.stages < 2 || width % kColumns || threads > kMostThreads || experts > kMostExperts) {
    return cudaErrorInvalidValue;
  }
  cudaError_t error = cudaFuncSetAttribute(
      gradient, cudaFuncAttributeMaxDynamicSharedMemorySize, p.stages * stage);
  if (error != cudaSuccess) return error;
  gradient<<<blocks, threads + 32, p.stages * stage, stream>>>(p);
  add_up<<<(width + 63) / 64, 64, 0, stream>>>(
      partial, static_cast<__nv_bfloat16*>(d_weight), blocks, width);
  return cudaGetLastError();
}
