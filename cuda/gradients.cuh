// What is done to gradients of any mix of dtypes before a step: their norm, and scaling them to a
// norm. Knows no optimizer. Every function is one launch.
#pragma once

#include <algorithm>
#include <cmath>

#include "multi_tensor.cuh"

namespace fusedopt {

constexpr int kGradientTile = 8192;

template <class F>
FUSEDOPT_HD void with_code(GradientCode code, F f) {
  switch (code) {
    case GradientCode::kF32:
      return f(F32());
    case GradientCode::kBF16:
      return f(BF16());
    case GradientCode::kF16:
      return f(F16());
  }
}

FUSEDOPT_HD void* place_of(const Gradients& args, int64_t tensor) {
  const auto* places = static_cast<const char*>(args.places);
  return *reinterpret_cast<void* const*>(places + tensor * args.place_bytes);
}

#if defined(__CUDACC__)

// A sum of squares of N values, and whether one of them is infinite or NaN. Only where fp32 has
// not the range is the sum made in fp64.
struct Squares {
  double sum;
  bool is_finite;
};

constexpr int kLanes = 8;  // sums side by side, for vector units and instruction latencies

template <class Storage>
using LaneArray = Storage[kLanes];

template <class Storage, int N>
FUSEDOPT_HD LaneArray<Storage>& lanes_at(Storage (&raw)[N], int i) {
  return reinterpret_cast<LaneArray<Storage>&>(raw[i]);
}

template <class Code, int N>
FUSEDOPT_HD Squares squares(const typename Code::Storage (&raw)[N]) {
  float lanes[kLanes] = {};
  FUSEDOPT_UNROLL
  for (int i = 0; i < N; i += kLanes) {
    float values[kLanes];
    decode<Code>(lanes_at(raw, i), values);
    FUSEDOPT_UNROLL
    for (int j = 0; j < kLanes; ++j) {
      lanes[j] = fused_multiply_add(values[j], values[j], lanes[j]);
    }
  }
  float sum = 0;
  FUSEDOPT_UNROLL
  for (int j = 0; j < kLanes; ++j) sum += lanes[j];
  if (is_finite(sum)) return {sum, true};
  Squares exact = {0, true};
  FUSEDOPT_UNROLL
  for (int i = 0; i < N; ++i) {
    const float value = Code::decode(raw[i]);
    exact.sum += static_cast<double>(value) * value;
    exact.is_finite &= is_finite(value);
  }
  return exact;
}

constexpr int kGradientThreads = 128;
constexpr int kGradientBlocks = 6;  // of a multiprocessor, all at once: no block waits for another

inline unsigned gradient_blocks(int64_t tiles) {
  int device = 0, multiprocessors = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  const int64_t most = multiprocessors * kGradientBlocks;
  const int64_t blocks = most < kMaxNormBlocks ? most : kMaxNormBlocks;
  return static_cast<unsigned>(tiles < blocks ? tiles : blocks);
}

// What a thread holds of a whole tile at once: pieces of 16 bytes, side by side among threads.
template <class Code>
struct Part {
  static constexpr int kPieces = 8;
  static constexpr int kOfPiece = 16 / sizeof(typename Code::Storage);
  static constexpr int kElements = kPieces * kOfPiece;
  static constexpr int kOfTile = kGradientTile / kGradientThreads / kElements;
  typename Code::Storage raw[kElements];

