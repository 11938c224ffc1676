// The helper warps of fwd.cuh: they load the inputs of the next group and sum y of the last one.
#pragma once

#include "fwd_block.cuh"

namespace m2rnn {

// bfloat16's range exceeds fp16's, so a step's q is divided by a power of two that brings the
// largest of the block's rows below 2^15 (and above 2^14): fp16 then keeps bits down to 2^-24.
struct ScaledQ {
  float factor, scale;  // factor = 1 / scale

  // octet: eight of the step's 32 rows; four neighbouring lanes have the step.
  __device__ explicit ScaledQ(uint4 octet) {
    const uint32_t signs = 0x7fff7fff;
    const uint32_t x = __vmaxu2(octet.x & signs, octet.y & signs);
    const uint32_t y = __vmaxu2(x, __vmaxu2(octet.z & signs, octet.w & signs));
    uint32_t largest = max(y >> 16, y & 0xffff);
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2)
      largest = max(largest,
                    __float_as_uint(__shfl_xor_sync(kFullMask, __uint_as_float(largest), lanes)));
    const uint32_t exponent = max(largest >> 7, 15u);  // 141 is 2^14
    factor = __uint_as_float((268 - exponent) << 23);
    scale = __uint_as_float((exponent - 14) << 23);
  }
  __device__ uint32_t scaled(uint32_t pair) const {
    const float2 x = unpacked<__nv_bfloat16>(pair);
    return pack<__half>(x.x * factor, x.y * factor);
  }
};

// A helper thread's part of a group's inputs: eight rows of one step, eight columns of one step of
// every second head, f of one step of one head. Steps after the chain's last are padded with f = 1
// and zeros, which leaves the state unchanged. A missing head of the bundle repeats the last one.
template <typename T, int kHeads>
struct InputPrefetch {
  using Inputs = ForwardInputs<kHeads>;
  static constexpr int kOctets = kForwardRows / 8, kVCount = (kHeads + 1) / 2;
  static_assert(kHelperThreads == kGroup * kOctets && kHelperThreads == 4 * kGroup && kHeads < 5);
  const T *q_at, *k_at, *v_at[kVCount];
  const float* f_at;
  int64_t q_group, k_group, v_group, f_group;
  Inputs* in;
  float* q_scale;
  int step, octet, v_head, v_step, v_half, f_head, f_step;
  int left;  // steps of the chain from the next group on
  int group = 0;
  uint4 q, k, v[kVCount];
  float f;

  __device__ InputPrefetch(ForwardShared<kHeads>& shared, const Params& p,
                           const BundlePart<kHeads>& at, int thread)
      : in(shared.in), q_scale(shared.q_scale), step(thread / kOctets), octet(thread % kOctets),
        v_head(thread / 64), v_step(thread % 64 / 2), v_half(thread % 2),
        f_head(thread / kGroup), f_step(thread % kGroup), left(at.length) {
    const Source<T> of_q = q_of<T>(p, at), of_k = k_of<T>(p, at), of_v = v_of<T>(p, at);
    q_at = of_q.x + step * of_q.token + octet * 8;
    k_at = of_k.x + step * of_k.token + octet * 8;
#pragma unroll
    for (int j = 0; j < kVCount; ++j)
      v_at[j] = of_v.x + v_step * of_v.token + min(v_head + 2 * j, at.heads - 1) * p.v_head +
                v_half * 8;
    f_at = p.f + at.batch * p.f_batch + (at.start + f_step) * p.f_token +
           (at.head + min(f_head, at.heads - 1)) * p.f_head;
    q_group = kGroup * of_q.token, k_group = kGroup * of_k.token, v_group = kGroup * of_v.token;
    f_group = kGroup * p.f_token;
  }
  __device__ static uint4 read(const T* from, bool valid) {
    return valid ? __ldg(reinterpret_cast<const uint4*>(from)) : uint4{};
  }
  __device__ void load() {
    q = read(q_at, step < left), k = read(k_at, step < left);
#pragma unroll
    for (int j = 0; j < kVCount; ++j) {
      if (v_head + 2 * j < kHeads) v[j] = read(v_at[j], v_step < left);
      v_at[j] += v_group;
    }
    if (f_head < kHeads) f = f_step < left ? __ldg(f_at) : 1.f;
    q_at += q_group, k_at += k_group, f_at += f_group;
    left -= kGroup;
  }
  // buffer: 0 or 1.
  __device__ void store(int buffer) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      const ScaledQ fit(q);
      q = make_uint4(fit.scaled(q.x), fit.scaled(q.y), fit.scaled(q.z), fit.scaled(q.w));
      if (octet == 0) q_scale[group % 4 * kGroup + step] = fit.scale;
      ++group;
    }
    Inputs* const to = in + buffer * kGroupUnits;
    *reinterpret_cast<uint4*>(to[step / kUnit].q + row_offset(step % kUnit) + octet * 4) = q;
    *reinterpret_cast<uint4*>(to[step / kUnit].k + row_offset(step % kUnit) + octet * 4) = k;
#pragma unroll
    for (int j = 0; j < kVCount; ++j)
      if (v_head + 2 * j < kHeads)
        *reinterpret_cast<uint4*>(to[v_step / kUnit].v[v_head + 2 * j] +
                                  column_offset(v_step % kUnit) + v_half * 4) = v[j];
    if (f_head < kHeads)
      to[f_step / kUnit].decay[f_head][f_step % kUnit] = make_float2(f, 1.f - f);
  }
};

__device__ inline void helpers_sync() {
  asm volatile("bar.sync %0, %1;" ::"r"(1), "r"(kHelperThreads) : "memory");
}

