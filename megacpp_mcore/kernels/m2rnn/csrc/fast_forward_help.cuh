// The two helping warps of fast_forward.cuh: they read the inputs of a group ahead, and add up y of
// the one behind.
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

// A helper's part of a group's inputs: eight rows and eight columns of some steps, f of one. Steps
// behind the chain's last have f = 1 and zeros: they leave the state as it is.
template <typename T>
struct ForwardStage {
  static constexpr int kEights = kForwardWarps * kStripRows / 8, kEvery = kHelpers / kEights;
  static constexpr int kCount = kGroup / kEvery, kVEvery = kHelpers / (kColumns / 8);
  static constexpr int kVCount = kGroup / kVEvery;
  static_assert(kEvery % kUnit == 0 && kVEvery % kUnit == 0 && kVCount > 0);
  const T *q_at, *k_at, *v_at;
  const float* f_at;
  int64_t q_every, k_every, v_every, f_group;
  ForwardInputs* in;
  float* q_unit;
  int step, eight, v_step, f_step, left;  // left: of the chain, from the next group on
  int group = 0;
  uint4 q[kCount], k[kCount], v[kVCount];
  float f;

  __device__ ForwardStage(FastForwardShared& shared, const Problem& p, const Stretch& at,
                          int thread)
      : in(shared.in), q_unit(shared.q_unit), step(thread / kEights), eight(thread % kEights),
        v_step(thread / 2), f_step(thread % kGroup), left(at.length) {
    const Source<T> of_q = q_of<T>(p, at), of_k = k_of<T>(p, at), of_v = v_of<T>(p, at);
    q_at = of_q.x + step * of_q.token + eight * 8;
    k_at = of_k.x + step * of_k.token + eight * 8;
    v_at = of_v.x + v_step * of_v.token + thread % 2 * 8;
    f_at = p.f + at.batch * p.f_batch + (at.start + f_step) * p.f_token + at.head * p.f_head;
    q_every = kEvery * of_q.token, k_every = kEvery * of_k.token, v_every = kVEvery * of_v.token;
    f_group = kGroup * p.f_token;
  }
  __device__ static uint4 read(const T* from, bool valid) {
    return valid ? __ldg(reinterpret_cast<const uint4*>(from)) : uint4{};
  }
  __device__ void load() {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const bool valid = step + j * kEvery < left;
      q[j] = read(q_at, valid), k[j] = read(k_at, valid);
      q_at += q_every, k_at += k_every;
    }
#pragma unroll
    for (int j = 0; j < kVCount; ++j) {
      v[j] = read(v_at, v_step + j * kVEvery < left);
      v_at += v_every;
    }
    f = f_step < left ? __ldg(f_at) : 1.f;
    f_at += f_group;
    left -= kGroup;
  }
  // buffer: 0 or 1.
  __device__ void store(int buffer, int thread) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const FittedQ fit(q[j]);
        q[j] = make_uint4(fit.fitted(q[j].x), fit.fitted(q[j].y), fit.fitted(q[j].z),
                          fit.fitted(q[j].w));
        if (eight == 0) q_unit[group % 4 * kGroup + step + j * kEvery] = fit.unit;
      }
      ++group;
    }
    ForwardInputs* const to = in + buffer * kGroupUnits;
    uint32_t* const rows = &to[step / kUnit].q[step % kUnit][eight * 4];
    uint32_t* const columns = &to[v_step / kUnit].v[v_step % kUnit][thread % 2 * 4];
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      uint32_t* const here = rows + j * (kEvery / kUnit) * kInputs;
      *reinterpret_cast<uint4*>(here) = q[j];
      *reinterpret_cast<uint4*>(here + kUnit * ForwardInputs::kRowPairs) = k[j];
    }
#pragma unroll
    for (int j = 0; j < kVCount; ++j)
      *reinterpret_cast<uint4*>(columns + j * (kVEvery / kUnit) * kInputs) = v[j];
    // With more helpers than steps some write the same.
    to[f_step / kUnit].decay[f_step % kUnit] = make_float2(f, 1.f - f);
  }
};

// Adds up the warps' parts of y, four columns of one step a thread; of more blocks, the last that
// comes to 32 steps adds up all. The first unit that is written in a group is the last of the group
// before: y is one step behind the state.
//
// What another multiprocessor is asked takes as long as several steps do, so nobody waits for it: a
// group's parts are written, a group later it is said that they are there, and again one later, by
// then it is known whether they were the last, all are added up.
template <typename T>
struct ForwardSum {
  static constexpr int kUnitsAtOnce = kHelpers / 32, kCount = kGroupUnits / kUnitsAtOnce;
  const float *from, *q_unit;  // from: the thread's in buffer 0
  int unit, step;              // step: the thread's first of the next group
  int64_t to, units_on, group_on;
  int32_t* count;
  int* last_of_block;
  int32_t arrived = -1;  // blocks that came to the group before the last before this one
  bool valid[kCount], before[kCount];  // whether the steps exist: last group's, and those before

