// The kernels of quantize.cu. Bound by memory: a row is read once, 16 bytes at a time, and kept in registers between its
// amax and its codes. The tests also run this file on a CPU, thread by thread (tests/backends/cutlass/cuda_on_host.h).
#pragma once
#include "abi.h"
#include "nvfp4.cuh"

namespace minite {
constexpr int kWarp = 32, kWarps = 8;
constexpr float kOuterMax = 2688.0f;

__device__ Block load(const uint16_t* at) {
  const uint4* p = reinterpret_cast<const uint4*>(at);
  const uint4 low = __ldg(p), high = __ldg(p + 1);
  return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
}

// BF16(silu(gate) * up), as layers.ops.swiglu: silu in float32, the product rounded once.
__device__ float silu_times(float gate, float up) { return gate / (1.0f + expf(-gate)) * up; }

__device__ Block swiglu(const Block& gate, const Block& up) {
  Block out;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t even = bf16_bits(silu_times(even_column(gate.word[i]), even_column(up.word[i])));
    const uint32_t odd = bf16_bits(silu_times(odd_column(gate.word[i]), odd_column(up.word[i])));
    out.word[i] = even | odd << 16;
  }
  return out;
}

// Row of the tiles that holds the scales of row r.
__device__ int64_t tile_row(const MiniteScales& s, int64_t r) {
  if (s.starts == nullptr) return r;
  int low = 0, high = s.experts - 1;  // the last expert that begins at or before r and is not empty
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (s.starts[middle] <= r) low = middle;
    else high = middle - 1;
  }
  return s.scale_starts[low] + (r - s.starts[low]);
}

// Call: MiniteQuantize or MinitePermute.
template <class Call>
__device__ void store(const Call& q, int64_t r, int64_t scale_row, int column, const Encoded& e) {
  const int columns = q.k / kBlock, columns4 = (columns + 3) / 4;
  *reinterpret_cast<uint2*>(q.codes + r * (q.k / 2) + column * 8) = make_uint2(e.codes[0], e.codes[1]);
  if (q.scales.tiles == nullptr) {
    q.scales.linear[r * columns + column] = e.scale;
    return;
  }
  q.scales.tiles[tile_offset(scale_row, column, columns4)] = e.scale;
  if (column == columns - 1)  // the GEMM reads whole tiles: a NaN there would spoil the row
    for (int pad = columns; pad < 4 * columns4; ++pad) q.scales.tiles[tile_offset(scale_row, pad, columns4)] = 0;
}

__device__ Block read(const MiniteQuantize& q, const uint16_t* row, int column) {
  const Block x = load(row + column * kBlock);
  return q.swiglu ? swiglu(x, load(row + q.k + column * kBlock)) : x;
}

// A warp takes a row; lane l the blocks l, l + 32, ... kHeld: blocks a lane keeps; 0: any number, read twice.
template <int kHeld>
__global__ void __launch_bounds__(kWarp* kWarps) quantize_rows(const MiniteQuantize q) {
  const int lane = threadIdx.x % kWarp, columns = q.k / kBlock;
  const int64_t r = int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (r >= q.rows) return;
  const uint16_t* row = static_cast<const uint16_t*>(q.x) + r * q.k * (q.swiglu ? 2 : 1);
  Block held[kHeld > 0 ? kHeld : 1];
#pragma unroll
  for (int i = 0; i < kHeld; ++i)
    if (lane + kWarp * i < columns) held[i] = read(q, row, lane + kWarp * i);
  float amax;
  if (q.amax_in == nullptr) {
    uint32_t largest = 0;
    if constexpr (kHeld > 0) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i)
        if (lane + kWarp * i < columns) largest = max(largest, amax_bits(held[i]));
    } else {
      for (int c = lane; c < columns; c += kWarp) largest = max(largest, amax_bits(read(q, row, c)));
    }
    amax = as_float(__reduce_max_sync(0xFFFFFFFFu, largest));
    if (lane == 0) q.amax_out[r] = amax;
  } else {
    amax = q.amax_in[r / q.rows_per_amax];
  }
  const float outer = outer_encode(amax, kOuterMax), outer_decode = 1.0f / outer;
  const int64_t scale_row = q.scales.tiles == nullptr ? 0 : tile_row(q.scales, r);
  if constexpr (kHeld > 0) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int c = lane + kWarp * i;
      if (c < columns) store(q, r, scale_row, c, encode(held[i], as_float(amax_bits(held[i])), outer, outer_decode));
    }
  } else {
    for (int c = lane; c < columns; c += kWarp) {
      const Block x = read(q, row, c);
      store(q, r, scale_row, c, encode(x, as_float(amax_bits(x)), outer, outer_decode));
    }
  }
}

// 16x16 blocks: half a warp takes one, a lane one of its rows; the scale is repeated over the 16 rows.
__global__ void __launch_bounds__(kWarp* kWarps) quantize_squares(const MiniteQuantize q) {
  const int lane = threadIdx.x % kWarp, columns = q.k / kBlock;
  const int64_t block = (int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarp) * 2 + lane / kBlock;
  const bool inside = block < q.rows / kBlock * columns;  // of the last warp half may be outside, and shuffles need both
  const int column = int(block % columns);
  const int64_t r = block / columns * kBlock + lane % kBlock;
  Block x{};
  if (inside) x = load(static_cast<const uint16_t*>(q.x) + r * q.k + column * kBlock);
  uint32_t largest = amax_bits(x);
#pragma unroll
  for (int step = 1; step < kBlock; step *= 2) largest = max(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, step));
  if (!inside) return;
  const float outer = outer_encode(q.amax_in[r / q.rows_per_amax], kOuterMax);
  const Encoded encoded = encode(x, as_float(largest), outer, 1.0f / outer);
  store(q, r, q.scales.tiles == nullptr ? 0 : tile_row(q.scales, r), column, encoded);
}

