// The arithmetic of the CUDA kernels, compiled for the host: test_nvfp4_host.py compares it with minite.formats.
#include <algorithm>

#include "nvfp4.cuh"

using namespace minite;

extern "C" {
void e2m1_codes(const float* x, int64_t n, uint8_t* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = uint8_t(e2m1(x[i]));
}

void e4m3_codes(const float* x, int64_t n, uint8_t* out, float* back) {
  for (int64_t i = 0; i < n; ++i) out[i] = e4m3(x[i]), back[i] = e4m3_value(out[i]);
}

void to_bf16(const float* x, int64_t n, uint16_t* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = uint16_t(bf16_bits(x[i]));
}

// x: BF16 [rows, k]. block_rows 1 or 16. amax: [rows], measured by row where `measure`. Scales go to their tiles.
void quantize(const uint16_t* x, int64_t rows, int k, int block_rows, bool measure, float* amax, uint8_t* codes,
              uint8_t* tiles) {
  const int columns = k / kBlock, columns4 = (columns + 3) / 4;
  auto block = [&](int64_t r, int c) {
    Block b;
    std::memcpy(&b, x + r * k + c * kBlock, sizeof b);
    return b;
  };
  for (int64_t r = 0; r < rows; ++r) {
    if (measure) {
      uint32_t largest = 0;
      for (int c = 0; c < columns; ++c) largest = std::max(largest, amax_bits(block(r, c)));
      amax[r] = as_float(largest);
    }
    const float outer = outer_encode(amax[r], 2688.0f), outer_decode = 1.0f / outer;
    for (int c = 0; c < columns; ++c) {
      uint32_t largest = 0;
      const int64_t first = r - r % block_rows;
      for (int64_t i = first; i < first + block_rows; ++i) largest = std::max(largest, amax_bits(block(i, c)));
      const Encoded e = encode(block(r, c), as_float(largest), outer, outer_decode);
      std::memcpy(codes + (r * columns + c) * 8, e.codes, 8);
      tiles[tile_offset(r, c, columns4)] = e.scale;
    }
  }
}
}
