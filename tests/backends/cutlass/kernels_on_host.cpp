// The kernels of csrc/quantize_kernels.cuh and csrc/norm_kernels.cuh as functions that run on the host; see test_kernels_on_host.py.
#include "cuda_on_host.h"
// what follows sees the above as CUDA
#include "norm_kernels.cuh"

using namespace minite;

static unsigned blocks(int64_t items, int64_t per_block) { return unsigned((items + per_block - 1) / per_block); }

extern "C" {
// held: blocks a lane keeps, as minite_quantize chooses it; 16: the kernel of 16x16 blocks
void quantize(const MiniteQuantize* q, int held) {
  const Index rows{blocks(q->rows, kWarps), 1};
  const unsigned threads = kWarp * kWarps;
  if (held == 16)
    launch(quantize_squares, {blocks(q->rows / kBlock * (q->k / kBlock), 2 * kWarps), 1}, threads, *q);
  else if (held == 1)
    launch(quantize_rows<1>, rows, threads, *q);
  else if (held == 2)
    launch(quantize_rows<2>, rows, threads, *q);
  else if (held == 4)
    launch(quantize_rows<4>, rows, threads, *q);
  else
    launch(quantize_rows<0>, rows, threads, *q);
}

// held: blocks a lane keeps, as minite_norm_quantize chooses it
void norm(const MiniteNorm* n, int held) {
  const Index rows{blocks(n->rows, kWarps), 1};
  const unsigned threads = kWarp * kWarps;
  if (held == 2)
    launch(norm_quantize_rows<2>, rows, threads, *n);
  else if (held == 4)
    launch(norm_quantize_rows<4>, rows, threads, *n);
  else
    launch(norm_quantize_rows<0>, rows, threads, *n);
}

void permute(const MinitePermute* p) {
  launch(permute_rows, {blocks(p->rows, kWarps), 1}, kWarp * kWarps, *p);
}

void combine(const MiniteCombine* c) {
  const int64_t strips = (c->width + 8 * kWarp - 1) / (8 * kWarp);
  launch(combine_rows, {blocks(c->tokens * strips, kWarps), 1}, kWarp * kWarps, *c);
}

void swizzle_scales(const uint8_t* linear, int64_t rows, int columns, const MiniteScales* scales) {
  launch(swizzle, {blocks(rows * ((columns + 3) / 4), 256), 1}, 256, linear, rows, columns, *scales);
}

void swizzle_runs(const uint8_t* linear, int64_t rows, int columns, const int32_t* starts, int groups, uint8_t* tiles) {
  launch(swizzle_columns, {blocks(rows * (columns / 4), 256), 1}, 256, linear, rows, columns, starts, groups, tiles);
}

void amax_of(const uint16_t* x, int slices, int64_t elements, uint32_t* out) {
  launch(amax, {2, unsigned(slices)}, 64, x, elements / kBlock, out);
}
}
