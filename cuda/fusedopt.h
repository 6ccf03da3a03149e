// What a launch is told: plain structs and the interface of a kernel library. Knows neither torch
// nor CUDA, nor what an optimizer computes.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define FUSEDOPT_HD __host__ __device__ __forceinline__
#else
#define FUSEDOPT_HD inline __attribute__((always_inline))
#endif

#if defined(__CUDA_ARCH__)
#define FUSEDOPT_UNROLL _Pragma("unroll")
#else
#define FUSEDOPT_UNROLL
#endif

namespace fusedopt {

constexpr int kMaxStates = 3;
constexpr int kScaleBlockBits = 8;
constexpr int kScaleBlock = 1 << kScaleBlockBits;  // elements that share one scale

// The dtypes of gradients.
enum class GradientCode : int32_t { kF32, kBF16, kF16 };

// One tensor of the plan: what stays the same from step to step. Unused pointers are null. Fields
// that are read together lie together: a load moves 16 bytes.
struct alignas(16) TensorRow {
  int64_t numel;
  int32_t group;
  GradientCode grad_code;
  void* param;
  void* master;
  void* states[kMaxStates];
  float* master_scale;
  float* state_scales[kMaxStates];  // one per kScaleBlock elements
  float* step;                      // 0-dim fp32, counts the updates that were not skipped
  float* fp8_scale;                 // of an fp8 parameter: stored = value * scale
  float* fp8_amax;
  float* fp8_scale_inv;
  float fp8_largest;  // of its dtype; 0: somebody else chooses the scale
};

// What changes from step to step. `words` goes with it: every group, then one gradient pointer per
// tensor (null: no gradient this time). A group is a mask of the values that are pointers to device
// scalars (low half: any; high half: to doubles), then the values. Where the words fit into a
// launch they travel in it: there is no host buffer to guard and a captured graph keeps its own
// copy.
struct Advance {
  const TensorRow* rows;
  void* ready;  // Ready<Rule>[tensors], written by advance, read by update
  const float* grad_scale;
  const float* found_inf;
  const double* norm_sq;  // of the gradients as they are; null: they are not clipped
  float* grad_norm;       // where their norm goes, unscaled
  float max_grad_norm;
  bool place_only;  // only note the gradients, for the norm to read
  uint32_t seed;
  int32_t tensors;
  int32_t groups;
};

// Which tensor a tile belongs to. The finest level has for every tensor of the plan the tile at
// which it starts, ascending (one that is not of the signature has no tiles); a coarser level has
// every 64th entry of the next finer one; each is padded to a multiple of 64 with the largest
// number. A warp finds a tile with one look at each level, and all levels stay in the L1 cache.
struct TileIndex {
  static constexpr int kFanOut = 64;
  static constexpr int kMaxLevels = 4;
  const uint32_t* starts;
  int32_t offsets[kMaxLevels];  // of the levels in starts, coarsest first
  int32_t levels;
  const uint32_t* first_tiles;  // the finest level
  int64_t tensors;              // its entries, padding included
};

struct Update {
  const TensorRow* rows;
  const void* ready;
  TileIndex index;
  int64_t first_tile;  // CPU threads take a range of tiles each; CUDA takes all in one launch
  int64_t num_tiles;
};

// What a kernel library gives. The functions return 0 or a cudaError_t.
struct Kernels {
  int32_t tile_elements;
  int32_t ready_bytes;
  int32_t hyperparameters;
  int32_t max_words;  // that fit into a launch; more must lie on the device
  int (*advance)(const Advance&, const uint64_t* words, int32_t num_words, void* stream);
  int (*update)(const Update&, void* stream);
};

// Gradients of any mix of dtypes, to be summed up or scaled.
struct Gradients {
  const TensorRow* rows;  // numel and grad_code
  const void* places;     // every place_bytes a gradient's address, or null
  int64_t place_bytes;
  TileIndex index;
  int64_t first_tile;  // as in Update
  int64_t num_tiles;
  double* partials;   // CUDA: kMaxNormBlocks; CPU: one per tile
  uint32_t* arrived;  // CUDA: blocks that are done, 0 before and after
  double* total;      // the sum of squares
  float* found_inf;  // set to 1 if one of them is infinite or NaN, and on CUDA to 0 if not; or null
};

constexpr int kMaxNormBlocks = 2048;

struct GradientKernels {
  int32_t tile_elements;
  // Writes *found_inf, and *total on CUDA; a CPU's caller adds up the partials.
  int (*norm)(const Gradients&, void* stream);
  // Reads *total.
  int (*clip)(const Gradients&, float max_norm, float* norm, void* stream);
};

}  // namespace fusedopt

// Each kernel library exports one of these.
extern "C" const fusedopt::Kernels* fusedopt_kernels();
extern "C" const fusedopt::GradientKernels* fusedopt_gradient_kernels();
