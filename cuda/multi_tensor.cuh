// The loop over memory: a slice of a tensor is loaded, updated and stored. A CUDA thread and a CPU
// thread run the same function on slices of different lengths. Knows no hyperparameter and no
// dtype: those come as the rule and the streams of a Signature.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "fusedopt.h"
#include "precision.cuh"

namespace fusedopt {

struct None {  // no master
  using Storage = uint8_t;
  static constexpr bool kBlockScaled = false;
};

// What one binary is compiled for. Master is None, Split<> or the code of a master kept apart;
// States are codes, in the order of the rule's roles.
template <class R, class P, class G, class M, bool kStochastic, class... States>
struct Signature {
  using Rule = R;
  using Grad = G;
  static constexpr int kStates = sizeof...(States);
};

// ---- advance: step counters, skipping, everything constant over a tensor ------------------------

// What `update` needs of one tensor in one step. A null gradient means: leave the tensor alone.
template <class Rule>
struct alignas(16) Ready {
  const void* grad;
  float grad_factor;  // unscales, clips and negates
  uint32_t key;       // of this step's random bits
  // How many times kWholeUnit elements, from the first one on, can be read and written by wide
  // accesses; negative if the rule is not usual.
  int32_t whole_units;
  Rule rule;
};

constexpr int kWholeUnit = 512;  // a divisor of every tile's size on CUDA

template <class Rule>
constexpr int kHyperparameters = sizeof(typename Rule::Hyperparameters) / sizeof(double);

// The values of one group, from the words of an Advance; pointers among them are followed.
template <class Rule>
FUSEDOPT_HD typename Rule::Hyperparameters read_group(const uint64_t* words) {
  const uint32_t pointers = static_cast<uint32_t>(words[0]);
  const uint32_t doubles = static_cast<uint32_t>(words[0] >> 32);
  double values[kHyperparameters<Rule>];
  FUSEDOPT_UNROLL
  for (int i = 0; i < kHyperparameters<Rule>; ++i) {
    const uint64_t word = words[1 + i];
    if (!(pointers >> i & 1)) {
      memcpy(&values[i], &word, sizeof word);
    } else if (doubles >> i & 1) {
      values[i] = *reinterpret_cast<const double*>(word);
    } else {
      values[i] = static_cast<double>(*reinterpret_cast<const float*>(word));
    }
  }
  typename Rule::Hyperparameters group;
  memcpy(&group, values, sizeof group);
  return group;
}

// The factor that clips, as torch.nn.utils.clip_grad_norm_ has it; 1: nothing to do.
FUSEDOPT_HD float clip_factor(double norm, float max_norm) {
  const double clip = max_norm / (norm + 1e-6);
  return clip >= 1 ? 1.0f : static_cast<float>(clip);  // NaN stays
}

template <class Rule>
FUSEDOPT_HD void advance_tensor(const Advance& args, const uint64_t* words, int index) {
  constexpr int kGroupWords = 1 + kHyperparameters<Rule>;
  const uint64_t grad = words[args.groups * kGroupWords + index];
  const TensorRow& row = args.rows[index];
  Ready<Rule> ready = {};
  float factor = args.grad_scale ? 1 / *args.grad_scale : 1;
  if (grad && args.norm_sq) {
    const double norm = ::sqrt(*args.norm_sq) * factor;
    if (args.grad_norm) *args.grad_norm = static_cast<float>(norm);
    factor *= clip_factor(norm, args.max_grad_norm);
  }
  const bool skip = args.found_inf && *args.found_inf != 0;
  ready.grad = skip ? nullptr : reinterpret_cast<const void*>(grad);
  if (ready.grad && !args.place_only) {
    const auto group = read_group<Rule>(words + row.group * kGroupWords);
    const float step = *row.step + 1;
    *row.step = step;
    ready.grad_factor = group.maximize != 0 ? -factor : factor;
    ready.key = step_key(args.seed, step);
    ready.rule.begin_step(group, static_cast<double>(step));
    auto addresses =
        grad | reinterpret_cast<uintptr_t>(row.param) | reinterpret_cast<uintptr_t>(row.master);
    for (const void* state : row.states) addresses |= reinterpret_cast<uintptr_t>(state);
    ready.whole_units = addresses % 16 == 0 ? static_cast<int32_t>(row.numel / kWholeUnit) : 0;
    if (!ready.rule.is_usual()) ready.whole_units *= -1;
    if (row.fp8_scale) {  // delayed scaling: this step's scale comes from the last step's amax
      if (row.fp8_largest > 0 && *row.fp8_amax > 0) {
        const float scale = row.fp8_largest / *row.fp8_amax;
        *row.fp8_scale = scale < 3.402823466e+38f ? scale : 3.402823466e+38f;
        *row.fp8_amax = 0;
      }
      *row.fp8_scale_inv = 1 / *row.fp8_scale;
    }
  }
  static_cast<Ready<Rule>*>(args.ready)[index] = ready;
}

// ---- memory: N elements of a tensor, in registers or on a CPU thread's stack -------------------

constexpr int kTileThreads = 128;  // of a CTA on CUDA

// What a load does: read memory; only start a copy into the thread's stage, a part of shared memory
// that nobody else looks at; or read that copy.
enum class From { kMemory, kFetch, kStage };

// Elements of a tensor: runs of kRun that lie kRunStride apart, the first one at offset (which has
// zeros where the places have bits). Those past the last one are read as the last one, which
// changes no block's largest element, and are not written.
constexpr int kRunStride = 128;

template <int kRunLength, From kLoads = From::kMemory>
struct Span {
  static constexpr int kRun = kRunLength;
  int64_t offset;
  int64_t last;
  uint32_t stage = 0;  // shared address of what the CTA loads next
  static FUSEDOPT_HD int place(int i) { return i / kRun * kRunStride + i % kRun; }
  // Of kScaleBlock elements; 32 bits are enough, and fewer instructions.
  FUSEDOPT_HD uint32_t block() const {
#ifdef __CUDA_ARCH__  // the compiler would make it 64 bits again
    uint32_t block;
    asm("{.reg .b32 low, high; mov.b64 {low, high}, %1; shf.r.wrap.b32 %0, low, high, %2;}"
        : "=r"(block)
        : "l"(offset), "n"(kScaleBlockBits));
    return block;
#else
    return static_cast<uint32_t>(offset >> kScaleBlockBits);
#endif
  }
};

#if defined(__CUDACC__)
// The widest piece of memory that one instruction moves. A volatile load stays where it is written:
// before the first use of any value and before every store.
template <int kBytes>
struct Piece;
template <>
struct Piece<16> {
  uint32_t words[4];
  __device__ __forceinline__ void load(const void* source) {
    asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(source));
  }
  __device__ __forceinline__ void load_stage(uint32_t stage) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(stage)
                 : "memory");
  }
  __device__ __forceinline__ void store(void* target) const {
    __stcs(static_cast<uint4*>(target), make_uint4(words[0], words[1], words[2], words[3]));
  }
};
template <>
struct Piece<8> {
  uint32_t words[2];
  __device__ __forceinline__ void load(const void* source) {
    asm volatile("ld.global.cs.v2.u32 {%0, %1}, [%2];"
                 : "=r"(words[0]), "=r"(words[1])
                 : "l"(source));
  }
  __device__ __forceinline__ void load_stage(uint32_t stage) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                 : "=r"(words[0]), "=r"(words[1])
                 : "r"(stage)
                 : "memory");
  }
  __device__ __forceinline__ void store(void* target) const {
    __stcs(static_cast<uint2*>(target), make_uint2(words[0], words[1]));
  }
};
template <>
struct Piece<4> {
  uint32_t words[1];
  __device__ __forceinline__ void load(const void* source) {
    asm volatile("ld.global.cs.u32 %0, [%1];" : "=r"(words[0]) : "l"(source));
  }
  __device__ __forceinline__ void load_stage(uint32_t stage) {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(words[0]) : "r"(stage) : "memory");
  }
  __device__ __forceinline__ void store(void* target) const {
    __stcs(static_cast<uint32_t*>(target), words[0]);
  }
};

