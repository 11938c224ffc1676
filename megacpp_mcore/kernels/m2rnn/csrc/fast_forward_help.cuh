// The two helping warps of fast_forward.cuh: they read the inputs of a group ahead, and add up y of
// the one behind.
#pragma once

#include "fast_forward_block.cuh"

namespace m2rnn {

// A helper's part of a group's inputs: four rows and four columns of some steps, f of one. Steps
// behind the chain's last have f = 1 and zeros: they leave the state as it is.
template <typename T>
struct ForwardStage {
  static constexpr int kQuads = kForwardWarps * kStripRows / 4, kEvery = kHelpers / kQuads;
  static constexpr int kCount = kGroup / kEvery, kVEvery = kHelpers / (kColumns / 4);
  static constexpr int kVCount = kGroup / kVEvery;
  static_assert(kUnit % kEvery == 0 && kVEvery % kUnit == 0);
  const T *q_at, *k_at, *v_at;
  const float* f_at;
  int64_t q_every, k_every, v_every, f_group;
  ForwardInputs* in;
  int step, quad, v_step, f_step, left;  // left: of the chain, from the next group on
  uint2 q[kCount], k[kCount], v[kVCount];
  float f;

  __device__ ForwardStage(FastForwardShared& shared, const Problem& p, const Stretch& at,
                          int thread)
      : in(shared.in), step(thread / kQuads), quad(thread % kQuads), v_step(thread / 4),
        f_step(thread % kGroup), left(at.length) {
    const Source<T> of_q = q_of<T>(p, at), of_k = k_of<T>(p, at), of_v = v_of<T>(p, at);
    q_at = of_q.x + step * of_q.token + quad * 4;
    k_at = of_k.x + step * of_k.token + quad * 4;
    v_at = of_v.x + v_step * of_v.token + thread % 4 * 4;
    f_at = p.f + at.batch * p.f_batch + (at.start + f_step) * p.f_token + at.head * p.f_head;
    q_every = kEvery * of_q.token, k_every = kEvery * of_k.token, v_every = kVEvery * of_v.token;
    f_group = kGroup * p.f_token;
  }
  __device__ void load() {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const bool valid = step + j * kEvery < left;
      q[j] = load_unit(q_at, valid), k[j] = load_unit(k_at, valid);
      q_at += q_every, k_at += k_every;
    }
#pragma unroll
    for (int j = 0; j < kVCount; ++j) {
      v[j] = load_unit(v_at, v_step + j * kVEvery < left);
      v_at += v_every;
    }
    f = f_step < left ? __ldg(f_at) : 1.f;
    f_at += f_group;
    left -= kGroup;
  }
  // buffer: 0 or 1.
  __device__ void store(int buffer, int thread) const {
    ForwardInputs* const to = in + buffer * kGroupUnits;
    uint32_t* const rows = &to->q[step][quad * 2];
    uint32_t* const columns = &to[v_step / kUnit].v[v_step % kUnit][thread % 4 * 2];
    constexpr int kRow = ForwardInputs::kRowPairs;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      uint32_t* const here = rows + j * kEvery / kUnit * kInputs + j * kEvery % kUnit * kRow;
      *reinterpret_cast<uint2*>(here) = q[j];
      *reinterpret_cast<uint2*>(here + kUnit * kRow) = k[j];
    }
#pragma unroll
    for (int j = 0; j < kVCount; ++j)
      *reinterpret_cast<uint2*>(columns + j * (kVEvery / kUnit) * kInputs) = v[j];
    // Two threads write the same.
    to[f_step / kUnit].decay[f_step % kUnit] = make_float2(f, 1.f - f);
  }
};

// Adds up the warps' parts of y, four columns of one step a thread; of more blocks, the last that
// comes to 32 steps adds up all. The first unit that is written in a group is the last of the group
// before: y is one step behind the state.
template <typename T>
struct ForwardSum {
  static constexpr int kUnitsAtOnce = kHelpers / 32, kCount = kGroupUnits / kUnitsAtOnce;
  const float* from;   // the thread's in buffer 0
  int unit, left;      // left: of the chain, from the thread's step of the next group on
  int64_t to, units_on, group_on;
  int32_t* count;
  int* last_of_block;

  __device__ ForwardSum(FastForwardShared& shared, const Problem& p, const Stretch& at,
                        int thread)
      : unit(thread / 32), last_of_block(&shared.is_last) {
    const int64_t token = static_cast<int64_t>(p.heads) * kColumns;
    const int in_unit = thread % 32 / 4, step = (unit - 1) * kUnit + in_unit;
    from = &shared.y[0][unit][0][in_unit][thread % 4 * 4];
    left = at.length - step;
    to = (at.token(p, step) * p.heads + at.head) * kColumns + thread % 4 * 4;
    units_on = kUnitsAtOnce * kUnit * token, group_on = kGroup * token;
    const int64_t group = at.token(p, 0) / kGroup + 3 * at.chain + (at.from > 0);
    count = p.y_counts + group * p.heads + at.head;
  }
  __device__ static float4 plus(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
  }
  // first, end: units of the group that there are.
  __device__ void store(const Problem& p, const Stretch& at, int thread, int buffer, int first,
                        int end) {
    float4 sum[kCount];
    bool valid[kCount];
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const int u = unit + j * kUnitsAtOnce;
      const float* part = from + (buffer * kGroupUnits + j * kUnitsAtOnce) * kUnitOfY;
      sum[j] = *reinterpret_cast<const float4*>(part);
#pragma unroll
      for (int w = 1; w < kForwardWarps; ++w)
        sum[j] = plus(sum[j], *reinterpret_cast<const float4*>(part + w * kPartOfY));
      valid[j] = u >= first && u < end && left > j * kUnitsAtOnce * kUnit;
    }
    if (at.groups == 1) {
      put(p, sum, valid);
    } else {
      float* const parts = p.y_parts + to;
      const int64_t all = static_cast<int64_t>(p.batch) * p.tokens * p.heads * kColumns;
#pragma unroll
      for (int j = 0; j < kCount; ++j)
        if (valid[j]) *reinterpret_cast<float4*>(parts + at.group * all + j * units_on) = sum[j];
      if (is_last(at.groups, thread)) {
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
          if (!valid[j]) continue;
          float4 whole = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
          for (int g = 0; g < at.groups; ++g)
            whole = plus(whole, __ldcg(reinterpret_cast<const float4*>(parts + g * all +
                                                                       j * units_on)));
          sum[j] = whole;
        }
        put(p, sum, valid);
      }
      count += p.heads;
    }
    to += group_on;
    left -= kGroup;
  }
  __device__ void put(const Problem& p, const float4 (&sum)[kCount], const bool (&valid)[kCount]) {
#pragma unroll
    for (int j = 0; j < kCount; ++j)
      if (valid[j])
        *reinterpret_cast<uint2*>(static_cast<T*>(p.y) + to + j * units_on) =
            narrow(sum[j], static_cast<T*>(nullptr));
  }
  // Whether all other groups have written their parts of these steps before.
  __device__ bool is_last(int groups, int thread) {
    helpers_meet();
    if (thread == 0) {
      __threadfence();
      *last_of_block = atomicAdd(count, 1) == groups - 1;
      __threadfence();
    }
    helpers_meet();
    return *last_of_block;
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
    if (group < groups) {
      next.store(1 - group % 2, thread);
      next.load();
    }
    if (group > 0) sum.store(p, at, thread, 1 - group % 2, group == 1, kGroupUnits);
    __syncthreads();
  }
  if (groups > 0) sum.store(p, at, thread, groups % 2, 0, 1);
}

}  // namespace m2rnn
