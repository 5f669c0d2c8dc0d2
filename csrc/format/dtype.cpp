#include "format/dtype.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>

#include "core/error.h"
#include "format/tensor_path.h"
#include "format/utf8.h"

namespace tensorizer::format {
namespace {

[[noreturn]] void fail_dtype(std::string_view stored, const std::string& problem) {
  throw Error(Errc::malformed, "dtype " + display_name(stored) + ": " + problem);
}

bool is_torch_name(std::string_view name) noexcept {
  constexpr std::string_view kPrefix = "torch.";
  if (!name.starts_with(kPrefix)) return false;
  const std::string_view identifier = name.substr(kPrefix.size());
  const auto letter = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
  };
  return !identifier.empty() && letter(identifier.front()) &&
         std::ranges::all_of(identifier, [&](char c) { return letter(c) || is_digit(c); });
}

bool is_one_of(uint32_t value, std::initializer_list<uint32_t> allowed) noexcept {
  return std::ranges::find(allowed, value) != allowed.end();
}

// Item sizes that exist both in numpy and in torch; kinds with an empty answer exist in numpy
// alone.
bool is_known(char kind, uint32_t itemsize) noexcept {
  switch (kind) {
    case 'b':
      return itemsize == 1;
    case 'i':
    case 'u':
    case 'V':
      return is_one_of(itemsize, {1, 2, 4, 8});  // V: an integer of that size carries the bytes
    case 'f':
      return is_one_of(itemsize, {2, 4, 8});
    case 'c':
      return is_one_of(itemsize, {8, 16});
    default:
      return false;
  }
}

// "<f4" -> order, kind, size; a missing order means the native one, as in numpy.
StoredDtype parse_numpy(std::string_view numpy, std::string_view stored) {
  StoredDtype dtype;
  dtype.byte_order = '=';
  if (!numpy.empty() && std::string_view("<>|=").find(numpy.front()) != std::string_view::npos) {
    dtype.byte_order = numpy.front();
    numpy.remove_prefix(1);
  }
  if (numpy.size() < 2) fail_dtype(stored, "not a numpy dtype");
  dtype.kind = numpy.front();
  numpy.remove_prefix(1);
  const auto [end, error] =
      std::from_chars(numpy.data(), numpy.data() + numpy.size(), dtype.itemsize);
  constexpr std::string_view kNumpyKinds = "biufcVmMOSUTa";
  if (kNumpyKinds.find(dtype.kind) == std::string_view::npos || numpy.front() == '0') {
    fail_dtype(stored, "not a numpy dtype");
  }
  const bool has_unit = (dtype.kind == 'm' || dtype.kind == 'M');  // datetimes: "<M8[ns]"
  if (error != std::errc{} || (end != numpy.data() + numpy.size() && !has_unit)) {
    fail_dtype(stored, "not a numpy dtype");
  }
  if (!is_known(dtype.kind, dtype.itemsize))
    fail_dtype(stored, "numpy has this type, tensors do not");
  return dtype;
}

// Torch types whose item size is known here; others are left to torch.
struct NamedType {
  std::string_view name;       // behind "torch."
  std::string_view canonical;  // differs for aliases
  char kind;                   // numpy kind where numpy has the type, else 'V'
  uint32_t itemsize;
};

constexpr NamedType kNamedTypes[] = {
    {"bool", "bool", 'b', 1},
    {"uint8", "uint8", 'u', 1},
    {"int8", "int8", 'i', 1},
    {"uint16", "uint16", 'u', 2},
    {"int16", "int16", 'i', 2},
    {"short", "int16", 'i', 2},
    {"uint32", "uint32", 'u', 4},
    {"int32", "int32", 'i', 4},
    {"int", "int32", 'i', 4},
    {"uint64", "uint64", 'u', 8},
    {"int64", "int64", 'i', 8},
    {"long", "int64", 'i', 8},
    {"float16", "float16", 'f', 2},
    {"half", "float16", 'f', 2},
    {"float32", "float32", 'f', 4},
    {"float", "float32", 'f', 4},
    {"float64", "float64", 'f', 8},
    {"double", "float64", 'f', 8},
    {"complex64", "complex64", 'c', 8},
    {"cfloat", "complex64", 'c', 8},
    {"complex128", "complex128", 'c', 16},
    {"cdouble", "complex128", 'c', 16},
    {"complex32", "complex32", 'V', 4},
    {"chalf", "complex32", 'V', 4},
    {"bfloat16", "bfloat16", 'V', 2},
    {"bits16", "bits16", 'V', 2},
    {"uint1", "uint1", 'V', 1},
    {"bit", "uint1", 'V', 1},
};

const NamedType* find_named(std::string_view torch_name) noexcept {
  const std::string_view name = torch_name.substr(std::string_view("torch.").size());
  const auto* found = std::ranges::find(kNamedTypes, name, &NamedType::name);
  return found == std::end(kNamedTypes) ? nullptr : found;
}

// Byte order does not matter for single bytes, and every order but '>' is the little-endian of all
// hosts served.
bool is_swapped(const StoredDtype& dtype) noexcept {
  return dtype.byte_order == '>' && dtype.itemsize > 1;
}

}  // namespace

StoredDtype parse_dtype(std::string_view stored, bool allow_bare_void) {
  const size_t separator = stored.find('\0');
  StoredDtype dtype = parse_numpy(stored.substr(0, separator), stored);
  std::string_view second;
  if (separator != std::string_view::npos) {
    second = stored.substr(separator + 1);
    if (second.find('\0') != std::string_view::npos) fail_dtype(stored, "more than one separator");
    if (!is_utf8(second)) fail_dtype(stored, "not UTF-8");
  }
  if (!dtype.opaque()) return dtype;  // a second part is ignored, format.md "Reading dtypes"
  if (separator == std::string_view::npos && allow_bare_void) return dtype;
  if (!is_torch_name(second))
    fail_dtype(stored, "an opaque type wants the name of a torch dtype behind its separator");
  const NamedType* named = find_named(second);
  if (named != nullptr && named->itemsize != dtype.itemsize) {
    fail_dtype(stored, "elements of " + std::string(second) + " have " +
                           std::to_string(named->itemsize) + " bytes, not " +
                           std::to_string(dtype.itemsize));
  }
  dtype.torch_name = second;
  return dtype;
}

bool same_dtype(const StoredDtype& a, const StoredDtype& b) noexcept {
  if (a.itemsize != b.itemsize || is_swapped(a) != is_swapped(b)) return false;
  struct Meaning {
    char kind;
    std::string_view name;  // torch name without prefix, if numpy lacks the dtype
    bool operator==(const Meaning&) const = default;
  };
  const auto meaning = [](const StoredDtype& dtype) -> Meaning {
    if (!dtype.opaque() || dtype.torch_name.empty()) return {dtype.kind, {}};
    const NamedType* named = find_named(dtype.torch_name);
    if (named == nullptr) return {'V', dtype.torch_name.substr(std::string_view("torch.").size())};
    return {named->kind, named->kind == 'V' ? named->canonical : std::string_view{}};
  };
  return meaning(a) == meaning(b);
}

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
