// What a block of fast_backward.cuh shares, and its sums as they leave it: of v and f each tile's
// part, of W the block's.
#pragma once

#include "fast_undo.cuh"

namespace m2rnn {

constexpr int kStride = kUnit / 2;  // steps between two meetings of a tile's warps
constexpr int kMaxChunk = 2 * kSteps;
constexpr int kSlots = kMaxChunk + kStride;
constexpr int kTiles = 2;  // of a block
constexpr int kBackwardThreads = kTiles * 64, kUndoers = kTiles * 32;
constexpr int kMeetings = kSteps / kStride;
constexpr int kUndoBarrier = 1 + kTiles * kMeetings;  // of the warps that undo

struct BackwardTile {
  alignas(16) Slot slots[kSlots];
  float2 decay[2][kUnit];  // as Undo has it, of two units in turns
  int reserve;             // as Remake has it
};
struct FastBackwardShared {
  BackwardTile tiles[kTiles];
};

// Where a tile's parts of dk, dv and df go, unit by unit backwards.
template <typename T>
struct SumsOut {
  T *dk, *dv;
  float* df;
  int64_t dk_unit, dv_unit, df_unit;

  // t: first token of the first unit; row: the tile's first of the block's.
  __device__ SumsOut(const Problem& p, const Place& at, int t, int row) {
    const int g = lane_g(), step = 2 * lane_t() + g % 2;
    df_unit = static_cast<int64_t>(kUnit) * p.heads;
    dk_unit = df_unit * p.k_dim, dv_unit = df_unit * kColumns;
    const int64_t first = at.token(p, t) * p.heads + at.head;
    const int64_t part = static_cast<int64_t>(p.batch) * p.tokens * p.heads *
                         ((at.row0 + row) / kTileRows);
    dk = static_cast<T*>(p.dk_parts) + rows_place(p, at, row) +
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
    // Of two steps: the lanes of even g sum the first up, those of odd g the second.
    const bool odd = lane_g() % 2;
    const float x = of_f[0] + of_f[2], y = of_f[1] + of_f[3];
    float sum = (odd ? y : x) + __shfl_xor_sync(kAll, odd ? x : y, 4);
    sum += __shfl_xor_sync(kAll, sum, 8);
    sum += __shfl_xor_sync(kAll, sum, 16);
    if (lane_g() < 2 && t + 2 * lane_t() + odd < at.length) *df = sum * scale;
    dk -= dk_unit, dv -= dv_unit, df -= df_unit;
  }
};

// x: in the first tile.
__device__ inline float of_tiles(const float* x) {
  return x[0] + x[sizeof(BackwardTile) / sizeof(float)];
}
// The block's part of dW, through slots that nobody uses any more.
__device__ inline void write_weight_sum(FastBackwardShared& shared, const Problem& p,
                                        const Place& at, const float (&dW)[2][4], int thread,
                                        bool is_first) {
  constexpr int kSize = kColumns * kColumns;
  const int g = lane_g(), t = lane_t();
  float* own = reinterpret_cast<float*>(shared.tiles[thread / 32].slots);
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      own[column_of(n, 2 * t + e % 2) * kColumns + column_of(e / 2, g)] = dW[n][e];
  meet(kUndoBarrier, kUndoers);
  // Blocks of a head: its chains', in order, each with its groups of rows.
  const int64_t block = static_cast<int64_t>(at.chain) * at.groups + at.group;
  float* out = p.dW_parts + (block * p.heads + at.head) * kSize;
  for (int i = thread; i < kSize; i += kUndoers)
    out[i] = of_tiles(reinterpret_cast<float*>(shared.tiles[0].slots) + i) +
             (is_first ? 0.f : out[i]);
}

}  // namespace m2rnn