  __device__ __forceinline__ char* piece(void* start, int i) {
    return static_cast<char*>(start) + (i * kGradientThreads + threadIdx.x) * 16;
  }
  __device__ __forceinline__ void load(void* start) {
    Piece<16> pieces[kPieces];
    FUSEDOPT_UNROLL
    for (int i = 0; i < kPieces; ++i) pieces[i].load(piece(start, i));
    memcpy(raw, pieces, sizeof raw);
  }
  __device__ __forceinline__ Squares squares() const { return fusedopt::squares<Code>(raw); }
  __device__ __forceinline__ void scale(float factor) {
    FUSEDOPT_UNROLL
    for (int i = 0; i < kElements; i += kLanes) {
      float values[kLanes];
      decode<Code>(lanes_at(raw, i), values);
      FUSEDOPT_UNROLL
      for (float& value : values) value *= factor;
      encode_nearest<Code>(values, lanes_at(raw, i));
    }
  }
  __device__ __forceinline__ void store(void* start) {
    Piece<16> pieces[kPieces];
    memcpy(pieces, raw, sizeof raw);
    FUSEDOPT_UNROLL
    for (int i = 0; i < kPieces; ++i) pieces[i].store(piece(start, i));
  }
};

// Calls for_part(Part, start) for each part of tile `index` if it is whole, for_element(Code,
// Code::Storage&) for each of this thread's elements if it is not.
template <class ForPart, class ForElement>
__device__ __forceinline__ void visit_tile(const Gradients& args, int64_t index, ForPart for_part,
                                           ForElement for_element) {
  const int tensor = tensor_of(args.index, static_cast<uint32_t>(index));
  void* grad = place_of(args, tensor);
  if (!grad) return;
  const TensorRow& row = args.rows[tensor];
  const int64_t begin = (index - args.index.first_tiles[tensor]) * kGradientTile;
  with_code(row.grad_code, [&](auto code) {
    using Code = decltype(code);
    auto* elements = static_cast<typename Code::Storage*>(grad);
    if (reinterpret_cast<uintptr_t>(grad) % 16 == 0 && begin + kGradientTile <= row.numel) {
      using P = Part<Code>;
      for (int i = 0; i < P::kOfTile; ++i) {
        for_part(P(), elements + begin + i * P::kElements * kGradientThreads);
      }
      return;
    }
    const int64_t end = begin + kGradientTile < row.numel ? begin + kGradientTile : row.numel;
    for (int64_t i = begin + threadIdx.x; i < end; i += kGradientThreads) {
      for_element(code, elements[i]);
    }
  });
}

// Sums over the threads of a block; the result is thread 0's.
__device__ __forceinline__ double block_sum(double value) {
  __shared__ double of_warp[kGradientThreads / 32];
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_down_sync(0xffffffffu, value, distance);
  }
  __syncthreads();  // of_warp may still be read from the last time
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < kGradientThreads / 32; ++warp) value += of_warp[warp];
  }
  return value;
}

// Each block has its tiles in order, and the last to finish adds up what they found in order: the
// same bits every time.
__global__ void __launch_bounds__(kGradientThreads, kGradientBlocks)
    norm_kernel(const __grid_constant__ Gradients args) {
  constexpr uint32_t kNotFinite = 1u << 16;  // added to the count of blocks that have arrived
  double sum = 0;
  bool all_finite = true;
  const auto add = [&](Squares found) {
    sum += found.sum;
    all_finite &= found.is_finite;
  };
  for (int64_t tile = blockIdx.x; tile < args.num_tiles; tile += gridDim.x) {
    visit_tile(
        args, tile,
        [&](auto part, void* start) {
          part.load(start);
          add(part.squares());
        },
        [&](auto code, auto& element) {
          const float value = decltype(code)::decode(element);
          add({static_cast<double>(value) * value, is_finite(value)});
        });
  }
  sum = block_sum(sum);
  all_finite = __syncthreads_and(all_finite);
  __shared__ uint32_t arrived;
  if (threadIdx.x == 0) {
    args.partials[blockIdx.x] = sum;
    __threadfence();
    const uint32_t mine = all_finite ? 1 : 1 + kNotFinite;
    arrived = atomicAdd(args.arrived, mine) + mine;
  }
  __syncthreads();
  if (arrived % kNotFinite != gridDim.x) return;
  __threadfence();
  double total = 0;
  for (int i = threadIdx.x; i < static_cast<int>(gridDim.x); i += blockDim.x) {
    total += __ldcg(args.partials + i);
  }
  total = block_sum(total);
  if (threadIdx.x == 0) {
    *args.total = total;
    if (args.found_inf) *args.found_inf = arrived >= kNotFinite ? 1 : 0;
    *args.arrived = 0;
  }
}

__global__ void __launch_bounds__(kGradientThreads, kGradientBlocks)
    clip_kernel(const __grid_constant__ Gradients args, float max_norm, float* norm_out) {
  const double norm = sqrt(*args.total);
  if (blockIdx.x == 0 && threadIdx.x == 0) *norm_out = static_cast<float>(norm);
  const float factor = clip_factor(norm, max_norm);
  if (factor == 1) return;
  for (int64_t tile = blockIdx.x; tile < args.num_tiles; tile += gridDim.x) {
    visit_tile(
        args, tile,
        [&](auto part, void* start) {
          part.load(start);
          part.scale(factor);
          part.store(start);
        },
        [&](auto code, auto& element) {
          using Code = decltype(code);
          element = Code::nearest(Code::decode(element) * factor);
        });
  }
}

