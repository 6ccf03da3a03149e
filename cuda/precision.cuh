// The dtypes: decode, encode, block scales, stochastic rounding, the two halves of a split master.
// Host and device share every line except the few that name an instruction. Knows no optimizer.
#pragma once

#include <cmath>
#include <cstring>
#include <type_traits>

#include "fusedopt.h"

namespace fusedopt {

// What a stream means decides how it is kept when its dtype is narrow: a second moment as its
// square root and never rounded to zero; a running maximum likewise, but rounded to nearest. What
// forgets nothing (a maximum, a weight) has scales that are powers of two: a block's values are not
// rounded anew whenever its largest one moves.
enum class Role { kMoment, kSecondMoment, kMaximum, kWeight };

FUSEDOPT_HD uint32_t float_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

FUSEDOPT_HD float bits_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

FUSEDOPT_HD float power_of_two(int exponent) {  // -126 to 127
  return bits_float(static_cast<uint32_t>(exponent + 127) << 23);
}

// Without a rounding in between. nvcc is told to contract nothing else, so that it is the same on
// every GPU; a host compiler contracts where it can (its builtin would keep loops from being
// vectorized).
FUSEDOPT_HD float fused_multiply_add(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return a * b + c;
#endif
}

FUSEDOPT_HD bool is_finite(float x) { return fabsf(x) <= 3.402823466e+38f; }

FUSEDOPT_HD float larger_or_nan(float a, float b) { return b > a || b != b ? b : a; }

// Math of a signature: IEEE where it is free; approximate (1 to 2 ulp) where block-scaled streams
// make arithmetic the bottleneck on CUDA.
struct Exact {
  FUSEDOPT_HD float sqrt(float x) { return ::sqrtf(x); }
  static FUSEDOPT_HD float inverse(float x) { return 1 / x; }
  static FUSEDOPT_HD float denominator(float root, float factor, float eps) {
    return fused_multiply_add(root, factor, eps);
  }
  static FUSEDOPT_HD float minus_quotient(float x, float a, float b) { return x - a / b; }
};

struct Approximate {
  // The last root: a rule takes that of the second moment, and so does writing it. The comparison
  // is of one value with itself there, so the compiler drops it and the second root.
  float argument, root;
  bool known = false;

  // Zero of a subnormal number: whoever keeps roots has to look at those.
  FUSEDOPT_HD float sqrt(float x) {
    if (known && float_bits(x) == float_bits(argument)) return root;
    known = true;
    argument = x;
#ifdef __CUDA_ARCH__
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(x));
#else
    root = ::sqrtf(x);
#endif
    return root;
  }

  // x is a sum with eps or a block's scale: not subnormal where it matters.
  static FUSEDOPT_HD float inverse(float x) {
#ifdef __CUDA_ARCH__
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
    return inverse;
#else
    return 1 / x;
#endif
  }

  static FUSEDOPT_HD float denominator(float root, float factor, float eps) {
#ifdef __CUDA_ARCH__
    // Without an eps, what counts as a root of zero must not be divided by: it is at most 2^-63.
    eps = fmaxf(eps, factor * power_of_two(-63));
#endif
    return fused_multiply_add(root, factor, eps);
  }

  static FUSEDOPT_HD float minus_quotient(float x, float a, float b) {
    return fused_multiply_add(-a, inverse(b), x);
  }
};

// ---- random bits -----------------------------------------------------------------------------
// A counter-based hash: the same bits in every backend, replay, resume and replica. Its step folds
// the halves of a 32 x 32 -> 64 bit product, two instructions.

FUSEDOPT_HD uint32_t fold_product(uint32_t x, uint32_t factor) {
#ifdef __CUDA_ARCH__  // the compiler would multiply twice
  uint32_t low, high;
  asm("{.reg .b64 product; mul.wide.u32 product, %2, %3; mov.b64 {%0, %1}, product;}"
      : "=r"(low), "=r"(high)
      : "r"(x), "r"(factor));
  return high ^ low;
#else
  const uint64_t product = uint64_t{x} * factor;
  return static_cast<uint32_t>(product >> 32) ^ static_cast<uint32_t>(product);
#endif
}

