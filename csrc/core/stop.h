// What a task does when it notices that it was asked to stop.
#pragma once

#include <stop_token>

#include "core/error.h"

namespace tensorizer {

inline void throw_if_stopped(const std::stop_token& stop) {
  if (stop.stop_requested()) throw Error(Errc::cancelled, "cancelled");
}

}  // namespace tensorizer
