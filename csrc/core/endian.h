// Little-endian integers in byte buffers. Pure; no alignment is required.
#pragma once

#include <bit>
#include <cstddef>
#include <cstring>
#include <type_traits>

namespace tensorizer {

static_assert(std::endian::native == std::endian::little,
              "tensors are stored little-endian and copied as they are");

template <class T>
  requires std::is_integral_v<T>
T load_le(const std::byte* from) noexcept {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class T>
  requires std::is_integral_v<T>
void store_le(std::byte* to, T value) noexcept {
  std::memcpy(to, &value, sizeof value);
}

}  // namespace tensorizer