FUSEDOPT_HD uint32_t hash32(uint32_t x) {
  x = fold_product(x ^ 0x243f6a88u, 0x9e3779b1u);
  return fold_product(x ^ 0x85a308d3u, 0xc2b2ae3du);
}

constexpr uint32_t kStreamSalt = 0x9e3779b9u;

FUSEDOPT_HD uint32_t step_key(uint32_t seed, float step) {
  return hash32(hash32(seed) + static_cast<uint32_t>(step));
}

// kBits random bits for each of N elements in two streams: the highest ones of a draw times a
// factor, so that one draw serves neighbours and both streams.
template <int kBits, int N>
struct Random {
  static constexpr int kPerDraw = 32 / kBits;
  uint32_t draws[N < kPerDraw ? 1 : N / kPerDraw];
  int first;  // element, of its draw

  template <class Span>  // of multi_tensor.cuh
  FUSEDOPT_HD Random(uint32_t key, uint32_t pair_of_streams, Span span)
      : first(N < kPerDraw ? static_cast<int>(span.offset % kPerDraw) : 0) {
    const uint64_t draw = static_cast<uint64_t>(span.offset) / kPerDraw;
    const uint32_t base = hash32(key + pair_of_streams * kStreamSalt) ^
                          static_cast<uint32_t>(draw) ^
                          static_cast<uint32_t>(draw >> 32) * kStreamSalt;
    FUSEDOPT_UNROLL
    for (int i = 0; i < N; i += kPerDraw) {
      draws[i / kPerDraw] = hash32(base ^ static_cast<uint32_t>(Span::place(i) / kPerDraw));
    }
  }

  FUSEDOPT_HD void bits(int stream, uint32_t (&out)[N]) const {
    constexpr uint32_t kFactors[] = {1, 0xf80ff809u, 0xeee93e3du, 0x78230551u};
    constexpr int kOfDraw = N < kPerDraw ? N : kPerDraw;
    FUSEDOPT_UNROLL
    for (int i = 0; i < N; i += kOfDraw) {
      for (int j = 0; j < kOfDraw; ++j) {
        const uint32_t factor = kFactors[((first + j) % kPerDraw + stream * kPerDraw) % 4];
        out[i + j] = draws[i / kPerDraw] * factor >> (32 - kBits);
      }
    }
  }
};

// ---- codes: how one number is written ----------------------------------------------------------
// decode and encode work on N numbers, because instructions that convert do so in pairs. A code
// gives both for one number.

struct F32 {
  using Storage = float;
  static constexpr bool kBlockScaled = false;
  static FUSEDOPT_HD float decode(float x) { return x; }
  static FUSEDOPT_HD float nearest(float x) { return x; }
  static FUSEDOPT_HD float stochastic(float x, uint32_t) { return x; }
};

struct BF16 {
  using Storage = uint16_t;
  static constexpr bool kBlockScaled = false;
  static FUSEDOPT_HD float decode(uint16_t x) { return bits_float(uint32_t{x} << 16); }
  static FUSEDOPT_HD uint16_t nearest(float x) {
    const uint32_t bits = float_bits(x);
    return pick(x, bits + 0x7fffu + ((bits >> 16) & 1));
  }
  static FUSEDOPT_HD uint16_t stochastic(float x, uint32_t random) {
    return pick(x, float_bits(x) + random);
  }

 private:
  static FUSEDOPT_HD uint16_t pick(float x, uint32_t rounded) {
    return x == x ? static_cast<uint16_t>(rounded >> 16) : 0x7fff;
  }
};

// A float of kMantissa explicit bits with subnormals, narrower than fp32 in range. kTop is the
// exponent that a block's largest element gets; kLargest, kInfinity and kNan are codes. nearest()
// of more than the largest finite number saturates for fp8 and is infinite for fp16, as a cast is.
template <class S, int kMantissa, int kBias, int kTopExponent, uint32_t kLargest,
          uint32_t kInfinity, uint32_t kNan>
