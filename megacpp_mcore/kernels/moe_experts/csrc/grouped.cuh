// The grouped products of the experts on Hopper, bf16 with sums in float32.
//
// A cluster of two blocks computes two tiles of 128 rows and kTileN columns, one above the other.
// Each block loads its own rows of A, and half of the columns of B, which the copy engine writes
// to both. One thread loads, or a warpgroup where rows of A are gathered; two warpgroups multiply, 64
// rows each, and leave their tile to the copy engine, which stores it while they multiply the next.
// Tiles are taken in a fixed order.

#pragma once
#include "load.cuh"
#include "store.cuh"
#include "wgmma.cuh"

namespace grouped {

template <int kKind, int kTileN, int kForm>
__device__ void multiply(Shared& shared, const Problem& p, const CUtensorMap* map_c, int group) {
  constexpr int kTransposedA = kOfWeights<kKind>, kTransposedB = kKind != kForward;
  constexpr int kStepA = kTransposedA ? 2048 >> 4 : 32 >> 4;
  constexpr int kStepB = kTransposedB ? 2048 >> 4 : 32 >> 4;
  const uint32_t rank = cluster_rank();
  const int thread = threadIdx.x % 128;
  const uint32_t staged = address(shared.staged[group]);
  Tiles<kKind, kTileN> tiles(p, shared.ends);
  float sums[kTileN / 2];
  Ring ring{0};
  bool more = tiles.next();
  while (more) {
    const int steps = tiles.steps(p.k);
    const int row = tiles.row + static_cast<int>(rank) * kTileM + group * 64;
    if (!kOfWeights<kKind> && row >= tiles.end) {  // nothing to multiply for this warpgroup
      for (int step = 0; step < steps; ++step, ring.advance()) {
        barrier_wait(address(&shared.full[ring.stage]), ring.phase);
        if (thread < kBlocks) barrier_arrive(address(&shared.empty[ring.stage]), thread);
      }
      more = tiles.next();
      continue;
    }
    int used = 0;  // the stage that the products before the last ones read
    if (steps == 0) {
#pragma unroll
      for (int i = 0; i < kTileN / 2; ++i) sums[i] = 0.f;
    }
    for (int step = 0; step < steps; ++step, ring.advance()) {
      barrier_wait(address(&shared.full[ring.stage]), ring.phase);
      if constexpr (kForm != kSorted) proxy_fence();
      const uint32_t from = address(shared.a[ring.stage]) + group * kGroup;
      const uint64_t a = operand<kGroup>(from);
      const uint64_t b = operand<kGroup>(address(shared.b[ring.stage]));
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kTileK / 16; ++i) {
        Wgmma<kTileN, kTransposedA, kTransposedB>::run(sums, a + i * kStepA, b + i * kStepB,
                                                       step > 0 || i > 0);
      }
      wgmma_commit();
      if (step > 0) {
        wgmma_wait<1>();
        if (thread < kBlocks) barrier_arrive(address(&shared.empty[used]), thread);
      }
      used = ring.stage;
    }
    const Tile done = tiles;
    more = tiles.next();  // while the last products run
    wgmma_wait<0>();
    if (steps > 0 && thread < kBlocks) barrier_arrive(address(&shared.empty[used]), thread);
    const bool inside = kOfWeights<kKind> ? row < p.m : row < done.end;
    const bool stored = inside && !(kAdded<kKind> && steps == 0);
    store<kKind, kTileN, kForm>(sums, staged, group, map_c, done, row, stored);
  }
  if (thread < kBlocks) store_wait();
}

// Registers of a thread that loads, and of one that multiplies. Once these and twice those are at most
// the three times 168 that a block starts with; a block that wants more hangs.
template <int kForm>
constexpr int kLoadRegisters = kForm == kSorted ? 40 : 56;
template <int kForm>
constexpr int kMultiplyRegisters = kForm == kSorted ? 232 : 224;

template <int kKind, int kTileN, int kForm>
__global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(kThreads, 1)
    product(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
            const __grid_constant__ CUtensorMap map_c, const Problem p) {
  static_assert(kOfWeights<kKind> ? kForm != kSorted : kForm != kTransposed);
  static_assert(kLoadRegisters<kForm> + 2 * kMultiplyRegisters<kForm> <= 3 * 168);
  extern __shared__ uint8_t raw[];
  auto& shared = *reinterpret_cast<Shared*>(
      (reinterpret_cast<uintptr_t>(raw) + 1023) & ~static_cast<uintptr_t>(1023));
  for (int e = threadIdx.x; e < p.experts; e += kThreads) shared.ends[e] = p.ends[e];
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(address(&shared.full[stage]), kForm == kSorted ? 1 : 1 + 128);  // who loads
      barrier_init(address(&shared.empty[stage]), 2 * kBlocks);  // warpgroups of both blocks
    }
    barrier_fence();
  }
  __syncthreads();
  cluster_sync();
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == 0) {
    fewer_registers<kLoadRegisters<kForm>>();
    if constexpr (kOfWeights<kKind>) {
      load_gathered_steps<kKind, kTileN>(shared, p, &map_b);
    } else if constexpr (kForm == kGathered) {
      load_gathered<kKind, kTileN>(shared, p, &map_b);
    } else if (threadIdx.x == 0) {
      load<kKind, kTileN>(shared, p, &map_a, &map_b);
    }
    __syncwarp();
  } else {
    more_registers<kMultiplyRegisters<kForm>>();
    multiply<kKind, kTileN, kForm>(shared, p, &map_c, warpgroup - 1);
  }
  cluster_sync();  // the other block may still write here, and arrive at these barriers
}

}  // namespace grouped