template <int kBytes>
__device__ __forceinline__ void fetch(const void* source, uint32_t stage) {
#if __CUDA_ARCH__ < 800
  Piece<kBytes> piece;
  piece.load(source);
  FUSEDOPT_UNROLL
  for (int i = 0; i < kBytes / 4; ++i) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(stage + 4 * i), "r"(piece.words[i]) : "memory");
  }
#else
  if constexpr (kBytes == 16) {  // the only size that can pass by the L1 cache
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(stage), "l"(source) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(stage), "l"(source), "n"(kBytes)
                 : "memory");
  }
#endif
}
#endif

template <bool kWhole, class T, int N, int kRun, From kFrom>
FUSEDOPT_HD void load(const void* base, Span<kRun, kFrom>& span, T (&out)[N]) {
  const T* source = static_cast<const T*>(base);
  if constexpr (kWhole) {
#ifdef __CUDA_ARCH__
    constexpr int kBytes = sizeof(T) * (kRun < N ? kRun : N);
    Piece<kBytes> pieces[sizeof out / sizeof(Piece<kBytes>)];
    constexpr int kOfPiece = sizeof pieces[0] / sizeof(T);
    FUSEDOPT_UNROLL
    for (int i = 0; i < N / kOfPiece; ++i) {
      const T* place = source + span.offset + span.place(i * kOfPiece);
      if constexpr (kFrom == From::kMemory) {
        pieces[i].load(place);
      } else {
        const uint32_t stage = span.stage + threadIdx.x * kBytes;
        span.stage += kTileThreads * kBytes;
        if constexpr (kFrom == From::kFetch) {
          fetch<kBytes>(place, stage);
        } else {
          pieces[i].load_stage(stage);
        }
      }
    }
    if constexpr (kFrom != From::kFetch) memcpy(out, pieces, sizeof out);
#else
    memcpy(out, source + span.offset, sizeof out);
#endif
  } else {
    FUSEDOPT_UNROLL
    for (int i = 0; i < N; ++i) {
      const int64_t index = span.offset + span.place(i);
      out[i] = source[index < span.last ? index : span.last];
    }
  }
}

