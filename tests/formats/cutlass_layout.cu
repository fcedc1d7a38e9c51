// Prints where CUTLASS itself puts NVFP4 block scales: evaluated on the host, no GPU needed.
// Input, one problem a line: rows K. Output, one line each: the size of the buffer, then the offset of each scale of
// operand A, row by row, then of operand B. test_cutlass_layout.py compares them with minite.formats.layout.
#include <cstdio>

#include "cutlass/cutlass.h"

#include "cute/tensor.hpp"
#include "cutlass/detail/sm100_blockscaled_layout.hpp"

int main() {
  using Config = cutlass::detail::Sm1xxBlockScaledConfig<16>;
  int rows, k;
  while (std::scanf("%d %d", &rows, &k) == 2) {
    auto a = Config::tile_atom_to_shape_SFA(cute::make_shape(rows, 128, k, 1));
    auto b = Config::tile_atom_to_shape_SFB(cute::make_shape(128, rows, k, 1));
    std::printf("%d", int(cute::cosize(a)));
    for (int r = 0; r < rows; ++r)
      for (int g = 0; g < k; g += 16) std::printf(" %d", int(a(r, g, 0)));
    for (int r = 0; r < rows; ++r)
      for (int g = 0; g < k; g += 16) std::printf(" %d", int(b(r, g, 0)));
    std::printf("\n");
  }
}
