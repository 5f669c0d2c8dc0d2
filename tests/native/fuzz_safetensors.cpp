// Input: u64 size of the source, then the header. What parses obeys the rules, and a header written
// of it parses to the same entries.
#include <algorithm>
#include <limits>

#include "core/error.h"
#include "format/dtype.h"
#include "format/safetensors.h"
#include "format/ties.h"
#include "fuzz_check.h"

using namespace tensorizer;
using namespace tensorizer::format;

namespace {

void check_rules(const SafetensorsHeader& header, uint64_t begin, uint64_t source_nbytes) {
  uint64_t end = begin;
  for (const IndexEntry& entry : header.index.entries()) {
    FUZZ_CHECK(entry.offset == end && entry.data_offset == end);
    FUZZ_CHECK(entry.end() >= entry.data_offset);
    FUZZ_CHECK(entry.loaded_nbytes == entry.data_nbytes);
    FUZZ_CHECK(entry.dtype.empty() || entry.itemsize > 0);
    FUZZ_CHECK(!entry.dtype.empty() || !why_not_loadable(entry).empty());
    end = entry.end();
  }
  FUZZ_CHECK(source_nbytes == std::numeric_limits<uint64_t>::max() || end == source_nbytes);
  for (const Tie& tie : ties_in_metadata(header.index, header.metadata))
    FUZZ_CHECK(tie.target < header.index.size() && !tie.listed);
}

void check_round_trip(const SafetensorsHeader& header) {
  std::vector<SafetensorsTensor> tensors;
  for (const IndexEntry& entry : header.index.entries()) {
    if (entry.dtype.empty()) return;
    tensors.push_back({entry.name, entry.dtype, entry.shape, entry.data_nbytes});
  }
  const std::vector<std::byte> bytes = serialize_safetensors(tensors, header.metadata);
  FUZZ_CHECK(canonical_order(tensors).size() == tensors.size());
  FUZZ_CHECK(safetensors_header_nbytes(bytes) == bytes.size() - kSafetensorsLengthNbytes);
  const SafetensorsHeader again =
      parse_safetensors({bytes.begin() + kSafetensorsLengthNbytes, bytes.end()}, 0,
                        std::numeric_limits<uint64_t>::max());
  FUZZ_CHECK(again.metadata == header.metadata);
  FUZZ_CHECK(std::ranges::equal(
      again.index.entries(), header.index.entries(), [](const IndexEntry& a, const IndexEntry& b) {
        return a.name == b.name && a.dtype == b.dtype && std::ranges::equal(a.shape, b.shape) &&
               a.data_nbytes == b.data_nbytes;
      }));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  auto input = tensorizer::testing::fuzz_bytes(data, size);
  const auto source_nbytes = tensorizer::testing::take_integer<uint64_t>(input);
  for (const uint64_t nbytes : {source_nbytes, std::numeric_limits<uint64_t>::max()}) {
    try {
      const SafetensorsHeader header = parse_safetensors({input.begin(), input.end()}, 0, nbytes);
      check_rules(header, kSafetensorsLengthNbytes + input.size(), nbytes);
      check_round_trip(header);
    } catch (const Error& error) {
      FUZZ_CHECK(error.code() == Errc::malformed || error.code() == Errc::truncated);
      FUZZ_CHECK(std::string_view(error.what()).size() < 1000);
    }
  }
  std::vector<char> text(input.size());
  if (!input.empty()) std::memcpy(text.data(), input.data(), input.size());
  try {
    parse_shard_index(text);
  } catch (const Error& error) {
    FUZZ_CHECK(error.code() == Errc::malformed);
    FUZZ_CHECK(std::string_view(error.what()).size() < 1000);
  }
  return 0;
}
