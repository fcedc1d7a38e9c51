// Evaluates, on the host, the CuTe layouts of the GEMMs in csrc: where each kernel type looks for the values and block
// scales of its operands and where it puts results. Compares them with what the quantizers write (nvfp4.cuh, itself
// compared with minite.formats.layout in test_nvfp4_host.py). Prints the number of offsets compared and of mistakes.
#include <cstdio>
#include <initializer_list>

#include "gemm_types.hpp"
#include "nvfp4.cuh"

namespace minite {
long compared = 0, mistakes = 0;

void expect(int64_t got, int64_t want, const char* what, int row, int column) {
  ++compared;
  if (got != want && mistakes++ < 5)
    std::printf("%s[%d, %d]: %lld, expected %lld\n", what, row, column, (long long)got, (long long)want);
}

template <class G>
void check(int m, int n, int k) {
  using Kernel = typename G::Kernel;
  using StrideA = std::remove_pointer_t<typename Kernel::StrideA>;
  using StrideB = std::remove_pointer_t<typename Kernel::StrideB>;
  using StrideD = std::remove_pointer_t<typename Kernel::StrideD>;
  auto a = make_layout(make_shape(m, k, 1), cutlass::make_cute_packed_stride(StrideA{}, make_shape(m, k, 1)));
  auto b = make_layout(make_shape(n, k, 1), cutlass::make_cute_packed_stride(StrideB{}, make_shape(n, k, 1)));
  auto d = make_layout(make_shape(m, n, 1), cutlass::make_cute_packed_stride(StrideD{}, make_shape(m, n, 1)));
  for (int r = 0; r < m; ++r) {
    for (int c = 0; c < k; c += 5) expect(a(r, c, 0), int64_t(r) * k + c, "a", r, c);
    for (int c = 0; c < n; ++c) expect(d(r, c, 0), int64_t(r) * n + c, "d", r, c);
  }
  for (int r = 0; r < n; ++r)
    for (int c = 0; c < k; c += 5) expect(b(r, c, 0), int64_t(r) * k + c, "b", r, c);
#if MINITE_ARCHITECTURE >= 100
  using Layouts = typename G::Main::Sm1xxBlkScaledConfig;
  typename std::remove_pointer_t<typename G::Main::LayoutSFA> a_scales =
      Layouts::tile_atom_to_shape_SFA(make_shape(m, n, k, 1));
  typename std::remove_pointer_t<typename G::Main::LayoutSFB> b_scales =
      Layouts::tile_atom_to_shape_SFB(make_shape(m, n, k, 1));
  const int columns4 = (k + 63) / 64;
  auto scales = [&](auto const& layout, int rows, const char* what) {
    expect(cosize(layout), int64_t(rows + 127) / 128 * 128 * columns4 * 4, what, -1, -1);
    for (int r = 0; r < rows; ++r)
      for (int c = 0; c < k; ++c) expect(layout(r, c, 0), tile_offset(r, c / kBlock, columns4), what, r, c);
  };
  scales(a_scales, m, "scales of a");
  scales(b_scales, n, "scales of b");
#endif
}

template <bool kGrouped>
void all() {
  for (int rows : {1, 31, 128, 300})
    for (int k : {32, 96, 768, 2080}) {
      check<Gemm<Narrow, cutlass::bfloat16_t, kGrouped>>(rows, 136, k);
      check<Gemm<Wide, cutlass::bfloat16_t, kGrouped>>(rows, 520, k);
      check<Gemm<Narrow, float, kGrouped>>(rows, 8, k);
    }
}
}  // namespace minite

int main() {
  minite::all<false>();
  minite::all<true>();
  std::printf("%ld compared, %ld mistakes\n", minite::compared, minite::mistakes);
  return minite::mistakes != 0;
}
