// What a block of fast_forward.cuh is: its warps, what they share, and its part of a chain.
#pragma once

#include "fast.cuh"

namespace m2rnn {

constexpr int kForwardWarps = 4, kStripRows = 8;  // rows of a warp
constexpr int kForwardThreads = kForwardWarps * 32, kHelpers = 64;
constexpr int kGroupUnits = 4, kGroup = kGroupUnits * kUnit;

// A unit. Rows and columns in pairs, padded so that eight steps of four pairs meet every bank once.
struct ForwardInputs {
  static constexpr int kRowPairs = kForwardWarps * kStripRows / 2 + 4;
  static constexpr int kColumnPairs = kColumns / 2 + 4;
  alignas(16) float2 decay[kUnit];  // f, 1 - f
  uint32_t q[kUnit][kRowPairs], k[kUnit][kRowPairs], v[kUnit][kColumnPairs];
};
constexpr int kInputs = sizeof(ForwardInputs) / 4;
// Each warp's part of y of a unit, [step][column].
using ForwardY = float[kForwardWarps][kUnit][kColumns + 4];
constexpr int kPartOfY = kUnit * (kColumns + 4), kUnitOfY = kForwardWarps * kPartOfY;

// Of two groups, even and odd ones.
struct FastForwardShared {
  alignas(16) ForwardInputs in[2 * kGroupUnits + 1];  // the last is read, but nothing is in it
  alignas(16) ForwardY y[2][kGroupUnits];
  float q_unit[4 * kGroup];  // what q is in multiples of, of the steps of four groups in turns
  int is_last;
};

// A block's part of a chain. Where there are more chains than slots, slots of one length are laid
// along all the chains: a chain that two slots share is begun at the start of the second one, whose
// block has the lower number, and ended at the end of the first. Lengths in granules.
struct Stretch : Place {
  int job, from;  // from: its first step in the chain
  bool ends;      // with the chain

  __device__ Stretch(const Problem& p, int64_t position, int chain_length, int own_length,
                     int granule)
      : Place(p, kForwardWarps * kStripRows, static_cast<int>(position / chain_length)),
        job(static_cast<int>(position / chain_length)) {
    const int offset = static_cast<int>(position % chain_length);
    from = (chain_length - offset - own_length) * granule;
    ends = offset == 0;
    if (own_length < chain_length) length = min(length - from, own_length * granule);
    start += from;
    first_chunk += from / (p.stages * kSteps);
  }
};

}  // namespace m2rnn
