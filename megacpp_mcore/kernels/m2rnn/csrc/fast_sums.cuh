// The sums of fast_backward.cuh over a block's tiles: the gradients of v, f and W.
#pragma once

#include "fast_remake.cuh"

namespace m2rnn {

constexpr int kUnitColumns = kUnit * kColumns;
constexpr int kStride = kUnit;  // steps between two meetings of a tile's warps
constexpr int kSlots = kSteps + kStride;
constexpr int kTiles = 2;                  // of a block
constexpr int kBackwardThreads = kTiles * 64, kUndoers = kTiles * 32;
constexpr int kUndoBarrier = kTiles + 1;   // of the warps that undo

// Of a unit.
struct UnitSums {
  alignas(16) float dv[kUnitColumns];  // [column tile, column of it][step]
  alignas(16) float df[kUnit];
};
struct BackwardTile {
  alignas(16) Slot slots[kSlots];
  UnitSums sums[kPartUnits];
  float2 decay[kUnit];  // as Undo has it
};
struct FastBackwardShared {
  BackwardTile tiles[kTiles];
};

__device__ inline void meet_undoers() { meet(kUndoBarrier, kUndoers); }
// x: in the first tile.
__device__ inline float of_tiles(const float* x) {
  return x[0] + x[sizeof(BackwardTile) / sizeof(float)];
}

// The tile's parts of a unit. df: of each row.
__device__ inline void put_sums(UnitSums& to, const float (&dv)[4], const float (&df)[4]) {
  const int g = lane_g(), t = lane_t();
  float x = df[0] + df[2], y = df[1] + df[3];
#pragma unroll
  for (int lanes = 4; lanes < 32; lanes *= 2) {
    x += __shfl_xor_sync(kAll, x, lanes);
    y += __shfl_xor_sync(kAll, y, lanes);
  }
  auto* pair = reinterpret_cast<float2*>(to.dv + g * kUnit + 2 * t);
  pair[0] = make_float2(dv[0], dv[1]);
  pair[kUnitColumns / 4] = make_float2(dv[2], dv[3]);
  if (g == 0) *reinterpret_cast<float2*>(to.df + 2 * t) = make_float2(x, y);
}

// After a barrier, unit by unit backwards: the block's sums. A thread has one column of v of every
// fourth step of a unit.
template <typename T>
struct SumsOut {
  static constexpr int kEvery = kUndoers / kColumns;
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
  // u: the unit's sums' number.
  __device__ void write(FastBackwardShared& shared, const Place& at, bool in_parts, int u) {
#pragma unroll
    for (int later = 0; later < kUnit; later += kEvery)
      write_step(shared, at, in_parts, u, later);
    t -= kUnit;
    dv -= unit_bytes;
    df -= unit_steps;
  }
  __device__ void write_step(FastBackwardShared& shared, const Place& at, bool in_parts, int u,
                             int later) {
    if (static_cast<unsigned>(t + later) >= static_cast<unsigned>(at.length)) return;
    const UnitSums& first = shared.tiles[0].sums[u];
    const float sum = of_tiles(first.dv + place + later);
    char* const to = dv + (later ? unit_bytes / 2 : 0);
    if (in_parts)
      *reinterpret_cast<float*>(to) = sum;
    else
      *reinterpret_cast<T*>(to) = static_cast<T>(sum);
    if (thread % kColumns == 0)
      df[later ? unit_steps / 2 : 0] = of_tiles(first.df + thread / kColumns + later);
  }
};

// The block's part of dW, through slots that nobody reads any more.
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
  meet_undoers();
  // Blocks of a head: its chains', in order, each with its groups of rows.
  const int64_t block = static_cast<int64_t>(at.chain) * at.groups + at.group;
  float* out = p.dW_parts + (block * p.heads + at.head) * kSize;
  for (int i = thread; i < kSize; i += kUndoers)
    out[i] = of_tiles(reinterpret_cast<float*>(shared.tiles[0].slots) + i) +
             (is_first ? 0.f : out[i]);
}

}  // namespace m2rnn
