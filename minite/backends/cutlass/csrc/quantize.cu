// Quantizers, with an RMS norm before them or without, what moves block scales, rows to experts and back: the C functions
// over quantize_kernels.cuh and norm_kernels.cuh.
#include <cuda_runtime.h>

#include "norm_kernels.cuh"

namespace minite {
unsigned blocks_for(int64_t items, int64_t per_block) { return unsigned((items + per_block - 1) / per_block); }
}  // namespace minite

int minite_abi() { return MINITE_ABI; }
int minite_architecture() { return MINITE_ARCHITECTURE; }

int minite_quantize(const MiniteQuantize* q) {
  using namespace minite;
  auto stream = static_cast<cudaStream_t>(q->stream);
  const int columns = q->k / kBlock;
  if (q->k % kBlock != 0 || (q->block_rows == kBlock && (q->amax_in == nullptr || q->rows % kBlock != 0)))
    return kMiniteNoSuchShape;
  if (q->rows == 0) return 0;
  const unsigned rows = blocks_for(q->rows, kWarps);
  if (q->block_rows == kBlock)
    quantize_squares<<<blocks_for(q->rows / kBlock * columns, 2 * kWarps), kWarp * kWarps, 0, stream>>>(*q);
  else if (columns <= kWarp)
    quantize_rows<1><<<rows, kWarp * kWarps, 0, stream>>>(*q);
  else if (columns <= 2 * kWarp)
    quantize_rows<2><<<rows, kWarp * kWarps, 0, stream>>>(*q);
  else if (columns <= 4 * kWarp)
    quantize_rows<4><<<rows, kWarp * kWarps, 0, stream>>>(*q);
  else
    quantize_rows<0><<<rows, kWarp * kWarps, 0, stream>>>(*q);
  return int(cudaPeekAtLastError());
}

int minite_norm_quantize(const MiniteNorm* n) {
  using namespace minite;
  if (n->k % kBlock != 0) return kMiniteNoSuchShape;
  if (n->rows == 0) return 0;
  auto stream = static_cast<cudaStream_t>(n->stream);
  const int columns = n->k / kBlock;
  const unsigned rows = blocks_for(n->rows, kWarps);
  if (columns <= 2 * kWarp)
    norm_quantize_rows<2><<<rows, kWarp * kWarps, 0, stream>>>(*n);
  else if (columns <= 4 * kWarp)
    norm_quantize_rows<4><<<rows, kWarp * kWarps, 0, stream>>>(*n);
  else
    norm_quantize_rows<0><<<rows, kWarp * kWarps, 0, stream>>>(*n);
  return int(cudaPeekAtLastError());
}

int minite_permute(const MinitePermute* p) {
  if (p->k % minite::kBlock != 0) return kMiniteNoSuchShape;
  if (p->rows == 0) return 0;
  minite::permute_rows<<<minite::blocks_for(p->rows, minite::kWarps), minite::kWarp * minite::kWarps, 0,
                         static_cast<cudaStream_t>(p->stream)>>>(*p);
  return int(cudaPeekAtLastError());
}

int minite_combine(const MiniteCombine* c) {
  if (c->width % 8 != 0 || c->top > minite::kWarp) return kMiniteNoSuchShape;
  if (c->tokens == 0 || c->width == 0) return 0;
  const int64_t strips = (c->width + 8 * minite::kWarp - 1) / (8 * minite::kWarp);
  minite::combine_rows<<<minite::blocks_for(c->tokens * strips, minite::kWarps), minite::kWarp * minite::kWarps, 0,
                         static_cast<cudaStream_t>(c->stream)>>>(*c);
  return int(cudaPeekAtLastError());
}

int minite_swizzle(const uint8_t* linear, int64_t rows, int32_t columns, const MiniteScales* scales, void* stream) {
  const int64_t items = rows * ((columns + 3) / 4);
  if (items == 0) return 0;
  minite::swizzle<<<minite::blocks_for(items, 256), 256, 0, static_cast<cudaStream_t>(stream)>>>(linear, rows, columns,
                                                                                                *scales);
  return int(cudaPeekAtLastError());
}

int minite_swizzle_columns(const uint8_t* linear, int64_t rows, int32_t columns, const int32_t* starts, int32_t groups,
                           uint8_t* tiles, void* stream) {
  const int64_t items = rows * (columns / 4);
  if (columns % 4 != 0) return kMiniteNoSuchShape;
  if (items == 0 || groups == 0) return 0;
  minite::swizzle_columns<<<minite::blocks_for(items, 256), 256, 0, static_cast<cudaStream_t>(stream)>>>(
      linear, rows, columns, starts, groups, tiles);
  return int(cudaPeekAtLastError());
}

int minite_amax(const void* x, int64_t slices, int64_t elements, float* amax, void* stream) {
  auto on = static_cast<cudaStream_t>(stream);
  if (elements % minite::kBlock != 0) return kMiniteNoSuchShape;
  if (slices == 0) return 0;
  if (const cudaError_t error = cudaMemsetAsync(amax, 0, slices * sizeof(float), on)) return int(error);
  if (elements == 0) return 0;
  const int64_t blocks = elements / minite::kBlock;
  const unsigned width = min(minite::blocks_for(blocks, 4 * 256), 1024u);
  minite::amax<<<dim3(width, unsigned(slices)), 256, 0, on>>>(static_cast<const uint16_t*>(x), blocks,
                                                              reinterpret_cast<uint32_t*>(amax));
  return int(cudaPeekAtLastError());
}
