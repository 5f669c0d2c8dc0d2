// Conversion between float16, bfloat16, float32 and float64, to the bits that torch gives: rounded
// to nearest, ties to even; float64 goes to the 16-bit types through float32, as in torch. A NaN
// stays one, its payload is ours.
#pragma once

#include "device/chunk_to_open.h"
#include "device/cuda/kernels/shim.h"

namespace tensorizer::device::cuda {

// `value` without its low bits, rounded to nearest, ties to even. REQUIRES: 1 <= bits <= 53.
TENSORIZER_KERNEL uint64_t rounded_shift(uint64_t value, uint32_t bits) {
  const uint64_t half = uint64_t{1} << (bits - 1);
  return (value + (half - 1) + ((value >> bits) & 1)) >> bits;
}

TENSORIZER_KERNEL uint32_t float16_to_32(uint32_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16;
  uint32_t rest = bits & 0x7fffu;
  if (rest >= 0x7c00u) return sign | 0x7f800000u | ((rest & 0x3ffu) << 13);
  if (rest >= 0x400u) return sign | ((rest << 13) + (112u << 23));
  if (rest == 0) return sign;
  uint32_t exponent = 113;  // subnormal: rest * 2^-24
  for (; rest < 0x400u; rest <<= 1) --exponent;
  return sign | (exponent << 23) | ((rest & 0x3ffu) << 13);
}

TENSORIZER_KERNEL uint32_t float32_to_16(uint32_t bits) {
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return sign | 0x7e00u;
  if (rest >= 0x477ff000u) return sign | 0x7c00u;  // 65520 is half way to 2^16
  if (rest >= 0x38800000u)
    return sign | static_cast<uint32_t>(rounded_shift(rest - (112u << 23), 13));
  if (rest < 0x33000000u) return sign;  // below 2^-25
  const uint32_t mantissa = (rest & 0x7fffffu) | 0x800000u;
  return sign | static_cast<uint32_t>(rounded_shift(mantissa, 126 - (rest >> 23)));
}

TENSORIZER_KERNEL uint32_t float32_to_bfloat16(uint32_t bits) {
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0u;
  return static_cast<uint32_t>(rounded_shift(bits, 16));
}

TENSORIZER_KERNEL uint64_t float32_to_64(uint32_t bits) {
  const uint64_t sign = static_cast<uint64_t>(bits & 0x80000000u) << 32;
  uint32_t rest = bits & 0x7fffffffu;
  if (rest >= 0x7f800000u)
    return sign | 0x7ff0000000000000u | (static_cast<uint64_t>(rest & 0x7fffffu) << 29);
  if (rest >= 0x800000u)
    return sign | ((static_cast<uint64_t>(rest) << 29) + (uint64_t{896} << 52));
  if (rest == 0) return sign;
  uint64_t exponent = 897;  // subnormal: rest * 2^-149
  for (; rest < 0x800000u; rest <<= 1) --exponent;
  return sign | (exponent << 52) | (static_cast<uint64_t>(rest & 0x7fffffu) << 29);
}

TENSORIZER_KERNEL uint32_t float64_to_32(uint64_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits >> 32) & 0x80000000u;
  const uint64_t rest = bits & 0x7fffffffffffffffu;
  if (rest > 0x7ff0000000000000u) return sign | 0x7fc00000u;
  if (rest >= 0x47effffff0000000u) return sign | 0x7f800000u;  // half way to 2^128
  if (rest >= 0x3810000000000000u)
    return sign | static_cast<uint32_t>(rounded_shift(rest - (uint64_t{896} << 52), 29));
  if (rest < 0x3690000000000000u) return sign;  // below 2^-150
  const uint64_t mantissa = (rest & 0xfffffffffffffu) | 0x10000000000000u;
  return sign |
         static_cast<uint32_t>(rounded_shift(mantissa, 926 - static_cast<uint32_t>(rest >> 52)));
}

TENSORIZER_KERNEL uint32_t element_nbytes(uint32_t type) {
  return type == kFloat64 ? 8 : type == kFloat32 ? 4 : 2;
}

TENSORIZER_KERNEL uint32_t load_as_float32(const unsigned char* from, uint32_t type, bool aligned) {
  if (type == kFloat16) return float16_to_32(load_element<uint16_t>(from, aligned));
  if (type == kBfloat16) return static_cast<uint32_t>(load_element<uint16_t>(from, aligned)) << 16;
  if (type == kFloat32) return load_element<uint32_t>(from, aligned);
  return float64_to_32(load_element<uint64_t>(from, aligned));
}

TENSORIZER_KERNEL void store_from_float32(unsigned char* to, uint32_t bits, uint32_t type,
                                          bool aligned) {
  if (type == kFloat16) {
    store_element(to, static_cast<uint16_t>(float32_to_16(bits)), aligned);
  } else if (type == kBfloat16) {
    store_element(to, static_cast<uint16_t>(float32_to_bfloat16(bits)), aligned);
  } else if (type == kFloat32) {
    store_element(to, bits, aligned);
  } else {
    store_element(to, float32_to_64(bits), aligned);
  }
}

// One thread block for kConvertedAtOnce elements of each piece. `piece_of` names the piece of each
// thread block.
template <class Block>
TENSORIZER_KERNEL void convert_kernel(Block& block, const PieceToConvert* pieces,
                                      const uint32_t* piece_of) {
  const PieceToConvert& piece = pieces[piece_of[block.index()]];
  const uint32_t from_nbytes = element_nbytes(piece.from);
  const uint32_t to_nbytes = element_nbytes(piece.to);
  const bool from_aligned = piece.source % from_nbytes == 0;
  const bool to_aligned = piece.destination % to_nbytes == 0;
  const uint64_t first =
      static_cast<uint64_t>(block.index() - piece.first_block) * kConvertedAtOnce;
  block.each([&](uint32_t t) {
    for (uint64_t i = first + t; i < first + kConvertedAtOnce && i < piece.count; i += kThreads) {
      const uint32_t bits =
          load_as_float32(pointer_to(piece.source + i * from_nbytes), piece.from, from_aligned);
      store_from_float32(pointer_to(piece.destination + i * to_nbytes), bits, piece.to, to_aligned);
    }
  });
}

}  // namespace tensorizer::device::cuda
