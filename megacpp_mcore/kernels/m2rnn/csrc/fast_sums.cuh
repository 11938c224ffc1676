// The sums of fast_backward.cuh over a block's tiles: the gradients of v, f and W.
#pragma once

#include "fast_remake.cuh"

namespace m2rnn {

constexpr int kStride = 2;  // steps between two meetings of a tile's warps
constexpr int kSlots = kSteps + kStride;
constexpr int kBackwardTiles = 4;                 // of a block, at most: 64 rows
constexpr int kUndoBarrier = kBackwardTiles + 1;  // of the warps that undo
constexpr int kUnitColumns = kUnit * kColumns;

struct BackwardTile {
  alignas(16) Slot slots[kSlots];
  // Of a unit: the lanes' shares of df; then dv, [column tile, column of it][step], and df.
  alignas(16) float unit[kUnit][32];

  __device__ float* dv() { return unit[0]; }
  __device__ float* df() { return unit[0] + kUnitColumns; }
};
struct FastBackwardShared {
  BackwardTile tiles[kBackwardTiles];
};

// Half of a block's warps undo, a tile each.
__device__ inline void meet_undoers() { meet(kUndoBarrier, blockDim.x / 2); }
__device__ inline bool is_whole_block() { return blockDim.x == kBackwardTiles * 64; }
__device__ inline float of_tiles(const float* x) {
  constexpr int kTile = sizeof(BackwardTile) / sizeof(float);
  float sum = x[0] + x[kTile];
  if (is_whole_block()) sum += x[2 * kTile] + x[3 * kTile];
  return sum;
}

// The tile's parts of a unit.
__device__ inline void put_sums(BackwardTile& own, const float (&dv)[4]) {
  const int g = lane_g(), t = lane_t();
  __syncwarp();
  float x[4], y[4];
  load4(x, &own.unit[g][8 * t]);
  load4(y, &own.unit[g][8 * t + 4]);
  float df = ((x[0] + x[1]) + (x[2] + x[3])) + ((y[0] + y[1]) + (y[2] + y[3]));
  df += __shfl_xor_sync(kAll, df, 1);
  df += __shfl_xor_sync(kAll, df, 2);
  __syncwarp();
  if (t == 0) own.df()[g] = df;
  float* to = own.dv() + g * kUnit + 2 * t;
  *reinterpret_cast<float2*>(to) = make_float2(dv[0], dv[1]);
  *reinterpret_cast<float2*>(to + kUnitColumns / 2) = make_float2(dv[2], dv[3]);
}

// After a barrier, unit by unit backwards: the block's sums. A thread has one column of v, of one
// step of a unit or, in a block of two warps, of two.
template <typename T>
struct SumsOut {
  int t, place, unit_bytes, unit_steps;  // t: the thread's step of the unit in turn
  char* dv;
  float* df;

  int thread;  // of those that undo

  // first: of the first unit.
  __device__ SumsOut(const Problem& p, const Place& at, int first, int thread) : thread(thread) {
    const int step = thread / kColumns, column = thread % kColumns;
    t = first + step;
    place = (column / 4 * 2 + column % 2 + column % 4 / 2 * 8) * kUnit + step;
    const int bytes = p.dv_parts ? sizeof(float) : sizeof(T);
    const int64_t part = at.group * (static_cast<int64_t>(p.batch) * p.tokens);
    const int64_t to = at.token(p, t) * p.heads + at.head;
    dv = p.dv_parts ? reinterpret_cast<char*>(p.dv_parts + part * p.heads * kColumns)
                    : static_cast<char*>(p.dv);
    dv += (to * kColumns + column) * bytes;
    df = (p.df_parts ? p.df_parts + part * p.heads : p.df) + to;
    unit_steps = kUnit * p.heads;
    unit_bytes = unit_steps * kColumns * bytes;
  }
  __device__ void write(BackwardTile& first, const Problem& p, const Place& at) {
    write_step(first, p, at, 0);
    if (!is_whole_block()) write_step(first, p, at, kUnit / 2);
    t -= kUnit;
    dv -= unit_bytes;
    df -= unit_steps;
  }
  __device__ void write_step(BackwardTile& first, const Problem& p, const Place& at,
                             int later) {
    if (static_cast<unsigned>(t + later) >= static_cast<unsigned>(at.length)) return;
    const float sum = of_tiles(first.dv() + place + later);
    char* const to = dv + (later ? unit_bytes / 2 : 0);
    if (p.dv_parts)
      *reinterpret_cast<float*>(to) = sum;
    else
      *reinterpret_cast<T*>(to) = static_cast<T>(sum);
    if (thread % kColumns == 0)
      df[later ? unit_steps / 2 : 0] = of_tiles(first.df() + thread / kColumns + later);
  }
};

// The block's part of dW, through slots that nobody reads any more.
__device__ inline void write_weight_sum(BackwardTile (&tiles)[kBackwardTiles], const Problem& p,
                                        const Place& at, const float (&dW)[2][4], int thread) {
  constexpr int kSize = kColumns * kColumns;
  const int g = lane_g(), t = lane_t();
  float* own = reinterpret_cast<float*>(tiles[thread / 32].slots);
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      own[column_of(n, 2 * t + e % 2) * kColumns + column_of(e / 2, g)] = dW[n][e];
  meet_undoers();
  // Blocks of a head: its chains', in order, each with its groups of rows.
  const int64_t block = static_cast<int64_t>(at.chain) * at.groups + at.group;
  float* out = p.dW_parts + (block * p.heads + at.head) * kSize;
  for (int i = thread; i < kSize; i += blockDim.x / 2)
    out[i] = of_tiles(reinterpret_cast<float*>(tiles[0].slots) + i);
}

}  // namespace m2rnn
