#include "format/container.h"

#include <algorithm>
#include <string>
#include <string_view>

#include "core/error.h"
#include "format/prologue.h"
#include "format/safetensors.h"
#include "format/tensor_path.h"

namespace tensorizer::format {
namespace {

constexpr std::string_view kPointerStart = "version https://git-lfs";

bool begins_with_magic(std::span<const std::byte> head) noexcept {
  const size_t nbytes = std::min(head.size(), kMagic.size());
  return std::ranges::equal(head.first(nbytes), std::span(kMagic).first(nbytes));
}

// The rest of the line that starts with `key`; for messages.
std::string field(std::string_view text, std::string_view key) {
  const size_t at = text.find(key);
  if (at == std::string_view::npos) return "unknown";
  text.remove_prefix(at + key.size());
  return display_name(text.substr(0, text.find_first_of("\r\n")));
}

}  // namespace

Container detect_container(std::span<const std::byte> head, uint64_t origin) {
  if (begins_with_magic(head)) return Container::tensors;
  const std::string_view text(reinterpret_cast<const char*>(head.data()), head.size());
  if (text.starts_with(kPointerStart))
    throw Error(Errc::malformed,
                "a git-lfs pointer, not the file: it stands for " + field(text, "\noid ") + " of " +
                    field(text, "\nsize ") + " bytes (git lfs pull fetches it)",
                {}, origin);
  if (head.size() < kSafetensorsLengthNbytes)
    throw Error(Errc::truncated,
                "not a tensors file: " + std::to_string(head.size()) +
                    " bytes, where the magic |TZR| or the header length of a safetensors file "
                    "(8 bytes) begins",
                {}, origin);
  return safetensors_header_nbytes(head) ? Container::safetensors : Container::tensors;
}

}  // namespace tensorizer::format
