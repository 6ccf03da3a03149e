// The dtypes: decode, encode, block scales, stochastic rounding, the two halves of a split master.
// Host and device share every line except the few that name an instruction. Knows no optimizer.
#pragma once

#include <cmath>
#include <cstring>

#include "fusedopt.h"

namespace fusedopt {

// What a stream means decides how it is kept when its dtype is narrow: a second moment as its square
// root and never rounded to zero; a running maximum likewise, but rounded to nearest.
enum class Role { kMoment, kSecondMoment, kMaximum };

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

FUSEDOPT_HD float larger_or_nan(float a, float b) { return b > a || b != b ? b : a; }

// Math of a signature: IEEE where it is free; approximate (1 to 2 ulp) where block-scaled streams
// make arithmetic the bottleneck on CUDA.
struct Exact {
  static FUSEDOPT_HD float sqrt(float x) { return ::sqrtf(x); }
  static FUSEDOPT_HD float divide(float a, float b) { return a / b; }
};

struct Approximate {
  static FUSEDOPT_HD float sqrt(float x) {
#ifdef __CUDA_ARCH__
    float root;
    asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(x));
    return root;
#else
    return ::sqrtf(x);
#endif
  }
  static FUSEDOPT_HD float divide(float a, float b) {
#ifdef __CUDA_ARCH__
    return __fdividef(a, b);
#else
    return a / b;
#endif
  }
};

// ---- random bits -----------------------------------------------------------------------------
// A counter-based hash: the same bits in every backend, replay, resume and replica.

FUSEDOPT_HD uint32_t hash32(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

constexpr uint32_t kStreamSalt = 0x9e3779b9u;  // stream n of an update draws from key + n * salt

FUSEDOPT_HD uint32_t step_key(uint32_t seed, float step) {
  return hash32(hash32(seed) + static_cast<uint32_t>(step));
}

// 16 random bits per element, one hash for two neighbours. `offset` is even.
struct Random {
  uint32_t base;
  FUSEDOPT_HD Random(uint32_t key, uint32_t stream, int64_t offset)
      : base(hash32(key + stream * kStreamSalt) + static_cast<uint32_t>(offset >> 1) +
             static_cast<uint32_t>(offset >> 33) * kStreamSalt) {}
  FUSEDOPT_HD uint32_t operator()(int i) const {
    const uint32_t pair = hash32(base + static_cast<uint32_t>(i >> 1));
    return i % 2 ? pair >> 16 : pair & 0xffffu;
  }
};

// ---- codes: how one number is written ------------------------------------------------------------

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
    return x == x ? static_cast<uint16_t>(rounded >> 16) : 0x7fc0;
  }
};

// A float of kMantissa explicit bits with subnormals, narrower than fp32 in range. kTop is the
// exponent that a block's largest element gets; kLargest, kInfinity and kNan are codes. nearest() of
// more than the largest finite number saturates for fp8 and is infinite for fp16, as a cast is.
template <class S, int kMantissa, int kBias, int kTopExponent, uint32_t kLargest,
          uint32_t kInfinity, uint32_t kNan>
struct Minifloat {
  using Storage = S;
  static constexpr bool kBlockScaled = true;
  static constexpr int kTop = kTopExponent;

  static FUSEDOPT_HD float decode(S code) {
    const uint32_t magnitude = code & kMagnitude;
    // Placed at the bottom of fp32's exponent range, subnormals included, then scaled up: exact.
    float x = bits_float(magnitude << kDrop) * power_of_two(127 - kBias);
    if (magnitude > kLargest) x = magnitude == kInfinity ? bits_float(0x7f800000u) : NAN;
    return bits_float(float_bits(x) | (uint32_t{code} & kSign) << (32 - kBits));
  }

  // |x| is at most 2^kTop here; what is not finite becomes NaN. Half a step of the random bits is
  // added so that a value a few ulp of fp32 off a code always returns to it.
  static FUSEDOPT_HD S stochastic(float x, uint32_t random) {
    const uint32_t offset = kDrop > 16 ? (random << (kDrop > 16 ? kDrop - 16 : 0)) + kHalf
                                       : (random >> (kDrop > 16 ? 0 : 19 - kDrop) << 3) + 4;
    const float magnitude = fabsf(x);
    const bool subnormal = magnitude < power_of_two(1 - kBias);
    // One added binade puts subnormals on the grid of the smallest normal numbers.
    const float lifted = subnormal ? magnitude + power_of_two(1 - kBias) : magnitude;
    uint32_t code = ((float_bits(lifted) + offset) >> kDrop) - (uint32_t{127 - kBias} << kMantissa);
    if (subnormal) code -= 1u << kMantissa;
    if (!(magnitude <= power_of_two(kTop + 1))) code = kNan;
    return static_cast<S>(code | sign(x));
  }