template <bool kWhole, class T, int N, int kRun, From kFrom>
FUSEDOPT_HD void store(void* base, Span<kRun, kFrom> span, const T (&in)[N]) {
  T* target = static_cast<T*>(base);
  if constexpr (kWhole) {
#ifdef __CUDA_ARCH__
    constexpr int kBytes = sizeof(T) * (kRun < N ? kRun : N);
    Piece<kBytes> pieces[sizeof in / sizeof(Piece<kBytes>)];
    constexpr int kOfPiece = sizeof pieces[0] / sizeof(T);
    memcpy(pieces, in, sizeof in);
    FUSEDOPT_UNROLL
    for (int i = 0; i < N / kOfPiece; ++i) {
      pieces[i].store(target + span.offset + span.place(i * kOfPiece));
    }
#else
    memcpy(target + span.offset, in, sizeof in);
#endif
  } else {
    FUSEDOPT_UNROLL
    for (int i = 0; i < N; ++i) {
      const int64_t index = span.offset + span.place(i);
      if (index <= span.last) target[index] = in[i];
    }
  }
}

// The threads that hold one block of kScaleBlock elements together, N each.
template <int N>
struct Lanes {
  static constexpr int kCount = kScaleBlock / N;

  static FUSEDOPT_HD uint32_t largest(uint32_t x) {
#ifdef __CUDA_ARCH__
    static_assert(kCount == 32, "one warp holds one block");
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(0xffffffffu, x);
#else
    for (int distance = kCount / 2; distance > 0; distance /= 2) {
      x = max(x, __shfl_xor_sync(0xffffffffu, x, distance));
    }
    return x;
#endif
#else
    static_assert(kCount == 1, "one CPU thread holds one block");
    return x;
#endif
  }

  static FUSEDOPT_HD bool is_first() {
#ifdef __CUDA_ARCH__
    return threadIdx.x % kCount == 0;
#else
    return true;
#endif
  }

  static FUSEDOPT_HD void raise(float* target, uint32_t bits) {  // *target = max, both not negative
    auto* current = reinterpret_cast<uint32_t*>(target);
#ifdef __CUDA_ARCH__
    if (*static_cast<volatile uint32_t*>(current) < bits) atomicMax(current, bits);
#else
    uint32_t seen = __atomic_load_n(current, __ATOMIC_RELAXED);
    while (seen < bits && !__atomic_compare_exchange_n(current, &seen, bits, true, __ATOMIC_RELAXED,
                                                       __ATOMIC_RELAXED)) {
    }
#endif
  }
};

// The bits of the largest magnitude among values, to which NaN and infinity count too.
template <bool kNotNegative, int N>
FUSEDOPT_HD uint32_t largest_magnitude(const float (&values)[N]) {
#ifdef __CUDA_ARCH__
  uint32_t largest = 0;
  if constexpr (kNotNegative) {  // the order of bits is that of numbers; NaN is the largest
    FUSEDOPT_UNROLL
    for (int i = 0; i < N; ++i) largest = max(largest, float_bits(values[i]));
  } else {
    float magnitude = 0;
    FUSEDOPT_UNROLL
    for (int i = 0; i < N; ++i) magnitude = larger_magnitude_or_nan(magnitude, values[i]);
    largest = float_bits(magnitude);
  }
#else
  int32_t largest = 0;  // without a sign, and compared as vector units do best
  for (int i = 0; i < N; ++i) {
    const auto bits = static_cast<int32_t>(float_bits(values[i]) & 0x7fffffffu);
    largest = largest > bits ? largest : bits;
  }
#endif
  return static_cast<uint32_t>(largest);
}

// The same without NaN and infinity.
template <int N>
FUSEDOPT_HD uint32_t largest_finite(const float (&values)[N]) {
  uint32_t largest = 0;
  FUSEDOPT_UNROLL
  for (int i = 0; i < N; ++i) {
    const uint32_t bits = float_bits(values[i]) & 0x7fffffffu;
    if (bits < 0x7f800000u && bits > largest) largest = bits;
  }
  return largest;
}

// ---- slices: N elements of one stream ----------------------------------------------------------

template <class Stream, int N>
struct Slice {
  static constexpr int kBytes =
      N * sizeof(typename Stream::Storage) + (Stream::kBlockScaled ? sizeof(float) : 0);
  typename Stream::Storage raw[N];
  float scale;
  uint32_t largest;  // bits of the largest magnitude that will be written to the block

