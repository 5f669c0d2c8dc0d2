#include "format/safetensors_dtype.h"

#include <algorithm>
#include <array>

#include "core/error.h"
#include "format/dtype.h"

namespace tensorizer::format {
namespace {

using namespace std::string_view_literals;

constexpr std::array kDtypes = {
    SafetensorsDtype{"U64", 64, "<u8"},
    SafetensorsDtype{"I64", 64, "<i8"},
    SafetensorsDtype{"F64", 64, "<f8"},
    SafetensorsDtype{"C64", 64, "<c8"},
    SafetensorsDtype{"F32", 32, "<f4"},
    SafetensorsDtype{"U32", 32, "<u4"},
    SafetensorsDtype{"I32", 32, "<i4"},
    SafetensorsDtype{"BF16", 16, "<V2\0torch.bfloat16"sv},
    SafetensorsDtype{"F16", 16, "<f2"},
    SafetensorsDtype{"U16", 16, "<u2"},
    SafetensorsDtype{"I16", 16, "<i2"},
    SafetensorsDtype{"F8_E5M2FNUZ", 8, "|V1\0torch.float8_e5m2fnuz"sv},
    SafetensorsDtype{"F8_E4M3FNUZ", 8, "|V1\0torch.float8_e4m3fnuz"sv},
    SafetensorsDtype{"F8_E8M0", 8, "|V1\0torch.float8_e8m0fnu"sv},
    SafetensorsDtype{"F8_E4M3", 8, "|V1\0torch.float8_e4m3fn"sv},
    SafetensorsDtype{"F8_E5M2", 8, "|V1\0torch.float8_e5m2"sv},
    SafetensorsDtype{"I8", 8, "|i1"},
    SafetensorsDtype{"U8", 8, "|u1"},
    SafetensorsDtype{"F6_E3M2", 6, ""},
    SafetensorsDtype{"F6_E2M3", 6, ""},
    SafetensorsDtype{"F4", 4, "|V1\0torch.float4_e2m1fn_x2"sv},
    SafetensorsDtype{"BOOL", 8, "|b1"},
};

template <class Matches>
const SafetensorsDtype* find(Matches&& matches) noexcept {
  const auto found = std::ranges::find_if(kDtypes, matches);
  return found == kDtypes.end() ? nullptr : &*found;
}

}  // namespace

std::span<const SafetensorsDtype> safetensors_dtypes() noexcept { return kDtypes; }

const SafetensorsDtype* find_safetensors_dtype(std::string_view name) noexcept {
  return find([&](const SafetensorsDtype& dtype) { return dtype.name == name; });
}

const SafetensorsDtype* safetensors_dtype_of(std::string_view stored) noexcept {
  const auto* exact = find([&](const SafetensorsDtype& dtype) { return dtype.stored == stored; });
  if (exact != nullptr && !stored.empty()) return exact;
  try {
    const StoredDtype wanted = parse_dtype(stored);
    return find([&](const SafetensorsDtype& dtype) {
      return !dtype.stored.empty() && same_dtype(parse_dtype(dtype.stored), wanted);
    });
  } catch (const Error&) {
    return nullptr;
  }
}

}  // namespace tensorizer::format