struct Minifloat {
  using Storage = S;
  static constexpr bool kBlockScaled = true;
  static constexpr int kTop = kTopExponent;
  static constexpr int kMantissaBits = kMantissa;
  static constexpr int kSmallestNormal = 1 - kBias;

  static FUSEDOPT_HD float decode(S code) {
    const uint32_t magnitude = code & kMagnitude;
    // Placed at the bottom of fp32's exponent range, subnormals included, then scaled up: exact.
    float x = bits_float(magnitude << kDrop) * power_of_two(127 - kBias);
    if (magnitude > kLargest) x = magnitude == kInfinity ? bits_float(0x7f800000u) : NAN;
    return bits_float(float_bits(x) | (uint32_t{code} & kSign) << (32 - kBits));
  }

  static FUSEDOPT_HD S nearest(float x) {
    const float magnitude = fabsf(x);
    const uint32_t bits = float_bits(magnitude);
    uint32_t code = ((bits + (1u << (kDrop - 1)) - 1 + ((bits >> kDrop) & 1)) >> kDrop) -
                    (uint32_t{127 - kBias} << kMantissa);
    if (magnitude < power_of_two(kSmallestNormal)) {
      code = static_cast<uint32_t>(rintf(magnitude * power_of_two(kMantissa - kSmallestNormal)));
    } else if (code > kLargest) {
      code = sizeof(S) == 1 ? kLargest : kInfinity;
    }
    if (x != x) code = kNan;
    return static_cast<S>(code | float_bits(x) >> 31 << (kBits - 1));
  }

  // A number of this format next to x, the upper with the probability of x's distance to the lower.
  // `random` has 16 bits. In units of 2^-16 of a step of this format they are noise
  // in [0, 1) after an offset of 128 steps; the sum is rounded to about such units, so that a value
  // a few ulp of fp32 off a number of this format always returns to it. fp16 leaves no room for
  // that: its noise is a middle of fewer intervals. x is finite or NaN.
  static FUSEDOPT_HD float dither(float x, uint32_t random) {
    constexpr int32_t kUnit = (16 + kMantissa) << 23;
    const auto tiny = static_cast<int32_t>(float_bits(power_of_two(kSmallestNormal)));
    const auto exponent = static_cast<int32_t>(float_bits(x) & 0x7f800000u);
    if constexpr (kMantissa > 7) random = (random & 0xffc0u) | 0x20u;
    const float noise = bits_float(0x4b000000u + random);  // 2^23 + random
#ifdef __CUDA_ARCH__
    const float unit = bits_float(__viaddmax_s32(exponent, -kUnit, tiny - kUnit));
    const float raised = __fmaf_rn(noise, unit, x);
    // A number this large has no bits below a step: adding it, rounded down, is floor.
    constexpr float kFloor = 1.5f * (1ull << 39);
    return __fmaf_rn(unit, -kFloor, __fmaf_rz(unit, kFloor - 8388608.0f, raised));
#else
    const int32_t binade = exponent > tiny ? exponent : tiny;
    const float raised = noise * bits_float(binade - kUnit) + x;
    const float step = bits_float(binade - (kMantissa << 23));
    const float steps = floorf(raised * bits_float((254 << 23) - float_bits(step)));
    return (steps - 128) * step;
#endif
  }

 private:
  static constexpr int kBits = 8 * sizeof(S);
  static constexpr int kDrop = 23 - kMantissa;
  static constexpr uint32_t kSign = 1u << (kBits - 1);
  static constexpr uint32_t kMagnitude = kSign - 1;
};

using F16 = Minifloat<uint16_t, 10, 15, 14, 0x7bff, 0x7c00, 0x7e00>;
using E4M3 = Minifloat<uint8_t, 3, 7, 8, 0x7e, 0xff, 0x7f>;  // has no infinity
using E5M2 = Minifloat<uint8_t, 2, 15, 14, 0x7b, 0x7c, 0x7f>;

