// Input: u8 "entries are tagged", u16 tensor count, u64 size of the source, then the metadata
// block. What parses must serialize back to an index of the same entries.
#include <algorithm>

#include "core/error.h"
#include "format/index.h"
#include "fuzz_check.h"

using namespace tensorizer;
using namespace tensorizer::format;

namespace {

constexpr uint64_t kOrigin = kPrologueNbytes;

std::vector<std::byte> serialize(const Index& index, bool tagged) {
  std::vector<std::byte> block;
  for (const IndexEntry& e : index.entries()) {
    const EntryToWrite entry{e.name,   e.dtype,       e.shape,      e.type,
                             e.offset, e.data_offset, e.data_nbytes};
    const size_t before = block.size();
    append_index_entry(block, entry, tagged);
    FUZZ_CHECK(block.size() - before == index_entry_nbytes(entry, tagged));
  }
  return block;
}

bool same_meaning(const IndexEntry& a, const IndexEntry& b) {
  return a.name == b.name && a.dtype == b.dtype && std::ranges::equal(a.shape, b.shape) &&
         a.offset == b.offset && a.data_offset == b.data_offset && a.data_nbytes == b.data_nbytes &&
         a.type == b.type && a.itemsize == b.itemsize && a.loaded_nbytes == b.loaded_nbytes;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  auto input = tensorizer::testing::fuzz_bytes(data, size);
  Prologue prologue;
  const bool tagged = (tensorizer::testing::take_integer<uint8_t>(input) & 1) != 0;
  prologue.version = tagged ? kVersionLong : kVersionPlain;
  prologue.flags = tagged ? kFlagVersionedHeaders : 0;
  prologue.tensor_count = tensorizer::testing::take_integer<uint16_t>(input);
  const auto source_nbytes = tensorizer::testing::take_integer<uint64_t>(input);
  prologue.metadata_nbytes = input.size();
  try {
    const Index index(prologue, {input.begin(), input.end()}, kOrigin, source_nbytes);
    FUZZ_CHECK(index.size() == prologue.tensor_count);
    uint64_t end = kOrigin + input.size();
    for (const IndexEntry& entry : index.entries()) {
      FUZZ_CHECK(entry.offset >= end && entry.data_offset > entry.offset &&
                 entry.end() >= entry.data_offset);
      FUZZ_CHECK(entry.end() <= source_nbytes);
      FUZZ_CHECK(entry.data_nbytes == 0 || entry.data_nbytes >= entry.loaded_nbytes);
      end = entry.end();
    }
    std::vector<std::byte> block = serialize(index, tagged);
    FUZZ_CHECK(block.size() <= input.size());
    const Index again(prologue, std::move(block), kOrigin, source_nbytes);
    FUZZ_CHECK(std::ranges::equal(index.entries(), again.entries(), same_meaning));
  } catch (const Error& error) {
    FUZZ_CHECK(error.code() == Errc::malformed || error.code() == Errc::truncated);
    FUZZ_CHECK(std::string_view(error.what()).size() < 1000);
  }
  return 0;
}
