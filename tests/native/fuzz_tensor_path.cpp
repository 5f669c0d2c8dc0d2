// Input: stored names, one per line. What decodes must encode to a name of the same path, and the
// tree must take each path once.
#include <string_view>

#include "core/error.h"
#include "format/dtype.h"
#include "format/tensor_path.h"
#include "format/utf8.h"
#include "fuzz_check.h"

using namespace tensorizer;
using namespace tensorizer::format;

namespace {

bool refuses(PathSet& paths, const TensorPath& path) {
  const size_t mark = paths.mark();
  try {
    paths.add(path);
    return false;
  } catch (const Error&) {
    FUZZ_CHECK(paths.mark() == mark);
    return true;
  }
}

void check_name(PathSet& paths, std::string_view stored) {
  const std::string shown = display_name(stored);
  FUZZ_CHECK(is_utf8(shown) && shown.size() < 250);
  try {
    const StoredDtype dtype = parse_dtype(stored);  // dtypes are short texts too
    FUZZ_CHECK(dtype.itemsize > 0 && same_dtype(dtype, dtype));
  } catch (const Error&) {
  }
  TensorPath path;
  try {
    path = decode_name(stored);
  } catch (const Error& error) {
    FUZZ_CHECK(error.code() == Errc::malformed);
    return;
  }
  FUZZ_CHECK(!path.empty());
  std::string name;
  try {
    name = encode_name(path);
  } catch (const Error& error) {  // escapes may be longer than what they stand for
    FUZZ_CHECK(error.code() == Errc::out_of_range && stored.size() > 65535 / 6);
    return;
  }
  FUZZ_CHECK(is_utf8(name));
  FUZZ_CHECK(decode_name(name) == path);
  const size_t mark = paths.mark();
  if (!refuses(paths, path)) {
    FUZZ_CHECK(refuses(paths, path));
    paths.rollback(mark);
    FUZZ_CHECK(!refuses(paths, path));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string_view input(reinterpret_cast<const char*>(data), size);
  PathSet paths;
  while (!input.empty()) {
    const size_t line = input.find('\n');
    check_name(paths, input.substr(0, line));
    if (line == std::string_view::npos) break;
    input.remove_prefix(line + 1);
  }
  return 0;
}