  static FUSEDOPT_HD S nearest(float x) {
    const float magnitude = fabsf(x);
    const uint32_t bits = float_bits(magnitude);
    uint32_t code = ((bits + (1u << (kDrop - 1)) - 1 + ((bits >> kDrop) & 1)) >> kDrop) -
                    (uint32_t{127 - kBias} << kMantissa);
    if (magnitude < power_of_two(1 - kBias)) {
      code = static_cast<uint32_t>(rintf(magnitude * power_of_two(kBias - 1 + kMantissa)));
    } else if (code > kLargest) {
      code = sizeof(S) == 1 ? kLargest : kInfinity;
    }
    if (x != x) code = kNan;
    return static_cast<S>(code | sign(x));
  }

 private:
  static constexpr int kBits = 8 * sizeof(S);
  static constexpr int kDrop = 23 - kMantissa;
  static constexpr uint32_t kSign = 1u << (kBits - 1);
  static constexpr uint32_t kMagnitude = kSign - 1;
  static constexpr uint32_t kHalf = kDrop > 16 ? 1u << (kDrop > 16 ? kDrop - 17 : 0) : 0;
  static FUSEDOPT_HD uint32_t sign(float x) {
    return float_bits(x) >> 31 << (kBits - 1);
  }
};

using F16 = Minifloat<uint16_t, 10, 15, 14, 0x7bff, 0x7c00, 0x7e00>;
using E4M3 = Minifloat<uint8_t, 3, 7, 8, 0x7e, 0xff, 0x7f>;  // has no infinity
using E5M2 = Minifloat<uint8_t, 2, 15, 14, 0x7b, 0x7c, 0x7f>;

// ---- streams: how a tensor of numbers is kept ---------------------------------------------------

// Shared by the lanes that hold one block of kScaleBlock elements: the largest finite magnitude, as
// bits, becomes the block's scale.
template <class Code>
FUSEDOPT_HD float block_scale(uint32_t largest_bits) {
  if (largest_bits == 0) return 1;
  const float scale = bits_float(largest_bits) * power_of_two(-Code::kTop);
  return scale > power_of_two(-126) ? scale : power_of_two(-126);
}

template <class C, Role kRole>
struct Stream {
  using Code = C;
  using Storage = typename Code::Storage;
  static constexpr bool kBlockScaled = Code::kBlockScaled;
  static constexpr bool kRoot = kBlockScaled && kRole != Role::kMoment;

  static FUSEDOPT_HD float decode(Storage raw, float scale) {
    if constexpr (!kBlockScaled) return Code::decode(raw);
    const float x = Code::decode(raw) * scale;
    return kRoot ? x * x : x;
  }

  // From the value to what is written: the second half of encode, after its scale is known.
  static FUSEDOPT_HD float prepare(float x) { return kRoot ? Approximate::sqrt(x) : x; }

  static FUSEDOPT_HD Storage encode(float prepared, float inverse_scale, uint32_t random) {
    const float x = kBlockScaled ? prepared * inverse_scale : prepared;
    Storage raw = kRole == Role::kMaximum ? Code::nearest(x) : Code::stochastic(x, random);
    if constexpr (kRole != Role::kMoment && sizeof(Storage) < sizeof(float)) {
      if (raw == 0 && prepared > 0) raw = 1;
    }
    return raw;
  }
};

// ---- split masters: a bf16 parameter and a remainder -------------------------------------------
// The bf16 half is the value rounded to nearest; the remainder is what is missing, as a signed
// number. A tie rounds away from zero: with ties to even, 65537 values share an even bf16 half and 16
// bits could not tell them apart.

template <class R>
struct Split {
  using Storage = R;
  static constexpr bool kBlockScaled = false;
  static constexpr int kMissing = 16 - 8 * static_cast<int>(sizeof(R));  // bits not kept at all
  static FUSEDOPT_HD float join(uint16_t half, R remainder) {
    return bits_float((uint32_t{half} << 16) +
                      static_cast<uint32_t>(static_cast<int32_t>(remainder) * (1 << kMissing)));
  }
  static FUSEDOPT_HD void split(float x, uint32_t random, uint16_t& half, R& remainder) {
    uint32_t bits = float_bits(x);
    if (x != x || fabsf(x) > 3.402823466e+38f) {
      bits = x != x ? 0x7fc00000u : bits;
    } else if (kMissing > 0) {
      bits += random & ((1u << kMissing) - 1);
    }
    half = static_cast<uint16_t>((bits + 0x8000u) >> 16);
    remainder = static_cast<R>(static_cast<int32_t>(bits - (uint32_t{half} << 16)) >> kMissing);
  }
};

using Remainder16 = Split<int16_t>;
using Remainder8 = Split<int8_t>;

}  // namespace fusedopt
