// The C interface of the library: one library per architecture, the same symbols in each. No torch, no C++ types.
// Every call only enqueues on `stream`: it allocates nothing, waits for nothing, and may be captured in a CUDA graph.
// minite/backends/cutlass/library.py mirrors these structs.
#pragma once
#include <stdint.h>

#define MINITE_ABI 4
#define MINITE_API extern "C" __attribute__((visibility("default")))

// Return codes: 0, a CUDA error (> 0), or one of these.
enum MiniteStatus {
  kMiniteNoSuchConfig = -1,
  kMiniteSmallWorkspace = -2,
  kMiniteCannotImplement = -3,  // CUTLASS refuses the problem (alignment, an extent)
  kMiniteNoSuchShape = -4,      // this K, or more choices of a token than a warp holds
};

// d[m, n] = (sum_k a[m, k] b[n, k] * alpha) * (weight_amax[g] * row_amax[m]), rounded once to the type of d.
// a, b: packed E2M1 with swizzled E4M3 scales (sm_100a, sm_103a) or BF16 codes x block scales, scales null (sm_90a).
// over_columns (grouped only): groups are runs of columns instead, d[g, m, n] = sum over the columns of group g. Then a is
// [m, k], b [n, k], d [groups, m, n], and starts are columns: multiples of 64, no run is empty. Group g's scales
// begin at roundup(m, 128) * starts[g] / 16 (for b, n): its own tiles, as minite_swizzle_columns lays them.
struct MiniteGemm {
  const void* a;             // [m, k]: all rows, sorted by group
  const void* a_scales;      // group g begins at row scale_starts[g], a multiple of 128
  const void* b;             // [groups, n, k]
  const void* b_scales;      // each group's rows padded to 128
  void* d;                   // [m, n]
  const float* row_amax;     // [m]
  const float* weight_amax;  // [groups]
  const int32_t* starts;     // [groups + 1] on the device: rows of group g are starts[g] .. starts[g + 1]; grouped only
  const int32_t* scale_starts;  // [groups + 1] on the device; grouped only
  void* workspace;
  void* stream;
  int64_t workspace_bytes;
  int32_t config, m, n, k, groups, multiprocessors;
  float alpha;
  int32_t over_columns;
};

// Where block scales go. tiles null: scales [rows, k / 16] in order. Otherwise swizzled tiles of 128 x 4: without
// starts for one matrix, with them for rows sorted by expert, each expert padded by itself.
struct MiniteScales {
  uint8_t* linear;
  uint8_t* tiles;
  const int32_t* starts;        // [experts + 1]
  const int32_t* scale_starts;  // [experts + 1], multiples of 128
  int32_t experts;
};

struct MiniteQuantize {
  const void* x;              // BF16; 16-byte aligned
  const float* amax_in;       // null: measured (row scaling only)
  float* amax_out;            // [rows]; written when measured
  uint8_t* codes;             // [rows, k / 2], low nibble = even column
  MiniteScales scales;
  void* stream;
  int64_t rows;
  int64_t rows_per_amax;  // 1: amax_in[r]; n: amax_in[r / n]
  int32_t k;
  int32_t block_rows;  // 1, or 16 for 16x16 blocks with amax_in given
  int32_t swiglu;      // 1: x is [rows, 2k], gate first; what is quantized is BF16(silu(gate) * up)
};

// RMS norm, then row-scaled quantization of the norm as it was rounded to BF16: y = weight * t / sqrt(mean(t^2) + eps),
// t = x, or BF16(x + addend). Squares are summed in float64; the rest is float32 in the order of the backend triton.
struct MiniteNorm {
  const void* x;       // BF16 [rows, k]; 16-byte aligned, as all of this struct
  const void* addend;  // null: none
  const void* weight;  // BF16 [k]
  void* total;         // BF16 [rows, k]: t; written where there is an addend
  void* plain;         // BF16 [rows, k]: y; null: not wanted
  float* amax_out;     // [rows]
  uint8_t* codes;      // [rows, k / 2]
  MiniteScales scales;
  void* stream;
  int64_t rows;
  int32_t k;
  float eps;
};

// Rows that were quantized once, copied to every expert that takes them: row r is row source_row[r].
struct MinitePermute {
  const uint8_t* codes_in;    // [tokens, k / 2]
  const uint8_t* scales_in;   // [tokens, k / 16], in order
  const float* amax_in;       // [tokens]
  const int64_t* source_row;  // [rows]
  float* amax_out;            // [rows]
  uint8_t* codes;             // [rows, k / 2]
  MiniteScales scales;
  void* stream;
  int64_t rows;
  int32_t k;
};

// out[t] = sum over the choices j of token t of prob[t, j] * y[position[t, j]], in ascending order of position, rounded
// to BF16 once; each product and each sum is a float32 of its own.
struct MiniteCombine {
  const void* y;            // BF16 [rows, width], width a multiple of 8
  const float* prob;        // [tokens, top]
  const int32_t* position;  // [tokens, top], all different
  void* out;                // BF16 [tokens, width]
  void* stream;
  int64_t tokens;
  int32_t width, top;  // top: at most 32
};

MINITE_API int minite_abi();
MINITE_API int minite_architecture();  // 90, 100 or 103
MINITE_API int64_t minite_dense_workspace(const MiniteGemm*);
MINITE_API int64_t minite_grouped_workspace(const MiniteGemm*);
MINITE_API int minite_dense_gemm(const MiniteGemm*);
MINITE_API int minite_grouped_gemm(const MiniteGemm*);
MINITE_API int minite_quantize(const MiniteQuantize*);
MINITE_API int minite_norm_quantize(const MiniteNorm*);
MINITE_API int minite_permute(const MinitePermute*);
MINITE_API int minite_combine(const MiniteCombine*);
MINITE_API int minite_swizzle(const uint8_t* linear, int64_t rows, int32_t columns, const MiniteScales*, void* stream);
MINITE_API int minite_swizzle_columns(const uint8_t* linear, int64_t rows, int32_t columns, const int32_t* starts,
                                      int32_t groups, uint8_t* tiles, void* stream);
MINITE_API int minite_amax(const void* x, int64_t slices, int64_t elements, float* amax, void* stream);
