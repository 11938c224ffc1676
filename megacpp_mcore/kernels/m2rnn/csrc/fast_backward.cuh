// Backward for 16-bit inputs. A block has 64 rows of a chain (or 32), and for each tile of 16 two
// warps: one undoes the chain's parts of 16 steps, the last first, while the other makes the part
// before again from its checkpoint. They meet every two steps: of a part that is undone there is as
// much left to read as of the other one is written, so that both share kSlots slots, which are read
// from one end to the other, and the next time back.
#pragma once

#include "fast_sums.cuh"
#include "fast_undo.cuh"

namespace m2rnn {

// Where a tile's warps are among its slots: `step` from one to the next. Of every second part,
// the first to undo among them, the slots lie in order.
struct Walk {
  static constexpr int kSlot = sizeof(Slot) / sizeof(uint4);
  int step;
  uint4* to_write;

  __device__ Walk(Slot* slots, int parts)
      : step(parts % 2 ? kSlot : -kSlot),
        to_write(slots[parts % 2 ? 0 : kSlots - 1].before + threadIdx.x % 32) {}
  __device__ uint4* to_read() const { return to_write + kStride * step; }
  // From the end of a part: the other way.
  __device__ void turn() {
    to_write += (kSlots - 1) * step;
    step = -step;
  }
};

// Until no more are left than these: the rest have their turn beside a part's own steps.
template <typename T>
__device__ void run_leads(Remake<T>& remake, const Problem& p, const Place& at, int rest) {
#pragma unroll 1
  while (remake.left > rest) {
    remake.enter_lead(p, at);
#pragma unroll 2
    for (int i = 0; i < kUnit; ++i) remake.step_lead(i);
  }
}
template <bool kLead, typename T>
__device__ void remake_unit(Remake<T>& remake, uint4* slot, int step, int tile) {
#pragma unroll
  for (int i = 0; i < kUnit; ++i) {
    remake.step(i, slot);
    if constexpr (kLead) remake.step_lead(i);
    slot += step;
    if (i % kStride == kStride - 1) meet(1 + tile, 64);
  }
}

// The part behind the last has steps behind the chain's last only, the one before the first steps
// before its first: both warps do one part more than there is.
template <typename T>
__device__ void remake_chain(Slot* slots, const Problem& p, const Place& at, int tile, int parts) {
  const int row = tile * kTileRows;
  const LaneInputs<T> in(p, at, row);
  Remake<T> remake(p, at, in, row, parts);
  Walk walk(slots, parts);
  const int64_t unit = static_cast<int64_t>(kUnit) * p.heads * p.k_dim;
  T* dq = static_cast<T*>(p.dq_parts) + rows_place(p, at, row) + (parts - 1) * kPartUnits * unit;
  remake.begin_lead(p);
  run_leads(remake, p, at, 0);
  remake.end_lead();
  for (int part = parts - 1; part >= -1; --part) {
    remake.begin_lead(p);
    run_leads(remake, p, at, kPartUnits);
    uint4* slot = walk.to_write;
#pragma unroll 1
    for (int u = 0; u < kPartUnits; ++u) {
      remake.enter(p, at, u);
      if (remake.left > 0) {
        remake.enter_lead(p, at);
        remake_unit<true>(remake, slot, walk.step, tile);
      } else {
        remake_unit<false>(remake, slot, walk.step, tile);
      }
      slot += kUnit * walk.step;
      store_rows<T>(dq, remake.dq, has_step(part * kSteps + u * kUnit, at));
      dq += unit;
    }
    dq -= 2 * kPartUnits * unit;
    walk.turn();
    remake.end_lead();
  }
}

template <typename T, bool kClamp>
__device__ void undo_chain(FastBackwardShared& shared, const Problem& p, const Place& at, int tile,
                           int parts) {
  const int row = tile * kTileRows, lane = threadIdx.x % 32;
  const LaneInputs<T> in(p, at, row);
  const int64_t state = at.chain * state_size(p) + 4 * lane_t() +
                        (static_cast<int64_t>(at.head) * p.k_dim + at.row0 + row + lane_g()) *
                            kColumns;
  Undo<T, kClamp> undo(p, at, in, state, parts * kSteps + kUnit);
  SumsOut<T> out(p, at, parts * kSteps + kUnit, tile * 32 + lane);
  auto& own = shared.tiles[tile];
  Walk walk(own.slots, parts);
  const int64_t unit = static_cast<int64_t>(kUnit) * p.heads * p.k_dim;
  T* dk = static_cast<T*>(p.dk_parts) + rows_place(p, at, row) + (parts * kPartUnits + 1) * unit;
  for (int part = parts; part >= 0; --part) {
    const uint4* slot = walk.to_read();
#pragma unroll 1
    for (int u = 0; u < kPartUnits; ++u) {
      undo.enter(p, at);
#pragma unroll
      for (int i = kUnit; i > 0; i -= kStride) {
#pragma unroll
        for (int j = 1; j <= kStride; ++j) {
          own.unit[i - j][lane] = undo.step(i - j, slot);
          slot += walk.step;
        }
        meet(1 + tile, 64);
      }
      undo.leave();
      store_rows<T>(dk, undo.dk, has_step((part + 1) * kSteps - (u + 1) * kUnit, at));
      dk -= unit;
      put_sums(own, undo.dv);
      meet_undoers();
      out.write(shared.tiles[0], p, at);
      meet_undoers();
    }
    walk.turn();
  }
  undo.store(p.d_initial + state);
  write_weight_sum(shared.tiles, p, at, undo.dW, tile * 32 + lane);
}

template <typename T, bool kClamp>
__global__ void __launch_bounds__(kBackwardTiles * 64, 2)
fast_backward(const __grid_constant__ Problem p) {
  extern __shared__ __align__(16) char memory[];
  auto& shared = *reinterpret_cast<FastBackwardShared*>(memory);
  // A warp's number says which scheduler it is on. Blocks of four warps that are likely to share a
  // multiprocessor of an H100 or H200 put both kinds of warps on each scheduler.
  const int tiles = blockDim.x / 64, swapped = blockIdx.x / 132 % 2 * tiles;
  const int warp = threadIdx.x / 32 ^ swapped, tile = warp % tiles;
  const Place at(p, tiles * kTileRows);
  const int parts = Place::ceil_div(at.length, kSteps);
  auto* slots = reinterpret_cast<uint4*>(shared.tiles[0].slots);
  const int size = tiles * static_cast<int>(sizeof(BackwardTile) / sizeof(uint4));
  for (int i = threadIdx.x; i < size; i += blockDim.x) slots[i] = make_uint4(0, 0, 0, 0);
  __syncthreads();
  if (warp < tiles)
    undo_chain<T, kClamp>(shared, p, at, tile, parts);
  else
    remake_chain<T>(shared.tiles[tile].slots, p, at, tile, parts);
}

}  // namespace m2rnn
