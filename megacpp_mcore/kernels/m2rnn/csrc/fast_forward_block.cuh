// What a block of fast_forward.cuh is: its warps, what they share, and its part of a chain.
#pragma once

#include "fast.cuh"

namespace m2rnn {

constexpr int kForwardWarps = 4, kStripRows = 8;  // rows of a warp
constexpr int kForwardRows = kForwardWarps * kStripRows;
constexpr int kHelpers = 128;  // threads
template <int kHeads>
constexpr int kForwardThreads = kHeads * kForwardWarps * 32 + kHelpers;
constexpr int kGroupUnits = 4, kGroup = kGroupUnits * kUnit;

// Where a step's rows, columns and y are among a unit's. A bank is met once by four neighbouring
// words of each of the eight steps, as they are read (y is written: by eight of every second step),
// and by all words of steps that are neighbours, as the helpers have them.
__host__ __device__ constexpr int rows_at(int step) { return step / 2 * 36 + step % 2 * 16; }
__host__ __device__ constexpr int columns_at(int step) { return step / 4 * 36 + step % 4 * 8; }
__host__ __device__ constexpr int y_at(int step) { return step / 2 * 40 + step % 2 * 16; }

// A unit. Rows and columns in pairs.
template <int kHeads>
struct ForwardInputs {
  alignas(16) float2 decay[kHeads][kUnit];  // f, 1 - f
  uint32_t q[rows_at(kUnit)], k[rows_at(kUnit)], v[kHeads][columns_at(kUnit)];
};
template <int kHeads>
constexpr int kInputs = sizeof(ForwardInputs<kHeads>) / 4;
// Each warp's part of y of a unit.
constexpr int kPartOfY = y_at(kUnit), kUnitOfY = kForwardWarps * kPartOfY;
constexpr int kHeadOfY = 2 * (kGroupUnits + 1) * kUnitOfY;
using ForwardY = float[kForwardWarps][kPartOfY];

// Of two groups, even and odd ones.
template <int kHeads>
struct FastForwardShared {
  alignas(16) ForwardInputs<kHeads> in[2 * kGroupUnits + 1];  // the last is read, but empty
  alignas(16) ForwardY y[kHeads][2][kGroupUnits + 1];         // the first is not read
  float q_unit[4 * kGroup];  // what q is in multiples of, of the steps of four groups in turns
  int is_last[2];
};

// A block's part of a bundle of chains, which are neighbouring heads of one document. Where there
// are more bundles than slots, slots of one length are laid along all of them: a bundle that two
// slots share is begun at the start of the second one, whose block has the lower number, and ended
// at the end of the first. Lengths in granules.
template <int kHeads>
struct Stretch : Place {
  int heads;  // that there are: fewer in a document's last bundle
  int from;   // its first step in the chains
  bool ends;  // with the chains

  __device__ Stretch(const Problem& p, int64_t position, int chain_length, int own_length,
                     int granule)
      : Stretch(p, static_cast<int>(position / chain_length), Place::ceil_div(p.heads, kHeads)) {
    const int offset = static_cast<int>(position % chain_length);
    from = (chain_length - offset - own_length) * granule;
    ends = offset == 0;
    if (own_length < chain_length) length = min(length - from, own_length * granule);
    start += from;
    first_chunk += from / (p.stages * kSteps);
  }
  // The last one again where there is none.
  __device__ int head_of(int of_block) const { return head + min(of_block, heads - 1); }

 private:
  __device__ Stretch(const Problem& p, int bundle, int bundles)
      : Place(p, kForwardRows, bundle / bundles * p.heads + bundle % bundles * kHeads),
        heads(min(kHeads, p.heads - head)) {}
};

}  // namespace m2rnn
