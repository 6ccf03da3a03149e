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

// 2^exponent, -126 to 127.
FUSEDOPT_HD constexpr float power_of_two(int exponent) {
  float power = 1;
  for (; exponent > 0; --exponent) power *= 2;
  for (; exponent < 0; ++exponent) power /= 2;
  return power;
}

FUSEDOPT_HD constexpr uint32_t bits_of_power(int exponent) {
  return static_cast<uint32_t>(127 + exponent) << 23;
}

FUSEDOPT_HD float bits_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
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

// With a NaN to which 16 bits can be added. A GPU's arithmetic gives 0x7fffffff for NaN.
FUSEDOPT_HD uint32_t bits_or_nan(float x) {
#ifdef __CUDA_ARCH__
  return static_cast<uint32_t>(min(static_cast<int32_t>(float_bits(x)), 0x7fc00000));
#else
  return x == x ? float_bits(x) : 0x7fc00000u;
#endif
}

FUSEDOPT_HD bool is_finite(float x) { return fabsf(x) <= 3.402823466e+38f; }

#ifdef __CUDA_ARCH__
__device__ __forceinline__ float larger_magnitude_or_nan(float a, float b) {  // a is not negative
#if __CUDA_ARCH__ >= 800
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(fabsf(b)));
  return a;
#else
  return bits_float(max(float_bits(a), float_bits(fabsf(b))));
#endif
}
#endif

FUSEDOPT_HD float larger_or_nan(float a, float b) { return b > a || b != b ? b : a; }

// Math of a signature: IEEE where it is free; approximate (1 to 2 ulp) where block scales or
// stochastic rounding make arithmetic the bottleneck on CUDA.
struct Exact {
  FUSEDOPT_HD float sqrt(float x) { return ::sqrtf(x); }
  static FUSEDOPT_HD float denominator(float root, float factor, float eps) {
    return fused_multiply_add(root, factor, eps);
  }
  static FUSEDOPT_HD float minus_quotient(float x, float a, float b) { return x - a / b; }
};

struct Approximate {
#ifdef __CUDA_ARCH__
  // The last root: a rule takes that of the second moment, and so does writing it. The comparison
  // is of one value with itself there, so the compiler drops it and the second root.
  float argument, root;
  bool known = false;

  // Zero of a subnormal number: whoever keeps roots has to look at those.
  __device__ __forceinline__ float sqrt(float x) {
    if (known && float_bits(x) == float_bits(argument)) return root;
    known = true;
    argument = x;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(x));
    return root;
  }
#else
  FUSEDOPT_HD float sqrt(float x) { return ::sqrtf(x); }  // loops are vectorized without a memory
#endif

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

FUSEDOPT_HD uint32_t step_key(uint32_t seed, float step) {
  return hash32(hash32(seed) + static_cast<uint32_t>(step));
}

// 16 random bits for each of N elements in every stream: two elements share a draw, and a stream
// is a draw times its factor. Neighbouring streams take its halves in turns, for the lower half is
// a function of the lower half of the draw.
template <int N>
struct Random {
  uint32_t draws[(N + 1) / 2];
  int first;  // half of the first draw that is used

  template <class Span>  // of multi_tensor.cuh
  FUSEDOPT_HD Random(uint32_t key, Span span) : first(N == 1 ? span.offset % 2 : 0) {
    const uint64_t draw = static_cast<uint64_t>(span.offset) / 2;
    const uint32_t base =
        key ^ static_cast<uint32_t>(draw) ^ static_cast<uint32_t>(draw >> 32) * 0x9e3779b9u;
    FUSEDOPT_UNROLL
    for (int i = 0; i < N; i += 2) {
      draws[i / 2] = hash32(base ^ static_cast<uint32_t>(Span::place(i) / 2));
    }
  }

