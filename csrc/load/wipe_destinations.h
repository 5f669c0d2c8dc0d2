// What is left of a load of an encrypted file that failed: nothing.
#pragma once

#include "load/load_session.h"

namespace tensorizer::load {

// When all workers are gone: overwrites whatever the session put into its destinations, on a device
// as far as it still takes orders. Does nothing for a file in clear.
void wipe_destinations(LoadSession& session) noexcept;

}  // namespace tensorizer::load
