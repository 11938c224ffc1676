// A block of fwd.cuh: its warps, their shared memory, and the part of the chains it computes.
#pragma once

#include "common_16bit.cuh"

namespace m2rnn {

constexpr int kForwardWarps = 4, kWarpRows = 8;  // warps of a head
constexpr int kForwardRows = kForwardWarps * kWarpRows;
constexpr int kHelperThreads = 128;
template <int kHeads>
constexpr int kForwardThreads = kHeads * kForwardWarps * 32 + kHelperThreads;
constexpr int kGroupUnits = 4, kGroup = kGroupUnits * kUnit;

// Offsets of a step's rows, columns and y in a unit, in words. Free of bank conflicts for reading
// four neighbouring words of each of the eight steps (y: writing eight words of every second step),
// and for the helpers, which access all words of neighbouring steps.
__host__ __device__ constexpr int row_offset(int step) { return step / 2 * 36 + step % 2 * 16; }
__host__ __device__ constexpr int column_offset(int step) { return step / 4 * 36 + step % 4 * 8; }
__host__ __device__ constexpr int y_offset(int step) { return step / 2 * 40 + step % 2 * 16; }

// The inputs of a unit. A word has two neighbouring rows or columns.
template <int kHeads>
struct ForwardInputs {
  alignas(16) float2 decay[kHeads][kUnit];  // f, 1 - f
  uint32_t q[row_offset(kUnit)], k[row_offset(kUnit)], v[kHeads][column_offset(kUnit)];
};
template <int kHeads>
constexpr int kInputWords = sizeof(ForwardInputs<kHeads>) / 4;
// Partial y of a unit, summed over a warp's rows.
constexpr int kWarpY = y_offset(kUnit), kUnitY = kForwardWarps * kWarpY;
constexpr int kHeadY = 2 * (kGroupUnits + 1) * kUnitY;
using ForwardY = float[kForwardWarps][kWarpY];

// Double-buffered by groups of kGroup steps.
template <int kHeads>
struct ForwardShared {
  alignas(16) ForwardInputs<kHeads> in[2 * kGroupUnits + 1];  // the last is padding that is read
  alignas(16) ForwardY y[kHeads][2][kGroupUnits + 1];         // the first is a dummy
  float q_scale[4 * kGroup];  // power of two that q was divided by; steps of four groups
  int is_last[2];
};

// A block's part of a bundle of chains: kHeads neighbouring heads of one document. Where there are
// more bundles than slots, the bundles are laid end to end and cut into slots of equal length. A
// bundle that two slots share starts in the second slot, whose block has the lower number and so
// has started before, and ends in the first slot. Lengths are in granules.
template <int kHeads>
struct BundlePart : Place {
  int heads;  // kHeads, or fewer in a document's last bundle
  int from;   // the part's first step in the chains
  bool ends;  // whether the part ends where the chains do

  __device__ BundlePart(const Params& p, int row_block, int64_t position, int chain_length,
                        int own_length, int granule)
      : BundlePart(p, row_block, static_cast<int>(position / chain_length),
                   Place::ceil_div(p.heads, kHeads)) {
    const int offset = static_cast<int>(position % chain_length);
    from = (chain_length - offset - own_length) * granule;
    ends = offset == 0;
    if (own_length < chain_length) length = min(length - from, own_length * granule);
    start += from;
    first_chunk += from / (p.stages * kSteps);
  }
  // The last head where block_head is beyond it.
  __device__ int head_of(int block_head) const { return head + min(block_head, heads - 1); }

 private:
  __device__ BundlePart(const Params& p, int row_block, int bundle, int bundles)
      : Place(p, kForwardRows, bundle / bundles * p.heads + bundle % bundles * kHeads, row_block),
        heads(min(kHeads, p.heads - head)) {}
};

}  // namespace m2rnn