  // The kBits highest of them, moved up by kShift.
  template <int kBits, int kShift = 0>
  FUSEDOPT_HD void bits(int stream, uint32_t (&out)[N]) const {
    constexpr uint32_t kFactors[] = {1, 0xf80ff809u, 0xeee93e3du, 0x78230551u};
    FUSEDOPT_UNROLL
    for (int i = 0; i < N; ++i) {
      out[i] = part<kBits, kShift>(draws[i / 2] * kFactors[stream], (first + i + stream) % 2);
    }
  }

 private:
  template <int kBits, int kShift>
  static FUSEDOPT_HD uint32_t part(uint32_t draw, int half) {
#ifdef __CUDA_ARCH__
    if constexpr (kBits == 15) return part<16, kShift - 1>(draw & 0xfffefffeu, half);
    if constexpr (kBits % 8 == 0 && kShift % 8 == 0) {  // whole bytes: one instruction
      uint32_t selector = 0x4444;                       // zeros
      for (int i = 0; i < kBits / 8; ++i) {
        const int place = 4 * (kShift / 8 + i);
        selector = (selector & ~(15u << place)) | (half * 2 + 2 - kBits / 8 + i) << place;
      }
      return __byte_perm(draw, 0, selector);
    }
#endif
    const uint32_t field = half ? draw >> 16 : draw & 0xffffu;
    return field >> (16 - kBits) << kShift;
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
  template <int N>
  static FUSEDOPT_HD void stochastic(const float (&values)[N], const Random<N>&, int,
                                     float (&raw)[N]) {
    FUSEDOPT_UNROLL
    for (int i = 0; i < N; ++i) raw[i] = values[i];
  }
};

struct BF16 {
  using Storage = uint16_t;
  static constexpr bool kBlockScaled = false;
  static FUSEDOPT_HD float decode(uint16_t x) { return bits_float(uint32_t{x} << 16); }
  static FUSEDOPT_HD uint16_t nearest(float x) {
    const uint32_t bits = bits_or_nan(x);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
  }
  template <int N>
  static FUSEDOPT_HD void stochastic(const float (&values)[N], const Random<N>& random, int stream,
                                     uint16_t (&raw)[N]) {
    uint32_t noise[N];
    random.template bits<16>(stream, noise);
    FUSEDOPT_UNROLL
    for (int i = 0; i < N; ++i) {
      raw[i] = static_cast<uint16_t>((bits_or_nan(values[i]) + noise[i]) >> 16);
    }
  }
};

// A float of kMantissa explicit bits with subnormals, narrower than fp32 in range. kTop is the
// exponent that a block's largest element gets; kLargest, kInfinity and kNan are codes. nearest()
// of more than the largest finite number saturates for fp8 and is infinite for fp16, as a cast is.
template <class S, int kMantissa, int kBias, int kTopExponent, uint32_t kLargestCode,
          uint32_t kInfinity, uint32_t kNan, bool kHasSignBit = true>
struct Minifloat {
  using Storage = S;
  static constexpr bool kHasSign = kHasSignBit;
  static constexpr uint32_t kLargest = kLargestCode;
  static constexpr int kExponentBias = kBias;
  static constexpr bool kBlockScaled = true;
  static constexpr int kTop = kTopExponent;
  static constexpr int kMantissaBits = kMantissa;
  static constexpr float kFromHalf = power_of_two(15 - kBias);  // of the exponent's bits in fp16
  static constexpr int kSmallestNormal = 1 - kBias;

  static FUSEDOPT_HD float decode(S code) {
    const uint32_t magnitude = code & kMagnitude;
    const float normal = bits_float((magnitude << kDrop) + (uint32_t{127 - kBias} << 23));
    const float subnormal =
        static_cast<float>(static_cast<int32_t>(magnitude)) * power_of_two(1 - kBias - kMantissa);
    float x = magnitude >> kMantissa ? normal : subnormal;
    if (magnitude > kLargest) x = magnitude == kInfinity ? bits_float(0x7f800000u) : NAN;
    if constexpr (kHasSign)
      x = bits_float(float_bits(x) | (uint32_t{code} & kSign) << (32 - kBits));
    return x;
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
    if constexpr (kHasSign) code |= float_bits(x) >> 31 << (kBits - 1);
    return static_cast<S>(code);
  }

