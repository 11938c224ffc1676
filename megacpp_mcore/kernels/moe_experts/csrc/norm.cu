// The RMSNorm in front of a MoE layer and the router's logits of its output, in one pass.
//
// A tile is eight tokens. Each of eight warps norms one, which the copy engine brings to shared memory
// two tiles ahead. Then each multiplies all eight by its part of the columns of the router's weight,
// which it has in registers, and the parts are added up.
#include <cuda_runtime.h>

#include "bf16.cuh"
#include "hopper.cuh"

namespace normed {
namespace {

using namespace bf16;
using namespace hopper;

constexpr int kTokens = 8;  // of a tile, as many as an instruction multiplies
constexpr int kWarps = kTokens;
constexpr int kExperts = 16;
constexpr int kStages = 2;   // each of a tile's tokens before the norm
constexpr int kBlock = 32;   // columns of two instructions
constexpr int kBlocks = 15;  // of a warp's columns, at most
constexpr int kMostColumns = kWarps * kBlocks * kBlock;
constexpr int kMostChunks = kMostColumns / kChunk / 32;  // of a token, of one thread
static_assert(kMostChunks == kBlocks);
constexpr int kAhead = 5;
// Between the tile's normed tokens: without it, those of two are in the same banks. Zeros, which end
// the last block of columns.
constexpr int kPad = 64;

struct Shared {
  uint64_t full[kStages][kWarps], gate[2][kWarps];
  float parts[kWarps][kExperts][kTokens];
  uint4 weight[kMostColumns / kChunk];
};

// As of norm_and_logits, below; bf16 in chunks of 16 bytes.
struct Problem {
  const uint4 *x, *weight, *gate;
  uint4* normed;
  float *rstd, *logits;
  float eps;
  int tokens, width, experts;
};

__device__ __forceinline__ int normed_bytes(const Problem& p) { return 2 * p.width + kPad; }

// d (experts, tokens) += a (experts, columns) b (columns, tokens), 16 columns.
__device__ __forceinline__ void multiply(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                         uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// A row of `from` to shared memory, by one thread.
__device__ __forceinline__ void load(uint8_t* to, const uint4* from, int64_t row, uint64_t* full,
                                     int width) {
  barrier_expect(address(full), 2 * width);
  load_bytes(address(to), from + row * (width / kChunk), 2 * width, address(full));
}

// A thread's part of a warp's token; beyond the width, zeros.
__device__ __forceinline__ void read(uint4 (&x)[kMostChunks], const uint8_t* from, int chunks) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kMostChunks; ++i) {
    const int at = i * 32 + lane;
    x[i] = at < chunks ? reinterpret_cast<const uint4*>(from)[at] : uint4{};
  }
}

__device__ __forceinline__ void add_squares(float (&sums)[kChunk], const uint4& chunk) {
  float values[kChunk];
  unpack(values, chunk);
#pragma unroll
  for (int j = 0; j < kChunk; ++j) sums[j] += values[j] * values[j];
}

// 1 / root mean square of a warp's token.
__device__ __forceinline__ float scale(const float (&sums)[kChunk], const Problem& p) {
  float sum = 0;
#pragma unroll
  for (float part : sums) sum += part;
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
  return 1 / sqrtf(sum / p.width + p.eps);
}

// A warp's normed token to memory, and to `row` in shared memory.
__device__ __forceinline__ void write(const uint4 (&x)[kMostChunks], float rstd, uint4* row,
                                      int64_t token, const Shared& shared, const Problem& p) {
  const int lane = threadIdx.x % 32, chunks = p.width / kChunk;
  // Some of the weight at a time: it is not read ahead of what is stored to shared memory.
#pragma unroll
  for (int first = 0; first < kMostChunks; first += kAhead) {
    uint4 weight[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) weight[i] = shared.weight[(first + i) * 32 + lane];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int at = (first + i) * 32 + lane;
      float values[kChunk], w[kChunk];
      unpack(values, x[first + i]), unpack(w, weight[i]);
#pragma unroll
      for (int j = 0; j < kChunk; ++j) values[j] = values[j] * rstd * w[j];
      const uint4 found = pack(values);
      if (at < chunks) row[at] = found, p.normed[token * chunks + at] = found;
    }
  }
  if (lane == 0) p.rstd[token] = rstd;
}

// A warp's part of the columns, in blocks. In each a thread has one chunk of two rows of the router's
// weight and of a token, of which an instruction takes half.
struct Part {
  int chunks, blocks, begin, expert, chunk;  // and expert + 8; `expert` is also a token's place

  __device__ explicit Part(const Problem& p) {
    const int all = (p.width + kBlock - 1) / kBlock, lane = threadIdx.x % 32;
    const int each = (all + kWarps - 1) / kWarps;
    begin = threadIdx.x / 32 * each, blocks = min(each, all - begin);
    chunks = p.width / kChunk, expert = lane / 4, chunk = lane % 4;
  }

  // Of the row's chunks, the thread's of block i.
  __device__ __forceinline__ int at(int i) const { return (begin + i) * 4 + chunk; }
};

// Rows `expert` + first of the router's weight, once they are in shared memory at `from`.
__device__ __forceinline__ void read_gate(uint4 (&gate)[kBlocks], const uint8_t* from, int first,
                                          uint64_t* full, const Part& part, const Problem& p) {
  const bool is_one = first + part.expert < p.experts;
  if (is_one) barrier_wait(address(&full[part.expert]), 0);
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    const bool inside = is_one && i < part.blocks && part.at(i) < part.chunks;
    gate[i] = inside ? reinterpret_cast<const uint4*>(from)[part.at(i)] : uint4{};
  }
}