  template <bool kWhole, int kRun, From kFrom>
  FUSEDOPT_HD void load(const void* base, const float* scales, Span<kRun, kFrom>& span) {
    if constexpr (Stream::kBlockScaled) {
      float block[1];
      Span<1, kFrom> blocks = {span.block(), span.last >> kScaleBlockBits, span.stage};
      fusedopt::load<kWhole>(scales, blocks, block);
      span.stage = blocks.stage;
      scale = block[0];
    }
    fusedopt::load<kWhole>(base, span, raw);
  }

  template <bool kUsual>
  FUSEDOPT_HD void read(float (&values)[N]) {
    largest = Stream::template decode<kUsual>(raw, scale, values);
  }

  // Whether the block that `values` make is usual. Called for all slices before the first one is
  // written: what is unusual is left to others then.
  FUSEDOPT_HD bool measure(const float (&values)[N]) {
    if constexpr (Stream::kBlockScaled) {
      largest = Lanes<N>::largest(largest | largest_magnitude<Stream::kRoot>(values));
      return Stream::is_usual(largest);
    } else {
      return true;
    }
  }

  template <bool kWhole, bool kUsual, int kRun, From kFrom, class Math>
  FUSEDOPT_HD void write(void* base, float* scales, Span<kRun, kFrom> span,
                         const float (&values)[N], const Random<N>& random, int stream,
                         Math (&math)[N]) {
    float kept[N];
    FUSEDOPT_UNROLL
    for (int i = 0; i < N; ++i) {
      if constexpr (Stream::kRoot) {
        kept[i] = math[i].sqrt(values[i]);  // known already, mostly
      } else {
        kept[i] = values[i];
      }
    }
    float inverse = 1;
    bool usual = true;
    if constexpr (Stream::kBlockScaled) {
      usual = kUsual || Stream::is_usual(largest);
      if (usual) {
        scale = Stream::template scale_of<true>(largest);
      } else {
        scale = Stream::template scale_of<false>(Lanes<N>::largest(largest_finite(values)));
      }
      inverse = Approximate::inverse(scale);
      if (Lanes<N>::is_first() && (kWhole || span.offset <= span.last)) {
        scales[span.block()] = scale;
      }
    }
    Stream::template encode<kUsual>(kept, values, inverse, usual, random, stream, raw);
    store<kWhole>(base, span, raw);
  }
};

// The states of a rule, one slice each; state n draws random stream n.
template <int N, int kIndex, class Rule, class... Codes>
struct States {
  static constexpr int kBytes = 0;
  template <bool kWhole, int kRun, From kFrom>
  FUSEDOPT_HD void load(const TensorRow&, Span<kRun, kFrom>&) {}
  template <bool kUsual>
  FUSEDOPT_HD void read(float (&)[kMaxStates][N]) {}
  FUSEDOPT_HD bool measure(const float (&)[kMaxStates][N]) { return true; }
  template <bool kWhole, bool kUsual, int kRun, From kFrom, class Math>
  FUSEDOPT_HD void write(const TensorRow&, Span<kRun, kFrom>, float (&)[kMaxStates][N],
                         const Random<N>&, Math (&)[N]) {}
};

template <int N, int kIndex, class Rule, class Code, class... Codes>
struct States<N, kIndex, Rule, Code, Codes...> {
  Slice<Stream<Code, Rule::kRoles[kIndex]>, N> first;
  States<N, kIndex + 1, Rule, Codes...> rest;
  static constexpr int kBytes = decltype(first)::kBytes + decltype(rest)::kBytes;

  template <bool kWhole, int kRun, From kFrom>
  FUSEDOPT_HD void load(const TensorRow& row, Span<kRun, kFrom>& span) {
    first.template load<kWhole>(row.states[kIndex], row.state_scales[kIndex], span);
    rest.template load<kWhole>(row, span);
  }
  template <bool kUsual>
  FUSEDOPT_HD void read(float (&values)[kMaxStates][N]) {
    first.template read<kUsual>(values[kIndex]);
    rest.template read<kUsual>(values);
  }
  FUSEDOPT_HD bool measure(const float (&values)[kMaxStates][N]) {
    return first.measure(values[kIndex]) & rest.measure(values);
  }
  template <bool kWhole, bool kUsual, int kRun, From kFrom, class Math>
  FUSEDOPT_HD void write(const TensorRow& row, Span<kRun, kFrom> span,
                         float (&values)[kMaxStates][N], const Random<N>& random, Math (&math)[N]) {
    first.template write<kWhole, kUsual>(row.states[kIndex], row.state_scales[kIndex], span,
                                         values[kIndex], random, kIndex, math);
    rest.template write<kWhole, kUsual>(row, span, values, random, math);
  }
};

// The weight that a rule updates: the parameter and its master, in their three relations.
constexpr int kWeightStream = kMaxStates;  // its random stream

template <class P, bool kStochastic, class Master, int N>  // a master kept apart; P is only written
struct Weight {
  Slice<Stream<Master, Role::kWeight>, N> master;
  uint32_t largest = 0;  // bits of fp8 parameters' largest magnitude
  static constexpr int kBytes = decltype(master)::kBytes;
  static constexpr bool kIsFp8 = sizeof(typename P::Storage) == 1;  // one scale, of the last step