  // For each value, in units of a block's scale, a number of this format next to it: the farther
  // one from zero with the probability of the value's distance to the other. What is not finite
  // becomes NaN. kSigned: values may be negative. usual: Stream::is_usual() of the block.
  template <bool kSigned, bool kUsual, int N>
  static FUSEDOPT_HD void stochastic(const float (&values)[N], float inverse_scale, bool usual,
                                     const Random<N>& random, int stream, S (&raw)[N]) {
    // A little more than 1, so that a value a few ulp of fp32 off a number of this format always
    // returns to it: noise does not fill a whole step. fp16 has room for 9 bits of it only.
    constexpr float kNudge = 1 + power_of_two(-21);
    uint32_t codes[N];
    if constexpr (kMantissa > 7) {
      random.template bits<9, 7>(stream, codes);
    } else if constexpr (kMantissa == 4) {  // and there is room for 15
      random.template bits<15, 9>(stream, codes);
    } else {
      random.template bits<16, 8>(stream, codes);
    }
    float scaled[N];
#ifdef __CUDA_ARCH__
    const float factor = inverse_scale * (kNudge * kToBottom);
    FUSEDOPT_UNROLL
    for (int i = 0; i < N; ++i) scaled[i] = values[i] * factor;
    if (!kUsual && factor < power_of_two(-126)) {
      FUSEDOPT_UNROLL
      for (int i = 0; i < N; ++i) scaled[i] = values[i] * kToBottom * (inverse_scale * kNudge);
    }
#else
    const float factor = inverse_scale * kNudge;
    for (int i = 0; i < N; ++i) scaled[i] = to_bottom(values[i] * factor);
#endif
    FUSEDOPT_UNROLL
    for (int i = 0; i < N; ++i) {
      codes[i] += float_bits(scaled[i]) << (9 - kHasSign - kExponentBits);
      if (kSigned) codes[i] |= float_bits(values[i]) & 0x80000000u;
    }
    if (!kUsual && !usual) {
      FUSEDOPT_UNROLL
      for (int i = 0; i < N; ++i) codes[i] = is_finite(values[i]) ? codes[i] : kNan << kBelow;
    }
#ifdef __CUDA_ARCH__
    uint32_t words[sizeof raw / 4];
    FUSEDOPT_UNROLL
    for (int i = 0; i < N; i += 2) {
      if constexpr (sizeof(S) == 2) {
        words[i / 2] = __byte_perm(codes[i], codes[i + 1], 0x7632);
      } else if (i % 4 == 2) {
        words[i / 4] = __byte_perm(__byte_perm(codes[i - 2], codes[i - 1], 0x73),
                                   __byte_perm(codes[i], codes[i + 1], 0x73), 0x5410);
      }
    }
    memcpy(raw, words, sizeof raw);
#else
    for (int i = 0; i < N; ++i) raw[i] = static_cast<S>(codes[i] >> kBelow);
#endif
  }

 private:
  static constexpr int kBits = 8 * sizeof(S);
  static constexpr int kDrop = 23 - kMantissa;
  static constexpr uint32_t kSign = kHasSign ? 1u << (kBits - 1) : 0;
  static constexpr uint32_t kMagnitude =
      ((1u << (kBits - 1)) - 1) | (kHasSign ? 0 : 1u << (kBits - 1));
  static constexpr int kBelow = 32 - kBits;  // bits of a word below a code in its highest ones

  static constexpr int kExponentBits = kBits - kHasSign - kMantissa;

  // Times this, the exponents of this format are the smallest ones of fp32: what is subnormal in
  // one is so in the other, and dropping bits rounds both.
  static constexpr float kToBottom = power_of_two(kBias - 127);

