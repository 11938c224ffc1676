// The helping warps of fast_forward.cuh: they read the inputs of a group ahead, and add up y of the
// one behind.
#pragma once

#include "fast_forward_block.cuh"

namespace m2rnn {

// bfloat16 has numbers that fp16 has not: a step's q is taken in multiples of a power of two, so
// that the largest of the block's rows is below 2^15. The 24 binary places after it are kept.
struct FittedQ {
  float times, unit;  // 1 / unit

  // eight: rows of a step that four neighbouring lanes have.
  __device__ explicit FittedQ(uint4 eight) {
    const uint32_t signs = 0x7fff7fff;
    const uint32_t x = __vmaxu2(eight.x & signs, eight.y & signs);
    const uint32_t y = __vmaxu2(x, __vmaxu2(eight.z & signs, eight.w & signs));
    uint32_t largest = max(y >> 16, y & 0xffff);
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2)
      largest = max(largest,
                    __float_as_uint(__shfl_xor_sync(kAll, __uint_as_float(largest), lanes)));
    const uint32_t exponent = max(largest >> 7, 15u);  // 141 is 2^14
    times = __uint_as_float((268 - exponent) << 23), unit = __uint_as_float((exponent - 14) << 23);
  }
  __device__ uint32_t fitted(uint32_t pair) const {
    const float2 x = unpacked<__nv_bfloat16>(pair);
    return pack<__half>(x.x * times, x.y * times);
  }
};

// A helper's part of a group's inputs: eight rows of one step, eight columns of one step of every
// second head, f of one step of one head. Steps behind the chain's last have f = 1 and zeros: they
// leave the state as it is. A head that is not there is the last one again.
template <typename T, int kHeads>
struct ForwardStage {
  using Inputs = ForwardInputs<kHeads>;
  static constexpr int kEights = kForwardRows / 8, kVCount = (kHeads + 1) / 2;
  static_assert(kHelpers == kGroup * kEights && kHelpers == 4 * kGroup && kHeads < 5);
  const T *q_at, *k_at, *v_at[kVCount];
  const float* f_at;
  int64_t q_group, k_group, v_group, f_group;
  Inputs* in;
  float* q_unit;
  int step, eight, v_head, v_step, v_half, f_head, f_step;
  int left;  // of the chain, from the next group on
  int group = 0;
  uint4 q, k, v[kVCount];
  float f;

  __device__ ForwardStage(FastForwardShared<kHeads>& shared, const Problem& p,
                          const Stretch<kHeads>& at, int thread)
      : in(shared.in), q_unit(shared.q_unit), step(thread / kEights), eight(thread % kEights),
        v_head(thread / 64), v_step(thread % 64 / 2), v_half(thread % 2),
        f_head(thread / kGroup), f_step(thread % kGroup), left(at.length) {
    const Source<T> of_q = q_of<T>(p, at), of_k = k_of<T>(p, at), of_v = v_of<T>(p, at);
    q_at = of_q.x + step * of_q.token + eight * 8;
    k_at = of_k.x + step * of_k.token + eight * 8;
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
      const FittedQ fit(q);
      q = make_uint4(fit.fitted(q.x), fit.fitted(q.y), fit.fitted(q.z), fit.fitted(q.w));
      if (eight == 0) q_unit[group % 4 * kGroup + step] = fit.unit;
      ++group;
    }
    Inputs* const to = in + buffer * kGroupUnits;
    *reinterpret_cast<uint4*>(to[step / kUnit].q + rows_at(step % kUnit) + eight * 4) = q;
    *reinterpret_cast<uint4*>(to[step / kUnit].k + rows_at(step % kUnit) + eight * 4) = k;
#pragma unroll
    for (int j = 0; j < kVCount; ++j)
      if (v_head + 2 * j < kHeads)
        *reinterpret_cast<uint4*>(to[v_step / kUnit].v[v_head + 2 * j] +
                                  columns_at(v_step % kUnit) + v_half * 4) = v[j];
    if (f_head < kHeads)
      to[f_step / kUnit].decay[f_head][f_step % kUnit] = make_float2(f, 1.f - f);
  }
};

__device__ inline void helpers_meet() {
  asm volatile("bar.sync %0, %1;" ::"r"(1), "r"(kHelpers) : "memory");
}

// Adds up the warps' parts of y, four columns of one step of every head a thread; of more blocks,
// the last that comes to a group adds up all.
//
// What another multiprocessor is asked takes as long as several steps do, so nobody waits for it: a
// group's parts are written, then it is said that they are there, and a group later, by then it is
// known whether they were the last, all are added up.
template <typename T, int kHeads>
struct ForwardSum {
  const float *from, *q_unit;  // from: the thread's in buffer 0
  T* to;                       // of the next group
  float* part;                 // of the first block, as `to`
  int step, heads, group_on;   // step: as `to`
  int64_t part_on;             // from block to block
  int32_t* count;
  int* is_last;
  int32_t arrived = -1;  // blocks that came to the group before the last before this one

