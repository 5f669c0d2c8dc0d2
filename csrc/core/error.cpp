#include "core/error.h"

#include <system_error>

namespace tensorizer {

void throw_errno(const std::string& operation, const std::string& object, int err) {
  const Errc code = err == ENOENT   ? Errc::not_found
                    : err == ENOMEM ? Errc::out_of_memory
                                    : Errc::io;
  Error error(code, operation + " " + object + ": " + std::generic_category().message(err), object);
  error.system_errno = err;
  throw error;
}

}  // namespace tensorizer