  // x * kToBottom where subnormal numbers may be slow or flushed.
  static FUSEDOPT_HD float to_bottom(float x) {
    const float magnitude = fabsf(x);
    const uint32_t normal = float_bits(magnitude) - (uint32_t{127 - kBias} << 23);
    const float shifted = magnitude * power_of_two(kBias + 22) + 8388608.0f;
    const uint32_t subnormal = float_bits(shifted) - 0x4b000000u;
    return bits_float(magnitude < power_of_two(kSmallestNormal) ? subnormal : normal);
  }
};

using F16 = Minifloat<uint16_t, 10, 15, 14, 0x7bff, 0x7c00, 0x7e00>;
using E4M3 = Minifloat<uint8_t, 3, 7, 8, 0x7e, 0xff, 0x7f>;  // has no infinity
using E5M2 = Minifloat<uint8_t, 2, 15, 14, 0x7b, 0x7c, 0x7f>;

// What keeps the root of a second moment. It is never negative, so the sign bit of an fp8 number is
// free: it is one more bit of mantissa, the lowest. Who reads the number without its sign, as a
// square does, is half a step off at most.
template <class Code>
struct OfRoots {
  using Number = Code;
  static constexpr bool kRotated = false;
};
template <>
struct OfRoots<E4M3> {
  using Number = Minifloat<uint8_t, 4, 7, 8, 0xfd, 0x100, 0xfe, false>;
  static constexpr bool kRotated = true;  // a number, rotated right by one bit, is what is stored
};
template <>
struct OfRoots<E5M2> {
  using Number = Minifloat<uint8_t, 3, 15, 14, 0xf7, 0xf8, 0xfe, false>;
  static constexpr bool kRotated = true;
};

#ifdef __CUDA_ARCH__
// Two numbers in fp16.
__device__ __forceinline__ void split_halves(uint32_t pair, float& low, float& high) {
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %2;\n\t"
      "cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
      : "=f"(low), "=f"(high)
      : "r"(pair));
}

#endif

// The bits of a where the mask has ones, and those of b where it has zeros.
FUSEDOPT_HD uint32_t select_bits(uint32_t mask, uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  uint32_t bits;
  asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(bits) : "r"(mask), "r"(a), "r"(b));
  return bits;
#else
  return (mask & a) | (~mask & b);
#endif
}

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
        split_halves(pair, values[i], values[i + 1]);
      }
    }
#endif
  }
}

// Of bytes as they are stored, with the sign bit as the lowest one of the mantissa.
template <class Number, int N>
FUSEDOPT_HD void decode_rotated(const uint8_t (&raw)[N], float (&values)[N]) {
  FUSEDOPT_UNROLL
  for (int i = 0; i < N; ++i) {
    values[i] = Number::decode(static_cast<uint8_t>(raw[i] << 1 | raw[i] >> 7));
  }
}

