// The forward roles of fast_backward.cuh, replay and remake, and what its roles share.
#pragma once

#include "fast.cuh"

namespace m2rnn {

constexpr int kBlockTiles = 2;
constexpr int kBlockRows = kBlockTiles * kTileRows;
constexpr int kRoles = 4;
constexpr int kBackwardThreads = kRoles * kBlockTiles * 32;
constexpr int kMaxUnits = kMaxStages * kSteps / kUnit;  // of a chunk
constexpr int kUnitsKept = 3;                           // remake's, undo's and sums'
// Four roles' code meets in one instruction cache: loops longer than this made a lone chain slower.
constexpr int kUnrolled = 2, kUnrolledUndo = 1, kUnrolledSums = 4;

// A unit's tiles in the inputs' dtype.
struct UnitTiles {
  char before[kUnit][kBlockTiles][kTileBytes];  // the state before each step
  char a[kUnit][kBlockTiles][kTileBytes];  // tanh (fp16), then the gradient of its argument
};

struct FastBackwardShared {
  alignas(16) UnitTiles units[kUnitsKept];
  float starts[kMaxUnits + 1][kBlockTiles][kTileValues];  // the state before each unit of a chunk
  char last[kBlockTiles][kTileBytes];                     // the state after the chain's last step
  alignas(16) WarpInputs in[(kRoles - 1) * kBlockTiles];
  float df[2][kUnit][kBlockTiles];
  alignas(16) float dv[32][4];
};

// The periods between barriers. The last chunk is replayed in the first `units` of them; then
// remake starts on it, one period later undo, and one more later sums.
struct Periods {
  int chunks, units, count;  // units: of a chunk

  __device__ Periods(const Problem& p, const Place& at)
      : chunks(Place::ceil_div(at.length, p.stages * kSteps)), units(p.stages * kSteps / kUnit),
        count(chunks == 0 ? 0 : (chunks + 1) * units + 2) {}
  __device__ int last_unit() const { return (chunks * units - 1) * kUnit; }  // its first token
};

// Where the state before a unit is kept, in turns: replay writes that of the next chunk's unit u
// while remake, who goes the other way, has left all slots but the first u of this chunk's.
__device__ inline int start_slot(int units, int chunk, int unit) {
  return chunk % 2 ? units - unit : unit;
}

template <typename T>
__device__ void replay(FastBackwardShared& shared, const Problem& p, const Place& at, int tile) {
  const Periods periods(p, at);
  const int units = periods.units, own = threadIdx.x % 32 * 4;
  const TileWeight w(p.W + at.head * kColumns * kColumns);
  WarpInputs& in = shared.in[tile];
  int chunk = periods.chunks - 1, unit = 0, t0 = chunk * units * kUnit;
  const float* checkpoint = p.checkpoints + (at.first_chunk + chunk) * state_size(p) +
                            (static_cast<int64_t>(at.head) * p.k_dim + at.row0) * kColumns +
                            tile_state_offset(tile * kTileRows);
  WarpStage<T> next(p, at, k_of<T>(p, at), tile * kTileRows, v_of<T>(p, at), t0);
  Tile h = {}, r;
  Packed packed;
  if (periods.count > 0) {
    load_state(h, checkpoint);
    next.load();
  }
  for (int period = 0; period < periods.count; ++period) {
    if (chunk >= 0) {
      if (unit == 0) pack_tile<__half>(packed, h);
      float* start = shared.starts[start_slot(units, chunk, unit)][tile] + own;
      store4(start, h[0]);
      store4(start + kTileValues / 2, h[1]);
      const bool run = unit + 1 < units && t0 < at.length;
      if (run) next.store(in, kTwoLog2E);
      t0 += kUnit;
      if (++unit < units) {
        next.move(1);
      } else {
        unit = 0;
        t0 -= 2 * units * kUnit;
        next.move(1 - 2 * units);
        checkpoint -= state_size(p);
        if (--chunk >= 0) load_state(h, checkpoint);
      }
      next.load();
      if (run) {
        Outer given;
        given.load(in, 0);
#pragma unroll kUnrolled
        for (int i = 0; i < kUnit; ++i) {
          const Outer now = given;
          given.load(in, (i + 1) % kUnit);
          tile_step(h, r, packed, w, now);
        }
      }
    }
    __syncthreads();
  }
}

template <typename T>
__device__ void remake(FastBackwardShared& shared, const Problem& p, const Place& at, int tile) {
  const Periods periods(p, at);
  const int units = periods.units, start = threadIdx.x % 32 * 4, own = own_offset();
  const TileWeight w(p.W + at.head * kColumns * kColumns);
  WarpInputs& in = shared.in[kBlockTiles + tile];
  int chunk = periods.chunks - 1, unit = units - 1, t0 = periods.last_unit(), kept = 0;
  WarpStage<T> next(p, at, k_of<T>(p, at), tile * kTileRows, v_of<T>(p, at), t0);
  next.load();
  Tile h, r;
  Packed packed;
  for (int period = 0; period < periods.count; ++period) {
    if (period >= units && t0 >= 0) {
      next.store(in, kTwoLog2E);
      next.move(-1);
      next.load();
      if (t0 < at.length) {
        UnitTiles& to = shared.units[kept];
        const float* state = shared.starts[start_slot(units, chunk, unit)][tile] + start;
        load4(h[0], state);
        load4(h[1], state + kTileValues / 2);
        pack_tile<__half>(packed, h);
        Outer given;
        given.load(in, 0);
#pragma unroll kUnrolled
        for (int i = 0; i < kUnit; ++i) {
          const Outer now = given;
          given.load(in, (i + 1) % kUnit);
          Packed out;
          pack_tile<T>(out, h);
          store_tile(to.before[i][tile], own, out);
          tile_step(h, r, packed, w, now);
#pragma unroll
          for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) r[n][e] = fmaf(-2.f, r[n][e], 1.f);
          pack_tile<__half>(out, r);
          store_tile(to.a[i][tile], own, out);
        }
        if (t0 + kUnit >= at.length) {
          Packed out;
          pack_tile<T>(out, h);
          store_tile(shared.last[tile], own, out);
        }
      }
      t0 -= kUnit;
      if (--unit < 0) unit = units - 1, --chunk;
      if (++kept == kUnitsKept) kept = 0;
    }
    __syncthreads();
  }
}

}  // namespace m2rnn