// A warp's part of the products of all tokens of a tile, of which the thread reads one; and the
// squares of x, meanwhile.
__device__ __forceinline__ void multiply_part(float (&to)[kExperts][kTokens],
                                              const uint4 (&gate)[2][kBlocks], const uint8_t* row,
                                              const Part& part, float (&squares)[kChunk],
                                              const uint4 (&x)[kMostChunks]) {
  float sums[2][4] = {};
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    const uint4 one = gate[0][i], other = gate[1][i];
    const uint4 of = i < part.blocks ? reinterpret_cast<const uint4*>(row)[part.at(i)] : uint4{};
    multiply(sums[0], one.x, other.x, one.y, other.y, of.x, of.y);
    multiply(sums[1], one.z, other.z, one.w, other.w, of.z, of.w);
    add_squares(squares, x[i]);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float* at = &to[part.expert + 8 * half][2 * part.chunk];
    *reinterpret_cast<float2*>(at) = {sums[0][2 * half] + sums[1][2 * half],
                                      sums[0][2 * half + 1] + sums[1][2 * half + 1]};
  }
}

// The logits of the tile that begins at `first`: of one token and expert, the sum over warps.
__device__ __forceinline__ void add_parts(const Shared& shared, int first, const Problem& p) {
  const int expert = threadIdx.x / kTokens, at = threadIdx.x % kTokens, token = first + at;
  if (first < 0 || expert >= p.experts || token >= p.tokens) return;
  float sum = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += shared.parts[w][expert][at];
  p.logits[static_cast<int64_t>(token) * p.experts + expert] = sum;
}

__global__ void __launch_bounds__(32 * kWarps, 1) forward(const Problem p) {
  extern __shared__ __align__(128) uint8_t stages[];
  __shared__ Shared shared;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int chunks = p.width / kChunk, step = gridDim.x * kTokens;
  int first = blockIdx.x * kTokens;
  // Eight rows each: the stages, and what is multiplied.
  const auto place = [&](int stage, int row) {
    return stages + (stage * kTokens + row) * 2 * p.width;
  };
  uint8_t *const rows = place(kStages, 0), *const own = rows + warp * normed_bytes(p);
  const auto load_token = [&](int stage, int64_t token) {
    if (token < p.tokens) load(place(stage, warp), p.x, token, &shared.full[stage][warp], p.width);
  };
  // The router's weight passes through the places of what comes later.
  uint64_t(*const full)[kWarps] = shared.gate;
  if (lane == 0) {
    for (auto& barriers : shared.full) barrier_init(address(&barriers[warp]), 1);
    for (auto& barriers : shared.gate) barrier_init(address(&barriers[warp]), 1);
    barrier_fence();
    if (warp < p.experts) load(place(1, warp), p.gate, warp, &full[0][warp], p.width);
    if (warp + 8 < p.experts) load(own, p.gate, warp + 8, &full[1][warp], p.width);
    load_token(0, first + warp);
  }
  for (int i = thread; i < chunks; i += blockDim.x) shared.weight[i] = __ldg(p.weight + i);
  if (thread < kTokens * kPad / 16) {
    uint8_t* pad = rows + thread / (kPad / 16) * normed_bytes(p) + 2 * p.width;
    reinterpret_cast<uint4*>(pad)[thread % (kPad / 16)] = {};
  }
  __syncthreads();
  const Part part(p);
  uint8_t* const another = rows + part.expert * normed_bytes(p);
  uint4 gate[2][kBlocks];
  read_gate(gate[0], place(1, part.expert), 0, full[0], part, p);
  read_gate(gate[1], another, 8, full[1], part, p);
  __syncthreads();
  if (lane == 0) load_token(1, first + warp + static_cast<int64_t>(step));

  int stage = 0;
  uint32_t phase = 0;
  // A step reads a tile while it multiplies the one before, and norms it then.
  for (int before = -1;; before = first, first += step) {
    const int64_t token = first + warp;
    uint4 x[kMostChunks] = {};
    if (token < p.tokens) {
      barrier_wait(address(&shared.full[stage][warp]), phase);
      read(x, place(stage, warp), chunks);
      __syncwarp();
      if (lane == 0) load_token(stage, token + static_cast<int64_t>(kStages) * step);
    }
    float squares[kChunk] = {};
    multiply_part(shared.parts[warp], gate, another, part, squares, x);
    const float rstd = scale(squares, p);
    __syncthreads();
    add_parts(shared, before, p);
    if (first >= p.tokens) break;
    if (token < p.tokens) write(x, rstd, reinterpret_cast<uint4*>(own), token, shared, p);
    __syncthreads();
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
}

}  // namespace
}  // namespace normed

// rstd = 1 / sqrt(mean(x^2) + eps) of each token, normed = x rstd weight, logits = normed gate^T of
// the rounded tokens.
//
// x, normed (count, width); weight (width); gate (experts, width); rstd (count); logits (count,
// experts). rstd and logits float32, all others bf16. blocks: of the grid.
extern "C" int norm_and_logits(const void* x, const void* weight, const void* gate, void* normed,
                               float* rstd, float* logits, float eps, int count, int width,
                               int experts, int blocks, cudaStream_t stream) {
  using namespace normed;
  if (width % kChunk || width > kMostColumns || experts > kExperts) return cudaErrorInvalidValue;
  const auto chunks = [](const void* data) { return static_cast<const uint4*>(data); };
  const Problem p{chunks(x), chunks(weight), chunks(gate), static_cast<uint4*>(normed), rstd,
                  logits,    eps,            count,        width,                       experts};
  const int bytes = kTokens * ((kStages + 1) * 2 * width + kPad);
  const cudaError_t error =
      cudaFuncSetAttribute(forward, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  forward<<<blocks, 32 * kWarps, bytes, stream>>>(p);
  return cudaGetLastError();
}