  __device__ ForwardSum(FastForwardShared<kHeads>& shared, const Problem& p,
                        const Stretch<kHeads>& at, int thread)
      : from(shared.y[0][0][1 + thread / 32][0] + y_at(thread % 32 / 4) + thread % 4 * 4),
        q_unit(shared.q_unit), step(thread / 4), heads(at.heads),
        group_on(kGroup * p.heads * kColumns), is_last(shared.is_last) {
    const int64_t own = (at.token(p, step) * p.heads + at.head) * kColumns + thread % 4 * 4;
    part_on = static_cast<int64_t>(p.batch) * p.tokens * p.heads * kColumns;
    to = static_cast<T*>(p.y) + own, part = p.y_parts + own;
    const int64_t group = at.token(p, 0) / kGroup + 3 * at.chain + (at.from > 0);
    count = p.y_counts + group * p.heads + at.head;
  }
  __device__ static float4 plus(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
  }
  __device__ static void put(T* to, float4 sum) {
    *reinterpret_cast<uint2*>(to) = narrow(sum, static_cast<T*>(nullptr));
  }
  __device__ void store(const Stretch<kHeads>& at, int buffer) {
    float* const own_part = part + at.group * part_on;
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      const float* parts = from + buffer * (kHeadOfY / 2) + head * kHeadOfY;
      float4 sum = *reinterpret_cast<const float4*>(parts);
#pragma unroll
      for (int w = 1; w < kForwardWarps; ++w)
        sum = plus(sum, *reinterpret_cast<const float4*>(parts + w * kPartOfY));
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        const float q = q_unit[step & (4 * kGroup - 1)];
        sum = make_float4(sum.x * q, sum.y * q, sum.z * q, sum.w * q);
      }
      if (step >= at.length || head >= heads) continue;
      if (at.groups == 1)
        put(to + head * kColumns, sum);
      else
        *reinterpret_cast<float4*>(own_part + head * kColumns) = sum;
    }
    to += group_on, part += group_on, step += kGroup;
  }
  // One thread says that the last group's parts are there. Before: whether those of the group
  // before it were the last; of at.groups blocks.
  __device__ bool tell(const Stretch<kHeads>& at) {
    const bool last = arrived == at.groups - 1;
    __threadfence();
    arrived = atomicAdd(count, 1);
    return last;
  }
  // And adds up the parts of the group before if they were.
  __device__ void pass_on(const Problem& p, const Stretch<kHeads>& at, int thread) {
    if (thread == 0) is_last[0] = tell(at);
    helpers_meet();
    if (is_last[0]) add_up(at, 2);
    count += p.heads;
  }
  // The last two groups.
  __device__ void end(const Stretch<kHeads>& at, int thread) {
    helpers_meet();
    if (at.groups == 1) return;
    if (thread == 0) {
      is_last[0] = tell(at);
      is_last[1] = arrived == at.groups - 1;
      __threadfence();
    }
    helpers_meet();
    if (is_last[0]) add_up(at, 2);
    if (is_last[1]) add_up(at, 1);
  }
  // All blocks' parts of a group, so many before the next.
  __device__ void add_up(const Stretch<kHeads>& at, int back) {
    if (step - back * kGroup >= at.length) return;
    float4 whole[kHeads] = {};
    const float* own = part - back * group_on;
#pragma unroll 1
    for (int g = 0; g < at.groups; ++g, own += part_on)
#pragma unroll
      for (int head = 0; head < kHeads; ++head)
        if (head < heads)
          whole[head] = plus(whole[head],
                             __ldcg(reinterpret_cast<const float4*>(own + head * kColumns)));
#pragma unroll
    for (int head = 0; head < kHeads; ++head)
      if (head < heads) put(to - back * group_on + head * kColumns, whole[head]);
  }
};

template <typename T, int kHeads>
__device__ void forward_help(FastForwardShared<kHeads>& shared, const Problem& p,
                             const Stretch<kHeads>& at) {
  const int thread = threadIdx.x % kHelpers, groups = Place::ceil_div(at.length, kGroup);
  ForwardStage<T, kHeads> next(shared, p, at, thread);
  ForwardSum<T, kHeads> sum(shared, p, at, thread);
  next.load();
  next.store(0);
  next.load();
  __syncthreads();
  for (int group = 0; group < groups; ++group) {
    next.store(1 - group % 2);
    next.load();
    if (group > 0) sum.store(at, 1 - group % 2);
    __syncthreads();
    if (group > 0 && at.groups > 1) sum.pass_on(p, at, thread);
  }
  if (groups == 0) return;
  sum.store(at, 1 - groups % 2);
  sum.end(at, thread);
}

}  // namespace m2rnn
