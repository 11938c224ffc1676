// Backward for 16-bit inputs. A block has 32 rows of a chain, and for each tile of 16 two warps:
// one undoes the chain's parts of 16 steps, the last first, while the other makes the part before
// again from its checkpoint. They meet every kStride steps: of a part that is undone there is as
// much left to read as of the other one is written, so that both share kSlots slots, which are read
// from one end to the other, and the next time back. Where blocks would not load the
// multiprocessors evenly, a chain is cut into segments: a block goes on where another has ended.
#pragma once

#include "fast_sums.cuh"
#include "fast_undo.cuh"

namespace m2rnn {

constexpr int kPartsOfDW = 8;  // that are added up before they are added to dW

// Where a tile's warps are among its slots: `step` from one to the next. Of every second part,
// the first to undo among them, the slots lie in order.
struct Walk {
  static constexpr int kLast = kSlots - 1;
  int step;
  uint32_t to_write;  // the lane's, in shared memory

  __device__ Walk(const Slot* slots, int parts) {
    const auto first = static_cast<uint32_t>(__cvta_generic_to_shared(slots));
    const bool forwards = parts % 2;
    step = static_cast<int>(kept(forwards ? kSlotBytes : -kSlotBytes));
    to_write = first + (forwards ? 0 : kLast * kSlotBytes) + threadIdx.x % 32 * 16;
  }
  __device__ uint32_t to_read() const { return to_write + kStride * step; }
  // From the end of a part: the other way.
  __device__ void turn() {
    to_write += kLast * step;
    step = -step;
  }
};

// The compiler moves nothing from one side to the other of what might end the program, and so has
// fewer registers in use. step: never this small.
__device__ inline void cut(int step, int i) {
  if (step == i + 1) asm volatile("exit;");
}

// Until no more are left than these: the rest have their turn beside a part's own steps.
template <typename T>
__device__ void run_leads(Remake<T>& remake, const Problem& p, const Place& at, int rest) {
#pragma unroll 1
  while (remake.left > rest) {
    remake.enter_lead(p, at);
#pragma unroll 2
    for (int i = 0; i < kUnit; ++i) remake.step_lead(i, pair_mask(i));
  }
}
template <bool kLead, typename T>
__device__ void remake_unit(Remake<T>& remake, uint32_t slot, int step, int tile) {
#pragma unroll
  for (int i = 0; i < kUnit; ++i) {
    remake.step(i, slot);
    if constexpr (kLead) remake.step_lead(i, remake.masks.pair(i));
    slot += step;
    if (i % kStride == kStride - 1) meet(1 + tile, 64);
    if (i % 2 == 1) cut(step, i);
  }
}

// The part behind the last has steps behind the chain's last only, the one before the first steps
// before its first: both warps do one part more than there is.
template <typename T>
__device__ void remake_chain(Slot* slots, const Problem& p, const Place& at, int tile, int parts,
                             int first_part) {
  const int row = tile * kTileRows;
  const LaneInputs<T> in(p, at, row);
  Remake<T> remake(p, at, in, row, parts);
  Walk walk(slots, parts);
  const int64_t unit = static_cast<int64_t>(kUnit) * p.heads * p.k_dim;
  T* dq = static_cast<T*>(p.dq_parts) + rows_place(p, at, row) + (parts - 1) * kPartUnits * unit;
  remake.begin_lead(p);
  run_leads(remake, p, at, 0);
  remake.end_lead();
  for (int part = parts - 1; part >= first_part - 1; --part) {
    remake.begin_lead(p);
    run_leads(remake, p, at, kPartUnits);
    uint32_t slot = walk.to_write;
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
                           int parts, int first_part, bool is_last) {
  const int row = tile * kTileRows, lane = threadIdx.x % 32;
  const LaneInputs<T> in(p, at, row);
  const int64_t state = at.chain * state_size(p) + 4 * lane_t() +
                        (static_cast<int64_t>(at.head) * p.k_dim + at.row0 + row + lane_g()) *
                            kColumns;
  Undo<T, kClamp> undo(p, at, in, is_last ? p.d_final : p.d_initial, state,
                       parts * kSteps + kUnit);
  SumsOut<T> out(p, at, parts * kSteps + kUnit, tile * 32 + lane);
  auto& own = shared.tiles[tile];
  Walk walk(own.slots, parts);
  float2* own_decay = own.decay + lane_g();
  const int64_t unit = static_cast<int64_t>(kUnit) * p.heads * p.k_dim;
  T* dk = static_cast<T*>(p.dk_parts) + rows_place(p, at, row) + (parts * kPartUnits + 1) * unit;
  for (int part = parts; part >= first_part; --part) {
    uint32_t slot = walk.to_read();
#pragma unroll 1
    for (int u = 0; u < kPartUnits; ++u) {
      undo.enter(p, at, own_decay);
#pragma unroll
      for (int i = kUnit - 1; i >= 0; --i) {
        if (!kClamp && i == 0) undo.enter_dy();
        undo.step(i, slot, own.decay);
        slot += walk.step;
        if (i % kStride == 0) meet(1 + tile, 64);
      }
      store_rows<T>(dk, undo.dk, has_step((part + 1) * kSteps - (u + 1) * kUnit, at));
      dk -= unit;
      put_sums(own.sums[u], undo.dv, undo.df);
      meet_undoers();
      out.write(shared, at, p.dv_parts != nullptr, u);
    }
    if (part % kPartsOfDW == 0) undo.add_dW();
    walk.turn();
  }
  undo.add_dW();
  undo.store(p.d_initial + state);
  write_weight_sum(shared, p, at, undo.dW, tile * 32 + lane, is_last);
}

template <typename T, bool kClamp>
__global__ void __launch_bounds__(kBackwardThreads, 3)
fast_backward(const __grid_constant__ Problem p) {
  extern __shared__ __align__(16) char memory[];
  auto& shared = *reinterpret_cast<FastBackwardShared*>(memory);
  // A block's number is the order in which it begins: what it waits for has begun.
  const int blocks = p.chains * p.heads * p.groups;
  auto& ticket = *reinterpret_cast<int32_t*>(memory);
  if (threadIdx.x == 0) ticket = atomicAdd(p.undone + blocks, 1);
  __syncthreads();
  const int number = __reduce_max_sync(kAll, ticket), segment = number / blocks;
  const int block = number % blocks;
  __syncthreads();
  Place at(p, kTiles * kTileRows, block / p.groups, block % p.groups);
  const int chunk = p.stages * kSteps;
  const int tokens = Place::ceil_div(Place::ceil_div(at.length, p.segments), chunk) * chunk;
  const int segments = tokens > 0 ? Place::ceil_div(at.length, tokens) : 1;
  if (segment >= segments) return;
  at.first = (segments - 1 - segment) * tokens;
  if (segment > 0) {
    if (threadIdx.x == 0)
      while (load_now(p.undone + block) < segment) __nanosleep(100);
    at.length = at.first + tokens;
  }
  // A warp's number says which scheduler it is on. Blocks of four warps that are likely to share a
  // multiprocessor of an H100 or H200 put both kinds of warps on each scheduler.
  const int swapped = block / 132 % 2 * kTiles;
  const int warp = threadIdx.x / 32 ^ swapped, tile = warp % kTiles;
  const int parts = Place::ceil_div(at.length, kSteps);
  const int first_part = at.first / kSteps;
  auto* slots = reinterpret_cast<uint4*>(memory);
  for (int i = threadIdx.x; i < sizeof(FastBackwardShared) / sizeof(uint4); i += blockDim.x)
    slots[i] = make_uint4(0, 0, 0, 0);
  __syncthreads();
  if (warp < kTiles)
    undo_chain<T, kClamp>(shared, p, at, tile, parts, first_part, segment == 0);
  else
    remake_chain<T>(shared.tiles[tile].slots, p, at, tile, parts, first_part);
  if (segment + 1 == segments) return;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(p.undone + block, 1);
  }
}

}  // namespace m2rnn
