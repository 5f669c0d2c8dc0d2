// The golden files, decompressed in memory. Their folder is tests/vectors/golden, which the build
// names.
#pragma once

#include <gtest/gtest.h>
#include <isa-l/igzip_lib.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

namespace tensorizer::testing {

inline constexpr const char* kGoldenSuffix = ".tensors.gz";

inline std::filesystem::path golden_folder() { return GOLDEN_FOLDER; }

inline std::vector<std::byte> gunzip(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<char> packed{std::istreambuf_iterator<char>(file), {}};
  // The last four bytes of a gzip file are the size of its contents.
  if (packed.size() < 18) throw std::runtime_error("no gzip file: " + path.string());
  uint32_t nbytes = 0;
  std::copy_n(packed.end() - 4, 4, reinterpret_cast<char*>(&nbytes));
  std::vector<std::byte> bytes(nbytes);
  inflate_state state;
  isal_inflate_init(&state);
  state.crc_flag = ISAL_GZIP;
  state.next_in = reinterpret_cast<uint8_t*>(packed.data());
  state.avail_in = static_cast<uint32_t>(packed.size());
  state.next_out = reinterpret_cast<uint8_t*>(bytes.data());
  state.avail_out = nbytes;
  if (isal_inflate(&state) != ISAL_DECOMP_OK || state.avail_out != 0) {
    throw std::runtime_error("damaged gzip file: " + path.string());
  }
  return bytes;
}

inline std::vector<std::byte> read_golden(const std::string& name) {
  return gunzip(golden_folder() / (name + kGoldenSuffix));
}

// Names of all goldens, sorted; empty where the folder is missing.
inline std::vector<std::string> golden_names() {
  std::vector<std::string> names;
  std::error_code missing;
  for (const auto& file : std::filesystem::directory_iterator(golden_folder(), missing)) {
    const std::string name = file.path().filename().string();
    if (name.ends_with(kGoldenSuffix))
      names.push_back(name.substr(0, name.size() - std::string(kGoldenSuffix).size()));
  }
  std::ranges::sort(names);
  return names;
}

}  // namespace tensorizer::testing
