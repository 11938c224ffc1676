// Shared memory of a block of bwd.cuh, and the partial gradients it writes: dk, and sums over rows,
// of dv and df a part a tile, of dW a part a block.
#pragma once

#include "bwd_state.cuh"

namespace m2rnn {

constexpr int kStride = kUnit / 2;  // steps between two barriers of a tile's warps
constexpr int kMaxChunk = 2 * kSteps;
constexpr int kSlots = kMaxChunk + kStride;
constexpr int kTiles = 2;  // tiles of a block
constexpr int kBackwardThreads = kTiles * 64, kGradientThreads = kTiles * 32;
constexpr int kTileBarriers = kSteps / kStride;
constexpr int kGradientBarrier = 1 + kTiles * kTileBarriers;  // among the gradient warps

struct BackwardTile {
  alignas(16) Slot slots[kSlots];
  float2 decay[2][kUnit];  // StateGradient's f and 1 - f, double-buffered by units
  int headroom;            // of Recompute::enter_chunk
};
struct BackwardShared {
  BackwardTile tiles[kTiles];
};

// The outputs of a tile's parts of dk, dv and df, unit by unit from the last to the first.
template <typename T>
struct SumsOut {
  T *dk, *dv;
  float* df;
  int64_t dk_unit, dv_unit, df_unit;

  // t: first token of the chain's last unit. row: the tile's first row in the block.
  __device__ SumsOut(const Params& p, const Place& at, int t, int row) {
    const int g = lane_g(), step = 2 * lane_t() + g % 2;
    df_unit = static_cast<int64_t>(kUnit) * p.heads;
    dk_unit = df_unit * p.k_dim, dv_unit = df_unit * kColumns;
    const int64_t first = at.token(p, t) * p.heads + at.head;
    const int64_t part = static_cast<int64_t>(p.batch) * p.tokens * p.heads *
                         ((at.row0 + row) / kTileRows);
    dk = static_cast<T*>(p.dk_parts) + key_offset(p, at, row) +
         static_cast<int64_t>(t) * p.heads * p.k_dim;
    const int64_t own = first + static_cast<int64_t>(g) * p.heads;
    dv = static_cast<T*>(p.dv_parts) + (part + own) * kColumns + 4 * lane_t();
    df = p.df_parts + part + first + static_cast<int64_t>(step) * p.heads;
  }
  // t: the unit's first token.
  __device__ void store(const Place& at, int t, const float (&of_k)[4], const float (&of_v)[4],
                        const float (&of_f)[4], float scale) {
    const bool valid = has_step(t, at);
    store_steps(dk, of_k, valid);
    store_steps(dv, of_v, valid);
    // A lane has parts of two steps: lanes of even g sum the first, those of odd g the second.
    const bool odd = lane_g() % 2;
    const float x = of_f[0] + of_f[2], y = of_f[1] + of_f[3];
    float sum = (odd ? y : x) + __shfl_xor_sync(kFullMask, odd ? x : y, 4);
    sum += __shfl_xor_sync(kFullMask, sum, 8);
    sum += __shfl_xor_sync(kFullMask, sum, 16);
    if (lane_g() < 2 && t + 2 * lane_t() + odd < at.length) *df = sum * scale;
    dk -= dk_unit, dv -= dv_unit, df -= df_unit;
  }
};

// The sum of both tiles' values. x: in the first tile.
__device__ inline float of_tiles(const float* x) {
  return x[0] + x[sizeof(BackwardTile) / sizeof(float)];
}
// The block's part of dW, summed in slots that are no longer used.
__device__ inline void write_weight_sum(BackwardShared& shared, const Params& p, const Place& at,
                                        const float (&dW)[2][4], int thread,
                                        bool is_first) {
  constexpr int kSize = kColumns * kColumns;
  const int g = lane_g(), t = lane_t();
  float* own = reinterpret_cast<float*>(shared.tiles[thread / 32].slots);
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      own[column_of(n, 2 * t + e % 2) * kColumns + column_of(e / 2, g)] = dW[n][e];
  barrier_sync(kGradientBarrier, kGradientThreads);
  // dW_parts of a head: by chain, then by row block.
  const int64_t block = static_cast<int64_t>(at.chain) * at.row_blocks + at.row_block;
  float* out = p.dW_parts + (block * p.heads + at.head) * kSize;
  for (int i = thread; i < kSize; i += kGradientThreads)
    out[i] = of_tiles(reinterpret_cast<float*>(shared.tiles[0].slots) + i) +
             (is_first ? 0.f : out[i]);
}

}  // namespace m2rnn