// Sums y over the warps; a thread has four columns of one step of every head. With several row
// blocks, the block that finishes a group last sums the parts of all of them.
//
// An atomic takes as long as several steps, so nobody waits for one: a block writes a group's part,
// increments the group's counter, and looks at the result one group later.
template <typename T, int kHeads>
struct OutputSum {
  const float *from, *q_scale;  // from: the thread's first value in buffer 0
  T* to;                        // the thread's outputs of the next group
  float* part;                  // as `to`, in the first row block's part
  int step, heads, group_stride;  // step: as `to`
  int64_t part_stride;            // between row blocks' parts
  int32_t* count;
  int* is_last;
  int32_t arrived = -1;  // how many blocks finished the last counted group before this one

  __device__ OutputSum(ForwardShared<kHeads>& shared, const Params& p,
                       const BundlePart<kHeads>& at, int thread)
      : from(shared.y[0][0][1 + thread / 32][0] + y_offset(thread % 32 / 4) + thread % 4 * 4),
        q_scale(shared.q_scale), step(thread / 4), heads(at.heads),
        group_stride(kGroup * p.heads * kColumns), is_last(shared.is_last) {
    const int64_t own = (at.token(p, step) * p.heads + at.head) * kColumns + thread % 4 * 4;
    part_stride = static_cast<int64_t>(p.batch) * p.tokens * p.heads * kColumns;
    to = static_cast<T*>(p.y) + own, part = p.y_parts + own;
    const int64_t group = at.token(p, 0) / kGroup + 3 * at.chain + (at.from > 0);
    count = p.y_counts + group * p.heads + at.head;
  }
  __device__ static float4 add(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
  }
  __device__ static void store4_as(T* to, float4 sum) {
    *reinterpret_cast<uint2*>(to) = narrow(sum, static_cast<T*>(nullptr));
  }
  __device__ void store(const BundlePart<kHeads>& at, int buffer) {
    float* const own_part = part + at.row_block * part_stride;
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      const float* parts = from + buffer * (kHeadY / 2) + head * kHeadY;
      float4 sum = *reinterpret_cast<const float4*>(parts);
#pragma unroll
      for (int w = 1; w < kForwardWarps; ++w)
        sum = add(sum, *reinterpret_cast<const float4*>(parts + w * kWarpY));
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        const float q = q_scale[step & (4 * kGroup - 1)];
        sum = make_float4(sum.x * q, sum.y * q, sum.z * q, sum.w * q);
      }
      if (step >= at.length || head >= heads) continue;
      if (at.row_blocks == 1)
        store4_as(to + head * kColumns, sum);
      else
        *reinterpret_cast<float4*>(own_part + head * kColumns) = sum;
    }
    to += group_stride, part += group_stride, step += kGroup;
  }
  // Called by one thread: counts the group just written, and returns whether this block was the
  // last of at.row_blocks to finish the group before it.
  __device__ bool arrive(const BundlePart<kHeads>& at) {
    const bool last = arrived == at.row_blocks - 1;
    __threadfence();
    arrived = atomicAdd(count, 1);
    return last;
  }
  // Counts the group just written; sums the group before it if this block was its last.
  __device__ void sum_if_last(const Params& p, const BundlePart<kHeads>& at, int thread) {
    if (thread == 0) is_last[0] = arrive(at);
    helpers_sync();
    if (is_last[0]) sum_blocks(at, 2);
    count += p.heads;
  }
  // Sums the last two groups where this block was their last.
  __device__ void finish(const BundlePart<kHeads>& at, int thread) {
    helpers_sync();
    if (at.row_blocks == 1) return;
    if (thread == 0) {
      is_last[0] = arrive(at);
      is_last[1] = arrived == at.row_blocks - 1;
      __threadfence();
    }
    helpers_sync();
    if (is_last[0]) sum_blocks(at, 2);
    if (is_last[1]) sum_blocks(at, 1);
  }
  // Sums all row blocks' parts of the group that is `back` groups before the next one.
  __device__ void sum_blocks(const BundlePart<kHeads>& at, int back) {
    if (step - back * kGroup >= at.length) return;
    float4 whole[kHeads] = {};
    const float* own = part - back * group_stride;
#pragma unroll 1
    for (int g = 0; g < at.row_blocks; ++g, own += part_stride)
#pragma unroll
      for (int head = 0; head < kHeads; ++head)
        if (head < heads)
          whole[head] = add(whole[head],
                            __ldcg(reinterpret_cast<const float4*>(own + head * kColumns)));
#pragma unroll
    for (int head = 0; head < kHeads; ++head)
      if (head < heads) store4_as(to - back * group_stride + head * kColumns, whole[head]);
  }
};

template <typename T, int kHeads>
__device__ void forward_helpers(ForwardShared<kHeads>& shared, const Params& p,
                                const BundlePart<kHeads>& at) {
  const int thread = threadIdx.x % kHelperThreads, groups = Place::ceil_div(at.length, kGroup);
  InputPrefetch<T, kHeads> next(shared, p, at, thread);
  OutputSum<T, kHeads> sum(shared, p, at, thread);
  next.load();
  next.store(0);
  next.load();
  __syncthreads();
  for (int group = 0; group < groups; ++group) {
    next.store(1 - group % 2);
    next.load();
    if (group > 0) sum.store(at, 1 - group % 2);
    __syncthreads();
    if (group > 0 && at.row_blocks > 1) sum.sum_if_last(p, at, thread);
  }
  if (groups == 0) return;
  sum.store(at, 1 - groups % 2);
  sum.finish(at, thread);
}

}  // namespace m2rnn
