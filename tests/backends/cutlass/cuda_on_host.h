// As much of CUDA as csrc/quantize_kernels.cuh uses, on the host: a warp is 32 threads that meet at a barrier wherever
// lanes exchange values. Slow, and no substitute for a GPU; it shows indices, tails and who writes what.
#pragma once
#include <algorithm>
#include <atomic>
#include <barrier>
#include <bit>
#include <cmath>
#include <cstdint>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __launch_bounds__(threads)

struct Index {
  unsigned x = 0, y = 0;
};
struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

struct Warp {
  std::barrier<> meet{32};
  uint64_t value[32];
};
inline thread_local Index threadIdx, blockIdx, blockDim, gridDim;
inline thread_local Warp* warp;

using std::max;
using std::min;
template <class T>
T __ldg(const T* p) {
  return *p;
}

template <class Read>
uint64_t exchange(uint64_t mine, Read read) {
  warp->value[threadIdx.x % 32] = mine;
  warp->meet.arrive_and_wait();
  const uint64_t result = read(warp->value);
  warp->meet.arrive_and_wait();
  return result;
}
inline uint32_t __reduce_max_sync(uint32_t, uint32_t mine) {
  return uint32_t(exchange(mine, [](const uint64_t* all) { return *std::max_element(all, all + 32); }));
}
inline uint64_t other_lane(uint64_t mine, int step) {
  return exchange(mine, [=](const uint64_t* all) { return all[(threadIdx.x % 32) ^ step]; });
}
inline uint32_t __shfl_xor_sync(uint32_t, uint32_t mine, int step) { return uint32_t(other_lane(mine, step)); }
inline double __shfl_xor_sync(uint32_t, double mine, int step) {
  return std::bit_cast<double>(other_lane(std::bit_cast<uint64_t>(mine), step));
}
inline void atomicMax(uint32_t* at, uint32_t value) {
  std::atomic_ref<uint32_t> target(*at);
  for (uint32_t seen = target; seen < value && !target.compare_exchange_weak(seen, value);) {
  }
}

// kernel<<<grid, threads>>>(arguments...), warp after warp. A warp leaves as a whole or stays as a whole.
template <class Kernel, class... Arguments>
void launch(Kernel kernel, Index grid, unsigned threads, Arguments... arguments) {
  for (unsigned y = 0; y < grid.y; ++y)
    for (unsigned x = 0; x < grid.x; ++x)
      for (unsigned first = 0; first < threads; first += 32) {
        Warp shared;
        std::vector<std::thread> lanes;
        for (unsigned lane = 0; lane < 32; ++lane)
          lanes.emplace_back([&, lane] {
            threadIdx.x = first + lane, blockIdx = {x, y}, blockDim.x = threads, gridDim = grid, warp = &shared;
            kernel(arguments...);
          });
        for (auto& lane : lanes) lane.join();
      }
}
