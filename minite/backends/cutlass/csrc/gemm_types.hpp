// The CUTLASS kernels that the library holds, as types: operands and schedules of one architecture, tiles, epilogue.
#pragma once
#include <cuda_runtime.h>

#include "cutlass/cutlass.h"

#include "cute/tensor.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/operations.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "cutlass/gemm/group_array_problem_shape.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/util/packed_stride.hpp"

#include "abi.h"

namespace minite {
using namespace cute;
namespace fusion = cutlass::epilogue::fusion;
namespace schedule = cutlass::gemm;
namespace store = cutlass::epilogue;

// Operand: what a and b are made of. kTileK: one tile of the main loop. Narrow and Wide: tiles for few and many rows.
#if MINITE_ARCHITECTURE == 90
struct Operands {
  using Tag = cutlass::arch::Sm90;
  using Class = cutlass::arch::OpClassTensorOp;
  using Pair = cutlass::bfloat16_t;
  static constexpr int kAlignment = 8, kTileK = 64;
  template <bool kGrouped, bool kPair>
  using Main = conditional_t<kGrouped, schedule::KernelPtrArrayTmaWarpSpecializedCooperative,
                             schedule::KernelTmaWarpSpecializedCooperative>;
  template <bool kGrouped, bool kPair>
  using Store =
      conditional_t<kGrouped, store::PtrArrayTmaWarpSpecializedCooperative, store::TmaWarpSpecializedCooperative>;
};
using Narrow = Shape<_128, _128>;
using Wide = Shape<_128, _256>;
#else
template <bool kGrouped, bool kPair>
using BlackwellStore = conditional_t<
    kGrouped, conditional_t<kPair, store::PtrArrayTmaWarpSpecialized2Sm, store::PtrArrayTmaWarpSpecialized1Sm>,
    conditional_t<kPair, store::TmaWarpSpecialized2Sm, store::TmaWarpSpecialized1Sm>>;
using Narrow = Shape<_128, _128>;
using Wide = Shape<_256, _256>;  // two multiprocessors work on one tile
#if MINITE_ARCHITECTURE == 100
struct Operands {
  using Tag = cutlass::arch::Sm100;
  using Class = cutlass::arch::OpClassBlockScaledTensorOp;
  using Pair = cutlass::nv_float4_t<cutlass::float_e2m1_t>;
  static constexpr int kAlignment = 32, kTileK = 256;
  template <bool kGrouped, bool kPair>
  using Main = conditional_t<
      kGrouped,
      conditional_t<kPair, schedule::KernelPtrArrayTmaWarpSpecialized2SmNvf4Sm100,
                    schedule::KernelPtrArrayTmaWarpSpecialized1SmNvf4Sm100>,
      conditional_t<kPair, schedule::KernelTmaWarpSpecialized2SmNvf4Sm100,
                    schedule::KernelTmaWarpSpecialized1SmNvf4Sm100>>;
  template <bool kGrouped, bool kPair>
  using Store = BlackwellStore<kGrouped, kPair>;
};
#elif MINITE_ARCHITECTURE == 103
struct Operands {  // "ultra": 96 columns an instruction
  using Tag = cutlass::arch::Sm103;
  using Class = cutlass::arch::OpClassBlockScaledTensorOp;
  using Pair = cute::tuple<cutlass::float_e2m1_t, cutlass::float_ue4m3_t>;
  static constexpr int kAlignment = 32, kTileK = 768;
  // Without prefetch: in CUTLASS 4.2.0 the prefetching schedules race on a barrier (mended in 4.3.0).
  template <bool kGrouped, bool kPair>
  using Main = conditional_t<
      kGrouped,
      conditional_t<kPair, schedule::KernelPtrArrayTmaWarpSpecialized2SmBlockScaledMxNvf4UltraVs16Sm103DisablePrefetch,
                    schedule::KernelPtrArrayTmaWarpSpecialized1SmBlockScaledMxNvf4UltraVs16Sm103DisablePrefetch>,
      conditional_t<kPair, schedule::KernelTmaWarpSpecialized2SmBlockScaledMxNvf4UltraVs16Sm103DisablePrefetch,
                    schedule::KernelTmaWarpSpecialized1SmBlockScaledMxNvf4UltraVs16Sm103DisablePrefetch>>;
  template <bool kGrouped, bool kPair>
  using Store = BlackwellStore<kGrouped, kPair>;
};
#else
#error "MINITE_ARCHITECTURE is 90, 100 or 103"
#endif
#endif

// d = cast((acc * alpha) * (weight_amax * row_amax)): three roundings in float32 and the cast, as in the reference, so
// that equal sums give equal bits. A thread of the epilogue owns a row, so the scale product is made once per tile.
template <class Result>
using Multiply = fusion::Sm90Compute<cutlass::multiplies, Result, float, cutlass::FloatRoundStyle::round_to_nearest>;

template <class Tile, class D, bool kGrouped>
using OuterScales = fusion::Sm90EVT<
    Multiply<D>,
    fusion::Sm90EVT<Multiply<float>, fusion::Sm90ScalarBroadcast<float>, fusion::Sm90AccFetch>,
    fusion::Sm90EVT<Multiply<float>, fusion::Sm90ScalarBroadcast<float, Stride<_0, _0, int64_t>>,
                    // alignment 1: a group's first row lies anywhere in the vector
                    fusion::Sm90ColBroadcast<0, Tile, conditional_t<kGrouped, float*, float>, float,
                                             Stride<_1, _0, _0>, 1>>>;

template <class TileMN, class D_, bool kGrouped>
struct Gemm {
  using D = D_;
  static constexpr int kM = get<0>(TileMN{}), kN = get<1>(TileMN{});
  static constexpr bool kPair = kM == 256;
  static constexpr int kAlignmentD = 16 / sizeof(D);
  using Row = conditional_t<kGrouped, cutlass::layout::RowMajor*, cutlass::layout::RowMajor>;
  using Column = conditional_t<kGrouped, cutlass::layout::ColumnMajor*, cutlass::layout::ColumnMajor>;
  using Mma = Shape<Int<kM>, Int<kN>, Int<Operands::kTileK>>;
  using Cta = Shape<_128, Int<kN>, Int<Operands::kTileK>>;
  using Cluster = Shape<Int<kPair ? 2 : 1>, _1, _1>;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      typename Operands::Tag, typename Operands::Class, Mma, Cluster, cutlass::epilogue::collective::EpilogueTileAuto,
      float, float, void, Row, kAlignmentD, D, Row, kAlignmentD,
      typename Operands::template Store<kGrouped, kPair>, OuterScales<Cta, D, kGrouped>>::CollectiveOp;
  using Main = typename cutlass::gemm::collective::CollectiveBuilder<
      typename Operands::Tag, typename Operands::Class, typename Operands::Pair, Row, Operands::kAlignment,
      typename Operands::Pair, Column, Operands::kAlignment, float, Mma, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<int(sizeof(typename Epilogue::SharedStorage))>,
      typename Operands::template Main<kGrouped, kPair>>::CollectiveOp;
  using Problem = conditional_t<kGrouped, cutlass::gemm::GroupProblemShape<Shape<int, int, int>>,
                                Shape<int, int, int, int>>;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<Problem, Main, Epilogue>;
  using Device = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
};

inline cutlass::KernelHardwareInfo hardware(const MiniteGemm& g) {
  cutlass::KernelHardwareInfo info;
  info.device_id = 0;  // read only where the count of multiprocessors is not given
  info.sm_count = g.multiprocessors;
  return info;
}

template <class Device>
int launch(typename Device::Arguments& arguments, void* workspace, cudaStream_t stream) {
  Device gemm;
  if (gemm.initialize(arguments, workspace, stream) != cutlass::Status::kSuccess) return kMiniteCannotImplement;
  // never with programmatic dependent launch: 4.2.0 reads the sizes before the kernel that writes them has ended
  if (gemm.run(stream, nullptr, /*launch_with_pdl=*/false) != cutlass::Status::kSuccess) {
    const int error = int(cudaGetLastError());
    return error ? error : int(cudaErrorLaunchFailure);
  }
  return int(cudaPeekAtLastError());
}
}  // namespace minite
