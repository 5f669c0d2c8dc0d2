// Runs loads: one, or several at once, of any sources to any devices.
//
// Loads to devices share one order of units and one pool of workers, so that every device has
// copies to do and every store requests, whichever of them is slow. Destinations are allocated
// while the workers read: a worker waits for memory once it has something for it. A load to host
// memory, and one of a source that has to be read in its order, has workers of its own.
#pragma once

#include <functional>
#include <span>
#include <stop_token>

#include "load/load_session.h"

namespace tensorizer::load {

// Has `work` run on the thread that waits for the loads, where memory is allocated, and waits for
// its end; empty: it runs here. Throws what `work` throws.
using OnCaller = std::function<void(const std::function<void()>& work)>;

// Loads everything or throws the first failure, which stops all: malformed, truncated,
// hash_mismatch, crypto, io, device, cancelled. At most `at_once` of those that have workers of
// their own run at a time. Returns only when no worker can touch a destination any more.
void run_loads(std::span<LoadSession* const> sessions, unsigned at_once, const OnCaller& on_caller,
               const std::stop_token& stop);

}  // namespace tensorizer::load
