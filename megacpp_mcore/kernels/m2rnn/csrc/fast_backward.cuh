// Backward for 16-bit inputs: a block has 32 rows of a chain, and its warps are at four places of
// it at once, a unit of eight steps each between two barriers. For every tile of 16 rows:
//   replay  runs the chunk before from its checkpoint and leaves the state before each unit,
//   remake  runs a unit of this chunk, the last first, and leaves the state before each step and
//           what tanh returned,
//   undo    carries the gradient of the state back over the unit behind it,
//   sums    makes of the unit behind that one the gradients that are sums: q, k, v and W.
// They wait for each other at the barriers only: what bounds the time is the longest of the four
// or, with more than one block on a multiprocessor, what they issue together.
#pragma once

#include "fast_replay.cuh"
#include "fast_sums.cuh"
#include "fast_undo.cuh"

namespace m2rnn {

template <typename T, bool kClamp>
__global__ void __launch_bounds__(kBackwardThreads, 3)
fast_backward(const __grid_constant__ Problem p) {
  extern __shared__ __align__(16) char memory[];
  auto& shared = *reinterpret_cast<FastBackwardShared*>(memory);
  const Place at(p, kBlockRows);
  // A warp's number says which scheduler it is on. Blocks that are likely to share a multiprocessor
  // of an H100 or H200 put different roles on it.
  const int warp = threadIdx.x / 32 ^ blockIdx.x / 132 % 2 * 2, tile = warp % kBlockTiles;
  switch (warp / kBlockTiles) {
    case 0: replay<T>(shared, p, at, tile); break;
    case 1: remake<T>(shared, p, at, tile); break;
    case 2: undo<T, kClamp>(shared, p, at, tile); break;
    default: return sums<T>(shared, p, at, tile);
  }
  __syncthreads();  // the one in `sums`
}

}  // namespace m2rnn