  template <bool kWhole, int kRun, From kFrom>
  FUSEDOPT_HD void load(const TensorRow& row, Span<kRun, kFrom>& span) {
    master.template load<kWhole>(row.master, row.master_scale, span);
  }
  template <bool kUsual>
  FUSEDOPT_HD void read(float (&values)[N]) {
    master.template read<kUsual>(values);
  }
  FUSEDOPT_HD bool measure(const float (&values)[N]) {
    if constexpr (kIsFp8 && !Master::kBlockScaled) {
      largest = Lanes<N>::largest(largest_magnitude<false>(values));
      return largest < 0x7f800000u;
    } else {
      return master.measure(values);
    }
  }
  template <bool kWhole, bool kUsual, int kRun, From kFrom>
  FUSEDOPT_HD void write(const TensorRow& row, Span<kRun, kFrom> span, float (&values)[N],
                         uint32_t key) {
    Exact no_roots[N];
    master.template write<kWhole, kUsual>(row.master, row.master_scale, span, values,
                                          Random<N>(key, span), kWeightStream, no_roots);
    if constexpr (Master::kBlockScaled) {
      master.template read<kUsual>(values);  // the parameter is what the master is
    }
    typename P::Storage raw[N];
    if constexpr (kIsFp8) {
      const float scale = *row.fp8_scale;
      if constexpr (!kUsual) {
        largest = Lanes<N>::largest(largest_finite(values));
      } else if constexpr (Master::kBlockScaled) {
        largest = Lanes<N>::largest(largest_magnitude<false>(values));
      }
      if (Lanes<N>::is_first() && (kWhole || span.offset <= span.last)) {
        Lanes<N>::raise(row.fp8_amax, largest);
      }
      float scaled[N];
      FUSEDOPT_UNROLL
      for (int i = 0; i < N; ++i) scaled[i] = values[i] * scale;
      encode_nearest<P>(scaled, raw);
    } else {
      encode_nearest<P>(values, raw);
    }
    store<kWhole>(row.param, span, raw);
  }
};

template <class P, bool kStochastic, int N>
struct Weight<P, kStochastic, None, N> {
  static constexpr int kBytes = N * sizeof(typename P::Storage);
  typename P::Storage raw[N];

  template <bool kWhole, int kRun, From kFrom>
  FUSEDOPT_HD void load(const TensorRow& row, Span<kRun, kFrom>& span) {
    fusedopt::load<kWhole>(row.param, span, raw);
  }
  template <bool kUsual>
  FUSEDOPT_HD void read(float (&values)[N]) const {
    decode<P>(raw, values);
  }
  FUSEDOPT_HD bool measure(const float (&)[N]) { return true; }
  template <bool kWhole, bool kUsual, int kRun, From kFrom>
  FUSEDOPT_HD void write(const TensorRow& row, Span<kRun, kFrom> span, float (&values)[N],
                         uint32_t key) {
    if constexpr (kStochastic) {
      P::stochastic(values, Random<N>(key, span), kWeightStream, raw);
    } else {
      encode_nearest<P>(values, raw);
    }
    store<kWhole>(row.param, span, raw);
  }
};

template <class P, bool kStochastic, class R, int N>
struct Weight<P, kStochastic, Split<R>, N> {
  static constexpr int kBytes = N * (sizeof(uint16_t) + sizeof(R));
  uint16_t half[N];
  R remainder[N];

  template <bool kWhole, int kRun, From kFrom>
  FUSEDOPT_HD void load(const TensorRow& row, Span<kRun, kFrom>& span) {
    fusedopt::load<kWhole>(row.param, span, half);
    fusedopt::load<kWhole>(row.master, span, remainder);
  }
  template <bool kUsual>
  FUSEDOPT_HD void read(float (&values)[N]) const {
    Split<R>::join(half, remainder, values);
  }
  FUSEDOPT_HD bool measure(const float (&)[N]) { return true; }
  template <bool kWhole, bool kUsual, int kRun, From kFrom>
  FUSEDOPT_HD void write(const TensorRow& row, Span<kRun, kFrom> span, float (&values)[N],
                         uint32_t key) {
    Split<R>::split(values, Random<N>(key, span), kWeightStream, half, remainder);
    store<kWhole>(row.param, span, half);
    store<kWhole>(row.master, span, remainder);
  }
};

// ---- update ------------------------------------------------------------------------------------

template <class... Streams>
constexpr size_t widest() {
  size_t bytes = 0;
  ((bytes = sizeof(typename Streams::Storage) > bytes ? sizeof(typename Streams::Storage) : bytes),
   ...);
  return bytes;
}

// How a signature is laid over threads (measured): 16-byte accesses of the widest stream, except
// that a block of kScaleBlock elements must be one warp's.
template <class S>
struct Layout;