  __device__ ForwardSum(FastForwardShared& shared, const Problem& p, const Stretch& at,
                        int thread)
      : q_unit(shared.q_unit), unit(thread / 32), last_of_block(&shared.is_last) {
    const int64_t token = static_cast<int64_t>(p.heads) * kColumns;
    const int in_unit = thread % 32 / 4;
    step = (unit - 1) * kUnit + in_unit;
    from = &shared.y[0][unit][0][in_unit][thread % 4 * 4];
    to = (at.token(p, step) * p.heads + at.head) * kColumns + thread % 4 * 4;
    units_on = kUnitsAtOnce * kUnit * token, group_on = kGroup * token;
    const int64_t group = at.token(p, 0) / kGroup + 3 * at.chain + (at.from > 0);
    count = p.y_counts + group * p.heads + at.head;
#pragma unroll
    for (int j = 0; j < kCount; ++j) valid[j] = before[j] = false;
  }
  __device__ static float4 plus(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
  }
  // first, end: units of the group that there are.
  __device__ void store(const Problem& p, const Stretch& at, int buffer, int first, int end) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const int u = unit + j * kUnitsAtOnce;
      const float* part = from + (buffer * kGroupUnits + j * kUnitsAtOnce) * kUnitOfY;
      float4 sum = *reinterpret_cast<const float4*>(part);
#pragma unroll
      for (int w = 1; w < kForwardWarps; ++w)
        sum = plus(sum, *reinterpret_cast<const float4*>(part + w * kPartOfY));
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        const float q = q_unit[(step + j * kUnitsAtOnce * kUnit) & (4 * kGroup - 1)];
        sum = make_float4(sum.x * q, sum.y * q, sum.z * q, sum.w * q);
      }
      valid[j] = u >= first && u < end && step + j * kUnitsAtOnce * kUnit < at.length;
      if (!valid[j]) continue;
      if (at.groups == 1)
        put(p, to + j * units_on, sum);
      else
        *reinterpret_cast<float4*>(p.y_parts + at.group * all_of_y(p) + to + j * units_on) = sum;
    }
  }
  // Says that the last group's parts are there, and adds up those of the group before if they were
  // the last. Then the next group is the last.
  __device__ void pass_on(const Problem& p, const Stretch& at, int thread) {
    if (at.groups > 1) {
      if (thread == 0) {
        *last_of_block = arrived == at.groups - 1;
        __threadfence();
        arrived = atomicAdd(count, 1);
      }
      helpers_meet();
      if (*last_of_block) add_up(p, at);
      count += p.heads;
    }
#pragma unroll
    for (int j = 0; j < kCount; ++j) before[j] = valid[j];
    to += group_on, step += kGroup;
  }
  // The last two groups. Nothing in shared memory is read any more then.
  __device__ void end(const Problem& p, const Stretch& at, int thread) {
    helpers_meet();
    if (at.groups == 1) return;
    pass_on(p, at, thread);
    helpers_meet();
    if (thread == 0) {
      *last_of_block = arrived == at.groups - 1;
      __threadfence();
    }
    helpers_meet();
    if (*last_of_block) add_up(p, at);
  }
  // All blocks' parts of the group before the last.
  __device__ void add_up(const Problem& p, const Stretch& at) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (!before[j]) continue;
      const int64_t here = to - group_on + j * units_on;
      float4 whole = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
      for (int g = 0; g < at.groups; ++g)
        whole = plus(whole, __ldcg(reinterpret_cast<const float4*>(p.y_parts + g * all_of_y(p) +
                                                                   here)));
      put(p, here, whole);
    }
  }
  __device__ static int64_t all_of_y(const Problem& p) {
    return static_cast<int64_t>(p.batch) * p.tokens * p.heads * kColumns;
  }
  __device__ static void put(const Problem& p, int64_t to, float4 sum) {
    *reinterpret_cast<uint2*>(static_cast<T*>(p.y) + to) = narrow(sum, static_cast<T*>(nullptr));
  }
  __device__ static void helpers_meet() {
    asm volatile("bar.sync %0, %1;" ::"r"(1), "r"(kHelpers) : "memory");
  }
};

template <typename T>
__device__ void forward_help(FastForwardShared& shared, const Problem& p, const Stretch& at) {
  const int thread = threadIdx.x - kForwardThreads, groups = Place::ceil_div(at.length, kGroup);
  ForwardStage<T> next(shared, p, at, thread);
  ForwardSum<T> sum(shared, p, at, thread);
  next.load();
  next.store(0, thread);
  next.load();
  __syncthreads();
  for (int group = 0; group <= groups; ++group) {
    if (group > 1) sum.pass_on(p, at, thread);
    if (group < groups) {
      next.store(1 - group % 2, thread);
      next.load();
    }
    if (group > 0) sum.store(p, at, 1 - group % 2, group == 1, kGroupUnits);
    __syncthreads();
  }
  if (groups == 0) return;
  sum.pass_on(p, at, thread);
  sum.store(p, at, groups % 2, 0, 1);
  sum.end(p, at, thread);
}

}  // namespace m2rnn