#if defined(__CUDACC__)
// The same in fewer instructions, in units of Number::kFromHalf. If the result has the highest bit,
// there is a NaN, and the values are not right.
template <class Number, int N>
__device__ __forceinline__ uint32_t decode_usual_rotated(const uint8_t (&raw)[N],
                                                         float (&values)[N]) {
  uint32_t words[N / 4], unusual = 0;
  memcpy(words, raw, sizeof raw);
  if constexpr (Number::kMantissaBits == 4) {  // or else NaN and infinity are those of fp16
    FUSEDOPT_UNROLL
    for (int i = 0; i < N / 4; ++i) {
      unusual |= (words[i] & 0x7f7f7f7fu) + 0x01010101u;  // a carry where a code is NaN
    }
  }
  FUSEDOPT_UNROLL
  for (int i = 0; i < N; i += 2) {
    // To fp16: each byte above a byte full of its sign bit, down to where the exponent belongs.
    uint32_t pair;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(pair) : "r"(words[i / 4]), "r"(0x1908u + i % 4 * 0x1111u));
    pair = Number::kMantissaBits == 4 ? pair >> 1 & 0x3fc03fc0u : pair & 0x7f807f80u;
    split_halves(pair, values[i], values[i + 1]);
  }
  return unusual & 0x80808080u ? 0xffffffffu : 0;
}
#endif

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
  static constexpr bool kRotated = kRoot && OfRoots<Code>::kRotated;
  static constexpr bool kIsCoarse = sizeof(Storage) == 1;
  using Number = std::conditional_t<kRoot, typename OfRoots<Code>::Number, Code>;

  // kUsual: if the result has the highest bit, the values are not right.
  template <bool kUsual, int N>
  static FUSEDOPT_HD uint32_t decode(const Storage (&raw)[N], float scale, float (&values)[N]) {
    uint32_t unusual = 0;
    if constexpr (!kRotated) {
      fusedopt::decode<Code>(raw, values);
#if defined(__CUDACC__)
    } else if constexpr (kUsual) {
      unusual = decode_usual_rotated<Number>(raw, values);
      scale *= Number::kFromHalf;
#endif
    } else {
      decode_rotated<Number>(raw, values);
    }
    if constexpr (kBlockScaled) {
      FUSEDOPT_UNROLL
      for (int i = 0; i < N; ++i) {
        values[i] *= scale;
        if constexpr (kRoot) values[i] *= values[i];
      }
    }
    return unusual;
  }

  // Whether a block with this largest magnitude, in bits, has only finite numbers, and is so far
  // from fp32's ends, or all zeros, that neither its scale nor the way to it needs care.
  static FUSEDOPT_HD bool is_usual(uint32_t largest_bits) {
    constexpr int kTop = Number::kTop + Number::kExponentBias - 3;
    // Coarse codes: up from where the smallest one is more than the root of any subnormal number.
    constexpr int kFromRoot = Number::kTop + Number::kExponentBias - 1 + Number::kMantissaBits - 63;
    constexpr uint32_t kFrom = bits_of_power(kRoot && kIsCoarse ? 2 * kFromRoot : -100);
    constexpr uint32_t kBelow = bits_of_power(kRoot ? 2 * kTop : kTop);
    return largest_bits == 0 || largest_bits - kFrom < kBelow - kFrom;
  }

  // The scale of a block from the bits of its largest finite magnitude, 1 of zeros. kUsual:
  // is_usual().
  template <bool kUsual>
  static FUSEDOPT_HD float scale_of(uint32_t largest_bits) {
    constexpr int kOfOne = kForgets ? Number::kTop : Number::kTop - 1;  // whose scale is 1
    if (largest_bits == 0) largest_bits = bits_of_power(kRoot ? 2 * kOfOne : kOfOne);
    float largest = bits_float(largest_bits);
    if (kRoot) largest = kUsual ? sqrt_of_usual(largest) : ::sqrtf(largest);
    if (!kForgets) {  // the power of two below it, after it is rounded
      const uint32_t half_a_step = 1u << (22 - Number::kMantissaBits);
      const uint32_t power = (float_bits(largest) + half_a_step) & 0x7f800000u;
      largest = bits_float(kUsual || power < 0x7f000000u ? power : 0x7f000000u);
    }
    const float scale = largest * power_of_two(-kOfOne);
    return kUsual || scale > power_of_two(-126) ? scale : power_of_two(-126);
  }

  // values: the numbers, or where roots are kept those of `squares`. usual: is_usual() of the
  // block; kUsual: it is, so the code for others is left out.
  template <bool kUsual, int N>
  static FUSEDOPT_HD void encode(const float (&values)[N], const float (&squares)[N],
                                 float inverse_scale, bool usual, const Random<N>& random,
                                 int stream, Storage (&raw)[N]) {
    constexpr int kWords = (sizeof raw + 3) / 4;
    uint32_t words[kWords];  // what a rare branch may change had better not be bytes
    round<kUsual>(values, inverse_scale, usual, random, stream, raw);
    memcpy(words, raw, sizeof raw);
    if constexpr (kKeepsNonzero) {
      // A borrow into the highest bit of a number that is zero; of none if there is no zero.
      constexpr uint32_t kOnes = sizeof(Storage) == 1 ? 0x01010101u : 0x00010001u;
      uint32_t zeros = 0;
      FUSEDOPT_UNROLL
      for (int i = 0; i < kWords; ++i) zeros |= (words[i] - kOnes) & ~words[i];
      if (zeros & kOnes << (8 * sizeof(Storage) - 1)) {
        Storage kept[N], exact[N];
        memcpy(kept, words, sizeof kept);
        memcpy(exact, words, sizeof exact);
        if constexpr (kRoot && !(kUsual && kIsCoarse)) {  // what was zero of a subnormal number
          float roots[N];
          FUSEDOPT_UNROLL
          for (int i = 0; i < N; ++i) {
            roots[i] = kUsual ? sqrt_of_tiny(squares[i]) : ::sqrtf(squares[i]);
          }
          round<kUsual>(roots, inverse_scale, usual, random, stream, exact);
        }
        FUSEDOPT_UNROLL
        for (int i = 0; i < N; ++i) {
          if (kept[i] == 0 && squares[i] > 0) kept[i] = exact[i] == 0 ? Storage{1} : exact[i];
        }
        memcpy(words, kept, sizeof kept);
      }
    }
    if constexpr (kRotated) {
      FUSEDOPT_UNROLL
      for (int i = 0; i < kWords; ++i) {
        words[i] = select_bits(0x7f7f7f7fu, words[i] >> 1, words[i] << 7);
      }
    }
    memcpy(raw, words, sizeof raw);
  }

 private:
  // Exactly, as ::sqrtf() is, where no step of it can leave the range of normal numbers.
  static FUSEDOPT_HD float sqrt_of_usual(float x) {
#ifdef __CUDA_ARCH__
    float inverse;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
    const float root = x * inverse;
    return __fmaf_rn(__fmaf_rn(-root, root, x), 0.5f * inverse, root);
#else
    return ::sqrtf(x);
#endif
  }

  // Nearly, where no step of it can be larger than any number, as one that is kept as zero is not.
  static FUSEDOPT_HD float sqrt_of_tiny(float x) {
#ifdef __CUDA_ARCH__
    float root;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(x * power_of_two(64)));
    return root * power_of_two(-32);
