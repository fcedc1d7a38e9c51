// RMS norm and the quantizer behind it in one kernel, for quantize.cu. A row is read once and kept in registers from the
// sum of its squares to its codes, so that the norm is written only where something else wants it, and never read back.
#pragma once
#include "quantize_kernels.cuh"

namespace minite {
__device__ void store_block(void* at, int64_t offset, const Block& b) {
  uint4* p = reinterpret_cast<uint4*>(static_cast<uint16_t*>(at) + offset);
  p[0] = make_uint4(b.word[0], b.word[1], b.word[2], b.word[3]);
  p[1] = make_uint4(b.word[4], b.word[5], b.word[6], b.word[7]);
}

// 16 columns of t: x, or x + addend rounded to BF16.
__device__ Block term(const MiniteNorm& n, int64_t offset) {
  Block t = load(static_cast<const uint16_t*>(n.x) + offset);
  if (n.addend == nullptr) return t;
  const Block more = load(static_cast<const uint16_t*>(n.addend) + offset);
#pragma unroll
  for (int i = 0; i < 8; ++i)
    t.word[i] = bf16_bits(even_column(t.word[i]) + even_column(more.word[i])) |
                bf16_bits(odd_column(t.word[i]) + odd_column(more.word[i])) << 16;
  return t;
}

// sum + the squares of a block. Float64 holds a row's sum of squares of BF16 values exactly while the values span less
// than 2^12; beyond it another order changes about one norm's float32 rounding in 2^28.
__device__ double add_squares(const Block& t, double sum) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const double even = even_column(t.word[i]), odd = odd_column(t.word[i]);
    sum = fma(odd, odd, fma(even, even, sum));
  }
  return sum;
}

__device__ Block normed(const Block& t, const Block& weight, float inverse) {
  Block y;
#pragma unroll
  for (int i = 0; i < 8; ++i)
    y.word[i] = bf16_bits(even_column(t.word[i]) * inverse * even_column(weight.word[i])) |
                bf16_bits(odd_column(t.word[i]) * inverse * odd_column(weight.word[i])) << 16;
  return y;
}

// A warp takes a row; lane l the blocks l, l + 32, ... kHeld: blocks a lane keeps; 0: any number, read three times.
template <int kHeld>
__global__ void __launch_bounds__(kWarp* kWarps) norm_quantize_rows(const MiniteNorm n) {
  const int lane = threadIdx.x % kWarp, columns = n.k / kBlock;
  const int64_t r = int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarp, first = r * n.k;
  if (r >= n.rows) return;
  const uint16_t* weight = static_cast<const uint16_t*>(n.weight);
  Block held[kHeld > 0 ? kHeld : 1];
  double square = 0;
  const auto begin = [&](Block& t, int c) {
    t = term(n, first + c * kBlock);
    if (n.addend != nullptr) store_block(n.total, first + c * kBlock, t);
    square = add_squares(t, square);
  };
  if constexpr (kHeld > 0) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      if (lane + kWarp * i < columns) begin(held[i], lane + kWarp * i);
  } else {
    for (int c = lane; c < columns; c += kWarp) begin(held[0], c);
  }
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) square += __shfl_xor_sync(0xFFFFFFFFu, square, step);
  const float inverse = 1.0f / sqrtf(float(square) / float(n.k) + n.eps);

  uint32_t largest = 0;
  if constexpr (kHeld > 0) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int c = lane + kWarp * i;
      if (c < columns) {
        held[i] = normed(held[i], load(weight + c * kBlock), inverse);
        largest = max(largest, amax_bits(held[i]));
      }
    }
  } else {
    for (int c = lane; c < columns; c += kWarp)
      largest = max(largest, amax_bits(normed(term(n, first + c * kBlock), load(weight + c * kBlock), inverse)));
  }
  const float amax = as_float(__reduce_max_sync(0xFFFFFFFFu, largest));
  if (lane == 0) n.amax_out[r] = amax;

  const float outer = outer_encode(amax, kOuterMax), outer_decode = 1.0f / outer;
  const int64_t scale_row = n.scales.tiles == nullptr ? 0 : tile_row(n.scales, r);
  const auto finish = [&](const Block& y, int c) {
    if (n.plain != nullptr) store_block(n.plain, first + c * kBlock, y);
    store(n, r, scale_row, c, encode(y, as_float(amax_bits(y)), outer, outer_decode));
  };
  if constexpr (kHeld > 0) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      if (lane + kWarp * i < columns) finish(held[i], lane + kWarp * i);
  } else {
    for (int c = lane; c < columns; c += kWarp)
      finish(normed(term(n, first + c * kBlock), load(weight + c * kBlock), inverse), c);
  }
}
}  // namespace minite