// N numbers at once: on CUDA by pairs, as the converting instructions do.
template <class Code, int N>
FUSEDOPT_HD void decode(const typename Code::Storage (&raw)[N], float (&values)[N]) {
#ifdef __CUDA_ARCH__
  constexpr bool kFp8 = std::is_same_v<Code, E4M3> || std::is_same_v<Code, E5M2>;
  constexpr bool kHardware =
      std::is_same_v<Code, BF16> || std::is_same_v<Code, F16> || (kFp8 && __CUDA_ARCH__ >= 890);
#else
  constexpr bool kHardware = false;
#endif
  if constexpr (!kHardware) {
    FUSEDOPT_UNROLL
    for (int i = 0; i < N; ++i) values[i] = Code::decode(raw[i]);
  } else {
#ifdef __CUDA_ARCH__
    uint32_t words[sizeof raw / 4];
    memcpy(words, raw, sizeof raw);
    FUSEDOPT_UNROLL
    for (int i = 0; i < N; i += 2) {
      uint32_t pair = words[i * sizeof raw[0] / 4];
      if constexpr (kFp8) {
        const uint16_t codes = static_cast<uint16_t>(i % 4 ? pair >> 16 : pair);
        if constexpr (std::is_same_v<Code, E4M3>) {
          asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(codes));
        } else {
          asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(pair) : "h"(codes));
        }
      }
      if constexpr (std::is_same_v<Code, BF16>) {
        values[i] = bits_float(pair << 16);
        values[i + 1] = bits_float(pair & 0xffff0000u);
      } else {
        asm("{.reg .b16 low, high; mov.b32 {low, high}, %2;\n\t"
            "cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
            : "=f"(values[i]), "=f"(values[i + 1])
            : "r"(pair));
      }
    }
#endif
  }
}

template <class Code, int N>
FUSEDOPT_HD void encode_nearest(const float (&values)[N], typename Code::Storage (&raw)[N]) {
#ifdef __CUDA_ARCH__
  constexpr bool kFp8 = std::is_same_v<Code, E4M3> || std::is_same_v<Code, E5M2>;
  constexpr bool kHalf = std::is_same_v<Code, BF16> || std::is_same_v<Code, F16>;
  constexpr bool kHardware = (kHalf && __CUDA_ARCH__ >= 800) || (kFp8 && __CUDA_ARCH__ >= 890);
#else
  constexpr bool kHardware = false;
#endif
  if constexpr (!kHardware) {
    FUSEDOPT_UNROLL
    for (int i = 0; i < N; ++i) raw[i] = Code::nearest(values[i]);
  } else {
#ifdef __CUDA_ARCH__
    FUSEDOPT_UNROLL
    for (int i = 0; i < N; i += 2) {
      uint32_t pair;
      uint16_t codes;
      if constexpr (std::is_same_v<Code, BF16>) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(values[i + 1]), "f"(values[i]));
      } else if constexpr (std::is_same_v<Code, F16>) {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(values[i + 1]), "f"(values[i]));
      } else if constexpr (std::is_same_v<Code, E4M3>) {
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
            : "=h"(codes)
            : "f"(values[i + 1]), "f"(values[i]));
      } else {
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;"
            : "=h"(codes)
            : "f"(values[i + 1]), "f"(values[i]));
      }
      if constexpr (kFp8) {
        memcpy(&raw[i], &codes, sizeof codes);
      } else {
        memcpy(&raw[i], &pair, sizeof pair);
      }
    }
#endif
  }
}

// ---- streams: how a tensor of numbers is kept ---------------------------------------------------

template <class C, Role kRole>
struct Stream {
  using Code = C;
  using Storage = typename Code::Storage;
  static constexpr bool kBlockScaled = Code::kBlockScaled;
  static constexpr bool kIsSquare = kRole == Role::kSecondMoment || kRole == Role::kMaximum;
  static constexpr bool kForgets = kRole == Role::kMoment || kRole == Role::kSecondMoment;
  static constexpr bool kRoot = kBlockScaled && kIsSquare;
  static constexpr bool kKeepsNonzero = kIsSquare && sizeof(Storage) < sizeof(float);

