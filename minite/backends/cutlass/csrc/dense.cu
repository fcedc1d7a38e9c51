// Dense GEMM: one weight for all rows.
#include "gemm_types.hpp"

namespace minite {
template <class G>
typename G::Device::Arguments arguments(const MiniteGemm& g) {
  using Kernel = typename G::Kernel;
  typename G::Device::Arguments out{};
  out.mode = cutlass::gemm::GemmUniversalMode::kGemm;
  out.problem_shape = {g.m, g.n, g.k, 1};
  using A = std::remove_reference_t<decltype(*out.mainloop.ptr_A)>;
  using B = std::remove_reference_t<decltype(*out.mainloop.ptr_B)>;
  out.mainloop.ptr_A = static_cast<A*>(g.a), out.mainloop.ptr_B = static_cast<B*>(g.b);
  out.mainloop.dA = cutlass::make_cute_packed_stride(typename Kernel::StrideA{}, make_shape(g.m, g.k, 1));
  out.mainloop.dB = cutlass::make_cute_packed_stride(typename Kernel::StrideB{}, make_shape(g.n, g.k, 1));
#if MINITE_ARCHITECTURE >= 100
  using Layouts = typename G::Main::Sm1xxBlkScaledConfig;
  using Scale = std::remove_reference_t<decltype(*out.mainloop.ptr_SFA)>;
  out.mainloop.ptr_SFA = static_cast<Scale*>(g.a_scales), out.mainloop.ptr_SFB = static_cast<Scale*>(g.b_scales);
  out.mainloop.layout_SFA = Layouts::tile_atom_to_shape_SFA(make_shape(g.m, g.n, g.k, 1));
  out.mainloop.layout_SFB = Layouts::tile_atom_to_shape_SFB(make_shape(g.m, g.n, g.k, 1));
#endif
  out.epilogue.ptr_C = nullptr;
  out.epilogue.ptr_D = static_cast<typename G::D*>(g.d);
  out.epilogue.dD = cutlass::make_cute_packed_stride(typename Kernel::StrideD{}, make_shape(g.m, g.n, 1));
  out.epilogue.thread = {{{{g.alpha}}, {}, {}},  // acc * alpha
                         {{{0.0f}, {g.weight_amax}, {{_0{}, _0{}, int64_t(0)}}}, {g.row_amax, 0.0f, {}}, {}},
                         {}};
  out.hw_info = hardware(g);
  return out;
}

template <class G>
int64_t dense(const MiniteGemm& g, bool only_workspace) {
  auto args = arguments<G>(g);
  const int64_t total = G::Device::get_workspace_size(args);
  if (only_workspace) return total;
  if (g.workspace_bytes < total) return kMiniteSmallWorkspace;
  if (G::Device::can_implement(args) != cutlass::Status::kSuccess) return kMiniteCannotImplement;
  return launch<typename G::Device>(args, g.workspace, static_cast<cudaStream_t>(g.stream));
}

int64_t dispatch_dense(const MiniteGemm& g, bool only_workspace) {
  switch (g.config) {
    case 0: return dense<Gemm<Narrow, cutlass::bfloat16_t, false>>(g, only_workspace);
    case 1: return dense<Gemm<Wide, cutlass::bfloat16_t, false>>(g, only_workspace);
    case 2: return dense<Gemm<Narrow, float, false>>(g, only_workspace);
    default: return kMiniteNoSuchConfig;
  }
}
}  // namespace minite

int64_t minite_dense_workspace(const MiniteGemm* g) { return minite::dispatch_dense(*g, true); }
int minite_dense_gemm(const MiniteGemm* g) { return int(minite::dispatch_dense(*g, false)); }
