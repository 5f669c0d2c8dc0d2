// Reads a whole file through csrc/format, the way a loader does, without decrypting or
// converting.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/error.h"
#include "format/index.h"
#include "format/prologue.h"
#include "format/record_header.h"

namespace tensorizer::testing {

struct ReadFile {
  format::Prologue prologue;
  std::optional<format::Index> index;
  std::vector<format::RecordHeader> headers;  // borrow the file's bytes
};

inline std::span<const std::byte> header_bytes(std::span<const std::byte> file,
                                               const format::IndexEntry& entry) {
  return file.subspan(entry.offset, entry.header_nbytes());
}

// `start`: where the container begins in `file`.
inline ReadFile read_file(std::span<const std::byte> file, format::KeyGiven key,
                          uint64_t start = 0) {
  using namespace tensorizer::format;
  ReadFile result;
  const auto container = file.subspan(start);
  result.prologue = parse_prologue(container, start, key);
  const uint64_t nbytes = result.prologue.metadata_nbytes;
  if (nbytes > container.size() - kPrologueNbytes)
    throw Error(Errc::truncated, "index: the file ends before it does");
  const auto block = container.subspan(kPrologueNbytes, nbytes);
  result.index.emplace(result.prologue, std::vector<std::byte>(block.begin(), block.end()),
                       start + kPrologueNbytes, file.size());
  for (const IndexEntry& entry : result.index->entries()) {
    RecordHeader header =
        parse_record_header(header_bytes(file, entry), entry, result.prologue.has_crypt_info());
    check_against_index(header, entry);
    if (header.crypt) check_crypt_info(*header.crypt, header.data_nbytes);
    result.headers.push_back(std::move(header));
  }
  return result;
}

}  // namespace tensorizer::testing