  template <int N>
  static FUSEDOPT_HD void decode(const Storage (&raw)[N], float scale, float (&values)[N]) {
    fusedopt::decode<Code>(raw, values);
    if constexpr (kBlockScaled) {
      FUSEDOPT_UNROLL
      for (int i = 0; i < N; ++i) {
        values[i] *= scale;
        if constexpr (kRoot) values[i] *= values[i];
      }
    }
  }

  // The scale of a block from the bits of its largest finite magnitude.
  static FUSEDOPT_HD float scale_of(uint32_t largest_bits) {
    if (largest_bits == 0) return 1;
    float largest = bits_float(largest_bits);
    if (kRoot) largest = ::sqrtf(largest);
    if (!kForgets) {  // the power of two above it, also after it is rounded
      const uint32_t half_a_step = 1u << (22 - Code::kMantissaBits);
      largest = bits_float((float_bits(largest) + half_a_step) & 0x7f800000u) * 2;
    }
    const float scale = largest * power_of_two(-Code::kTop);
    return scale > power_of_two(-126) ? scale : power_of_two(-126);
  }

  // Overwrites `values`: the numbers, or where roots are kept those of `squares`.
  template <int N>
  static FUSEDOPT_HD void encode(float (&values)[N], const float (&squares)[N], float inverse_scale,
                                 bool all_finite, const Random<16, N>& random, int stream,
                                 Storage (&raw)[N]) {
    if constexpr (kBlockScaled) {
      FUSEDOPT_UNROLL
      for (int i = 0; i < N; ++i) values[i] *= inverse_scale;
      if (!all_finite) {  // in a block what is infinite becomes NaN
        FUSEDOPT_UNROLL
        for (int i = 0; i < N; ++i) {
          values[i] = is_finite(values[i]) ? values[i] : NAN;
        }
      }
      if constexpr (kKeepsNonzero) {
        constexpr float kSmallest = 1.0f / (1 << (Code::kMantissaBits - Code::kSmallestNormal));
        uint32_t smallest = float_bits(kSmallest);  // the order of bits is that of roots
        FUSEDOPT_UNROLL
        for (int i = 0; i < N; ++i) {
          const uint32_t bits = float_bits(values[i]);
          smallest = bits < smallest ? bits : smallest;
        }
        if (smallest < float_bits(kSmallest)) {  // rare: 2^17 below the block's largest
          FUSEDOPT_UNROLL
          for (int i = 0; i < N; ++i) {
            if (squares[i] < power_of_two(-126)) values[i] = ::sqrtf(squares[i]) * inverse_scale;
            if (squares[i] > 0 && values[i] < kSmallest) values[i] = kSmallest;
          }
        }
      }
      if constexpr (kRole != Role::kMaximum) {
        uint32_t bits[N];
        random.bits(stream, bits);
        FUSEDOPT_UNROLL
        for (int i = 0; i < N; ++i) values[i] = Code::dither(values[i], bits[i]);
      }
      encode_nearest<Code>(values, raw);
    } else if constexpr (kRole == Role::kMaximum) {
      encode_nearest<Code>(values, raw);
    } else {
      uint32_t bits[N];
      random.bits(stream, bits);
      FUSEDOPT_UNROLL
      for (int i = 0; i < N; ++i) raw[i] = Code::stochastic(values[i], bits[i]);
    }
    if constexpr (kKeepsNonzero && !kBlockScaled) {
      FUSEDOPT_UNROLL
      for (int i = 0; i < N; ++i) {
        if (raw[i] == 0 && values[i] > 0) raw[i] = 1;
      }
    }
  }
};