template <class R, class P, class G, class M, bool kStochastic, class... Codes>
struct Layout<Signature<R, P, G, M, kStochastic, Codes...>> {
  static constexpr bool kBlockScaled =
      (Codes::kBlockScaled || ...) || M::kBlockScaled || sizeof(typename P::Storage) == 1;
  static constexpr bool kMasterScaled = M::kBlockScaled;
  static constexpr size_t kWidest = widest<P, G, M, Codes...>();
  static constexpr bool kOnlyFp32 = std::is_same_v<P, F32> && std::is_same_v<G, F32> &&
                                    std::is_same_v<M, None> && (std::is_same_v<Codes, F32> && ...);
  static constexpr bool kApproximate = kBlockScaled || kStochastic;
  static constexpr int kElements = kBlockScaled || kWidest < sizeof(float) ? 8 : 4;
  // Neighbouring threads access neighbouring pieces of at most 16 bytes.
  static constexpr int kRun = kElements * kWidest > 16 ? 4 : kElements;
  // Where registers are few, a row is read again for the stores rather than kept.
  static constexpr bool kReadsAgain = !kBlockScaled && (!kOnlyFp32 || sizeof...(Codes) == 3);
  // A thread does two slices, both fetched before the first one is computed, if enough of them find
  // registers that way.
  static constexpr bool kTwoSlices = kBlockScaled && !kMasterScaled && sizeof...(Codes) < 3;
  static constexpr bool kIsSplit =
      std::is_integral_v<typename M::Storage> && !std::is_same_v<M, None> && !M::kBlockScaled;
  static constexpr bool kOnlyWide = (std::is_same_v<M, None> || sizeof(typename M::Storage) == 4) &&
                                    ((sizeof(typename Codes::Storage) == 4) && ...);
  // Registers of a thread are bounded, so that enough warps wait for memory at once.
  static constexpr int kBlocksPerMultiprocessor = kElements == 4 ? (kOnlyWide ? 12 : 10)
                                                  : sizeof...(Codes) == 3
                                                      ? (kBlockScaled && kRun < kElements ? 5 : 6)
                                                  : kTwoSlices                ? 7
                                                  : kMasterScaled || kIsSplit ? 8
                                                                              : 9;
  template <int N>
  using WeightOf = Weight<P, kStochastic, M, N>;
  template <int N>
  using StatesOf = States<N, 0, R, Codes...>;
  static constexpr int kTile = kTileThreads * kElements * (kTwoSlices ? 2 : 1);
};

// One slice; the only place where numbers are read and written. kUsual: it does only what is mostly
// needed, and false means that it wrote nothing, for more is; all threads of a block say the same.
template <class S, int N, bool kWhole, bool kUsual, int kRun, From kFrom>
FUSEDOPT_HD bool update_slice(const TensorRow& row, const Ready<typename S::Rule>& ready,
                              Span<kRun, kFrom> span, const TensorRow& row_in_memory) {
  using Math = std::conditional_t<Layout<S>::kApproximate, Approximate, Exact>;
  using Grad = typename S::Grad;
  typename Layout<S>::template WeightOf<N> weight;
  typename Grad::Storage raw_grad[N];
  typename Layout<S>::template StatesOf<N> states;
  weight.template load<kWhole>(row, span);
  load<kWhole>(ready.grad, span, raw_grad);
  states.template load<kWhole>(row, span);

  float values[N], grad[N];
  float state[kMaxStates][N] = {};
  Math math[N];
  weight.template read<kUsual>(values);
  decode<Grad>(raw_grad, grad);
  states.template read<kUsual>(state);
  FUSEDOPT_UNROLL
  for (int i = 0; i < N; ++i) {
    float own[kMaxStates] = {state[0][i], state[1][i], state[2][i]};
    ready.rule.template apply<S::kStates, kUsual>(values[i], grad[i] * ready.grad_factor, own,
                                                  math[i]);
    for (int n = 0; n < S::kStates; ++n) state[n][i] = own[n];
  }
  const bool usual = weight.measure(values) & states.measure(state);
  if (kUsual && !usual) return false;
#ifdef __CUDA_ARCH__
  if (Layout<S>::kReadsAgain) asm volatile("" ::: "memory");
#endif
  const TensorRow target = Layout<S>::kReadsAgain ? row_in_memory : row;
  weight.template write<kWhole, kUsual>(target, span, values, ready.key);
  const Random<N> random(ready.key, span);
  states.template write<kWhole, kUsual>(target, span, state, random, math);
  return true;
}

#if defined(__CUDACC__)

// Where a thread's first element lies in the slices of its CTA.
template <int N, int kRun>
__device__ __forceinline__ int place_of_thread() {
  if (kRun == N) return threadIdx.x * N;
  return threadIdx.x / 32 * 32 * N + threadIdx.x % 32 * kRun;
}

// Whether a tile has a gradient, ends within its tensor, and in memory that wide accesses reach.
template <class S>
__device__ __forceinline__ bool is_whole(int32_t whole_units, uint32_t tile) {
  static_assert(Layout<S>::kTile % kWholeUnit == 0, "");
  return static_cast<int32_t>((tile + 1) * (Layout<S>::kTile / kWholeUnit)) <= whole_units;
}

