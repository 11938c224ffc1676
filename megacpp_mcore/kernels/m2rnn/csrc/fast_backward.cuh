// Backward for 16-bit inputs. A block has 32 rows of a chain, and for each tile of 16 two warps:
// one undoes the chain's chunks, the last first, while the other makes the chunk before again from
// its checkpoint. Of a chunk that is undone there is as much left to read as of the other one is
// written, so that both share the slots of one chunk and kStride more, which are read from one end
// to the other, and the next time back; every kStride steps it is seen to that nothing is written
// over before it has been read. Where blocks would not load the multiprocessors evenly, a chain is
// cut into segments: a block goes on where another has ended.
#pragma once

#include "fast_sums.cuh"

namespace m2rnn {

// Where a tile's warps are among its slots: `step` from one to the next.
struct Walk {
  int step, last;
  uint32_t to_write;  // the lane's, in shared memory

  __device__ Walk(const Slot* slots, int chunk) : last(chunk + kStride - 1) {
    step = static_cast<int>(kept(kSlotBytes));
    to_write = static_cast<uint32_t>(__cvta_generic_to_shared(slots)) + threadIdx.x % 32 * 16;
  }
  __device__ uint32_t to_read() const { return to_write + kStride * step; }
  // From the end of a chunk: the other way.
  __device__ void turn() {
    to_write += last * step;
    step = -step;
  }
};

// At the end of a unit's stride, 0 or 1; each of two units has barriers of its own. The warp that
// undoes waits for the other one only after the second unit; but always where these are a chunk,
// for before its end it reads what the other one leaves at its beginning.
template <bool kUndoes>
__device__ void end_stride(int tile, int units, int unit, int stride) {
  const int number = 1 + tile * kMeetings + unit % 2u * 2 + stride;
  if (kUndoes && units > 2 && (stride == 0 || unit % 2u == 0))
    pass(number, 64);
  else
    meet(number, 64);
}
// While the tile's other warp does these of a chunk's units alone.
template <bool kUndoes>
__device__ void skip_units(int tile, int units, int from, int to) {
#pragma unroll 1
  for (int unit = from; unit < to; ++unit) {
    end_stride<kUndoes>(tile, units, unit, 0);
    end_stride<kUndoes>(tile, units, unit, 1);
  }
}

template <typename T>
__device__ void remake_chain(BackwardTile& own, const Problem& p, const Place& at, int tile,
                             int chunks, int first_chunk) {
  const int row = tile * kTileRows;
  const LaneInputs<T> in(p, at, row);
  Remake<T> remake(p, at, in, row, chunks - 1);
  const int units = remake.units;
  Walk walk(own.slots, units * kUnit);
  const int64_t unit = static_cast<int64_t>(kUnit) * p.heads * p.k_dim;
  T* dq = static_cast<T*>(p.dq_parts) + rows_place(p, at, row) + (chunks - 1) * units * unit;
  for (int chunk = chunks - 1; chunk >= first_chunk; --chunk) {
    remake.enter_chunk(p, &own.reserve);
    uint32_t slot = walk.to_write;
#pragma unroll 1
    for (int u = 0; u < units; ++u) {
      remake.enter(p, at, u);
#pragma unroll
      for (int i = 0; i < kUnit; ++i) {
        remake.step(i, slot);
        slot += walk.step;
        if (i % kStride == kStride - 1) end_stride<false>(tile, units, u, i / kStride);
      }
      remake.end_unit();
      store_steps(dq, remake.dq, has_step((chunk * units + u) * kUnit, at));
      dq += unit;
    }
    dq -= 2 * units * unit;
    walk.turn();
  }
  skip_units<false>(tile, units, 0, units);
}

template <typename T, bool kClamp>
__device__ void undo_chain(FastBackwardShared& shared, const Problem& p, const Place& at, int tile,
                           int chunks, int first_chunk, bool is_last) {
  const int row = tile * kTileRows, lane = threadIdx.x % 32, units = p.stages * kSteps / kUnit;
  const LaneInputs<T> in(p, at, row);
  const int64_t state = at.chain * state_size(p) + 4 * lane_t() +
                        (static_cast<int64_t>(at.head) * p.k_dim + at.row0 + row +
                         row_of(0, lane_g())) * kColumns;
  int t = (chunks * units - 1) * kUnit;
  Undo<T, kClamp> undo(p, at, in, is_last ? p.d_final : p.d_initial, state, t);
  SumsOut<T> out(p, at, t, row);
  auto& own = shared.tiles[tile];
  Walk walk(own.slots, units * kUnit);
  // The other warp leaves it at a chunk's beginning, and the next after its end.
  skip_units<true>(tile, units, 0, units - 1);
  int reserve = own.reserve;
  skip_units<true>(tile, units, units - 1, units);
  walk.turn();
  undo.prepare(own.decay[0] + lane_g(), reserve);
  for (int chunk = chunks - 1; chunk >= first_chunk; --chunk) {
    uint32_t slot = walk.to_read();
#pragma unroll 1
    for (int u = 0; u < units; ++u) {
      undo.enter(p, at);
      if (u + 1 == units) reserve = own.reserve;  // of the chunk before
#pragma unroll
      for (int i = kUnit - 1; i >= 0; --i) {
        if (i == 1) undo.prepare(own.decay[(u + 1) % 2u] + lane_g(), reserve);
        undo.step(i, slot, own.decay[u % 2u]);
        slot += walk.step;
        if (i % kStride == 0) end_stride<true>(tile, units, u, 1 - i / kStride);
      }
      const float scale = undo.end_unit();
      out.store(at, t, undo.dk, undo.dv, undo.df, scale);
      t -= kUnit;
    }
    walk.turn();
  }
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
  __syncthreads();
  const int chunks = Place::ceil_div(at.length, chunk), first_chunk = at.first / chunk;
  if (warp < kTiles)
    undo_chain<T, kClamp>(shared, p, at, tile, chunks, first_chunk, segment == 0);
  else
    remake_chain<T>(shared.tiles[tile], p, at, tile, chunks, first_chunk);
  if (segment + 1 == segments) return;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(p.undone + block, 1);
  }
}

}  // namespace m2rnn
