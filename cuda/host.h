// The same slices on a CPU thread: a tile is a run of slices, a slice one block of kScaleBlock
// elements or, without block scales, what fits into vector registers. Who divides tiles among
// threads is the caller's business.
#pragma once

#include <algorithm>

#include "multi_tensor.cuh"

namespace fusedopt {

constexpr int64_t kHostTile = 64 * kScaleBlock;

template <class S>
constexpr int kHostSlice = Layout<S>::kBlockScaled ? kScaleBlock
                           : Layout<S>::kOnlyFp32  ? 1
                                                   : 64;

inline int64_t tensor_of(const TileIndex& index, int64_t tile) {
  const uint32_t* end = index.first_tiles + index.tensors;
  return std::upper_bound(index.first_tiles, end, static_cast<uint32_t>(tile)) - index.first_tiles -
         1;
}

// Elements from begin to end by slices; where those are single elements, as in fp32, the loop is
// one that the compiler turns into vector instructions.
template <class S>
void update_range(const TensorRow row, const Ready<typename S::Rule> ready, int64_t begin,
                  int64_t end) {  // by value: no store can change them
  constexpr int N = kHostSlice<S>;
  const Span<N> first = {begin, row.numel - 1};
  const int64_t whole = (end - begin) / N;
#pragma GCC ivdep
  for (int64_t i = 0; i < whole; ++i) {
    const Span<N> span = {first.offset + i * N, first.last};
    update_slice<S, N, true, false>(row, ready, span, row);
  }
  if (begin + whole * N < end) {
    update_slice<S, N, false, false>(row, ready, Span<N>{begin + whole * N, first.last}, row);
  }
}

template <class S>
constexpr Kernels make_kernels() {
  using Rule = typename S::Rule;
  return {
      kHostTile,
      sizeof(Ready<Rule>),
      kHyperparameters<Rule>,
      1 << 30,
      [](const Advance& args, const uint64_t* words, int32_t, void*) -> int {
        for (int i = 0; i < args.tensors; ++i) advance_tensor<Rule>(args, words, i);
        return 0;
      },
      [](const Update& args, void*) -> int {
        for (int64_t i = args.first_tile; i < args.first_tile + args.num_tiles; ++i) {
          const int64_t tensor = tensor_of(args.index, i);
          const TensorRow& row = args.rows[tensor];
          const auto& ready = static_cast<const Ready<Rule>*>(args.ready)[tensor];
          if (!ready.grad) continue;
          const int64_t begin = (i - args.index.first_tiles[tensor]) * kHostTile;
          const int64_t end = begin + kHostTile < row.numel ? begin + kHostTile : row.numel;
          update_range<S>(row, ready, begin, end);
        }
        return 0;
      },
  };
}

}  // namespace fusedopt