// True of every whole tile; it makes the compiler load a row beside what says that the tile is
// whole, instead of afterwards.
template <class S>
__device__ __forceinline__ bool comes_along(const TensorRow& row) {
  auto addresses = reinterpret_cast<uintptr_t>(row.param);
  if (S::kStates > 0) addresses |= reinterpret_cast<uintptr_t>(row.states[0]);
  if (Layout<S>::kBlockScaled) addresses |= reinterpret_cast<uintptr_t>(row.state_scales[0]);
  if (Layout<S>::kMasterScaled) addresses |= reinterpret_cast<uintptr_t>(row.master_scale);
  return addresses % 4 == 0;
}

// Starts to copy what a slice reads into shared memory.
template <class S, int N, int kRun>
__device__ __forceinline__ void fetch_slice(const TensorRow& row,
                                            const Ready<typename S::Rule>& ready,
                                            Span<kRun, From::kFetch> span) {
  typename Layout<S>::template WeightOf<N> weight;
  typename S::Grad::Storage raw_grad[N];
  typename Layout<S>::template StatesOf<N> states;
  weight.template load<true>(row, span);
  load<true>(ready.grad, span, raw_grad);
  states.template load<true>(row, span);
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Until all slices but the last kBehind are there.
template <int kBehind>
__device__ __forceinline__ void wait_for_slices() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kBehind) : "memory");
#endif
}

template <int kWords>
struct Words {
  uint64_t words[kWords];
};

constexpr int kMaxWords = 3900;  // kernel parameters end at 32764 bytes
static_assert(sizeof(Advance) + sizeof(Words<kMaxWords>) <= 32764, "");

constexpr int kAdvanceThreads = 128;

template <class Rule, int kWords>
__global__ void __launch_bounds__(kAdvanceThreads)
    advance_kernel(const __grid_constant__ Advance args,
                   const __grid_constant__ Words<kWords> list) {
  const int index = blockIdx.x * blockDim.x + threadIdx.x;
  if (index < args.tensors) advance_tensor<Rule>(args, list.words, index);
}

template <class Rule>
__global__ void __launch_bounds__(kAdvanceThreads)
    advance_far_kernel(const __grid_constant__ Advance args, const uint64_t* words) {
  const int index = blockIdx.x * blockDim.x + threadIdx.x;
  if (index < args.tensors) advance_tensor<Rule>(args, words, index);
}

// A table of every tile's tensor would take fewer instructions, but each of its entries is read
// once, from far away, and everything else waits for that.
__device__ __forceinline__ int tensor_of(const TileIndex& index, uint32_t tile) {
  int tensor = 0;
  FUSEDOPT_UNROLL
  for (int level = 0; level < TileIndex::kMaxLevels; ++level) {
    if (level == index.levels) break;
    const uint32_t* node = index.starts + index.offsets[level] + tensor * TileIndex::kFanOut;
    static_assert(TileIndex::kFanOut == 2 * 32, "two entries a thread");
    const uint2 starts = reinterpret_cast<const uint2*>(node)[threadIdx.x % 32];
    tensor = tensor * TileIndex::kFanOut - 1 +
             __popc(__ballot_sync(0xffffffffu, starts.x <= tile)) +
             __popc(__ballot_sync(0xffffffffu, starts.y <= tile));
  }
  return tensor;
}

// Which tile of which tensor is the CTA's.
struct Place {
  int tensor;
  uint32_t tile;
  __device__ __forceinline__ explicit Place(const TileIndex& index)
      : tensor(tensor_of(index, blockIdx.x)), tile(blockIdx.x - index.first_tiles[tensor]) {}
};

// Slices that reach over their tensor's end, whose memory is not aligned, whose rule has more to do
// than usual, or whose numbers are unusual: those of a tile from the first on. Neither inlined nor
// given what is read already: that would cost the others registers and instructions.
template <class S, int N, int kRun>
__device__ __noinline__ void update_unusual(const TensorRow* rows, const void* readies, int tensor,
                                            uint32_t tile, int first) {
  const TensorRow row = rows[tensor];
  const auto ready = static_cast<const Ready<typename S::Rule>*>(readies)[tensor];
  constexpr int kTile = Layout<S>::kTile, kSlice = kTileThreads * N;
  const bool whole = Layout<S>::kApproximate && is_whole<S>(abs(ready.whole_units), tile);
  const int64_t begin = static_cast<int64_t>(tile) * kTile;
  Span<kRun> span = {begin + place_of_thread<N, kRun>(), row.numel - 1};
#pragma unroll 1
  for (int slice = 0; slice < kTile / kSlice; ++slice) {
    if (slice >= first) {
      if (whole) {
        update_slice<S, N, true, false>(row, ready, span, row);
      } else if (begin + slice * kSlice < row.numel) {
        update_slice<S, N, false, false>(row, ready, span, row);
      }
    }
    span.offset += kSlice;
  }
}

