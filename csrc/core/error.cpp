#include "core/error.h"

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace tensorizer {

bool is_full(int err) noexcept { return err == ENOSPC || err == EFBIG || err == EDQUOT; }

void throw_errno(const std::string& operation, const std::string& object, int err) {
  const Errc code = err == ENOENT   ? Errc::not_found
                    : err == ENOMEM ? Errc::out_of_memory
                                    : Errc::io;
  Error error(code, operation + " " + object + ": " + std::generic_category().message(err), object);
  error.system_errno = err;
  throw error;
}

std::string printable(std::string_view text, size_t max_nbytes) {
  constexpr std::string_view kBlanks = " \t\r\n";
  text.remove_prefix(std::min(text.find_first_not_of(kBlanks), text.size()));
  text = text.substr(0, text.find_last_not_of(kBlanks) + 1);
  const bool cut = text.size() > max_nbytes;
  std::string result(text.substr(0, max_nbytes));
  for (char& c : result)
    if (static_cast<unsigned char>(c) < 0x20 || static_cast<unsigned char>(c) >= 0x7f) c = '?';
  if (cut) result += "...";
  return result;
}

std::string without_secrets(std::string text, std::span<const std::string> secrets) {
  constexpr std::string_view kInstead = "<redacted>";
  const auto remove = [&](std::string_view what, size_t min_nbytes) {
    if (what.size() < min_nbytes) return;  // not to be told from ordinary words
    for (size_t at = 0; (at = text.find(what, at)) != text.npos; at += kInstead.size())
      text.replace(at, what.size(), kInstead);
  };
  for (const std::string& secret : secrets) remove(secret, 3);
  for (std::string_view rest : secrets) {
    while (!rest.empty()) {
      const std::string_view word = rest.substr(0, rest.find_first_of(" &=;,:"));
      remove(word, 6);
      rest.remove_prefix(std::min(word.size() + 1, rest.size()));
    }
  }
  return text;
}

}  // namespace tensorizer
