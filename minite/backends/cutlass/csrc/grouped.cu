// Grouped GEMM: rows sorted by group, each group its own weight; or, for the gradient of the weights, columns sorted by
// group, each group its own result. The sizes stay on the device.
#include "gemm_types.hpp"

namespace minite {
constexpr int kMetadataThreads = 256;

// Pointers, strides and layouts of every group, which CUTLASS reads from device memory.
template <class G>
struct Metadata {
  using Kernel = typename G::Kernel;
  using StrideA = typename Kernel::InternalStrideA;
  using StrideB = typename Kernel::InternalStrideB;
  using StrideD = typename Kernel::InternalStrideD;
  using ElementA = typename Kernel::ElementA;
  Shape<int, int, int>* shape;
  const void** a;
  const void** b;
  void** d;
  const float** row_amax;
  StrideA* stride_a;
  StrideB* stride_b;
  StrideD* stride_d;
#if MINITE_ARCHITECTURE >= 100
  const void** a_scales;
  const void** b_scales;
  typename G::Main::InternalLayoutSFA* layout_a_scales;
  typename G::Main::InternalLayoutSFB* layout_b_scales;
#endif

  // Lays the arrays out from `base`; returns their bytes.
  static size_t carve(void* base, int groups, Metadata& m) {
    size_t offset = 0;
    auto take = [&](auto*& field) {
      using T = std::remove_reference_t<decltype(*field)>;
      field = reinterpret_cast<T*>(static_cast<char*>(base) + offset);
      offset = (offset + sizeof(T) * size_t(groups) + 255) / 256 * 256;
    };
    take(m.shape), take(m.a), take(m.b), take(m.d), take(m.row_amax);
    take(m.stride_a), take(m.stride_b), take(m.stride_d);
#if MINITE_ARCHITECTURE >= 100
    take(m.a_scales), take(m.b_scales), take(m.layout_a_scales), take(m.layout_b_scales);
#endif
    return offset;
  }
};

inline __device__ int64_t whole_tiles(int rows) { return (int64_t(rows) + 127) / 128 * 128; }

template <class G>
__global__ void write_metadata(Metadata<G> m, MiniteGemm g) {
  constexpr int kBits = cutlass::sizeof_bits<typename Metadata<G>::ElementA>::value;
  const int64_t row_bytes = int64_t(g.k) * kBits / 8;
  for (int i = threadIdx.x; i < g.groups; i += blockDim.x) {
    const int first = g.starts[i], length = g.starts[i + 1] - first;
    const int rows = g.over_columns ? g.m : length, columns = g.over_columns ? length : g.k;
    const int64_t first_byte = int64_t(first) * kBits / 8;
    m.shape[i] = make_shape(rows, g.n, columns);
    m.a[i] = static_cast<const char*>(g.a) + (g.over_columns ? first_byte : first * row_bytes);
    m.b[i] = static_cast<const char*>(g.b) + (g.over_columns ? first_byte : int64_t(i) * g.n * row_bytes);
    m.d[i] = static_cast<typename G::D*>(g.d) + (g.over_columns ? int64_t(i) * g.m : int64_t(first)) * g.n;
    m.row_amax[i] = g.row_amax + (g.over_columns ? 0 : first);
    m.stride_a[i] = cutlass::make_cute_packed_stride(typename Metadata<G>::StrideA{}, make_shape(rows, g.k, 1));
    m.stride_b[i] = cutlass::make_cute_packed_stride(typename Metadata<G>::StrideB{}, make_shape(g.n, g.k, 1));
    m.stride_d[i] = cutlass::make_cute_packed_stride(typename Metadata<G>::StrideD{}, make_shape(rows, g.n, 1));
#if MINITE_ARCHITECTURE >= 100
    using Layouts = typename G::Main::Sm1xxBlkScaledConfig;
    const int64_t scale_row = (int64_t(g.k) + 63) / 64 * 4, run = first / 16;
    const int64_t a_byte = g.over_columns ? whole_tiles(g.m) * run : g.scale_starts[i] * scale_row;
    const int64_t b_byte = whole_tiles(g.n) * (g.over_columns ? run : i * scale_row);
    m.a_scales[i] = static_cast<const char*>(g.a_scales) + a_byte;
    m.b_scales[i] = static_cast<const char*>(g.b_scales) + b_byte;
    m.layout_a_scales[i] = Layouts::tile_atom_to_shape_SFA(make_shape(rows, g.n, columns, 1));
    m.layout_b_scales[i] = Layouts::tile_atom_to_shape_SFB(make_shape(rows, g.n, columns, 1));
#endif
  }
}

template <class G>
typename G::Device::Arguments arguments(const MiniteGemm& g, const Metadata<G>& m) {
  typename G::Device::Arguments out{};
  out.mode = cutlass::gemm::GemmUniversalMode::kGrouped;
  out.problem_shape = {g.groups, m.shape, nullptr};  // no sizes on the host
  using A = std::remove_reference_t<decltype(*out.mainloop.ptr_A)>;
  using B = std::remove_reference_t<decltype(*out.mainloop.ptr_B)>;
  out.mainloop.ptr_A = reinterpret_cast<A*>(m.a), out.mainloop.dA = m.stride_a;
  out.mainloop.ptr_B = reinterpret_cast<B*>(m.b), out.mainloop.dB = m.stride_b;
#if MINITE_ARCHITECTURE >= 100
  using Scale = std::remove_reference_t<decltype(*out.mainloop.ptr_SFA)>;
  out.mainloop.ptr_SFA = reinterpret_cast<Scale*>(m.a_scales), out.mainloop.layout_SFA = m.layout_a_scales;
  out.mainloop.ptr_SFB = reinterpret_cast<Scale*>(m.b_scales), out.mainloop.layout_SFB = m.layout_b_scales;
#endif
  out.epilogue.ptr_C = nullptr, out.epilogue.dC = nullptr;
  out.epilogue.ptr_D = reinterpret_cast<typename G::D**>(m.d), out.epilogue.dD = m.stride_d;
  out.epilogue.thread = {{{{g.alpha}}, {}, {}},  // acc * alpha
                         {{{0.0f}, {g.weight_amax}, {{_0{}, _0{}, int64_t(1)}}}, {m.row_amax, 0.0f, {}}, {}},
                         {}};
  out.hw_info = hardware(g);
  return out;
}

template <class G>
int64_t grouped(const MiniteGemm& g, bool only_workspace) {
  Metadata<G> m;
  const size_t metadata = Metadata<G>::carve(g.workspace, g.groups, m);
  auto args = arguments<G>(g, m);
  const int64_t total = metadata + G::Device::get_workspace_size(args);
  if (only_workspace) return total;
  if (g.workspace_bytes < total) return kMiniteSmallWorkspace;
  auto stream = static_cast<cudaStream_t>(g.stream);
  write_metadata<G><<<1, kMetadataThreads, 0, stream>>>(m, g);
  return launch<typename G::Device>(args, static_cast<char*>(g.workspace) + metadata, stream);
}

int64_t dispatch_grouped(const MiniteGemm& g, bool only_workspace) {
  switch (g.config) {
    case 0: return grouped<Gemm<Narrow, cutlass::bfloat16_t, true>>(g, only_workspace);
    case 1: return grouped<Gemm<Wide, cutlass::bfloat16_t, true>>(g, only_workspace);
    case 2: return grouped<Gemm<Narrow, float, true>>(g, only_workspace);
    default: return kMiniteNoSuchConfig;
  }
}
}  // namespace minite

int64_t minite_grouped_workspace(const MiniteGemm* g) { return minite::dispatch_grouped(*g, true); }
int minite_grouped_gemm(const MiniteGemm* g) { return int(minite::dispatch_grouped(*g, false)); }