#else
    return ::sqrtf(x);
#endif
  }

  template <bool kUsual, int N>
  static FUSEDOPT_HD void round(const float (&values)[N], float inverse_scale, bool usual,
                                const Random<N>& random, int stream, Storage (&raw)[N]) {
    if constexpr (kRole == Role::kMaximum) {
      float scaled[N];
      FUSEDOPT_UNROLL
      for (int i = 0; i < N; ++i) scaled[i] = kBlockScaled ? values[i] * inverse_scale : values[i];
      if (kBlockScaled && !kUsual && !usual) {
        FUSEDOPT_UNROLL
        for (int i = 0; i < N; ++i) scaled[i] = is_finite(values[i]) ? scaled[i] : NAN;
      }
      encode_nearest<Number>(scaled, raw);
    } else if constexpr (kBlockScaled) {
      Number::template stochastic<!kIsSquare, kUsual>(values, inverse_scale, usual, random, stream,
                                                      raw);
    } else {
      Code::stochastic(values, random, stream, raw);
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

  // Of the random bits kMissing are used; they change no infinity's remainder.
  template <int N>
  static FUSEDOPT_HD void split(const float (&values)[N], const Random<N>& random, int stream,
                                uint16_t (&halves)[N], R (&remainders)[N]) {
    uint32_t bits[N] = {};
    if constexpr (kMissing > 0) random.template bits<kMissing>(stream, bits);
    FUSEDOPT_UNROLL
    for (int i = 0; i < N; ++i) bits[i] += bits_or_nan(values[i]);
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
