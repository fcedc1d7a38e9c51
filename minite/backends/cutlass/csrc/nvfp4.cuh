// NVFP4 arithmetic of one block of 16 BF16 values, for the device and for the host: the same text is compiled by the
// host compiler in the tests and compared with minite.formats bit for bit. Formulas and their order: formats/nvfp4.py.
// Compiled with -fmad=false; where a multiply-add is wanted it is written out.
#pragma once
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define MINITE_BOTH __host__ __device__ __forceinline__
#else
#define MINITE_BOTH inline
#endif

namespace minite {
constexpr int kBlock = 16;

struct Block {  // 16 BF16 values; the low half of a word is the even column
  uint32_t word[8];
};

struct Encoded {
  uint32_t codes[2];  // 16 E2M1 codes, column 0 in the lowest four bits
  uint8_t scale;      // E4M3
};

MINITE_BOTH float as_float(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
#endif
}

MINITE_BOTH uint32_t as_bits(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
#endif
}

MINITE_BOTH float even_column(uint32_t word) { return as_float(word << 16); }
MINITE_BOTH float odd_column(uint32_t word) { return as_float(word & 0xFFFF0000u); }

// BF16 bits of a float, to nearest even; NaN gives the canonical 0x7FFF, as torch does.
MINITE_BOTH uint32_t bf16_bits(float value) {
  const uint32_t bits = as_bits(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FFFu;
  return (bits + 0x7FFFu + ((bits >> 16) & 1)) >> 16;
}

// The larger magnitude of two pairs of BF16 values, as integers: NaN beats infinity beats everything finite.
MINITE_BOTH uint32_t larger_halves(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  return __vmaxu2(a, b);
#else
  const uint32_t low = (a & 0xFFFFu) > (b & 0xFFFFu) ? a & 0xFFFFu : b & 0xFFFFu;
  const uint32_t high = (a >> 16) > (b >> 16) ? a >> 16 : b >> 16;
  return low | high << 16;
#endif
}

// Bits of max |x| of a block as float32. Comparing such bits as integers compares the magnitudes.
MINITE_BOTH uint32_t amax_bits(const Block& x) {
  uint32_t halves = 0;
  for (int i = 0; i < 8; ++i) halves = larger_halves(halves, x.word[i] & 0x7FFF7FFFu);
  const uint32_t low = halves << 16, high = halves & 0xFFFF0000u;
  return low > high ? low : high;
}

MINITE_BOTH float outer_encode(float amax, float outer_max) {
  const float encode = fminf(outer_max / amax, FLT_MAX);
  return amax == 0.0f || encode == 0.0f ? 1.0f : encode;
}

// E4M3 of a float32 >= 0, to nearest even, at most 448.
MINITE_BOTH uint8_t e4m3(float value) {
#ifdef __CUDA_ARCH__
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(value));
  return uint8_t(pair);
#else
  if (value >= 448.0f) return 0x7E;
  if (value < 0.015625f) return uint8_t(as_bits(std::fmaf(value, 512.0f, 12582912.0f)) & 0xF);  // multiples of 2^-9
  const uint32_t bits = as_bits(value);
  return uint8_t(((bits + 0x7FFFFu + ((bits >> 20) & 1)) >> 20) - (120u << 3));
#endif
}

// The value of an E4M3 code that is not NaN and not negative.
MINITE_BOTH float e4m3_value(uint8_t code) {
  return code < 8 ? float(code) * 0.001953125f : as_float((uint32_t(code) + (120u << 3)) << 20);
}

MINITE_BOTH float encode_factor(uint8_t scale, float outer_decode) {
  return fminf(1.0f / (e4m3_value(scale) * outer_decode), FLT_MAX);
}

// E2M1 code of a product of floats; formats/rounding.py says why the least of three roundings is right. Adding
// 1.5 * 2^23 rounds to an integer, to nearest even, and leaves it in the low bits.
MINITE_BOTH uint32_t e2m1(float value) {
#ifndef __CUDA_ARCH__
  if (value != value) return 7;  // on the device a NaN that a multiplication gives has no sign
#endif
  const float integer = 12582912.0f;
  const float magnitude = fminf(fabsf(value), 6.0f);  // and NaN is 6
  const float near_zero = fmaf(magnitude, 2.0f, integer);
  const float middle = magnitude + (integer + 2.0f);
  const float large = fmaf(magnitude, 0.5f, integer + 4.0f);
  return (as_bits(fminf(fminf(near_zero, middle), large)) & 7u) | ((as_bits(value) >> 28) & 8u);
}

// Eight codes, the first in the lowest four bits.
MINITE_BOTH uint32_t pack_e2m1(const float* v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  uint32_t packed;
  asm("{\n"
      ".reg .b8 b0, b1, b2, b3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b0, %2, %1;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b1, %4, %3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b2, %6, %5;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b3, %8, %7;\n"
      "mov.b32 %0, {b0, b1, b2, b3};\n"
      "}"
      : "=r"(packed)
      : "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "f"(v[4]), "f"(v[5]), "f"(v[6]), "f"(v[7]));
  return packed;
#else
  uint32_t packed = 0;
  for (int i = 7; i >= 0; --i) packed = packed << 4 | e2m1(v[i]);
  return packed;
#endif
}

// block_amax: of the block, or of its 16x16 block. outer_decode = 1 / outer.
MINITE_BOTH Encoded encode(const Block& x, float block_amax, float outer, float outer_decode) {
  Encoded out;
  out.scale = e4m3(fminf(block_amax * (outer * 0.16666667163372039795f), FLT_MAX));
  const float factor = encode_factor(out.scale, outer_decode);
  for (int half = 0; half < 2; ++half) {
    float scaled[8];
    for (int i = 0; i < 4; ++i) {
      scaled[2 * i] = even_column(x.word[4 * half + i]) * factor;
      scaled[2 * i + 1] = odd_column(x.word[4 * half + i]) * factor;
    }
    out.codes[half] = pack_e2m1(scaled);
  }
  return out;
}

// Byte of the scale of (row, column of blocks) among swizzled tiles of 128 rows x 4; columns4 = ceil(columns / 4).
MINITE_BOTH int64_t tile_offset(int64_t row, int column, int columns4) {
  const int inside = int(row % 128);
  return (row / 128 * columns4 + column / 4) * 512 + inside % 32 * 16 + inside / 32 * 4 + column % 4;
}
}  // namespace minite