// A warp takes a row; a lane a block of 16 codes and its scale at a time.
__global__ void __launch_bounds__(kWarp* kWarps) permute_rows(const MinitePermute p) {
  const int lane = threadIdx.x % kWarp, columns = p.k / kBlock;
  const int64_t r = int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (r >= p.rows) return;
  const int64_t source = p.source_row[r];
  if (lane == 0) p.amax_out[r] = p.amax_in[source];
  const uint2* codes = reinterpret_cast<const uint2*>(p.codes_in + source * (p.k / 2));
  const uint8_t* scales = p.scales_in + source * columns;
  const int64_t scale_row = p.scales.tiles == nullptr ? 0 : tile_row(p.scales, r);
  for (int c = lane; c < columns; c += kWarp) {
    const uint2 pair = codes[c];
    store(p, r, scale_row, c, Encoded{{pair.x, pair.y}, scales[c]});
  }
}

// A warp takes 256 columns of a token, a lane eight of them. Lane j also holds choice j.
__global__ void __launch_bounds__(kWarp* kWarps) combine_rows(const MiniteCombine c) {
  const int lane = threadIdx.x % kWarp, strips = (c.width + 8 * kWarp - 1) / (8 * kWarp);
  const int64_t item = int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (item >= c.tokens * strips) return;
  const int64_t token = item / strips;
  const int column = int(item % strips) * 8 * kWarp + lane * 8;
  // complements, whose maximum is that of the lowest position; 0: no choice is left
  uint32_t left = lane < c.top ? ~uint32_t(c.position[token * c.top + lane]) : 0;
  const uint32_t weight_bits = lane < c.top ? as_bits(c.prob[token * c.top + lane]) : 0;
  float sum[8] = {};
  for (int i = 0; i < c.top; ++i) {
    const uint32_t lowest = __reduce_max_sync(0xFFFFFFFFu, left);
    const float weight = as_float(__reduce_max_sync(0xFFFFFFFFu, left == lowest ? weight_bits : 0));
    if (left == lowest) left = 0;
    if (column >= c.width) continue;
    const uint16_t* y = static_cast<const uint16_t*>(c.y) + int64_t(~lowest) * c.width + column;
    const uint4 eight = __ldg(reinterpret_cast<const uint4*>(y));
    const uint32_t word[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sum[2 * j] += even_column(word[j]) * weight;
      sum[2 * j + 1] += odd_column(word[j]) * weight;
    }
  }
  if (column >= c.width) return;
  uint32_t word[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) word[j] = bf16_bits(sum[2 * j]) | bf16_bits(sum[2 * j + 1]) << 16;
  uint16_t* out = static_cast<uint16_t*>(c.out) + token * c.width + column;
  *reinterpret_cast<uint4*>(out) = make_uint4(word[0], word[1], word[2], word[3]);
}

// One thread a row and four columns.
__global__ void swizzle(const uint8_t* linear, int64_t rows, int columns, MiniteScales s) {
  const int columns4 = (columns + 3) / 4;
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= rows * columns4) return;
  const int64_t r = i / columns4;
  const int first = int(i % columns4) * 4;
  uint32_t four = 0;
  for (int j = 0; j < 4; ++j)
    if (first + j < columns) four |= uint32_t(linear[r * columns + first + j]) << (8 * j);
  *reinterpret_cast<uint32_t*>(s.tiles + tile_offset(tile_row(s, r), first, columns4)) = four;
}

// One thread a row and four columns, of runs of columns that each begin and end at whole tiles. Columns behind the last
// run belong to none.
__global__ void swizzle_columns(const uint8_t* linear, int64_t rows, int columns, const int32_t* starts, int groups,
                                uint8_t* tiles) {
  const int columns4 = columns / 4;
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= rows * columns4) return;
  const int64_t r = i / columns4;
  const int tile = int(i % columns4);
  if (tile >= starts[groups] / 64) return;
  int low = 0, high = groups - 1;  // the run that holds the tile: the last that begins at or before it
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (starts[middle] / 64 <= tile) low = middle;
    else high = middle - 1;
  }
  const int first = starts[low] / 64, length = starts[low + 1] / 64 - first;
  const int64_t base = (rows + 127) / 128 * first * 512;
  const uint32_t four = *reinterpret_cast<const uint32_t*>(linear + r * columns + 4 * tile);
  *reinterpret_cast<uint32_t*>(tiles + base + tile_offset(r, 4 * (tile - first), length)) = four;
}

// blockIdx.y: the slice. Magnitudes are compared as bits, NaN the largest.
__global__ void amax(const uint16_t* x, int64_t blocks, uint32_t* out) {
  const uint16_t* slice = x + int64_t(blockIdx.y) * blocks * kBlock;
  uint32_t largest = 0;
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < blocks; i += step)
    largest = max(largest, amax_bits(load(slice + i * kBlock)));
  largest = __reduce_max_sync(0xFFFFFFFFu, largest);
  if (threadIdx.x % kWarp == 0) atomicMax(out + blockIdx.y, largest);
}
}  // namespace minite
