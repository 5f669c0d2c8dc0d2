// Input: the first bytes of a file. What parses must serialize back to a prologue of the same
// meaning.
#include "core/error.h"
#include "format/prologue.h"
#include "fuzz_check.h"

using namespace tensorizer;
using namespace tensorizer::format;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto bytes = tensorizer::testing::fuzz_bytes(data, size);
  int accepted = 0;
  for (const KeyGiven key : {KeyGiven::no, KeyGiven::yes}) {
    try {
      const Prologue prologue = parse_prologue(bytes, 0, key);
      const Prologue again = parse_prologue(serialize_prologue(prologue), 0, key);
      FUZZ_CHECK(again.version == prologue.version && again.flags == prologue.flags);
      FUZZ_CHECK(again.tensor_size == prologue.tensor_size);
      FUZZ_CHECK(again.tensor_count == prologue.tensor_count);
      FUZZ_CHECK(again.metadata_nbytes == prologue.metadata_nbytes);
      FUZZ_CHECK(prologue.has_crypt_info() == (key == KeyGiven::yes));
      ++accepted;
    } catch (const Error&) {
    }
  }
  FUZZ_CHECK(accepted < 2);  // a file is encrypted or it is not
  return 0;
}