constexpr GradientKernels kGradientKernels = {
    kGradientTile,
    [](const Gradients& args, void* stream) -> int {
      norm_kernel<<<gradient_blocks(args.num_tiles), kGradientThreads, 0,
                    static_cast<cudaStream_t>(stream)>>>(args);
      return cudaGetLastError();
    },
    [](const Gradients& args, float max_norm, float* norm, void* stream) -> int {
      clip_kernel<<<gradient_blocks(args.num_tiles), kGradientThreads, 0,
                    static_cast<cudaStream_t>(stream)>>>(args, max_norm, norm);
      return cudaGetLastError();
    },
};

#else

// Calls f(Code, elements, count) for each tile of a range.
template <class F>
void visit_tiles(const Gradients& args, F f) {
  for (int64_t i = args.first_tile; i < args.first_tile + args.num_tiles; ++i) {
    const int64_t tensor = tensor_of(args.index, i);
    void* grad = place_of(args, tensor);
    const TensorRow& row = args.rows[tensor];
    const int64_t begin = (i - args.index.first_tiles[tensor]) * kGradientTile;
    const int64_t left = row.numel - begin;
    with_code(row.grad_code, [&](auto code) {
      using Storage = typename decltype(code)::Storage;
      const int64_t count = !grad ? 0 : left < kGradientTile ? left : kGradientTile;
      f(i, code, static_cast<Storage*>(grad) + begin, count);
    });
  }
}

// Adds up squares as T in lanes that fill vector registers, and the lanes of each chunk in fp64.
template <class T, class Code>
double sum_of_squares(const typename Code::Storage* elements, int64_t count) {
  constexpr int kLanes = 32, kChunk = 8 * kLanes;
  double totals[kLanes] = {};
  const auto add_chunk = [&](const typename Code::Storage* chunk) {
    T lanes[kLanes] = {};
    for (int i = 0; i < kChunk; i += kLanes) {
      for (int j = 0; j < kLanes; ++j) {
        const T value = Code::decode(chunk[i + j]);
        lanes[j] += value * value;
      }
    }
    for (int j = 0; j < kLanes; ++j) totals[j] += lanes[j];
  };
  const int64_t left = count % kChunk;
  for (int64_t i = 0; i < count - left; i += kChunk) add_chunk(elements + i);
  if (left > 0) {
    typename Code::Storage padded[kChunk] = {};
    std::copy_n(elements + count - left, left, padded);
    add_chunk(padded);
  }
  double sum = 0;
  for (const double total : totals) sum += total;
  return sum;
}

constexpr GradientKernels kGradientKernels = {
    kGradientTile,
    [](const Gradients& args, void*) -> int {
      visit_tiles(args, [&](int64_t tile, auto code, const auto* elements, int64_t count) {
        using Code = decltype(code);
        double sum = sum_of_squares<float, Code>(elements, count);
        // Not finite, or squares without the range of fp32.
        if (!std::isfinite(sum)) sum = sum_of_squares<double, Code>(elements, count);
        if (!std::isfinite(sum) && args.found_inf) {
          __atomic_store_n(reinterpret_cast<uint32_t*>(args.found_inf), 0x3f800000u,
                           __ATOMIC_RELAXED);  // 1
        }
        args.partials[tile] = sum;
      });
      return 0;
    },
    [](const Gradients& args, float max_norm, float* norm_out, void*) -> int {
      const double norm = std::sqrt(*args.total);
      if (args.first_tile == 0) *norm_out = static_cast<float>(norm);
      const float factor = clip_factor(norm, max_norm);
      if (factor == 1) return 0;
      visit_tiles(args, [&](int64_t, auto code, auto* elements, int64_t count) {
        using Code = decltype(code);
        for (int64_t i = 0; i < count; ++i) {
          elements[i] = Code::nearest(Code::decode(elements[i]) * factor);
        }
      });
      return 0;
    },
};

#endif

}  // namespace fusedopt