// The same for who found out late. It looks for its place anew, so that nothing has to be kept.
template <class S, int N, int kRun>
__device__ __noinline__ void update_rest(const Update& args, int first) {
  const Place place(args.index);
  update_unusual<S, N, kRun>(args.rows, args.ready, place.tensor, place.tile, first);
}

// One tile, of which a thread does N elements, or N in each half if it does two slices. A single
// look at everything lets all of it be read side by side.
template <class S, int N, int kRun>
__device__ __forceinline__ void update_tile(const Update& args) {
  const Place place(args.index);
  const TensorRow* rows = args.rows;
  const TensorRow row = rows[place.tensor];  // copied: no store can change it
  const auto ready = static_cast<const Ready<typename S::Rule>*>(args.ready)[place.tensor];
  constexpr int kSlice = kTileThreads * N;
  const int64_t begin = static_cast<int64_t>(place.tile) * Layout<S>::kTile;
  const int64_t offset = begin + place_of_thread<N, kRun>(), last = row.numel - 1;
  // Where arithmetic is the bottleneck, what is mostly not needed has code of its own.
  constexpr bool kOnlyUsual = Layout<S>::kApproximate;
  const int32_t whole_units = kOnlyUsual ? ready.whole_units : abs(ready.whole_units);
  if (is_whole<S>(whole_units, place.tile) && comes_along<S>(row)) {
    if constexpr (Layout<S>::kTwoSlices) {
      constexpr int kBytes = kTileThreads * (Layout<S>::template WeightOf<N>::kBytes +
                                             N * sizeof(typename S::Grad::Storage) +
                                             Layout<S>::template StatesOf<N>::kBytes);
      __shared__ alignas(16) char stages[2 * kBytes];
      const auto stage = static_cast<uint32_t>(__cvta_generic_to_shared(stages));
      fetch_slice<S, N, kRun>(row, ready, {offset, last, stage});
      fetch_slice<S, N, kRun>(row, ready, {offset + kSlice, last, stage + kBytes});
      using Staged = Span<kRun, From::kStage>;
      wait_for_slices<1>();
      if (!update_slice<S, N, true, kOnlyUsual>(row, ready, Staged{offset, last, stage},
                                                rows[place.tensor])) {
        wait_for_slices<0>();
        return update_rest<S, N, kRun>(args, 0);
      }
      wait_for_slices<0>();
      Staged second = {offset + kSlice, last, stage + kBytes};
      // Registers are for numbers: a row is read again, and addresses are computed anew.
      asm volatile("" : "+l"(second.offset));
      if (!update_slice<S, N, true, kOnlyUsual>(rows[place.tensor], ready, second,
                                                rows[place.tensor])) {
        update_rest<S, N, kRun>(args, 1);
      }
    } else if (!update_slice<S, N, true, kOnlyUsual>(row, ready, Span<kRun>{offset, last},
                                                     rows[place.tensor])) {
      update_rest<S, N, kRun>(args, 0);
    }
  } else if (ready.grad) {
    update_unusual<S, N, kRun>(rows, args.ready, place.tensor, place.tile, 0);
  }
}

template <class S>
__global__ void __launch_bounds__(kTileThreads, Layout<S>::kBlocksPerMultiprocessor)
    update_kernel(const __grid_constant__ Update args) {
  update_tile<S, Layout<S>::kElements, Layout<S>::kRun>(args);
}

// The words in the smallest launch that holds them: what is not there need not be sent.
template <class Rule, int kWords, int... kMore>
void launch_advance(const Advance& args, const uint64_t* words, int num_words,
                    cudaStream_t stream) {
  const int blocks = (args.tensors + kAdvanceThreads - 1) / kAdvanceThreads;
  if (num_words <= kWords) {
    Words<kWords> list;
    memcpy(list.words, words, num_words * sizeof(uint64_t));
    advance_kernel<Rule, kWords><<<blocks, kAdvanceThreads, 0, stream>>>(args, list);
  } else if constexpr (sizeof...(kMore) > 0) {
    launch_advance<Rule, kMore...>(args, words, num_words, stream);
  } else {
    advance_far_kernel<Rule><<<blocks, kAdvanceThreads, 0, stream>>>(args, words);
  }
}

template <class S>
constexpr Kernels make_kernels() {
  using Rule = typename S::Rule;
  return {
      Layout<S>::kTile,
      sizeof(Ready<Rule>),
      kHyperparameters<Rule>,
      kMaxWords,
      [](const Advance& args, const uint64_t* words, int32_t num_words, void* stream) -> int {
        launch_advance<Rule, 240, 1200, kMaxWords>(args, words, num_words,
                                                   static_cast<cudaStream_t>(stream));
        return cudaGetLastError();
      },
      [](const Update& args, void* stream) -> int {
        update_kernel<S><<<static_cast<unsigned>(args.num_tiles), kTileThreads, 0,
                           static_cast<cudaStream_t>(stream)>>>(args);
        return cudaGetLastError();
      },
  };
}

#endif

}  // namespace fusedopt