// ---- split masters: a bf16 parameter and a remainder -------------------------------------------
// The bf16 half is the value rounded to nearest; the remainder is what is missing, as a signed
// number. A tie rounds away from zero: with ties to even, 65537 values share an even bf16 half and
// 16 bits could not tell them apart.

template <class R>
struct Split {
  using Storage = R;
  static constexpr bool kBlockScaled = false;
  static constexpr int kMissing = 16 - 8 * static_cast<int>(sizeof(R));  // bits not kept at all

  template <int N>
  static FUSEDOPT_HD void join(const uint16_t (&halves)[N], const R (&remainders)[N],
                               float (&values)[N]) {
#ifdef __CUDA_ARCH__
    uint32_t words[N / 2], missing[sizeof remainders / 4];
    memcpy(words, halves, sizeof halves);
    memcpy(missing, remainders, sizeof remainders);
    FUSEDOPT_UNROLL
    for (int i = 0; i < N; i += 4) {
      const uint32_t first = missing[i * sizeof(R) / 4], second = missing[(i + 2) * sizeof(R) / 4];
      values[i] = bits_float((words[i / 2] << 16) + extended<0>(first));
      values[i + 1] = bits_float((words[i / 2] & 0xffff0000u) + extended<1>(first));
      values[i + 2] = bits_float((words[i / 2 + 1] << 16) + extended<2>(second));
      values[i + 3] = bits_float((words[i / 2 + 1] & 0xffff0000u) + extended<3>(second));
    }
#else
    for (int i = 0; i < N; ++i) {
      values[i] = bits_float((uint32_t{halves[i]} << 16) +
                             static_cast<uint32_t>(int32_t{remainders[i]} * (1 << kMissing)));
    }
#endif
  }

  // random gives kMissing bits; they change no infinity's remainder.
  template <int N>
  static FUSEDOPT_HD void split(const float (&values)[N], const Random<8, N>& random,
                                uint16_t (&halves)[N], R (&remainders)[N]) {
    uint32_t bits[N] = {};
    if constexpr (kMissing > 0) random.bits(0, bits);
    FUSEDOPT_UNROLL
    for (int i = 0; i < N; ++i) {
      bits[i] += values[i] == values[i] ? float_bits(values[i]) : 0x7fc00000u;
    }
#ifdef __CUDA_ARCH__
    uint32_t words[N / 2], missing[sizeof remainders / 4];
    FUSEDOPT_UNROLL
    for (int i = 0; i < N; i += 2) {
      words[i / 2] = __byte_perm(bits[i] + 0x8000u, bits[i + 1] + 0x8000u, 0x7632);
      if constexpr (sizeof(R) == 2) {
        missing[i / 2] = __byte_perm(bits[i], bits[i + 1], 0x5410);
      } else if (i % 4 == 2) {
        missing[i / 4] = __byte_perm(__byte_perm(bits[i - 2], bits[i - 1], 0x51),
                                     __byte_perm(bits[i], bits[i + 1], 0x51), 0x5410);
      }
    }
    memcpy(halves, words, sizeof halves);
    memcpy(remainders, missing, sizeof remainders);
#else
    for (int i = 0; i < N; ++i) {
      halves[i] = static_cast<uint16_t>((bits[i] + 0x8000u) >> 16);
      remainders[i] = static_cast<R>(bits[i] >> kMissing);
    }
#endif
  }

 private:
#ifdef __CUDA_ARCH__
  // A remainder within its word, sign-extended, at its place. A selector names the bytes of the
  // result (4: zero; with 8: the sign of a byte, which __byte_perm knows not).
  template <int kIndex>
  static __device__ __forceinline__ uint32_t extended(uint32_t word) {
    constexpr uint32_t kSelector =
        sizeof(R) == 2 ? 0x9910 + kIndex % 2 * 0x2222 : 0x8804 + kIndex * 0x1110;
    uint32_t bits;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(bits) : "r"(word), "n"(kSelector));
    return bits;
  }
#endif
};

using Remainder16 = Split<int16_t>;
using Remainder8 = Split<int8_t>;

}  // namespace fusedopt
